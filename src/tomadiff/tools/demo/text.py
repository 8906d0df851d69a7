"""Text for the embedded models: a word-level vocabulary with a small trained embedding."""

from __future__ import annotations

import difflib
import re

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from .prompts import COLOURS, PLACEMENTS, THINGS

# so that "a hot dog on the left, on a blue background" is "hot dog left blue"
IGNORED = {"a", "an", "the", "on", "in", "at", "of", "to", "with", "side", "background", "emoji"}


class WordEncoder(ModelMixin, ConfigMixin):
    """Prompts -> a sequence for attention, and a pooled embedding to add to the time embedding.

    A word is as many vectors as the sequence is long, and a prompt the sum of its words, so that what
    belongs where in a picture can be learnt by looking it up. The order of words doesn't matter. An empty
    prompt stands for "no text" in guidance.
    """

    @register_to_config
    def __init__(self, words: list[str], max_words: int = 8, length: int = 64, dim: int = 96) -> None:
        super().__init__()
        self.index = {word: i for i, word in enumerate(words, start=1)}  # 0 is "no word", and stays zero
        self.sequences = nn.Embedding(len(words) + 1, length * dim, padding_idx=0)
        self.places = nn.Parameter(0.2 * torch.randn(length, dim))
        self.norm = nn.LayerNorm(dim)
        self.pooled = nn.Embedding(len(words) + 1, dim, padding_idx=0)

    def tokenize(self, prompts: list[str]) -> Tensor:
        """[B, max_words] word indices; a `ValueError` says which it doesn't know, and what it draws."""
        max_words = self.config.max_words
        ids = torch.zeros(len(prompts), max_words, dtype=torch.long)
        for row, prompt in zip(ids, prompts):
            words = [w for w in re.findall(r"[^\W_]+", prompt.lower()) if w not in IGNORED]
            if unknown := [w for w in words if w not in self.index]:
                raise ValueError(self._unknown(prompt, unknown))
            if len(words) > max_words:
                raise ValueError(
                    f"prompt {prompt!r} has {len(words)} words, the model reads at most {max_words}"
                )
            row[: len(words)] = torch.tensor([self.index[w] for w in words], dtype=torch.long)
        return ids.to(self.places.device)

    def _unknown(self, prompt: str, unknown: list[str]) -> str:
        hints = []
        names = (*THINGS, *COLOURS, *filter(None, PLACEMENTS))
        for word in unknown:
            near = difflib.get_close_matches(word, self.index, n=3, cutoff=0.5)
            close = dict.fromkeys(name for known in near for name in names if known in name.split())
            hints.append(f"{word!r}" + (f" (near: {', '.join(close)})" if close else ""))
        return (
            f"prompt {prompt!r} has words that the embedded model doesn't know: {'; '.join(hints)}. "
            f"It draws one thing, perhaps on the left or right, on {', '.join(COLOURS)}: {', '.join(THINGS)}"
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[B, max_words] -> sequence [B, length, dim], pooled [B, dim]."""
        sequence = self.sequences(ids).sum(1).unflatten(1, self.places.shape)
        return self.norm(sequence + self.places), self.pooled(ids).sum(1)
