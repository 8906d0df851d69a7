"""Inputs of tiny models: what a sample gets depends on its own seed alone."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast


def features(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise(seeds: tuple[int, ...], *shape: int) -> Tensor:
    """[B, *shape]"""
    return torch.stack([features(seed, *shape) for seed in seeds])


def text(seeds: tuple[int, ...], *shape: int) -> Tensor:
    """Embeddings of made-up prompts, [B, *shape]"""
    return noise(tuple(1000 + seed for seed in seeds), *shape)


def times(seeds: tuple[int, ...], time: float) -> Tensor:
    """[B]"""
    return torch.full((len(seeds),), time)


def positions(*grid: int) -> Tensor:
    """Where each token of a grid is, [N, axes]"""
    axes = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], dim=-1)


def bare_pipeline(
    name: str, model: nn.Module, scheduler: Any = None, **parts: Any
) -> diffusers.DiffusionPipeline:
    """A pipeline of diffusers around a model, with nothing else in it but a scheduler and these parts."""
    pipeline = getattr(diffusers, name)
    parameters = inspect.signature(pipeline.__init__).parameters.values()
    empty = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.name != "self"]
    if scheduler is None:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    place = next((name for name in ("prior", "decoder") if name in empty), "transformer")
    return pipeline(**dict.fromkeys(empty) | {place: model, "scheduler": scheduler} | parts)


def prompts(seeds: tuple[int, ...]) -> list[str]:
    """Made-up prompts, for pipelines that don't take embeddings."""
    return [f"a picture of {seed}" for seed in seeds]


def tokenizer() -> PreTrainedTokenizerFast:
    """Tells prompts apart by their seeds, from 0 to 9."""
    words = ["<pad>", "<unknown>", *(str(seed) for seed in range(10))]
    vocabulary = {word: number for number, word in enumerate(words)}
    splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{{ messages[0].content[0].text }}"
    return PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", chat_template=template)
