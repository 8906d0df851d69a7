"""Models of no declared family: merged where the caller says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import distance, mostly_alike, state
from diffusers import Transformer2DModel
from home_made import HomeMade
from seeded import noise, text
from tiny import build, wan
from torch import Tensor, nn

import tomadiff
from tomadiff import Sites
from tomadiff.errors import ConfigError, UnsupportedModelError

SAID = {
    "blocks": "layers",
    "tokens": "x",
    "output": 1,
    "rotary": "where",
    "text": "first",
    "time": "sigma",
    "grid": lambda picture: picture.shape[-2:],
}


@pytest.fixture
def model() -> HomeMade:
    torch.manual_seed(0)
    return HomeMade()


def call(model: nn.Module, seeds: tuple[int, ...] = (0,), size: tuple[int, int] = (8, 8)) -> Tensor:
    with torch.no_grad():
        return model(noise(seeds, 3, *size), text(seeds, 5, 16), torch.full((len(seeds),), 0.5))


def test_a_home_made_model_is_merged_where_one_says(model: HomeMade) -> None:
    dense, attributes = call(model), state(model)
    for more in ({"where": "block"}, {"where": "span"}, {"spans": True}):
        sites = Sites(**SAID | {name: more[name] for name in more if name == "spans"})
        settings = {name: more[name] for name in more if name == "where"}
        tomadiff.apply(model, sites=sites, ratio=0.5, dense_blocks=0, **settings)
        assert 1e-4 < distance(call(model), dense) < 1
        report = tomadiff.report(model)
        assert [(site.name, site.tokens, site.kept) for site in report.sites] == [
            (f"layers.{i}", 64, 32) for i in range(3)
        ]
        assert mostly_alike(torch.cat([call(model, (0,)), call(model, (1,))]), call(model, (0, 1)))
        assert call(model, size=(5, 7)).shape == (1, 3, 5, 7)
    tomadiff.remove(model)
    assert torch.equal(call(model), dense)
    assert state(model) == attributes


def test_spans_of_a_shared_sharp_plan_do_what_blocks_do(model: HomeMade) -> None:
    """Merging what was unmerged by the same plan gives back what was merged."""
    settings = {"ratio": 0.5, "share": "kind", "scale": 1e6, "unmerge": "transpose"}
    tomadiff.apply(model, sites=Sites(**SAID), where="block", **settings)
    blocks = call(model)
    with tomadiff.merged(model, sites=Sites(**SAID, spans=True), where="span", **settings):
        assert distance(call(model), blocks) < 1e-4
    assert torch.equal(call(model), blocks), "and what was there before comes back"


def test_a_copy_of_such_a_model_is_merged_too(model: HomeMade) -> None:
    tomadiff.apply(model, sites=Sites(**SAID), ratio=0.5)
    assert mostly_alike(call(copy.deepcopy(model), (0, 1)), call(model, (0, 1)))


def test_a_model_that_is_not_told_the_time(model: HomeMade) -> None:
    tomadiff.apply(model, sites=Sites(**SAID | {"time": None}), ratio=0.5)
    call(model), call(model)
    assert tomadiff.report(model).generations == 2, "every call is about something else"


def test_an_undeclared_model_of_diffusers() -> None:
    torch.manual_seed(0)
    settings = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "norm_num_groups": 4}
    model = Transformer2DModel(**settings, num_layers=2, cross_attention_dim=16).eval()
    with pytest.raises(UnsupportedModelError, match="can't be merged"):
        tomadiff.apply(model)

    def run() -> Tensor:
        with torch.no_grad():
            return model(noise((0,), 16, 8, 8), text((0,), 7, 16), return_dict=False)[0]

    dense = run()
    sites = Sites("transformer_blocks", grid=lambda hidden_states: hidden_states.shape[-2:], spans=True)
    tomadiff.apply(model, sites=sites, ratio=0.5)
    assert 1e-4 < distance(run(), dense) < 1
    assert {(site.tokens, site.kept) for site in tomadiff.report(model).sites} == {(64, 32)}
    tomadiff.remove(model)
    assert torch.equal(run(), dense)


def test_a_declared_model_does_the_same_where_the_same_is_said() -> None:
    """With a method that plans by what goes into a block, whatever its norms are."""
    model = build(wan)
    arguments = wan.call(model, (2, 8, 8), (0, 1), 0.5) | {"return_dict": False}
    settings = {"method": "tome", "where": "block", "ratio": 0.5}
    with torch.no_grad():
        declared = tomadiff.apply(model, **settings)(**arguments)[0]
        sites = Sites("blocks", grid=(2, 8, 8), rotary="rotary_emb", spans=True)
        assert torch.equal(tomadiff.apply(model, sites=sites, **settings)(**arguments)[0], declared)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            {"blocks": "layer"},
            "no list of blocks 'layer'; its lists of modules that are alike are 'layers' (3 Layer)",
        ),
        ({"blocks": "heads"}, "no list of blocks 'heads'"),
        ({"tokens": "hidden_states"}, "no argument 'hidden_states'; it takes x, where, shift"),
        ({"rotary": "rope"}, "no argument 'rope'; it takes x, where, shift"),
        ({"time": "timestep"}, "HomeMade has no argument 'timestep'; it takes picture, words, sigma"),
        ({"grid": lambda image: image}, "HomeMade has no argument 'image'"),
        ({"grid": 64}, "rows and columns"),
        ({"text": "middle"}, '"first", "last" or None'),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_names_that_do_not_fit_are_refused_with_what_is_there(
    model: HomeMade, said: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        tomadiff.apply(model, sites=Sites(**SAID | said))
    assert says in str(error.value)
    assert not hasattr(model, "_tomadiff")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"grid": (7, 7), "text": None}, "got 69 tokens, and the image has 7 x 7"),
        ({"text": None}, "got 69 tokens, and the image has 8 x 8"),
        ({"output": 0}, "returned [1, 1, 1], [1, 37, 16], and 37 tokens were expected at place 0"),
        ({"output": 2}, "returned [1, 1, 1], [1, 37, 16], and 37 tokens were expected at place 2"),
    ],
    ids=str,
)
def test_what_turns_out_to_be_otherwise_is_an_error(model: HomeMade, said: dict[str, Any], says: str) -> None:
    tomadiff.apply(model, sites=Sites(**SAID | said), ratio=0.5)
    with pytest.raises(UnsupportedModelError) as error:
        call(model)
    assert says in str(error.value)


def test_how_many_axes_a_grid_has_is_seen_when_the_model_is_called(model: HomeMade) -> None:
    tomadiff.apply(model, sites=Sites(**SAID), ratio=0.5, region_size=(4, 4, 4))
    with pytest.raises(ConfigError, match="grid of 2 axes, 8 x 8"):
        call(model)
