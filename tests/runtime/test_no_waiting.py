"""Positions that are on a device are read once in a generation, however many steps it has."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import build, grid_of, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import tomadiff
from tomadiff.core import partition, slot_layout
from tomadiff.methods import todo, tome
from tomadiff.runtime import layout
from tomadiff.runtime.layout import LayoutReader

STEPS = 10
TABLE = torch.linspace(900, 1, STEPS)  # of timesteps, of which each call gets a view, as from a scheduler
SETTINGS: tuple[dict[str, Any], ...] = ({"ratio": 0.5, "interval": 1, "dense_blocks": 0}, {"interval": 2})


def call_of(case: ModuleType, model: nn.Module, step: int, device: str) -> dict[str, Any]:
    """A call of new tensors. Of LTX, one that has coordinates instead of sides."""
    grid = grid_of(case)
    call = case.call(model, grid, (0,), 0.9)
    if case.__name__ == "tiny.ltx":
        axes = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
        call["video_coords"] = torch.stack([axis.flatten() for axis in axes])[None]
    time = model._tomadiff.time
    call[time] = TABLE[step].expand(call[time].shape)
    return tree_map_only(Tensor, lambda x: x.to(device), call)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["flux2_reference", "flux_kontext", "krea2", "ltx"])
@torch.no_grad()
def test_ten_steps_read_nothing_from_a_device_but_the_first_positions(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, reading a value raises; so what is read first comes from the CPU, once."""
    case = tiny(name)
    model = tomadiff.apply(build(case), **settings)
    table = TABLE.to("meta")
    first = [call_of(case, model, 0, "cpu")]
    read = LayoutReader.read

    def read_first(self: LayoutReader, arguments: dict[str, Any], call: int = 0) -> layout.Layout:
        if first:
            read(self, first.pop(), call)
        return read(self, arguments, call)

    monkeypatch.setattr(LayoutReader, "read", read_first)
    model.to("meta")
    time = model._tomadiff.time
    for step in range(STEPS):
        call = call_of(case, model, step, "meta")
        model(**call | {time: table[step].expand(call[time].shape)})
    merges = "ratio" in settings
    assert (not first) == merges, "with interval alone, none are read at all"
    steps = tomadiff.report(model).steps
    assert sum(steps.values()) == STEPS and (steps["forecast"] > 0) == (not merges)


class NoWaiting(TorchDispatchMode):
    """Whatever would make the host wait for a device raises: reading values, and copies to another device."""

    READERS = (
        *("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"),
        *("bincount", "_linalg_check_errors"),
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in self.READERS or masks:
            raise AssertionError(f"{func} reads values")
        if name == "_to_copy":
            wanted = (kwargs or {}).get("device") or args[0].device
            assert torch.device(wanted).type == args[0].device.type, "copied to another device"
        if name == "copy_":
            assert args[0].device.type == args[1].device.type, "copied to another device"
        return func(*args, **(kwargs or {}))


METHODS: tuple[dict[str, Any], ...] = (
    {"ratio": 0.5},  # weights are made in every step, by regression
    {"ratio": 0.5, "where": "kv", "weigh_keys": True},
    {"method": "tome"},
    {"method": "tofu"},
    {"method": "todo", "weigh_keys": True},
)


@pytest.mark.parametrize(
    ("name", "settings"),
    [*product(["ideogram4"], SETTINGS), *product(["sdxl", "flux"], METHODS)],
    ids=str,
)
@torch.no_grad()
def test_no_step_but_the_first_two_reads_values(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans can't be made on the meta device, nor does Ideogram run on it: the CPU is taken for a device."""
    monkeypatch.setattr(layout, "_elsewhere", lambda source: isinstance(source, Tensor))
    case = tiny(name)
    model = tomadiff.apply(build(case), **settings)
    for step in range(STEPS):  # the first two may compare prompts
        with NoWaiting() if step > 1 else nullcontext():
            model(**call_of(case, model, step, "cpu"))
    report = tomadiff.report(model)
    assert sum(report.steps.values()) == STEPS
    assert any(site.kept < site.tokens for site in report.sites) == (settings != {"interval": 2})


@pytest.mark.parametrize("method", ["toma", "tome", "tofu", "todo"])
@torch.no_grad()
def test_both_layouts_of_regions_are_made_in_the_first_step(method: str) -> None:
    """Where they are shifted in every other step: the second one would wait for its copy to the device."""
    for made in (partition, slot_layout, tome._split, todo._downsampled):
        made.cache_clear()
    case = tiny("unet")
    model = tomadiff.apply(build(case), method=method, shift=True, interval=1, dense_blocks=0).to("meta")
    table, time = TABLE.to("meta"), model._tomadiff.time
    for step in range(4):
        call = call_of(case, model, step, "meta")
        with NoWaiting() if step else nullcontext():
            model(**call | {time: table[step].expand(call[time].shape)})
    assert {key.shifted for key in model._tomadiff.plans} == {False, True}
