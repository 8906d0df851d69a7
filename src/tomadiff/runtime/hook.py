"""The one hook: merge, run the module, unmerge."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn

from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call, PerTokenArg, Site

from . import compile
from .attention import run_inside, run_weighed
from .per_token import alter, follow
from .plan_cache import KeptPlan
from .planner import BLOCK_INPUT, Planner
from .sequence import Merged, picture, with_image_tokens
from .sites import Place
from .state import State
from .undo import Snapshot, drop_pre_hook

HOOK = "tomadiff"  # our name in diffusers' hook registries


@dataclass
class Run:
    """Sites that run one after the other, and the tokens on their way through them.

    Blocks don't care about the order of tokens, so these are arranged by regions before the first block and
    restored after the last; in a span they are also merged and unmerged only there.
    """

    sites: list[SiteHook] = field(default_factory=list)
    merged: Merged | None = None
    # what compiled code does not see
    kept: KeptPlan | None = None
    arranged: Tensor | None = None  # the picture's tokens, where that moved any

    def clear(self) -> None:
        self.merged = self.kept = self.arranged = None


def join_runs(hooks: list[SiteHook]) -> None:
    """Let neighbouring blocks share a run."""
    runs: dict[str, Run] = {}
    for hook in hooks:
        hook.run = runs.setdefault(hook.place.neighbours, Run())
        hook.run.sites.append(hook)


class SiteHook(ModelHook):
    """Merge, run, unmerge: around a submodule, a block, or with its neighbours around a span of blocks.

    `merge`, `alike` and `unmerge` do the work. In compiled code, operators take their places: the methods
    of the same names with an underscore choose.
    """

    def __init__(self, state: State, place: Place) -> None:
        super().__init__()
        self.state, self.place, self.site = state, place, place.site
        if not self.site.path and compile.by_others(place.module):
            raise ConfigError(
                f"{place.name} is compiled already, and merging has to be around what is compiled: "
                "call tomadiff.apply first, then compile_repeated_blocks()"
            )
        self.parameters = parameter_names(place.module)
        self.argument = self.site.tokens or self.parameters[0]
        self.planner = Planner(state, place, self.argument)
        self.run = Run([self])
        self.attentions = [module for module in place.module.modules() if hasattr(module, "processor")]
        self.projections: set[nn.Module] = set()  # whose input becomes merged tokens
        self.undo: Snapshot | None = None  # while it is put on the module, or taken off
        self.number = compile.number(self)
        self.region = compile.Region()
        # in this call
        # how often it did what: a block may run on one part of the batch after the other
        self.visits: Counter[str | int] = Counter()
        self.off = False  # since merging doesn't gain here, as auto found
        self.ratio = place.ratios[0]
        self.idle = self.ran = False
        # tokens of the picture in this call: all, merged ones, and places where they are when arranged
        self.image = self.short = self.places = 0
        self.short_first = 0  # merged tokens of the first frame, where it is treated apart
        # for the report
        self.tokens = self.kept = self.calls = self.dense_calls = 0
        self.kept_at: dict[float, tuple[int, int]] = {}  # by ratio, of how many and how many

    # -- on the module, and off again ----------------------------------------------------------------------

    def register(self) -> None:
        module = self.place.module
        self.undo = Snapshot(module)
        HookRegistry.check_if_exists_or_initialize(module).register_hook(self, HOOK)
        self.forward = self.fn_ref.forward
        if not self.site.path:
            self.region.take(module)
        self.undo = None

    def __reduce__(self) -> Any:
        raise TypeError("a model with tomadiff on it can't be pickled: call tomadiff.remove first")

    def settle(self) -> None:
        """Before each call: what others did to the module since the last one."""
        self._stay_in_place()
        self.region.settle(self.fn_ref.original_forward)
        # adapters may have put themselves in a projection's place since the last call
        projections = {getattr(self.place.module, name) for name in self.site.keys_projections}
        if projections != self.projections:
            self._let_go()
            self.projections = projections  # before they have the hook, so that an interrupt loses none
            for each in projections:
                each.register_forward_pre_hook(self._instead)

    def unregister(self) -> None:
        """Nothing happens where it is not on; what is half on, or half off, goes."""
        self._let_go()
        if self.undo is not None:
            self.undo.restore()
            self.undo = None
        module, registry = self.place.module, getattr(self.place.module, "_diffusers_hook", None)
        if registry is None or registry.hooks.get(HOOK) is not self:
            return
        self._stay_in_place()
        self.undo = Snapshot(module)
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
        self.undo = None

    def _stay_in_place(self) -> None:
        """When diffusers removes a hook from under ours, it puts what is left in our place."""
        if self.fn_ref.forward is not self.forward:
            self.fn_ref.original_forward, self.fn_ref.forward = self.fn_ref.forward, self.forward

    def _let_go(self) -> None:
        for projection in self.projections:
            drop_pre_hook(projection, self._instead)
        self.projections = set()

    def inside(self) -> list[str]:
        """The hooks that others put on the module before ours."""
        order = self.place.module._diffusers_hook._hook_order
        return order[: order.index(HOOK)]

    # -- around each call of the model ---------------------------------------------------------------------

    def choose(self, off: bool, range_number: int) -> None:
        """Whether to merge in this call, and with the ratio of which range of steps."""
        self.off = off
        self.ratio = 0.0 if off else self.place.ratios[range_number]
        self.idle, self.ran = self.state.dense or not self.ratio, False
        self.visits.clear()

    def leave_dense(self) -> None:
        """In this call; nothing has to be known of it."""
        self.idle, self.ran, self.image = True, False, self.tokens

    def foretell(self) -> None:
        """How long sequences will be: compiled code has to know before there is a plan."""
        self.image = math.prod(self.state.layout.grid(self.place.level))
        if self.idle:
            return
        self.short, self.places = self.planner.lengths(self.image, self.ratio)
        if self.site.first_frame is not None:
            self.short_first = self.planner.first_frame(self.image, self.ratio)

    def before_block(
        self, whole: Site, parameters: list[str], block: nn.Module, args: tuple, kwargs: Call
    ) -> None:
        """Keep the picture's tokens that go into the block around, for all sites in it."""
        state, sequence = self.state, (dict(zip(parameters, args)) | kwargs).get(whole.tokens)
        if sequence is None:
            raise ConfigError(
                f"method={state.config.method!r} matches the tokens that go into a block, which those of "
                f'{type(block).__name__} have in another order: use method="toma"'
            )
        state.block_input = picture(sequence, state.layout.around(sequence, whole, self.image))

    def count(self) -> None:
        """Take note of a call, for the report."""
        self.calls += 1
        if self.idle:
            self.dense_calls += 1
            if self.tokens != self.image:  # else, what merging kept is the better news
                self.tokens = self.kept = self.image
        elif self.state.config.where == "span":
            self.tokens, self.kept = self.run.sites[0].tokens, self.run.sites[0].kept
        if not self.idle:
            self.kept_at[self.ratio] = self.tokens, self.kept

    # -- instead of the module's own forward ---------------------------------------------------------------

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Merge, run, unmerge. Compilers follow this, so it leaves all that varies to others."""
        if not self.state.called:
            raise ConfigError(
                f"{self.place.name} was called from outside a call of its model, which merging has to see: "
                "call the model itself, not its forward and not its blocks, or tomadiff.remove first"
            )
        call: Call = dict(zip(self.parameters, args)) | kwargs
        self.ran = True
        run = self.run
        first = self.state.cut or self is run.sites[0]
        last = self.state.cut or self is run.sites[-1]
        each = self.state.config.where != "span"
        forward = self.region.forward or self.fn_ref.original_forward
        if self.idle:
            return forward(**call)
        if self.site.keys_inside:
            return run_inside(self, forward, call)
        if first or each:
            run.merged = self._merge(call, first)
            if not self.site.keys_only:
                call[self.argument] = run.merged.sequence
            elif self.site.keys_argument:
                call[self.site.keys_argument] = run.merged.sequence
            for name in self.site.companion_args:
                if call.get(name) is not None:
                    call[name] = self._alike(call[name])
        self._follow(call)
        output = self._run(forward, call)
        if last or each:
            if not self.site.keys_only:
                output = self._unmerge(output, last)
            run.merged = None
        return output

    def _run(self, forward: Callable[..., Any], call: Call) -> Any:
        if self.run.merged.key_bias is None:
            return forward(**call)
        if self._weighed_inside():
            return run_inside(self, forward, call)
        compiled = torch.compiler.is_compiling() or self.region.forward is not None
        return forward(**call) if compiled else run_weighed(forward, call)

    def _weighed_inside(self) -> bool:
        """Keys are weighed at the call of attention; in compiled code by a mask, where it takes one."""
        return self.site.weighed_inside and not (self.site.weigh_keys and torch.compiler.is_compiling())

    def prepare_keys(self, call: Call) -> None:
        """Make the plan for keys and values that are merged at the call of attention."""
        self.run.merged = self._merge(call, first=True)
        self._follow(call)

    def _merge(self, call: Call, first: bool) -> Merged:
        if self.state.from_input and self.site.path:
            call = call | {BLOCK_INPUT: self.state.block_input}
        return compile.merge(self, call, first) if torch.compiler.is_compiling() else self.merge(call, first)

    def merge(self, call: Call, first: bool) -> Merged:
        """The site's sequence with merged tokens."""
        whole = call[self.argument]
        around = self.around(whole, in_order=first)
        tokens = picture(whole, around)
        visit = self._visit("merge")
        kept = self.planner.plan(call, tokens, around, self.ratio, visit, arranged_by=self.run.kept)
        plan = kept.plan
        if self.site.keys_inside:  # merged later, at the call of attention
            self.tokens, self.kept = plan.regions.tokens, plan.destinations.shape[1]
            return Merged(whole, whole, plan.destinations, kept.key_bias, around, plan)
        with self.state.times.overhead("merge", tokens.device):
            arranged = plan.regions.arrange(tokens) if first else tokens
            merged = plan.merge(arranged)
            self.tokens, self.kept = plan.regions.tokens, merged.shape[1]
            sequence = with_image_tokens(whole, around, merged)
        if not self.site.keys_only:  # which have nothing to unmerge
            self.run.kept, self.run.arranged = kept, None if arranged is tokens else arranged
        return Merged(sequence, whole, plan.destinations, kept.key_bias, around, plan)

    def around(self, sequence: Tensor, in_order: bool) -> tuple[int, int]:
        """How many tokens of a sequence are before and behind those of the picture."""
        return self.state.layout.around(sequence, self.site, self.image if in_order else self.places)

    def _alike(self, other: Tensor) -> Tensor:
        merged = self.run.merged
        if other is merged.whole:
            return merged.sequence
        alike = compile.alike if torch.compiler.is_compiling() else SiteHook.alike
        return alike(self, other, merged)

    def alike(self, other: Tensor, merged: Merged) -> Tensor:
        """Another sequence, merged as the site's is."""
        plan = merged.plan
        with self.state.times.overhead("merge", other.device):
            tokens = plan.regions.arrange(picture(other, merged.around))
            return with_image_tokens(other, merged.around, plan.merge(tokens))

    def _instead(self, projection: nn.Module, args: tuple) -> tuple[Tensor] | None:
        """Keys and values from merged tokens, while queries are from all: what comes back is whole."""
        return None if self.run.merged is None else (self.run.merged.sequence,)

    def _follow(self, call: Call) -> None:
        """What belongs to single tokens follows them: positions, and how much a key counts."""
        site, merged = self.site, self.run.merged
        for rows in (*site.rotary, *site.follows):
            both = site.keys_only and rows in site.rotary
            alter(call, rows.argument, lambda x, r=rows, b=both: self._followed(r, x, b))
        if site.first_frame is not None:
            call[site.first_frame] = self.short_first
        arguments = (
            call | (call.get("cross_attention_kwargs") or {}) | (call.get("joint_attention_kwargs") or {})
        )
        for mask in (site.mask, "ip_adapter_masks"):
            if arguments.get(mask) is not None:
                raise ConfigError(
                    f"{self.place.name} was called with {mask}, a mask over image tokens, which merged ones "
                    f"can't have: {site.unmasked}, or tomadiff.remove first"
                )
        if site.weigh_keys is not None and merged.key_bias is not None and not self._weighed_inside():
            site.weigh_keys(call, F.pad(merged.key_bias, merged.around))

    def _followed(self, rows: PerTokenArg, argument: Any, keys_only: bool) -> Any:
        """An argument for the plan's destinations; made once a call, for all sites that share the plan."""
        destinations, references = self.run.merged.destinations, self.state.layout.reference_tokens
        if torch.compiler.is_compiling():  # which notices by itself what it has already
            return follow(destinations, self.image, rows, argument, references, keys_only)
        followed, key = self.state.followed, (id(destinations), id(argument), rows)
        if key not in followed:
            with self.state.times.spent("merge", destinations.device):
                made = follow(destinations, self.image, rows, argument, references, keys_only)
            followed[key] = (argument, made)  # it is held on to, so that no other takes its address
        return followed[key][1]

    def _unmerge(self, output: Any, last: bool) -> Any:
        unmerge = compile.unmerge if torch.compiler.is_compiling() else SiteHook.unmerge
        sequences = self._returned(output, self.run.merged.sequence.shape[1])
        whole = {}
        for place, y in sequences.items():
            done = last and len(whole) == len(sequences) - 1
            whole[place] = unmerge(self, y, place, last, done, self.run.merged)
        return with_parts(output, whole)

    def unmerge(self, y: Tensor, place: int, last: bool, done: bool, merged: Merged) -> Tensor:
        """One of the outputs, whole again; behind the last site of a run in the image's order."""
        run, plan, around = self.run, self.run.kept.plan, merged.around
        tokens = picture(merged.whole, around) if run.arranged is None else run.arranged
        with self.state.times.overhead("unmerge", y.device):
            image, short = picture(y, around), picture(merged.sequence, around)
            # unmerging the change leaves every token its own detail
            x = plan.unmerge(image, tokens, short) if self.site.residual else plan.unmerge(image)
            x = plan.regions.restore(x) if last else x
            whole = with_image_tokens(y, around, x)
        if done:
            run.kept = run.arranged = None
        return whole

    def _visit(self, what: str | int) -> int:
        """Counts what is done to the site's tokens, or to one of its outputs, from 0 in each call."""
        self.visits[what] += 1
        return self.visits[what] - 1

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


def with_parts(output: Any, parts: dict[int, Tensor]) -> Any:
    """What a module returned, a tensor or a tuple, with other parts."""
    if not isinstance(output, tuple):
        return parts[0]
    return tuple(parts.get(place, part) for place, part in enumerate(output))


def parameter_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]
