"""Compare dense images of the embedded models with forecast and merged ones, in every mode of the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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

from .finding import Finding, dtypes_of, name_of

REQUEST = Request("pizza on yellow", seed=0, steps=12, guidance=1.0)
# The least PSNR to the dense image, in dB, that passes. On a CPU in fp32, the two models have 49 dB with
# forecasts, and 39 and 37 dB when merged.
FORECAST, MERGED = 32.0, 24.0
# The least PSNR between the same settings with and without kernels, or with and without compilation: rounding
# may change a destination.
SAME = 26.0
MODES: dict[str, tuple[dict[str, Any], float]] = {  # settings, and the least PSNR that passes
    "forecast": ({}, FORECAST),
    "merged": (MERGING, MERGED),
}


def pictures_are_close(device: torch.device) -> Iterator[Finding]:
    """In every dtype of the device; merged images also without kernels."""
    for name in EMBEDDED:
        for dtype in dtypes_of(device):
            pipe = _loaded(name, device, dtype)
            dense = _draw(pipe)
            for mode, (settings, bar) in MODES.items():
                with tomadiff.merged(pipe, **settings):
                    picture = _draw(pipe)
                    distance = decibels(picture, dense)
                    yield _close(f"{name} in {name_of(dtype)}, {mode}", distance, bar, "the dense picture")
            if device.type == "cuda":
                with _kernels("0"), tomadiff.merged(pipe, **MODES["merged"][0]):
                    distance = decibels(_draw(pipe), picture)
                what = f"{name} in {name_of(dtype)}, merged without kernels"
                yield _close(what, distance, SAME, "the one with kernels")


def compiled_pictures_are_the_same(device: torch.device) -> Iterator[Finding]:
    """With inductor on CUDA; on other devices, only tracing is checked."""
    backend = "inductor" if device.type == "cuda" else "eager"
    dtype = dtypes_of(device)[-1]
    for name in EMBEDDED:
        pipe = _loaded(name, device, dtype)
        for mode, (settings, _) in MODES.items():
            what = f"{name} in {name_of(dtype)}, {mode}, compiled"
            with tomadiff.merged(pipe, **settings):
                plain = _draw(pipe)
            try:
                with tomadiff.merged(pipe, **settings):
                    denoiser(pipe)[0].compile(backend=backend)
                    distance = decibels(_draw(pipe), plain)
            except Exception as error:
                yield Finding(what, False, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            else:
                yield _close(what, distance, SAME, "the one that is not compiled")
            pipe = _loaded(name, device, dtype)
            torch.compiler.reset()


def steps_dont_wait_for_the_device(device: torch.device) -> Iterator[Finding]:
    """From the second step on, neither a forecast nor merging may make the host wait."""
    if device.type != "cuda":
        yield Finding("waiting for the device", None, "only CUDA can tell whether the host waits for it")
        return
    for name in EMBEDDED:
        pipe = _loaded(name, device, torch.float16)
        for mode, (settings, _) in MODES.items():
            with tomadiff.merged(pipe, **settings):
                _draw(pipe)  # autotuning, probing and compiling may wait
                try:
                    with waiting_forbidden(pipe):
                        _draw(pipe)
                except RuntimeError as error:
                    reason = str(error).strip().splitlines()[0]
                    yield Finding(f"waiting for the device, {name}, {mode}", False, reason)
                else:
                    words = "the host never waits in a call of the model after the first step"
                    yield Finding(f"waiting for the device, {name}, {mode}", True, words)


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


def _loaded(name: str, device: torch.device, dtype: torch.dtype) -> EmojiPipeline:
    pipe = load_embedded(name, dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _draw(pipe: EmojiPipeline) -> Image.Image:
    return draw(pipe, REQUEST)[0]


@contextmanager
def _kernels(setting: str) -> Iterator[None]:
    before = os.environ.get("TOMADIFF_KERNELS", "auto")
    os.environ["TOMADIFF_KERNELS"] = setting
    try:
        yield
    finally:
        os.environ["TOMADIFF_KERNELS"] = before


def _close(what: str, distance: float, bar: float, to: str) -> Finding:
    words = f"{distance:.1f} dB to {to}, expected are at least {bar:g}"
    return Finding(what, distance >= bar, words, {"psnr": min(distance, 999.0), "at_least": bar})
