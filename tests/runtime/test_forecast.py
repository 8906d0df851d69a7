"""Steps that run nothing: the model's output is forecast from the steps that did run."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from comparison import CHANGED
from comparison import distance as relative_distance
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EulerAncestralDiscreteScheduler,
    FluxPipeline,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from pipelines import bare_call, denoiser, draw, make, steps_that_run, text
from torch import Tensor, nn

import tomadiff
from tomadiff.errors import ConfigError
from tomadiff.runtime.forecast import History, extrapolation

STEPS = 10


@contextmanager
def calls_of(model: nn.Module) -> Iterator[list[Any]]:
    """The model's own forward, whenever it runs; a skipped step must not reach it."""
    calls: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: calls.append(output))
    yield calls
    handle.remove()


@contextmanager
def recorded_forecasts(pipe: Any) -> Iterator[list[bool]]:
    """For each forecast, whether it is between the last output, and the last clean image as an output."""
    session, held = denoiser(pipe)._tomadiff, []
    last: list[tuple[Tensor, Tensor]] = []
    begin, end = session._begin, session._end

    def both(turn: Any, output: Any) -> tuple[Tensor, Tensor]:
        return output[0], turn.noisy.image(0, output[0])

    def began(args: tuple, kwargs: dict[str, Any]) -> Any:
        turn = begin(args, kwargs)
        if turn.call is None:
            ends = last[-1][0], turn.noisy.output(0, last[-1][1])
            way = [(turn.forecast[0] - each).flatten(1).norm(dim=1) for each in ends]
            held.append(torch.allclose(sum(way), (ends[0] - ends[1]).flatten(1).norm(dim=1), rtol=1e-3))
        return turn

    def ended(turn: Any, output: Any) -> None:
        end(turn, output)
        if turn.call is not None:
            last.append(both(turn, output))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "_begin", began)
        patch.setattr(session, "_end", ended)
        yield held


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# -- the forecast itself -----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.floats(-3, 3), st.floats(-3, 3))
def test_a_line_is_forecast_exactly(gaps: list[int], start: float, slope: float) -> None:
    steps = [sum(gaps[:n]) for n in range(len(gaps))]
    step = steps[-1] + gaps[-1]
    weights = extrapolation(steps, step)
    assert sum(weight * (start + slope * at) for weight, at in zip(weights, steps)) == pytest.approx(
        start + slope * step, abs=1e-6
    )


def test_a_parabola_is_forecast_half_way_between_line_and_parabola() -> None:
    steps, step = [0, 2, 4], 6
    values = [at**2 for at in steps]
    line = values[-1] + (values[-1] - values[-2])
    forecast = sum(weight * value for weight, value in zip(extrapolation(steps, step), values))
    assert forecast == pytest.approx((line + step**2) / 2)


def test_a_parabola_through_close_points_is_not_followed_far() -> None:
    """Four steps on from points one step apart, a quarter of the bend is left."""
    near = sum(w * at**2 for w, at in zip(extrapolation([0, 1, 2], 3), [0, 1, 2])) - 7  # 7: the line at 3
    far = sum(w * at**2 for w, at in zip(extrapolation([0, 1, 2], 6), [0, 1, 2])) - 16  # 16: the line at 6
    assert near == pytest.approx(0.5 * 2) and far == pytest.approx(0.5 * 20 / 4)


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 6))
def test_the_fewer_points_a_generation_has_the_less_bold_is_its_forecast(
    gap: int, later: int, reach: int
) -> None:
    """Half of the way along the line with four gaps or fewer, all of it with twelve or more."""
    slope, last = 3.0, 2 * gap

    def moved(steps: int | None) -> float:
        weights = extrapolation([0, gap, last], last + reach, steps)
        return sum(weight * slope * at for weight, at in zip(weights, [0, gap, last])) - slope * last

    assert moved(None) == pytest.approx(slope * reach) == moved((12 + later) * gap)
    assert moved(4 * gap - min(later, gap)) == pytest.approx(slope * reach / 2)
    assert moved(8 * gap) == pytest.approx(slope * reach * 0.75)


def test_a_forecast_stays_within_the_range_of_its_type() -> None:
    history = History()
    history.add(0, (torch.tensor([0.0, 0.0, 1.0], dtype=torch.float16),))
    history.add(1, (torch.tensor([6e4, -6e4, 2.0], dtype=torch.float16),))
    (forecast,) = history.forecast(3)
    assert forecast.dtype == torch.float16 and forecast.tolist() == [65504.0, -65504.0, 4.0]


def test_a_caller_may_write_into_what_it_was_given() -> None:
    history = History()
    for step in (0, 1):
        output = torch.full((3,), float(step))
        history.add(step, output)
        output.zero_()
    assert history.forecast(2).tolist() == [2.0, 2.0, 2.0]
    history.forecast(2).zero_()
    assert history.forecast(3).tolist() == [3.0, 3.0, 3.0]


# -- which steps run ---------------------------------------------------------------------------------------


def test_skipped_steps_run_nothing_and_the_report_says_how_many(pipe: Any) -> None:
    tomadiff.apply(pipe, interval=3)
    with calls_of(denoiser(pipe)) as calls, steps_that_run(pipe) as ran:
        assert draw(pipe, steps=STEPS).isfinite().all()
    assert sorted(set(ran)) == [0, 3, 6, 8, 9], "the first, the last two, even gaps of at most three"
    report = tomadiff.report(pipe)
    assert report.steps == {"run": 5, "forecast": 5}
    assert report.model_calls["run"] == len(calls) and report.model_calls["forecast"] == len(calls)
    assert "5 steps run, 5 forecast; as asked" in str(report)


def test_an_interval_of_one_is_the_dense_model(pipe: Any) -> None:
    expected = draw(pipe, steps=4)
    tomadiff.apply(pipe, interval=1, ratio=0)
    assert torch.equal(draw(pipe, steps=4), expected)


def test_steps_that_run_are_listed(pipe: Any) -> None:
    tomadiff.apply(pipe, interval=[0, 1, 5, 9])
    draw(pipe, steps=STEPS)
    assert tomadiff.report(pipe).steps == {"run": 4, "forecast": 6}
    with pytest.raises(ConfigError, match="this generation with step 7, which should run"):
        draw(pipe, steps=8)


def test_a_bare_model_forecasts_as_its_list_says(name: str) -> None:
    model = denoiser(make(name))
    call = bare_call(model)
    tomadiff.apply(model, interval=[0, 1, 3])
    with torch.no_grad(), calls_of(model) as calls:
        for time in (0.9, 0.7, 0.5, 0.3):
            model(**call | {"timestep": torch.tensor([time * (1 if name == "flux" else 1000)])})
    assert len(calls) == 3


def test_steps_that_run_may_be_merged_as_well(pipe: Any) -> None:
    tomadiff.apply(pipe, ratio=0.5, interval=2)
    draw(pipe, steps=STEPS, guidance=1.0)
    report = tomadiff.report(pipe)
    assert report.steps == {"run": 6, "forecast": 4}
    assert {(site.kept, site.calls, site.dense_calls) for site in report.sites} == {
        (site.tokens // 2, 6, 0) for site in report.sites
    }


# -- what apply(pipe) chooses ------------------------------------------------------------------------------


def test_deterministic_sampling_is_forecast_and_nothing_is_merged(pipe: Any) -> None:
    tomadiff.apply(pipe)
    draw(pipe, steps=24)
    report = tomadiff.report(pipe)
    assert report.steps == {"run": 13, "forecast": 11} and "is deterministic" in report.why
    assert all(site.calls == site.dense_calls for site in report.sites)


class Foreign(EulerAncestralDiscreteScheduler):
    """Nobody knows what a scheduler from elsewhere takes an output for."""


@pytest.mark.parametrize(
    ("scheduler", "steps", "says"),
    [
        (Foreign, 24, "may add noise at every step"),
        (LCMScheduler, 4, "4 steps are too few"),
        (HeunDiscreteScheduler, 24, "calls the model more than once a step"),
        (DDIMScheduler, 4, "4 steps are too few"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_where_forecasts_fail_every_step_runs_and_the_first_half_on_merged_tokens(
    scheduler: type, steps: int, says: str
) -> None:
    pipe = make("sd1")
    pipe.scheduler = scheduler()
    tomadiff.apply(pipe)
    draw(pipe, steps=steps, generator=torch.Generator().manual_seed(0))
    report = tomadiff.report(pipe)
    assert report.steps["forecast"] == 0 and says in report.why
    assert all(site.kept == site.tokens // 2 for site in report.sites)
    assert all(site.dense_calls == site.calls // 2 for site in report.sites)


def test_noise_that_is_asked_for_with_the_step_is_noticed() -> None:
    pipe = make("sd1")
    pipe.scheduler = DDIMScheduler()
    tomadiff.apply(pipe)
    draw(pipe, steps=STEPS)
    assert tomadiff.report(pipe).steps["forecast"] > 0
    tomadiff.apply(pipe)
    with recorded_forecasts(pipe) as held:
        draw(pipe, steps=STEPS, eta=0.5, generator=torch.Generator().manual_seed(0))
    assert held and all(held), "the clean image is held"
    assert "eta=0.5" in tomadiff.report(pipe).why
    assert "step" not in vars(pipe.scheduler), "nothing is left on the scheduler"


@pytest.mark.parametrize("scheduler", [EulerAncestralDiscreteScheduler, LCMScheduler, DDPMScheduler])
def test_where_noise_comes_in_the_clean_image_is_held(scheduler: type) -> None:
    pipe = make("sd1")
    pipe.scheduler = scheduler()
    tomadiff.apply(pipe)
    with recorded_forecasts(pipe) as held:
        draw(pipe, steps=STEPS, generator=torch.Generator().manual_seed(0))
    report = tomadiff.report(pipe)
    assert report.steps == {"run": 6, "forecast": 4} and "adds noise at every step" in report.why
    assert held and all(held)


def test_an_interval_against_a_sampler_of_unknown_noise_warns() -> None:
    pipe = make("sd1")
    pipe.scheduler = Foreign()
    tomadiff.apply(pipe, interval=2)
    with pytest.warns(UserWarning, match="which no forecast can know: use ratio"):
        draw(pipe, steps=6, generator=torch.Generator().manual_seed(0))


def test_a_model_that_can_not_be_merged_is_forecast() -> None:
    from diffusers import DDIMPipeline, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()
    pipe = DDIMPipeline(unet, DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    tomadiff.apply(pipe)
    pipe(num_inference_steps=STEPS, output_type="np")
    report = tomadiff.report(pipe)
    assert report.steps["forecast"] > 0 and report.family == "" and str(report)
    with pytest.raises(tomadiff.errors.UnsupportedModelError, match="can't be merged"):
        tomadiff.apply(pipe, ratio=0.5)
    with pytest.warns(UserWarning, match="nothing is done here"):
        pipe(num_inference_steps=2, output_type="np")


# -- nothing leaks -----------------------------------------------------------------------------------------


def fresh(name: str, **call: Any) -> Tensor:
    """As if it were the first picture."""
    return draw(tomadiff.apply(make(name), interval=2), **call)


def test_removal_is_bit_exact(pipe: Any) -> None:
    before = draw(pipe, steps=6)
    attributes = set(vars(denoiser(pipe)))
    tomadiff.apply(pipe, interval=2)
    assert distance(draw(pipe, steps=6), before) > 1e-6
    tomadiff.remove(pipe)
    assert torch.equal(draw(pipe, steps=6), before) and set(vars(denoiser(pipe))) == attributes


def test_a_sample_does_not_depend_on_its_batch(pipe: Any) -> None:
    tomadiff.apply(pipe, interval=2)
    together = draw(pipe, seeds=(0, 1, 2), steps=6)
    assert relative_distance(draw(pipe, seeds=(1,), steps=6)[0], together[1]) < CHANGED


def test_same_seed_same_picture_whatever_came_before(pipe: Any) -> None:
    tomadiff.apply(pipe, interval=2)
    expected = draw(pipe, steps=6)
    for before in ({"steps": 1}, {"steps": 6, "seeds": (3,)}, {"steps": 5, "size": (64, 96)}):
        draw(pipe, **before)
        assert torch.equal(draw(pipe, steps=6), expected), before


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_generation_leaves_nothing_to_the_next(pipe: Any, after: int) -> None:
    tomadiff.apply(pipe, interval=2)
    expected = draw(pipe, steps=6)

    def cancel(pipe: Any, step: int, time: Any, inputs: dict) -> dict:
        if step == after:
            raise InterruptedError
        return inputs

    tomadiff.apply(pipe, interval=2)  # anew: nothing of the picture before
    with pytest.raises(InterruptedError):
        draw(pipe, steps=6, seeds=(5,), callback_on_step_end=cancel)
    assert torch.equal(draw(pipe, steps=6), expected)


def second_on(pipe: Any) -> Any:
    """Another pipeline on the same model, with a scheduler of its own."""
    parts = dict(pipe.components, scheduler=copy.deepcopy(pipe.scheduler))
    more = {"requires_safety_checker": False} if isinstance(pipe, StableDiffusionPipeline) else {}
    second = type(pipe)(**parts, **more)
    second.set_progress_bar_config(disable=True)
    return second


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("seeds", [(0,), (5,)], ids=["same noise", "other noise"])
def test_a_cancelled_generation_of_another_pipeline_on_the_model_leaves_nothing(
    name: str, after: int, seeds: tuple[int, ...]
) -> None:
    """The session knows neither pipeline; times of the second may follow on those of the first."""
    dense = draw(make(name), steps=6)
    pipe = make(name)
    second = second_on(pipe)

    def cancel(pipe: Any, step: int, time: Any, inputs: dict) -> dict:
        if step == after:
            raise InterruptedError
        return inputs

    tomadiff.apply(denoiser(pipe), interval=2)
    with pytest.raises(InterruptedError):
        draw(pipe, steps=6, seeds=seeds, callback_on_step_end=cancel)
    drawn = draw(second, steps=6)
    bare = make(name)
    tomadiff.apply(denoiser(bare), interval=2)
    # if the same noise is seen as one more call of the same step, some more steps run
    assert distance(drawn, dense) < distance(draw(bare, steps=6), dense) + 1e-5


def test_a_generation_in_the_middle_of_another_one_does_not_disturb_it() -> None:
    dense = [draw(make("sd1"), seeds=(seed,), steps=6) for seed in (0, 1)]
    first = make("sd1")
    second = second_on(first)
    tomadiff.apply(first, interval=2)
    inner: list[Tensor] = []

    def interrupt(pipe: Any, step: int, time: Any, inputs: dict) -> dict:
        if step == 2:
            inner.append(draw(second, seeds=(1,), steps=6))
        return inputs

    outer = draw(first, seeds=(0,), steps=6, callback_on_step_end=interrupt)
    for drawn, expected in zip((outer, inner[0]), dense):
        assert distance(drawn, expected) < 0.2 * distance(dense[0], dense[1])


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_two_pipelines_that_take_turns_at_every_step_draw_their_own_pictures(
    name: str, guidance: float
) -> None:
    """As a server that interleaves requests: every call begins a generation, in which nothing is skipped."""
    dense = [draw(make(name), seeds=(seed,), steps=5, guidance=guidance) for seed in (0, 1)]
    first = make(name)
    pipes = (first, second_on(first))
    tomadiff.apply(first, interval=2)
    turns = (threading.Semaphore(1), threading.Semaphore(0))

    def generate(number: int) -> Tensor:
        mine, others = turns[number], turns[1 - number]

        def pause(pipe: Any, step: int, time: Any, inputs: dict) -> dict:
            others.release()
            assert mine.acquire(timeout=600)
            return {}

        assert mine.acquire(timeout=600)
        try:
            call = {"seeds": (number,), "steps": 5, "guidance": guidance}
            return draw(pipes[number], **call, callback_on_step_end=pause)
        finally:
            others.release()

    with ThreadPoolExecutor(2) as pool:
        drawn = list(pool.map(generate, (0, 1)))
    for mine, expected in zip(drawn, dense):
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    assert tomadiff.report(first).steps["forecast"] == 0


def test_image_to_image_after_text_to_image_starts_anew() -> None:
    def both(pipe: Any, other: Any) -> Tensor:
        tomadiff.apply(other, interval=2)
        embeds = {"prompt_embeds": text(0)[0], "negative_prompt_embeds": text(1)[0]}
        noise = torch.Generator().manual_seed(0)
        return other(
            image=torch.zeros(1, 4, 16, 16),
            strength=0.6,
            num_inference_steps=10,
            output_type="latent",
            generator=noise,
            **embeds,
        ).images

    drawn = []
    for warm in (False, True):
        pipe = make("sd1")
        other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        other.set_progress_bar_config(disable=True)
        if warm:
            tomadiff.apply(pipe, interval=2)
            draw(pipe, steps=4)
        drawn.append(both(pipe, other))
    torch.testing.assert_close(*drawn, atol=1e-5, rtol=1e-5)  # of two models, which may round otherwise


# -- what a forecast rests on ------------------------------------------------------------------------------


def skipped_after(pipe: Any, change: Any, steps: int = 12, at: int = 4) -> list[int]:
    """The steps that ran, of a generation in which something is changed on the way."""

    def turn(pipe: Any, step: int, time: Any, inputs: dict) -> dict:
        return (change(inputs) or {}) if step == at else {}

    names = ["latents", "prompt_embeds"]
    with steps_that_run(pipe) as ran:
        draw(pipe, steps=steps, callback_on_step_end=turn, callback_on_step_end_tensor_inputs=names)
    return sorted(set(ran))


PLAIN = [0, 3, 6, 8, 10, 11]


def test_another_prompt_on_the_way_starts_a_new_history() -> None:
    pipe = tomadiff.apply(make("sd1"), interval=3)
    assert skipped_after(pipe, lambda inputs: None) == PLAIN
    changed = skipped_after(pipe, lambda inputs: {"prompt_embeds": inputs["prompt_embeds"].clone()})
    assert changed == [0, 3, 5, 6, 8, 10, 11], "the step after the change runs, and the next, which is due"


@pytest.mark.parametrize("change", [Tensor.clone, lambda prompt: prompt.mul_(1.1)], ids=["new", "in place"])
def test_the_first_output_is_not_used_for_another_prompt(change: Any) -> None:
    """In step 1, nobody knows whether it was replaced, or is new in every step; in step 2 one does."""
    pipe = tomadiff.apply(make("sd1"), interval=2)
    assert skipped_after(pipe, lambda inputs: None) == [*range(0, 12, 2), 11]
    after = skipped_after(pipe, lambda inputs: {"prompt_embeds": change(inputs["prompt_embeds"])}, at=0)
    assert after == [0, 1, 2, 3, *range(4, 12, 2), 11], "step 3 has only the output of step 2 to go by"


def test_another_prompt_in_the_same_memory_is_noticed() -> None:
    pipe = tomadiff.apply(make("sd1"), interval=3)
    assert 5 in skipped_after(pipe, lambda inputs: {"prompt_embeds": inputs["prompt_embeds"].mul_(1.1)})


def test_another_adapter_scale_on_the_way_starts_a_new_history() -> None:
    pipe = make("sd1")
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "some")
    tomadiff.apply(pipe, interval=3)
    assert skipped_after(pipe, lambda inputs: None) == PLAIN
    assert 5 in skipped_after(pipe, lambda inputs: pipe.unet.set_adapters(["some"], [0.3]))


def test_guidance_that_ends_on_the_way_starts_a_new_history() -> None:
    pipe = tomadiff.apply(make("sd1"), interval=3)

    def end(inputs: dict) -> dict:
        pipe._guidance_scale = 0.0
        return {"prompt_embeds": inputs["prompt_embeds"].chunk(2)[-1]}

    assert 5 in skipped_after(pipe, end)


def test_nothing_is_skipped_under_autograd_or_in_training() -> None:
    model = tomadiff.apply(denoiser(make("flux")), interval=2)
    call = bare_call(model)

    def run() -> int:
        with calls_of(model) as calls:
            for time in (0.9, 0.7, 0.5, 0.3, 0.1):
                model(**call | {"timestep": torch.tensor([time])})
        return len(calls)

    assert run() == 5
    with torch.no_grad():
        assert run() == 3, "the steps 0, 1 and 3; without a scheduler nobody knows the last one"
        model.train()
        assert run() == 5


def test_a_forecast_holds_no_picture_alive_after_removal() -> None:
    pipe = make("sd1")
    gc.collect()
    before = sum(isinstance(each, Tensor) for each in gc.get_objects())
    tomadiff.apply(pipe, interval=2)
    draw(pipe, steps=6)
    tomadiff.remove(pipe)
    gc.collect()
    after = sum(isinstance(each, Tensor) for each in gc.get_objects())
    assert after <= before + 2


# -- beside others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["compiled before", "compiled after", "model.compile before", "model.compile after"]
)
def test_compiled_models_are_skipped_too(how: str) -> None:
    expected = fresh("flux", steps=6)
    pipe = make("flux")

    def compiled() -> None:
        torch.compiler.reset()
        if how.startswith("model"):
            pipe.transformer.compile(fullgraph=True, backend="eager")
        else:
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")

    if how.endswith("before"):
        compiled()
    tomadiff.apply(pipe, interval=2)
    if how.endswith("after"):
        compiled()
    torch.testing.assert_close(draw(pipe, steps=6), expected, atol=1e-4, rtol=1e-4)
    assert tomadiff.report(pipe).steps == {"run": 4, "forecast": 2}


def test_an_offloaded_model_stays_where_it_is_in_skipped_steps() -> None:
    expected = fresh("sd1", steps=6)
    pipe = make("sd1")
    pipe.enable_model_cpu_offload(device="cpu")  # without a GPU, from memory to memory
    tomadiff.apply(pipe, interval=2)
    moved: list[int] = []
    hook = pipe.unet._hf_hook
    pre_forward = hook.pre_forward
    hook.pre_forward = lambda *args, **kwargs: moved.append(1) or pre_forward(*args, **kwargs)
    torch.testing.assert_close(draw(pipe, steps=6), expected, atol=1e-5, rtol=1e-5)
    assert len(moved) == 4


def test_guidance_in_two_calls_has_two_histories() -> None:
    pipe = make("flux")
    assert isinstance(pipe, FluxPipeline)
    tomadiff.apply(pipe, interval=2)
    draw(pipe, steps=6, guidance=3.0)
    report = tomadiff.report(pipe)
    assert report.steps == {"run": 4, "forecast": 2} and report.model_calls == {"run": 8, "forecast": 4}
