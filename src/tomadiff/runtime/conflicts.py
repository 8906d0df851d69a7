"""Detect what other features do to a model, and refuse what doesn't work with merged tokens.

This is checked before each call, since users may change a model at any time. Errors say what to do instead.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import nn

from tomadiff.errors import ConfigError

from .hook import SiteHook
from .offloading import GROUP

# caches around whole blocks; if they are enabled after `apply`, their hooks are outside ours
BLOCK_CACHES = ("FirstBlockCacheConfig", "MagCacheConfig")
BLOCK_CACHE_HOOKS = ("fbc_", "mag_cache_")  # prefixes of the names of their hooks
THOROUGH = 2  # steps in which everything is compared, at the start of a generation and after a change
# attributes that caches set on a model: diffusers', and cache-dit's, which wraps whole blocks without hooks
BY_DIFFUSERS, BY_CACHE_DIT = "_cache_config", "_is_cached"
# hooks on attention or its query projection that keep tokens between steps, or assume that they form a grid
INSIDE_BLOCKS = (
    *("pyramid_attention_broadcast", "faster_cache_block", "taylorseer_cache"),
    "smoothed_energy_guidance_hook",
)
# processors that record attention maps, which their pipelines map onto the image
KEEP_MAPS = (
    *("CrossAttnStoreProcessor", "AttendExciteAttnProcessor"),
    *("LEDITSCrossAttnProcessor", "Pix2PixZeroAttnProcessor"),
)


def records_attention(model: nn.Module) -> str | None:
    """The name of a processor that records attention maps, if there is one: its pipeline needs every step."""
    processors = {type(getattr(module, "processor", None)).__name__ for module in model.modules()}
    return next((name for name in KEEP_MAPS if name in processors), None)


def cached(model: nn.Module) -> bool:
    return any(getattr(model, mark, None) for mark in (BY_DIFFUSERS, BY_CACHE_DIT))


class Surroundings:
    """What others have attached to a model and its sites, compared from call to call.

    If nothing changed, `version` stays the same, and the call needs no checks. To compare everything takes
    the host longer than anything else that tomadiff does in a call with many blocks. So it is done in the
    first steps of a generation and after a change, since guiders put hooks on single blocks for some calls of
    each step. In the other steps, only the ends of spans are compared: whatever is switched on or off for a
    model, such as a cache, an adapter or its processors, is seen there, too.
    """

    def __init__(self, model: nn.Module, hooks: list[SiteHook]) -> None:
        self._model, self._hooks = model, hooks
        self._everywhere: _Places | None = None  # None before the first call
        self._at_ends: _Places | None = None
        self._thorough_until = THOROUGH  # the step from which on only the ends are compared
        self.version = 0
        self.between_blocks = False  # whether something acts between blocks, and needs all tokens there

    def look(self, step: int) -> None:
        """Called before each call; if something changed, adjusts our hooks to it."""
        if step == 0:
            self._thorough_until = THOROUGH
        places = self._everywhere if step < self._thorough_until else self._at_ends
        if places is not None and not places.changed():
            return
        for hook in self._hooks:
            hook.adjust()
        self.between_blocks = _act_between_blocks(self._model, self._hooks)
        self.version += 1
        self._thorough_until = step + THOROUGH
        self._everywhere = _Places(self._model, self._hooks)
        ends = [hook for hook in self._hooks if hook.index in (hook.span.number, hook.span.last)]
        self._at_ends = _Places(self._model, ends)


class _Places:
    """Where others attach something to a model and some of its sites, and what was there at first.

    Up to a thousand entries of `__dict__`s, read in a loop without Python code. What that costs is to fetch
    as many objects that no cache holds any more.
    """

    def __init__(self, model: nn.Module, hooks: list[SiteHook]) -> None:
        places: list[tuple[dict[str, Any], str]] = []
        places += [(vars(model), mark) for mark in (BY_DIFFUSERS, BY_CACHE_DIT)]
        modules = [hook.bound.module for hook in hooks]
        for hook in hooks:
            site, block = hook.site, hook.bound.block
            # attaching the hook again gives it another fn_ref
            places += [(hook.__dict__, "fn_ref"), (hook.compiler.__dict__, "settings")]
            places += [(hook.fn_ref.__dict__, name) for name in ("forward", "original_forward")]
            # modules that a LoRA may replace, and projections that may be fused
            places += [(hook.bound.module._modules, name) for name in site.keys_projections]
            if site.keys_only:
                places.append((vars(hook.bound.module), "fused_projections"))
            if site.path:
                places += [(block._modules, site.path), (vars(block), "_compiled_call_impl")]
        attentions = [attention for hook in hooks for attention in hook.attentions]
        for attention in attentions:
            # where a processor is a module, one of the other kind takes it away from there, and vice versa
            there = attention._modules if "processor" in attention._modules else vars(attention)
            places += [(there, "processor"), (attention._modules, "to_q")]
        queries = [attention._modules.get("to_q") for attention in attentions]
        inside = [vars(module) for module in (*attentions, *queries) if module is not None]
        places += [(attributes, "_diffusers_hook") for attributes in inside]
        registries = [attributes.get("_diffusers_hook") for attributes in (*map(vars, modules), *inside)]
        self._dicts, self._names = [attributes for attributes, _ in places], [name for _, name in places]
        self._hook_dicts: list[Sized] = [each.hooks for each in registries if each is not None]
        self._hook_dicts += [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._first = self._read()

    def changed(self) -> bool:
        return self._read() != self._first

    def _read(self) -> list[Any]:
        return [*map(dict.get, self._dicts, self._names), *map(len, self._hook_dicts)]


def _act_between_blocks(model: nn.Module, hooks: list[SiteHook]) -> bool:
    """Whether caches or other hooks act between blocks or skip some: they need all tokens, in image order."""
    return getattr(model, BY_CACHE_DIT, False) or any(
        len(hook.bound.module._diffusers_hook.hooks) > 1 or _has_hooks_inside_its_span(hook) for hook in hooks
    )


def _has_hooks_inside_its_span(hook: SiteHook) -> bool:
    """Whether a PyTorch hook runs between a site and its neighbours in the span."""
    module, span = hook.bound.module, hook.span
    before, behind = bool(module._forward_pre_hooks), bool(module._forward_hooks)
    return (before and hook.index != span.number) or (behind and hook.index != span.last)


def check_model(model: nn.Module, hooks: list[SiteHook]) -> None:
    """Raise ConfigError if something about the model makes merging impossible."""
    _check_modules(hooks)
    _check_caches(model, hooks)
    _check_devices(hooks)
    _check_parallelism(model)


def _check_modules(hooks: list[SiteHook]) -> None:
    """Check that sites are still the model's modules: loading or unloading a LoRA replaces linear layers."""
    for bound in (hook.bound for hook in hooks if hook.site.path):
        if bound.block._compiled_call_impl is not None:
            raise ConfigError(
                f"{bound.name} is inside a block that is compiled for itself, and each block would be "
                'compiled anew: use where="span" or "block", or compile the whole model'
            )
        module = getattr(bound.block, bound.site.path)
        if getattr(module, "_orig_mod", module) is not bound.module:
            raise ConfigError(
                f"{bound.name} is another module than when merging was applied, as after loading or "
                "unloading a LoRA: call tomadiff.apply again"
            )


def _check_devices(hooks: list[SiteHook]) -> None:
    """Check that all blocks are on one device: merged tokens and plans are not moved within a span."""
    devices = {_name(device): None for hook in hooks if (device := _runs_on(hook.bound.block)) is not None}
    if len(devices) > 1:
        raise ConfigError(
            f"the blocks of this model are on several devices ({', '.join(devices)}), over which tokens "
            "can't be merged: load it without device_map, with enable_model_cpu_offload() if it doesn't fit, "
            "or give interval alone, which needs no blocks"
        )


def _runs_on(block: nn.Module) -> Any:
    """The device that a block runs on, by accelerate's hook or its weights; None if offloading decides."""
    attributes = vars(block)
    if (by_accelerate := attributes.get("_hf_hook")) is not None:
        return getattr(by_accelerate, "execution_device", None)
    if any(GROUP in registry.hooks for m in block.modules() if (registry := vars(m).get("_diffusers_hook"))):
        return None
    weight = next(block.parameters(), None)
    return None if weight is None or weight.is_meta else weight.device


def _name(device: Any) -> str:
    """A device's name without an index of 0: 0, "cuda" and "cuda:0" are one device, in accelerate's hooks."""
    return (f"cuda:{device}" if isinstance(device, int) else str(device)).removesuffix(":0")


def _check_parallelism(model: nn.Module) -> None:
    if getattr(model, "_parallel_config", None) is not None:
        raise ConfigError(
            "enable_parallelism() splits the sequence between processes, none of which has all tokens to "
            "merge: give interval alone, which forecasts what the model gives, or tomadiff.remove first"
        )


def _check_caches(model: nn.Module, hooks: list[SiteHook]) -> None:
    """Caches must be outside merging: they have to store all tokens, since plans change from step to step."""
    cache = getattr(model, BY_DIFFUSERS, None)
    if cache is not None and type(cache).__name__ not in BLOCK_CACHES:
        raise ConfigError(
            f"{type(cache).__name__} caches inside blocks, where tokens are merged and others at every "
            f"refresh: call disable_cache(), or use one of {', '.join(BLOCK_CACHES)}"
        )
    if any(name.startswith(BLOCK_CACHE_HOOKS) for hook in hooks for name in hook.inner_hooks()):
        raise ConfigError(
            "the cache would keep merged tokens, which are others at every refresh: "
            "call disable_cache(), then tomadiff.apply, and enable_cache() after it"
        )


def check_checkpointing(model: nn.Module) -> None:
    if torch.is_grad_enabled() and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise ConfigError(
            "gradient checkpointing runs blocks again when their plans are gone: "
            "call model.disable_gradient_checkpointing(), or tomadiff.remove first"
        )


def check_attention(hook: SiteHook) -> None:
    """Raise ConfigError if a site's attention has something that doesn't work with merged tokens."""
    name, site = hook.bound.name, hook.site
    apart = site.keys_only and not site.keys_inside
    if apart and getattr(hook.bound.module, "fused_projections", False):
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
        if processor.startswith("PAG") and (site.keys_only or hook.config.weigh_keys):
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
