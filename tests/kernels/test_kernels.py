"""The kernels: equal to core in the interpreter, compiled for GPUs that are not here, and when they run."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_process import assert_kernel_tests_pass
from torch.utils._python_dispatch import TorchDispatchMode

from tomadiff import core, kernels
from tomadiff.errors import ConfigError
from tomadiff.methods import PlanSettings, toma

pytest.importorskip("triton", reason="Triton is not installed: there is none for this platform")

from kernel_resources import SHARED, Compiled, compile_for, launches
from triton.compiler.errors import CompilationError

from tomadiff.kernels import merge, probe, select, weights
from tomadiff.kernels.launch import Launch, Repeat, Repeats, repeats_of
from tomadiff.kernels.launch import run as run_launch

CPU = torch.device("cpu")


def test_kernels_equal_core_in_the_interpreter() -> None:
    assert_kernel_tests_pass(TRITON_INTERPRET="1")


def assert_fits(made: Compiled, capability: int) -> None:
    assert f".target sm_{capability}" in made.ptx
    assert made.cubin.startswith(b"\x7fELF")
    assert made.shared <= 1024 * SHARED[capability]
    assert 0 < made.registers <= 255


COMPILED = [(dtype, capability) for dtype in (torch.float16, torch.float32) for capability in SHARED]
# two without tensor cores that take it, the first with little shared memory, and the newest
COMPILED += [(torch.bfloat16, capability) for capability in (70, 75, 86, 120)]


@pytest.mark.parametrize(("dtype", "capability"), COMPILED, ids=str)
def test_kernels_compile_for_gpus_without_spilling(dtype: torch.dtype, capability: int) -> None:
    for launch in launches((64, 64), 8, 640, dtype).values():
        made = compile_for(capability, launch)
        assert_fits(made, capability)
        assert made.spilled == 0, "registers that don't fit make every pick wait for memory"


def test_kernels_for_ragged_regions_compile_as_well() -> None:
    for launch in launches((60, 107), 8, 3072, torch.bfloat16).values():
        made = compile_for(90, launch)
        assert_fits(made, 90)
        assert made.spilled == 0


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("kernel", "size", "dtype", "ratio", "regression"),
    [
        ("destinations", 16, torch.float16, 0.5, True),
        ("weights", (8, 16), torch.float16, 0.5, True),
        ("weights", (8, 16), torch.float32, 0.25, False),  # which takes the most shared memory
    ],
    ids=str,
)
def test_the_largest_regions_fit_on_every_gpu(
    kernel: str,
    size: int | tuple[int, int],
    dtype: torch.dtype,
    ratio: float,
    regression: bool,
    capability: int,
) -> None:
    launch = launches((64, 64), size, 640, dtype, ratio, regression)[kernel]
    n, k = launch.arguments["n"], launch.arguments["k"]
    assert n == (kernels.LARGEST if kernel == "destinations" else kernels.LARGEST_WEIGHED)
    assert kernel == "destinations" or not regression or k == kernels.LARGEST_SOLVED
    assert_fits(compile_for(capability, launch), capability)


@pytest.mark.parametrize("capability", SHARED)
def test_weights_of_tiles_that_keep_most_tokens_compile_without_spilling(capability: int) -> None:
    launch = launches((64, 64), 8, 640, torch.float16, 0.25)["weights"]
    assert launch.arguments["PLACES"] == launch.arguments["SLOTS"] == 64
    made = compile_for(capability, launch)
    assert_fits(made, capability)
    assert made.spilled == 0


def test_core_solves_what_does_not_fit_into_registers() -> None:
    regression, transposed = PlanSettings(unmerge="regression"), PlanSettings()
    assert toma.regression_by_kernel(regression, kernels.LARGEST_WEIGHED, kernels.LARGEST_SOLVED) is True
    assert toma.regression_by_kernel(regression, kernels.LARGEST_WEIGHED, kernels.LARGEST_SOLVED + 1) is None
    assert toma.regression_by_kernel(transposed, kernels.LARGEST_WEIGHED, kernels.LARGEST_WEIGHED) is False
    assert toma.regression_by_kernel(transposed, kernels.LARGEST_WEIGHED + 1, 1) is None


class Operations(TorchDispatchMode):
    """Everything that torch is asked to do, but for memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grid", [(16, 16), (13, 19)], ids=["whole", "ragged"])
def test_a_plan_is_two_launches_new_weights_are_one_and_a_site_two(
    grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launched.append(launch.kernel.fn.__name__))
    monkeypatch.setattr(kernels, "usable", lambda *program: True)
    x = torch.zeros(2, 5 + math.prod(grid), 16, dtype=torch.float16)[:, 5:]  # behind text
    settings = PlanSettings(unmerge="regression")  # as by default
    regions = core.partition(grid, "tile", 8, False, CPU)  # made once for all plans
    core.slot_layout(regions.lengths, 0.5, CPU)
    with Operations() as torchs:
        plan = toma.plan(x, grid, 0.5, settings).cast(x.dtype)
        assert launched == ["_destinations", "_weights"]
        plan = toma.plan(x, grid, 0.5, settings, destinations=plan.destinations).cast(x.dtype)
        assert launched[2:] == ["_weights"]
        merged = plan.merge(x)
        plan.unmerge(merged, x, merged)
        assert launched[3:] == ["_mix", "_mix"]
    assert torchs.names == []


def test_kernels_stay_away_from_the_cpu_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    monkeypatch.delenv("TOMADIFF_KERNELS", raising=False)
    assert not kernels.usable(x, 64, 32)
    monkeypatch.setenv("TOMADIFF_KERNELS", "1")
    with pytest.raises(ConfigError, match="kernels run on CUDA"):
        kernels.usable(x, 64, 32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.usable(x, 64, 32)
    monkeypatch.setenv("TOMADIFF_KERNELS", "yes")
    with pytest.raises(ConfigError, match="yes"):
        kernels.usable(x, 64, 32)


class OnCuda:
    """What of a tensor the choice is made by."""

    is_cuda, dtype, device = True, torch.float16, torch.device("cuda")


def test_kernels_run_on_cuda_where_triton_works(monkeypatch: pytest.MonkeyPatch) -> None:
    x = OnCuda()
    asked: list[tuple] = []
    monkeypatch.setattr(kernels, "works", lambda *program: asked.append(program[2:]) or program[2] >= 64)
    monkeypatch.delenv("TOMADIFF_KERNELS", raising=False)
    assert kernels.usable(x, kernels.LARGEST, 16)
    assert not kernels.usable(x, kernels.LARGEST + 1, 16)
    assert kernels.usable(x, 33, 16) and not kernels.usable(x, 32, 16), "each block size is tried"
    assert kernels.usable(x, 64, 33, True) and kernels.usable(x, 64, 17, False)
    assert asked[-2:] == [(64, 64, True), (64, 32, False)]
    x.dtype = torch.float64
    assert not kernels.usable(x, 64, 32), "kernels add up in fp32"
    x.dtype = torch.bfloat16
    assert kernels.usable(x, 64, 32)
    monkeypatch.setenv("TOMADIFF_KERNELS", "0")
    assert not kernels.usable(x, 64, 32)


def test_kernels_that_cant_run_are_told_once_and_done_without() -> None:
    device = torch.device("cuda", 99)  # nobody has it
    with pytest.warns(UserWarning, match="float16 on cuda:99 can't run.*up to 64 tokens .* up to 32"):
        assert not kernels.works(device, torch.float16, 64, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.works(device, torch.float16, 64, 32)


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
def test_kernels_are_probed_in_the_dtype_they_are_asked_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple] = []

    def difference(device: torch.device, dtype: torch.dtype, *shape: Any, regression: bool | None) -> None:
        tried.append((device, dtype, shape, regression))

    monkeypatch.setattr(probe, "difference", difference)
    device = torch.device("cuda", 97)  # nobody has it
    assert kernels.works(device, dtype, 64, 32, False) and kernels.works(device, dtype, 64, 32, False)
    assert tried == [(device, dtype, probe.example(64, 32), False)]


def test_the_warning_says_what_triton_could_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the last line of what it says, after the place and the source."""
    source = "def _mix(weights, x):\n    return tl.dot(weights, x)"
    call = ast.parse(source).body[0].body[0].value

    def fail(*_: Any, **more: Any) -> None:
        raise CompilationError(source, call, "Unsupported lhs dtype bf16")

    monkeypatch.setattr(probe, "difference", fail)
    device = torch.device("cuda", 98)  # nobody has it
    with pytest.warns(UserWarning, match="can't run: CompilationError: Unsupported lhs dtype bf16. Merging"):
        assert not kernels.works(device, torch.bfloat16, 64, 32)


# -- launches that are repeated ----------------------------------------------------------------------------


def inputs(offset: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Behind so many tokens of text, whose strides and alignment they have."""
    generator = torch.Generator().manual_seed(seed)
    y, merged, onto, x = (
        torch.randn(2, offset + tokens, 20, generator=generator)[:, offset:] for tokens in (52, 52, 104, 104)
    )
    return y, merged, onto, x


class Noting:
    """In the place of a compiled kernel: what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, int, int], tuple]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.launched.append((grid, values))


def test_a_repeated_launch_is_the_one_that_would_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument by argument; where a trait differs, it is made anew."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as of tensors on the CPU
    compiled, repeats = Noting(), {}
    monkeypatch.setattr(Launch, "run", lambda launch: compiled)
    varying = ("weights", "x", "less", "onto", "out")
    for seed, offset, known in ((0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 5, 2), (4, 5, 3), (5, 0, 4)):
        plan = toma.plan(torch.rand(2, 104, 16), (8, 13), 0.5, PlanSettings())  # new weights
        y, merged, onto, x = inputs(offset, seed)
        read = plan.unmerging, y, merged, onto
        fresh = merge.unmerge_launch(plan, y, onto, merged, x)
        run_launch(repeats, "unmerge", varying, read, (x,), lambda fresh=fresh: fresh)
        assert len(compiled.launched) == known
        if known:
            grid, values = compiled.launched[-1]
            expected = [fresh.arguments[name] for name in fresh.kernel.arg_names]
            if seed not in (0, 3):
                assert grid == fresh.grid
                assert all(a is b or a == b for a, b in zip(values, expected, strict=True))
    assert len(repeats) == 2
    turned = plan.unmerging.contiguous()
    assert turned.stride() != plan.unmerging.stride()
    run_launch(repeats, "unmerge", varying, (turned, *read[1:]), (x,), lambda: fresh)
    assert len(repeats) == 3, "weights with other strides need a launch of their own"
    held = [
        value for repeat in repeats.values() for value in repeat.values if isinstance(value, torch.Tensor)
    ]
    assert held and not any(value.is_floating_point() for value in held), "tokens and weights must be let go"


def test_repeated_weights_are_those_that_would_be_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument by argument; with another scale, or without regression, they are made anew."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as of tensors on the CPU
    compiled, made = Noting(), []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch) or compiled)
    repeats_of.cache_clear()
    regions = core.partition((8, 13), "tile", 8, False, CPU)
    slots = core.slot_layout(regions.lengths, 0.5, CPU)
    for known, (scale, regression) in enumerate(((1000.0, True), (10.0, True), (1000.0, False)), start=1):
        for _ in range(2):
            x, chosen = torch.rand(2, 104, 16), torch.randint(104, (2, slots.kept))
            matrices = weights.weights(x, regions, slots, chosen, scale, regression)
        assert len(made) == len(compiled.launched) == known
        grid, values = compiled.launched[-1]
        names = made[-1].kernel.arg_names
        tensors = x, chosen, *matrices, values[names.index("scratch")]
        fresh = weights.weights_launch(regions, slots, scale, regression, tensors)
        assert grid == (*fresh.grid, 1, 1)
        expected = [fresh.arguments[name] for name in names]
        assert all(a is b or a == b for a, b in zip(values, expected, strict=True))
    repeats_of.cache_clear()


@pytest.mark.parametrize("tokens", [103, 105])
def test_features_of_another_number_of_tokens_are_refused(tokens: int) -> None:
    """A kernel would read beyond them, or others than those of the region."""
    regions = core.partition((8, 13), "tile", 8, False, CPU)
    slots = core.slot_layout(regions.lengths, 0.5, CPU)
    x, chosen = torch.rand(2, tokens, 16), torch.zeros(2, slots.kept, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"\[2, {tokens}, 16\].*104 tokens"):
        select.destinations(x, regions, slots)
    with pytest.raises(ValueError, match=rf"\[2, {tokens}, 16\].*104 tokens"):
        weights.weights(x, regions, slots, chosen, 1000.0, True)


@pytest.mark.parametrize("shape", [(1, 52), (2, 51), (2, 53), (104,)])
def test_destinations_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    regions = core.partition((8, 13), "tile", 8, False, CPU)
    slots = core.slot_layout(regions.lengths, 0.5, CPU)
    x, chosen = torch.rand(2, 104, 16), torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"{re.escape(str(list(shape)))}.*\[2, 52\]"):
        weights.weights(x, regions, slots, chosen, 1.0, True)


class Devices:
    """Two GPUs, the first of which is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 0
        self.x = SimpleNamespace(device=torch.device("cuda", 1))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.change)
        monkeypatch.setattr(torch.cuda, "device_of", lambda x: self.change(1))

    @contextmanager
    def change(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """In the place of a kernel, compiled or not."""
        return lambda *values, **named: self.current

    arg_names = ("x",)


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    assert Launch(devices, (1,), {"x": torch.zeros(1)}, warps=4).run() == 1
    assert devices.current == 0


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_is_repeated_on_the_device_of_its_tensors(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, on = Devices(monkeypatch), []
    devices.current = current
    repeat = Repeat(Launch(devices, (1,), {"x": devices.x}, warps=4), devices, ("x",))
    launcher = repeat.launcher
    repeat.launcher = lambda *values: on.append(launcher(*values))
    repeat.run(devices.x)
    assert on == [1] and devices.current == current


def test_a_launch_is_made_anew_where_nothing_but_the_alignment_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton loads sixteen bytes at once where an address is a multiple of that."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as of tensors on the CPU
    compiled, made = Noting(), []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch) or compiled)
    memory, repeats = torch.zeros(32), {}
    for first, count in ((0, 1), (4, 1), (1, 2), (5, 2), (0, 2)):
        x = memory[first : first + 16]
        launch = Launch(SimpleNamespace(arg_names=["x"]), (1,), {"x": x}, warps=4)
        run_launch(repeats, "kind", ("x",), (x,), (), lambda launch=launch: launch)
        assert len(made) == count


def test_launches_are_kept_for_plans_of_the_same_regions_slots_and_device() -> None:
    def kept(tokens: int = 64, ratio: float = 0.5, device: torch.device = CPU) -> Repeats:
        regions = core.partition((tokens,), "stripe", 8, False, device)
        return repeats_of(regions, core.slot_layout(regions.lengths, ratio, device))

    assert kept() is kept()
    assert kept(tokens=128) is not kept()
    assert kept(ratio=0.75) is not kept()
    assert kept(device=torch.device("meta")) is not kept(), "though its regions need no tensors"
    assert core.one_region(8) is core.one_region(8)
