"""What is drawn is what was done."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from pipelines import denoiser, draw, make

import tomadiff
from tomadiff.runtime.hook import SiteHook
from tomadiff.runtime.plan_cache import KeptPlan
from tomadiff.tools.drawing import contact_sheet, difference, draw_merge_map
from tomadiff.tools.merge_map import MergeMap, Recorder


def test_the_map_of_a_step_is_the_plan_that_was_used_in_it(pipe: DiffusionPipeline) -> None:
    """The plan is caught where it is used: at the merge of the first site."""
    tomadiff.apply(pipe, ratio=0.5, refresh_destinations=1, refresh_weights=1)
    patch = denoiser(pipe)._tomadiff
    used: list[tuple[SiteHook, KeptPlan]] = []
    for hook in patch.sites:
        note_plans(hook, used)
    recorder = Recorder(pipe, steps=[0, 2])
    draw(pipe, size=(144, 96), steps=3, guidance=1.0, callback_on_step_end=recorder)
    assert [mapped.step for mapped in recorder.maps] == [0, 2]
    patch.site_calls.settle()
    finest = max(hook.counts.tokens for hook, _ in used)
    kind = used[0][0].site.kind
    plans = [k.plan for hook, k in used if (hook.counts.tokens, hook.site.kind) == (finest, kind)]
    per_step = len(plans) // 3
    for mapped, plan in zip(recorder.maps, (plans[0], plans[2 * per_step])):
        assert torch.equal(mapped.destinations, plan.destinations[-1])
        assert math.prod(mapped.grid) == finest == len(mapped.owners)
        check_owners(mapped, plan)


def note_plans(hook: SiteHook, used: list[tuple[SiteHook, KeptPlan]]) -> None:
    plan = hook.planner.plan

    def noted(*args: Any, **kwargs: Any) -> KeptPlan:
        used.append((hook, plan(*args, **kwargs)))
        return used[-1][1]

    hook.planner.plan = noted


def check_owners(mapped: MergeMap, plan) -> None:
    """Merging pictures of single tokens, one at a time, must put them where the map says."""
    for token in range(0, len(mapped.owners), 7):
        x = torch.zeros(len(plan.destinations), len(mapped.owners), 1)
        x[:, token] = 1
        weights = plan.merge(x)[-1, :, 0] * plan.log_sizes()[-1].exp()
        assert plan.destinations[-1, weights.argmax()] == mapped.owners[token]
    own = mapped.owners[mapped.destinations]
    assert (own == mapped.destinations).float().mean() > 0.9, "destinations stay what they are, twins aside"


def test_a_plan_that_is_kept_has_a_map_in_every_step_that_uses_it() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=0.5, refresh_destinations=9, refresh_weights=9)
    recorder = Recorder(pipe)
    draw(pipe, steps=3, callback_on_step_end=recorder)
    assert [mapped.step for mapped in recorder.maps] == [0, 1, 2]


def test_dense_steps_have_no_map() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=[(2, 0.5)])
    recorder = Recorder(pipe, steps=range(4))
    draw(pipe, steps=4, callback_on_step_end=recorder)
    assert [mapped.step for mapped in recorder.maps] == [2, 3]


def test_a_map_is_of_the_ratio_that_its_step_has() -> None:
    pipe = tomadiff.apply(make("sd1"), ratio=[(0, 0.25), (2, 0.75), (3, 0)])
    recorder = Recorder(pipe)
    draw(pipe, steps=4, callback_on_step_end=recorder)
    shares = [len(mapped.destinations) / len(mapped.owners) for mapped in recorder.maps]
    assert shares == [0.75, 0.75, 0.25]


def test_maps_need_merging_and_a_grid() -> None:
    pipe = make("sd1")
    with pytest.raises(ValueError, match=r"tomadiff\.apply"):
        Recorder(pipe, [0])
    with pytest.raises(ValueError, match="tile"):
        Recorder(tomadiff.apply(pipe, regions="stripe"), [0])


def test_a_map_is_drawn_with_one_colour_for_each_group() -> None:
    owners = torch.tensor([0, 0, 3, 3, 0, 0, 3, 7])
    mapped = MergeMap(0, "block", (2, 4), torch.tensor([0, 3, 7]), owners, torch.zeros(8, dtype=torch.long))
    pixels = np.zeros((2, 4, 3), dtype=np.uint8)
    pixels[:, :2], pixels[:, 2:], pixels[1, 3] = (200, 0, 0), (0, 200, 0), (0, 0, 200)
    drawn = np.asarray(draw_merge_map(Image.fromarray(pixels), mapped, side=400))
    assert drawn.shape == (200, 400, 3)
    corner = {token: tuple(drawn[token // 4 * 100 + 20, token % 4 * 100 + 20]) for token in range(8)}
    assert {corner[t] for t in (0, 1, 4, 5)} == {(200, 0, 0)}
    assert {corner[t] for t in (2, 3, 6)} == {(0, 200, 0)}
    assert corner[7] == (0, 0, 200)
    assert tuple(drawn[50, 50]) == (255, 255, 255), "a dot on a destination"
    assert tuple(drawn[50, 150]) != (255, 255, 255), "none elsewhere"


def test_a_contact_sheet_holds_every_picture_whole() -> None:
    rows = [[Image.new("RGB", (30, 20), (10 * r, 100, 10 * c)) for c in range(3)] for r in range(2)]
    sheet = np.asarray(contact_sheet(rows, ["one", "two", "three"], ["first", "second"]))
    for r in range(2):
        for c in range(3):
            assert (sheet == (10 * r, 100, 10 * c)).all(-1).sum() == 600


def test_a_chosen_token_stands_out_with_its_group() -> None:
    owners = torch.tensor([0, 0, 3, 3, 0, 0, 3, 7])
    mapped = MergeMap(0, "block", (2, 4), torch.tensor([0, 3, 7]), owners, torch.zeros(8, dtype=torch.long))
    picture = Image.new("RGB", (4, 2), (10, 20, 30))
    plain, marked = (
        np.asarray(draw_merge_map(picture, mapped, side=400, groups=True, chosen=chosen))
        for chosen in (None, 5)
    )
    corner = {token: (token // 4 * 100 + 20, token % 4 * 100 + 20) for token in range(8)}
    for token in range(8):
        same = np.array_equal(plain[corner[token]], marked[corner[token]])
        assert same == (owners[token] == 0), "those of other groups fade"
    assert len({tuple(plain[corner[token]]) for token in (0, 3, 7)}) == 3, "a colour for each group"


def test_differences_are_bright_where_they_are_large() -> None:
    a = np.full((4, 4, 3), 100, dtype=np.uint8)
    b = a.copy()
    b[0, 0, 1], b[1, 1] = 140, 110
    heat, most = difference(Image.fromarray(a), Image.fromarray(b))
    light = np.asarray(heat).astype(int).sum(-1)
    assert most == 40
    assert light[0, 0] > light[1, 1] > light[3, 3] and light.argmax() == 0
    assert difference(Image.fromarray(a), Image.fromarray(a))[1] == 0
