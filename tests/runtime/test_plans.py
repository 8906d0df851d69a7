"""The plans of a generation: what is kept with them, and for how long."""

from __future__ import annotations

from typing import Any

import torch
from pipelines import bare_call, denoiser, draw, make
from torch import nn

import tomadiff
from tomadiff.core import places_in_table


@torch.no_grad()
def test_where_rows_of_tables_are_is_kept_as_long_as_destinations_are() -> None:
    """Through new weights, but not through new destinations."""
    model = denoiser(make("flux"))
    tomadiff.apply(model, ratio=0.5, refresh_destinations=4, refresh_weights=2)
    call, tokens = bare_call(model), bare_call(model)["hidden_states"].shape[1]
    before: dict[Any, Any] = {}
    for step in range(5):
        noise = torch.randn(call["hidden_states"].shape, generator=torch.Generator().manual_seed(step))
        model(**call | {"hidden_states": noise, "timestep": torch.tensor([1 - step / 5])})
        plans = model._tomadiff.plans
        for key, kept in plans.items():
            assert kept.places, "for rotary tables"
            for table, rows in kept.places.items():
                assert torch.equal(rows, places_in_table(kept.plan.destinations, tokens, *table))
                if step:
                    same = torch.equal(kept.plan.destinations, before[key].plan.destinations)
                    assert (rows is before[key].places[table]) == same == (step != 4)
        before = dict(plans)
    assert tomadiff.report(model).refreshes == {"destinations": 4, "weights": 2}, "of two kinds of blocks"


@torch.no_grad()
def test_each_block_gets_the_rows_of_its_own_table_at_its_own_destinations() -> None:
    """Rows are gathered once for all blocks that have both in common, and for no others."""
    model = denoiser(make("flux"))
    tomadiff.apply(model, ratio=0.5, where="block", share="kind", dense_blocks=0)
    given: dict[nn.Module, Any] = {}
    got: dict[nn.Module, Any] = {}

    def give(block: nn.Module, args: Any, inputs: dict[str, Any]) -> Any:
        given[block] = inputs["image_rotary_emb"]
        if block is model.transformer_blocks[1]:
            given[block] = tuple(2 * table for table in given[block])
        return args, inputs | {"image_rotary_emb": given[block]}

    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    for block in blocks:
        block.register_forward_pre_hook(give, with_kwargs=True)
        block.attn.register_forward_pre_hook(
            lambda module, args, inputs, block=block: got.update({block: inputs["image_rotary_emb"]}),
            with_kwargs=True,
        )
    call = bare_call(model)
    model(**call)
    destinations = {key.block: kept.plan.destinations for key, kept in model._tomadiff.plans.items()}
    assert not torch.equal(*destinations.values()), "joint and single blocks have plans of their own"
    tokens, text = call["hidden_states"].shape[1], call["encoder_hidden_states"].shape[1]
    for block in blocks:
        (places,) = places_in_table(destinations[type(block).__name__], tokens, text + tokens, text)
        assert all(torch.equal(rows, table[places]) for rows, table in zip(got[block], given[block]))
    first, second = (got[block][0] for block in model.single_transformer_blocks)
    assert first is second


@torch.no_grad()
def test_a_block_that_runs_twice_in_a_call_has_two_plans() -> None:
    """Some models run a block on the halves of their batch, one after the other."""
    model = denoiser(make("flux"))
    model.transformer_blocks.append(model.transformer_blocks[1])
    tomadiff.apply(model, ratio=0.5, where="block", share="block", dense_blocks=0)
    model(**bare_call(model))
    report = tomadiff.report(model)
    assert len(report.sites) == 4 and report.refreshes["destinations"] == 5


def test_plans_of_two_samples_are_not_those_of_one() -> None:
    """Guidance may end before the generation does: then the prompt alone goes on."""
    pipe = tomadiff.apply(make("sd1"), ratio=0.5, refresh_destinations=9, refresh_weights=9)
    plans: list[int] = []

    def end_guidance(pipe: Any, step: int, time: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        plans.append(tomadiff.report(pipe).refreshes["destinations"])
        if step == 1:
            pipe._guidance_scale = 0.0
            inputs["prompt_embeds"] = inputs["prompt_embeds"].chunk(2)[-1]
        return inputs

    watched = ["latents", "prompt_embeds"]
    draw(pipe, steps=4, callback_on_step_end=end_guidance, callback_on_step_end_tensor_inputs=watched)
    assert tomadiff.report(pipe).generations == 1
    assert plans == [plans[0], plans[0], 2 * plans[0], 2 * plans[0]]
