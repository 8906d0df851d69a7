"""Schedulers say whether they add noise, and are run to see whether that is true."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import re
import weakref
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from comparison import alike
from denoising_loops import MASK, Case, draws_tokens, loop
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusionPanoramaPipeline,
    TCDScheduler,
)
from pipelines import bare_call, draw, make, text

import tomadiff
from tomadiff.runtime.sampling import (
    SCHEDULERS,
    FirstStepWatch,
    sampling_of,
    watch_first_step,
)

NO_SCHEDULERS = {"Mel": "spectrograms, which only load and save like a scheduler"}

RFD4 = {"schedule_mode": "power", "noise_mode": "1/t", "tsr_k": 1.0, "tsr_sigma": 1.0, "tail_steps": 1}
HELIOS = {"stages": 1, "stage_range": [0, 1]}
TOKENS = {"mask_token_id": MASK}
SDE = {"algorithm_type": "sde-dpmsolver++"}
OLD_SDE = {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min"}
FEW = {"num_train_timesteps": 100}  # some take a second to be made with 1000
CHURN, ETA = {"s_churn": 4.0}, {"eta": 0.5}


def no_tau(time: Any) -> float:
    return 0.0


CASES = [
    Case("AmusedScheduler", TOKENS),
    Case("BlockRefinementScheduler"),
    Case("BlockRefinementScheduler", {}, TOKENS | {"temperature": 1.0}),
    Case("CMStochasticIterativeScheduler"),
    Case("CMStochasticIterativeScheduler", {"s_noise": 0.0}),
    Case("CogVideoXDDIMScheduler"),
    Case("CogVideoXDDIMScheduler", {}, ETA),
    Case("CogVideoXDPMScheduler"),
    Case("CogVideoXDPMScheduler", {}, ETA),
    Case("ConsistencyDecoderScheduler"),
    Case("CosineDPMSolverMultistepScheduler"),
    Case("CosineDPMSolverMultistepScheduler", {"solver_order": 1}),
    Case("DDIMInverseScheduler"),
    Case("DDIMParallelScheduler"),
    Case("DDIMParallelScheduler", {}, ETA),
    Case("DDIMScheduler"),
    Case("DDIMScheduler", {}, ETA),
    Case("DDPMParallelScheduler"),
    Case("DDPMScheduler"),
    Case("DDPMWuerstchenScheduler"),
    Case("DEISMultistepScheduler"),
    Case("DEISMultistepScheduler", {"solver_order": 1}),
    Case("DEISMultistepScheduler", {"solver_order": 3}),
    Case("DPMSolverMultistepInverseScheduler"),  # whose SDE variants give NaN
    Case("DPMSolverMultistepScheduler"),
    Case("DPMSolverMultistepScheduler", {"solver_order": 1}),
    Case("DPMSolverMultistepScheduler", {"solver_order": 3}),
    Case("DPMSolverMultistepScheduler", SDE),
    Case("DPMSolverMultistepScheduler", OLD_SDE),
    Case("DPMSolverSDEScheduler"),
    Case("DPMSolverSDEScheduler", {}, {"s_noise": 0.0}),
    Case("DPMSolverSinglestepScheduler"),
    Case("DPMSolverSinglestepScheduler", {"solver_order": 1}),
    Case("DPMSolverSinglestepScheduler", {"solver_order": 3}),
    Case("DPMSolverSinglestepScheduler", SDE),
    Case("DiscreteDDIMScheduler"),
    Case("EDMDPMSolverMultistepScheduler"),
    Case("EDMDPMSolverMultistepScheduler", {"solver_order": 1}),
    Case("EDMDPMSolverMultistepScheduler", SDE),
    Case("EDMEulerScheduler"),
    Case("EDMEulerScheduler", {}, CHURN),
    Case("EntropyBoundScheduler"),
    Case("EulerAncestralDiscreteScheduler"),
    Case("EulerDiscreteScheduler"),
    Case("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    Case("EulerDiscreteScheduler", {}, CHURN),
    Case("EulerDiscreteScheduler", {}, CHURN | {"s_noise": 0.0}),
    Case("FlowMapEulerDiscreteScheduler"),
    Case("FlowMatchEulerDiscreteScheduler"),
    Case("FlowMatchEulerDiscreteScheduler", {}, CHURN),
    Case("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    Case("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, {"s_noise": 0.0}),
    Case("FlowMatchHeunDiscreteScheduler"),
    Case("FlowMatchHeunDiscreteScheduler", {}, CHURN),
    Case("FlowMatchLCMScheduler"),
    Case("HeliosDMDScheduler", HELIOS),
    Case("HeliosScheduler", HELIOS),
    Case("HeliosScheduler", HELIOS | {"scheduler_type": "euler"}),
    Case("HeunDiscreteScheduler"),
    Case("IPNDMScheduler"),
    Case("KDPM2AncestralDiscreteScheduler", FEW),
    Case("KDPM2DiscreteScheduler", FEW),
    Case("KarrasVeScheduler"),
    Case("KarrasVeScheduler", {"s_churn": 0.0}),
    Case("LCMScheduler"),
    Case("LMSDiscreteScheduler"),
    Case("LTXEulerAncestralRFScheduler"),
    Case("LTXEulerAncestralRFScheduler", {"eta": 0.0}),
    Case("LTXEulerAncestralRFScheduler", {"s_noise": 0.0}),
    Case("MiniMaxH3Scheduler"),
    Case("PNDMScheduler"),
    Case("PNDMScheduler", {"skip_prk_steps": True}),
    Case("PiflowScheduler"),
    Case("RFD4ProteinaScheduler", RFD4),
    Case("RFD4ProteinaScheduler", RFD4 | {"t_lim_ode": 0.0}),
    Case("RePaintScheduler"),
    Case("RePaintScheduler", {"eta": 1.0}),
    Case("SASolverScheduler"),
    Case("SASolverScheduler", {"tau_func": no_tau}),
    Case("SCMScheduler"),
    Case("ScoreSdeVeScheduler"),
    Case("ScoreSdeVeScheduler", {"correct_steps": 0}),
    Case("ScoreSdeVpScheduler"),
    Case("TCDScheduler"),
    Case("TCDScheduler", {}, {"eta": 0.0}),
    Case("UnCLIPScheduler"),
    Case("UniPCMultistepScheduler"),
    Case("UniPCMultistepScheduler", {"solver_order": 1}),
    Case("VQDiffusionScheduler", {"num_vec_classes": MASK + 1}),
]


def test_every_scheduler_of_diffusers_is_known_and_run_here() -> None:
    """Read from the source: some are not exported, and some need packages that may be missing."""
    pattern = re.compile(r"^class (\w+)\([^)]*(?:SchedulerMixin|Scheduler)\b[^)]*\):", re.MULTILINE)
    sources = [path.read_text("utf8") for path in Path(diffusers.__file__).parent.rglob("*.py")]
    names = {name for source in sources for name in pattern.findall(source)}
    names = {name for name in names if not name.startswith("Flax")} - set(NO_SCHEDULERS)
    assert len(names) > 40
    assert names <= set(SCHEDULERS)
    assert names <= {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pictures_depend_on_random_numbers_after_the_first_step_if_the_scheduler_adds_noise(
    case: Case,
) -> None:
    one = loop(case, lambda step: 100 + step)
    path = one.path()
    same = 1 if len(one.times) > 2 else 0  # two steps have noise between them, but none at the end
    other = loop(case, lambda step: 100 + step if step < same else 200 + step).path()
    assert torch.equal(path[same], other[same])
    assert path[-1].isfinite().all()
    found = sampling_of(one.scheduler, case.arguments)
    assert found.known and found.scheduler == case.name
    assert torch.equal(path[-1], other[-1]) == found.deterministic, found.noise


def test_greedily_picked_tokens_jump_and_count_as_drawn() -> None:
    case = Case("BlockRefinementScheduler", {}, TOKENS)
    path, other = (loop(case, lambda step, first=first: first + step).path() for first in (0, 9))
    assert torch.equal(path[-1], other[-1])
    assert not sampling_of(case.scheduler(), TOKENS).deterministic


def calls_of_a_step(case: Case) -> int:
    """How many calls of the model a solver needs from one point of the path to the next."""
    return case.config.get("solver_order", 4 if "PNDM" in case.name else 2)


@pytest.mark.parametrize("case", [case for case in CASES if not draws_tokens(case)], ids=str)
def test_solvers_that_call_the_model_between_steps_are_known(case: Case) -> None:
    """Begin anew in the middle: they notice it between steps only. Others notice it always, or never."""
    whole = loop(case, lambda step: step)
    path, between_steps = whole.path(), sampling_of(whole.scheduler).between_steps
    # all calls of a step are in one turn of the loop
    if case.name in ("KarrasVeScheduler", "ScoreSdeVeScheduler"):
        assert between_steps == (whole.calls >= 2 * len(whole.times) - 1)
        return
    assert whole.calls == len(whole.times)
    fresh, unnoticed = loop(case, lambda step: step), []
    for step in range(1, min(6, len(whole.times) - 1)):  # the last steps of many solvers are of a lower order
        anew = copy.deepcopy(fresh)
        anew.begin_at(step)
        result = anew.one_step(step, path[step])
        unnoticed.append(torch.allclose(result.float(), path[step + 1].float(), rtol=1e-4, atol=1e-5))
    at_steps = [step % calls_of_a_step(case) == 0 for step in range(1, len(unnoticed) + 1)]
    if between_steps:
        assert unnoticed == at_steps
    else:
        assert all(unnoticed) or not any(unnoticed)


class Subclass(EulerDiscreteScheduler):
    pass


class KDPM2DiscreteScheduler:
    """A user's own, of the same name as one of diffusers'."""

    order = 2


@pytest.mark.parametrize("scheduler", [Subclass(), KDPM2DiscreteScheduler()], ids=lambda s: type(s).__name__)
def test_a_class_of_the_users_is_not_known_and_may_add_noise(scheduler: Any) -> None:
    found = sampling_of(scheduler)
    assert not found.known and not found.deterministic
    assert found.noise == f"{type(scheduler).__name__} is not known and may add noise at every step"
    assert found.between_steps == (scheduler.order == 2)
    assert watch_first_step(scheduler) is None


def test_a_step_that_somebody_replaced_is_not_known() -> None:
    scheduler = EulerDiscreteScheduler()
    scheduler.step = scheduler.step
    assert not sampling_of(scheduler).known
    assert watch_first_step(scheduler) is None


def test_without_a_scheduler_nobody_knows() -> None:
    found = sampling_of(None)
    assert found.scheduler == "" and not found.known and not found.deterministic
    assert watch_first_step(None) is None


def test_reasons_read_well() -> None:
    assert sampling_of(EulerAncestralDiscreteScheduler()).noise == "Euler ancestral adds noise at every step"
    assert sampling_of(DDIMScheduler(), {"eta": 0.3}).noise == "eta=0.3 adds noise at every step"
    assert sampling_of(TCDScheduler()).noise == "eta=0.3 adds noise at every step"
    assert (
        sampling_of(EulerDiscreteScheduler(), {"s_churn": 10}).noise == "s_churn=10 adds noise at every step"
    )
    assert sampling_of(DPMSolverMultistepScheduler(**SDE)).noise == "sde-dpmsolver++ adds noise at every step"


def ddim() -> Any:
    """A pipeline whose random numbers matter, if eta does."""
    pipe = make("sd1")
    pipe.scheduler = DDIMScheduler()
    return pipe


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_the_watch_sees_the_eta_of_a_pipelines_call_and_changes_nothing(eta: float) -> None:
    pipe = ddim()
    expected = draw(pipe, eta=eta, generator=seeded(), steps=3)
    watch = watch_first_step(pipe.scheduler)
    assert watch.arguments is None
    assert torch.equal(draw(pipe, eta=eta, generator=seeded(), steps=3), expected)
    assert watch.arguments == {"eta": eta}
    assert sampling_of(pipe.scheduler, watch.arguments).deterministic == (eta == 0)
    assert "step" not in vars(pipe.scheduler)


def test_the_watch_sees_that_a_pipeline_overrules_the_schedulers_own_eta() -> None:
    pipe = make("sd1")
    pipe.scheduler = TCDScheduler()
    assert not sampling_of(pipe.scheduler).deterministic
    watch = watch_first_step(pipe.scheduler)
    draw(pipe, steps=3)
    assert sampling_of(pipe.scheduler, watch.arguments).deterministic


def one_step(scheduler: Any, *more: Any, sample: Any = None) -> torch.Tensor:
    """The first of four, by positional arguments."""
    sample = torch.linspace(-1, 1, 16).view(1, 1, 4, 4) if sample is None else sample
    return scheduler.step(sample.tanh(), scheduler.timesteps[0], sample, *more).prev_sample


def watched() -> tuple[Any, FirstStepWatch]:
    scheduler = EulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    watch = watch_first_step(scheduler)
    assert isinstance(watch, FirstStepWatch) and scheduler.step is watch
    return scheduler, watch


def test_positional_arguments_are_seen_by_their_names() -> None:
    scheduler, watch = watched()
    one_step(scheduler, 2.0)
    assert watch.arguments == {"s_churn": 2.0}


def test_a_watched_scheduler_is_known_and_has_the_same_signature() -> None:
    scheduler, _ = watched()
    assert inspect.signature(scheduler.step) == inspect.signature(EulerDiscreteScheduler().step)
    assert sampling_of(scheduler).known


def test_the_watch_goes_off_once_and_removing_it_again_is_harmless() -> None:
    scheduler, watch = watched()
    watch.remove()
    watch.remove()
    assert "step" not in vars(scheduler)
    again = watch_first_step(scheduler)
    watch.remove()
    assert scheduler.step is again
    one_step(scheduler)
    again.remove()
    assert again.arguments == {} and watch.arguments is None


def test_a_generation_that_ends_before_the_schedulers_first_step_leaves_no_watch() -> None:
    """Because its model fails, or because another begins, with another scheduler."""
    pipe = make("sd1")
    first = pipe.scheduler = DDIMScheduler()
    tomadiff.apply(pipe, interval=2)
    first.set_timesteps(4)
    call = bare_call(pipe.unet)
    with torch.no_grad():
        with pytest.raises(TypeError):
            pipe.unet(**call | {"no": "argument"})
        assert "step" not in vars(first)
        for time in first.timesteps[:2]:
            pipe.unet(**call | {"timestep": time})
        assert "step" in vars(first)
        pipe.scheduler = DDIMScheduler()
        pipe.scheduler.set_timesteps(4)
        pipe.unet(**call | {"timestep": first.timesteps[0]})
    assert "step" not in vars(first)


def test_a_step_that_fails_leaves_no_watch() -> None:
    scheduler, watch = watched()
    with pytest.raises(ValueError, match="integer indices"):
        scheduler.step(torch.zeros(1), 3, torch.zeros(1))
    assert "step" not in vars(scheduler) and watch.arguments is None


def test_two_models_with_one_scheduler_share_a_watch() -> None:
    scheduler, watch = watched()
    assert watch_first_step(scheduler) is watch


def test_a_step_function_that_somebody_kept_goes_on_working() -> None:
    scheduler, _ = watched()
    step, sample = scheduler.step, torch.ones(1, 4)
    for time in scheduler.timesteps:
        sample = step(sample, time, sample).prev_sample
    assert scheduler.step_index == 4


def test_a_wrapper_around_the_watch_is_called_once_a_step() -> None:
    scheduler, watch = watched()
    seen = []

    def wrapper(*args: Any) -> Any:
        seen.append(args)
        return watch(*args)

    scheduler.step = wrapper
    one_step(scheduler, 2.0)
    assert len(seen) == 1 and watch.arguments == {"s_churn": 2.0}
    assert scheduler.step is wrapper


@pytest.mark.parametrize("of_the_pipeline", [False, True], ids=["scheduler", "pipeline"])
def test_a_copy_steps_by_itself_and_has_a_watch_of_its_own(of_the_pipeline: bool) -> None:
    pipe = make("sd1")
    pipe.scheduler, watch = watched()
    twin = copy.deepcopy(pipe).scheduler if of_the_pipeline else copy.deepcopy(pipe.scheduler)
    one_step(twin, 2.0)
    assert (twin.step_index, pipe.scheduler.step_index) == (1, None)
    assert pipe.scheduler.step is watch and watch.arguments is None
    assert "step" not in vars(twin)


def test_a_copied_watch_belongs_to_the_copied_scheduler_whichever_is_found_first() -> None:
    scheduler, watch = watched()
    for one, other in ((scheduler, watch), (watch, scheduler)):
        both = copy.deepcopy([one, other])
        twin, twins_watch = both if one is scheduler else reversed(both)
        assert twins_watch.scheduler is twin and twin.step is twins_watch is not watch


def test_panoramas_that_copy_the_schedulers_state_alone_draw_the_same() -> None:
    def pictures(watching: bool) -> torch.Tensor:
        pipe = make("sd1")
        pipe = StableDiffusionPanoramaPipeline(**pipe.components, requires_safety_checker=False)
        pipe.set_progress_bar_config(disable=True)
        pipe.get_views = functools.partial(pipe.get_views, window_size=8, stride=8)
        if watching:
            assert watch_first_step(pipe.scheduler)
        call = {"prompt_embeds": text(0)[0], "negative_prompt_embeds": text(1)[0], "output_type": "latent"}
        size = {"height": 64, "width": 128, "num_inference_steps": 2}
        return pipe(**call, **size, generator=seeded()).images

    assert alike(pictures(watching=True), pictures(watching=False))


def test_configs_and_saved_schedulers_know_nothing_of_the_watch(tmp_path: Path) -> None:
    scheduler, _ = watched()
    plain = EulerDiscreteScheduler()
    assert EulerDiscreteScheduler.from_config(scheduler.config).config == plain.config
    scheduler.save_pretrained(tmp_path / "watched")
    plain.save_pretrained(tmp_path / "plain")
    saved = [(tmp_path / folder / "scheduler_config.json").read_text() for folder in ("watched", "plain")]
    assert saved[0] == saved[1]


def test_the_watch_keeps_neither_pipelines_nor_pictures_alive() -> None:
    pipe = make("sd1")
    pipe.scheduler, watch = watched()
    pipeline, scheduler = weakref.ref(pipe), weakref.ref(pipe.scheduler)
    sample = torch.ones(1, 1, 4, 4)
    picture = weakref.ref(sample)
    one_step(pipe.scheduler, sample=sample)
    del pipe, sample
    gc.collect()
    assert watch.arguments == {} and pipeline() is None and picture() is None
    del watch
    gc.collect()
    assert scheduler() is None


@pytest.mark.parametrize(
    "kind",
    [CogVideoXDDIMScheduler, EulerAncestralDiscreteScheduler, FlowMatchEulerDiscreteScheduler],
    ids=lambda kind: kind.__name__,
)
def test_no_watch_where_arguments_of_the_step_decide_nothing(kind: type) -> None:
    scheduler = kind()
    assert watch_first_step(scheduler) is None
    assert "step" not in vars(scheduler)
