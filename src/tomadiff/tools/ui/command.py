"""`tomadiff ui`: the page, served on this machine."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import torch

from tomadiff.tools.loading import check_offload, check_threads

from .listeners import Listeners
from .studio import Studio


def run(args: argparse.Namespace) -> None:
    """`tomadiff ui`."""
    auth = check_access(args.host, args.auth, args.no_auth)
    check_threads(args.threads)
    check_offload(args.offload, args.device)
    for name in ("max_size", "max_steps", "max_queue"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.port is not None:
        check_port(args.host, args.port)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="tomadiff-ui-") as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        serve(args, folder.resolve(), auth)


def serve(args: argparse.Namespace, folder: Path, auth: tuple[str, str] | None) -> None:
    # read when Gradio is imported: no analytics, and its files go into our folder
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "page")
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise ImportError("the page needs Gradio: pip install 'tomadiff[ui]'") from error
    from .page import build
    from .server import launch

    limits = args.max_size, args.max_steps
    studio = Studio(args.model, args.device, args.dtype, *limits, args.trust_remote_code, args.offload)
    studio.listeners = listeners = Listeners()
    blocks = build(studio, folder, args.allow_models)
    url = launch(
        blocks,
        folder,
        host=args.host,
        port=args.port,
        auth=auth,
        max_queue=args.max_queue,
        only_here=is_loopback(args.host),
        listeners=listeners,
        open_browser=args.open,
    )
    print(f"tomadiff ui: {args.model} at {url} (Ctrl-C ends it)", flush=True)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while not ended.wait(1):  # a wait without an end would not hear Ctrl-C on Windows
        pass
    print("tomadiff ui: ended", file=sys.stderr)
    studio.close()
    blocks.close(verbose=False)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_port(host: str, port: int) -> None:
    """Raise if a port is not free, before a model is loaded."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--port {port} must be from 1 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is taken; choose another with --port") from error
        raise ValueError(f"can't listen on port {port} of {host}: {error.strerror}") from error


def check_access(host: str, auth: str | None, no_auth: bool) -> tuple[str, str] | None:
    """User and password, if any. Other machines are let in with these, or with --no-auth."""
    if auth is not None:
        if no_auth:
            raise ValueError("--auth and --no-auth exclude each other")
        user, _, password = auth.partition(":")
        if not user or not password:
            raise ValueError("--auth must be user:password, neither of them empty")
        return user, password
    if not is_loopback(host) and not no_auth:
        raise ValueError(
            f"--host {host} lets other machines in: add --auth user:password, or --no-auth if everybody who "
            "reaches this machine may use it"
        )
    return None
