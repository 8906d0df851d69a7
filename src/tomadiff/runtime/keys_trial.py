"""Time attention alone, dense and on merged keys, inside a dense call of the model."""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from . import autotune
from .generation import Generation
from .hook import SiteHook
from .layout import Layout
from .machine import wait_for
from .model_call import DENSE, Group, ModelCall, SiteTask
from .plan_cache import PlanCache
from .timing import Times

ROUNDS = 5  # each of one dense and one merged run


class KeysTrial:
    """Times one site of each group, dense and merged, when a dense call of the model comes to it.

    There, its weights are where they have to be, also with offloading.
    """

    def __init__(
        self,
        sites: list[SiteHook],
        ratio: float,
        arguments: dict[str, Any],
        layout: Layout,
        record: autotune.Record,
        generation: Generation,
    ) -> None:
        self.ratio, self.layout, self.record, self.generation = ratio, layout, record, generation
        self.failed = "its attention was not called"
        self._session, self._counts = sites[0].session, Counter(map(autotune.group_of, sites))
        self._plans, self._times = PlanCache(autotune.NEVER), Times()
        self._parts: list[autotune.Part] = []
        self._spent = 0.0  # seconds that don't belong to the call
        self._device = autotune.input_of(self._session, arguments)[2]
        firsts = {autotune.group_of(hook): hook for hook in reversed(sites)}
        self._handles = {
            group: hook.bound.module.register_forward_pre_hook(
                functools.partial(self._measure, hook), with_kwargs=True
            )
            for group, hook in firsts.items()
        }
        wait_for(self._device)
        self._begin = time.perf_counter()

    def answer(self, worth: float) -> autotune.Answer | None:
        """What was found, once the call is over; None if not all groups could be measured.

        Nothing is to be merged if all groups together save less than this share of a dense call.
        """
        self.end()
        wait_for(self._device)
        call = time.perf_counter() - self._begin - self._spent
        if len(self._parts) < len(self._counts):
            return None
        answer = autotune.Answer(self.record.about, self._parts, call, ROUNDS, self._spent)
        if answer.saving >= worth:
            return answer
        return replace(answer, parts=[replace(part, merge=False) for part in answer.parts])

    def end(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def _measure(self, hook: SiteHook, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        group, session = autotune.group_of(hook), self._session
        self._handles.pop(group).remove()
        wait_for(self._device)
        begin, real = time.perf_counter(), session.call
        try:
            self._parts.append(self._compared(hook, group, module, args, kwargs))
        except Exception as error:  # whatever it is: without us, the generation would go on
            self.failed = f"{hook.bound.name} fails with them, {type(error).__name__}: {error}"
        finally:
            session.call = real
        self._spent += time.perf_counter() - begin

    def _compared(
        self, hook: SiteHook, group: Group, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> autotune.Part:
        count = self._counts[group]
        dense, merged = DENSE, hook.task(self.layout, self.ratio, cut=True)

        def seconds(task: SiteTask) -> float:
            self._session.call = ModelCall(
                0, 0, False, self.layout, [task] * (hook.index + 1), self._plans, self._times
            )
            arguments = tree_map(lambda leaf: leaf, kwargs)  # attention may take dicts in it apart
            wait_for(self._device)
            start = time.perf_counter()
            module.forward(*args, **arguments)
            wait_for(self._device)
            return count * (time.perf_counter() - start)

        seconds(dense), seconds(merged)  # warm-up
        self._plans.clear()
        self._times.synchronise, before = True, self._times.seconds["plan"]
        seconds(merged)
        self._times.synchronise = False
        # a plan is kept for a number of steps, most of which don't run
        steps = max(hook.config.steps_per_plan() / self.generation.schedule.interval, 1)
        planning = count * (self._times.seconds["plan"] - before) / steps
        rounds = [({group: seconds(dense)}, {group: seconds(merged) + planning}) for _ in range(ROUNDS)]
        return autotune.compared(group, count, rounds)
