"""The compared methods, each against a slow and literal reading of its paper, ToMe also against tomesd."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import tomesd
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.embeddings import apply_rotary_emb
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import bare_call, denoiser, make
from seeded import features
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor, nn

import tomadiff
from tomadiff import Config
from tomadiff.errors import ConfigError
from tomadiff.methods import METHODS, PlanSettings, todo, tofu, tome

GRIDS = st.tuples(st.integers(2, 9), st.integers(2, 9))
SEEDS = st.integers(0, 10**6)


# -- ToMe --------------------------------------------------------------------------------------------------


def literal_tome(x: Tensor, grid: tuple[int, int], ratio: float, corner: int) -> list[list[int]]:
    """Groups of tokens that become one, for one sample [N, C], each with its destination first."""
    height, width = grid
    cells = [
        (row + corner) * width + column + corner
        for row in range(0, height // 2 * 2, 2)
        for column in range(0, width // 2 * 2, 2)
    ]
    sources = [token for token in range(height * width) if token not in cells]
    cosine = F.cosine_similarity(x[:, None].double(), x[None].double(), dim=-1)
    best = {source: max(cells, key=lambda cell: float(cosine[source, cell])) for source in sources}
    ranked = sorted(sources, key=lambda source: -float(cosine[source, best[source]]))
    joining = ranked[: math.floor(height * width * ratio + 1e-9)]
    groups = {token: [token] for token in range(height * width) if token not in joining}
    for source in joining:
        groups[best[source]].append(source)
    return list(groups.values())


def groups_of(plan: tome.Matching) -> list[set[int]]:
    owners = plan.owners()[0]
    return [set((owners == token).nonzero().flatten().tolist()) for token in plan.destinations[0]]


@settings(deadline=None, max_examples=40)
@given(SEEDS, GRIDS, st.sampled_from([0.25, 0.4, 0.5]), st.booleans())
def test_tome_joins_the_most_similar_sources(
    seed: int, grid: tuple[int, int], ratio: float, shifted: bool
) -> None:
    x = features(seed, 1, math.prod(grid), 5)
    plan = tome.plan(x, grid, ratio, PlanSettings(), shifted=shifted)
    groups = literal_tome(x[0], grid, ratio, int(shifted))
    assert sorted(map(sorted, groups_of(plan))) == sorted(map(sorted, groups))
    assert {group[0] for group in groups} == set(plan.destinations[0].tolist())
    y = features(seed + 1, 1, math.prod(grid), 3)
    merged = {group[0]: y[0, group].mean(0) for group in groups}
    expected = torch.stack([merged[token] for token in plan.destinations[0].tolist()])
    torch.testing.assert_close(plan.merge(y)[0], expected)
    copies = plan.unmerge(plan.merge(y))[0]
    for group in groups:
        torch.testing.assert_close(copies[group], merged[group[0]].expand(len(group), -1))
    torch.testing.assert_close(plan.unmerge(2 * plan.merge(y), y, plan.merge(y))[0], copies + y[0])
    sizes = {group[0]: len(group) for group in groups}
    assert plan.log_sizes().exp().round()[0].tolist() == [sizes[t] for t in plan.destinations[0].tolist()]


@pytest.mark.parametrize("grid", [(64, 64), (40, 72), (33, 47)], ids=str)
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_tome_merges_as_tomesd_does(grid: tuple[int, int], ratio: float) -> None:
    """On features of the shape that SD1.5's first blocks have."""
    x, tokens = features(0, 2, math.prod(grid), 320), math.prod(grid)
    merge, unmerge = bipartite_soft_matching_random2d(
        x, grid[1], grid[0], 2, 2, int(tokens * ratio), no_rand=True
    )
    plan = tome.plan(x, grid, ratio, PlanSettings())
    assert plan.merge(x).shape == merge(x).shape
    # what two tokens have in common after unmerging tells the groups, in whatever order they come
    places = torch.arange(merge(x).shape[1], dtype=torch.float32)[None, :, None].expand(2, -1, 1)
    theirs = unmerge(places).long().squeeze(-1)
    assert torch.equal(theirs.gather(1, plan.destinations).gather(1, plan.joined), theirs)
    assert torch.equal(theirs.gather(1, plan.destinations).sort().values, places.squeeze(-1).long())
    torch.testing.assert_close(plan.unmerge(plan.merge(x)), unmerge(merge(x)))


def sd15_level() -> UNet2DConditionModel:
    """The finest level of SD1.5, at its true width, with a coarser one below that has no attention."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(320, 320),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        mid_block_type=None,
        attention_head_dim=8,
        cross_attention_dim=768,
    ).eval()


@pytest.mark.parametrize("modules", [("self",), ("self", "cross", "mlp")], ids=str)
@torch.no_grad()
def test_a_model_with_tome_equals_one_with_tomesd(modules: tuple[str, ...]) -> None:
    unet = sd15_level()
    generator = torch.Generator().manual_seed(0)
    sample, text = torch.randn(2, 4, 24, 32, generator=generator), torch.randn(2, 5, 768, generator=generator)
    dense = unet(sample, 500, encoder_hidden_states=text).sample
    merging = {f"merge_{part}": name in modules for part, name in zip(("attn", "crossattn", "mlp"), MODULES)}
    tomesd.apply_patch(unet, ratio=0.5, use_rand=False, **merging)
    theirs = unet(sample, 500, encoder_hidden_states=text).sample
    tomesd.remove_patch(unet)
    tomadiff.apply(unet, method="tome", ratio=0.5, modules=modules)
    ours = unet(sample, 500, encoder_hidden_states=text).sample
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert float((theirs - dense).abs().max()) > 1e-2


MODULES = ("self", "cross", "mlp")


# -- ToFu --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(SEEDS, GRIDS, st.sampled_from([0.25, 0.5]))
def test_tofu_prunes_early_and_keeps_the_largest_norm_later(
    seed: int, grid: tuple[int, int], ratio: float
) -> None:
    x = features(seed, 1, math.prod(grid), 5)
    y = features(seed + 1, 1, math.prod(grid), 3)
    groups = {group[0]: group for group in literal_tome(x[0], grid, ratio, 0)}
    early, late = (tofu.plan(x, grid, ratio, PlanSettings(), depth=depth) for depth in (0.49, 0.5))
    assert set(early.destinations[0].tolist()) == set(groups)
    torch.testing.assert_close(early.merge(y)[0], y[0, early.destinations[0]])
    for token, merged in zip(late.destinations[0].tolist(), late.merge(y)[0]):
        mean = y[0, groups[token]].mean(0)
        longest = y[0, groups[token]].norm(dim=-1).max()
        torch.testing.assert_close(merged, mean / mean.norm() * longest, atol=1e-4, rtol=1e-4)
    for plan in (early, late):  # unmerging copies
        for token, group in groups.items():
            copies = plan.unmerge(plan.merge(y))[0, group]
            torch.testing.assert_close(copies, copies[group.index(token)].expand_as(copies))


def test_tofu_prunes_in_the_first_half_of_the_blocks_as_they_run() -> None:
    pipe = tomadiff.apply(make("sd1"), method="tofu")
    patch = denoiser(pipe)._tomadiff
    denoiser(pipe)(**bare_call(denoiser(pipe)))
    kinds = {key.name.partition(".")[0]: type(kept.plan) for key, kept in patch.plans.items()}
    assert kinds == {"down_blocks": tofu.Pruning, "mid_block": tofu.Pruning, "up_blocks": tofu.Mlerp}


# -- ToDo --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(SEEDS, GRIDS, st.sampled_from([2, 3]))
def test_todo_takes_the_nearest_neighbour_of_a_coarser_grid(
    seed: int, grid: tuple[int, int], factor: int
) -> None:
    ratio = 1 - 1 / factor**2
    height, width = grid
    x = features(seed, 2, height * width, 4)
    plan = todo.plan(x, grid, ratio, PlanSettings())
    chosen = [row * width + column for row in range(0, height, factor) for column in range(0, width, factor)]
    assert plan.destinations.tolist() == [chosen, chosen]
    assert torch.equal(plan.merge(x), x[:, chosen])
    nearest = [(t // width // factor * width + t % width // factor) * factor for t in range(height * width)]
    assert plan.owners()[0].tolist() == nearest
    y = features(seed + 1, 2, len(chosen), 3)
    copies = torch.stack([y[:, chosen.index(token)] for token in nearest], dim=1)
    assert torch.equal(plan.unmerge(y), copies)
    onto = features(seed + 2, 2, height * width, 3)
    torch.testing.assert_close(plan.unmerge(2 * y, onto, y), onto + copies)
    sizes = [nearest.count(token) for token in chosen]
    assert plan.log_sizes().exp().round()[0].tolist() == sizes
    last = todo.plan(x, grid, ratio, PlanSettings(), shifted=True).destinations[0]
    corner = factor - 1
    assert last.tolist() == [
        min(token // width + corner, height - 1) * width + min(token % width + corner, width - 1)
        for token in chosen
    ]


# -- video -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("method", ["tome", "tofu", "todo"])
def test_frames_of_a_video_are_merged_each_for_itself(method: str, shifted: bool) -> None:
    x, y, grid = features(0, 2, 90, 5), features(1, 2, 90, 3), (3, 5, 6)
    settings = {"ratio": 0.75, "settings": PlanSettings(), "shifted": shifted, "depth": 0.9}
    video = METHODS[method].plan(x, grid, **settings)
    frames = METHODS[method].plan(x.reshape(6, 30, 5), grid[1:], **settings)
    merged = video.merge(y)
    assert torch.equal(merged.reshape(6, -1, 3), frames.merge(y.reshape(6, 30, 3)))
    assert torch.equal(video.unmerge(merged), frames.unmerge(merged.reshape(6, -1, 3)).reshape(2, 90, 3))
    first = 30 * torch.arange(3).repeat(2)[:, None]
    assert torch.equal(video.owners().reshape(6, 30), frames.owners() + first)
    assert torch.equal(video.log_sizes().reshape(6, -1), frames.log_sizes())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(METHODS)),
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    st.sampled_from([0.25, 0.5, 0.75]),
    st.booleans(),
)
def test_length_is_the_number_of_merged_tokens(
    name: str, sides: list[int], ratio: float, shifted: bool
) -> None:
    method, grid = METHODS[name], tuple(sides)
    try:
        method.check_ratio(ratio)
    except ConfigError:
        ratio = method.defaults["ratio"]
    plan = method.plan(features(0, 1, math.prod(grid), 4), grid, ratio, PlanSettings(), shifted=shifted)
    assert plan.destinations.shape == (1, method.length(grid, ratio, PlanSettings()))


def test_a_method_without_a_needed_default_says_which() -> None:
    with pytest.raises(TypeError, match="'tome' has no default for where"):
        dataclasses.replace(tome.METHOD, defaults={"ratio": 0.5})


# -- keys and values alone ---------------------------------------------------------------------------------


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # [B, H, S, D]


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
    return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


def called(model: nn.Module, module: nn.Module) -> tuple[dict[str, Any], Any]:
    """What a module is called with and returns in a dense call of the model."""
    seen: list[tuple[dict[str, Any], Any]] = []
    names = tomadiff.runtime.hook.parameter_names(module)
    handle = module.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((dict(zip(names, args)) | kwargs, output)),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**bare_call(model))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("weigh_keys", [False, True])
@pytest.mark.parametrize("method", ["toma", "todo"])
@torch.no_grad()
def test_unet_attends_from_all_queries_to_merged_keys(method: str, weigh_keys: bool) -> None:
    model = denoiser(make("sd1")).eval()
    attn = model.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    x = called(model, attn)[0]["hidden_states"]
    config = Config(method=method, where="kv", weigh_keys=weigh_keys, dense_blocks=0)
    tomadiff.apply(model, config)
    _, output = called(model, attn)
    plan = METHODS[method].plan(x, (16, 16), config.resolve().ratio, config.resolve().plan)
    merged = plan.merge(x)
    q, k, v = (heads_of(p, attn.heads) for p in (attn.to_q(x), attn.to_k(merged), attn.to_v(merged)))
    bias = plan.log_sizes()[:, None, None] if weigh_keys else 0.0
    torch.testing.assert_close(output, attn.to_out[0](attention(q, k, v, bias)), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_sd3_attends_from_all_queries_to_merged_keys() -> None:
    model = denoiser(make("sd3")).eval()
    attn = model.transformer_blocks[0].attn
    arguments, _ = called(model, attn)
    x, text = arguments["hidden_states"], arguments["encoder_hidden_states"]
    config = Config(where="kv", dense_blocks=0)
    tomadiff.apply(model, config)
    _, (image_out, _) = called(model, attn)
    plan = METHODS["toma"].plan(x, (8, 8), config.resolve().ratio, config.resolve().plan)
    merged = plan.merge(x)

    def joined(image: Tensor, own: str, added: str, norm: nn.Module | None, norm_added: Any) -> Tensor:
        parts = [
            heads_of(getattr(attn, own)(image), attn.heads),
            heads_of(getattr(attn, added)(text), attn.heads),
        ]
        if norm is not None:
            parts = [norm(parts[0]), norm_added(parts[1])]
        return torch.cat(parts, dim=2)

    q = joined(x, "to_q", "add_q_proj", attn.norm_q, attn.norm_added_q)
    k = joined(merged, "to_k", "add_k_proj", attn.norm_k, attn.norm_added_k)
    v = joined(merged, "to_v", "add_v_proj", None, None)
    expected = attn.to_out[0](attention(q, k, v, 0.0)[:, : x.shape[1]])
    torch.testing.assert_close(image_out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weigh_keys", [False, True])
@torch.no_grad()
def test_flux_keys_have_the_positions_of_their_destinations(weigh_keys: bool) -> None:
    """In a single block, where text and image are one sequence."""
    model = denoiser(make("flux")).eval()
    attn = model.single_transformer_blocks[0].attn
    arguments, _ = called(model, attn)
    x, table = arguments["hidden_states"], arguments["image_rotary_emb"]
    text = x.shape[1] - 64
    config = Config(ratio={"kv": 0.5}, where="kv", weigh_keys=weigh_keys, dense_blocks=0)
    # joint blocks dense: their change would reach this one
    tomadiff.apply(model, config)
    for hook in model._tomadiff.sites:
        if hook.bound.block is not model.single_transformer_blocks[0]:
            hook.site = dataclasses.replace(hook.site, kind="left dense")
    _, output = called(model, attn)
    plan = METHODS["toma"].plan(x[:, text:], (8, 8), 0.5, config.resolve().plan)
    merged = torch.cat([x[:, :text], plan.merge(x[:, text:])], dim=1)
    places = torch.cat([torch.arange(text), text + plan.destinations[0]])
    q = attn.norm_q(attn.to_q(x).unflatten(-1, (-1, attn.head_dim)))
    k = attn.norm_k(attn.to_k(merged).unflatten(-1, (-1, attn.head_dim)))
    v = attn.to_v(merged).unflatten(-1, (-1, attn.head_dim))
    q = apply_rotary_emb(q, table, sequence_dim=1)
    k = apply_rotary_emb(k, tuple(part[places] for part in table), sequence_dim=1)
    bias = F.pad(plan.log_sizes(), (text, 0))[:, None, None] if weigh_keys else 0.0
    expected = attention(*(part.transpose(1, 2) for part in (q, k, v)), bias)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def test_fused_projections_are_refused_where_keys_are_merged_alone() -> None:
    for name in ("sd1", "flux"):
        model = denoiser(make(name))
        tomadiff.apply(model, where="kv")
        model.fuse_qkv_projections()
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            model(**bare_call(model))


def test_the_ideal_runs_the_same_sites_on_the_first_tokens() -> None:
    for name in ("sd1", "flux"):
        kept = {}
        for method in ("toma", "ideal"):
            pipe = tomadiff.apply(make(name), method=method, ratio=0.5)
            denoiser(pipe)(**bare_call(denoiser(pipe)))
            kept[method] = [(site.name, site.tokens, site.kept) for site in tomadiff.report(pipe).sites]
        assert kept["ideal"] == kept["toma"]
