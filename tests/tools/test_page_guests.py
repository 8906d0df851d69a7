"""Guests of the page: those who are gone, those who guess, and those who only want one step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tomadiff.tools.ui import show
from tomadiff.tools.ui.studio import Studio

if find_spec("gradio") is None:  # importing it takes seconds, of every worker that collects tests
    pytest.skip("pip install 'tomadiff[ui]'", allow_module_level=True)
import httpx
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from tomadiff.tools.ui import allowlist, listeners

PATIENCE = 600.0  # seconds, for machines that are busy
LONG = 1000  # steps
QUEUE = 8


class Guest:
    """Somebody who uses the page by its requests."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self.client, self.name = client, name

    def ask(self, **changed: Any) -> int:
        """For a comparison; the form as it is, but for what is changed."""
        config = self.client.get("/config").json()
        event = next(event for event in config["dependencies"] if event["api_name"] == "generate")
        parts = {part["id"]: part["props"] for part in config["components"]}
        asked = {"height": 32, "width": 32, **changed}
        form = [asked.get(parts[n].get("elem_id"), parts[n].get("value")) for n in event["inputs"]]
        body = {"data": form, "fn_index": event["id"], "session_hash": self.name}
        return self.client.post("/gradio_api/queue/join", json=body).status_code

    def hear(self) -> Iterator[dict[str, Any]]:
        where = {"session_hash": self.name}
        with self.client.stream("GET", "/gradio_api/queue/data", params=where) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))

    def answer(self) -> dict[str, Any]:
        return next(said for said in self.hear() if said["msg"] == "process_completed")


@pytest.fixture(scope="module")
def clock() -> Iterator[list[float]]:
    """Of the page, in seconds: a guest who is slow, as on a busy machine, is not gone until it is moved."""
    with pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr(listeners, "time", SimpleNamespace(monotonic=lambda: now[0]))
        yield now


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, clock: list[float]
) -> Iterator[tuple[Studio, httpx.Client]]:
    from tomadiff.tools.ui.page import build
    from tomadiff.tools.ui.server import launch

    folder = tmp_path_factory.mktemp("page")
    studio = Studio("emoji-flux", steps=LONG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        studio.listeners = listeners.Listeners()
        blocks = build(studio, folder)
        url = launch(
            blocks,
            folder,
            host="127.0.0.1",
            port=None,
            auth=None,
            max_queue=QUEUE,
            only_here=True,
            listeners=studio.listeners,
        )
        with httpx.Client(base_url=url.rstrip("/"), timeout=PATIENCE) as client:
            yield studio, client
        studio.close()
        blocks.close(verbose=False)


def until(done: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_one_step_is_a_picture_too(served: tuple[Studio, httpx.Client]) -> None:
    guest = Guest(served[1], "one step")
    assert guest.ask(steps=1) == 200
    said = guest.answer()
    assert said["success"], said
    assert "Done" in said["output"]["data"][0]


def test_who_does_not_listen_keeps_nobody_waiting(
    served: tuple[Studio, httpx.Client], clock: list[float]
) -> None:
    studio, client = served
    studio._dense.values.clear()
    for number in range(QUEUE + 1):
        Guest(client, f"deaf {number}").ask(steps=LONG, seed=100 + number)
    clock[0] += listeners.GRACE
    honest = Guest(client, "honest")
    until(lambda: honest.ask(steps=2, seed=7) == 200)  # until there is room in the queue
    assert honest.answer()["success"]
    drawn = [request.seed for _, request in studio._dense.values]
    assert drawn == [7], "pictures were drawn that nobody waited for"


def test_nothing_is_drawn_for_who_hung_up(served: tuple[Studio, httpx.Client], clock: list[float]) -> None:
    studio, client = served
    guest = Guest(client, "impatient")
    assert guest.ask(steps=LONG, seed=300) == 200
    heard = guest.hear()
    assert any(said["msg"] == "progress" for said in heard)
    assert studio._worker == "impatient"
    heard.close()

    def gone() -> bool:
        clock[0] += listeners.GRACE  # again, as the page notices only after a while that the stream is closed
        return studio._worker is None

    until(gone)
    assert 300 not in [request.seed for _, request in studio._dense.values]


def test_files_of_others_stay_where_exports_go(tmp_path: Path) -> None:
    for number in range(2 * show.MAX_EXPORTS):
        (tmp_path / f"precious-{number}.txt").write_text("mine")
    exports = show.Exports(tmp_path)
    for number in range(show.MAX_EXPORTS + 5):
        exports.path(f"{number}.json").write_text("{}")
    assert len(list(tmp_path.glob("precious-*"))) == 2 * show.MAX_EXPORTS
    assert len(list(tmp_path.glob("*.json"))) == show.MAX_EXPORTS


@pytest.fixture
def behind(tmp_path: Path) -> tuple[allowlist.AllowlistMiddleware, TestClient]:
    """A server that knows the password "right", behind the allowlist."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        await PlainTextResponse("", 200 if b"right" in body else 400)(scope, receive, send)

    made = allowlist.AllowlistMiddleware(application, [tmp_path], set[str]().__contains__)
    return made, TestClient(made, base_url="http://127.0.0.1")


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//[", "http://a]"])
def test_half_an_address_is_another_site(
    origin: str, behind: tuple[allowlist.AllowlistMiddleware, TestClient]
) -> None:
    answer = behind[1].post("/login", content=b"right", headers={"origin": origin})
    assert answer.status_code == 403


@pytest.mark.parametrize("path", ["/login", "/login/"])
def test_passwords_are_not_guessed_fast_nor_in_silence(
    path: str,
    behind: tuple[allowlist.AllowlistMiddleware, TestClient],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, client = behind
    clock, waited = [0.0], []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    made.guesses = allowlist.Guesses(lambda: clock[0], sleep)
    assert client.post(path, content=b"right").status_code == 200 and not waited
    codes = [client.post(path, content=b"wrong").status_code for _ in range(allowlist.MAX_GUESSES)]
    assert codes == [400] * allowlist.MAX_GUESSES and waited == [allowlist.DELAY] * allowlist.MAX_GUESSES
    assert capsys.readouterr().err.count("wrong user or password from testclient") == allowlist.MAX_GUESSES
    assert client.post(path, content=b"right").status_code == 429
    clock[0] += allowlist.GUESS_SECONDS
    assert client.post(path, content=b"right").status_code == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, httpx.Client, httpx.Client]]:
    """A folder with more in it than the page's own, and two guests: one who is in, and one who is not."""
    import gradio as gr

    from tomadiff.tools.ui.server import launch

    folder = tmp_path_factory.mktemp("home")
    for name in ("id_rsa", "exports/sheet.png", "page/picture.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "page"))
        with gr.Blocks() as blocks:
            gr.HTML("a page")
        url = launch(
            blocks,
            folder,
            host="127.0.0.1",
            port=None,
            auth=("me", "secret"),
            max_queue=QUEUE,
            only_here=True,
        )
        many = {"base_url": url.rstrip("/"), "timeout": PATIENCE}
        with httpx.Client(**many) as friend, httpx.Client(**many) as stranger:
            assert friend.post("/login", data={"username": "me", "password": "secret"}).status_code == 200
            yield folder, friend, stranger
        blocks.close(verbose=False)


def test_of_a_folder_only_what_the_page_put_there_is_served(
    guarded: tuple[Path, httpx.Client, httpx.Client],
) -> None:
    folder, friend, stranger = guarded
    for name in ("exports/sheet.png", "page/picture.png"):
        assert friend.get(f"/gradio_api/file={folder / name}").text == name
        assert stranger.get(f"/gradio_api/file={folder / name}").status_code == 401
    for name in ("id_rsa", "exports/../id_rsa", "page/%2e%2e/id_rsa", "exports"):
        assert friend.get(f"/gradio_api/file={folder}/{name}").status_code == 404


def test_what_is_not_there_is_no_error_of_the_server(
    guarded: tuple[Path, httpx.Client, httpx.Client], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, friend, stranger = guarded
    asked = {"session_hash": "unknown"}
    assert friend.get("/gradio_api/queue/data", params=asked).status_code == 404
    assert stranger.get("/gradio_api/queue/data", params=asked).status_code == 401
    for path in ("/assets/" + "a" * 5000, "/static/%00", f"/gradio_api/file={folder}/exports/{'a' * 5000}"):
        assert friend.get(path).status_code == 404, path
    assert "Traceback" not in capfd.readouterr().err


def test_who_guesses_passwords_can_not_say_to_be_another(
    guarded: tuple[Path, httpx.Client, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowlist, "DELAY", 0)
    codes = [
        guarded[2]
        .post(
            "/login",
            data={"username": "me", "password": f"guess {number}"},
            headers={"x-forwarded-for": f"6.6.6.{number}"},
        )
        .status_code
        for number in range(allowlist.MAX_GUESSES + 1)
    ]
    assert codes == [400] * allowlist.MAX_GUESSES + [429]
