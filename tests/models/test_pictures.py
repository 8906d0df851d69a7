"""What is particular to pictures: references beside them, and batches that can't be merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import mostly_alike
from diffusers import StableCascadeCombinedPipeline
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from tiny import build, tiny
from torch import nn

import tomadiff
from tomadiff.errors import ConfigError, UnsupportedModelError


def made(name: str, seeds: tuple[int, ...] = (0, 1)) -> tuple[nn.Module, dict[str, Any]]:
    case = tiny(name)
    model = build(case)
    return tomadiff.apply(model, ratio=0.5, dense_blocks=0), case.call(model, (8, 8), seeds, 0.5)


@torch.no_grad()
def test_calls_that_read_a_reference_stay_dense() -> None:
    model, call = made("glm_image", (0,))
    caches = GlmImageKVCache(num_layers=2)
    caches.set_mode("write")
    model(**call, kv_caches=caches)
    assert caches[0].k_caches[0].shape[1] == 64 + 7, "all tokens of the reference, and its text"
    caches.set_mode("read")
    model(**call | {"timestep": torch.tensor([400.0])}, kv_caches=caches)
    assert {(s.calls, s.dense_calls, s.kept) for s in tomadiff.report(model).sites} == {(2, 1, 32)}


@torch.no_grad()
def test_pictures_that_start_at_different_places_are_refused() -> None:
    model, call = made("lumina2")
    model(**call)
    lengths = torch.tensor([[3], [5]])
    with pytest.raises(ConfigError, match="prompts of different lengths one by one"):
        model(**call | {"encoder_attention_mask": torch.arange(7) < lengths})


@torch.no_grad()
def test_prompts_of_different_lengths_behind_the_picture_are_fine() -> None:
    model, call = made("z_image")
    long = [call["cap_feats"][0], torch.cat([call["cap_feats"][1]] * 6)]  # 7 tokens, and 42
    together = model(**call | {"cap_feats": long}, return_dict=False)[0]
    alone = [
        model(**call | {"x": [x], "cap_feats": [words], "t": call["t"][:1]}, return_dict=False)[0][0]
        for x, words in zip(call["x"], long)
    ]
    assert mostly_alike(torch.stack(alone), torch.stack(together))


@torch.no_grad()
def test_pictures_of_different_sizes_in_a_batch_are_refused() -> None:
    model, call = made("z_image")
    with pytest.raises(UnsupportedModelError, match="one size"):
        model(**call | {"x": [call["x"][0], call["x"][1][..., :8]]})
    with pytest.raises(UnsupportedModelError, match="omni"):
        model(**call | {"x": [[x] for x in call["x"]]})


@torch.no_grad()
def test_block_sparse_attention_is_refused() -> None:
    model, call = made("kandinsky5", (0,))
    with pytest.raises(ConfigError, match="attention_type"):
        model(**call, sparse_params={"to_fractal": False, "sta_mask": None, "P": 0.5})


def test_a_model_for_guidance_is_merged_and_set_free() -> None:
    """Ideogram 4 asks another one than for the prompt, without text."""
    case = tiny("ideogram4")
    pipe = case.pipeline(build(case))
    pipe.set_progress_bar_config(disable=True)
    call = case.request((0,)) | {"num_inference_steps": 2, "output_type": "latent"}
    dense = pipe(**call).images
    with tomadiff.merged(pipe, ratio=0.5, dense_blocks=0):
        pipe(**call)
        calls = {site.name: (site.tokens, site.kept, site.calls) for site in tomadiff.report(pipe).sites}
    layers = ("layers.0", "layers.1")
    names = (*layers, *(f"unconditional_transformer.{layer}" for layer in layers))
    assert calls == dict.fromkeys(names, (64, 32, 2))
    assert torch.equal(pipe(**call).images, dense)


@torch.no_grad()
def test_sides_that_a_model_cuts_off_are_not_merged() -> None:
    """Stable Cascade's decoder makes 4 x 5 of 9 x 11."""
    case = tiny("stable_cascade_decoder")
    model = tomadiff.apply(build(case), ratio=0.5)
    model(**case.call(model, (9, 11), (0,), 0.5))
    assert {(site.tokens, site.calls) for site in tomadiff.report(model).sites} == {(4 * 5, 1)}


def test_stable_cascade_in_one_pipeline_is_taken_by_its_two() -> None:
    prior, decoder = build(tiny("stable_cascade")), build(tiny("stable_cascade_decoder"))
    names = ("tokenizer", "text_encoder", "scheduler", "vqgan", "prior_text_encoder", "prior_tokenizer")
    names += ("prior_scheduler", "prior_feature_extractor", "prior_image_encoder")
    pipe = StableCascadeCombinedPipeline(**dict.fromkeys(names), decoder=decoder, prior_prior=prior)
    with pytest.raises(UnsupportedModelError, match="its prior_pipe and its decoder_pipe, one by one"):
        tomadiff.apply(pipe, ratio=0.5)
    for part in (pipe.prior_pipe, pipe.decoder_pipe):
        tomadiff.apply(part, ratio=0.5)
    assert tomadiff.report(prior).sites and tomadiff.report(decoder).sites
