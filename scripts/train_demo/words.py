"""Where the training of word vectors starts: from a summary of what the words look like.

Big models have a text encoder that was trained before, and knows what things look like. Here, a thing's
vectors start as principal components of the cells of its picture, so that the model only has to learn to
draw from such a summary, which it does from all things at once, rather than learn each thing by heart.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from train_demo.data import Composer

from tomadiff.tools.demo.pipelines import POSITION_CHANNELS, positions
from tomadiff.tools.demo.prompts import THINGS
from tomadiff.tools.demo.text import WordEncoder


def summaries(composer: Composer, cells: int, components: int) -> Tensor:
    """[96, cells x cells, components]: each thing in the middle of the picture, cell by cell."""
    empty = torch.tensor([0.0, 0, 0, 1]).view(1, 4, 1, 1)
    layers = composer.layers[0] - empty
    side = layers.shape[-1] // cells
    patches = F.unfold(layers, side, stride=side).mT  # [96, cells x cells, 4 x side x side]
    flat = patches.flatten(0, 1).double()
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
    strongest = slice(-components, None)
    deviation = values[strongest].clamp(min=1e-12).sqrt()
    # As in the codec: the strong ones stay stronger, but not by as much as they are.
    scaled = flat @ vectors[:, strongest] / (deviation * deviation.max()).sqrt()
    return scaled.float().unflatten(0, patches.shape[:2])


@torch.no_grad()
def start_from_summaries(encoder: WordEncoder, composer: Composer) -> None:
    """Set a `WordEncoder`'s vectors: first what says where a cell is, then what is in it."""
    length, dim = encoder.places.shape
    cells, content = math.isqrt(length), slice(POSITION_CHANNELS, dim)
    encoder.places.zero_()
    encoder.places[:, :POSITION_CHANNELS] = positions(torch.zeros(1, 1, cells, cells))[0].flatten(1).mT
    things = summaries(composer, cells, dim - POSITION_CHANNELS)
    # A prompt is the sum of its words, so that words of several things ("hot") need a least-squares solution.
    ids = encoder.tokenize(list(THINGS))
    words_of_things = F.one_hot(ids, encoder.sequences.num_embeddings).sum(1)[:, 1:].float()
    solved = torch.linalg.pinv(words_of_things) @ things.flatten(1)
    table = encoder.sequences.weight.unflatten(1, (length, dim))
    table.zero_()
    table[1:, :, content] = solved.unflatten(1, (length, -1))
    encoder.pooled.weight.mul_(0.1)  # to begin with, what is drawn is in the sequence
