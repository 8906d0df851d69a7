"""The one hook: merge, run the module, unmerge."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.compiler import is_compiling

from tomadiff.config import ResolvedConfig
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import Call, PerTokenArg, Site

from . import compile
from .attention import run_inside, run_weighed
from .layout import Layout
from .model_call import ModelCall, SiteTask, SpanState
from .per_token import gather_rows, map_argument
from .planner import BLOCK_INPUT, Planner
from .sequence import image_tokens, with_image_tokens
from .sites import BoundSite
from .undo import Snapshot, drop_pre_hook

if TYPE_CHECKING:
    from .session import Session

HOOK = "tomadiff"  # our hook's name in diffusers' hook registries
ATTENTION_KWARGS = ("cross_attention_kwargs", "joint_attention_kwargs")  # dicts of arguments for attention


@dataclass
class Span:
    """Consecutive sites of which the first merges and the last unmerges.

    By their indices: with references to each other, sites would keep their modules until Python collects
    cycles, long after `remove`.
    """

    number: int  # the first site
    last: int


def join_spans(hooks: list[SiteHook]) -> None:
    """Join blocks of the same module list into one span."""
    spans: dict[str, Span] = {}
    for hook in hooks:
        hook.span = spans.setdefault(hook.bound.list_name, Span(hook.index, hook.index))
        hook.span.last = hook.index


@dataclass(slots=True)
class SiteCounts:
    """What a site has done since `apply`, for the report."""

    calls: int = 0
    dense_calls: int = 0
    tokens: int = 0  # image tokens in the last merged call
    kept: int = 0  # merged tokens in that call
    kept_at: dict[float, tuple[int, int]] = field(default_factory=dict)  # ratio -> (tokens, kept)

    def add(self, task: SiteTask, lengths: tuple[int, int] | None, calls: int) -> None:
        """Count calls that were alike; `lengths` are the numbers of image tokens before and after merging."""
        self.calls += calls
        if task.merged and lengths is not None:
            self.tokens, self.kept = self.kept_at[task.ratio] = lengths
        elif not task.merged:
            self.dense_calls += calls
            if task.tokens and task.tokens != self.tokens:  # otherwise keep the merged call's counts
                self.tokens = self.kept = task.tokens


class SiteCalls:
    """Counts calls of a model that are alike together, so that most need no loop over all sites."""

    def __init__(self) -> None:
        self._last: tuple[list[SiteHook], Sequence[SiteTask], list[bool], dict[int, tuple[int, int]]] | None
        self._last, self._calls = None, 0

    def add(self, hooks: list[SiteHook], call: ModelCall) -> None:
        """Count a call at all sites that ran in it."""
        alike = (hooks, call.tasks, call.ran, call.span_lengths)
        if alike != self._last:
            self.settle()
        self._last = alike  # also if it is only equal: the same tasks are compared faster
        self._calls += 1

    def settle(self) -> None:
        """Add what was counted to the counts of the sites; call it before they are read."""
        if self._last is not None:
            for hook, task, ran in zip(*self._last[:3]):
                if ran:
                    hook.counts.add(task, self._last[3].get(hook.span.number), self._calls)
        self._last, self._calls = None, 0


class SiteHook(ModelHook):
    """Merge, run, unmerge: around a submodule, a block, or with its neighbours around a span of blocks."""

    session: Session  # while the hook is on its module
    inner: Callable[..., Any]  # what it calls: the module's forward, compiled if that was asked for
    removed = False

    def __init__(self, config: ResolvedConfig, bound: BoundSite, index: int) -> None:
        super().__init__()
        self.config, self.bound, self.site, self.index = config, bound, bound.site, index
        if not self.site.path and compile.by_others(bound.module):
            raise ConfigError(
                f"{bound.name} is compiled already, and merging has to be around what is compiled: "
                "call tomadiff.apply first, then compile_repeated_blocks()"
            )
        self.parameters = parameter_names(bound.module)
        self.argument = self.site.tokens or self.parameters[0]
        # what never changes is looked up here, not in every call
        self.per_token, self.keys_only = self.site.per_token, self.site.keys_only
        self.outputs = self.site.outputs or (0,)
        self.masks = ("ip_adapter_masks", *filter(None, [self.site.mask]))
        self.replaces = bool(self.per_token or self.site.first_frame or self._weighs_keys)
        self.planner = Planner(self.config, bound)
        self.span = Span(index, index)
        self.attentions = [module for module in bound.module.modules() if hasattr(module, "processor")]
        self.projections: set[nn.Module] = set()  # projections whose input is replaced by merged tokens
        self.undo: Snapshot | None = None  # set while this hook is being added or removed
        self.number = compile.number(self)
        self.compiler = compile.BlockCompiler()
        self.counts = SiteCounts()  # without the calls that the session's `site_calls` has not settled

    # -- adding the hook to its module, and removing it ----------------------------------------------------

    def register(self, session: Session) -> None:
        module, self.session, self.removed = self.bound.module, session, False
        self.undo = Snapshot(module)
        HookRegistry.check_if_exists_or_initialize(module).register_hook(self, HOOK)
        self.forward, self.inner = self.fn_ref.forward, self.fn_ref.original_forward
        # past the registry's wrapper, which only calls pre_forward and post_forward; hooks that others add
        # later are put around this
        direct = functools.partial(self.new_forward, module)
        module.forward = functools.update_wrapper(direct, self.fn_ref.original_forward)
        if not self.site.path:
            self.compiler.take(module)
        self.undo = None

    def __reduce__(self) -> Any:
        raise TypeError("a model with tomadiff on it can't be pickled: call tomadiff.remove first")

    def adjust(self) -> None:
        """Adjust to what others did to the module since the last call."""
        self._restore_hook_order()
        self.compiler.compile_inside(self.fn_ref.original_forward)
        self.inner = self.compiler.forward or self.fn_ref.original_forward
        # adapters may have replaced a projection
        projections = {getattr(self.bound.module, name) for name in self.site.keys_projections}
        if projections != self.projections:
            self._unhook_projections()
            self.projections = projections  # set before hooking, so that an interrupt loses none
            for each in projections:
                each.register_forward_pre_hook(self._merged_projection_input)

    def unregister(self) -> None:
        """Remove the hook, if it is on the module; an interrupted `register` or `unregister` is undone."""
        self._unhook_projections()
        if self.undo is not None:
            self.undo.restore()
            self.undo = None
        module, registry = self.bound.module, getattr(self.bound.module, "_diffusers_hook", None)
        if registry is None or registry.hooks.get(HOOK) is not self:
            self._let_go()
            return
        self._restore_hook_order()
        self.undo = Snapshot(module)
        around = registry._fn_refs[registry._hook_order.index(HOOK) + 1 :][:1]
        forwards = [outer.forward for outer in around]
        registry.remove_hook(HOOK, recurse=False)
        for outer, forward in zip(around, forwards):  # the next outer hook keeps its forward
            if outer.original_forward is not None:
                outer.original_forward, outer.forward = outer.forward, forward
        if not registry.hooks:
            del module._diffusers_hook
            if getattr(module.forward, "__func__", None) is type(module).forward:
                del module.forward  # the registry set it to the class's own method
        if not self.site.path:
            self.compiler.give_back(module)
        self.undo = None
        self._let_go()

    def _let_go(self) -> None:
        """Drop what leads back to this hook: with cycles, models would stay in memory after `remove`."""
        self.removed = True
        for name in ("session", "fn_ref", "forward"):
            self.__dict__.pop(name, None)

    def _restore_hook_order(self) -> None:
        """When diffusers removes a hook inside ours, it rewires `fn_ref.forward` past ours: undo that."""
        if self.fn_ref.forward is not self.forward:
            self.fn_ref.original_forward, self.fn_ref.forward = self.fn_ref.forward, self.forward

    def _unhook_projections(self) -> None:
        for projection in self.projections:
            drop_pre_hook(projection, self._merged_projection_input)
        self.projections = set()

    def inner_hooks(self) -> list[str]:
        """The hooks that others put on the module before ours."""
        order = self.bound.module._diffusers_hook._hook_order
        return order[: order.index(HOOK)]

    # -- planning a call -----------------------------------------------------------------------------------

    def task(self, layout: Layout, ratio: float, cut: bool) -> SiteTask:
        """What this site does in calls of this layout, at this ratio; `cut`: every block is its own span."""
        tokens = math.prod(layout.grid(self.bound.level))
        if not ratio:
            return SiteTask(tokens=tokens)
        site, planner = self.site, self.planner
        grid = planner.grid(layout, tokens)
        head, tail = cut or self.index == self.span.number, cut or self.index == self.span.last
        return SiteTask(
            merged=True,
            head=head,
            tail=tail,
            ratio=ratio,
            tokens=tokens,
            grid=grid,
            kept=planner.length(grid, ratio),
            kept_of_first_frame=planner.first_frame(grid, ratio) if site.first_frame else 0,
            passes=not (head or tail or self.replaces),
        )

    @property
    def _weighs_keys(self) -> bool:
        return self.config.weigh_keys and self.site.weighs

    # -- running in place of the module's own forward ------------------------------------------------------

    def new_forward(self, module: nn.Module, *args: Any, **inputs: Any) -> Any:
        """Merge, run, unmerge. Compilers trace this, so everything that varies is left to operators."""
        # accelerate's hooks put back the forward that they found, which may be this one, after its removal
        if self.removed:
            return self.inner(*args, **inputs)
        call = self.session.call or self.session.require_call(self)
        task = call.tasks[self.index]
        call.ran[self.index] = True
        forward = self.inner
        if task.passes:
            return forward(*args, **inputs)
        if args:
            inputs.update(zip(self.parameters, args))
        if self.site.keys_inside:
            return run_inside(self, forward, inputs)
        number = self.span.number
        if task.head:
            call.spans[number] = self.begin_span(inputs)
        span = call.spans[number]
        if self.replaces:
            self.replace_what_belongs_to_tokens(inputs, call, span)
        output = forward(**inputs) if span.key_bias is None else self._run_weighed(forward, inputs, span)
        if task.tail:
            del call.spans[number]
            if not self.keys_only:
                output = self._unmerged(output, span)
        return output

    def begin_span(self, inputs: Call) -> SpanState:
        """Merge, and replace the image tokens in all arguments that hold them."""
        self.refuse_masks(inputs)
        known = inputs
        if self.planner.method.from_block_input and self.site.path:
            known = inputs | {BLOCK_INPUT: self.session.require_call(self).block_input}
        span = compile.perform(self, "merge", known)
        if not self.keys_only:
            inputs[self.argument] = span.sequence
        elif self.site.keys_argument:
            inputs[self.site.keys_argument] = span.sequence
        for name in self.site.companion_args:
            other = inputs.get(name)
            if other is not None:
                same = other is span.original
                inputs[name] = span.sequence if same else compile.perform(self, "merge_like", other, span)
        return span

    def _run_weighed(self, forward: Callable[..., Any], inputs: Call, span: SpanState) -> Any:
        if self._weighed_inside():
            return run_inside(self, forward, inputs, span)
        compiled = is_compiling() or self.compiler.forward is not None
        return forward(**inputs) if compiled else run_weighed(forward, inputs)

    def _weighed_inside(self) -> bool:
        """Whether keys are weighted inside the attention call; compiled code uses a mask if it can."""
        return self.site.weighed_inside and not (self.site.weigh_keys and is_compiling())

    def refuse_masks(self, inputs: Call) -> None:
        for holder in filter(None, (inputs, *map(inputs.get, ATTENTION_KWARGS))):
            for mask in self.masks:
                if holder.get(mask) is not None:
                    raise ConfigError(
                        f"{self.bound.name} was called with {mask}, a mask over image tokens, which merged "
                        f"ones can't have: {self.site.unmasked}, or tomadiff.remove first"
                    )

    def replace_what_belongs_to_tokens(self, inputs: Call, call: ModelCall, span: SpanState) -> None:
        """Replace per-token arguments, such as rotary tables, and pass on the weights of merged keys."""
        site, gathered = self.site, None if is_compiling() else call.gathered
        for rows in self.per_token:
            name = rows.argument
            if gathered and (key := (id(span.destinations), id(inputs.get(name)), id(rows))) in gathered:
                inputs[name] = gathered[key][1]  # in all blocks of a span but the first
            else:
                map_argument(inputs, name, self._gathered, rows, call, span)
        if site.first_frame is not None:
            inputs[site.first_frame] = call.tasks[self.index].kept_of_first_frame
        if site.weigh_keys is not None and span.key_bias is not None and not self._weighed_inside():
            site.weigh_keys(inputs, F.pad(span.key_bias, (span.prefix, span.suffix)))

    def _gathered(self, argument: Any, rows: PerTokenArg, call: ModelCall, span: SpanState) -> Any:
        """The rows of the plan's destinations, gathered once per call for all sites that share the plan."""
        compiling = is_compiling()  # the compiler removes repeated gathers by itself
        key = (0, 0, 0) if compiling else (id(span.destinations), id(argument), id(rows))
        if not compiling and key in call.gathered:
            return call.gathered[key][1]
        keys_only = self.keys_only and rows in self.site.rotary
        how = (call.tasks[self.index].tokens, rows, argument, call.layout.reference_tokens, keys_only)
        if compiling:
            return gather_rows(span.destinations, *how)
        with call.times.spent("merge", span.destinations.device):
            made = gather_rows(span.destinations, *how, call.span_plans[self.span.number].places)
        if self.keys_only and self.config.share == "block":
            return made  # nobody shares the plan, and a table for each block would be held for long
        call.gathered[key] = (argument, made)  # holding the argument keeps its id unique
        return made

    def _merged_projection_input(self, projection: nn.Module, args: tuple) -> tuple[Tensor] | None:
        """A pre-hook on key and value projections that replaces their input by the merged tokens."""
        call = self.session.call
        span = None if call is None else call.spans.get(self.span.number)
        return None if span is None else (span.sequence,)

    def _unmerged(self, output: Any, span: SpanState) -> Any:
        """The module's output with its image tokens unmerged."""
        parts = list(output) if isinstance(output, tuple) else [output]
        places = [place for place in self.outputs if place < len(parts)]
        tokens = span.sequence.shape[1]
        if not places or not all(_is_sequence(parts[place], tokens) for place in places):
            came = ", ".join(str(list(getattr(part, "shape", [type(part).__name__]))) for part in parts)
            raise UnsupportedModelError(
                f"{self.bound.name} returned {came}, and {tokens} tokens were expected at place "
                f"{', '.join(map(str, self.outputs))}"
            )
        for place in places:
            parts[place] = compile.perform(self, "unmerge", parts[place], span)
        return tuple(parts) if isinstance(output, tuple) else parts[0]

    # -- actions that are operators in compiled code -------------------------------------------------------

    def around(self, sequence: Tensor) -> tuple[int, int]:
        """How many tokens come before and after the image's in a sequence."""
        call = self.session.require_call(self)
        return call.layout.around(sequence, self.site, call.tasks[self.index].tokens)

    def merge(self, inputs: Call) -> SpanState:
        """Merge the site's sequence."""
        call, whole = self.session.require_call(self), inputs[self.argument]
        task, visit = call.tasks[self.index], call.visits.get(self.index, 0)
        call.visits[self.index] = visit + 1
        prefix, suffix = call.layout.around(whole, self.site, task.tokens)
        tokens = image_tokens(whole, prefix, suffix)
        kept = self.planner.plan(call, task, inputs, tokens, prefix, suffix, visit)
        destinations = kept.plan.destinations
        call.span_plans[self.span.number] = kept
        call.span_lengths[self.span.number] = tokens.shape[1], destinations.shape[1]
        if self.site.keys_inside:  # merged later, at the call of attention
            return SpanState(whole, whole, destinations, kept.key_bias, prefix, suffix)
        with call.times.overhead("merge", tokens.device):
            sequence = with_image_tokens(whole, prefix, suffix, kept.plan.merge(tokens))
        return SpanState(sequence, whole, destinations, kept.key_bias, prefix, suffix)

    def merge_like(self, other: Tensor, span: SpanState) -> Tensor:
        """Merge another sequence with the span's plan."""
        call = self.session.require_call(self)
        plan = call.span_plans[self.span.number].plan
        with call.times.overhead("merge", other.device):
            merged = plan.merge(image_tokens(other, span.prefix, span.suffix))
            return with_image_tokens(other, span.prefix, span.suffix, merged)

    def unmerge(self, y: Tensor, span: SpanState) -> Tensor:
        """Unmerge one of the outputs."""
        call, around = self.session.require_call(self), (span.prefix, span.suffix)
        plan = call.span_plans[self.span.number].plan
        with call.times.overhead("unmerge", y.device):
            image = image_tokens(y, *around)
            if self.site.residual:  # unmerge only the change, so that every token keeps its own detail
                before, merged = image_tokens(span.original, *around), image_tokens(span.sequence, *around)
                x = plan.unmerge(image, before, merged)
            else:
                x = plan.unmerge(image)
            return with_image_tokens(y, *around, x)

    def before_block(
        self, whole: Site, parameters: list[str], block: nn.Module, args: tuple, kwargs: Call
    ) -> None:
        """Keep the image tokens that go into the block, for all sites in it to plan from."""
        call, sequence = self.session.call, (dict(zip(parameters, args)) | kwargs).get(whole.tokens or "")
        if sequence is None:
            raise ConfigError(
                f"method={self.config.method!r} matches the tokens that go into a block, which those "
                f'of {type(block).__name__} have in another order: use method="toma"'
            )
        if call is not None and call.layout.finest:  # otherwise nothing is merged in this call
            around = call.layout.around(sequence, whole, call.tasks[self.index].tokens)
            call.block_input = image_tokens(sequence, *around)


def _is_sequence(part: Any, tokens: int) -> bool:
    return isinstance(part, Tensor) and part.ndim == 3 and part.shape[1] == tokens


def parameter_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]
