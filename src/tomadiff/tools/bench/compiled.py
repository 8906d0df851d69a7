"""Contenders on compiled models: each has a model of its own, so that nothing is compiled twice.

Putting hooks on a model makes new functions, and what was compiled with the last ones doesn't fit any more.
So nobody takes turns on one model here: there is one for each contender, around the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from tomadiff.runtime.registration import denoiser, denoisers

from .contenders import Contender, contender

MANY = 256  # programs for one function: one for each contender
# torch's limit of these, by the names that it has had
LIMITS = ("recompile_limit", "cache_size_limit")


@contextmanager
def compiled_contenders(
    pipe: DiffusionPipeline,
    whole: bool,
    todo: Sequence[tuple[str, float]],
    prepare: Callable[[DiffusionPipeline, str], None],
    backend: str = "inductor",
) -> Iterator[list[tuple[Contender, DiffusionPipeline]]]:
    """All contenders, each switched on and compiled on a pipeline of its own, which `prepare` sees before.

    Lengths are compiled as constants, as they are for whoever uses one setting and one size.
    """
    torch.compiler.reset()
    limit = next(name for name in LIMITS if hasattr(torch._dynamo.config, name))
    with ExitStack() as stack, torch._dynamo.config.patch({limit: MANY}):
        made = []
        for method, ratio in todo:
            own = twin(pipe)
            prepare(own, method)
            entry = contender(denoiser(own)[0], own if whole else None, method, ratio)
            stack.enter_context(entry.use())
            for model, _ in denoisers(own):
                model.compile(backend=backend, dynamic=False)
            made.append((replace(entry, use=nullcontext), own))
        yield made


def twin(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """The same pipeline with modules of its own around the same weights."""
    own = copy.copy(pipe)
    own.scheduler = copy.deepcopy(pipe.scheduler)
    models = [model for model, _ in denoisers(pipe)]
    for name, part in pipe.components.items():
        if any(getattr(part, "_orig_mod", part) is model for model in models):
            setattr(own, name, _with_the_same_weights(part))
    return own


def _with_the_same_weights(model: nn.Module) -> nn.Module:
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
