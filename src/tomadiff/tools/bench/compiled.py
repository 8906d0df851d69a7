"""Contenders on compiled models: each has its own copy of the model, so that nothing is compiled twice.

Adding hooks to a model creates new functions, which invalidates what was compiled before. So contenders don't
take turns on one model here; each has modules of its own around the same weights.
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

MANY = 256  # limit on compiled versions of one function; there is one per contender
# names of torch's setting for that limit, newest first
LIMITS = ("recompile_limit", "cache_size_limit")


@contextmanager
def compiled_contenders(
    pipe: DiffusionPipeline,
    whole: bool,
    todo: Sequence[tuple[str, float]],
    prepare: Callable[[DiffusionPipeline, str], None],
    backend: str = "inductor",
) -> Iterator[list[tuple[Contender, DiffusionPipeline]]]:
    """All contenders, each active and compiled on its own pipeline, which is passed to `prepare` first.

    Sequence lengths are compiled as constants, as they are for users with one setting and one size.
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
    """A copy of the pipeline with its own modules around the same weights."""
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
