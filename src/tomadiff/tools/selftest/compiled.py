"""The same in compiled code: by inductor on CUDA; on other devices, only tracing is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from diffusers import SanaTransformer2DModel
from torch import Tensor, nn

import tomadiff
from tomadiff.errors import reason
from tomadiff.runtime.registration import denoiser
from tomadiff.tools.demo.embedded import EMBEDDED

from .finding import Finding, dtypes_of, left_out, name_of, time_is_over
from .kernels import no_kernels
from .pictures import MODES, close, decibels, draw_with, kernels_set_to, loaded

# One block of Sana: merging is inside of it, between transposed convolutions, and outputs of operators are
# kept from step to step, which must survive that a compiler reuses memory.
SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 1,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 64,
    "caption_channels": 32,
    "sample_size": 16,
    "patch_size": 1,
}
SETTINGS: dict[str, Any] = {"ratio": 0.5, "dense_blocks": 0, "refresh_destinations": 3, "refresh_weights": 3}
TIMES = (900.0, 600.0, 300.0)  # with one plan
# Merging changes the outputs by 0.05, other destinations, which rounding may choose, by up to half of it.
DESTINATIONS = 0.03

Mode = tuple[torch.dtype, str]  # and what TOMADIFF_KERNELS is set to


def compiled_model_equals_core(device: torch.device) -> Iterator[Finding]:
    """A small model, compiled, gives the same with kernels as with core, and as if it were not compiled."""
    if failed := no_compiler(device):
        yield Finding("compiled model", None, failed)
        return
    for dtype in dtypes_of(device):
        what = f"compiled model in {name_of(dtype)}"
        if time_is_over():
            yield left_out(what)
            continue
        model = _small_model(device, dtype)
        rounding = max(2 * torch.finfo(dtype).eps, 1e-3)  # the user may have TF32 switched on
        try:
            with kernels_set_to("0"), tomadiff.merged(model, **SETTINGS):
                plain = _called(model)
            with compiling(), tomadiff.merged(model, **SETTINGS):
                model.compile(backend=_backend(device), fullgraph=True)
                with kernels_set_to("0"):
                    core = _called(model)
                tomadiff.forget(model)  # the plans by core
                kernels = None if no_kernels(device) else _called(model)
        except Exception as error:
            yield Finding(what, False, reason(error))
            continue
        bar = rounding if dtype == torch.float32 else DESTINATIONS
        yield _same(what, core, plain, bar, "the one that is not compiled")
        if kernels is not None:
            yield _same(f"{what}, with kernels", kernels, core, rounding, "the one with core alone")


def _small_model(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = SanaTransformer2DModel(**SANA).eval()
    for block in model.transformer_blocks:
        nn.init.normal_(block.scale_shift_table)  # else attention would hardly count
    return nn.Module.to(model, device, dtype)


def _same(what: str, found: Tensor, expected: Tensor, bar: float, to: str) -> Finding:
    difference = float((found - expected).norm() / expected.norm())
    words = f"differs by {difference:.1e} from {to}, at most {bar:.1e} is good"
    return Finding(what, difference <= bar, words, {"difference": difference, "at_most": bar})


@torch.no_grad()
def _called(model: nn.Module) -> Tensor:
    """All outputs of a few steps."""
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(1, *shape, generator=generator).to(weight) for shape in ((4, 16, 16), (7, 32)))
    steps = [torch.full((1,), time, device=weight.device) for time in TIMES]
    outputs = [model(image, text, step, return_dict=False)[0] for step in steps]
    return torch.stack([output.float() for output in outputs])


def compiled_pictures_are_close(device: torch.device) -> Iterator[Finding]:
    """In the mode that is used most: the last dtype of the device, with kernels."""
    return _pictures("compiled pictures", device, _modes(device)[:1])


def compiled_pictures_in_other_modes(device: torch.device) -> Iterator[Finding]:
    """In other dtypes, and without kernels; takes minutes, since everything is compiled for each of them."""
    return _pictures("compiled pictures in other modes", device, _modes(device)[1:])


def _modes(device: torch.device) -> list[Mode]:
    return list(product(reversed(dtypes_of(device)), ("auto", "0") if device.type == "cuda" else ("auto",)))


def _pictures(check: str, device: torch.device, modes: Sequence[Mode]) -> Iterator[Finding]:
    if modes and (failed := no_compiler(device)):
        yield Finding(check, None, failed)
        return
    for (dtype, kernels), name in product(modes, EMBEDDED):
        without = " without kernels" if kernels == "0" else ""
        what = f"{name} in {name_of(dtype)}, compiled{without}"
        if time_is_over():
            yield left_out(what)
            continue
        pipe = loaded(name, device, dtype)
        dense = draw_with(pipe)
        for mode, (settings, bar) in MODES.items():
            if without and mode == "forecast":  # which has no use for them
                continue
            if time_is_over():
                yield left_out(f"{what}, {mode}")
                continue
            try:
                with kernels_set_to(kernels), compiling(), tomadiff.merged(pipe, **settings):
                    denoiser(pipe)[0].compile(backend=_backend(device))
                    distance = decibels(draw_with(pipe), dense)
            except Exception as error:
                yield Finding(f"{what}, {mode}", False, reason(error))
            else:
                yield close(f"{what}, {mode}", distance, bar, "the dense picture")


def no_compiler(device: torch.device) -> str | None:
    """Why torch.compile can't work here with any model; None if it compiles a trivial function.

    For example without Triton, as on Windows, without a C compiler, or on a GPU that is too old for them.
    """
    try:
        with compiling():
            torch.compile(lambda x: x + 1, backend=_backend(device))(torch.ones(8, device=device))
    except Exception as error:
        return f"torch.compile can't compile even x + 1 here: {reason(error)}"
    return None


def _backend(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "eager"


@contextmanager
def compiling() -> Iterator[None]:
    """Begin with nothing compiled, and leave nothing."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
