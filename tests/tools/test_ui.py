"""What the page stands on, without a browser: wishes, the studio, who gets in."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import mostly_alike
from PIL import Image
from pipelines import whole_pipeline

import tomadiff
from tomadiff import settings_file
from tomadiff.runtime.registration import denoiser, session_of
from tomadiff.tools.evaluate.pictures import as_tensor, open_picture
from tomadiff.tools.generate import draw
from tomadiff.tools.ui import show
from tomadiff.tools.ui.command import check_access
from tomadiff.tools.ui.generation import OFFERED, GenerationRequest, Limits, checked, checked_model, code
from tomadiff.tools.ui.results import Kept
from tomadiff.tools.ui.runner import Cancelled
from tomadiff.tools.ui.studio import Studio

FORM: dict[str, Any] = {"prompt": "fox", "seed": 1, "steps": 2, "height": 64, "width": 64}


def quiet(share: float, text: str) -> None:
    pass


def same(a: Image.Image, b: Image.Image) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def studio() -> Studio:
    return Studio("emoji-flux", steps=20)


def generation(studio: Studio, **changed: Any) -> GenerationRequest:
    return checked(studio.limits, **{**FORM, **changed})


# wishes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": "x" * 501}, "501 characters; at most 500"),
        ({"prompt": "  "}, "no prompt"),
        ({"prompt": ["fox"]}, "no prompt"),
        ({"steps": 101}, "steps: 101 must be from 1 to 100"),
        ({"steps": 0}, "from 1"),
        ({"steps": 2.5}, "whole number"),
        ({"steps": True}, "must be a number"),
        ({"steps": "9"}, "must be a number"),
        ({"steps": None}, "must be a number"),
        ({"height": 4096}, "height: 4096 must be from 16 to 128"),
        ({"width": 1e12}, "width"),
        ({"width": float("nan")}, "must be a number"),
        ({"seed": -1}, "seed"),
        ({"seed": float("inf")}, "seed"),
        ({"guidance": 1e9}, "guidance"),
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"method": "../../etc/passwd"}, "no method"),
        ({"method": "settings.json"}, "no method"),
        ({"method": "ideal"}, "no method"),
        ({"method": ["toma"]}, "no method"),
        ({"settings": {"where": "everywhere"}}, "none of"),
        ({"settings": {"region_size": 10**9}}, "from 0 to 64"),
        ({"settings": {"scale": 3}}, "no setting"),
        ({"settings": {"region_size": "8x8"}}, "must be a number, or nothing"),
        ({"settings": {"region_size": "nan"}}, "must be a number"),
        ({"guidance": "1e99"}, "guidance"),
        ({"settings": {"x" * 1000: 3}}, "no setting"),
    ],
)
def test_what_is_over_a_limit_is_refused_in_words(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        checked(Limits(side=128), **{**FORM, **changed})
    assert len(str(caught.value)) < 300, "what was sent is not sent back at length"


def test_a_wish_at_the_limits_is_fine() -> None:
    made = checked(Limits(side=128), **{**FORM, "prompt": "x" * 500, "steps": 100.0, "height": 128})
    assert (made.request.steps, made.request.size) == (100, (128, 64))


def test_fields_that_are_left_empty_are_the_methods_own() -> None:
    given = {"region_size": "", "where": None, "dense_blocks": " ", "interval": "4", "shift": True}
    made = checked(Limits(side=128), **FORM, guidance="", settings=given)
    assert made.request.guidance is None and made.settings == {"interval": 4, "shift": True}
    assert made.spec == "tomadiff:interval=4,shift=True"


def test_the_page_may_name_models_but_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret" / "model").mkdir(parents=True)
    for name in ("emoji-flux", "/models/own", "stabilityai/stable-diffusion-xl-base-1.0"):
        assert checked_model(name, own="/models/own") == name
    for name in ("/etc", "..", "../x", "secret/model", "a/../b", "a/b/c", "file:///etc", "", None, ["a/b"]):
        with pytest.raises(ValueError, match="no model for this page"):
            checked_model(name, own="/models/own")


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("tomadiff", {}),
        ("tomadiff", {"where": "block", "shift": True, "region_size": 4}),
        ("toma_once", {"interval": 2}),
        ("tome", {}),
    ],
)
def test_the_code_makes_the_picture_of_the_page(
    method: str, given: dict[str, Any], studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown, drawn = [], []
    for seed in (1, 2):
        wanted = generation(
            studio, method=method, settings=given, guidance=2.0, prompt="the 'fox'", seed=seed
        )
        shown.append(studio.compare(wanted, "me", quiet)[1].merged.picture)
        exec(code(wanted, studio.model, "cpu", "fp32"), {})
        drawn.append(open_picture(tmp_path / "picture.png"))
    assert mostly_alike(as_tensor(drawn), as_tensor(shown), atol=2 / 255), "of a model that was loaded anew"


def test_the_settings_file_makes_the_picture_of_the_page(studio: Studio, tmp_path: Path) -> None:
    _, made = studio.compare(generation(studio, method="toma_tile", ratio=0.25), "me", quiet)
    settings_file.save(tmp_path / "s.json", made.merged.config)
    with tomadiff.merged(studio.pipe, tmp_path / "s.json"):
        assert same(draw(studio.pipe, made.generation.request)[0], made.merged.picture)


def test_code_for_other_models_loads_them_from_where_they_are() -> None:
    text = code(checked(Limits(side=1024), **FORM), "some/model", "cuda", "fp16")
    compile(text, "code", "exec")
    assert "from_pretrained('some/model', dtype=torch.float16).to('cuda')" in text
    text = code(checked(Limits(side=1024), **FORM), "some/model", "cuda", "fp16", "group")
    compile(text, "code", "exec")
    assert "load('some/model', 'cuda', 'fp16', offload='group')" in text


# the studio


def test_dense_and_merged_come_from_the_same_noise(studio: Studio) -> None:
    wanted = generation(studio)
    _, made = studio.compare(wanted, "me", quiet)
    assert same(made.dense.picture, draw(studio.pipe, wanted.request)[0])
    with tomadiff.merged(studio.pipe, ratio=0.5):
        assert same(made.merged.picture, draw(studio.pipe, wanted.request)[0])
    assert (made.merged.kept, made.merged.tokens, made.merged.merged_steps) == (128, 256, 2)
    assert 5 < made.merged.psnr < 60 and 0 < made.merged.ssim < 1
    assert list(made.maps) == [0, 1], "a map for each merged step"


def test_another_ratio_draws_only_the_merged_picture(studio: Studio) -> None:
    told: list[str] = []
    first = studio.compare(generation(studio, seed=7), "me", quiet)[1]
    second = studio.compare(generation(studio, seed=7, ratio=0.75), "me", lambda _, text: told.append(text))[
        1
    ]
    assert not first.dense_was_kept and second.dense_was_kept
    assert second.dense is first.dense and not any(text.startswith("dense") for text in told)
    assert not same(first.merged.picture, second.merged.picture)
    for change in ({"seed": 8}, {"prompt": "pizza"}, {"steps": 3}, {"width": 40}, {"guidance": 2.0}):
        assert not studio.compare(generation(studio, **{"seed": 7, **change}), "me", quiet)[1].dense_was_kept


def test_nothing_removed_is_the_same_picture(studio: Studio) -> None:
    _, made = studio.compare(generation(studio, ratio=0), "me", quiet)
    assert math.isinf(made.merged.psnr) and made.merged.merged_steps == 0
    assert "same" in show.figures(made)


def cancelling(studio: Studio, who: str, at: str) -> Callable[[float, str], None]:
    return lambda share, text: studio.cancel(who) if at in text else None


@pytest.mark.parametrize("at", ["dense: step 2", "tomadiff at 0.5: step 2"])
def test_cancel_stops_at_the_next_step_and_leaves_nothing_behind(at: str, studio: Studio) -> None:
    told: list[str] = []
    wanted = generation(studio, seed=100 + len(at), steps=9)

    def tell(share: float, text: str) -> None:
        told.append(text)
        cancelling(studio, "me", at)(share, text)

    with pytest.raises(Cancelled):
        studio.compare(wanted, "me", tell)
    assert told[-1].startswith(at), "no step after the one in which it was cancelled"
    assert session_of(denoiser(studio.pipe)[0]) is None
    assert studio.compare(wanted, "me", quiet)[1].merged.steps == 9, "and then it works again"


def test_nobody_cancels_what_another_asked_for(studio: Studio) -> None:
    studio.compare(generation(studio, seed=3), "me", cancelling(studio, "somebody else", "step 1"))
    studio.expect("somebody else")


def test_who_cancels_while_waiting_does_not_start(studio: Studio) -> None:
    studio.cancel("me")
    with pytest.raises(Cancelled):
        studio.compare(generation(studio, seed=4), "me", pytest.fail)
    studio.cancel("me")  # of nothing: what is asked for after it is meant
    studio.expect("me")
    studio.compare(generation(studio, seed=4), "me", quiet)


def test_one_generation_at_a_time(studio: Studio) -> None:
    told: list[str] = []

    def work(who: str, seed: int) -> None:
        studio.compare(generation(studio, seed=seed), who, lambda share, text: told.append(who))

    threads = [threading.Thread(target=work, args=(f"{n}", 50 + n)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(a != b for a, b in pairwise(told)) == 2, "nobody was interrupted by another"


def test_a_closed_studio_stops_and_starts_nothing_more() -> None:
    closing = Studio("emoji-flux")
    told: list[str] = []

    def tell(share: float, text: str) -> None:
        told.append(text)
        if text == "dense: step 1 of 9":
            threading.Thread(target=closing.close).start()
            while not closing._stop.is_set():
                pass

    for _ in range(2):
        with pytest.raises(Cancelled):
            closing.compare(generation(closing, steps=9), "me", tell)
    assert told[-1] == "dense: step 1 of 9"


def test_only_the_newest_results_are_kept(studio: Studio) -> None:
    kept: Kept[int] = Kept(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    name, made = studio.compare(generation(studio), "me", quiet)
    assert studio.result(name) is made and studio.result("guessed") is None and studio.result(None) is None


def test_a_mistake_is_found_before_anything_is_drawn(studio: Studio) -> None:
    with pytest.raises(ValueError, match="todo"):
        studio.compare(generation(studio, method="todo", ratio=0.5), "me", pytest.fail)
    with pytest.raises(ValueError, match="region_size"):
        studio.compare(generation(studio, method="tome", settings={"region_size": 4}), "me", pytest.fail)
    with pytest.raises(ValueError, match="at most 24"):
        studio.sweep(generation(studio), OFFERED[:7], [n / 10 for n in range(1, 8)], "me", pytest.fail)


def test_stripes_have_no_map_and_say_so(studio: Studio) -> None:
    _, made = studio.compare(generation(studio, method="toma_stripe"), "me", quiet)
    assert not made.maps and "needs a grid" in made.no_maps


def test_any_pipeline_in_a_folder_can_be_looked_at(tmp_path: Path) -> None:
    folder = str(whole_pipeline(tmp_path))
    taken = Studio(folder)
    assert (taken.usual_size, taken.usual_steps, taken.limits.side) == ((128, 128), 50, 256)
    _, made = taken.compare(generation(taken, height=128, width=96), "me", quiet)
    assert made.merged.picture.size == (96, 128)
    assert (made.merged.merged_steps, list(made.maps)) == (2, [0, 1]), "guidance calls the model once a step"
    taken.use_model("emoji-flux", "me")
    assert (taken.model, taken.limits.side, taken.own_model) == ("emoji-flux", 256, folder)
    assert taken.compare(generation(taken), "me", quiet)[1].merged.tokens == 256


def test_a_model_that_can_not_be_had_leaves_the_old_one(studio: Studio) -> None:
    with pytest.raises(ValueError, match="can't load"):
        studio.use_model("nobody/nothing", "me")
    assert studio.model == "emoji-flux"
    studio.compare(generation(studio), "me", quiet)


# what is shown


def test_a_sweep_as_sheet_and_plot(studio: Studio, tmp_path: Path) -> None:
    name, swept = studio.sweep(generation(studio), ["tomadiff", "todo"], [0.5, 0.75], "me", quiet)
    assert list(swept.cells) == [("tomadiff", 0.5), ("tomadiff", 0.75), ("todo", 0.75)]
    assert len(swept.left_out) == 1 and swept.left_out[0].startswith("todo at 0.5")
    exports = show.Exports(tmp_path)
    path = exports.sheet(name, swept, studio.model)
    with Image.open(path) as sheet:
        about = json.loads(sheet.text["tomadiff"])
        assert sheet.width > 3 * 128 and sheet.height > 2 * 128
    assert about["cells"]["tomadiff at 0.75"]["ratio"] == 0.75
    show.plot(swept, show.title(swept.generation.request, studio.model), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.width > 500


def test_the_words_of_a_map_are_true(studio: Studio) -> None:
    _, made = studio.compare(generation(studio), "me", quiet)
    mapped = made.maps[0]
    for token in (0, 37, 255):
        owner = mapped.owners[token].item()
        others = int((mapped.owners == owner).sum()) - 1
        text = show.about_map(mapped, 2, token)
        assert f"The token at row {token // 16 + 1}, column {token % 16 + 1}" in text
        if owner == token:
            assert f"is a destination, to which {others or 'no'} other" in text
        else:
            place = f"row {owner // 16 + 1}, column {owner % 16 + 1}"
            assert f"went to {place}; that group has {others + 1} tokens" in text
    assert "256 tokens on a grid of 16 x 16 went to 128 destinations" in text


def test_text_of_others_is_no_markup() -> None:
    assert "<script>" not in show.message("<script>alert(1)</script>", "mistake")
    assert 'role="alert"' in show.message("no", "mistake") and 'role="status"' in show.message("yes")


def test_exports_do_not_fill_the_disk(tmp_path: Path) -> None:
    exports = show.Exports(tmp_path)
    for number in range(show.MAX_EXPORTS + 5):
        exports.path(f"{number}.json").write_text("{}")
    assert len(list(tmp_path.iterdir())) == show.MAX_EXPORTS
    assert (tmp_path / f"{show.MAX_EXPORTS + 4}.json").exists()


def test_comparisons_share_the_dense_one_with_sweeps(studio: Studio) -> None:
    _, swept = studio.sweep(generation(studio, seed=90), ["tomadiff"], [0.5], "me", quiet)
    _, made = studio.compare(replace(generation(studio, seed=90), ratio=0.25), "me", quiet)
    assert made.dense is swept.dense


# who gets in


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_this_machine_needs_no_password(host: str) -> None:
    assert check_access(host, None, False) is None
    assert check_access(host, "a:b:c", False) == ("a", "b:c")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "", "127.0.0.1.example.org"])
def test_other_machines_need_a_password_or_somebody_who_says_that_they_do_not(host: str) -> None:
    with pytest.raises(ValueError, match="--auth user:password, or --no-auth"):
        check_access(host, None, False)
    assert check_access(host, "me:secret", False) == ("me", "secret")
    assert check_access(host, None, True) is None


@pytest.mark.parametrize("auth", ["", "me", "me:", ":secret"])
def test_a_password_that_is_none_is_refused(auth: str) -> None:
    with pytest.raises(ValueError, match="user:password"):
        check_access("0.0.0.0", auth, False)


def test_the_command_refuses_before_it_loads_anything(capsys: pytest.CaptureFixture[str]) -> None:
    from tomadiff.tools.cli import main

    assert main(["ui", "--host", "0.0.0.0", "--model", "nobody/nothing"]) == 2
    assert "--no-auth" in capsys.readouterr().err
    assert main(["ui", "--auth", "a:b", "--no-auth"]) == 2
    assert main(["ui", "--max-steps", "0"]) == 2
    assert main(["ui", "--port", "70000"]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        capsys.readouterr()
        assert main(["ui", "--port", str(port), "--model", "nobody/nothing"]) == 2
    assert f"port {port} is taken; choose another with --port" in capsys.readouterr().err


def test_only_what_the_page_needs_gets_through_the_gate(tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="pip install 'tomadiff[ui]'")
    from starlette.testclient import TestClient

    from tomadiff.tools.ui.allowlist import MAX_BYTES, AllowlistMiddleware

    async def everything(scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        await PlainTextResponse("in")(scope, receive, send)

    inside, outside = tmp_path / "out", tmp_path / "secret.txt"
    inside.mkdir()
    (inside / "a.png").write_text("a")
    outside.write_text("b")
    (inside / "link.png").symlink_to(outside)
    expected = {"known"}.__contains__
    client = TestClient(AllowlistMiddleware(everything, [inside], expected), base_url="http://127.0.0.1")

    def got(path: str, method: str = "GET", **more: Any) -> int:
        return client.request(method, path, **more).status_code

    answers = "/gradio_api/queue/data"
    for path in (
        *("/", "/config", "/assets/x.js", f"/gradio_api/file={inside}/a.png"),
        *(f"{answers}?session_hash=known", f"{answers}?session_hash=x&session_hash=known"),
    ):
        assert got(path) == 200, path
    for path in (
        *(f"/gradio_api/file={outside}", f"/gradio_api/file={inside}/link.png"),
        *(f"/gradio_api/file={inside}/%2e%2e/secret.txt", "/gradio_api/file=a.png"),
        *("/gradio_api/file=http://127.0.0.1/x", "/gradio_api/proxy=http://127.0.0.1/x", "/docs"),
        *("/gradio_api/run-history/buckets", "/monitoring", "/gradio_api/deep_link", "/assets/%2e%2e/x"),
        *(f"/assets/{'a' * 5000}", "/static/%00", f"/gradio_api/file={inside}/{'a' * 5000}"),
        *(answers, f"{answers}?session_hash=unknown", f"{answers}?session_hash=known&session_hash=x"),
    ):
        assert got(path) == 404, path
    join = "/gradio_api/queue/join"
    assert got(join, "POST", json={"data": []}) == 200
    assert got(join, "POST", content=b"x" * (MAX_BYTES + 1)) == 413
    assert got(join, "POST", content=iter([b"x"])) == 413, "of a length that is not said"
    assert got(join, "POST", json={}, headers={"origin": "http://evil.example"}) == 403
    assert got(join, "POST", json={}, headers={"origin": "http://127.0.0.1"}) == 200
    for path in (
        "/gradio_api/upload",
        "/upload",
        "/gradio_api/component_server",
        "/gradio_api/process_recording",
    ):
        assert got(path, "POST", files={"files": b"x"}) == 404, path
    assert got("/config", "DELETE") == 404
