"""auto: where merging gains is measured once and kept, and nothing but that decides the picture."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig
from pipelines import bare_call, denoiser, draw, make, shallow
from torch._subclasses.fake_tensor import FakeTensorMode

import tomadiff
from tomadiff.errors import ConfigError
from tomadiff.runtime import autotune
from tomadiff.runtime.timing import Times

STEPS = 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOMADIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "ROUNDS", (1, 1))
    return tmp_path / "cache" / "auto"


@pytest.fixture
def everything_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "LEAST", 0.0)


def measured(caplog: pytest.LogCaptureFixture) -> int:
    """How often, since the last time that this was asked."""
    count = sum("measures where merging gains" in message for message in caplog.messages)
    caplog.clear()
    return count


@pytest.mark.parametrize("settings", [{"shift": True}, {"where": "module"}], ids=str)
def test_where_everything_gains_the_picture_is_that_of_merging_everywhere(
    pipe: DiffusionPipeline, settings: dict[str, Any], everything_gains: None
) -> None:
    tomadiff.apply(pipe, **settings)
    expected = draw(pipe, steps=STEPS)
    counts = tomadiff.report(pipe)
    tomadiff.apply(pipe, ratio="auto", **settings)
    assert torch.equal(draw(pipe, steps=STEPS), expected), "just measured"
    found = tomadiff.report(pipe)
    assert (found.model_calls, found.generations) == (counts.model_calls, counts.generations)
    assert found.refreshes == counts.refreshes and found.sites == counts.sites, "measuring doesn't count"
    assert torch.equal(draw(pipe, steps=STEPS), expected), "known"
    tomadiff.apply(pipe, ratio="auto", **settings)
    assert torch.equal(draw(pipe, steps=STEPS), expected), "from the disk"


def test_where_nothing_gains_the_picture_is_dense_and_the_report_says_so(
    pipe: DiffusionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = draw(pipe, steps=STEPS)
    monkeypatch.setattr(autotune, "LEAST", math.inf)
    tomadiff.apply(pipe, ratio="auto")
    assert torch.equal(draw(pipe, steps=STEPS), expected)
    report = tomadiff.report(pipe)
    assert "Nothing gains here, so all stays dense" in str(report)
    assert {site.calls - site.dense_calls for site in report.sites} == {0}
    json.dumps(report.to_dict())


def test_what_gains_is_merged_and_the_rest_is_dense(folder: Path, everything_gains: None) -> None:
    """The answer on the disk is what holds; here it is changed by hand."""
    pipe = make("sd1")
    tomadiff.apply(pipe, ratio={2: 0.75})
    expected = draw(pipe, steps=STEPS)
    tomadiff.apply(pipe, auto=True, ratio=0.75)
    assert not torch.equal(draw(pipe, steps=STEPS), expected)
    (file,) = folder.iterdir()
    answer = json.loads(file.read_text())
    for part in answer["parts"]:
        part["merge"] = part["level"] == 2
    file.write_text(json.dumps(answer))
    tomadiff.apply(pipe, auto=True, ratio=0.75)
    assert torch.equal(draw(pipe, steps=STEPS), expected)
    text = str(tomadiff.report(pipe))
    assert "block at level 1 left dense" in text and "block at level 2 merged" in text


def test_nothing_is_skipped_while_measuring_beside_forecasts(everything_gains: None, folder: Path) -> None:
    """The model runs as often for it as without them, and the steps that are skipped are the same."""
    pipe, calls, more = make("sd1"), [], []
    pipe.unet.mid_block.register_forward_hook(lambda *_: calls.append(1))
    for interval in (1, 2):
        tomadiff.apply(pipe, ratio=0.5, interval=interval)
        expected = draw(pipe, steps=8)
        steps = tomadiff.report(pipe).steps
        known = len(calls)
        tomadiff.apply(pipe, ratio="auto", interval=interval)
        assert torch.equal(draw(pipe, steps=8), expected) and tomadiff.report(pipe).steps == steps
        more.append(len(calls) - 2 * known)
        calls.clear()
        for file in folder.iterdir():  # to be measured anew
            file.unlink()
    assert steps == {"run": 5, "forecast": 3}
    assert more[0] == more[1] > 0


def test_a_part_gains_if_the_median_of_its_rounds_does() -> None:
    group = ("block", 2)
    rounds = [({group: dense}, {group: merged}) for dense, merged in ((1.0, 0.5), (9.0, 6.0), (2.0, 4.0))]
    part = autotune.compared(group, 3, rounds)
    assert part == autotune.Part("block", 2, 3, 2.0, 4.0, 1.5, True)
    assert not autotune.compared(group, 3, [({group: 1.0}, {group: 0.97})]).merge, (
        "too little to change a picture"
    )


def test_each_situation_is_measured_once(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    pipe = tomadiff.apply(make("sd1"), ratio="auto")
    draw(pipe)
    draw(pipe)
    assert measured(caplog) == 1
    draw(pipe, size=(128, 64))
    draw(pipe, seeds=(0, 1))
    assert measured(caplog) == 2
    tomadiff.apply(pipe, ratio="auto")
    draw(pipe), draw(pipe, size=(128, 64)), draw(pipe, seeds=(0, 1))
    assert measured(caplog) == 0 and len(list(folder.iterdir())) == 3
    tomadiff.apply(pipe, auto=True, ratio=0.75)
    draw(pipe)
    tomadiff.apply(pipe.to(torch.float16), ratio="auto")
    draw(pipe, dtype=torch.float16)
    assert measured(caplog) == 2


def test_of_two_that_measure_at_once_the_first_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, servers beside each other would merge in other places, and draw other pictures."""
    pipes = [tomadiff.apply(make("sd1"), ratio="auto") for _ in range(2)]
    both, measure, write = threading.Barrier(2), autotune.measure, autotune.atomic_write

    def measure_together(*args: Any) -> autotune.Answer:
        answer = measure(*args)
        both.wait()
        return answer

    def write_slowly(*args: Any) -> None:
        time.sleep(0.3)
        write(*args)

    monkeypatch.setattr(autotune, "measure", measure_together)
    monkeypatch.setattr(autotune, "atomic_write", write_slowly)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(draw, pipes))
    first, second = (list(denoiser(pipe)._tomadiff.answers.values()) for pipe in pipes)
    assert first and first == second


@pytest.mark.parametrize("damage", ["torn", "empty", "deep", "stale", "another form", "other sites"])
def test_a_file_that_does_not_hold_is_redone(
    damage: str, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    pipe = tomadiff.apply(make("sd1"), ratio="auto")
    draw(pipe)
    (file,) = folder.iterdir()
    text = file.read_text()
    content = json.loads(text)
    bad = {"torn": text[:-20], "empty": "", "deep": "[" * 100_000}
    bad["stale"] = json.dumps({**content, "about": {**content["about"], "versions": {"torch": "1.0"}}})
    bad["another form"] = json.dumps({**content, "score": 1})
    bad["other sites"] = json.dumps({**content, "parts": content["parts"][:1]})
    file.write_text(bad[damage])
    caplog.clear()
    tomadiff.apply(pipe, ratio="auto")
    draw(pipe)
    assert measured(caplog) == 1
    assert json.loads(file.read_text()).keys() == content.keys()
    tomadiff.apply(pipe, ratio="auto")
    draw(pipe)
    assert measured(caplog) == 0


def test_a_folder_that_can_not_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOMADIFF_CACHE", str(tmp_path / "file"))
    draw(tomadiff.apply(make("sd1"), ratio="auto"))
    assert any("could not be kept" in message for message in caplog.messages)


def test_what_a_model_takes_apart_is_whole_when_it_is_called(everything_gains: None) -> None:
    """An adapter's features come in a list, of which a UNet takes one after the other."""
    model = denoiser(make("sd1"))
    sizes = [(16, 16), (32, 8)]  # channels and side of what the attention of each down block ends with
    call = bare_call(model)

    @torch.no_grad()
    def run() -> torch.Tensor:
        features = [torch.ones(1, channels, side, side) for channels, side in sizes]
        return model(**call, down_intrablock_additional_residuals=features)[0]

    tomadiff.apply(model, ratio=0.5)
    expected = run()
    tomadiff.apply(model, ratio="auto")
    assert torch.equal(run(), expected)


def test_what_can_not_be_measured_is_refused_until_it_was() -> None:
    pipe = make("flux")
    model = denoiser(pipe)
    tomadiff.apply(pipe, ratio="auto")
    with pytest.raises(ConfigError, match="autograd"):
        model(**bare_call(model))
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ConfigError, match="beside a cache"):
        draw(pipe)
    model.disable_cache()
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match="compile"):
        draw(pipe)
    model._tomadiff.compiled = None
    draw(pipe)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert draw(pipe).isfinite().all(), "now it is known"


def test_blocks_that_are_compiled_one_by_one_are_measured_as_they_are(
    everything_gains: None, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tomadiff.apply(shallow("flux"), ratio=0.5)
    expected = draw(pipe)
    tomadiff.apply(pipe, ratio="auto")
    draw(pipe)
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(draw(pipe), expected)
    assert measured(caplog) == 2, "compiled blocks have other times"


def test_an_error_while_measuring_leaves_the_pipeline_usable(everything_gains: None) -> None:
    pipe = make("sd1")
    tomadiff.apply(pipe, ratio=0.5)
    expected = draw(pipe)
    tomadiff.apply(pipe, ratio="auto")
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of luck")

    handle = pipe.unet.mid_block.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        draw(pipe)
    handle.remove()
    assert torch.equal(draw(pipe), expected)


def test_a_gpu_is_timed_by_events_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the host runs ahead, as it does in a generation; but while planning is timed, it waits."""
    waited: list[torch.device] = []
    streams: list[tuple[Any, torch.device]] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.number, Event.made = Event.made, Event.made + 1

        def record(self, stream: Any) -> None:
            streams.append((self.number, stream))

        def elapsed_time(self, later: Event) -> float:
            assert later.number == self.number + 1
            return 10.0 ** (3 + later.number)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(autotune, "wait_for", waited.append)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:1")
    times = Times()
    watch = autotune._Watch(times)
    for group in (("self", 1), ("cross", 1), ("self", 1)):
        watch.start(None, (x,), {})
        times.seconds["plan"] += 7  # what the host spent, which says nothing about the device
        watch.stop(group)
    assert not watch.seconds, "nothing is known before the device has finished"
    watch.read()
    assert watch.seconds == {("self", 1): 10.0 + 1e5, ("cross", 1): 1e3} and not watch.plan
    assert streams == [(number, "stream of cuda:1") for number in range(6)]
    assert waited == []

    watch.clear()
    times.synchronise = True
    watch.start(None, (x,), {})
    times.seconds["plan"] += 7
    watch.stop(("self", 1))
    assert watch.plan == {("self", 1): 7} and Event.made == 6
    assert waited == [x.device] * 2
