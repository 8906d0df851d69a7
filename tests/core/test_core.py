"""The maths against slow and literal references."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded import features
from torch import Tensor

from tomadiff.core import (
    RefreshSchedule,
    destination_rows,
    facility_location,
    num_kept,
    partition,
    similarity,
    slot_layout,
    unit_vectors,
)
from tomadiff.core.select import LARGE, TIE
from tomadiff.methods import PlanSettings, toma

CPU = torch.device("cpu")
seeds = st.integers(0, 2**31 - 1)
grids = st.one_of(
    st.tuples(st.integers(1, 21), st.integers(1, 21)),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
)
kinds = st.sampled_from(["tile", "stripe", "global"])
unmergings = st.sampled_from(["transpose", "pinv", "regression"])


def coverage(similarity: Tensor, chosen: Sequence[int]) -> float:
    """f(D), literally."""
    return sum(max(float(similarity[i, j]) for i in chosen) for j in range(len(similarity)))


def greedy_next(similarity: Tensor, chosen: list[int]) -> list[int]:
    """One more pick of facility location, by trying every token."""
    rest = [i for i in range(len(similarity)) if i not in chosen]
    return [*chosen, max(rest, key=lambda i: coverage(similarity, [*chosen, i]))]


# -- selection ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2, 14), st.data())
def test_selection_equals_plain_greedy(seed: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    s = similarity(unit_vectors(features(seed, 3, n, 8)))
    picks = facility_location(s, k)
    for region, chosen in zip(s.double(), picks.tolist()):
        # where two tokens are equally good, rounding decides: what must hold is that no other would be better
        for count in range(k):
            best = coverage(region, greedy_next(region, chosen[:count]))
            assert coverage(region, chosen[: count + 1]) == pytest.approx(best, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2, 9), st.data())
def test_selection_reaches_the_greedy_bound_of_the_optimum(seed: int, n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    s = similarity(unit_vectors(features(seed, 1, n, 6).abs()))  # the bound is for non-negative similarities
    best = max(coverage(s[0], subset) for subset in itertools.combinations(range(n), k))
    found = coverage(s[0], tuple(facility_location(s, k)[0].tolist()))
    assert found >= (1 - 1 / math.e) * best - 1e-4


@given(st.integers(1, 12), st.data())
def test_selection_has_no_duplicates_even_when_all_tokens_are_equal(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    picks = facility_location(similarity(unit_vectors(torch.ones(2, n, 4))), k)
    assert picks.tolist() == [list(range(k))] * 2  # and ties go to the first


def test_selection_is_exact_on_perfect_clusters() -> None:
    centres = torch.eye(5)
    labels = torch.tensor([3, 1, 4, 1, 0, 2, 2, 3, 0, 4, 1])
    picks = facility_location(similarity(unit_vectors(centres[labels][None])), 5)[0]
    assert sorted(labels[picks].tolist()) == [0, 1, 2, 3, 4]


def test_selection_never_picks_padding_while_real_tokens_are_left() -> None:
    real = torch.tensor([[True] * 4 + [False] * 3])
    x = features(0, 1, 7, 4)
    picks = facility_location(similarity(unit_vectors(x)), 4, real)[0]
    alone = facility_location(similarity(unit_vectors(x[:, :4])), 4)[0]
    assert picks.tolist() == alone.tolist()


@pytest.mark.parametrize(("groups", "n"), [(100, 64), (3, LARGE), (2, LARGE + 1)])
@pytest.mark.parametrize("padding", [0, 9])
def test_many_and_large_regions_are_chosen_from_as_each_alone(groups: int, n: int, padding: int) -> None:
    """Which go part by part, and keep sums from pick to pick: no other token may be better than the pick."""
    s = similarity(unit_vectors(1 + features(1, groups, n, 8)))
    real = (torch.arange(n) < n - padding).expand(groups, n) if padding else None
    picks = facility_location(s, n // 4, real)
    assert torch.equal(picks[1:2], facility_location(s[1:2], n // 4, None if real is None else real[1:2]))
    region, left = s[1].double()[: n - padding, : n - padding], torch.ones(n - padding, dtype=torch.bool)
    nearest = torch.full((n - padding,), -2.0, dtype=torch.double)
    for pick in picks[1]:
        value = torch.maximum(region, nearest).sum(1)
        assert left[pick] and value[pick] >= value[left].max() - 2 * n * TIE
        left[pick], nearest = False, torch.maximum(nearest, region[pick])


# -- regions -----------------------------------------------------------------------------------------------


@given(grids, kinds, st.integers(1, 8), st.booleans())
def test_arrange_and_restore_are_inverse_on_any_grid(grid: tuple, kind: str, size: int, shift: bool) -> None:
    regions = partition(grid, kind, size, shift, CPU)
    x = torch.arange(2 * math.prod(grid) * 3.0).reshape(2, -1, 3)
    assert torch.equal(regions.restore(regions.arrange(x)), x)
    assert regions.split(regions.arrange(x)).shape == (2 * regions.count, regions.size, 3)
    assert sum(regions.lengths) == math.prod(grid)
    assert regions.size - min(regions.lengths) < max(regions.size, 2), "regions are nearly equal"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 9))
def test_tiles_are_boxes_of_at_most_the_size_asked_for(height: int, width: int, size: int) -> None:
    regions = partition((height, width), "tile", size, False, CPU)
    numbers = (
        regions.split(regions.arrange(torch.arange(float(height * width))[None, :, None])).long().squeeze(-1)
    )
    for tokens, length in zip(numbers, regions.lengths):
        rows, columns = tokens[:length] // width, tokens[:length] % width
        rows, columns = rows.unique(), columns.unique()
        assert len(rows) * len(columns) == length
        assert rows[-1] - rows[0] + 1 == len(rows) <= size
        assert columns[-1] - columns[0] + 1 == len(columns) <= size


def test_tiles_of_a_video_lie_within_a_frame_unless_boxes_are_asked_for() -> None:
    frames = torch.arange(4 * 6 * 8.0)[None, :, None] // 48
    for size, tokens, spans in ((4, 12, 1), ((2, 3, 4), 24, 2), ((3, 6, 8), 96, 2)):
        regions = partition((4, 6, 8), "tile", size, False, CPU)
        times = regions.split(regions.arrange(frames))
        assert set(regions.lengths) == {tokens}
        assert (times.amax(1) - times.amin(1)).max() + 1 == spans
    assert partition((4, 6, 8), "stripe", (2, 3, 4), False, CPU).size == 24
    shifted = partition((4, 6, 8), "tile", (2, 3, 4), True, CPU)
    assert shifted.order[0] == 48 + 8 + 2, "half a box along each axis"


def test_stripes_and_global_regions_of_even_grids_move_nothing() -> None:
    assert partition((16, 16), "stripe", 8, False, CPU).order is None
    assert partition((5, 7), "global", 8, False, CPU).order is None
    assert partition((16, 16), "tile", 8, False, CPU).order is not None


def test_shifted_tiles_differ_and_stay_as_large() -> None:
    plain, shifted = (partition((16, 24), "tile", 8, shift, CPU) for shift in (False, True))
    assert plain.lengths == shifted.lengths
    assert not torch.equal(plain.order, shifted.order)


@given(grids, kinds, st.integers(1, 8), st.floats(0, 0.99))
def test_tokens_kept_are_what_the_ratio_says(grid: tuple, kind: str, size: int, ratio: float) -> None:
    lengths = partition(grid, kind, size, False, CPU).lengths
    places = slot_layout(lengths, ratio, CPU)
    assert places.kept == sum(length - math.floor(length * ratio + 1e-9) for length in lengths)
    assert abs(places.kept - (1 - ratio) * math.prod(grid)) <= len(lengths)  # within one token a region


def test_kept_is_not_fooled_by_binary_fractions() -> None:
    assert num_kept(100, 0.29) == 71


# -- plans -------------------------------------------------------------------------------------------------


def plan(
    x: Tensor, grid: tuple[int, ...], ratio: float = 0.5, shifted: bool = False, **fields: object
) -> toma.Plan:
    return toma.plan(x, grid, ratio, PlanSettings(**fields), shifted=shifted)


@settings(max_examples=60, deadline=None)
@given(
    seeds,
    grids,
    kinds,
    st.sampled_from(["region", "global"]),
    st.floats(0, 0.95),
    st.sampled_from([1.0, 30.0, 1000.0]),
)
def test_plan_is_a_proper_assignment_on_any_grid(
    seed: int, grid: tuple, kind: str, assign: str, ratio: float, scale: float
) -> None:
    x = features(seed, 2, math.prod(grid), 5)
    p = plan(x, grid, ratio, regions=kind, assign=assign, scale=scale, region_size=4)
    real = p.regions.real if p.regions.real is not None else torch.ones(p.regions.count, p.regions.size)
    real = real.float().repeat(2, 1)
    torch.testing.assert_close(p.assignment.sum(1), real, msg="every token is shared out once")
    assert p.destinations.shape == (2, p.slots.kept)
    assert all(len(set(sample)) == p.slots.kept for sample in p.destinations.tolist()), "no destination twice"
    assert p.merge(x).shape == (2, p.slots.kept, 5)
    assert p.unmerge(p.merge(x)).shape == x.shape


@settings(max_examples=40, deadline=None)
@given(seeds, grids, kinds, st.floats(0, 0.95), unmergings, st.booleans())
def test_merge_of_a_constant_is_the_constant(
    seed: int, grid: tuple, kind: str, ratio: float, unmerge: str, shifted: bool
) -> None:
    p = plan(
        features(seed, 2, math.prod(grid), 5),
        grid,
        ratio,
        shifted,
        regions=kind,
        region_size=4,
        unmerge=unmerge,
    )
    constant = torch.full((2, math.prod(grid), 3), 1.7)
    torch.testing.assert_close(p.merge(constant), torch.full((2, p.slots.kept, 3), 1.7))
    if unmerge != "pinv":
        torch.testing.assert_close(p.unmerge(p.merge(constant)), constant)


@settings(max_examples=30, deadline=None)
@given(seeds, unmergings, st.sampled_from(["region", "global"]))
def test_unmerge_after_merge_is_the_identity_on_perfect_clusters(
    seed: int, unmerge: str, assign: str
) -> None:
    """Half of the tokens are copies: at ratio 0.5 nothing is lost."""
    originals = torch.nn.functional.normalize(
        features(seed, 1, 4, 8, 16), dim=-1
    )  # four tiles of 4 x 4, 8 kinds each
    copies = torch.cat([originals, originals], dim=2)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    tiles = partition((8, 8), "tile", 4, False, CPU)
    x = tiles.restore(copies[:, :, order].reshape(1, 64, 16))
    p = plan(x, (8, 8), 0.5, region_size=4, unmerge=unmerge, assign=assign)
    close = 1e-2 if unmerge == "regression" else 1e-4  # a regression allows for noise
    torch.testing.assert_close(p.unmerge(p.merge(x)), x, atol=close, rtol=close)


@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from([1.0, 10.0, 100.0, 1000.0]), st.floats(0.1, 0.9))
def test_pinv_reconstructs_no_worse_than_transpose(seed: int, scale: float, ratio: float) -> None:
    x = features(seed, 1, 64, 12)

    def error(unmerge: str) -> float:
        p = plan(x, (8, 8), ratio, scale=scale, unmerge=unmerge)
        return float((p.unmerge(p.merge(x)) - x).norm() / x.norm())

    assert error("pinv") <= error("transpose") + 1e-3


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0.25, 0.75))
def test_regression_predicts_a_smooth_change_better_than_copying(seed: int, ratio: float) -> None:
    tokens, directions = features(seed, 1, 64, 3), features(seed + 1, 3, 5)
    change = torch.sin(torch.nn.functional.normalize(tokens, dim=-1) @ directions)

    def error(unmerge: str) -> float:
        p = plan(tokens, (8, 8), ratio, unmerge=unmerge)
        return float((p.unmerge(p.merge(change)) - change).norm())

    assert error("regression") < error("transpose")


def test_regression_equals_the_formula_written_out() -> None:
    x = features(3, 1, 16, 6)
    p = plan(x, (4, 4), 0.5, regions="global", unmerge="regression")
    tokens = (x[0] / x[0].norm(dim=-1, keepdim=True)).double()
    points = p.merging[0].double() @ tokens
    width = torch.cdist(points, points).square().mean()
    kernel = torch.exp(-torch.cdist(torch.cat([tokens, points]), points).square() / (2 * width))
    weights = kernel[:16] @ torch.linalg.inv(kernel[16:] + 1e-3 * torch.eye(8))
    y = features(4, 1, 8, 3)
    mean = y[0].double().mean(0)
    expected = mean + weights @ (y[0].double() - mean)
    torch.testing.assert_close(p.unmerge(y)[0].double(), expected, atol=1e-4, rtol=1e-4)


def test_regression_of_equal_tokens_is_their_mean() -> None:
    p = plan(torch.ones(1, 64, 4), (8, 8), 0.5, unmerge="regression")
    y = features(0, 1, 32, 3)
    torch.testing.assert_close(p.unmerge(y), y.mean(1, keepdim=True).expand(-1, 64, -1), atol=1e-3, rtol=0)


def test_merge_equals_the_formula_written_out() -> None:
    x = features(3, 1, 16, 6)
    p = plan(x, (4, 4), 0.5, regions="global", scale=7.0)
    unit = (x[0] / x[0].norm(dim=-1, keepdim=True)).double()
    picks: list[int] = []
    for _ in range(8):
        picks = greedy_next(unit @ unit.T, picks)
    a = torch.softmax(7.0 * unit[picks] @ unit.T, dim=0)
    m = a / a.sum(1, keepdim=True)
    assert p.destinations[0].tolist() == picks
    y = m @ x[0].double()
    torch.testing.assert_close(p.merge(x)[0].double(), y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(p.unmerge(y[None].float())[0].double(), a.T @ y, atol=1e-5, rtol=1e-5)
    onto = features(4, 1, 16, 6)
    torch.testing.assert_close(p.unmerge(2 * p.merge(x), onto, p.merge(x)), onto + p.unmerge(p.merge(x)))


def test_new_weights_keep_the_destinations() -> None:
    config = PlanSettings(region_size=4)
    first = toma.plan(features(0, 2, 70, 5), (7, 10), 0.5, config)
    later = features(1, 2, 70, 5)
    second = toma.plan(later, (7, 10), 0.5, config, destinations=first.destinations)
    assert torch.equal(first.destinations, second.destinations)
    assert not torch.allclose(first.assignment, second.assignment)
    # a destination is nearest to itself, so at this scale it is merged with itself
    chosen = later.gather(1, second.destinations[..., None].expand(-1, -1, 5))
    unit = torch.nn.functional.cosine_similarity(second.merge(chosen_only(later, second)), chosen, dim=-1)
    torch.testing.assert_close(unit, torch.ones_like(unit))


def chosen_only(x: Tensor, p: toma.Plan) -> Tensor:
    """x with everything but the destinations zeroed, so that merging can only scale them."""
    mask = torch.zeros(x.shape[:2]).scatter(1, p.destinations, 1.0)
    return x * mask[..., None]


def test_each_sample_gets_the_plan_it_would_get_alone() -> None:
    x = features(5, 3, 99, 6)
    together = plan(x, (9, 11))
    for sample in range(3):
        alone = plan(x[sample : sample + 1], (9, 11))
        assert torch.equal(together.destinations[sample : sample + 1], alone.destinations)


def test_rotary_rows_are_those_of_the_destinations_with_the_text_first() -> None:
    p = plan(features(0, 2, 64, 5), (8, 8))
    table = torch.arange(70.0)[:, None].expand(70, 4)  # 6 rows of text, then a row for each token
    rows = destination_rows(p.destinations, p.regions.tokens, table)
    assert rows.shape == (2, 6 + 32, 4)
    assert rows[:, :6, 0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert torch.equal(rows[:, 6:, 0].long() - 6, p.destinations)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("shape", [(-1, 1, 1, 70), (-1, 70, 3)], ids=str)
def test_entries_along_any_axis_follow_their_tokens_also_with_the_text_last(
    shape: tuple[int, ...], samples: int
) -> None:
    p = plan(features(0, 2, 64, 5), (8, 8))
    axis = shape.index(70)
    numbers = torch.arange(70) + 100 * torch.arange(samples)[:, None]
    table = numbers.reshape(samples, *(70 if a == axis else 1 for a in range(1, len(shape)))).expand(shape)
    rows = destination_rows(p.destinations, p.regions.tokens, table, axis, before=0)
    rows = rows.movedim(axis, 1).flatten(2)[..., 0]
    offset = 100 * torch.arange(samples)[:, None]
    assert torch.equal(rows[:, :32] - offset, p.destinations)
    assert torch.equal(rows[:, 32:], (torch.arange(64, 70) + offset).expand(2, -1))


def test_weights_hold_no_denormal_numbers() -> None:
    x = 3 + features(0, 4, 256, 32)  # cosines near 0.9, as in real models
    p = plan(x, (16, 16), 0.5)
    tiny = torch.finfo(torch.float32).tiny
    for weights in (p.assignment, p.merging, p.unmerging):
        assert not ((weights != 0) & (weights.abs() < tiny)).any()
    sharp = torch.softmax(1000 * similarity(unit_vectors(x)), dim=1)
    assert ((sharp != 0) & (sharp < tiny)).any(), "or there would be nothing to flush"


def test_log_sizes_count_the_tokens_behind_each_merged_one() -> None:
    x = torch.eye(3)[torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])][None]
    p = plan(x, (2, 4), 5 / 8)
    sizes = dict(zip(x[0, p.destinations[0]].argmax(-1).tolist(), p.log_sizes()[0].exp().tolist()))
    assert sizes == {0: pytest.approx(5), 1: pytest.approx(2), 2: pytest.approx(1)}


# -- schedule ----------------------------------------------------------------------------------------------


def test_schedule_refreshes_weights_more_often_than_destinations() -> None:
    schedule, destinations, weights, seen = RefreshSchedule(10, 5), 0, 0, []
    for step in range(1, 21):
        due = schedule.due(step - destinations, step - weights)
        if due:
            seen.append((step, due))
            weights, destinations = step, step if due == "destinations" else destinations
    assert seen == [(5, "weights"), (10, "destinations"), (15, "weights"), (20, "destinations")]
