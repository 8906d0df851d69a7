"""The one hook: merge, run the module, unmerge. And the state that a model's sites share."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import auto, compiled
from .clock import Clock
from .config import Config
from .core import Schedule
from .errors import ConfigError, UnsupportedModelError
from .families import FAMILIES, Call, Family, Rows, Site
from .follow import alter, follow
from .machine import wait_for
from .memory import Memory
from .methods import FROM_BLOCK_INPUT, METHODS, lengths
from .pace import Pace
from .sites import Place, find

HOOK = "tomadiff"  # our name in diffusers' hook registries
# caches that act around whole blocks; their hooks go around ours if they are enabled after ours are on
BLOCK_CACHES = ("FirstBlockCacheConfig", "MagCacheConfig")
BLOCK_CACHE_HOOKS = ("fbc_", "mag_cache_")  # how their names start
BY_CACHE_DIT = "_is_cached"  # the mark of another cache around whole blocks, which has no hooks
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
PATCH = "_tomadiff"  # the model's attribute that holds its Patch
BLOCK_INPUT = "block input"  # among the arguments of a module, what went into its block


class PlanKey(NamedTuple):
    """Whom a plan serves: sites of a kind, or one by name, in one of the calls of a step, on such tokens."""

    block: str  # the class of block
    kind: str
    name: str | None
    ratio: float
    grid: tuple[int, ...]
    shifted: bool
    call: int
    batch: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class KeptPlan:
    """A plan, with what sites need of it and the steps at which its two parts were made."""

    plan: Any
    key_bias: Tensor | None  # [B, K] to add to the logits of merged keys
    destinations_step: int
    weights_step: int


class Merged(NamedTuple):
    """What a site runs on, and what follows from it."""

    sequence: Tensor  # with merged tokens
    whole: Tensor  # the sequence before
    destinations: Tensor  # [B, K] token numbers
    key_bias: Tensor | None  # [B, K] to add to the logits of merged keys
    around: tuple[int, int]  # tokens before and behind the picture's, which are never merged


@dataclass
class Run:
    """Sites that run one after the other, and the tokens on their way through them.

    Blocks don't care about the order of tokens, so these are arranged by regions before the first block and
    restored after the last; in a span they are also merged and unmerged only there.
    """

    sites: list[SiteHook] = field(default_factory=list)
    merged: Merged | None = None
    before: Tensor | None = None  # in a dense step, the sequence as it was
    # what compiled code does not see
    kept: KeptPlan | None = None
    arranged: Tensor | None = None  # the picture's tokens, where that moved any

    def clear(self) -> None:
        self.merged = self.before = self.kept = self.arranged = None


class Patch:
    """Merging on one model: its sites, and what they share during a call."""

    def __init__(self, model: nn.Module, family: Family, config: Config, pipeline: Any = None) -> None:
        self.model, self.family, self.config = model, family, config
        self.clock = Clock(pipeline, family.ascending)
        self.schedule = Schedule(config.refresh_destinations, config.refresh_weights)
        self.sites = [SiteHook(self, place) for place in find(model, family, config)]
        if config.where in ("block", "span"):
            join_runs(self.sites)
        self.plans: dict[PlanKey, KeptPlan] = {}
        # arguments of this call and what they are for merged tokens
        self.followed: dict[tuple[int, int, Rows], tuple[Any, Any]] = {}
        self._lengths: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.pace = Pace()  # of this generation
        self.dense = False  # this call, everywhere
        self.trial: bool | None = None  # while auto measures, whether this call is dense; it is no step
        self.answers: dict[auto.Situation, auto.Answer] = {}  # what auto found
        self.cut = False  # this call, every block is a run of its own
        self.model_calls = 0
        self.refreshes = {"destinations": 0, "weights": 0}
        self.seconds = {"plan": 0.0, "merge": 0.0, "unmerge": 0.0, "model": 0.0}
        self.phase: str | None = None  # which of these is under way; None for the model itself
        self.synchronise = False  # wait for the device around each of these: slow, but then times are known
        self.timed = True  # False once it ran on a device whose clock is not ours
        self.handles: list[RemovableHandle] = []
        self.from_input = config.method in FROM_BLOCK_INPUT
        self.block_input: Tensor | None = None  # of the block under way, where modules in it need that
        self.parameters = parameter_names(model)
        self._grid: tuple[list[Any] | None, tuple[int, ...]] = (None, ())
        self.others = (0, 0)  # tokens of other pictures, before and behind those of the one that is drawn
        self._start = 0.0
        self._caller: threading.Thread | None = None  # while it is in the model
        self._door = threading.Lock()

    @torch.compiler.disable
    def before_model(self, model: nn.Module, args: tuple, kwargs: Call) -> None:
        """See where in a generation this call is, and how the image is laid out."""
        call = dict(zip(self.parameters, args)) | kwargs
        generation = self.clock.generation
        if self.trial is None:
            self._enter()
            self.model_calls += 1
            self.clock.tick(call.get(self.family.time), call.get(self.parameters[0]))
        if self.clock.generation != generation:
            self.plans.clear()
            self._lengths.clear()
            for hook in self.sites:
                hook.memories.clear()
        self.followed.clear()
        self.block_input = None
        for hook in self.sites:
            hook.run.clear()  # an exception may have ended the last call on the way
            hook.settle()
        if self.clock.generation != generation:
            self._begin()
        self.dense = self.pace.dense(self.clock.step) if self.trial is None else self.trial
        self.dense |= self.family.reads(call)
        # what acts between blocks, or leaves some out, must find all tokens in their order
        self.cut = (
            self.family.skips
            or any(call.get(name) is not None for name in self.family.between_blocks)
            or getattr(self.model, BY_CACHE_DIT, False)
            or any(len(hook.place.module._diffusers_hook.hooks) > 1 for hook in self.sites)
        )
        self._check_modules()
        self._check_caches()
        if torch.is_grad_enabled() and any(
            getattr(m, "gradient_checkpointing", False) for m in model.modules()
        ):
            raise ConfigError(
                "gradient checkpointing runs blocks again when their plans are gone: "
                "call model.disable_gradient_checkpointing(), or tomadiff.remove first"
            )
        names = self.family.grid_from
        sources = [call.get(name) for name in ([names] if isinstance(names, str) else names)]
        if self._grid[0] is None or any(a is not b for a, b in zip(sources, self._grid[0])):
            self._grid = (sources, self.family.grid(self.model, *sources))
            self.others = self.family.others(self.model, *sources)
        self._choose(call)
        for hook in self.sites:
            self._foretell(hook)
            hook.check_attention()
        self._start = time.perf_counter()

    def _enter(self) -> None:
        """Plans, runs and memories are for one call at a time."""
        with self._door:
            me, other = threading.current_thread(), self._caller
            if other is not None and other is not me and other.is_alive():
                raise ConfigError(
                    f"{me.name} called this model in the middle of a call by {other.name}, and merging can "
                    "do one at a time: take turns, or give each thread a copy.deepcopy of the pipeline. (If "
                    "nothing else runs, that call was interrupted: tomadiff.apply again.)"
                )
            self._caller = me
        if other is not None:
            self.forget()  # an interrupt ended the last call on the way

    def forget(self) -> None:
        """Let go of all tensors; whatever comes next is a new generation."""
        self.clock.forget()
        self.plans.clear()
        self.followed.clear()
        self._grid = (None, ())
        for hook in self.sites:
            hook.memories.clear()
            hook.run.clear()

    def _choose(self, call: Call) -> None:
        """The ratio of each site in this call."""
        measured = self.config.auto and self.trial is None and not self.family.reads(call)
        off = auto.decide(self, call).off if measured else frozenset()
        at = self.pace.range(self.clock.step)
        for hook in self.sites:
            hook.off = auto.group_of(hook) in off
            hook.ratio = 0.0 if hook.off else hook.place.ratios[at]
            hook.idle, hook.ran = self.dense or not hook.ratio, False

    def _foretell(self, hook: SiteHook) -> None:
        """How long a site's sequences will be: compiled code has to know before there is a plan."""
        hook.image = math.prod(self.grid(hook.place.level))
        if hook.idle:
            return
        grid = self._grid_at(hook, hook.image)
        key = (grid, hook.ratio, hook.place.depth, hook.device())
        if key not in self._lengths:
            self._lengths[key] = lengths(self.config, *key)
        hook.short, hook.places = self._lengths[key]
        if hook.site.first_frame is not None:
            sizes = self.config.region_size
            if len(grid) == 1 or (isinstance(sizes, tuple) and sizes[0] > 1):
                raise ConfigError(
                    f"{hook.place.name} treats the first frame apart, so that regions must lie within "
                    'frames: use regions="tile", and region_size as a number'
                )
            hook.first = lengths(self.config, (1, *grid[1:]), *key[1:])[0]

    def _check_modules(self) -> None:
        """LoRA puts layers of its own in the place of linear ones, and unloading puts those back."""
        for place in (hook.place for hook in self.sites if hook.site.path):
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

    def _check_caches(self) -> None:
        """Caches must be around merging: what they keep from step to step has to be whole tokens."""
        cache = getattr(self.model, "_cache_config", None)
        if cache is not None and type(cache).__name__ not in BLOCK_CACHES:
            raise ConfigError(
                f"{type(cache).__name__} caches inside blocks, where tokens are merged and others at every "
                f"refresh: call disable_cache(), or use one of {', '.join(BLOCK_CACHES)}"
            )
        if any(name.startswith(BLOCK_CACHE_HOOKS) for hook in self.sites for name in hook.inside()):
            raise ConfigError(
                "the cache would keep merged tokens, which are others at every refresh: "
                "call disable_cache(), then tomadiff.apply, and enable_cache() after it"
            )

    def before_block(
        self, whole: Site, hook: SiteHook, parameters: list[str], block: nn.Module, args: tuple, kwargs: Call
    ) -> None:
        """Keep the picture's tokens that go into a block, for a site in it."""
        sequence = (dict(zip(parameters, args)) | kwargs).get(whole.tokens)
        if sequence is None:
            raise ConfigError(
                f"method={self.config.method!r} matches the tokens that go into a block, which those of "
                f'{type(block).__name__} have in another order: use method="toma"'
            )
        self.block_input = picture(sequence, self.around(sequence, whole, hook.image))

    def around(self, sequence: Tensor, site: Site, tokens: int) -> tuple[int, int]:
        """How many tokens of a site's sequence are before and behind those of the picture."""
        before, behind = self.others
        if sequence.shape[1] == tokens:  # the picture is alone
            return 0, 0
        text = sequence.shape[1] - tokens - before - behind
        return before + text * site.lead, behind + text * site.trail

    @torch.compiler.disable
    def after_model(self, model: nn.Module, args: tuple, output: Any) -> None:
        if self._caller is not threading.current_thread():
            return  # this call was refused, in the middle of another
        self.block_input = None
        if self.trial is None:
            self._caller = None
        if output is None:  # an exception ended the call on the way: nobody goes on from here
            self.forget()
            return
        self.seconds["model"] += time.perf_counter() - self._start
        for hook in self.sites:
            if hook.ran:
                hook.count()
        if self.config.where == "kv" and not any(hook.calls for hook in self.sites):
            raise UnsupportedModelError(
                "no keys and values were merged: something replaced the attention of this model"
            )
        if any(hook.run.kept is not None for hook in self.sites):
            raise UnsupportedModelError(
                "a block was left out of its run, so that tokens came back merged or out of order: "
                'something else skips blocks of this model; use where="module" beside it'
            )

    def plan(self, hook: SiteHook, call: Call, tokens: Tensor, around: tuple[int, int]) -> KeptPlan:
        """The plan for a site's image tokens: the one at hand, or a new one where that is due."""
        arranged = hook.run.kept  # by an earlier site of the run
        grid = self._grid_at(hook, tokens.shape[1] if arranged is None else arranged.plan.regions.tokens)
        key = PlanKey(
            block=type(hook.place.block).__name__,
            kind="block" if self.from_input else hook.site.kind,
            name=None if self.config.share == "kind" else self._owner(hook),
            ratio=hook.ratio,
            grid=grid,
            shifted=self.shifted(),
            call=self.clock.call,
            batch=tokens.shape[0],
            dtype=tokens.dtype,
            device=tokens.device,
        )
        kept, step, due = self.plans.get(key), self.clock.step, "destinations"
        if kept is not None:
            due = self.schedule.due(step - kept.destinations_step, step - kept.weights_step)
            # what sites remember holds for one plan, from a dense step to the next
            if due is None or (self.pace.remembers and not self.pace.dense(step - 1)):
                return kept
        with torch.no_grad():
            with self.spent("plan", tokens.device):
                features = tokens if arranged is None else arranged.plan.regions.restore(tokens)
                if self.from_input and hook.site.path:
                    features = call[BLOCK_INPUT]
                elif hook.site.features is not None and not self.from_input:
                    # with what is around the picture, since other arguments have entries for that, too
                    sequence = with_picture(call[hook.argument], around, features)
                    features = hook.site.features(hook.place.module, {**call, hook.argument: sequence})
                    features = picture(features, around)
            with self.overhead("plan", tokens.device):
                destinations = kept.plan.destinations if due == "weights" else None
                plan = METHODS[self.config.method](
                    features,
                    grid,
                    hook.ratio,
                    self.config,
                    shifted=key.shifted,
                    depth=hook.place.depth,
                    destinations=destinations,
                )
                bias = plan.log_sizes().to(tokens.dtype) if self.config.weigh_keys else None
        self.refreshes[due] += 1
        self.plans[key] = KeptPlan(plan, bias, kept.destinations_step if due == "weights" else step, step)
        return self.plans[key]

    def _owner(self, hook: SiteHook) -> str:
        return hook.place.block_name if self.from_input else hook.place.name

    def shifted(self) -> bool:
        """Whether regions are shifted in this step."""
        return self.config.shift and self.pace.turn(self.clock.step) % 2 == 1

    def follow(self, hook: SiteHook, rows: Rows, argument: Any, keys_only: bool) -> Any:
        """What belongs to single tokens, for a plan's destinations; made once a call."""
        destinations = hook.run.merged.destinations
        if torch.compiler.is_compiling():  # which notices by itself what it has already
            return follow(destinations, hook.image, rows, argument, self.others, keys_only)
        key = (id(destinations), id(argument), rows)
        if key not in self.followed:  # which holds on to the argument, so that no other takes its address
            with self.spent("merge", destinations.device):
                made = follow(destinations, hook.image, rows, argument, self.others, keys_only)
            self.followed[key] = (argument, made)
        return self.followed[key][1]

    @contextlib.contextmanager
    def spent(self, on: str, device: torch.device) -> Iterator[None]:
        """Book the time of what is inside. Only the CPU works while we look; others run behind our back."""
        if self.synchronise:
            wait_for(device)
        start, self.phase = time.perf_counter(), on
        try:
            yield
        finally:
            self.phase = None
        if self.synchronise:
            wait_for(device)
        self.seconds[on] += time.perf_counter() - start
        self.timed &= device.type == "cpu"

    @contextlib.contextmanager
    def overhead(self, on: str, device: torch.device) -> Iterator[None]:
        """Our own work: booked, and in the precision that we ask for, also under autocast."""
        with self.spent(on, device), torch.autocast(device.type, enabled=False):
            yield

    def _begin(self) -> None:
        """Settle which steps of a generation are dense."""
        if torch.is_grad_enabled():  # training has no steps
            if len(self.config.ranges()) > 1:
                raise ConfigError(
                    "a ratio by range of steps can't be honoured in training, which has no steps"
                )
            self.pace = Pace()
            return
        steps = self.clock.steps()
        self.pace = pace = Pace.of(self.config, steps)
        ratios = list(zip(*(hook.place.ratios for hook in self.sites)))
        merged = (any(ratios[pace.range(step)]) for step in range(steps or 0) if not pace.dense(step))
        if steps and any(map(any, ratios)) and not any(merged):
            warnings.warn(
                f"tomadiff merges nothing: all {steps} steps of this generation are dense, with "
                f"dense_steps={pace.first}, dense_every={pace.every}, "
                f"dense_last_steps={self.config.dense_last_steps} and ratio={self.config.ratio}; "
                "give fewer dense ones",
                stacklevel=2,
            )

    def _grid_at(self, hook: SiteHook, tokens: int) -> tuple[int, ...]:
        if self.config.regions in ("stripe", "global"):
            return (tokens,)  # runs of the sequence need no grid
        grid = self.grid(hook.place.level)
        if math.prod(grid) != tokens or len(grid) == 1:
            raise UnsupportedModelError(
                f"{hook.place.name} got {tokens} tokens, and the image has {' x '.join(map(str, grid))}, "
                'no grid of them: use method="toma" with regions="stripe", which needs none (and turn '
                "feed-forward chunking off, if it is on)"
            )
        sizes = self.config.region_size
        if isinstance(sizes, tuple) and len(sizes) != len(grid):
            raise ConfigError(
                f"region_size={sizes} has {len(sizes)} sizes, and tokens are on a grid of {len(grid)} axes, "
                f"{' x '.join(map(str, grid))}: give one size for each, or a single number"
            )
        return grid

    def grid(self, level: int) -> tuple[int, ...]:
        """The grid of tokens where the image is downsampled so far."""
        grid = self._grid[1]
        for _ in range(int(math.log2(level))):
            grid = tuple((side + 1) // 2 for side in grid)
        return grid


class SiteHook(ModelHook):
    """Merge, run, unmerge: around a submodule, a block, or with its neighbours around a span of blocks."""

    def __init__(self, patch: Patch, place: Place) -> None:
        super().__init__()
        self.patch, self.place, self.site = patch, place, place.site
        if not self.site.path and compiled.by_others(place.module):
            raise ConfigError(
                f"{place.name} is compiled already, and merging has to be around what is compiled: "
                "call tomadiff.apply first, then compile_repeated_blocks()"
            )
        self.parameters = parameter_names(place.module)
        self.argument = self.site.tokens or self.parameters[0]
        self.run = Run([self])
        self.attentions = [module for module in place.module.modules() if hasattr(module, "processor")]
        # by call of the step, cut or not, output, and batch, which shrinks where guidance ends on the way
        self.memories: dict[tuple[int, bool, int, int], Memory] = {}
        self.tokens = self.kept = self.calls = self.dense_calls = 0
        self.ratio = place.ratios[0]  # in this call
        self.off = False  # since merging doesn't gain here, as auto found
        self.idle = self.ran = False  # in this call
        self.number = compiled.number(self)
        self.region = compiled.Region()
        # tokens of the picture in this call: all, merged ones, and places where they are when arranged
        self.image = self.short = self.places = 0
        self.first = 0  # merged tokens of the first frame, where it is treated apart
        self.projections: dict[nn.Module, RemovableHandle] = {}  # whose input becomes merged tokens

    def register(self) -> None:
        module = self.place.module
        HookRegistry.check_if_exists_or_initialize(module).register_hook(self, HOOK)
        self.forward = self.fn_ref.forward
        if not self.site.path:
            self.region.take(module)

    def settle(self) -> None:
        """Stay in place: diffusers, taking a hook off from under ours, puts what is left in our place."""
        if self.fn_ref.forward is not self.forward:
            self.fn_ref.original_forward, self.fn_ref.forward = self.fn_ref.forward, self.forward
        self.region.settle(self.fn_ref.original_forward)
        # adapters may have put themselves in a projection's place since the last call
        projections = {getattr(self.place.module, name) for name in self.site.keys_projections}
        if projections != set(self.projections):
            self._let_go()
            self.projections = {each: each.register_forward_pre_hook(self._instead) for each in projections}

    def _let_go(self) -> None:
        for handle in self.projections.values():
            handle.remove()
        self.projections = {}

    def unregister(self) -> None:
        self.settle()
        self._let_go()
        module, registry = self.place.module, self.place.module._diffusers_hook
        around = registry._fn_refs[registry._hook_order.index(HOOK) + 1 :][:1]
        forwards = [outer.forward for outer in around]
        registry.remove_hook(HOOK, recurse=False)
        for outer, forward in zip(around, forwards):  # it stays in place, too
            if outer.original_forward is not None:
                outer.original_forward, outer.forward = outer.forward, forward
        if not registry.hooks:
            del module._diffusers_hook
            if getattr(module.forward, "__func__", None) is type(module).forward:
                del module.forward  # the registry put the class's own method there
        if not self.site.path:
            self.region.give_back(module)

    def inside(self) -> list[str]:
        """The hooks that others put on the module before ours."""
        order = self.place.module._diffusers_hook._hook_order
        return order[: order.index(HOOK)]

    def device(self) -> torch.device:
        return next((x.device for x in self.place.module.parameters()), torch.device("cpu"))

    def count(self) -> None:
        """Take note of a call, for the report."""
        self.calls += 1
        if self.idle:
            self.dense_calls += 1
            if self.tokens != self.image:  # else, what merging kept is the better news
                self.tokens = self.kept = self.image
        elif self.patch.config.where == "span":
            self.tokens, self.kept = self.run.sites[0].tokens, self.run.sites[0].kept

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Instead of the module's own. Compilers follow this, so it leaves all that varies to others."""
        call: Call = dict(zip(self.parameters, args)) | kwargs
        self.ran = True
        run = self.run
        first = self.patch.cut or self is run.sites[0]
        last = self.patch.cut or self is run.sites[-1]
        each = self.patch.config.where != "span"
        forward = self.region.forward or self.fn_ref.original_forward
        if self.idle:
            if first or each:
                run.before = call[self.argument]
            output = forward(**call)
            if last or each:
                output = self._remember(output)
                run.before = None
            return output
        if first or each:
            run.merged = self._merge(call, first)
            if not self.site.keys_only:
                call[self.argument] = run.merged.sequence
            elif self.site.keys_argument:
                call[self.site.keys_argument] = run.merged.sequence
            for name in self.site.also:
                if call.get(name) is not None:
                    call[name] = self._alike(call[name])
        self._follow(call)
        output = forward(**call)
        if last or each:
            if not self.site.keys_only:
                output = self._unmerge(output, last)
            run.merged = None
        return output

    def _merge(self, call: Call, first: bool) -> Merged:
        if self.patch.from_input and self.site.path:
            call = call | {BLOCK_INPUT: self.patch.block_input}
        return compiled.merge(self, call, first) if torch.compiler.is_compiling() else self.merge(call, first)

    def merge(self, call: Call, first: bool) -> Merged:
        """The site's sequence with merged tokens."""
        whole = call[self.argument]
        around = self.around(whole, in_order=first)
        tokens = picture(whole, around)
        kept = self.patch.plan(self, call, tokens, around)
        with self.patch.overhead("merge", tokens.device):
            arranged = kept.plan.regions.arrange(tokens) if first else tokens
            merged = kept.plan.merge(arranged)
            self.tokens, self.kept = kept.plan.regions.tokens, merged.shape[1]
            sequence = with_picture(whole, around, merged)
        if not self.site.keys_only:  # which have nothing to unmerge
            self.run.kept, self.run.arranged = kept, None if arranged is tokens else arranged
        return Merged(sequence, whole, kept.plan.destinations, kept.key_bias, around)

    def _alike(self, other: Tensor) -> Tensor:
        merged = self.run.merged
        if other is merged.whole:
            return merged.sequence
        alike = compiled.alike if torch.compiler.is_compiling() else SiteHook.alike
        return alike(self, other, merged)

    def alike(self, other: Tensor, merged: Merged) -> Tensor:
        """Another sequence, merged as the site's is."""
        plan = self.run.kept.plan
        with self.patch.overhead("merge", other.device):
            tokens = plan.regions.arrange(picture(other, merged.around))
            return with_picture(other, merged.around, plan.merge(tokens))

    def _instead(self, projection: nn.Module, args: tuple) -> tuple[Tensor] | None:
        """Keys and values from merged tokens, while queries are from all: what comes back is whole."""
        return None if self.run.merged is None else (self.run.merged.sequence,)

    def _follow(self, call: Call) -> None:
        """What belongs to single tokens follows them: positions, and how much a key counts."""
        site, merged = self.site, self.run.merged
        for rows in (*site.rotary, *site.follows):
            both = site.keys_only and rows in site.rotary
            alter(call, rows.argument, lambda x, r=rows, b=both: self.patch.follow(self, r, x, b))
        if site.first_frame is not None:
            call[site.first_frame] = self.first
        arguments = (
            call | (call.get("cross_attention_kwargs") or {}) | (call.get("joint_attention_kwargs") or {})
        )
        for mask in (site.mask, "ip_adapter_masks"):
            if arguments.get(mask) is not None:
                raise ConfigError(
                    f"{self.place.name} was called with {mask}, a mask over image tokens, which merged ones "
                    f"can't have: {site.unmasked}, or tomadiff.remove first"
                )
        if site.weigh_keys is not None and merged.key_bias is not None:
            site.weigh_keys(call, F.pad(merged.key_bias, merged.around))

    def around(self, sequence: Tensor, in_order: bool) -> tuple[int, int]:
        """How many tokens of a sequence are before and behind those of the picture."""
        return self.patch.around(sequence, self.site, self.image if in_order else self.places)

    def check_attention(self) -> None:
        """Some things that others do to attention can't be done to merged tokens."""
        if self.idle:
            return
        if self.site.keys_only and getattr(self.place.module, "fused_projections", False):
            raise ConfigError(
                f'{self.place.name} computes queries, keys and values at once, and where="kv" needs them '
                "apart: call unfuse_qkv_projections()"
            )
        for attention in self.attentions:
            processor = type(attention.processor).__name__
            if processor in KEEP_MAPS:
                raise ConfigError(
                    f"{self.place.name} has a {processor}, whose attention maps have to be of all tokens: "
                    "leave it dense, with a ratio for the other levels, as in ratio={1: 0.5, 2: 0.5, 4: 0.5}"
                )
            if processor.startswith("PAG") and (self.site.keys_only or self.patch.config.weigh_keys):
                raise ConfigError(
                    f"{self.place.name} has a {processor}, which takes neither merged keys nor weights for "
                    'them: use where="span", "block" or "module", and no weigh_keys'
                )
            for module in (attention, getattr(attention, "to_q", None)):
                for name in getattr(getattr(module, "_diffusers_hook", None), "hooks", ()):
                    if name in INSIDE_BLOCKS:
                        raise ConfigError(
                            f"{self.place.name} has a hook inside, {name}, which needs all tokens, and the "
                            "same in every step: take it off, or tomadiff.remove first"
                        )

    def _unmerge(self, output: Any, last: bool) -> Any:
        unmerge = compiled.unmerge if torch.compiler.is_compiling() else SiteHook.unmerge
        sequences = self._returned(output, self.run.merged.sequence.shape[1])
        whole = {}
        for place, y in sequences.items():
            done = last and len(whole) == len(sequences) - 1
            whole[place] = unmerge(self, y, place, last, done, self.run.merged)
        return with_parts(output, whole)

    def _returned(self, output: Any, tokens: int) -> dict[int, Tensor]:
        """What came back for tokens, by its place; there may be less of it than is declared, but not none."""
        parts = output if isinstance(output, tuple) else (output,)
        places = self.site.outputs or (0,)
        sequences = {place: parts[place] for place in places if place < len(parts)}
        for place, y in sequences.items() if sequences else [(places[0], None)]:
            if not isinstance(y, Tensor) or y.ndim != 3 or y.shape[1] != tokens:
                came = ", ".join(str(list(getattr(part, "shape", [type(part).__name__]))) for part in parts)
                raise UnsupportedModelError(
                    f"{self.place.name} returned {came}, and {tokens} tokens were expected at place {place}"
                )
        return sequences

    def unmerge(self, y: Tensor, place: int, last: bool, done: bool, merged: Merged) -> Tensor:
        """One of the outputs, whole again; behind the last site of a run in the image's order."""
        run, plan, around = self.run, self.run.kept.plan, merged.around
        tokens = picture(merged.whole, around) if run.arranged is None else run.arranged
        with self.patch.overhead("unmerge", y.device):
            image, short = picture(y, around), picture(merged.sequence, around)
            if self.patch.pace.remembers:
                x = self._change(image - short if self.site.residual else image, place)
                x = tokens + x if self.site.residual else x
            elif self.site.residual:
                # unmerging the change leaves every token its own detail
                x = plan.unmerge(image, tokens, short)
            else:
                x = plan.unmerge(image)
            x = plan.regions.restore(x) if last else x
            whole = with_picture(y, around, x)
        if done:
            run.kept = run.arranged = None
        return whole

    def _change(self, merged: Tensor, place: int) -> Tensor:
        """What the site does to every token, by what it does to merged ones and by what it remembers."""
        kept, clock = self.run.kept, self.patch.clock
        memory = self.memories.get((clock.call, self.patch.cut, place, len(merged)))
        return memory.change(kept, merged, clock.step) if memory else kept.plan.unmerge(merged)

    def _remember(self, output: Any) -> Any:
        """A dense step tells what the site does to each token."""
        if not self.patch.pace.remembers or self.off or not any(self.place.ratios):
            return output
        remember = compiled.remember if torch.compiler.is_compiling() else SiteHook.remember
        before = self.run.before
        sequences = self._returned(output, before.shape[1])
        return with_parts(output, {place: remember(self, y, place, before) for place, y in sequences.items()})

    def remember(self, y: Tensor, place: int, x: Tensor) -> Tensor:
        clock, around = self.patch.clock, self.around(x, in_order=True)
        change = picture(y - x if self.site.residual else y, around).detach()
        key = (clock.call, self.patch.cut, place, len(change))
        self.memories[key] = Memory.of(clock.step, change, self.memories.get(key))
        return y


def picture(sequence: Tensor, around: tuple[int, int]) -> Tensor:
    """The picture's tokens of a sequence, [B, S, C]."""
    before, behind = around
    return sequence[:, before : sequence.shape[1] - behind] if before or behind else sequence


def with_picture(sequence: Tensor, around: tuple[int, int], tokens: Tensor) -> Tensor:
    """A sequence with other tokens for its picture."""
    before, behind = around
    if not before and not behind:
        return tokens
    return torch.cat([sequence[:, :before], tokens, sequence[:, sequence.shape[1] - behind :]], dim=1)


def with_parts(output: Any, parts: dict[int, Tensor]) -> Any:
    """What a module returned, a tensor or a tuple, with other parts."""
    if not isinstance(output, tuple):
        return parts[0]
    return tuple(parts.get(place, part) for place, part in enumerate(output))


def join_runs(hooks: list[SiteHook]) -> None:
    """Let neighbouring blocks share a run."""
    runs: dict[str, Run] = {}
    for hook in hooks:
        hook.run = runs.setdefault(hook.place.neighbours, Run())
        hook.run.sites.append(hook)


def parameter_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def denoiser(target: Any) -> tuple[nn.Module, Any]:
    """The model to patch, and the pipeline it belongs to if that was given."""
    if isinstance(target, nn.Module):
        return getattr(target, "_orig_mod", target), None  # what torch.compile returns holds the model
    for name in ("unet", "transformer", "prior", "decoder"):
        model = getattr(target, name, None)
        if isinstance(model, nn.Module):
            return getattr(model, "_orig_mod", model), target
    supported = "\n  ".join(map(str, FAMILIES))
    raise UnsupportedModelError(
        f"{type(target).__name__} is no model, and no pipeline with one. Supported are:\n  {supported}"
    )


def denoisers(target: Any) -> list[tuple[nn.Module, Any]]:
    """All models to patch: pipelines like Wan 2.2's have a second one, for the last steps."""
    models = [getattr(target, name, None) for name in ("transformer", "transformer_2")]
    if isinstance(target, nn.Module) or not all(isinstance(model, nn.Module) for model in models):
        return [denoiser(target)]
    return [(getattr(model, "_orig_mod", model), target) for model in models]


def attach(patch: Patch) -> None:
    """Put the hooks on."""
    for hook in patch.sites:
        hook.register()
    # the model itself is watched by torch's hooks: offloading replaces its forward after every generation
    patch.handles = [
        patch.model.register_forward_pre_hook(patch.before_model, with_kwargs=True),
        patch.model.register_forward_hook(patch.after_model, always_call=True),
    ]
    if patch.from_input:
        # whole blocks see their input themselves
        inside = {hook.place.block: hook for hook in patch.sites if hook.site.path}
        wholes = {part.name: part.whole or Site("block") for part in patch.family.blocks}
        for block, hook in inside.items():
            keep = functools.partial(
                patch.before_block, wholes[type(block).__name__], hook, parameter_names(block)
            )
            patch.handles.append(block.register_forward_pre_hook(keep, with_kwargs=True))
    setattr(patch.model, PATCH, patch)
    # hooks hold on to the very modules they are on, so a copy has to be made without them
    patch.model.__deepcopy__ = functools.partial(_copy, patch)


def detach(patch: Patch) -> None:
    """Take the hooks off and leave nothing behind."""
    for handle in patch.handles:
        handle.remove()
    for hook in patch.sites:
        hook.unregister()
    delattr(patch.model, PATCH)
    del patch.model.__deepcopy__


@contextlib.contextmanager
def attached(patch: Patch) -> Iterator[None]:
    """With the hooks on for the length of a `with` block."""
    attach(patch)
    try:
        yield
    finally:
        detach(patch)


def _copy(patch: Patch, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` of a patched model: the same settings on a model, and in a pipeline, of its own."""
    detach(patch)
    try:
        twin = copy.deepcopy(patch.model, memo)
    finally:
        attach(patch)
    pipeline = patch.clock.pipeline and patch.clock.pipeline()
    attach(Patch(twin, patch.family, patch.config, memo.get(id(pipeline))))
    return twin
