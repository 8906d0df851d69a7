"""What is particular to video: boxes over time, frames that are given, models that take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import CHANGED, distance, mostly_alike
from diffusers import (
    ChronoEditTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    WanAnimateTransformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from PIL import Image
from seeded import noise, text
from tiny import build, draw, tiny, wan
from torch import Tensor, nn

import tomadiff
from tomadiff.errors import ConfigError
from tomadiff.settings_file import load as load_settings
from tomadiff.settings_file import save as save_settings
from tomadiff.tools.drawing import draw_merge_map
from tomadiff.tools.generate import Request
from tomadiff.tools.generate import draw as draw_picture
from tomadiff.tools.merge_map import Recorder


@pytest.fixture
def model() -> nn.Module:
    return build(wan)


def call(model: nn.Module, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(**wan.call(model, (2, 8, 8), (0, 1), 0.5) | more, return_dict=False)[0]


# -- regions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["block", "span", "module", "kv"])
def test_boxes_merge_what_stands_still_at_no_loss_and_tiles_do_not(model: nn.Module, where: str) -> None:
    """But for the positions in time, which twins don't share: so these are all made the same."""
    model.rope.freqs_cos[:, : model.rope.t_dim], model.rope.freqs_sin[:, : model.rope.t_dim] = 1, 0
    still = noise((0, 1), 4, 1, 16, 16).repeat(1, 1, 4, 1, 1)
    dense = call(model, hidden_states=still)
    for unmerge, lost in (("transpose", 1e-4), ("regression", 1e-3)):  # which shrinks changes a little
        tomadiff.apply(model, ratio=0.75, where=where, region_size=(4, 4, 4), unmerge=unmerge)
        assert distance(call(model, hidden_states=still), dense) < lost
    tomadiff.apply(model, ratio=0.75, where=where)
    assert distance(call(model, hidden_states=still), dense) > 1e-2


def test_a_size_for_each_axis_must_fit_the_grid(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="grids of 3 axes: give one size for each, or a single number"):
        tomadiff.apply(model, region_size=(8, 8))
    tomadiff.apply(model, regions="stripe", region_size=(2, 4, 4))
    call(model)
    assert {site.kept for site in tomadiff.report(model).sites} == {64}


def test_models_of_pictures_and_videos_tell_the_axes_when_called() -> None:
    both = tiny("kandinsky5")
    model = tomadiff.apply(build(both), region_size=(4, 4, 4))
    with torch.no_grad(), pytest.raises(ConfigError, match="grid of 2 axes, 8 x 8"):
        model(**both.call(model, (8, 8), (0,), 0.5))
    with pytest.raises(ConfigError, match="grids of 2 or 3 axes"):
        tomadiff.apply(model, region_size=(2, 2, 2, 2))


def test_the_map_of_a_video_is_drawn_frame_by_frame() -> None:
    pipe = wan.pipeline(build(wan))
    tomadiff.apply(pipe, ratio=0.5, region_size=(2, 4, 4))
    recorder = Recorder(pipe)
    pipe(**wan.request((0,)), num_inference_steps=1, output_type="latent", callback_on_step_end=recorder)
    mapped = recorder.maps[0]
    assert mapped.grid == (2, 8, 8) and len(mapped.destinations) == 64
    picture = Image.new("RGB", (64, 64))
    with pytest.raises(ValueError, match="one frame of a video"):
        draw_merge_map(picture, mapped)
    first, second = mapped.frame(0), mapped.frame(1)
    destinations = torch.cat([first.destinations, 64 + second.destinations])
    assert sorted(destinations.tolist()) == sorted(mapped.destinations.tolist())
    for number, frame in enumerate((first, second)):
        owners = torch.where(frame.owners >= 0, frame.owners + 64 * number, -1 - frame.owners)
        assert torch.equal(owners, mapped.owners[64 * number : 64 * (number + 1)])
        assert (frame.owners < 0).any(), "some went to the other frame"
        assert draw_merge_map(picture, frame, 256).size == (256, 256)
    with pytest.raises(ValueError, match="no frame 2"):
        mapped.frame(2)
    with pytest.raises(ValueError, match="no frame 0 on a grid of 8 x 8"):
        first.frame(0)


def test_the_commands_that_draw_pictures_refuse_videos() -> None:
    with pytest.raises(ValueError, match="WanPipeline makes videos"):
        draw_picture(wan.pipeline(build(wan)), Request("a fox"))


def test_sizes_for_each_axis_survive_a_settings_file(tmp_path: Path) -> None:
    config = tomadiff.Config(ratio=0.5, region_size=(2, 8, 8))
    save_settings(tmp_path / "boxes.json", config)
    assert load_settings(tmp_path / "boxes.json").config == config


# -- timesteps, pictures and hints -------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"where": "block"}, {"region_size": (2, 4, 4)}], ids=str)
def test_the_timestep_of_a_token_follows_it(model: nn.Module, settings: dict[str, Any]) -> None:
    """Where all tokens have the same, it is as if there were one for all."""
    tomadiff.apply(model, ratio=0.5, **settings)
    one_for_all = call(model)
    each = call(model, timestep=torch.full((2, 128), 500.0))
    torch.testing.assert_close(each, one_for_all, atol=1e-5, rtol=1e-4)
    given = torch.full((2, 128), 500.0)
    given[:, :64] = 0  # the first frame
    assert distance(call(model, timestep=given), each) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"where": "module"}, {"weigh_keys": True}], ids=str)
def test_padding_behind_the_text_stays_out_of_sight(settings: dict[str, Any]) -> None:
    """HunyuanVideo's mask is over video and text: it follows merged tokens, and holds beside weights."""
    case = tiny("hunyuan_video")
    model = build(case)
    arguments = case.call(model, (2, 8, 8), (0, 1), 0.5) | {"return_dict": False}
    words = arguments["encoder_hidden_states"].clone()
    words[:, 5:] += 10
    tomadiff.apply(model, ratio=0.5, **settings)
    with torch.no_grad():
        before, padded = model(**arguments)[0], model(**arguments | {"encoder_hidden_states": words})[0]
        words[:, 0] += 10
        assert torch.equal(before, padded)
        assert distance(model(**arguments | {"encoder_hidden_states": words})[0], before) > 1e-4


def test_regions_within_frames_are_asked_for_where_the_first_is_treated_apart() -> None:
    case = tiny("hunyuan_video_i2v")
    model = build(case)
    arguments = case.call(model, (2, 8, 8), (0,), 0.5)
    for settings in ({"region_size": (2, 4, 4)}, {"regions": "stripe"}):
        tomadiff.apply(model, ratio=0.5, **settings)
        with pytest.raises(ConfigError, match="first frame apart"), torch.no_grad():
            model(**arguments)


def test_steps_are_told_by_all_timesteps_where_the_first_frame_is_given(model: nn.Module) -> None:
    tomadiff.apply(model, ratio=0.5, interval=2)
    for time in (900.0, 900.0, 800.0, 800.0, 700.0, 700.0):  # two calls for each step
        steps = torch.full((1, 128), time)
        steps[:, :64] = 0
        call(model, timestep=steps.expand(2, -1))
    report = tomadiff.report(model)
    assert report.generations == 1
    assert {(site.calls, site.dense_calls) for site in report.sites} == {(4, 0)}, (
        "the last of three steps is forecast"
    )


@pytest.mark.parametrize("kind", [WanTransformer3DModel, ChronoEditTransformer3DModel])
def test_a_picture_to_start_from_is_no_token_of_the_video(kind: type[nn.Module]) -> None:
    """Wan I2V: its embeddings come before 512 tokens of text, in cross-attention."""
    torch.manual_seed(0)
    model = kind(**wan.SETTINGS | {"image_dim": 16, "added_kv_proj_dim": 24}).eval()
    more = {
        "encoder_hidden_states": text((0, 1), 512, 16),
        "encoder_hidden_states_image": text((0, 1), 5, 16),
    }
    dense = call(model, **more)
    for where in ("span", "module", "kv"):
        tomadiff.apply(model, ratio=0.5, where=where)
        assert 1e-4 < distance(call(model, **more), dense) < 1
        assert {site.kept for site in tomadiff.report(model).sites} == {64}
    tomadiff.remove(model)
    assert torch.equal(call(model, **more), dense)


@pytest.mark.parametrize("name", ["vace", "animate"])
def test_what_goes_in_between_blocks_finds_all_tokens(name: str) -> None:
    """VACE's hints and Animate's faces: blocks are spans of their own."""
    torch.manual_seed(0)
    if name == "vace":
        settings = {"vace_layers": [0, 1], "vace_in_channels": 6}
        model = WanVACETransformer3DModel(**wan.SETTINGS | settings).eval()
        more = {"control_hidden_states": noise((2, 3), 6, 2, 16, 16)}
    else:
        settings = {
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": None,
            "inject_face_latents_blocks": 1,
            "motion_encoder_size": 32,
            "motion_style_dim": 8,
            "motion_dim": 4,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 8,
            "face_encoder_num_heads": 2,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8, "32": 8},
        }
        model = WanAnimateTransformer3DModel(**wan.SETTINGS | settings).eval()
        more = {
            "hidden_states": noise((0, 1), 12, 2, 16, 16),
            "pose_hidden_states": noise((2, 3), 4, 1, 16, 16),
            "face_pixel_values": noise((4, 5), 3, 4, 32, 32),
        }
    dense = call(model, **more)
    tomadiff.apply(model, ratio=0.5, where="block")
    block = call(model, **more)
    tomadiff.apply(model, ratio=0.5, where="span")
    assert torch.equal(call(model, **more), block)
    assert 1e-4 < distance(block, dense) < 1
    tomadiff.remove(model)
    assert torch.equal(call(model, **more), dense)


def test_what_a_video_is_conditioned_on_stays_whole() -> None:
    """LTX: tokens of other frames come first, told from the video's by their positions."""
    case = tiny("ltx")
    model = build(case)
    coords = torch.cartesian_prod(torch.arange(2.0), torch.arange(8.0), torch.arange(8.0)).T
    later = torch.cat([torch.full((1, 16), 1.0), coords[1:, :16]])
    call = case.call(model, (2, 8, 8), (0,), 0.5)
    call |= {"num_frames": None, "height": None, "width": None, "return_dict": False}
    call |= {
        "hidden_states": noise((0,), 144, 8),
        "video_coords": torch.cat([later, coords], dim=1)[None],
        "timestep": torch.cat([torch.zeros(16), torch.full((128,), 500.0)])[None],
    }
    tomadiff.apply(model, ratio=0.5)
    with torch.no_grad():
        assert model(**call)[0].shape == (1, 144, 8)
    assert {(site.tokens, site.kept) for site in tomadiff.report(model).sites} == {(128, 64)}


# -- models that take turns --------------------------------------------------------------------------------


def taking_turns(first: nn.Module | None, second: nn.Module, boundary: float = 0.6) -> WanPipeline:
    parts = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    scheduler = FlowMatchEulerDiscreteScheduler()
    return WanPipeline(
        transformer=first, transformer_2=second, scheduler=scheduler, boundary_ratio=boundary, **parts
    )


def test_both_models_of_a_pipeline_are_merged_and_set_free(model: nn.Module) -> None:
    """Wan 2.2 has one for the first steps, and one for the last."""
    second = build(wan)
    pipe = taking_turns(model, second)
    dense = draw(pipe, wan)
    with tomadiff.merged(pipe, ratio=0.5, dense_blocks=0):
        merged = draw(pipe, wan)
        report = tomadiff.report(pipe)
        assert report.model_calls["run"] == 4, "with guidance, two in each step"
        calls = {site.name: (site.tokens, site.kept, site.calls) for site in report.sites}
        assert calls == dict.fromkeys(
            ("blocks.0", "blocks.1", "transformer_2.blocks.0", "transformer_2.blocks.1"), (128, 64, 2)
        )
    assert distance(merged, dense) > CHANGED
    assert torch.equal(draw(pipe, wan), dense)
    tomadiff.apply(second, ratio=0.5)
    half = draw(pipe, wan)
    assert distance(half, dense) > CHANGED and distance(half, merged) > CHANGED
    tomadiff.remove(pipe)
    assert torch.equal(draw(pipe, wan), dense)


@pytest.mark.parametrize("settings", [{"ratio": 0.5}, {"interval": 2}], ids=str)
def test_neither_model_holds_anything_after_the_last_step(model: nn.Module, settings: dict) -> None:
    pipe = tomadiff.apply(taking_turns(model, build(wan)), **settings)
    held: list[int] = []

    def look(pipe: WanPipeline, step: int, time: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        held.append(tomadiff.report(pipe).held)
        return inputs

    pipe(**wan.request((0,)), num_inference_steps=4, output_type="latent", callback_on_step_end=look)
    assert held[0] > 0 and held[-1] == 0


def test_the_second_models_last_steps_are_the_last_ones(model: nn.Module) -> None:
    pipe = tomadiff.apply(taking_turns(model, build(wan)), ratio=[(0, 0.5), (0.5, 0)], dense_blocks=0)
    draw(pipe, wan)
    assert [site.dense_calls for site in tomadiff.report(pipe).sites] == [0, 0, 2, 2]


def test_the_second_model_may_be_alone(model: nn.Module) -> None:
    pipe = tomadiff.apply(taking_turns(None, model, boundary=2.0), ratio=0.5)
    draw(pipe, wan)
    report = tomadiff.report(pipe)
    assert report.model_calls["run"] == 4 and {(site.tokens, site.kept) for site in report.sites} == {
        (128, 64)
    }


# -- frames that take turns --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"interval": 2}, {"share": "kind"}, {"method": "tome"}], ids=str)
def test_frames_may_run_a_few_at_a_time(settings: dict[str, Any]) -> None:
    """To save memory, AnimateDiff's FreeNoise runs blocks on some frames after the other, in one call."""
    case, pictures = tiny("animatediff"), []
    for frames in (None, 1):
        pipe = case.pipeline(build(case))
        tomadiff.apply(pipe, ratio=0.5, **settings)
        if frames:
            for block in (*pipe.unet.down_blocks, pipe.unet.mid_block, *pipe.unet.up_blocks):
                pipe._enable_split_inference_attentions_(block.attentions, frames)
        pictures.append(torch.cat([draw(pipe, case, (seed,)) for seed in (0, 1, 2)]))
    assert mostly_alike(*pictures)
