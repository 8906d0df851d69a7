"""A small pipeline of SDXL's architecture with random weights: no pictures, but real tokens and real times."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

import tomadiff

STEPS, ROUNDS, RATIOS = 5, 3, (0.25, 0.5, 0.75)


def pipeline() -> StableDiffusionXLPipeline:
    unet = UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        attention_head_dim=(2, 4, 8),
        transformer_layers_per_block=(1, 2, 4),
        use_linear_projection=True,
        cross_attention_dim=128,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=64 + 6 * 32,
    )
    vae = AutoencoderKL(block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4)
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    pipe = StableDiffusionXLPipeline(
        vae=vae, unet=unet, scheduler=EulerDiscreteScheduler(), add_watermarker=False, **parts
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(args: argparse.Namespace) -> None:
    """Time a small random SDXL pipeline, dense and merged, and print the report."""
    torch.manual_seed(0)
    pipe = pipeline()
    embeds = {"prompt_embeds": torch.randn(1, 77, 128), "pooled_prompt_embeds": torch.randn(1, 64)}

    def seconds(ratio: float) -> float:
        with tomadiff.merged(pipe, ratio=ratio):
            start = time.perf_counter()
            pipe(**embeds, guidance_scale=1.0, num_inference_steps=STEPS, output_type="latent")
            return time.perf_counter() - start

    seconds(0)  # warm up
    rounds = [{ratio: seconds(ratio) for ratio in (0, *RATIOS)} for _ in range(ROUNDS)]
    print(f"512 x 512, {STEPS} steps, random weights, {torch.get_num_threads()} threads; medians of {ROUNDS} rounds")
    print(f"  dense       {statistics.median(r[0] for r in rounds):.2f} s")
    for ratio in RATIOS:
        took = statistics.median(r[ratio] for r in rounds)
        speedup = statistics.median(r[0] / r[ratio] for r in rounds)
        print(f"  ratio {ratio:.2f}  {took:.2f} s  {speedup:.2f}x")
    tomadiff.apply(pipe, ratio=0.5)
    pipe(**embeds, guidance_scale=1.0, num_inference_steps=STEPS, output_type="latent")
    print(tomadiff.report(pipe))
