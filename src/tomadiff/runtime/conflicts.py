"""What others do to a model, and what of it can't be done to merged tokens.

Looked for in every call, since it may come at any time; refused with what to do instead.
"""

from __future__ import annotations

import torch
from torch import nn

from tomadiff.errors import ConfigError

from .hook import SiteHook

# caches that act around whole blocks; their hooks go around ours if they are enabled after ours are on
BLOCK_CACHES = ("FirstBlockCacheConfig", "MagCacheConfig")
BLOCK_CACHE_HOOKS = ("fbc_", "mag_cache_")  # how their names start
# the marks of caches on a model: diffusers', and cache-dit's, which acts around whole blocks without hooks
BY_DIFFUSERS, BY_CACHE_DIT = "_cache_config", "_is_cached"
# hooks on attention, or on its queries, that keep tokens from step to step or take them for a grid
INSIDE_BLOCKS = (
    *("pyramid_attention_broadcast", "faster_cache_block", "taylorseer_cache"),
    "smoothed_energy_guidance_hook",
)
# processors that keep attention maps, which their pipelines lay over the image
KEEP_MAPS = (
    *("CrossAttnStoreProcessor", "AttendExciteAttnProcessor"),
    *("LEDITSCrossAttnProcessor", "Pix2PixZeroAttnProcessor"),
)


def records_attention(model: nn.Module) -> str | None:
    """The processor that does, if there is one: its pipeline wants the maps of every step."""
    processors = {type(getattr(module, "processor", None)).__name__ for module in model.modules()}
    return next((name for name in KEEP_MAPS if name in processors), None)


def cached(model: nn.Module) -> bool:
    return any(getattr(model, mark, None) for mark in (BY_DIFFUSERS, BY_CACHE_DIT))


def act_between_blocks(model: nn.Module, hooks: list[SiteHook]) -> bool:
    """Whether caches or other hooks do, or leave blocks out: they must find all tokens in their order."""
    return getattr(model, BY_CACHE_DIT, False) or any(
        len(hook.place.module._diffusers_hook.hooks) > 1 or _looks_inside(hook) for hook in hooks
    )


def _looks_inside(hook: SiteHook) -> bool:
    """Whether one of torch's hooks is between a site and its neighbours in a run."""
    module, sites = hook.place.module, hook.run.sites
    before, behind = bool(module._forward_pre_hooks), bool(module._forward_hooks)
    return (before and hook is not sites[0]) or (behind and hook is not sites[-1])


def check_model(model: nn.Module, hooks: list[SiteHook]) -> None:
    """What would get in the way of merging anywhere in a model."""
    _check_modules(hooks)
    _check_caches(model, hooks)
    _check_checkpointing(model)


def _check_modules(hooks: list[SiteHook]) -> None:
    """LoRA puts layers of its own in the place of linear ones, and unloading puts those back."""
    for place in (hook.place for hook in hooks if hook.site.path):
        if place.block._compiled_call_impl is not None:
            raise ConfigError(
                f"{place.name} is inside a block that is compiled for itself, and each block would be "
                'compiled anew: use where="span" or "block", or compile the whole model'
            )
        module = getattr(place.block, place.site.path)
        if getattr(module, "_orig_mod", module) is not place.module:
            raise ConfigError(
                f"{place.name} is another module than when merging was applied, as after loading or "
                "unloading a LoRA: call tomadiff.apply again"
            )


def _check_caches(model: nn.Module, hooks: list[SiteHook]) -> None:
    """Caches must be around merging: what they keep from step to step has to be whole tokens."""
    cache = getattr(model, BY_DIFFUSERS, None)
    if cache is not None and type(cache).__name__ not in BLOCK_CACHES:
        raise ConfigError(
            f"{type(cache).__name__} caches inside blocks, where tokens are merged and others at every "
            f"refresh: call disable_cache(), or use one of {', '.join(BLOCK_CACHES)}"
        )
    if any(name.startswith(BLOCK_CACHE_HOOKS) for hook in hooks for name in hook.inside()):
        raise ConfigError(
            "the cache would keep merged tokens, which are others at every refresh: "
            "call disable_cache(), then tomadiff.apply, and enable_cache() after it"
        )


def _check_checkpointing(model: nn.Module) -> None:
    if torch.is_grad_enabled() and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ConfigError(
            "gradient checkpointing runs blocks again when their plans are gone: "
            "call model.disable_gradient_checkpointing(), or tomadiff.remove first"
        )


def check_attention(hook: SiteHook) -> None:
    """What can't be done to the attention of a site that merges in this call."""
    if hook.idle:
        return
    name, site = hook.place.name, hook.site
    apart = site.keys_only and not site.keys_inside
    if apart and getattr(hook.place.module, "fused_projections", False):
        raise ConfigError(
            f'{name} computes queries, keys and values at once, and where="kv" needs them '
            "apart: call unfuse_qkv_projections()"
        )
    for attention in hook.attentions:
        processor = type(attention.processor).__name__
        if processor in KEEP_MAPS:
            raise ConfigError(
                f"{name} has a {processor}, whose attention maps have to be of all tokens: "
                "leave it dense, with a ratio for the other levels, as in ratio={1: 0.5, 2: 0.5, 4: 0.5}"
            )
        if processor.startswith("PAG") and (site.keys_only or hook.state.config.weigh_keys):
            raise ConfigError(
                f"{name} has a {processor}, which takes neither merged keys nor weights for "
                'them: use where="span", "block" or "module", and no weigh_keys'
            )
        for module in (attention, getattr(attention, "to_q", None)):
            for other in getattr(getattr(module, "_diffusers_hook", None), "hooks", ()):
                if other in INSIDE_BLOCKS:
                    raise ConfigError(
                        f"{name} has a hook inside, {other}, which needs all tokens, and the "
                        "same in every step: take it off, or tomadiff.remove first"
                    )
