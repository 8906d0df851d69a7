"""The server of the page, without the parts of Gradio that the page doesn't need."""

from __future__ import annotations

import os
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from . import look, show
from .allowlist import AllowlistMiddleware
from .listeners import Listeners


def launch(
    blocks: gr.Blocks,
    folder: Path,
    *,
    host: str,
    port: int | None,
    auth: tuple[str, str] | None,
    max_queue: int,
    only_here: bool,
    listeners: Listeners | None = None,
    open_browser: bool = False,
) -> str:
    """Serve the page from a background thread; returns its address.

    Of the folder, which may be anybody's, only exports can be read, and pictures, which Gradio keeps.
    """
    served = [Path(os.environ["GRADIO_TEMP_DIR"]), folder / show.EXPORTS]
    # addresses that requests give themselves count for nothing: each guess of a password could have another
    os.environ.setdefault("FORWARDED_ALLOW_IPS", "")

    def expected(session: str) -> bool:
        return session in blocks._queue.pending_messages_per_session

    around = [Middleware(AllowlistMiddleware, folders=served, expected=expected, listeners=listeners)]
    if only_here and auth is None:  # refuse other host names: DNS rebinding
        names = ["localhost", "127.0.0.1", "[::1]", host]
        around.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False))
    # light events, such as slider moves, bypass the queue; drawing waits in it
    blocks.queue(max_size=max_queue, api_open=False, default_concurrency_limit=1)
    _, url, _ = blocks.launch(
        server_name=host,
        server_port=port,
        auth=auth,
        inbrowser=open_browser,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        show_error=False,
        footer_links=[],
        run_history=False,
        allowed_paths=[str(each) for each in served],
        max_file_size=0,
        state_session_capacity=64,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        _frontend=False,  # otherwise Gradio fetches its own page, and fails if a busy machine takes 3 s
        theme=look.theme(),
        css_paths=[look.CSS],
        js=look.SCRIPT.read_text(),
        app_kwargs={"middleware": around, "docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    return url
