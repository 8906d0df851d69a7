"""Benchmarked models have the published shapes, and are called as their pipelines call them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomesd
import torch
from comparison import alike
from diffusers import DiffusionPipeline
from pipelines import MAKERS, make, whole_pipeline
from torch import Tensor, nn

import tomadiff
from tomadiff.runtime.registration import denoiser
from tomadiff.tools.bench.architectures import ARCHITECTURES
from tomadiff.tools.bench.models import arguments, build, depth_note, skeleton, skeleton_of
from tomadiff.tools.bench.step import capture
from tomadiff.tools.demo.embedded import EMBEDDED, load_embedded
from tomadiff.tools.loading import load

MILLIONS = {
    "sd15": 859.52,
    "sd21": 865.91,
    "sdxl": 2567.46,
    "sd35-medium": 2243.17,
    "flux-dev": 11901.41,
    "sana": 1604.46,
    "wan-1.3b": 1419.00,
}
SIZE = (64, 64)


@pytest.fixture(params=[*MAKERS, *EMBEDDED])
def any_pipe(request: pytest.FixtureRequest) -> Iterator[DiffusionPipeline]:
    """A pipeline of each kind, and those that take a prompt."""
    pipe = load_embedded(request.param) if request.param in EMBEDDED else make(request.param)
    pipe.set_progress_bar_config(disable=True)
    yield pipe


def seeded(pipe: DiffusionPipeline, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {**arguments(pipe, SIZE, **more), "generator": torch.Generator().manual_seed(0)}


# -- Architectures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_as_many_as_published(name: str) -> None:
    millions = sum(parameter.numel() for parameter in skeleton_of(name).parameters()) / 1e6
    assert millions == pytest.approx(MILLIONS[name], abs=0.01)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_called_at_its_size_without_weights(name: str) -> None:
    pipe = build(name, device="meta")
    size = ARCHITECTURES[name].size
    step = capture(pipe, arguments(pipe, size, guidance=1.0))
    output = step(0)[0]
    assert output.device.type == "meta"
    frames = 21 if name == "wan-1.3b" else 1
    assert output.numel() == frames * step.model.config.in_channels * size[0] * size[1] // (
        {"flux-dev": 256, "sana": 1024}.get(name, 64)  # four latents are one token, or one for 32 x 32 pixels
    )


@pytest.mark.parametrize(
    "name, depth, note",
    [
        ("flux-dev", 0.2, "4 of 19 joint and 8 of 38 single blocks"),
        ("flux-dev", 0.001, "1 of 19 joint and 1 of 38 single blocks"),
        ("sd35-medium", 0.5, "12 of 24 joint blocks"),
        ("sdxl", 0.5, "35 of 70 transformer blocks"),
        ("sdxl", 1.0, ""),
        ("sd15", 1.0, ""),
    ],
)
def test_depth_is_a_share_of_the_blocks_and_its_note_says_so(name: str, depth: float, note: str) -> None:
    assert depth_note(name, depth) == note


def test_depth_leaves_out_dual_attention_in_proportion() -> None:
    model = skeleton_of("sd35-medium", 0.5)
    dual = [block.use_dual_attention for block in model.transformer_blocks]
    assert dual == [True] * 6 + [False] * 6


@pytest.mark.parametrize("name, depth", [("sdxl", 0.0), ("sdxl", 1.01), ("sdxl", -1), ("sdxl", 0.99)])
def test_a_depth_that_means_nothing_is_refused(name: str, depth: float) -> None:
    with pytest.raises(ValueError, match="depth"):
        build(name, depth, device="meta")


@pytest.mark.parametrize("name", ["sd15", "sd21"])
def test_what_has_one_layer_a_block_has_no_depth(name: str) -> None:
    with pytest.raises(ValueError, match=r"depth=0\.5 leaves out no block of Stable Diffusion"):
        depth_note(name, 0.5)


def test_a_shallow_model_of_true_width_gives_finite_numbers() -> None:
    torch.manual_seed(0)
    pipe = build("sana", 0.01)
    output = capture(pipe, arguments(pipe, SIZE, guidance=1.0))(0)[0]
    assert pipe.vae is None and output.isfinite().all() and output.std() > 0


def test_a_whole_generation_in_half_precision_gives_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    # the table of positions takes longer to make than all weights
    monkeypatch.setitem(ARCHITECTURES["sd35-medium"].config, "pos_embed_max_size", 32)
    torch.manual_seed(0)
    pipe = build("sd35-medium", 0.01, torch.bfloat16, decoder=True)
    pipe.set_progress_bar_config(disable=True)
    for model in (pipe.transformer, pipe.vae):  # weights and tables of positions
        assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    size = (16, 16)  # on CPUs without bf16, convolutions of the decoder take two minutes for SIZE
    image = pipe(**arguments(pipe, size), num_inference_steps=1, output_type="pt").images
    assert image.shape == (1, 3, *size)
    assert image.isfinite().all() and image.std() > 0


def test_building_leaves_the_default_precision_alone() -> None:
    build("sd15", dtype=torch.float16, device="meta")
    assert torch.get_default_dtype() == torch.float32


# -- Calls -------------------------------------------------------------------------------------------------


def first_output(pipe: DiffusionPipeline, call: dict[str, Any]) -> Tensor:
    """What the denoiser gives when a pipeline first calls it."""
    outputs: list[Tensor] = []
    handle = denoiser(pipe)[0].register_forward_hook(lambda model, args, output: outputs.append(output[0]))
    pipe(**call, num_inference_steps=1, output_type="latent")
    handle.remove()
    return outputs[0]


def test_step_0_is_the_pipelines_own_first_call(any_pipe: DiffusionPipeline) -> None:
    step = capture(any_pipe, {**seeded(any_pipe), "num_inference_steps": 1})
    assert torch.equal(step(0)[0], first_output(any_pipe, seeded(any_pipe)))


def test_a_compiled_model_is_captured_without_compiling() -> None:
    pipe = make("flux")
    graphs = []
    pipe.transformer.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    step = capture(pipe, seeded(pipe))
    assert not graphs
    step(0)
    assert graphs


def test_capture_runs_no_weights_and_leaves_nothing_behind(any_pipe: DiffusionPipeline) -> None:
    model = denoiser(any_pipe)[0]
    tomadiff.apply(any_pipe)
    hooks = list(model._forward_pre_hooks)
    step = capture(any_pipe, seeded(any_pipe))
    assert tomadiff.report(any_pipe).model_calls["run"] == 0
    assert list(model._forward_pre_hooks) == hooks
    assert any_pipe._progress_bar_config == {"disable": True}
    step(0)
    assert tomadiff.report(any_pipe).model_calls["run"] == 1


def test_merging_sees_the_steps_of_a_generation(any_pipe: DiffusionPipeline) -> None:
    tomadiff.apply(any_pipe, refresh_destinations=2, refresh_weights=2)
    step = capture(any_pipe, seeded(any_pipe, batch=2))
    made = []
    for n in range(4):
        step(n)
        report = tomadiff.report(any_pipe)
        assert (report.model_calls["run"], report.generations) == (n + 1, 1)
        made.append(report.refreshes["destinations"])
    plans = made[0]
    assert plans > 0 and made == [plans, plans, 2 * plans, 2 * plans]
    step(0)
    assert tomadiff.report(any_pipe).generations == 2


def test_timesteps_are_entries_of_a_table_like_the_pipelines_own(any_pipe: DiffusionPipeline) -> None:
    step = capture(any_pipe, seeded(any_pipe, batch=3))
    seen: list[Tensor] = []

    def note(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["timestep"] if "timestep" in kwargs else args[1])

    step.model.register_forward_pre_hook(note, with_kwargs=True)
    for n in (0, 1, 999):
        step(n)
    own = step.argument("timestep")
    assert torch.equal(seen[0], own) and {t.dtype for t in seen} == {own.dtype}
    assert [float(t.flatten()[0]) for t in seen] == sorted(
        (float(t.flatten()[0]) for t in seen), reverse=True
    )
    assert [t.storage_offset() for t in seen] == [0, 1, 999]
    assert len({t.untyped_storage().data_ptr() for t in seen}) == 1


def test_the_same_call_runs_on_a_skeleton(any_pipe: DiffusionPipeline) -> None:
    step = capture(any_pipe, seeded(any_pipe))
    ghost = step.on(skeleton(step.model))
    assert {tensor.device.type for tensor in ghost.model.state_dict().values()} == {"meta"}
    assert ghost.table.device.type == ghost(1)[0].device.type == "meta"
    assert ghost(1)[0].shape == step(1)[0].shape


def test_a_skeleton_has_its_models_precision() -> None:
    model = make("sd3").transformer.to(torch.bfloat16)
    assert {tensor.dtype for tensor in skeleton(model).state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_tomesd_finds_a_unets_sample(name: str) -> None:
    pipe = make(name)
    step = capture(pipe, seeded(pipe))
    dense = step(0)[0]
    tomesd.apply_patch(pipe.unet, ratio=0.5, max_downsample=4)
    assert not torch.equal(step(0)[0], dense)


class KeywordPipeline:
    """Calls its UNet by keyword alone."""

    _execution_device = torch.device("cpu")

    def __init__(self, unet: nn.Module) -> None:
        self.unet, self.components = unet, {"unet": unet}

    def set_progress_bar_config(self, **config: Any) -> None: ...

    def __call__(
        self,
        prompt_embeds: Tensor,
        negative_prompt_embeds: Tensor,
        steps: int = 1,
        height: int = 64,
        width: int = 64,
        guidance_scale: float = 1.0,
    ) -> None:
        for time in torch.linspace(999, 1, steps):
            self.unet(sample=torch.ones(1, 4, 8, 8), timestep=time, encoder_hidden_states=prompt_embeds)


def test_a_unets_sample_is_positional_however_it_came() -> None:
    pipe: Any = KeywordPipeline(make("sd1").unet)
    step = capture(pipe, arguments(pipe, SIZE, guidance=2.0))
    assert [argument.shape for argument in step.args] == [(1, 4, 8, 8)]
    assert step(0).sample.shape == (1, 4, 8, 8)


def test_a_pipeline_that_never_calls_its_model_is_an_error() -> None:
    pipe: Any = KeywordPipeline(make("sd1").unet)
    with pytest.raises(RuntimeError, match="KeywordPipeline did not call its UNet2DConditionModel"):
        capture(pipe, {**arguments(pipe, SIZE), "steps": 0})


@pytest.mark.parametrize("guidance, rows", [(None, 4), (5.0, 4), (1.0, 2)])
def test_guidance_doubles_the_batch_but_for_flux(name: str, guidance: float | None, rows: int) -> None:
    pipe = make(name)
    step = capture(pipe, seeded(pipe, batch=2, guidance=guidance))
    assert step.kwargs["encoder_hidden_states"].shape[0] == (2 if name == "flux" else rows)


@pytest.mark.parametrize("embedded", EMBEDDED)
def test_text_encoders_get_a_prompt_for_each_picture(embedded: str) -> None:
    call = arguments(load_embedded(embedded), SIZE, batch=2, guidance=3.0, prompt="kiwi")
    assert call == {"prompt": ["kiwi", "kiwi"], "height": 64, "width": 64, "guidance_scale": 3.0}


def test_a_pipeline_from_a_folder_is_called_with_a_prompt(tmp_path: Path) -> None:
    pipe = load(str(whole_pipeline(tmp_path)))
    step = capture(pipe, seeded(pipe, batch=2))
    assert step.args[0].shape == (4, 4, 8, 8) and step(0)[0].isfinite().all()


def test_a_pipeline_from_a_folder_without_text_encoders_is_called_alike(tmp_path: Path) -> None:
    """Diffusers loads such a pipeline of SDXL only: in others, text encoders are not optional."""
    pipe = make("sdxl")
    pipe.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    mine, its = (capture(each, seeded(each)) for each in (pipe, loaded))
    # up to rounding: what is loaded is a map of the file, and not aligned as what torch allocates
    assert alike(mine(0)[0], its(0)[0])
