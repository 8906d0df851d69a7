"""Sites that remember what they did to each token, against the formula on plain matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import bare_call, denoiser, draw, make, text
from torch import Tensor

import tomadiff
from tomadiff.config import Config
from tomadiff.methods import METHODS
from tomadiff.runtime.hook import SiteHook
from tomadiff.runtime.memory import Memory
from tomadiff.runtime.plan_cache import KeptPlan
from tomadiff.runtime.schedule import Pace
from tomadiff.runtime.session import Patch


class Watch:
    """What goes into and comes out of a run of sites, whole and merged, and the plan, step by step."""

    def __init__(self, patch: Patch, hook: SiteHook) -> None:
        self.patch, self.first, self.last = patch, hook.run.sites[0], hook.run.sites[-1]
        if patch.config.where != "span":
            self.first = self.last = hook
        self.whole: list[tuple[Tensor, Tensor]] = []
        self.merged: list[tuple[Tensor, Tensor, Any]] = []
        # around what the hooks made of the modules' forwards: torch's own hooks would cut the run
        enter, leave = self.first.place.module, self.last.place.module
        enter.forward = functools.partial(self._enter, enter.forward)
        leave.forward = functools.partial(self._leave, leave.forward)
        for site in {self.first, self.last}:
            self._wrap(site)

    def _enter(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.x = (kwargs | dict(zip(self.first.parameters, args)))[self.first.argument].clone()
        return forward(*args, **kwargs)

    def _leave(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        self.whole.append((self.x, self._image(output).clone()))
        return output

    def _image(self, output: Any) -> Tensor:
        return output[self.last.site.outputs[0]] if self.last.site.outputs else output

    def _wrap(self, site: SiteHook) -> None:
        inner = site.fn_ref.original_forward

        def recorded(**call: Any) -> Any:
            if site is self.first:
                self.mx = call[site.argument].clone()
            output = inner(**call)
            if site is self.last and not self.patch.state.dense and site.ratio:
                self.merged.append((self.mx, self._image(output).clone(), site.run.kept.plan))
            return output

        site.fn_ref.original_forward = recorded


def matrices(plan: Any) -> tuple[Tensor, Tensor]:
    """M, [B, K, N], and U, [B, N, K]: what a plan does to unit vectors."""
    batch, kept, tokens = len(plan.destinations), plan.destinations.shape[1], plan.regions.tokens
    merging = plan.merge(plan.regions.arrange(torch.eye(tokens).expand(batch, -1, -1)))
    unmerging = plan.regions.restore(plan.unmerge(torch.eye(kept).expand(batch, -1, -1)))
    return merging, unmerging


@pytest.mark.parametrize(
    "settings",
    [
        {"where": "block"},
        {"where": "block", "shift": True, "share": "kind"},
        {"where": "module"},
        {"where": "span"},
        {"where": "span", "shift": True},
        {"method": "tome"},
        {"dense_steps": 1},
        {"ratio": [(0, 0.5), (3, 0.25)], "dense_last_steps": 1},
        {"ratio": [(3, 0.5)]},
    ],
    ids=str,
)
def test_changes_are_forecast_from_dense_steps_and_corrected_by_merged_ones(
    name: str, settings: dict[str, Any]
) -> None:
    """With C the change in the last dense step and s its slope: at first C + d s; later, with G what merged
    tokens say and G1 what they said in that first step, C + d s + U ((G - G1) - M (d - d1) s).
    """
    pipe = make(name)
    tomadiff.apply(pipe, **{"ratio": 0.5, "remember": True, "dense_steps": 2, "dense_every": 3, **settings})
    patch = denoiser(pipe)._tomadiff
    watches = [Watch(patch, hook) for hook in patch.sites if not hook.site.lead]
    draw(pipe, size=(136, 208) if name.startswith("sd1") else (144, 208), steps=9, guidance=1.0)
    assert watches
    pace = patch.state.pace
    for watch in watches:
        residual, merged = watch.first.site.residual, iter(watch.merged)
        change = slope = first = None
        for step, (x, y) in enumerate(watch.whole):
            if pace.dense(step) or not watch.first.place.ratios[pace.range(step)]:
                new = y - x if residual else y
                slope = torch.zeros_like(new) if change is None else (new - change) / (step - anchor)  # noqa: F821
                change, anchor, first = new, step, None
                continue
            mx, my, plan = next(merged)
            # inside a run, tokens are in the order of the regions
            x = x if watch.first is watch.first.run.sites[0] else plan.regions.restore(x)
            y = y if watch.last is watch.last.run.sites[-1] else plan.regions.restore(y)
            g = my - mx if residual else my
            first = first or (step, g)
            merging, unmerging = matrices(plan)
            expected = change + (step - anchor) * slope
            expected = expected + unmerging @ (g - first[1] - merging @ ((step - first[0]) * slope))
            torch.testing.assert_close(y, x + expected if residual else expected, atol=1e-3, rtol=1e-3)
        assert next(merged, None) is None


def test_auto_remembers_where_there_are_steps_enough_and_a_pipeline_to_tell(pipe: DiffusionPipeline) -> None:
    def remembered(target: Any, steps: int, **settings: Any) -> tuple[bool, int]:
        tomadiff.apply(target, ratio=0.5, **settings)
        draw(pipe, steps=steps, guidance=1.0)
        patch = denoiser(pipe)._tomadiff
        return any(hook.memories for hook in patch.sites), patch.sites[0].dense_calls

    assert remembered(pipe, 8) == (True, 4)  # steps 0, 1, 4 and 7
    assert remembered(pipe, 7) == (False, 0)
    assert remembered(denoiser(pipe), 8) == (False, 0)
    assert remembered(denoiser(pipe), 8, remember=True) == (True, 4)
    assert remembered(pipe, 8, remember=False) == (False, 0)
    assert remembered(pipe, 8, dense_every=0) == (False, 0)
    assert remembered(pipe, 8, dense_steps=1, dense_every=7) == (True, 2)


def test_a_generation_that_stays_dense_is_told() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=0.5, dense_steps=2)
    with pytest.warns(UserWarning, match="nothing is merged: all 2 steps"):
        draw(pipe, steps=2)


def test_a_range_of_steps_waits_for_the_next_dense_one() -> None:
    """What sites remember is for one plan, from a dense step to the next."""
    pace = Pace.of(tomadiff.Config(ratio=[(0, 0.25), (3, 0.5), (8, 0.75)]), 12)
    assert [step for step in range(12) if pace.dense(step)] == [0, 1, 4, 7, 10]
    assert [pace.range(step) for step in range(12)] == [0] * 4 + [1] * 6 + [2] * 2
    forgetful = Pace.of(tomadiff.Config(ratio=[(0, 0.25), (3, 0.5), (8, 0.75)], remember=False), 12)
    assert [forgetful.range(step) for step in range(12)] == [0] * 3 + [1] * 5 + [2] * 4


def test_training_merges_in_every_call(name: str) -> None:
    """There are no steps in it, so that none is dense."""
    model = tomadiff.apply(denoiser(make(name)).train(), ratio=0.5, dense_steps=2, dense_every=3)
    model(**bare_call(model))
    assert {site.dense_calls for site in tomadiff.report(model).sites} == {0}


def test_every_so_many_th_step_is_dense(pipe: DiffusionPipeline) -> None:
    def dense_steps(**settings: Any) -> list[int]:
        tomadiff.apply(pipe, ratio=0.5, remember=False, **settings)
        patch, dense = denoiser(pipe)._tomadiff, []
        handle = patch.model.register_forward_pre_hook(lambda *_: dense.append(patch.state.dense))
        draw(pipe, steps=10, guidance=1.0)
        handle.remove()
        return [step for step, is_dense in enumerate(dense) if is_dense]

    assert dense_steps(dense_every=3) == [0, 3, 6, 9]
    assert dense_steps(dense_steps=1, dense_every=3) == [0, 3, 6, 9]
    assert dense_steps(dense_steps=3, dense_every=3) == [0, 1, 2, 5, 8]
    assert dense_steps(dense_steps=2) == [0, 1]


def test_nothing_is_remembered_from_one_generation_to_the_next(pipe: DiffusionPipeline) -> None:
    """Another size, other guidance, another batch: each picture is as if it were the first."""
    tomadiff.apply(pipe, ratio=0.5, remember=True, shift=True)
    once = draw(pipe, steps=5)
    draw(pipe, steps=3, size=(96, 160), seeds=(3, 4))
    draw(pipe, steps=3, guidance=1.0)
    assert torch.equal(draw(pipe, steps=5), once)


def test_the_two_calls_of_a_guided_step_remember_apart() -> None:
    """Flux runs prompt and negative prompt one after the other: the same on both sides is no guidance."""
    pipe = tomadiff.apply(make("flux"), ratio=0.5, remember=True)
    embeds, pooled = text(0)
    same = {"negative_prompt_embeds": embeds, "negative_pooled_prompt_embeds": pooled}
    guided, plain = draw(pipe, steps=4, guidance=5.0, **same), draw(pipe, steps=4, guidance=1.0)
    torch.testing.assert_close(guided, plain, atol=1e-4, rtol=1e-3)


def test_memory_does_not_grow_and_goes_with_the_patch(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5, remember=True)
    sizes = []
    for steps in (5, 11):
        draw(pipe, steps=steps)
        memories = [memory for hook in denoiser(pipe)._tomadiff.sites for memory in hook.memories.values()]
        sizes.append(sum(memory.dense.change.numel() for memory in memories))
    assert sizes[0] == sizes[1] > 0
    draw(pipe, steps=1, size=(64, 64))
    memories = [memory for hook in denoiser(pipe)._tomadiff.sites for memory in hook.memories.values()]
    assert 0 < sum(memory.dense.change.numel() for memory in memories) < sizes[0]


def test_a_forecast_keeps_its_slope_where_a_cache_leaves_dense_steps_out() -> None:
    """Then another plan comes with no dense step in between."""
    first, second, features = torch.randn(3, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    memory = Memory.of(1, second, Memory.of(0, first, None))
    for step, shifted in ((2, False), (4, True)):
        plan = METHODS["toma"](features, (8, 8), 0.5, Config(region_size=4), shifted=shifted)
        merged = plan.merge(plan.regions.arrange(features))
        change = memory.change(KeptPlan(plan, None, step, step), merged, step)
        expected = second + (step - 1) * (second - first)
        torch.testing.assert_close(plan.regions.restore(change), expected)
