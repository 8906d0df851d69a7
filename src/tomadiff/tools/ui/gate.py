"""Who may ask for what: only what the page itself needs gets through, whatever else Gradio offers."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

API = "/gradio_api"
READ = {
    *("/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt", "/logout"),
    *(f"{API}/{name}" for name in ("queue/data", "startup-events", "info", "app_id", "user", "token")),
    *(f"{API}/{name}" for name in ("login_check", "theme.css")),
}
READ_BELOW = ("/assets/", "/static/", "/svelte/", f"{API}/heartbeat/")
FILE = f"{API}/file="
WRITE = {"/login", *(f"{API}/{name}" for name in ("queue/join", "cancel", "reset", "run/predict"))}
MOST_BYTES = 64 * 1024  # of a request; there are no uploads


class Gate:
    """Around the whole server. No uploads, no proxying, no file from outside one folder."""

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self.app, self.folder = app, folder.resolve()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websocket is needed
        if not self._allowed(scope["method"], scope["path"]):
            await PlainTextResponse("There is no such thing here.", 404)(scope, receive, send)
        elif scope["method"] == "POST" and not _from_here(scope):
            await PlainTextResponse("Another site can't use this page.", 403)(scope, receive, send)
        elif scope["method"] == "POST" and not _small(scope):
            await PlainTextResponse(f"A request has at most {MOST_BYTES} bytes.", 413)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _allowed(self, method: str, path: str) -> bool:
        path = path.rstrip("/") or "/"
        if method in ("GET", "HEAD"):
            if path.startswith(FILE):
                return self._inside(path.removeprefix(FILE))
            return path in READ or (path.startswith(READ_BELOW) and ".." not in path)
        return method == "POST" and path in WRITE

    def _inside(self, path: str) -> bool:
        try:
            found = Path(path).resolve()
        except (OSError, ValueError):  # a loop of links, a zero byte
            return False
        return Path(path).is_absolute() and found.is_relative_to(self.folder)


def _small(scope: Scope) -> bool:
    """The length must be said beforehand; the server holds everybody to what they said."""
    length = Headers(scope=scope).get("content-length", "")
    return length.isdecimal() and int(length) <= MOST_BYTES


def _from_here(scope: Scope) -> bool:
    """A browser says which site a request comes from; scripts and programs don't."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")
