"""Load a pipeline by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import huggingface_hub
import torch
from diffusers import DiffusionPipeline, ModelMixin

from tomadiff.runtime.files import printable
from tomadiff.runtime.machine import out_of_memory
from tomadiff.runtime.registration import denoiser

from . import hub
from .arguments.names import EMBEDDED
from .demo.embedded import load_embedded
from .untrusted import (
    EMBEDDED_CLASSES,
    INDEX,
    UntrustedModelError,
    check_index,
    check_model,
    check_pipeline,
    read_object,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MAX_THREADS = 1024


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"can't use device {device!r} here: {reason}") from error


def check_offload(offload: str | None, device: str) -> None:
    if offload is not None and torch.device(device).type == "cpu":
        raise ValueError(f"--offload {offload} brings weights to a GPU: give --device cuda with it")


def place(pipe: DiffusionPipeline, device: str, offload: str | None = None) -> DiffusionPipeline:
    """Move a pipeline to a device, or keep its weights in main memory and load them when needed."""
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif offload == "group":  # by leaves: those of a block would have to come before its tokens are merged
        stream = torch.device(device).type == "cuda"
        pipe.enable_group_offload(torch.device(device), offload_type="leaf_level", use_stream=stream)
    else:
        pipe.to(device)
    return pipe


def check_threads(threads: int | None) -> None:
    """Refuse more threads than a machine can start: the process would end without a message."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"--threads {threads} must be from 1 to {MAX_THREADS}")


def load(
    model: str,
    device: str = "cpu",
    dtype: str = "fp32",
    names: Iterable[str] = EMBEDDED,
    trust_remote_code: bool = False,
    offload: str | None = None,
) -> DiffusionPipeline:
    """An embedded model by its name, or any pipeline by hub id or folder. `names`: what the caller knows."""
    check_device(device)
    check_offload(offload, device)
    if model in EMBEDDED:
        return place(load_embedded(model, DTYPES[dtype]), device, offload)
    if Path(model).is_file():
        raise ValueError(
            f"can't load {model!r}: it is a single file, and a folder is needed, which "
            "SomePipeline.from_single_file(FILE).save_pretrained(FOLDER) of diffusers makes"
        )
    try:
        folder = Path(model) if Path(model).is_dir() else _downloaded(model, trust_remote_code)
        if trust_remote_code:
            name = read_object(folder / INDEX).get("_class_name")
            kind = (
                EMBEDDED_CLASSES.get(name, DiffusionPipeline) if isinstance(name, str) else DiffusionPipeline
            )
            pipe = kind.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=True)
        else:
            pipe = check_pipeline(folder).from_pretrained(folder, dtype=DTYPES[dtype], use_safetensors=True)
        return place(pipe, device, offload)
    except UntrustedModelError as error:
        raise ValueError(f"won't load {model!r}: {printable(str(error))}") from error
    except Exception as error:  # diffusers raises all kinds of errors for JSON that is no configuration
        if isinstance(error, ImportError) or out_of_memory(error):
            raise
        if Path(model).is_dir():
            tried = "no pipeline in this folder that diffusers can read"
        else:
            tried = f"no folder, no hub id within reach, and none of {', '.join(names)}"
        # if the hub can't be reached, the error is long advice, and only its cause tells the reason
        raise ValueError(f"can't load {model!r}: {tried} ({_reason(error.__cause__ or error)})") from error


def _downloaded(model: str, trust_remote_code: bool) -> Path:
    """The files of a pipeline on the hub; its index is checked first, since downloading may run it."""
    trouble = hub.trouble()
    offline = trouble is not None
    try:
        index = huggingface_hub.hf_hub_download(model, INDEX, local_files_only=offline)
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        raise ValueError(trouble or error) from error
    if trust_remote_code:
        return Path(DiffusionPipeline.download(model, local_files_only=offline, trust_remote_code=True))
    check_index(read_object(Path(index)), f"{model}/{INDEX}")
    return Path(DiffusionPipeline.download(model, local_files_only=offline, use_safetensors=True))


def load_model(folder: Path, device: str, dtype: str) -> ModelMixin:
    """A single model, without a pipeline."""
    try:
        kind = check_model(folder)
        return kind.from_pretrained(folder, dtype=DTYPES[dtype], use_safetensors=True).to(device)
    except Exception as error:  # diffusers raises all kinds of errors here, too
        if isinstance(error, ImportError) or out_of_memory(error):
            raise
        raise ValueError(f"can't load {str(folder)!r}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of an error, with its class if that line alone says nothing, as with a KeyError."""
    line = printable(next(iter(str(error).strip().splitlines()), ""))
    return line if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {line}"


def usual_size(pipe: DiffusionPipeline) -> tuple[int, int] | None:
    """A pipeline's default height and width; None if it doesn't tell."""
    side = inspect.signature(pipe.__call__).parameters["height"].default
    if side is None:  # then the default is the size that the model was trained on
        side = getattr(pipe, "default_sample_size", None) or denoiser(pipe)[0].config.get("sample_size", 0)
        side *= getattr(pipe, "vae_scale_factor", 0)
    return (side, side) if side else None


def usual_steps(pipe: DiffusionPipeline) -> int:
    """The number of steps that a pipeline takes by default."""
    steps = inspect.signature(pipe.__call__).parameters["num_inference_steps"].default
    return pipe.config.default_steps if steps is None else steps  # None: an embedded one
