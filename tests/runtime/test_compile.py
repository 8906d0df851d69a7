"""torch.compile: one graph, no breaks, the same result, and nothing compiled twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparison import mostly_alike
from pipelines import draw, make
from tiny import build, run, tiny
from torch import Tensor, nn
from torch._dynamo.utils import counters

import tomadiff
from tomadiff.errors import ConfigError

# dense steps, merged ones, and a new plan, all within the steps below
SETTINGS: dict[str, Any] = {"ratio": [(2, 0.5)], "refresh_destinations": 3, "refresh_weights": 3}
STEPS = 9
# as small as can be, since each is compiled twice and more
SHALLOW: dict[str, dict[str, Any]] = {
    "unet": {
        "block_out_channels": (16,),
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "mid_block_type": None,
    },
    "sd3": {"num_layers": 2},
    "flux": {"num_layers": 1, "num_single_layers": 1},
}
GRID = (16, 16)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compiled before, and how often."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def shallow(name: str, **more: Any) -> nn.Module:
    return build(tiny(name), **{**SHALLOW[name], **more})


@torch.no_grad()
def generated(model: nn.Module, name: str, grid: tuple[int, int] = GRID, steps: int = STEPS) -> Tensor:
    """What comes out of all calls of a generation."""
    inner = getattr(model, "_orig_mod", model)
    calls = [tiny(name).call(inner, grid, (0, 1), 1 - step / steps) for step in range(steps)]
    return torch.stack([model(**call, return_dict=False)[0] for call in calls])


@pytest.mark.parametrize(("name", "applied"), [*((name, "before") for name in SHALLOW), ("flux", "after")])
def test_dense_and_merged_steps_are_one_graph_each_for_all_generations(name: str, applied: str) -> None:
    model = shallow(name)
    expected = generated(tomadiff.apply(model, **SETTINGS), name)
    tomadiff.remove(model)
    if applied == "before":
        tomadiff.apply(model, **SETTINGS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if applied == "after":
        generated(compiled, name, steps=1)
        counters.clear()
        tomadiff.apply(compiled, **SETTINGS)
    torch.testing.assert_close(generated(compiled, name), expected)
    assert graphs() == 2
    torch.testing.assert_close(generated(compiled, name), expected)
    assert graphs() == 2, "nothing is compiled again, neither from step to step nor for a new plan"
    report = tomadiff.report(compiled)
    assert {(site.calls, site.dense_calls) for site in report.sites} == {(18, 4)}
    assert all(site.kept == site.tokens // 2 for site in report.sites)


@pytest.mark.parametrize("name", SHALLOW)
def test_a_compiled_model_gives_the_same_result(name: str) -> None:
    """In merged steps; with the Flux also in skipped ones, in the mode that records CUDA graphs.

    By inductor, with a single block; others are lowered alike but not to C++, of which each kernel takes a
    second to compile.
    """
    graphed = name == "flux"
    model = shallow(name, num_layers=0) if graphed else shallow(name)
    skipped = {"interval": 2, "dense_blocks": 0} if graphed else {}
    tomadiff.apply(model, **SETTINGS | {"ratio": 0.5, "interval": 1} | skipped)
    expected = generated(model, name)
    how = {"mode": "reduce-overhead"} if graphed else {"backend": "aot_eager"}
    compiled = torch.compile(model, fullgraph=True, **how)
    # other sums than torch's, and on each CPU others
    assert mostly_alike(generated(compiled, name).transpose(0, 1), expected.transpose(0, 1))
    report = tomadiff.report(model)
    assert any(site.kept < site.tokens for site in report.sites)
    assert (report.model_calls["forecast"] > 0) == graphed
    assert graphs() == (2 if graphed else 1), "skipped steps have a small one of their own"


@pytest.mark.parametrize("name", ["sd3", "prx"])
def test_what_happens_at_the_call_of_attention_is_outside_of_compiled_graphs(name: str) -> None:
    """In SD3 that is weighing keys, in PRX merging them; a full graph can't be had, and says why."""
    model = build(tiny(name), **SHALLOW.get(name, {}))
    tomadiff.apply(model, ratio=0.5, where="kv", weigh_keys=True)
    expected = run(model, tiny(name))
    torch.testing.assert_close(run(torch.compile(model, backend="eager"), tiny(name)), expected)
    torch.compiler.reset()
    with pytest.raises(Exception, match="at the call of attention"):
        run(torch.compile(model, backend="eager", fullgraph=True), tiny(name))


def test_a_new_size_is_compiled_once() -> None:
    model = tomadiff.apply(shallow("flux"), **SETTINGS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    generated(compiled, "flux", steps=3)
    odd = (12, 10)
    expected = generated(model, "flux", grid=odd)
    torch.testing.assert_close(generated(compiled, "flux", grid=odd), expected)
    assert graphs() == 4, "dense and merged"
    for grid in (odd, GRID):
        generated(compiled, "flux", grid=grid, steps=3)
    assert graphs() == 4, "known sizes are not compiled again"


KEYS = {"where": "kv", "weigh_keys": True}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("unet", KEYS),
        ("flux", KEYS),
        ("flux", {"where": "kv"}),
        ("flux", {"where": "module"}),
        ("flux", {"where": "block", "weigh_keys": True, "share": "kind"}),
        ("flux", {"where": "block", "region_size": 5, "shift": True}),  # regions that don't divide the grid
        ("flux", {"regions": "stripe"}),
        ("flux", {"method": "tome"}),
        ("flux", {"method": "todo", "ratio": 0.75}),
    ],
    ids=str,
)
def test_other_settings_make_one_graph_too(name: str, settings: dict[str, Any]) -> None:
    model = shallow(name, **{"num_layers": 2} if name == "flux" else {})
    tomadiff.apply(model, **{"ratio": 0.5, **settings})
    expected = generated(model, name, steps=3)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(generated(compiled, name, steps=3), expected)
    assert graphs() == 1
    assert all(site.kept < site.tokens for site in tomadiff.report(model).sites)


def test_a_pipeline_with_a_compiled_model_draws_the_same() -> None:
    pipe = tomadiff.apply(make("flux"), ratio=0.5)
    expected = draw(pipe, steps=STEPS)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
    torch.testing.assert_close(draw(pipe, steps=STEPS), expected)
    assert graphs() == 1


def test_training_in_one_graph_is_refused() -> None:
    model = tomadiff.apply(shallow("flux"), ratio=0.5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    call = tiny("flux").call(model, (8, 8), (0,), 0.5)
    with pytest.raises(Exception, match=r"train without torch\.compile"):
        compiled(**call, return_dict=False)[0].sum().backward()


# -- block by block ----------------------------------------------------------------------------------------


def regional(name: str, depth: int) -> nn.Module:
    layers = (
        {"num_layers": depth, "num_single_layers": depth} if name == "flux" else {"layers_per_block": depth}
    )
    return shallow(name, **layers)


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_blocks_of_a_kind_share_what_is_compiled(name: str) -> None:
    counts = []
    for depth in (3, 4):  # the first block is dense
        torch.compiler.reset()
        counters.clear()
        model = tomadiff.apply(regional(name, depth), **SETTINGS)
        expected = generated(model, name)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(generated(model, name), expected)
        counts.append(graphs())
    assert counts[0] == counts[1], "however many blocks there are"


def test_blocks_are_compiled_for_more_sizes_than_torch_allows_by_default() -> None:
    model = tomadiff.apply(shallow("flux", num_layers=0), ratio=0.5, dense_blocks=0)
    with torch._dynamo.config.patch(recompile_limit=1):  # instead of 8, to be done sooner
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        for width in (4, 6):
            generated(model, "flux", (8, width), steps=1)
    assert graphs() == 2


def test_compiled_blocks_stay_compiled_when_merging_is_replaced_or_removed() -> None:
    model = regional("flux", 2)
    dense = generated(model, "flux")
    quarter = generated(tomadiff.apply(model, ratio=0.25), "flux")
    tomadiff.apply(model, ratio=0.5)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    tomadiff.apply(model, ratio=0.25)
    torch.testing.assert_close(generated(model, "flux"), quarter)
    assert graphs() > 0
    tomadiff.remove(model)
    torch.testing.assert_close(generated(model, "flux"), dense)
    assert all(block._compiled_call_impl is not None for block in model.transformer_blocks)


def test_gradients_go_through_blocks_that_are_compiled_one_by_one() -> None:
    model = tomadiff.apply(regional("flux", 1), ratio=0.5)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    call = tiny("flux").call(model, (8, 8), (0,), 0.5)
    model(**call, return_dict=False)[0].sum().backward()
    weight = model.transformer_blocks[0].attn.to_q.weight
    assert weight.grad.isfinite().all() and weight.grad.any()


def test_compiling_blocks_before_merging_is_refused() -> None:
    model = regional("flux", 1)
    model.compile_repeated_blocks(backend="eager")
    with pytest.raises(ConfigError, match=r"call tomadiff.apply first, then compile_repeated_blocks"):
        tomadiff.apply(model)


def test_merging_inside_blocks_that_are_compiled_one_by_one_is_refused() -> None:
    model = tomadiff.apply(regional("flux", 1), where="module")
    model.compile_repeated_blocks(backend="eager")
    with pytest.raises(ConfigError, match=r'use where="span" or "block", or compile the whole model'):
        generated(model, "flux", steps=1)
