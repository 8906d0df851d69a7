"""Where nothing was asked, and steps are forecast: merge keys and values in long sequences, if that gains.

The first step of a generation is always dense. In the first generation of a size, one attention of each level
is then run alternately dense and on merged keys; from the second step on, and until half of the steps are
done, keys are merged if that saves enough. The model itself is not called more often than without this, and
the image doesn't depend on whether the answer was just measured or is known. Only attention over long
sequences gets hooks, and not before there is any.

This must never break a generation that works without it: if something is in the way, attention stays as it
is, and the report says why.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tomadiff.config import Config
from tomadiff.errors import ConfigError, UnsupportedModelError

from . import autotune
from .conflicts import Surroundings, check_attention, check_model
from .generation import Generation
from .hook import SiteHook
from .keys_trial import KeysTrial
from .layout import Layout
from .model_call import DENSE, Group, SiteTask
from .sites import BoundSite, find

if TYPE_CHECKING:
    from .session import Session


class Shown(NamedTuple):
    """For which sequences of a family merged keys were shown to keep images close, and how they attend."""

    tokens: int  # the least number of them
    processors: tuple[str, ...]  # diffusers' own attention; what others do with merged keys is not known


RATIO = 0.5  # of keys removed, with weights on the others
SHARE = 0.5  # of the steps; the later ones are dense, since what they get wrong stays in the picture
# By family, as measured in docs/long_sequences.md: at 4,096 tokens, merged keys beside forecasts are closer
# than forecasts with a longer interval for the same work. Other families are left alone until such a gain is
# measured.
SHOWN = {"unet": Shown(4096, ("AttnProcessor2_0",))}
WORTH = 0.05  # the least share of a dense call that has to be saved for the image to be changed

log = logging.getLogger("tomadiff")


def long_keys(session: Session) -> LongKeys | None:
    """What merges keys in a session; None if settings were given, or for families where it isn't done."""
    family = session.family
    if family is None or family.name not in SHOWN or session.config != Config().resolve(family):
        return None
    return LongKeys(session, SHOWN[family.name])


class LongKeys:
    """The sites in long sequences of one model, and what was found about them."""

    def __init__(self, session: Session, shown: Shown) -> None:
        self._session, self.shown = weakref.ref(session), shown  # weakly, since the session holds this
        self.config = Config(ratio=RATIO, where="kv", weigh_keys=True).resolve(session.family)
        self.hooks: list[SiteHook] = []
        self.answers: dict[str, autotune.Answer] = {}  # by name of their files
        self.obstacle: str | None = None  # why attention was left alone in the last long call
        self._failures: dict[str, str] = {}  # why there is no answer, by the same names
        self._bound: list[BoundSite] | None = None  # all sites of the model, also those without a hook
        self._surroundings = Surroundings(session.model, self.hooks)
        self._checked = 0  # version of the surroundings in which nothing was in the way
        self._trial: KeysTrial | None = None

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None
        return session

    def tasks(
        self, arguments: dict[str, Any], generation: Generation
    ) -> tuple[Layout, Sequence[SiteTask]] | None:
        """Layout and tasks of a call that merges keys; None if it is dense."""
        step, call, steps = self.session.clock.step, self.session.clock.call, generation.schedule.steps
        layout = generation.layouts.read(arguments, call)
        if not self.hooks and math.prod(layout.grid(1)) < self.shown.tokens:
            return None
        try:
            if step == 0:
                self.obstacle = None
                self._put_hooks(layout)
            sites = [hook for hook in self.hooks if self._is_long(layout, hook.bound)]
            if not sites:
                return None
            self._check(sites, arguments)
        except (ConfigError, UnsupportedModelError) as error:
            self.obstacle = str(error)
            return None
        if step == 0:
            self._decide(sites, arguments, layout, generation)
        merge = generation.merged_keys.get(layout)
        late = steps is not None and step >= SHARE * steps
        if step == 0 or late or not merge:
            return None
        key = ("keys", layout)
        if key not in generation.tasks:
            # no other sites merge in this generation, so that all its plans are of these
            generation.plans.schedule = self.config.refresh
            dense: list[SiteTask] = [DENSE] * len(self.session.sites)
            generation.tasks[key] = dense + [
                hook.task(layout, RATIO, cut=True) if autotune.group_of(hook) in merge else DENSE
                for hook in self.hooks
            ]
        return layout, generation.tasks[key]

    def conclude(self) -> None:
        """After a call: if something was measured in it, keep what was found."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        answer = trial.answer(WORTH)
        if answer is None:
            self.obstacle = self._failures[trial.record.file.name] = trial.failed
            return
        self.answers[trial.record.file.name] = answer = trial.record.keep(answer)
        trial.generation.merged_keys[trial.layout] = _merging(answer)
        log.info("tomadiff: %s", self._told(answer))

    def cancel(self) -> None:
        """After a call that was broken off."""
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def found(self) -> list[str]:
        """For the report: what was measured, and why attention was left alone at last."""
        left = [f"keys not merged: {self.obstacle}"] if self.obstacle else []
        return [self._told(answer) for answer in self.answers.values()] + left

    def _told(self, answer: autotune.Answer) -> str:
        dense, merged = (sum(getattr(part, side) for part in answer.parts) for side in ("dense", "merged"))
        found = (
            f"attention over so many takes {dense / answer.call:.0%} of a dense call, "
            f"{dense / merged:.2f}x as fast on merged keys"
        )
        if _merging(answer):
            does, saves = f"keys merged at {RATIO}", f"saves {answer.saving:.0%}"
        else:
            does, saves = "keys not merged", f"would save less than {WORTH:.0%}"
        return (
            f"{does} from {self.shown.tokens:,} tokens on, in the first {SHARE:.0%} of the steps: "
            f"{found}, which {saves} of it ({answer.rounds} rounds in {answer.took:.1f} s on "
            f"{answer.about['processor']}, {answer.about['dtype']})"
        )

    def _is_long(self, layout: Layout, bound: BoundSite) -> bool:
        return math.prod(layout.grid(bound.level)) >= self.shown.tokens

    def _put_hooks(self, layout: Layout) -> None:
        """Put hooks on the attention of long sequences that has none yet."""
        session = self.session
        if self.session.is_compiled:
            # hooks that came later would be missing in what is compiled, or have each block compiled anew
            self._take_hooks_off()
            raise ConfigError(
                f"the model is compiled; ratio={RATIO}, where='kv', weigh_keys=True merges keys there, too"
            )
        if self._bound is None and session.family is not None:
            self._bound = find(session.model, session.family, self.config)
        there = {hook.bound.name for hook in self.hooks}
        new = [each for each in self._bound or () if each.name not in there and self._is_long(layout, each)]
        if not new:
            return
        first = len(session.hooks)
        hooks = [SiteHook(self.config, bound, first + n) for n, bound in enumerate(new)]
        try:
            session.hooks = [*session.hooks, *hooks]  # first, so that `remove` finds them after an interrupt
            for hook in hooks:
                hook.register(session)
            self.hooks = session.hooks[len(session.sites) :]
        except BaseException:
            self._take_hooks_off()
            raise
        self._surroundings, self._checked = Surroundings(session.model, self.hooks), 0

    def _take_hooks_off(self) -> None:
        session = self.session
        for hook in session.hooks[len(session.sites) :]:
            hook.unregister()
        self.hooks, session.hooks = [], session.sites

    def _check(self, sites: list[SiteHook], arguments: dict[str, Any]) -> None:
        """Raise ConfigError if something is in the way, which users may change at any time."""
        for hook in {hook.site: hook for hook in sites}.values():
            hook.refuse_masks(arguments)  # models pass them on to their blocks under the same name
        self._surroundings.look(self.session.clock.step)
        if self._surroundings.version == self._checked:
            return
        check_model(self.session.model, self.hooks)
        for hook in sites:
            check_attention(hook)
            for attention in hook.attentions:
                processor = type(attention.processor)
                by_diffusers = processor.__module__.startswith("diffusers.")
                if not by_diffusers or processor.__name__ not in self.shown.processors:
                    raise ConfigError(f"{hook.bound.name} has a {processor.__name__}")
        self._checked = self._surroundings.version

    def _decide(
        self, sites: list[SiteHook], arguments: dict[str, Any], layout: Layout, generation: Generation
    ) -> None:
        """Look up whether keys are merged from the next step on; if it isn't known, measure in this call."""
        record = autotune.record_of(self.session, sites, self.config, arguments, layout)
        name = record.file.name
        if name in self._failures:
            self.obstacle = self._failures[name]
            return
        answer = self.answers.get(name) or record.read()
        if answer is None:
            self.cancel()
            self._trial = KeysTrial(sites, RATIO, arguments, layout, record, generation)
        else:
            self.answers[name] = answer
            generation.merged_keys[layout] = _merging(answer)


def _merging(answer: autotune.Answer) -> frozenset[Group]:
    return frozenset((part.kind, part.level) for part in answer.parts if part.merge)
