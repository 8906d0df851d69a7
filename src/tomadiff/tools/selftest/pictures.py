"""Compare dense images of the embedded models with forecast and merged ones, in every mode of the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from PIL import Image

import tomadiff
from tomadiff.runtime.registration import denoiser
from tomadiff.tools.demo.embedded import EMBEDDED, MERGING, load_embedded
from tomadiff.tools.demo.pipelines import EmojiPipeline
from tomadiff.tools.evaluate.metrics import psnr
from tomadiff.tools.evaluate.pictures import as_tensor
from tomadiff.tools.generate import Request, draw

from .finding import Finding, dtypes_of, left_out, name_of, time_is_over

REQUEST = Request("pizza on yellow", seed=0, steps=12, guidance=1.0)
# The least PSNR to the dense image, in dB, that passes. On a CPU in fp32, the two models have 49 dB with
# forecasts, and 39 and 37 dB when merged.
FORECAST, MERGED = 32.0, 24.0
# The least PSNR between the same settings with and without kernels: rounding may change a destination.
SAME = 26.0
MODES: dict[str, tuple[dict[str, Any], float]] = {  # settings, and the least PSNR that passes
    "forecast": ({}, FORECAST),
    "merged": (MERGING, MERGED),
}


def pictures_are_close(device: torch.device) -> Iterator[Finding]:
    """In every dtype of the device; merged images also without kernels."""
    for name, dtype in product(EMBEDDED, dtypes_of(device)):
        what = f"{name} in {name_of(dtype)}"
        if time_is_over():
            yield left_out(what)
            continue
        pipe = loaded(name, device, dtype)
        dense = draw_with(pipe)
        for mode, (settings, bar) in MODES.items():
            with tomadiff.merged(pipe, **settings):
                picture = draw_with(pipe)
                yield close(f"{what}, {mode}", decibels(picture, dense), bar, "the dense picture")
        if device.type == "cuda":
            with kernels_set_to("0"), tomadiff.merged(pipe, **MODES["merged"][0]):
                distance = decibels(draw_with(pipe), picture)
            yield close(f"{what}, merged without kernels", distance, SAME, "the one with kernels")


def steps_dont_wait_for_the_device(device: torch.device) -> Iterator[Finding]:
    """From the second step on, neither a forecast nor merging may make the host wait, in any half dtype."""
    if device.type != "cuda":
        yield Finding("waiting for the device", None, "only CUDA can tell whether the host waits for it")
        return
    half = [dtype for dtype in dtypes_of(device) if dtype != torch.float32]
    for name, dtype in product(EMBEDDED, half):
        what = f"waiting for the device, {name} in {name_of(dtype)}"
        if time_is_over():
            yield left_out(what)
            continue
        pipe = loaded(name, device, dtype)
        for mode, (settings, _) in MODES.items():
            with tomadiff.merged(pipe, **settings):
                draw_with(pipe)  # autotuning, probing and compiling may wait
                try:
                    with waiting_forbidden(pipe):
                        draw_with(pipe)
                except RuntimeError as error:
                    reason = str(error).strip().splitlines()[0]
                    yield Finding(f"{what}, {mode}", False, reason)
                else:
                    words = "the host never waits in a call of the model after the first step"
                    yield Finding(f"{what}, {mode}", True, words)


@contextmanager
def waiting_forbidden(pipe: EmojiPipeline) -> Iterator[None]:
    """Make device syncs an error in calls of the model from the second on; pipelines may still sync."""
    model = denoiser(pipe)[0]
    session, first = model._compiled_call_impl, True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        torch.cuda.set_sync_debug_mode("default" if first else "error")
        first = False
        try:
            return session(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    model._compiled_call_impl = call
    try:
        yield
    finally:
        model._compiled_call_impl = session


def decibels(picture: Image.Image, other: Image.Image) -> float:
    return float(psnr(as_tensor([picture]), as_tensor([other])))


def loaded(name: str, device: torch.device, dtype: torch.dtype) -> EmojiPipeline:
    pipe = load_embedded(name, dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_with(pipe: EmojiPipeline) -> Image.Image:
    return draw(pipe, REQUEST)[0]


@contextmanager
def kernels_set_to(setting: str) -> Iterator[None]:
    before = os.environ.get("TOMADIFF_KERNELS", "auto")
    os.environ["TOMADIFF_KERNELS"] = setting
    try:
        yield
    finally:
        os.environ["TOMADIFF_KERNELS"] = before


def close(what: str, distance: float, bar: float, to: str) -> Finding:
    words = f"{distance:.1f} dB to {to}, expected are at least {bar:g}"
    return Finding(what, distance >= bar, words, {"psnr": min(distance, 999.0), "at_least": bar})
