"""Merged keys at the call of attention: which ones they are, and that weighing them needs no mask."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparison import distance
from diffusers.models.attention_dispatch import attention_backend
from pipelines import bare_call, denoiser, draw, make
from tiny import NAMES, build, grid_of, run, tiny
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tomadiff
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import family_of
from tomadiff.runtime import attention

WEIGHED: dict[str, Any] = {"ratio": 0.5, "where": "kv", "weigh_keys": True, "dense_blocks": 0}
LINEAR = ("sana", "sana_video")  # attention without a softmax, and without torch's function for it


class Watched(TorchFunctionMode):
    """Keys and masks that arrive at torch's attention, behind all that sites do to them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.masks: list[Tensor | None] = []

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask"), args)) | (kwargs or {})
            self.keys.append(given["key"])
            self.masks.append(given.get("attn_mask"))
        return function(*args, **kwargs or {})

    @property
    def lengths(self) -> list[int]:
        return [key.shape[2] for key in self.keys]

    @property
    def biases(self) -> int:
        """Masks that would turn fast kernels off and were not there in the model."""
        return sum(mask is not None and mask.dtype != torch.bool for mask in self.masks)


def watched(model: nn.Module, case: ModuleType) -> tuple[Tensor, Watched]:
    with Watched() as seen:
        return run(model, case, (0, 1)), seen


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose fast kernels take no mask."""
    monkeypatch.setattr(attention, "FOLDED", {"cpu"})


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> ModuleType:
    return tiny(request.param)


# -- the bias as channels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [12, 40, 64, 72, 128, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_channels_add_the_bias_to_the_logits(channels: int, dtype: torch.dtype) -> None:
    """What is left is below the rounding of a bias in these numbers."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 5, channels).to(dtype), torch.randn(2, 3, 7, channels).to(dtype)
    bias = (9 * torch.rand(2, 1, 1, 7)).to(dtype)
    scale = channels**-0.5
    q, k = attention.with_bias_channels(query, key, bias, scale)
    assert q.dtype == k.dtype == dtype and q.shape[-1] == k.shape[-1]
    assert q.shape[-1] % 8 == 0 and q.shape[-1] - channels <= 9
    logits = q.double() @ k.double().mT * scale
    wanted = query.double() @ key.double().mT * scale + bias.double()
    torch.testing.assert_close(logits, wanted, rtol=0, atol=9 * torch.finfo(dtype).eps / 8)


def test_the_channels_of_a_bias_mind_no_default_device() -> None:
    """With one that holds no values; from CUDA, reading them would make the host wait."""
    query, key, bias = torch.ones(1, 1, 5, 12), torch.ones(1, 1, 7, 12), torch.ones(1, 1, 1, 7)
    expected = attention.with_bias_channels(query, key, bias, 0.3)
    with torch.device("meta"):
        found = attention.with_bias_channels(query, key, bias, 0.3)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_with_channels_equals_attention_with_a_mask(folded: None, scale: float | None) -> None:
    """A mask that is there already stays in force."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 9, 20), torch.randn(2, 2, 6, 20), torch.randn(2, 2, 6, 20)
    bias = torch.randn(2, 1, 1, 6)
    bias[1, ..., 4:] = float("-inf")
    more: dict[str, Any] = {"scale": scale, "enable_gqa": True}
    wanted = F.scaled_dot_product_attention(query, key, value, bias, **more)
    with Watched() as seen:
        torch.testing.assert_close(attention.biased(query, key, value, bias, **more), wanted)
    assert seen.masks == [None]


# -- in models ---------------------------------------------------------------------------------------------


def test_weighed_keys_need_no_mask_in_any_family(case: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results with channels as with a mask, and no mask but where the model has one by pairs."""
    model = build(case)
    _, dense = watched(model, case)
    try:
        tomadiff.apply(model, **WEIGHED)
    except ConfigError as error:
        assert "takes a mask" in str(error) and case.__name__.partition(".")[2] in (*LINEAR, "mochi")
        return
    masked, _ = watched(model, case)
    monkeypatch.setattr(attention, "FOLDED", {"cpu"})
    tomadiff.apply(model, **WEIGHED)
    without, seen = watched(model, case)
    assert distance(without, masked) < 1e-4
    merged = [mask for a, b, mask in zip(dense.lengths, seen.lengths, seen.masks) if b < a]
    assert merged and all(mask is None or mask.shape[-2] > 1 for mask in merged)


@pytest.mark.parametrize(
    ("name", "where"),
    [  # SD3's blocks hand no mask to attention
        *((name, where) for name in ("sd1", "sdxl", "flux") for where in ("kv", "block", "module")),
        ("sd3", "kv"),
    ],
)
def test_pictures_are_the_same_without_a_mask(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**WEIGHED, "where": where}
    pipe = tomadiff.apply(make(name), **settings)
    with Watched() as seen:
        masked = draw(pipe)
    assert seen.biases
    monkeypatch.setattr(attention, "FOLDED", {"cpu"})
    tomadiff.apply(pipe, **settings)
    with Watched() as seen:
        assert distance(draw(pipe), masked) < 1e-4
    assert not seen.biases
    tomadiff.apply(pipe, **{**settings, "weigh_keys": False})
    assert distance(draw(pipe), masked) > 1e-4, "weights matter"


def test_attention_really_gets_fewer_keys(case: ModuleType) -> None:
    model = build(case)
    sites = [site for block in family_of(model).blocks for site in block.keys]
    assert sites, "every family can merge keys and values"
    _, dense = watched(model, case)
    tomadiff.apply(model, ratio=0.5, where="kv", dense_blocks=0)
    _, merged = watched(model, case)
    images = {math.prod(grid_of(case)) // level**2 for level in getattr(case, "LEVELS", (1,))}
    fewer = {a - b for a, b in zip(dense.lengths, merged.lengths, strict=True)} - {0}
    if case.__name__.partition(".")[2] not in LINEAR:
        assert fewer and fewer <= {image // 2 for image in images}


def test_the_pictures_keys_are_where_they_are_declared(case: ModuleType) -> None:
    """Keys that change with the picture's tokens, when attention is called with others of them."""
    model = build(case)
    tomadiff.apply(model, ratio=0.5, where="kv", dense_blocks=0)
    run(model, case)
    layout = model._tomadiff.generation.layouts.layout
    hooks = [h for h in model._tomadiff.sites if h.site.keys_inside or h.site.weighed_inside]
    places = {hook.bound.module: hook for hook in hooks}
    images = {hook: math.prod(layout.grid(hook.bound.level)) for hook in hooks}
    tomadiff.remove(model)
    calls: dict[nn.Module, dict[str, Any]] = {}

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, {**dict(zip(places[module].parameters, args)), **kwargs})

    for module in places:
        module.register_forward_pre_hook(keep, with_kwargs=True)
    run(model, case)
    for module, call in list(calls.items()):
        hook = places[module]
        site, argument, image = hook.site, hook.argument, images[hook]
        before, _ = layout.around(call[argument], site, image)
        tokens = call[argument].clone()
        tokens[:, before : before + image] += 1 + torch.rand_like(tokens[:, before : before + image])
        seen = Watched()
        with seen, torch.no_grad():
            module(**call)
            module(**{**call, argument: tokens, site.keys_argument or argument: tokens})
        first, second = seen.keys[0], seen.keys[len(seen.keys) // 2]
        changed = (first - second).abs().amax((0, 1, 3)) > 0
        before, behind = layout.around(first.transpose(1, 2), site, image)
        assert changed.tolist() == [False] * before + [True] * image + [False] * behind


# -- backends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "_native_flash", "_native_math"])
def test_torchs_backends_of_diffusers_take_weighed_keys(folded: None, backend: str) -> None:
    """Also the one that refuses masks."""
    pipe = tomadiff.apply(make("flux"), **WEIGHED)
    default = draw(pipe)
    with attention_backend(backend):
        assert distance(draw(pipe), default) < 1e-4


def test_attention_that_is_not_torchs_is_refused_with_what_to_do() -> None:
    pipe = tomadiff.apply(make("flux"), **WEIGHED)
    with attention_backend("flex"), pytest.raises(UnsupportedModelError, match="native"):
        draw(pipe)


def test_attention_without_torchs_function_keeps_its_mask(folded: None) -> None:
    """Sliced attention multiplies by itself."""
    pipe = tomadiff.apply(make("sd1"), **WEIGHED)
    default = draw(pipe)
    pipe.enable_attention_slicing()
    assert type(denoiser(pipe).mid_block.attentions[0].transformer_blocks[0].attn1.processor).__name__ == (
        "SlicedAttnProcessor"
    )
    assert distance(draw(pipe), default) < 1e-4


def test_rotary_tables_of_merged_keys_are_let_go_with_their_block() -> None:
    """No other block has the same plan; tables of all blocks together would take much memory."""
    model = denoiser(make("flux"))
    tomadiff.apply(model, ratio=0.5, where="kv")
    held = []
    last = list(model.single_transformer_blocks)[-1]
    last.register_forward_hook(lambda *_: held.append(len(model._tomadiff.call.gathered)))
    with torch.no_grad():
        model(**bare_call(model))
    assert held == [0]
