"""Sites that remember what they did to each token, against the formula on plain matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from pipelines import bare_call, denoiser, draw, make
from torch import Tensor, nn

import tomadiff
from tomadiff.hook import Patch, SiteHook


class Watch:
    """What goes into and comes out of a run of sites, whole and merged, and the plan, step by step."""

    def __init__(self, patch: Patch, hook: SiteHook) -> None:
        self.patch, self.first, self.last = patch, hook.run.sites[0], hook.run.sites[-1]
        if patch.config.where != "span":
            self.first = self.last = hook
        self.whole: list[tuple[Tensor, Tensor]] = []
        self.merged: list[tuple[Tensor, Tensor, Any]] = []
        self.first.place.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.last.place.module.register_forward_hook(self._leave)
        for site in {self.first, self.last}:
            self._wrap(site)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.x = (kwargs | dict(zip(self.first.parameters, args)))[self.first.argument].clone()

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.whole.append((self.x, self._image(output).clone()))

    def _image(self, output: Any) -> Tensor:
        return output[self.last.site.outputs[0]] if self.last.site.outputs else output

    def _wrap(self, site: SiteHook) -> None:
        inner = site.fn_ref.original_forward

        def recorded(**call: Any) -> Any:
            if site is self.first:
                self.mx = call[site.argument].clone()
            output = inner(**call)
            if site is self.last and not self.patch.dense:
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
        {"where": "block", "shift": True, "share": "block"},
        {"where": "module"},
        {"where": "span"},
        {"where": "span", "shift": True},
        {"method": "tome"},
        {"dense_steps": 0},
    ],
    ids=str,
)
def test_what_is_new_is_unmerged_onto_what_was_done_before(name: str, settings: dict[str, Any]) -> None:
    """C <- C + U (G - M C), with G the change of merged tokens; a dense step tells C itself."""
    pipe = make(name)
    tomadiff.apply(pipe, ratio=0.5, remember=True, **{"dense_steps": 1, **settings})
    patch = denoiser(pipe)._tomadiff
    watches = [Watch(patch, hook) for hook in patch.sites if not hook.site.lead]
    draw(pipe, size=(136, 208) if name.startswith("sd1") else (144, 208), steps=4, guidance=1.0)
    assert watches
    for watch in watches:
        dense = patch.config.dense_steps
        assert len(watch.whole) == 4 and len(watch.merged) == 4 - dense
        residual = watch.first.site.residual
        x, y = watch.whole[0]
        change = torch.zeros(1, watch.merged[0][2].regions.tokens, y.shape[-1])
        if dense:
            change = y - x if residual else y
        for step, (mx, my, plan) in enumerate(watch.merged, dense):
            merging, unmerging = matrices(plan)
            change = change + unmerging @ ((my - mx if residual else my) - merging @ change)
            x, y = watch.whole[step]
            # inside a run, tokens are in the order of the regions
            x = x if watch.first is watch.first.run.sites[0] else plan.regions.restore(x)
            y = y if watch.last is watch.last.run.sites[-1] else plan.regions.restore(y)
            torch.testing.assert_close(y, x + change if residual else change, atol=1e-4, rtol=1e-3)


def test_every_so_many_th_step_is_dense(pipe: DiffusionPipeline) -> None:
    def dense_steps(steps: int, **settings: Any) -> list[int]:
        tomadiff.apply(pipe, ratio=0.5, **settings)
        patch = denoiser(pipe)._tomadiff
        return [step for step in range(steps) if patch._is_dense(step)]

    assert dense_steps(10, dense_every=3) == [0, 3, 6, 9]
    assert dense_steps(10, dense_steps=1, dense_every=3) == [0, 3, 6, 9]
    assert dense_steps(10, dense_steps=3, dense_every=3) == [0, 1, 2, 5, 8]
    assert dense_steps(10, dense_steps=2) == [0, 1]
    tomadiff.apply(pipe, ratio=0.5, dense_steps=2, dense_every=2, remember=True)
    draw(pipe, steps=6, guidance=1.0)
    assert {(site.calls, site.dense_calls) for site in tomadiff.report(pipe).sites} == {(6, 4)}


def test_nothing_is_remembered_from_one_generation_to_the_next(pipe: DiffusionPipeline) -> None:
    """Another size, other guidance, another batch: each picture is as if it were the first."""
    tomadiff.apply(pipe, ratio=0.5, remember=True, dense_steps=1, shift=True)
    once = draw(pipe, steps=3)
    draw(pipe, steps=2, size=(96, 160), seeds=(3, 4))
    draw(pipe, steps=2, guidance=1.0)
    assert torch.equal(draw(pipe, steps=3), once)


def test_the_two_calls_of_a_guided_step_remember_apart() -> None:
    """Flux runs prompt and negative prompt one after the other: the same on both sides is no guidance."""
    from pipelines import text

    pipe = tomadiff.apply(make("flux"), ratio=0.5, remember=True, dense_steps=1)
    embeds, pooled = text(0)
    same = {"negative_prompt_embeds": embeds, "negative_pooled_prompt_embeds": pooled}
    guided, plain = draw(pipe, steps=4, guidance=5.0, **same), draw(pipe, steps=4, guidance=1.0)
    torch.testing.assert_close(guided, plain, atol=1e-4, rtol=1e-3)


def test_memory_does_not_grow_and_goes_with_the_patch(pipe: DiffusionPipeline) -> None:
    tomadiff.apply(pipe, ratio=0.5, remember=True, dense_steps=1)
    sizes = []
    for steps in (2, 5):
        draw(pipe, steps=steps)
        changes = [change for hook in denoiser(pipe)._tomadiff.sites for change in hook.changes.values()]
        sizes.append(sum(change.tokens.numel() for change in changes))
    assert sizes[0] == sizes[1] > 0


def test_gradients_flow_and_no_graph_is_kept(name: str) -> None:
    model = denoiser(make(name)).train()
    tomadiff.apply(model, ratio=0.5, remember=True)
    model(**bare_call(model))[0].square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > 20 and all(g.isfinite().all() for g in gradients)
    changes = [change for hook in model._tomadiff.sites for change in hook.changes.values()]
    assert changes and not any(change.tokens.requires_grad for change in changes)
