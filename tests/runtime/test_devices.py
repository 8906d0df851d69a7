"""What shows on GPUs alone, as far as it can be seen without one: waiting, moving, recording, memory."""

from __future__ import annotations

import math
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from comparison import alike
from diffusers.hooks import group_offloading
from pipelines import bare_call, denoiser, draw, make
from tiny import build, called, tiny
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tomadiff
from tomadiff.errors import ConfigError
from tomadiff.models import family_of
from tomadiff.runtime.conflicts import check_model
from tomadiff.runtime.layout import LayoutReader
from tomadiff.runtime.offloading import GROUP, weights_at_hand

# -- waiting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux2_reference", "flux_kontext", "krea2", "ideogram4", "ltx"])
def test_positions_on_a_device_are_read_once_in_a_generation(name: str) -> None:
    """On the meta device, reading a value raises. Pipelines make new tensors for every step."""
    case = tiny(name)
    model = build(case)
    family = family_of(model)
    names = [family.grid_from] if isinstance(family.grid_from, str) else family.grid_from
    call = case.call(model, getattr(case, "GRID", (8, 8)), (0,), 0.9)
    if name == "ltx" and call.get("video_coords") is None:
        axes = [torch.arange(n) for n in (2, 4, 4)]
        call["video_coords"] = torch.stack([x.flatten() for x in torch.meshgrid(*axes, indexing="ij")])[None]
    assert any(isinstance(call.get(name), Tensor) for name in names)
    reader = LayoutReader(model, family)
    first = reader.read(call)
    for _ in range(9):
        assert reader.read(on_meta(call)) == first
    for other in (LayoutReader(model, family).read, lambda call: reader.read(call, 1)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            other(on_meta(call))


def test_positions_on_the_cpu_may_change_within_a_generation() -> None:
    """To read them costs nothing, so that their values count, not their shape."""
    case = tiny("flux")
    model = build(case)
    reader = LayoutReader(model, family_of(model))
    for grid in ((8, 8), (4, 16), (8, 8)):
        assert reader.read(case.call(model, grid, (0,), 0.9)).finest == grid


def on_meta(call: dict[str, Any]) -> dict[str, Any]:
    return {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in call.items()}


# -- moving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["wan", "ltx", "pixart", "krea2"])
def test_tables_beside_layers_are_there_when_plans_are_made(name: str, order: str) -> None:
    """Sequential offloading, from memory to memory: between calls, no block has its own weights either."""
    case = tiny(name)
    model = build(case)
    merged = called(tomadiff.apply(model, ratio=0.5, dense_blocks=0), case)[0]
    tomadiff.remove(model)
    if order == "after":
        tomadiff.apply(model, ratio=0.5, dense_blocks=0)
    accelerate.cpu_offload(model, torch.device("cpu"))
    if order == "before":
        tomadiff.apply(model, ratio=0.5, dense_blocks=0)
    assert alike(called(model, case)[0], merged)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


class Emptied:
    """torch, but memory that nobody has written to holds NaNs, not what happened to be there before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty_like(x: Tensor, **options: Any) -> Tensor:
        return torch.full_like(x, math.nan if x.is_floating_point() else 0, **options)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("wan", {"offload_type": "block_level", "num_blocks_per_group": 1}),
        ("pixart", {"offload_type": "leaf_level"}),
    ],
    ids=["block", "leaf"],
)
def test_groups_of_weights_are_there_when_plans_are_made(
    name: str, level: dict[str, Any], order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloading to the disk: from memory to the same memory, weights would never be gone.

    `where="block"`, since spans end where weights come and go.
    """
    monkeypatch.setattr(group_offloading, "torch", Emptied())
    case = tiny(name)
    model = build(case)
    merged = called(tomadiff.apply(model, ratio=0.5, dense_blocks=0, where="block"), case)[0]
    tomadiff.remove(model)
    if order == "after":
        tomadiff.apply(model, ratio=0.5, dense_blocks=0, where="block")
    cpu = torch.device("cpu")
    model.enable_group_offload(cpu, offload_device=cpu, offload_to_disk_path=str(tmp_path), **level)
    assert any(parameter.isnan().any() for parameter in model.parameters())
    if order == "before":
        tomadiff.apply(model, ratio=0.5, dense_blocks=0, where="block")
    assert alike(called(model, case)[0], merged)


def test_weights_that_come_on_a_stream_have_arrived_before_they_are_read() -> None:
    """As in diffusers' own pre_forward: loading a group only starts to copy it."""
    seen: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: seen.append("waited"))
    group = SimpleNamespace(stream=stream, onload_=lambda: seen.append("loading"))
    module = torch.nn.Linear(2, 2)
    module._diffusers_hook = SimpleNamespace(hooks={GROUP: SimpleNamespace(group=group)})
    with weights_at_hand(module):
        seen.append("read")
    assert seen == ["loading", "waited", "read"]


@pytest.mark.parametrize(
    ("given", "said"),
    [(("cpu", "meta"), "cpu, meta"), ((0, 10), "cuda, cuda:10"), (("cuda:1", 0), "cuda:1, cuda")],
)
def test_blocks_on_several_devices_are_refused(given: tuple[Any, Any], said: str) -> None:
    model = on_devices(*given)
    with pytest.raises(ConfigError, match=rf"on several devices \({said}\).*without device_map"):
        model(**bare_call(model))


def test_a_device_has_several_names() -> None:
    """accelerate takes all of these."""
    for names in (("cuda:0", 0), ("cuda", torch.device("cuda:0")), ("cuda:1", 1), ("mps", "mps:0")):
        model = on_devices(*names)
        check_model(model, model._tomadiff.sites)


def on_devices(*devices: Any) -> nn.Module:
    """A merged model with two blocks of each kind, and a device for each of the two."""
    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5, dense_blocks=0)
    for blocks in (model.transformer_blocks, model.single_transformer_blocks):
        for block, device in zip(blocks, devices):
            add_hook_to_module(block, AlignDevicesHook(execution_device=device))
    return model


def test_blocks_whose_weights_come_and_go_in_groups_may_be_on_several_devices_in_between() -> None:
    """On a stream, the next group is on its way to the device while the others are in main memory."""
    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5)
    cpu = torch.device("cpu")
    model.enable_group_offload(cpu, offload_device=cpu, offload_type="leaf_level")
    loaded = model.single_transformer_blocks[1]
    with FakeTensorMode():
        on_gpu = nn.Parameter(torch.empty(1, device="cuda"))
    for module in loaded.modules():
        module._parameters.update(dict.fromkeys(module._parameters, on_gpu))
    check_model(model, model._tomadiff.sites)
    for module in model.modules():  # without the hooks, they are what they seem to be
        if hasattr(module, "_diffusers_hook"):
            module._diffusers_hook.remove_hook(GROUP, recurse=False)
    with pytest.raises(ConfigError, match=r"on several devices \(cpu, cuda\)"):
        check_model(model, model._tomadiff.sites)


@pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none")
def test_sequences_that_are_split_between_processes_are_forecast_and_not_merged(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    subprocess.run([sys.executable, "two_processes.py", str(tmp_path)], cwd=tests, check=True)
    for rank in range(2):
        told = (tmp_path / f"{rank}.txt").read_text()
        assert "none of which has all tokens to merge: give interval alone" in told
        alone, split = torch.load(tmp_path / f"{rank}.pt")
        assert split["steps"] == alone["steps"] and split["steps"]["forecast"] > 0
        assert alike(split["latents"], alone["latents"])


# -- recording ---------------------------------------------------------------------------------------------


def test_a_cuda_graph_around_tomadiff_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5)
    call = bare_call(model)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="would replay this one step for ever"):
        model(**call)
    x = torch.zeros(1, 1, 1)
    for operator, arguments in {
        torch.ops.tomadiff.merge: (0, False, 0, 1, "x", [x]),
        torch.ops.tomadiff.merge_like: (0, 0, 0, x, x),
        torch.ops.tomadiff.unmerge: (0, 0, 0, x, x, x),
    }.items():
        with pytest.raises(ConfigError, match=r"torch 2\.8 or newer"):  # recorded from the inside
            operator(*arguments)
    monkeypatch.undo()
    model(**call)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="from torch 2.8 on")
def test_operators_stay_outside_of_cuda_graphs_that_inductor_records() -> None:
    for operator in (torch.ops.tomadiff.merge, torch.ops.tomadiff.merge_like, torch.ops.tomadiff.unmerge):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags


# -- precision ---------------------------------------------------------------------------------------------


PRODUCTS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def precisions() -> tuple[str, ...]:
    return tuple(product.fp32_precision for product in PRODUCTS)


class Precisions(TorchDispatchMode):
    """How exactly matrices are multiplied while a session plans, and while it doesn't."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session, self.planning, self.others = session, set(), set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            seen = self.planning if self.session.times.phase == "plan" else self.others
            seen.add((func.__name__, *precisions()))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def default_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for switch in (torch.backends, *PRODUCTS):
        switch.fp32_precision = "none"


@pytest.mark.parametrize(
    ("switch", "name", "value"),
    [
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        (torch.backends.mkldnn, "fp32_precision", "tf32"),
        (torch.backends, "fp32_precision", "tf32"),
        (None, "high", None),
        (None, "medium", None),
    ],
    ids=["allow_tf32", "cuda.matmul", "mkldnn.matmul", "mkldnn", "backends", "high", "medium"],
)
def test_tf32_does_not_reach_similarities(
    switch: Any, name: str, value: Any, default_precision: None
) -> None:
    """However it is switched on; after a call it is as the user left it."""
    model = tomadiff.apply(denoiser(make("sd1")), ratio=0.5)
    if switch is None:
        torch.set_float32_matmul_precision(name)
    else:
        setattr(switch, name, value)
    asked = precisions()
    assert {"tf32", "bf16"} & {*asked}
    with torch.no_grad(), Precisions(model._tomadiff) as seen:
        model(**bare_call(model))
    assert ("bmm.default", "ieee", "ieee") in seen.planning
    assert {tuple(precision) for _, *precision in seen.others} == {asked}, (
        "the model's own is the user's choice"
    )
    assert precisions() == asked


def test_precision_that_was_asked_of_all_products_can_be_changed_for_all(default_precision: None) -> None:
    torch.backends.fp32_precision = "tf32"
    model = tomadiff.apply(denoiser(make("sd1")), ratio=0.5)
    with torch.no_grad():
        model(**bare_call(model))
    torch.backends.fp32_precision = "ieee"
    assert precisions() == ("ieee", "ieee")


def test_plans_have_the_type_of_the_tokens_not_of_their_features() -> None:
    """Wan's norms are in fp32 whatever its tokens are in: without this, every merge would cast matrices."""
    case = tiny("wan")
    model = tomadiff.apply(build(case).to(torch.float16), ratio=0.5, dense_blocks=0)
    call = case.call(model, case.GRID, (0,), 0.5)
    with torch.no_grad():
        model(**{key: x.half() if torch.is_floating_point(x) else x for key, x in call.items()})
    plans = [kept.plan for kept in model._tomadiff.plans.values()]
    types = {matrix.dtype for plan in plans for matrix in (plan.merging, plan.unmerging)}
    assert types == {torch.float16}


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"ratio": 0.5}, {"interval": 2}], ids=str)
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_nothing_is_held_after_the_last_step(settings: dict[str, Any], guidance: float) -> None:
    pipe, held = make("sdxl"), []

    def look(pipe: Any, step: int, timestep: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        held.append(tomadiff.report(pipe).held)
        return inputs

    tomadiff.apply(pipe, **settings)
    for _ in range(2):
        draw(pipe, steps=6, guidance=guidance, callback_on_step_end=look)
    assert len(held) == 12 and all(held[:5]) and all(held[6:11])
    assert held[5] == held[11] == 0


@pytest.mark.parametrize("settings", [{"ratio": 0.5, "interval": 1}, {"interval": 2}], ids=str)
def test_positions_are_not_held_after_the_last_step(settings: dict[str, Any]) -> None:
    pipe = tomadiff.apply(make("flux"), **settings)
    seen: list[weakref.ref[Tensor]] = []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(weakref.ref(kwargs["img_ids"])), with_kwargs=True
    )
    draw(pipe, steps=4)
    assert seen and not any(ids() is not None for ids in seen)


def test_plans_are_held_until_the_last_call_of_the_last_step() -> None:
    """With true guidance, Flux calls its model twice a step."""
    made = []
    for guidance in (1.0, 3.0):
        pipe = tomadiff.apply(make("flux"), ratio=0.5, refresh_destinations=9, refresh_weights=9)
        draw(pipe, steps=4, guidance=guidance)
        made.append(tomadiff.report(pipe).refreshes)
        assert tomadiff.report(pipe).held == 0
    once, twice = made
    assert once["destinations"] > 0 and twice == {"destinations": 2 * once["destinations"], "weights": 0}


def test_what_is_held_with_a_plan_is_reported() -> None:
    """Where rows of tables are, and the weights of keys."""
    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5, where="block", weigh_keys=True)
    with torch.no_grad():
        model(**bare_call(model))
    plans = model._tomadiff.plans.values()
    for kept in plans:
        assert kept.places and kept.key_bias is not None
    held, let_go = tomadiff.report(model).held, 0
    for kept in plans:
        let_go += sum(rows.untyped_storage().nbytes() for rows in kept.places.values())
        kept.places.clear()
    assert held - tomadiff.report(model).held == let_go
    for kept in plans:
        let_go += kept.key_bias.untyped_storage().nbytes()
        kept.key_bias = None
    assert held - tomadiff.report(model).held == let_go


def test_forgetting_lets_go_in_the_middle() -> None:
    model = tomadiff.apply(denoiser(make("sdxl")), ratio=0.5)
    with torch.no_grad():
        first = model(**bare_call(model))[0]
    report = tomadiff.report(model)
    assert report.held > 0 and "MB of plans and forecasts are held" in str(report)
    assert tomadiff.forget(model) is model
    assert tomadiff.report(model).held == 0
    with torch.no_grad():
        assert torch.equal(model(**bare_call(model))[0], first)


# -- compiling block by block ------------------------------------------------------------------------------


def test_blocks_are_compiled_for_the_lengths_that_they_get() -> None:
    """Not for any length, though dense blocks get other lengths than merged ones."""
    torch.compiler.reset()
    lengths: list[list[int]] = []  # of each graph; a symbol is an input of its own
    compiled: list[int] = []  # graphs after each call

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        lengths.append([side for x in inputs for side in (x.shape if isinstance(x, Tensor) else [x])])
        return graph.forward

    model = tomadiff.apply(denoiser(make("flux")), ratio=0.5)
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    with torch.no_grad():
        for time in (0.9, 0.6, 0.3):
            model(**bare_call(model) | {"timestep": torch.tensor([time])})
            compiled.append(len(lengths))
    assert compiled[0] > 1 and compiled == compiled[:1] * 3, "nothing is compiled from step to step"
    assert all(type(side) is int for sides in lengths for side in sides), "a symbol is slower code"
    torch.compiler.reset()
