"""Let only those requests through that the page itself needs, whatever else Gradio offers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, QueryParams
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tomadiff.runtime.files import parse_json

from .listeners import Listeners
from .results import Kept

API = "/gradio_api"
READ = {
    *("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt", "/logout"),
    *(f"{API}/{name}" for name in ("queue/data", "startup-events", "info", "app_id", "user", "token")),
    *(f"{API}/{name}" for name in ("login_check", "theme.css")),
}
READ_BELOW = ("/assets/", "/static/", "/svelte/", f"{API}/heartbeat/")
FILE = f"{API}/file="
WRITE = {"/login", *(f"{API}/{name}" for name in ("queue/join", "cancel", "reset", "run/predict"))}
MAX_BYTES = 64 * 1024  # largest body of a request; there are no uploads
MAX_PATH = 255  # characters: the names of the page's own files and sessions are short
NOTHING = ("There is no such thing here.", 404)

ANSWERS, HEARTBEAT, JOIN, LOGIN = f"{API}/queue/data", f"{API}/heartbeat/", f"{API}/queue/join", "/login"
LOGIN_CHECK = f"{API}/login_check"
MAX_GUESSES, GUESS_SECONDS = 10, 60.0  # wrong passwords from one address, within these seconds
DELAY = 1.0  # seconds before a wrong password is answered


class AllowlistMiddleware:
    """ASGI middleware around the whole server: no uploads, no proxying, no file from outside some folders.

    expected: whether answers wait for a session. Gradio fails in the middle of an answer to any other.
    """

    def __init__(
        self,
        app: ASGIApp,
        folders: Sequence[Path],
        expected: Callable[[str], bool],
        listeners: Listeners | None = None,
    ) -> None:
        self.app, self.folders, self.expected = app, [folder.resolve() for folder in folders], expected
        self.listeners, self.guesses = listeners or Listeners(), Guesses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websocket is needed
        asks = (scope["method"], scope["path"].rstrip("/") or "/")
        refusal = self._refusal(scope, *asks)
        if refusal is not None:
            await PlainTextResponse(*refusal)(scope, receive, send)
        elif asks == ("GET", ANSWERS) and not self.expected(_session(scope)):
            await self.app({**scope, "path": LOGIN_CHECK}, receive, _nothing_if_let_in(scope, receive, send))
        elif session := _listens(scope, *asks):
            with self.listeners.listening(session):
                await self.app(scope, receive, send)
        elif asks == ("POST", LOGIN):
            await self.app(scope, receive, self.guesses.watching(_address(scope), send))
        elif asks == ("POST", JOIN):
            await self.app(scope, self._noting_who_asks(receive), send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, method: str, path: str) -> tuple[str, int] | None:
        if not self._allowed(method, path):
            return NOTHING
        if method != "POST":
            return None
        if not _from_here(scope):
            return "Another site can't use this page.", 403
        if not _small(scope):
            return f"A request has at most {MAX_BYTES} bytes.", 413
        if path == LOGIN and self.guesses.too_many(_address(scope)):
            return "Too many wrong passwords: wait a minute.", 429
        return None

    def _noting_who_asks(self, receive: Receive) -> Receive:
        body = b""

        async def noting() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body"):
                self.listeners.saw(_session_in(body))
            return message

        return noting

    def _allowed(self, method: str, path: str) -> bool:
        if method in ("GET", "HEAD"):
            if path.startswith(FILE):
                return self._inside(path.removeprefix(FILE))
            below = path.startswith(READ_BELOW) and ".." not in path and path.isprintable()
            return path in READ or (below and len(path) <= MAX_PATH)
        return method == "POST" and path in WRITE

    def _inside(self, path: str) -> bool:
        try:
            found = Path(path).resolve()
            there = Path(path).is_absolute() and found.is_file()
        except (OSError, ValueError):  # a loop of links, a name too long, a zero byte
            return False
        return there and any(found.is_relative_to(folder) for folder in self.folders)


class Guesses:
    """Wrong passwords by address: each is answered late and logged; too many lock the address out."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.now, self.sleep = now, sleep
        self._wrong: Kept[deque[float]] = Kept(1024)

    def too_many(self, address: str) -> bool:
        times = self._wrong.get(address) or deque()
        return len(times) == MAX_GUESSES and self.now() - times[0] < GUESS_SECONDS

    def watching(self, address: str, send: Send) -> Send:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 400:
                times = self._wrong.get(address) or deque(maxlen=MAX_GUESSES)
                times.append(self.now())
                self._wrong.put(address, times)
                print(f"tomadiff ui: wrong user or password from {address}", file=sys.stderr, flush=True)
                await self.sleep(DELAY)
            await send(message)

        return watched


def _nothing_if_let_in(scope: Scope, receive: Receive, send: Send) -> Send:
    """Instead of the answer to LOGIN_CHECK, unless it says that one has to log in first."""
    let_in = False

    async def replaced(message: Message) -> None:
        nonlocal let_in
        if message["type"] == "http.response.start" and message["status"] == 200:
            let_in = True
            await PlainTextResponse(*NOTHING)(scope, receive, send)
        elif not let_in:
            await send(message)

    return replaced


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "somewhere"


def _listens(scope: Scope, method: str, path: str) -> str:
    """The session for which a request opens a stream of answers or heartbeats; empty if it doesn't."""
    if method != "GET":
        return ""
    if path == ANSWERS:
        return _session(scope)
    return path.removeprefix(HEARTBEAT) if path.startswith(HEARTBEAT) else ""


def _session(scope: Scope) -> str:
    """The session whose answers a request asks for; of several, the last one, as Gradio takes it."""
    return QueryParams(scope["query_string"]).get("session_hash", "")


def _session_in(body: bytes) -> str:
    try:
        content = parse_json(body)
    except ValueError:
        return ""
    return str(content.get("session_hash", "")) if isinstance(content, dict) else ""


def _small(scope: Scope) -> bool:
    """Whether the declared length is within the limit; the server enforces the declared length."""
    length = Headers(scope=scope).get("content-length", "")
    return length.isdecimal() and int(length) <= MAX_BYTES


def _from_here(scope: Scope) -> bool:
    """Whether a request comes from our own page: browsers send the origin, other programs don't."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:  # an incomplete address
        return False
