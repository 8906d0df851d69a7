"""What the library promises, for every family: on the tiny models in tests/tiny, by their real forward."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from comparison import CHANGED, distance, mostly_alike, state
from pipelines import MAKERS, denoiser, make
from tiny import NAMES, NEWEST, build, called, draw, grid_of, run, tiny
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

import tomadiff
from tomadiff.config import CHOICES
from tomadiff.errors import ConfigError, UnsupportedModelError
from tomadiff.models import FAMILIES, Family, family_of
from tomadiff.models.unsupported import REFUSED, why
from tomadiff.tools.cli import main

WHERE = CHOICES["where"]
METHOD_SITES = {"tome": "self", "tofu": "self", "todo": "kv"}
SEEDS = (0, 1, 2)
# which need more than a call
IN_TEST_VIDEO = {
    "WanVACETransformer3DModel",
    "WanAnimateTransformer3DModel",
    "ChronoEditTransformer3DModel",
}
DOCS = Path(__file__).parents[2] / "docs" / "families.md"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a case are for every tiny model, with what its family offers of `where` and `method`."""
    if "case" not in metafunc.fixturenames:
        return
    for argument, offered in (("where", wheres), ("method", methods)):
        if argument in metafunc.fixturenames:
            pairs = [(name, value) for name in NAMES for value in offered(name)]
            metafunc.parametrize(("case", argument), pairs, indirect=["case"])
            return
    piped = "pipeline" in metafunc.fixturenames
    names = [name for name in NAMES if not piped or hasattr(declared(name)[0], "pipeline")]
    metafunc.parametrize("case", names, indirect=True)


def declared(name: str) -> tuple[ModuleType | None, Family | None]:
    """A tiny model's file and family; nothing where this diffusers is too old for it, and its tests skip."""
    try:
        module = importlib.import_module(f"tiny.{name}")
    except ImportError:
        return None, None
    return module, next(family for family in FAMILIES if module.MODEL in family.models)


def wheres(name: str) -> list[str]:
    _, family = declared(name)
    return [where for where in WHERE if family is None or where in family.offers]


def methods(name: str) -> list[str]:
    """The compared ones, whose sites the family has."""
    _, family = declared(name)
    if family is None:
        return list(METHOD_SITES)
    kinds = {site.kind for block in family.blocks for site in (*block.modules, *block.keys)}
    return [method for method, kind in METHOD_SITES.items() if kind in kinds]


@pytest.fixture
def case(request: pytest.FixtureRequest) -> ModuleType:
    return tiny(request.param)


shared = functools.cache(build)


@functools.cache
def dense_run(case: ModuleType, seeds: tuple[int, ...] = (0,), grid: tuple[int, ...] | None = None) -> Tensor:
    """What the shared model predicts as long as nothing is applied to it."""
    return run(shared(case), case, seeds, grid)


@pytest.fixture
def model(case: ModuleType) -> Any:
    """Shared by the tests of a case, which is safe as long as removal leaves nothing behind."""
    yield shared(case)
    tomadiff.remove(shared(case))


@pytest.fixture
def family(case: ModuleType) -> Family:
    return family_of(shared(case))


@pytest.fixture
def pipeline(case: ModuleType, model: nn.Module) -> diffusers.DiffusionPipeline:
    """Where one runs without downloads, and is not tested elsewhere."""
    return case.pipeline(model)


# -- the tests themselves ----------------------------------------------------------------------------------


def test_every_model_of_every_family_has_a_tiny_one() -> None:
    if diffusers.__version__ != NEWEST:
        pytest.skip("older releases don't have them all")
    tested = {tiny(name).MODEL for name in NAMES} | IN_TEST_VIDEO
    assert {model for family in FAMILIES for model in family.models} == tested


def test_every_model_of_diffusers_is_in_a_family_or_refused_with_a_reason() -> None:
    """So that a new release shows what is missing."""
    modules = (diffusers.models.transformers, diffusers.models.unets)
    models = {
        name: thing
        for module in modules
        for name, thing in vars(module).items()
        if isinstance(thing, type) and issubclass(thing, nn.Module)
    }
    assert len(models) > 20
    declared = {model for family in FAMILIES for model in family.models}
    missing = [
        name
        for name, model in models.items()
        if not (declared & {cls.__name__ for cls in model.__mro__}) and not why(name)
    ]
    assert not missing
    both = [name for name in REFUSED if name in declared]
    assert not both
    if diffusers.__version__ == NEWEST:
        assert not [name for name in REFUSED if not hasattr(diffusers, name) and name not in models]


def test_what_is_refused_says_why() -> None:
    model = diffusers.PriorTransformer(
        num_attention_heads=1, attention_head_dim=4, num_layers=1, embedding_dim=4, num_embeddings=2
    )
    with pytest.raises(UnsupportedModelError, match="embedding of a few tokens"):
        tomadiff.apply(model)


def test_the_table_tells_the_truth_and_the_docs_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    pipelines = {family.name: set(family.pipelines) for family in FAMILIES}
    tested: dict[str, set[str]] = {family.name: set() for family in FAMILIES}
    for name in NAMES:
        case = tiny(name)
        model = build(case)
        family = family_of(model)
        assert f"{len(grid_of(case))}-D" in family.dimensions
        if hasattr(case, "pipeline"):
            tested[family.name].add(type(case.pipeline(model)).__name__)
    for name in MAKERS:
        pipe = make(name)
        tested[family_of(denoiser(pipe)).name].add(type(pipe).__name__)
    assert tested == pipelines
    for what in ([], ["--refused"]):
        assert main(["families", "--markdown", *what]) == 0
        assert capsys.readouterr().out.strip() in DOCS.read_text()


# -- on and off --------------------------------------------------------------------------------------------


def test_merging_changes_the_output_and_removal_is_bit_exact(
    model: nn.Module, case: ModuleType, where: str
) -> None:
    before, attributes = dense_run(case), state(model)
    tomadiff.apply(model, ratio=0.5, where=where)
    assert distance(run(model, case), before) > CHANGED
    tomadiff.remove(model)
    assert torch.equal(run(model, case), before)
    assert state(model) == attributes, "nothing is left on any module"


def test_ratio_zero_equals_the_unpatched_model(model: nn.Module, case: ModuleType, where: str) -> None:
    before = dense_run(case)
    tomadiff.apply(model, ratio=0, where=where)
    assert torch.equal(run(model, case), before)


def test_few_merged_tokens_change_little(model: nn.Module, case: ModuleType, where: str) -> None:
    """With almost every token its own destination, what is left is the way there and back."""
    before = dense_run(case)
    tomadiff.apply(model, ratio=1 / 64, where=where)
    near = distance(run(model, case), before)
    tomadiff.apply(model, ratio=0.75, where=where)
    assert near < distance(run(model, case), before) / 2


def test_what_a_family_does_not_offer_is_refused(model: nn.Module, family: Family) -> None:
    for where in set(WHERE) - family.offers:
        with pytest.raises(ConfigError, match="offers"):
            tomadiff.apply(model, where=where)
    tomadiff.apply(model)  # and one line is enough where nothing is asked for
    assert tomadiff.report(model).settings["where"] in family.offers


# -- samples and steps -------------------------------------------------------------------------------------


def test_a_sample_does_not_depend_on_its_batch(model: nn.Module, case: ModuleType, where: str) -> None:
    tomadiff.apply(model, ratio=0.5, where=where)
    together = run(model, case, SEEDS)
    assert mostly_alike(torch.cat([run(model, case, (seed,)) for seed in SEEDS]), together)
    assert distance(together[0], together[1]) > 1e-3


def test_outputs_are_forecast_in_the_form_that_was_asked_for(
    model: nn.Module, case: ModuleType, family: Family
) -> None:
    """Whatever a model returns: tensors, lists of them, several. A skipped step runs nothing."""
    times = (0.9, 0.8, 0.7, 0.6)
    first, second = (called(model, case, time) for time in times[:2])
    tomadiff.apply(model, interval=[0, 1, 3])
    calls: list[nn.Module] = []
    model.register_forward_hook(lambda module, args, output: calls.append(module))
    drawn = [called(model, case, time) for time in times]
    if family.time is None:  # nobody knows which calls belong to one generation
        assert len(calls) == 4
        return
    assert len(calls) == 3 and tomadiff.report(model).model_calls == {"run": 3, "forecast": 1}
    leaves, form = tree_flatten(drawn[2])
    assert form == tree_flatten(first)[1]
    for leaf, a, b in zip(leaves, tree_leaves(first), tree_leaves(second)):
        if isinstance(leaf, Tensor):
            torch.testing.assert_close(leaf, 2 * b - a, atol=1e-4, rtol=1e-4)  # the line goes on


# -- tokens ------------------------------------------------------------------------------------------------


def lengths(model: nn.Module, case: ModuleType) -> dict[str, int]:
    """Tokens that come out of each linear layer, seen by plain torch hooks."""
    seen: dict[str, int] = {}

    def watch(name: str, layer: nn.Module) -> Any:
        def look(layer: nn.Module, args: tuple, output: Tensor) -> None:
            if output.ndim >= 3:
                seen[name] = output.shape[-2]

        return layer.register_forward_hook(look)

    handles = [watch(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    run(model, case)
    for handle in handles:
        handle.remove()
    return seen


def test_layers_really_get_the_reduced_number_of_tokens(
    model: nn.Module, case: ModuleType, family: Family, where: str
) -> None:
    dense = lengths(model, case)
    tomadiff.apply(model, ratio=0.5, where=where, dense_blocks=0)
    merged = lengths(model, case)
    assert dense.keys() == merged.keys()
    images = [math.prod(grid_of(case)) // level**2 for level in getattr(case, "LEVELS", (1,))]
    inside = places(model, family, where)
    assert inside or any(site.keys_inside for block in family.blocks for site in block.keys)
    for name, tokens in dense.items():
        image = max((image for image in images if image <= tokens), default=0)  # text is shorter
        if any(name == place or name.startswith(f"{place}.") for place in inside):
            assert merged[name] == tokens - image // 2, name
        else:
            assert merged[name] == tokens, name
    for place in inside:  # layers of a part may be all the text's, but not of all parts
        shorter = [name for name in merged if name.startswith(place) and merged[name] < dense[name]]
        assert shorter, place


def places(model: nn.Module, family: Family, where: str) -> list[str]:
    """Where the layers are that must get fewer tokens, by the declaration."""
    blocks = {block.name: block for block in family.blocks}
    found = []
    for name, module in model.named_modules():
        block = blocks.get(type(module).__name__)
        if block is None or set(family.dense) & set(name.split(".")):
            continue
        if where in ("block", "span") or (where == "module" and block.joined):
            found += [name] if block.whole else []
            continue
        for site in block.keys if where == "kv" else block.modules:
            if getattr(module, site.path, None) is not None and not site.keys_inside:
                keys = site.keys_projections or ("to_k", "to_v") if where == "kv" else ()
                found += [f"{name}.{site.path}.{key}" for key in keys] or [f"{name}.{site.path}"]
    return found


@pytest.mark.parametrize("settings", [{}, {"shift": True}, {"assign": "global"}], ids=str)
def test_grids_that_regions_do_not_divide(
    model: nn.Module, case: ModuleType, family: Family, settings: dict[str, Any]
) -> None:
    grid = getattr(case, "ODD", (9, 11))
    dense = dense_run(case, SEEDS[:2], grid)
    for where in family.offers:
        tomadiff.apply(model, ratio=0.4, where=where, region_size=4, **settings)
        merged = run(model, case, SEEDS[:2], grid)
        assert merged.shape == dense.shape and merged.isfinite().all()
        assert CHANGED < distance(merged, dense) < 1
        finest = max(tomadiff.report(model).sites, key=lambda site: site.tokens)
        assert finest.tokens == math.prod(-(-side // finest.level) for side in grid)
        assert 0.55 * finest.tokens < finest.kept < 0.75 * finest.tokens


def test_keys_can_be_weighed_where_attention_takes_a_mask(
    model: nn.Module, case: ModuleType, family: Family
) -> None:
    dense = dense_run(case, SEEDS[:2])
    for where in family.offers:
        tomadiff.apply(model, ratio=0.5, where=where)
        plain = run(model, case, SEEDS[:2])
        try:
            tomadiff.apply(model, ratio=0.5, where=where, weigh_keys=True)
        except ConfigError:
            continue  # which says that no attention takes one
        weighed = run(model, case, SEEDS[:2])
        assert weighed.isfinite().all() and distance(weighed, dense) < 1
        assert distance(weighed, plain) > 1e-7


def test_the_compared_methods_work_on_every_family(model: nn.Module, case: ModuleType, method: str) -> None:
    dense = dense_run(case, SEEDS[:2])
    tomadiff.apply(model, ratio=0.75, method=method)
    if method in getattr(case, "REFUSES", ()):
        with pytest.raises(ConfigError, match="toma"):
            run(model, case)
        return
    merged = run(model, case, SEEDS[:2])
    assert CHANGED < distance(merged, dense) < 1
    assert {site.kept / site.tokens for site in tomadiff.report(model).sites} == {0.25}


# -- through the real pipeline, where one runs without downloads -------------------------------------------


def test_the_real_pipeline_draws_and_removal_is_bit_exact(
    pipeline: diffusers.DiffusionPipeline, case: ModuleType
) -> None:
    dense = draw(pipeline, case)
    tomadiff.apply(pipeline, ratio=0.5)
    merged = draw(pipeline, case)
    assert distance(merged, dense) > CHANGED or getattr(case, "DISCRETE", False)
    report = tomadiff.report(pipeline)
    assert report.generations == 1 and all(site.kept < site.tokens for site in report.sites)
    tomadiff.remove(pipeline)
    assert torch.equal(draw(pipeline, case), dense)
