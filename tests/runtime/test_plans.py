"""The plans of a generation: what is kept with them, and for how long."""

from __future__ import annotations

import torch
from pipelines import bare_call, denoiser, make

import tomadiff
from tomadiff.core import places_in_table


@torch.no_grad()
def test_where_rows_of_tables_are_is_kept_as_long_as_destinations_are() -> None:
    """Through new weights, but not through new destinations."""
    model = denoiser(make("flux"))
    tomadiff.apply(model, ratio=0.5, refresh_destinations=4, refresh_weights=2)
    call, tokens = bare_call(model), bare_call(model)["hidden_states"].shape[1]
    before: dict = {}
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
        assert not step or all((kept is before[key]) == (step in (1, 3)) for key, kept in plans.items())
        before = dict(plans)
