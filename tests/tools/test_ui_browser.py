"""The page in a real browser, on a real server: `tomadiff ui` as a user starts it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tomadiff import settings_file
from tomadiff.tools.ui.studio import Studio

if find_spec("gradio") is None:
    pytest.skip("pip install 'tomadiff[ui]'", allow_module_level=True)
api = pytest.importorskip("playwright.sync_api", reason="pip install 'tomadiff[test]'")
import httpx  # noqa: E402

PATIENCE = 600_000  # milliseconds, for machines that are busy
api.expect.set_options(timeout=PATIENCE)
DONE, MISTAKE = "#message .note:has-text('Done')", "#message .mistake"
HANDLE = "#before-after [role=slider]"


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
    pytest.skip("no Chromium to test the page in: `make browser` installs one")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-background-networking"]
        running = playwright.chromium.launch(executable_path=chromium(), args=arguments, timeout=PATIENCE)
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that was started as users start it, and that ends when it is told to."""
    command = [sys.executable, "-m", "tomadiff.tools.cli", "ui", "--threads", "1", "--max-steps", "600"]
    log = tmp_path_factory.mktemp("ui") / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ))
    try:
        for _ in range(2 * PATIENCE // 100):
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            if found or server.poll() is not None:
                break
            time.sleep(0.1)
        assert found, log.read_text()
        yield found[0]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE / 1000) == 0
        assert "Traceback" not in log.read_text()
    finally:
        server.kill()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; nothing but its own server may be asked for anything, and nothing may go wrong in it."""
    contexts, strangers, mistakes = [], [], []

    def open_page(address: str, **more: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **more})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: strangers.append(request.url) if foreign(request.url) else None)
        page.on("pageerror", lambda error: mistakes.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#generate, button:has-text('Login')")
        return page

    def foreign(url: str) -> bool:
        return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))

    yield open_page
    for context in contexts:
        context.close()
    assert not strangers and not mistakes


def generate(page: Any, steps: int = 2, **filled: str) -> None:
    for name, value in {"steps": str(steps), **filled}.items():
        page.fill(f"#{name} :is(input, textarea)", value)
    page.click("#generate")


def finish(page: Any) -> None:
    page.wait_for_selector(f"{DONE}, {MISTAKE}")
    assert page.locator(DONE).count(), page.inner_text("#message")


def source(page: Any, picture: str) -> str:
    return page.locator(f"#{picture} img").first.get_attribute("src")


def show_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def test_generate_compare_and_look_where_tokens_went(address: str, visit: Callable[..., Any]) -> None:
    page = visit(address)
    page.click("#settings > button")
    for part in ("destinations", "weights"):  # a new plan for each step
        page.fill(f"#setting-refresh_{part} :is(input, textarea)", "1")
    generate(page, steps=3)
    finish(page)
    figures = page.inner_text("#figures")
    assert re.search(r"\d\.\d\dx", figures) and re.search(r"512\s+of 1024", figures)
    assert re.search(r"\d+\.\d dB", figures) and re.search(r"0\.\d{3}", figures)
    assert source(page, "dense") != source(page, "merged") != source(page, "heat")
    assert re.search(r"brightest: \d+ of 255", page.inner_text("#heat"))

    cut = page.locator("#before-after img").nth(1)
    page.wait_for_selector(HANDLE)
    before = cut.get_attribute("style")
    page.hover(HANDLE)  # once it stands still
    box = page.locator(HANDLE).bounding_box()
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    api.expect(cut).not_to_have_attribute("style", before)  # the slider follows the mouse
    page.focus(HANDLE)
    page.keyboard.press("Home")
    api.expect(cut).to_have_attribute("style", re.compile(r"inset\(0px 0px 0px 0%\)"))
    assert page.locator(HANDLE).get_attribute("aria-valuenow") == "0", "and the keyboard"

    show_tab(page, "Merge map")
    api.expect(page.locator("#about-map")).to_contain_text("Step 1 of 3")
    first = source(page, "map")
    page.focus("#map-step input[type=range]")
    page.keyboard.press("ArrowRight")
    api.expect(page.locator("#about-map")).to_contain_text("Step 2 of 3")
    api.expect(page.locator("#map img").first).not_to_have_attribute("src", first)
    late: list[Any] = []  # an answer that comes after that to a later click must not undo it
    page.route("**/run/predict*", lambda route: late.append(route), times=1)
    page.locator("#map-colours label").nth(1).click()
    page.locator("#map img").first.click(position={"x": 100, "y": 50})
    api.expect(page.locator("#map-column input")).not_to_have_value("")
    with page.expect_response("**/run/predict*"):
        late[0].continue_()
    api.expect(page.locator("#about-map")).to_contain_text("The token at row")
    row, column = (page.input_value(f"#map-{name} input") for name in ("row", "column"))
    scale = page.locator("#map img").first.bounding_box()["width"] / 32
    assert (int(row), int(column)) == (50 // scale + 1, 100 // scale + 1)
    page.fill("#map-row input", "32")
    api.expect(page.locator("#about-map")).to_contain_text(f"The token at row 32, column {column}")


def test_another_ratio_needs_no_new_dense_picture_and_the_code_says_what_is_shown(
    address: str, visit: Callable[..., Any]
) -> None:
    page = visit(address)
    generate(page, seed="5")
    finish(page)
    dense, merged = source(page, "dense"), source(page, "merged")
    page.fill("#ratio input[type=number]", "0.75")
    page.focus("#prompt :is(input, textarea)")
    page.keyboard.press("Enter")  # as good as the button
    api.expect(page.locator("#figures")).to_contain_text("from before")
    assert source(page, "dense") == dense and source(page, "merged") != merged
    show_tab(page, "Code")
    api.expect(page.locator("#python")).to_contain_text("tomadiff.apply(pipe, ratio=0.75)")
    api.expect(page.locator("#settings-text")).to_contain_text('"ratio": 0.75')


def test_cancel_stops_and_the_page_goes_on(address: str, visit: Callable[..., Any]) -> None:
    page = visit(address)
    generate(page, steps=600)  # more than are done before a busy browser cancels
    page.wait_for_selector("#message :text('of 600')")  # progress is told
    page.click("#cancel")
    api.expect(page.locator("#message .note")).to_have_text("Cancelled.")
    assert page.locator("text=Error").count() == 0
    page.click("#cancel")  # of nothing
    generate(page)
    finish(page)


@pytest.mark.parametrize(
    ("filled", "said"),
    [
        ({"prompt": "foxx"}, "foxx' (near: fox"),
        ({"steps": "601"}, "steps: 601 must be from 1 to 600"),
        ({"seed": "-1"}, "seed"),
    ],
)
def test_a_mistake_is_a_message(
    filled: dict[str, str], said: str, address: str, visit: Callable[..., Any]
) -> None:
    page = visit(address)
    generate(page, **filled)
    api.expect(page.locator(MISTAKE)).to_contain_text(said)
    assert page.locator(MISTAKE).get_attribute("role") == "alert"
    assert page.locator("text=/Traceback|^Error$/").count() == 0


def test_a_sweep_and_what_can_be_taken_away(address: str, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(address)
    page.fill("#steps input", "2")
    show_tab(page, "Sweep")
    for ratio in ("0.25", "0.5"):
        page.locator("#sweep-ratios").get_by_label(ratio, exact=True).uncheck()
    page.locator("#sweep-methods").get_by_label("ToDo (75%)").check()
    page.click("#run-sweep")
    page.wait_for_selector("#sheet img")
    page.wait_for_selector("#plot img")
    api.expect(page.locator("#message .note")).to_have_text("Done: 3 pictures, and the dense one.")
    for name, ending in (("sheet-file", ".png"), ("plot-file", ".png"), ("settings-file", ".json")):
        with page.expect_download() as download:
            page.click(f"#{name}")
        download.value.save_as(tmp_path / f"{name}{ending}")
    assert settings_file.load(tmp_path / "settings-file.json").config.ratio == 0.75
    assert (tmp_path / "sheet-file.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [1280, 390])
def test_everything_fits(width: int, address: str, visit: Callable[..., Any]) -> None:
    page = visit(address, viewport={"width": width, "height": 800}, has_touch=width < 800)
    for tab in ("Compare", "Merge map", "Sweep", "Code"):
        show_tab(page, tab)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width, tab
    assert page.locator("#generate").bounding_box()["y"] < 760


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(scheme: str, address: str, visit: Callable[..., Any]) -> None:
    page = visit(address, color_scheme=scheme)
    paper = luminance(page, "body", "backgroundColor")
    assert (paper < 0.1) == (scheme == "dark")
    for text in (".figures dt", ".figures small", "#heading p", "#message .message", "#ratio label span"):
        assert contrast(luminance(page, text, "color"), paper) >= 4.5, text
    button = [luminance(page, "#generate", part) for part in ("color", "backgroundColor")]
    assert contrast(*button) >= 4.5


def luminance(page: Any, selector: str, part: str) -> float:
    """As WCAG has it; through a canvas, which knows every way of writing a colour."""
    pixel = page.eval_on_selector(
        selector,
        """(element, part) => {
            const pen = document.createElement("canvas").getContext("2d");
            pen.fillStyle = getComputedStyle(element)[part];
            pen.fillRect(0, 0, 1, 1);
            return Array.from(pen.getImageData(0, 0, 1, 1).data);
        }""",
        part,
    )
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in pixel[:3])
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def test_the_keyboard_reaches_everything(address: str, visit: Callable[..., Any]) -> None:
    page = visit(address)
    generate(page)
    finish(page)
    page.focus("#prompt :is(input, textarea)")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('[id]:not(input)')?.id"))
        if page.evaluate("document.activeElement.getAttribute('role')") == "slider":
            reached.add("slider")
    assert reached >= {"ratio", "method", "seed", "steps", "settings", "generate", "cancel", "slider"}


# what gets past the page, straight to the server


def client_of(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=PATIENCE / 1000)


def asking(client: httpx.Client, api_name: str) -> dict[str, Any]:
    """What the page would send, with the values that it starts with."""
    config = client.get("/config").json()
    function = next(part for part in config["dependencies"] if part["api_name"] == api_name)
    values = {part["id"]: part["props"].get("value") for part in config["components"]}
    data = [values[number] for number in function["inputs"]]
    return {"data": data, "fn_index": function["id"], "session_hash": "script"}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [(0, "x" * 501, "at most 500"), (2, 601, "from 1 to 600"), (3, 1024, "from 16 to 256")],
)
def test_limits_hold_for_scripts_too(place: int, value: Any, said: str, address: str) -> None:
    with client_of(address) as client:
        body = asking(client, "generate")
        body["data"][place] = value
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
        with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "script"}) as lines:
            answer = next(line for line in lines.iter_lines() if '"process_completed"' in line)
    assert said in answer and "mistake" in answer


def test_nothing_can_be_uploaded_and_no_other_file_be_read(address: str) -> None:
    with client_of(address) as client:
        assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 404
        for path in ("/etc/passwd", __file__, "http://127.0.0.1:1/x"):
            assert client.get(f"/gradio_api/file={path}").status_code == 404
        assert client.get("/config", headers={"host": "evil.example"}).status_code == 400


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Studio]]:
    """A second server, in this process: with a password, room for one to wait, and a choice of models."""
    from tomadiff.tools.ui.page import build
    from tomadiff.tools.ui.server import launch

    folder = tmp_path_factory.mktemp("guarded")
    studio = Studio("emoji-flux")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        blocks = build(studio, folder, allow_models=True)
        url = launch(
            blocks,
            folder,
            host="127.0.0.1",
            port=None,
            auth=("me", "secret"),
            max_queue=1,
            only_here=True,
        )
        yield url.rstrip("/"), studio
        blocks.close(verbose=False)


def test_nobody_gets_in_without_the_password_nor_names_a_folder_then(
    guarded: tuple[str, Studio], visit: Callable[..., Any]
) -> None:
    address, studio = guarded
    with client_of(address) as client:
        for path in ("/config", "/gradio_api/info", "/gradio_api/queue/data?session_hash=x"):
            assert client.get(path).status_code == 401, path
        body = {"data": [], "fn_index": 0, "session_hash": "x"}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 401
    page = visit(address)
    assert page.locator("#generate").count() == 0
    for password in ("wrong", "secret"):
        page.get_by_label("username").fill("me")
        page.get_by_label("password").fill(password)
        page.get_by_role("button", name="Login").click()
        if password == "wrong":
            api.expect(page.get_by_text("Incorrect")).to_be_visible()
    page.wait_for_selector("#generate")
    choose_model(page, "/etc")
    api.expect(page.locator(MISTAKE)).to_contain_text("'/etc' is no model for this page")
    choose_model(page, "emoji-unet")
    api.expect(page.locator("#message .note")).to_have_text("Ready: emoji-unet.")
    assert "emoji-unet" in page.inner_text("#heading") and studio.model == "emoji-unet"


def choose_model(page: Any, name: str) -> None:
    page.fill("#model input", name)
    page.keyboard.press("Enter")


def test_the_queue_is_bounded(guarded: tuple[str, Studio]) -> None:
    address, studio = guarded
    with client_of(address) as client:
        client.post("/login", data={"username": "me", "password": "secret"})
        body = asking(client, "generate")
        with studio._alone:  # as if a picture were being made
            answers = [
                client.post("/gradio_api/queue/join", json=body | {"session_hash": f"{n}"}) for n in range(6)
            ]
            for n in range(6):  # enough seen
                studio.cancel(f"{n}")
        codes = [answer.status_code for answer in answers]
    assert codes[0] == 200 and codes[-1] == 503, codes
    assert "full" in answers[-1].text


# pictures for the documentation


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_screenshots(look: str, request: pytest.FixtureRequest) -> None:
    """`pytest tests/tools/test_ui_browser.py -k screenshots --screenshots docs/pictures` writes them."""
    folder = request.config.getoption("--screenshots")
    visit, address = request.getfixturevalue("visit"), request.getfixturevalue("address")
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
    page = visit(address, **(phone if look == "phone" else {"color_scheme": look}))
    whole = {"full_page": look == "phone", "animations": "disabled"}

    def shoot(name: str) -> None:
        page.mouse.move(0, 0)
        page.wait_for_function("[...document.images].every(image => image.complete)")
        page.wait_for_timeout(500)
        page.screenshot(path=Path(folder) / f"ui-{name}-{look}.png", **whole)

    generate(page, steps=24)
    finish(page)
    page.wait_for_selector(HANDLE)
    shoot("compare")
    show_tab(page, "Merge map")
    page.locator("#map img").first.click(position={"x": 150, "y": 90})
    api.expect(page.locator("#about-map")).to_contain_text("The token at row")
    shoot("map")
    if look == "phone":
        return
    show_tab(page, "Sweep")
    page.click("#run-sweep")
    page.wait_for_selector("#plot img", timeout=PATIENCE)
    whole["full_page"] = True
    shoot("sweep")
    whole["full_page"] = False
    show_tab(page, "Code")
    shoot("code")
