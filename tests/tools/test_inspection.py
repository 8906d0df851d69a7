"""Unknown models are looked at in one call, and what is advised works."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import distance
from diffusers import Transformer2DModel
from home_made import HomeMade
from seeded import noise, text
from tiny import build, grid_of, tiny
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

import tomadiff
from tomadiff.tools.cli import main
from tomadiff.tools.inspect import Inspection, inspect_call


def follow_advice(inspection: Inspection) -> set[tuple[int, int]]:
    """Do what is said, and look whether that merges: tokens in and kept by each site."""
    model, call = inspection.model, inspection.call
    advice = inspection.advice(max(inspection.candidates, key=inspection.share))
    with torch.no_grad():
        dense = model(**call)
        exec("\n".join(advice), {"tomadiff": tomadiff, "model": model})
        merged = model(**call)
    dense, merged = (output[0] if isinstance(output, tuple) else output for output in (dense, merged))
    assert 1e-5 < distance(merged, dense) < 1
    return {(site.tokens, site.kept) for site in tomadiff.report(model).sites}


def test_a_home_made_model_is_understood() -> None:
    torch.manual_seed(0)
    model = HomeMade()
    call = {"picture": noise((0,), 3, 8, 6), "words": text((0,), 5, 16), "sigma": torch.tensor([0.5])}
    inspection = inspect_call(model, **call)
    (found,) = inspection.candidates
    assert (found.block, found.blocks, found.tokens, found.lists) == ("Layer", 3, 53, ["layers"])
    assert (found.argument, found.output, found.spans) == ("x", 1, True)
    assert 0 < inspection.share(found) < 1
    assert inspection.advice(found) == [
        "from tomadiff.models import PerTokenArg",
        "tomadiff.apply(model, ratio=0.5, sites=tomadiff.Sites(blocks='layers', tokens='x', output=1, "
        "rotary=None, grid=lambda picture: tuple(side // 1 for side in picture.shape[-2:]), "
        "follows=(PerTokenArg('where', axis=0, ndim=2),), text='first', spans=True, time='sigma'))",
        "# 5 of its 53 tokens look like text: 'last', if it comes behind",
    ]
    assert follow_advice(inspection) == {(48, 24)}


@pytest.mark.parametrize(
    "name", ["wan", "flux", "ltx", "cogvideox", "hunyuan_image", "lumina2", "sd3", "latte", "mochi"]
)
def test_models_of_diffusers_are_understood_as_if_nobody_had_declared_them(name: str) -> None:
    """By the same facts that the declarations state."""
    case = tiny(name)
    model = build(case)
    inspection = inspect_call(model, **case.call(model, grid_of(case), (0,), 0.5))
    assert f"tomadiff.apply knows it: {inspection.family.name}: " in str(inspection)
    spatial = [each for each in inspection.candidates if each.tokens >= 64]
    declared = {block.name: block.whole for block in inspection.family.blocks}
    for candidate in spatial:
        whole = declared[candidate.block]
        assert (candidate.argument, candidate.output) == (whole.tokens, (*whole.outputs, 0)[0])
        assert {rows.argument for rows in whole.rotary} <= set(candidate.tables)
        assert candidate.spans != inspection.family.skips
    assert {each.block for each in spatial} == set(declared) & {
        type(part).__name__ for part in model.modules()
    }


@pytest.mark.parametrize("name", ["wan", "ltx", "cogvideox", "skyreels", "sd3", "mochi"])
def test_what_is_advised_merges(name: str) -> None:
    case = tiny(name)
    model = build(case)
    call: dict[str, Any] = case.call(model, grid_of(case), (0,), 0.5) | {"return_dict": False}
    tokens = math.prod(grid_of(case))
    assert follow_advice(inspect_call(model, **call)) == {(tokens, tokens // 2)}


def test_a_model_without_blocks_has_nothing_to_merge() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert "nothing to merge" in str(inspect_call(model, torch.ones(1, 4)))


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_names_the_family_of_a_pipeline(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "emoji-flux"]) == 0
    said = capsys.readouterr().out
    assert "FluxTransformerBlock" in said and "FluxSingleTransformerBlock" in said
    assert "tomadiff.apply knows it: flux: " in said


def test_the_command_makes_a_model_by_the_name_of_its_class(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "DiTTransformer2DModel", "--depth", "1"]) == 0
    said = capsys.readouterr().out
    assert "1 of 28  256     BasicTransformerBlock  transformer_blocks" in said
    assert "tomadiff.apply knows it: dit: " in said


def test_the_command_writes_the_line_to_use_for_an_unknown_model(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    settings = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "norm_num_groups": 4}
    Transformer2DModel(**settings, num_layers=2, cross_attention_dim=16).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert (
        "tomadiff.apply(model, ratio=0.5, sites=tomadiff.Sites(blocks='transformer_blocks', "
        "tokens='hidden_states', output=0, rotary=None, grid=lambda hidden_states: tuple(side // 1 "
        "for side in hidden_states.shape[-2:]), spans=True))"
    ) in capsys.readouterr().out


def test_the_command_says_what_it_can_not_make_up(capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", "UVit2DModel"]) == 2
    assert "it needs input_ids, micro_conds, pooled_text_emb" in capsys.readouterr().err
    assert main(["inspect", "no/such-model"]) == 2
    assert "none of emoji-unet, emoji-flux, the model classes of diffusers (" in capsys.readouterr().err


def test_a_folder_with_a_model_of_others_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = CLIPTextConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    CLIPTextModel(config).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds ['CLIPTextModel'], which is no model of diffusers" in capsys.readouterr().err
