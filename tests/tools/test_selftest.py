"""The self-test: what it says when all is well, when something is wrong, and when time is over."""

from __future__ import annotations

import gc
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from pipelines import denoiser, draw, make, text
from torch import Tensor
from torch._inductor import config as inductor

from tomadiff.core import partition
from tomadiff.kernels import LARGEST, LARGEST_WEIGHED
from tomadiff.runtime.registration import session_of
from tomadiff.tools.bench import models
from tomadiff.tools.cli import main
from tomadiff.tools.selftest import command, compiled, finding, kernels, pictures, speed
from tomadiff.tools.selftest.finding import Finding

CPU = torch.device("cpu")


def good(device: torch.device) -> Iterator[Finding]:
    yield Finding("sums", True, "are right", {"error": 0.0})
    yield Finding("products", None, "can't be tried here")


def bad(device: torch.device) -> Iterator[Finding]:
    yield Finding("differences", False, "are wrong")


def broken(device: torch.device) -> Iterator[Finding]:
    yield from ()
    raise RuntimeError("no such kernel\nand much more")


def untried(device: torch.device) -> Iterator[Finding]:
    yield Finding("products", None, "can't be tried here")


@pytest.mark.parametrize(
    ("checks", "status", "told"),
    [
        ((good,), 0, "ALL IS WELL: 1 checks passed. 1 could not be tried here."),
        ((good, bad), 1, "NOT ALL IS WELL: 1 of 2 checks failed: differences."),
        ((broken,), 1, "NOT ALL IS WELL: 1 of 1 checks failed: broken."),
        ((untried,), 1, "NOTHING WAS CHECKED. 1 could not be tried here."),
    ],
)
def test_the_verdict_is_in_words_in_the_exit_status_and_in_a_file(
    checks: tuple,
    status: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "CHECKS", checks)
    assert main(["selftest", "--device", "cpu", "--json", str(tmp_path / "found.json")]) == status
    printed = capsys.readouterr().out
    assert told in printed and f"torch build: {torch.__version__}" in printed
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["verdict"].startswith(told) and content["about"]["device"] == "cpu"
    assert len(content["findings"]) == len(
        [line for line in printed.splitlines() if ": " in line and "  " in line]
    )


def test_nothing_is_begun_after_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    findings = command.examine(CPU, 0.0, (good, bad))
    assert [finding.good for finding in findings] == [None, None]
    assert "--seconds" in capsys.readouterr().out


def test_all_is_not_well_where_nothing_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu", "--seconds", "0"]) == 1
    assert "NOTHING WAS CHECKED" in capsys.readouterr().out


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0)])
def test_bf16_is_checked_where_the_gpu_has_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert finding.dtypes_of(FakeGPU())[:2] == [torch.float32, torch.float16]
    assert (torch.bfloat16 in finding.dtypes_of(FakeGPU())) == (capability >= (8, 0))


def test_a_gpus_free_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 24 * 2**30))
    monkeypatch.setattr(command, "processor", lambda device: "a GPU")
    facts = command.about(FakeGPU())
    assert facts["free memory"] == "3.0 of 24.0 GB" and facts["compute capability"] == "8.6"


def test_what_is_left_out_for_lack_of_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    checks = (pictures.pictures_are_close, compiled.compiled_model_equals_core)
    with finding.time_limit(-1.0):
        findings = [finding for check in checks for finding in check(CPU)]
    names = ["emoji-unet in float32", "emoji-flux in float32", "compiled model in float32"]
    assert [finding.name for finding in findings] == names
    assert f"3 were left out, for which more --seconds are needed: {'; '.join(names)}." in command.verdict(
        findings
    )


def test_a_gpu_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cuda:99"]) == 2
    assert "can't use device" in capsys.readouterr().err


def test_on_a_cpu_kernels_and_waiting_are_left_out_with_the_reason() -> None:
    findings = [*kernels.kernels_equal_core(CPU), *pictures.steps_dont_wait_for_the_device(CPU)]
    assert [finding.good for finding in findings] == [None, None]
    assert all("CUDA" in finding.words for finding in findings)


def test_a_picture_that_is_too_far_away_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "EMBEDDED", ["emoji-flux"])
    monkeypatch.setattr(pictures, "REQUEST", pictures.Request("pizza", steps=6))
    modes = {"merged": ({"ratio": 0.5}, 5.0), "forecast": ({"interval": 2}, 1000.0)}
    monkeypatch.setattr(pictures, "MODES", modes)
    found = list(pictures.pictures_are_close(CPU))
    assert [finding.good for finding in found] == [True, False]
    assert "expected are at least 1000" in found[1].words


class FakeGPU(SimpleNamespace):
    """Enough of a device to choose what is checked on a GPU."""

    type = "cuda"


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """A GPU with both half dtypes, and a tiny pipeline in place of the embedded ones."""
    for module in (pictures, compiled):
        monkeypatch.setattr(module, "EMBEDDED", ["tiny"])
        monkeypatch.setattr(
            module, "dtypes_of", lambda device: [torch.float32, torch.float16, torch.bfloat16]
        )
        monkeypatch.setattr(module, "loaded", lambda name, device, dtype: make("flux"))
    monkeypatch.setattr(compiled, "no_compiler", lambda device: None)
    return FakeGPU()


@pytest.mark.parametrize("waits", [False, True])
def test_waiting_after_the_first_call_is_a_failure_in_every_half_dtype(
    waits: bool, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    forbidden: list[bool] = []

    def waiting(*args: Any) -> None:
        forbidden.append(modes[-1] == "error")
        if waits and forbidden[-1]:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    def draw_waiting(pipe: Any) -> None:
        forbidden.clear()
        with denoiser(pipe).register_forward_pre_hook(waiting):
            draw(pipe, size=(64, 64), steps=3, guidance=1.0)

    monkeypatch.setattr(pictures, "draw_with", draw_waiting)
    monkeypatch.setattr(pictures, "MODES", {"merged": ({"ratio": 0.5}, 0.0)})
    findings = list(pictures.steps_dont_wait_for_the_device(fake_gpu))
    assert [finding.name.split(" in ")[1] for finding in findings] == ["float16, merged", "bfloat16, merged"]
    assert [finding.good for finding in findings] == [not waits] * 2
    assert forbidden == ([False, True] if waits else [False, True, True]) and modes[-1] == "default"
    assert all(("synchronizing" in finding.words) == waits for finding in findings)


def test_pictures_are_compiled_in_every_dtype_and_without_kernels(
    fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOMADIFF_KERNELS", raising=False)
    modes = {"forecast": ({"interval": 2}, 30.0), "merged": ({"ratio": 0.5}, 20.0)}
    monkeypatch.setattr(compiled, "MODES", modes)
    drawn = []

    def note(pipe: Any) -> Image.Image:
        session = getattr(denoiser(pipe), "_tomadiff", None)
        if session is not None:
            drawn.append((os.environ["TOMADIFF_KERNELS"], session.compiled is not None))
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(compiled, "draw_with", note)
    first = list(compiled.compiled_pictures_are_close(fake_gpu))
    assert [finding.name for finding in first] == [
        f"tiny in bfloat16, compiled, {mode}" for mode in ("forecast", "merged")
    ]
    others = list(compiled.compiled_pictures_in_other_modes(fake_gpu))
    assert [finding.name for finding in others] == [
        "tiny in bfloat16, compiled without kernels, merged",
        *(
            f"tiny in {dtype}, compiled{kernels}"
            for dtype in ("float16", "float32")
            for kernels in (", forecast", ", merged", " without kernels, merged")
        ),
    ]
    assert [kernels for kernels, _ in drawn] == ["auto", "auto", "0", *["auto", "auto", "0"] * 2]
    assert all(is_compiled for _, is_compiled in drawn)
    assert all(finding.good for finding in (*first, *others))


@pytest.mark.parametrize("same", [True, False])
def test_merged_pictures_are_compared_with_those_without_kernels(
    same: bool, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOMADIFF_KERNELS", "auto")
    monkeypatch.setattr(pictures, "dtypes_of", lambda device: [torch.float32])
    monkeypatch.setattr(pictures, "MODES", {"merged": ({"ratio": 0.5}, 20.0)})

    def drawn(pipe: Any) -> Image.Image:
        merged = session_of(denoiser(pipe)) is not None
        without = os.environ["TOMADIFF_KERNELS"] == "0"
        assert merged or not without
        return Image.new("RGB", (8, 8), "white" if without and not same else "black")

    monkeypatch.setattr(pictures, "draw_with", drawn)
    *others, last = pictures.pictures_are_close(fake_gpu)
    assert all(finding.good for finding in others)
    assert last.name == "tiny in float32, merged without kernels" and last.good is same


@pytest.mark.parametrize("wrong", [None, "core", "kernels"])
def test_a_compiled_model_is_compared_with_kernels_and_without(
    wrong: str | None, fake_gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with plans of its own, and with kernels only in the last one."""
    monkeypatch.setenv("TOMADIFF_KERNELS", "auto")
    small, called, calls = compiled._small_model, compiled._called, []
    monkeypatch.setattr(compiled, "_small_model", lambda device, dtype: small(CPU, dtype))
    monkeypatch.setattr(compiled, "dtypes_of", lambda device: [torch.float32])
    monkeypatch.setattr(compiled, "no_kernels", lambda device: None)
    monkeypatch.setattr(compiled, "_backend", lambda device: "eager")

    def note(model: Any) -> Tensor:
        session = session_of(model)
        how = "plain" if session.compiled is None else "core" if len(calls) == 1 else "kernels"
        calls.append((how, os.environ["TOMADIFF_KERNELS"], [*session.plans]))
        return called(model) * (2.0 if how == wrong else 1.0)

    monkeypatch.setattr(compiled, "_called", note)
    findings = list(compiled.compiled_model_equals_core(fake_gpu))
    assert calls == [("plain", "0", []), ("core", "0", []), ("kernels", "auto", [])]
    names = ["compiled model in float32", "compiled model in float32, with kernels"]
    assert [finding.name for finding in findings] == names
    # the one with kernels is compared with core's
    expected = {None: [True, True], "core": [False, False], "kernels": [True, False]}[wrong]
    assert [finding.good for finding in findings] == expected


def test_compiled_pictures_are_compared_with_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "_backend", lambda device: backend)
    monkeypatch.setattr(compiled, "EMBEDDED", ["tiny"])
    monkeypatch.setattr(compiled, "loaded", lambda name, device, dtype: make("flux"))
    monkeypatch.setattr(compiled, "draw_with", lambda pipe: draw(pipe, size=(64, 64), output_type="pil")[0])
    # what is compiled is the same as what is not, and not the same as what is dense
    monkeypatch.setattr(compiled, "MODES", {"merged": ({"ratio": 0.5}, 1000.0)})
    (found,) = compiled.compiled_pictures_are_close(CPU)
    assert found.good is False and "the dense picture, expected are at least 1000" in found.words
    assert len(graphs) == 2, "that of x + 1, which is tried first, and the model's"
    assert list(compiled.compiled_pictures_in_other_modes(CPU)) == []


@pytest.mark.parametrize("wrong", [False, True])
def test_a_compiled_model_that_computes_something_else_is_a_failure(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: tuple(x * (1.01 if wrong else 1.0) for x in graph(*args))

    monkeypatch.setattr(compiled, "_backend", lambda device: backend)
    (found,) = compiled.compiled_model_equals_core(CPU)
    assert found.good is not wrong, found.words


def failing(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no instruction for it\nand more")


COMPILING = (
    compiled.compiled_model_equals_core,
    compiled.compiled_pictures_are_close,
    compiled.compiled_pictures_in_other_modes,
)


@pytest.mark.parametrize("check", COMPILING, ids=lambda check: check.__name__)
def test_without_a_compiler_what_is_compiled_is_left_out_once_with_the_cause(
    check: finding.Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By inductor itself, whose compiler of C++ is one that there is not."""
    monkeypatch.setattr(compiled, "dtypes_of", lambda device: [torch.float32, torch.float16])
    monkeypatch.setattr(compiled, "_backend", lambda device: "inductor")
    with inductor.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        (found,) = check(CPU)
    assert found.good is None
    assert "x + 1" in found.words and "No working C++ compiler found" in found.words


def test_a_model_that_cant_be_compiled_where_others_can_is_a_failure_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return failing(graph, inputs) if len(graph.graph.nodes) > 9 else graph.forward

    monkeypatch.setattr(compiled, "_backend", lambda device: backend)
    monkeypatch.setattr(compiled, "EMBEDDED", ["tiny"])
    monkeypatch.setattr(compiled, "loaded", lambda name, device, dtype: make("flux"))
    monkeypatch.setattr(compiled, "draw_with", lambda pipe: draw(pipe, size=(64, 64), steps=1))
    monkeypatch.setattr(compiled, "MODES", {"merged": ({"ratio": 0.5}, 20.0)})
    for check in COMPILING[:2]:
        (found,) = check(CPU)
        assert found.good is False and found.words == "RuntimeError: no instruction for it"


def test_a_check_that_breaks_off_tells_the_cause() -> None:
    def check(device: torch.device) -> Iterator[Finding]:
        yield from ()
        torch.compile(lambda x: x + 1, backend=failing)(torch.ones(1))

    (found,) = command.examine(CPU, 60.0, [check])
    assert found.good is False and found.words == "broke off: RuntimeError: no instruction for it"


def test_kernels_are_compared_in_every_shape_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = pytest.importorskip("tomadiff.kernels.probe")
    tried: list[tuple] = []

    def difference(device: torch.device, dtype: torch.dtype, *shape: Any) -> str | None:
        tried.append((dtype, shape))
        return "merge otherwise" if (dtype, shape[0]) == (torch.float16, (61, 107)) else None

    monkeypatch.setattr(probe, "difference", difference)
    monkeypatch.setattr(kernels, "no_kernels", lambda device: None)
    monkeypatch.setattr(kernels, "dtypes_of", lambda device: [torch.float32, torch.float16])
    right, wrong = kernels.kernels_equal_core(CPU)
    assert tried == [(dtype, shape) for dtype in kernels.dtypes_of(CPU) for shape in kernels.SHAPES.values()]
    assert right.good is True and all(name in right.words for name in kernels.SHAPES)
    assert wrong.good is False and wrong.words == "ragged tiles: they merge otherwise"


def test_weights_are_compared_in_the_largest_regions_and_in_both_ways() -> None:
    ways = {}
    for grid, kind, size, _, _, regression in kernels.SHAPES.values():
        ways.setdefault(partition(grid, kind, size, False, CPU).size, set()).add(regression)
    assert ways == {64: {True, False}, LARGEST_WEIGHED: {True}, LARGEST: {None}}


@pytest.mark.parametrize("slow", [False, True])
def test_launches_that_take_the_host_too_long_are_a_failure(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("tomadiff.kernels.launch")
    bars = [kernels.ENOUGH_FOR_A_PLAN_US, kernels.ENOUGH_US, kernels.ENOUGH_US]
    times = iter([time for bar in bars for time in (1000.0, bar + slow)])  # by core, by kernels
    monkeypatch.setattr(kernels, "_microseconds", lambda *given: next(times))
    monkeypatch.setattr(kernels, "no_kernels", lambda device: None)
    monkeypatch.setattr(launch, "REPEATABLE", True)
    assert [finding.good for finding in kernels.time_of_a_launch(CPU)] == [not slow] * 3


def test_launches_are_timed_with_a_new_plan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one plan again and again, nobody would see that launches of new plans are not repeated."""
    plan = pytest.importorskip("tomadiff.kernels.plan")
    launched: dict[str, list[Any]] = {"merge": [], "unmerge": []}
    planned: list[str] = []  # what TOMADIFF_KERNELS was when weights were made

    def launch(kind: str) -> Callable[..., None]:
        return lambda self, *tensors: launched[kind].append(self)

    for kind in launched:
        monkeypatch.setattr(plan.Fused, kind, launch(kind))
    monkeypatch.setattr(kernels, "no_kernels", lambda device: None)
    monkeypatch.setattr(kernels, "LAUNCHES", 2)
    monkeypatch.setattr(
        kernels.toma, "plan", lambda *args, **more: planned.append(os.environ.get("TOMADIFF_KERNELS", "auto"))
    )
    findings = list(kernels.time_of_a_launch(CPU))
    timed = [finding.name.split(", ")[1] for finding in findings]
    assert timed == ["a plan's new weights", "merging", "unmerging"]
    assert planned == (kernels.WARM_UP + 2) * ["0"] + (kernels.WARM_UP + 2) * ["1"]
    assert all(finding.figures.keys() == {"kernel_us", "core_us"} for finding in findings)
    for fused in launched.values():
        assert len(fused) == len({id(each.plan) for each in fused}) == kernels.WARM_UP + 2
        weights = {each.plan.merging.data_ptr() for each in fused}
        assert len(weights) == len(fused)


def test_speed_is_measured_with_a_skipped_step_and_nothing_left_on_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "STEPS", 6)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    pipe = make("flux")
    embeds, pooled = text(0)
    arguments = {
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "height": 64,
        "width": 64,
        "output_type": "latent",
    }
    call, host, generation = speed._measured(pipe, "tiny", arguments, CPU)
    assert call.figures.keys() == {"dense_ms", "ideal_ms", "tomadiff_ms"} and all(call.figures.values())
    assert host.good is None and not host.figures
    assert generation.name == "a generation of 6 steps, tiny"
    assert all(
        generation.figures[name] for name in ("dense_s", "applied_s", "run_step_ms", "skipped_step_ms")
    )
    assert session_of(denoiser(pipe)) is None
    with finding.time_limit(-1.0):
        *_, last = speed._measured(pipe, "tiny", arguments, CPU)
    assert last == finding.left_out("a generation of 6 steps, tiny")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which everything is small, and on which nothing has to be waited for."""
    monkeypatch.setattr(speed, "STEPS", 6)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "wait_for", lambda device: None)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)


@pytest.mark.parametrize("call", [None, 0, 8], ids=["building", "the first call", "a later call"])
def test_a_model_that_does_not_fit_is_gone_before_a_smaller_one_is_made(
    call: int | None, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in building it, or in one of its calls."""
    measured, built, emptied, calls = speed._measured, [], [], itertools.count()

    def run_out(*_: Any) -> None:
        if call is None or next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def build(name: str, depth: float, *_: Any, **more: Any) -> Any:
        nonlocal calls
        assert all(model() is None for model in built)
        pipe, calls = make("sdxl"), itertools.count()
        pipe.unet.itself = [pipe.unet]  # a cycle, as diffusers makes some
        built.append(weakref.ref(pipe.unet))
        if depth > 0.25:
            run_out() if call is None else pipe.unet.register_forward_pre_hook(run_out)
        return pipe

    monkeypatch.setattr(models, "build", build)
    monkeypatch.setattr(models, "depth_note", lambda name, depth: f"{depth} of the blocks")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([model() for model in built]))
    monkeypatch.setattr(speed, "SIZES", tuple((depth, 64) for depth, _ in speed.SIZES))
    monkeypatch.setattr(speed, "_measured", lambda *given: measured(*given[:3], CPU))
    gc.collect()
    gc.disable()  # nothing may be collected by chance
    try:
        findings = list(speed.speed(FakeGPU()))
    finally:
        gc.enable()
    assert emptied == [[None], [None, None]], "the memory of models that are gone"
    assert len(built) == 3
    title = "SDXL's shape, 0.25 of the blocks, 64 x 64, fp16"
    assert [finding.name for finding in findings[-3:]] == [
        f"{what}, {title}" for what in ("a call", "host time of a call", "a generation of 6 steps")
    ]


def test_the_host_is_timed_in_calls_that_leave_room_in_the_queue(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small image, merged in every call, and beginning with an empty queue."""
    pipe, seen = make("sdxl"), []
    monkeypatch.setattr(speed, "wait_for", lambda device: seen.append("waited"))

    def note(unet: Any, args: tuple) -> None:
        tasks = session_of(unet).call.tasks
        seen.append((args[0].shape[-2:], any(task.merged for task in tasks)))

    with pipe.unet.register_forward_pre_hook(note):
        host = speed._host(pipe, "SDXL, 1024 x 1024", FakeGPU())
    side = speed.HOST_SIDE // 8
    dense, merged = ([((side, side), merges)] for merges in (False, True))
    assert seen == [kind for call in (dense, merged) for kind in (*call * 3, "waited", *call, "waited")]
    assert host.good is None and host.figures.keys() == {"dense_ms", "merged_ms", "side"}
    assert "256 x 256" in host.words


@pytest.mark.parametrize("left", [speed.LEFT, speed.LEFT + 1])
def test_memory_that_is_left_after_a_generation_is_a_failure(
    left: int, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = 5 * speed.LEFT
    allocated = itertools.cycle((before, before + left))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    pipe = make("sdxl")
    *_, memory = speed._generations(pipe, "tiny", models.arguments(pipe, (64, 64)), FakeGPU())
    assert memory.name == "memory of a generation, tiny"
    assert memory.figures["left_bytes"] == left
    assert memory.good is (left == speed.LEFT)
