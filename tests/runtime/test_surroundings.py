"""When it is seen that others attached something to a model in the middle of a generation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from pipelines import bare_call, denoiser, make
from torch import nn

import tomadiff
from tomadiff.errors import ConfigError
from tomadiff.runtime.conflicts import Surroundings


class AttendExciteAttnProcessor(FluxAttnProcessor):
    """By its name, it records attention maps."""


@pytest.fixture
def model() -> nn.Module:
    """Five blocks in a row, of which the first is dense, and two lie within the span of the others."""
    tiny = denoiser(make("flux"))
    model = type(tiny).from_config({**tiny.config, "num_single_layers": 5}).eval()
    return tomadiff.apply(model, ratio=0.5)


def generation(model: nn.Module, steps: int) -> Iterator[int]:
    """Calls the model after each `yield`, if the loop's body doesn't end before."""
    call = bare_call(model)
    for step in range(steps):
        yield step
        with torch.no_grad():
            model(**call | {"timestep": torch.tensor([1 - step / steps])})


def surroundings(model: nn.Module) -> Surroundings:
    return model._tomadiff.surroundings


def test_what_is_attached_to_all_blocks_is_seen_in_the_next_call(model: nn.Module) -> None:
    blocks, seen = [*model.transformer_blocks, *model.single_transformer_blocks], []
    for step in generation(model, 6):
        seen.append(surroundings(model).between_blocks)  # as of the last step
        if step == 4:
            for block in blocks:
                block.register_forward_hook(lambda *_: None)
    assert [*seen, surroundings(model).between_blocks] == [False] * 5 + [True] * 2


def test_processors_that_need_all_tokens_are_refused_in_the_middle_of_a_generation(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="attention maps"):
        for step in generation(model, 6):
            if step == 4:
                model.set_attn_processor(AttendExciteAttnProcessor())
    assert step == 4


def test_what_comes_and_goes_on_a_single_block_is_seen_in_every_call(model: nn.Module) -> None:
    """As guiders do it, which skip a block in one of the calls of a step."""
    block, seen, hooks = model.single_transformer_blocks[2], [], []
    for step in generation(model, 9):
        seen.append(surroundings(model).between_blocks)
        if step % 2:
            hooks.pop().remove()
        else:
            hooks.append(block.register_forward_hook(lambda *_: None))
    assert seen == [False, *[True, False] * 4]


def test_what_is_left_on_a_single_block_is_seen_in_the_next_generation(
    model: nn.Module,
) -> None:
    for step in generation(model, 6):
        if step == 4:
            model.single_transformer_blocks[2].register_forward_hook(lambda *_: None)
    for step in generation(model, 2):
        assert step == 0 or surroundings(model).between_blocks


def test_most_steps_compare_little(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be most of what tomadiff does in a call with many blocks."""
    from tomadiff.runtime import conflicts

    compared, changed = [], conflicts._Places.changed
    monkeypatch.setattr(
        conflicts._Places, "changed", lambda places: compared.append(len(places._dicts)) or changed(places)
    )
    for _ in range(2):
        for step in generation(model, 5):
            if step == 4:
                model.set_attn_processor(FluxAttnProcessor())
    everything, ends = compared[:2]  # in the first call there is nothing to compare with
    assert ends < everything
    assert compared == [everything] + [ends] * 3 + [everything] * 2 + [ends] * 3
