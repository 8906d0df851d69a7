"""What users would do instead: it goes on by name, comes off without a trace, and its work is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from pipelines import make
from torch import Tensor, nn

from tomadiff.errors import ConfigError
from tomadiff.models import flux, unet
from tomadiff.runtime.registration import denoiser
from tomadiff.tools.demo.embedded import load_embedded
from tomadiff.tools.denoiser_flops import counted
from tomadiff.tools.method_spec import calibrate, check, pairs, parse, parts_of, steps_of, switched_on
from tomadiff.tools.rivals import rival
from tomadiff.tools.samplers import DIFFUSION, FLOW_MATCHING, sampled_by, scheduler_by_name

STEPS = 5


@pytest.fixture(scope="module")
def pipes() -> dict[str, DiffusionPipeline]:
    found = {name: load_embedded(name) for name in ("emoji-unet", "emoji-flux")}
    for pipe in found.values():
        pipe.set_progress_bar_config(disable=True)
    return found


def draw(pipe: DiffusionPipeline, steps: int = STEPS, guidance: float = 1.0) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    size = {"height": 32, "width": 32}
    arguments = {"num_inference_steps": steps, "guidance_scale": guidance, "generator": noise}
    return pipe("pizza", **size, **arguments, output_type="latent").images


def work(pipe: DiffusionPipeline, method: str = "dense", ratio: float = 0.0, **arguments: Any) -> int:
    with switched_on(pipe, method, ratio), counted(pipe) as counts:
        draw(pipe, steps_of(method) or STEPS, **arguments)
    return counts.flops


def traces(model: nn.Module, pipe: DiffusionPipeline) -> list[Any]:
    """What replacing functions would leave behind, apart from what diffusers' own hooks and caches do."""
    own = {"_diffusers_hook", "_cache_config", "forward"}
    attributes = [sorted(set(vars(module)) - own) for module in model.modules()]
    return [attributes, [name for name, _ in model.named_modules()], dict(vars(type(pipe)))]


# -- names and settings ------------------------------------------------------------------------------------


def test_steps_and_solvers_are_read() -> None:
    assert parse("steps:13") == ("steps", {"count": 13}) == parse("steps:count=13")
    assert parse("steps:13,solver=dpm++") == ("steps", {"count": 13, "solver": "dpm++"})
    assert parse("steps:solver=euler-a,count=4")[1] == {"solver": "euler-a", "count": 4}
    assert steps_of("steps:13,solver=dpm++") == 13 and steps_of("dense") is None
    assert parts_of("steps:13,solver=dpm+++tomadiff") == ["steps:13,solver=dpm++", "tomadiff"]
    assert parts_of("first-block:threshold=1e+2+tomadiff") == ["first-block:threshold=1e+2", "tomadiff"]


def test_only_what_merges_is_multiplied_by_the_ratios() -> None:
    methods = [
        "auto",
        "steps:13",
        "tomadiff:interval=3",
        "tomadiff:interval=2,ratio=0.25",
        "tomadiff:interval=1",
    ]
    found, left_out = pairs([*methods, "tomadiff:interval=1,ratio=0"], [0.5, 0.75], unet.FAMILY)
    assert not left_out and found == [
        ("auto", 0.0),
        ("steps:13", 0.0),
        ("tomadiff:interval=3", 0.0),
        ("tomadiff:interval=1,ratio=0", 0.0),
        ("tomadiff:interval=2", 0.25),
        ("tomadiff:interval=1", 0.5),
        ("tomadiff:interval=1", 0.75),
    ]


@pytest.mark.parametrize(
    ("part", "family", "says"),
    [
        ("steps", unet.FAMILY, "say how many steps"),
        ("steps:0", unet.FAMILY, "say how many steps"),
        ("steps:13,solver=best", unet.FAMILY, "unknown solver 'best'; there are euler"),
        ("deepcache", flux.FAMILY, "UNets only.*take dbcache"),
        ("deepcache:interval=0", unet.FAMILY, "interval must be at least 1"),
        ("deepcache:every=3", unet.FAMILY, "unknown setting 'every'; there are interval, branch"),
        ("dbcache", unet.FAMILY, "transformers only.*take deepcache"),
        ("dbcache:threshold=1", flux.FAMILY, "unknown setting.*Fn_compute_blocks"),
        ("magcache", unet.FAMILY, "no caches for.*take deepcache"),
        ("taylorseer:cache_interval=often", flux.FAMILY, "is no word"),
        ("auto:interval=3", flux.FAMILY, "auto chooses the settings"),
    ],
)
def test_what_can_not_be_had_says_what_to_do(part: str, family: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(part, 0.0, family)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rival, "find_spec", lambda name: None)
    for part, family in (("deepcache", unet.FAMILY), ("dbcache", flux.FAMILY)):
        with pytest.raises(ImportError, match=r"pip install '(DeepCache|cache-dit)'"):
            check(part, 0.0, family)


# -- on and off --------------------------------------------------------------------------------------------

DB = "dbcache:Fn_compute_blocks=1,max_warmup_steps=2,residual_diff_threshold=9.0"
CACHES = [
    ("emoji-unet", "deepcache:interval=2"),
    ("emoji-flux", "first-block:threshold=0.9"),
    ("emoji-flux", "taylorseer:cache_interval=2"),
    ("emoji-flux", "magcache:threshold=9.0"),
    ("emoji-flux", DB),
    ("emoji-flux", f"{DB},taylorseer=True"),
]


@pytest.mark.parametrize(("name", "method"), CACHES)
def test_a_cache_saves_work_and_leaves_no_trace(
    name: str, method: str, pipes: dict[str, DiffusionPipeline]
) -> None:
    pipe = pipes[name]
    model = denoiser(pipe)[0]
    dense, before = draw(pipe), traces(model, pipe)
    calibrate(pipe, method, lambda: draw(pipe))
    with switched_on(pipe, method, 0.0):
        first, second, guided = draw(pipe), draw(pipe), draw(pipe, guidance=2.0)
    assert torch.equal(first, second), "a generation knows nothing of the one before"
    assert not torch.equal(first, dense) and guided.isfinite().all()
    assert torch.equal(draw(pipe), dense)
    assert traces(model, pipe) == before
    assert 0.1 < work(pipe, method) / work(pipe) < 0.95


def test_caches_find_the_blocks_in_their_order_after_cache_dit(pipes: dict[str, DiffusionPipeline]) -> None:
    pipe, method = pipes["emoji-flux"], "first-block:threshold=0.9"
    with switched_on(pipe, method, 0.0):
        before = draw(pipe)
    with switched_on(pipe, DB, 0.0):
        draw(pipe)
    with switched_on(pipe, method, 0.0):
        assert torch.equal(draw(pipe), before)


def test_deepcache_is_the_stock_one_where_that_works() -> None:
    """Its own way to tell the step is by a timestep that is one number of the scheduler's."""
    from DeepCache import DeepCacheSDHelper
    from pipelines import draw as draw_tiny

    pipe = make("sdxl")
    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    stock = draw_tiny(pipe, steps=4)
    helper.disable()
    with switched_on(pipe, "deepcache:interval=2", 0.0):
        assert torch.equal(draw_tiny(pipe, steps=4), stock)


# -- solvers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["euler", "heun", "dpm++", "unipc"])
def test_solvers_for_flows_follow_a_straight_path_to_its_end(name: str) -> None:
    """From noise to data at a constant velocity, which any solver of flows has to hold."""
    generator = torch.Generator().manual_seed(0)
    noise, data = (torch.randn(1, 4, 8, 8, generator=generator) for _ in range(2))
    scheduler = scheduler_by_name(name, FlowMatchEulerDiscreteScheduler())
    scheduler.set_timesteps(6)
    sample = noise
    for timestep in scheduler.timesteps:
        sample = scheduler.step(noise - data, timestep, sample, return_dict=False)[0]
    assert (sample - data).abs().max() < 0.02


def test_a_solver_keeps_what_the_model_predicts_and_the_shift_of_time() -> None:
    flow, shifted = FlowMatchEulerDiscreteScheduler(), FlowMatchEulerDiscreteScheduler(shift=3.0)
    for name in FLOW_MATCHING:
        config = scheduler_by_name(name, shifted).config
        assert 3.0 in (config.get("shift"), config.get("flow_shift"))
    assert scheduler_by_name("dpm++", shifted).config.flow_shift == 3.0
    noise = EulerDiscreteScheduler(prediction_type="v_prediction", beta_schedule="scaled_linear")
    for name in DIFFUSION:
        config = scheduler_by_name(name, noise).config
        assert (config.prediction_type, config.beta_schedule) == ("v_prediction", "scaled_linear")
    with pytest.raises(ConfigError, match=r"'euler-a' for a model that matches flows; there are euler, "):
        scheduler_by_name("euler-a", flow)


@pytest.mark.parametrize(
    ("model", "name"),
    [*(("emoji-unet", name) for name in DIFFUSION), *(("emoji-flux", name) for name in FLOW_MATCHING)],
)
def test_the_embedded_pipelines_take_every_solver(
    model: str, name: str, pipes: dict[str, DiffusionPipeline]
) -> None:
    pipe = pipes[model]
    own = pipe.scheduler
    with sampled_by(pipe, name):
        picture = draw(pipe)
        assert picture.isfinite().all() and torch.equal(draw(pipe), picture), "a seed is a picture"
    assert pipe.scheduler is own
    assert torch.equal(picture, draw(pipe)) == (name == "euler")


# -- work --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["emoji-unet", "emoji-flux"])
def test_work_is_what_the_steps_that_run_compute(name: str, pipes: dict[str, DiffusionPipeline]) -> None:
    pipe = pipes[name]
    dense = work(pipe)
    assert work(pipe, "steps:2") / dense == 2 / STEPS
    assert work(pipe, "steps:2,solver=dpm++") / dense == 2 / STEPS
    assert work(pipe, guidance=2.0) == 2 * dense
    assert work(pipe, "tomadiff:interval=[0, 1, 4]") / dense == 3 / STEPS
    assert work(pipe, "tomadiff:interval=1,ratio=0") == dense


def test_work_counts_products_convolutions_and_attention_inside_the_denoiser_only() -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv = nn.Linear(8, 16), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.conv(x).flatten(2).transpose(1, 2).repeat(1, 1, 2)
            heads = self.linear(tokens)[:, None]
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    model, x = Denoiser(), torch.randn(2, 4, 8, 8)
    convolution, linear, attention = 2 * 2 * 4 * 4 * 9 * 64, 2 * 2 * 64 * 8 * 16, 2 * 2 * 2 * 64 * 64 * 16
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), counted(model) as counts:
            model.linear(torch.randn(3, 8))
            model(x)
        assert counts.flops == convolution + linear + attention


def test_merging_is_part_of_the_work(pipes: dict[str, DiffusionPipeline]) -> None:
    pipe = pipes["emoji-flux"]
    ideal, merged = work(pipe, "ideal", 0.5), work(pipe, "tomadiff", 0.5)
    assert ideal < merged < work(pipe)


def test_a_counter_leaves_pictures_and_models_alone(pipes: dict[str, DiffusionPipeline]) -> None:
    pipe = pipes["emoji-unet"]
    run: Callable[[], Tensor] = lambda: draw(pipe, 2)  # noqa: E731
    before = run()
    with counted(pipe):
        assert torch.equal(run(), before)
    assert not denoiser(pipe)[0]._forward_hooks and not denoiser(pipe)[0]._forward_pre_hooks
