"""The networks behind the metrics. Each takes pictures [B, 3, H, W] in [0, 1], and loads when it is first
used, or by `load()`. Where it can't it raises `NotAvailable`: nothing stands in for what isn't there.

    Inception()(pictures)         features for FID
    Lpips()(pictures, others)     perceptual distance, 0 for equal pictures
    Clip()(pictures, prompts)     CLIP-T: how well pictures fit their prompts, a cosine
    Dino()(pictures, others)      distance between what a picture and its counterpart show, 0 for equal ones
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .metrics import Statistics
from .pictures import check, read_picture
from .pretrained import Preparation, pretrained
from .weights import NotAvailable, find, read_arrays

N = TypeVar("N", bound="Network")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Network:
    """A network in `model`, loaded at its first use."""

    model: Any

    def load(self: N) -> N:
        _ = self.model
        return self

    def tried(self: N) -> N:
        """Load the network to see whether it is available, then free it until it is needed."""
        self.load()
        del self.model
        return self


class Inception(Network):
    """The Inception-V3 of FID. Pictures are prepared as by pytorch-fid: statistics can be exchanged."""

    size = 299
    channels = 2048

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    @cached_property
    def model(self) -> torch.jit.ScriptModule:
        path = str(find("inception"))
        with warnings.catch_warnings():  # deprecated, but it is how the weights are published
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(path, map_location=self.device).eval()

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> Tensor:
        """[B, 2048]"""
        check(pictures)
        return self.model(self.resize(pictures.to(self.device, torch.float32)) * 2 - 1).cpu()

    def resize(self, pictures: Tensor) -> Tensor:
        return F.interpolate(pictures, (self.size, self.size), mode="bilinear", align_corners=False)

    def statistics(self, source: Path, batch: int = 16) -> Statistics:
        """The statistics of real pictures: in a folder, searched recursively, or in a .npz file."""
        if not source.is_dir():
            made = Statistics.load(source)
            if len(made.mean) != self.channels:
                raise ValueError(
                    f"{source} has {len(made.mean)} channels, not the {self.channels} of Inception"
                )
            return made
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in PICTURES)
        if len(paths) < 2:
            raise ValueError(f"{source} has {len(paths)} pictures ({', '.join(PICTURES)}): FID needs more")
        # pictures may have different sizes, so each is resized before they are batched
        resized = (self.resize(read_picture(path)) for path in paths)
        batches = iter(lambda: list(islice(resized, batch)), [])
        return Statistics.of(self(torch.cat(some)) for some in batches)


class Lpips(Network):
    """Learned perceptual distance (Zhang et al. 2018, version 0.1 with its linear heads), on AlexNet."""

    pooled = (1, 2)  # indices of the convolutions with a 3 x 3 max pooling before them
    smallest = 31  # least side in pixels, so that the last convolution has an output

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    @cached_property
    def model(self) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """Kernel and bias of each convolution, and the weight of each channel where outputs are compared."""
        arrays = read_arrays(find("lpips"))
        layers = arrays["AlexNet_0"]
        convolutions = [
            (self._tensor(layer["kernel"]).permute(3, 2, 0, 1).contiguous(), self._tensor(layer["bias"]))
            for layer in (layers[f"Conv_{i}"] for i in range(len(layers)))  # flax: height, width, in, out
        ]
        heads = [
            self._tensor(arrays[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]).view(1, -1, 1, 1)
            for i in range(len(layers))
        ]
        return convolutions, heads

    @torch.no_grad()
    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """[B]"""
        check(a, b)
        if min(a.shape[-2:]) < self.smallest:
            raise ValueError(f"LPIPS needs {self.smallest} pixels a side: {list(a.shape)} is too small")
        _, heads = self.model
        layers = zip(heads, self._features(a), self._features(b))
        return sum((head * (x - y) ** 2).sum(1).mean((1, 2)) for head, x, y in layers).double().cpu()

    def _features(self, pictures: Tensor) -> Iterator[Tensor]:
        """The features after each convolution, normalised to unit length at each position."""
        convolutions, _ = self.model
        x = pictures.to(self.device, torch.float32)
        # LPIPS's shift and scale for pixels in [-1, 1] are the same as ImageNet's for pixels in [0, 1]
        x = (x - self._tensor(IMAGENET_MEAN).view(3, 1, 1)) / self._tensor(IMAGENET_STD).view(3, 1, 1)
        for i, (kernel, bias) in enumerate(convolutions):
            if i in self.pooled:
                x = F.max_pool2d(x, 3, stride=2)
            # all but the first of AlexNet's convolutions have "same" padding
            stride, padding = (4, 2) if kernel.shape[-1] == 11 else (1, kernel.shape[-1] // 2)
            x = F.conv2d(x, kernel, bias, stride, padding).relu()
            yield x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.float32, device=self.device)


class Clip(Network):
    """CLIP-T. The paper does not say which CLIP; ViT-B/32 is what CLIP-T is usually measured with."""

    def __init__(self, name: str | None = None, device: str = "cpu") -> None:
        self.name, self.device = name or "openai/clip-vit-base-patch32", device

    @cached_property
    def model(self) -> tuple[Any, Any, Preparation]:
        """The network, its tokenizer, and its preprocessing of pictures."""
        clip = pretrained("CLIP", self.name, "CLIPModel").to(self.device)
        tokenizer = pretrained("CLIP", self.name, "CLIPTokenizer")
        side = clip.config.vision_config.image_size
        return clip, tokenizer, Preparation.of(self.name, side, CLIP_MEAN, CLIP_STD)

    @torch.no_grad()
    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B]; a prompt longer than CLIP's 77 tokens is cut."""
        check(pictures)
        if len(pictures) != len(prompts):
            raise ValueError(f"{len(pictures)} pictures and {len(prompts)} prompts: each needs its own")
        clip, tokenizer, prepare = self.model
        limit = clip.config.text_config.max_position_embeddings
        tokens = tokenizer(
            list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        text = clip.get_text_features(
            input_ids=tokens.input_ids.to(self.device), attention_mask=tokens.attention_mask.to(self.device)
        )
        image = clip.get_image_features(pixel_values=prepare(pictures.to(self.device, torch.float32)))
        return F.cosine_similarity(_pooled(image).double(), _pooled(text).double()).cpu()


class Dino(Network):
    """1 - cosine of the class tokens of two pictures.

    The paper calls its DINO a measure of consistency with the dense picture, of which less is better, and
    cites Caron et al. 2021, not DINOv2; ViT-S/16 is the one that DreamBooth made the usual choice.
    """

    def __init__(self, name: str | None = None, device: str = "cpu") -> None:
        self.name, self.device = name or "facebook/dino-vits16", device

    @cached_property
    def model(self) -> tuple[Any, Preparation]:
        """The network, and its preprocessing of pictures."""
        dino = pretrained("DINO", self.name, "AutoModel").to(self.device)
        if not hasattr(dino.config, "image_size"):
            raise NotAvailable(f"DINO: {self.name} is a {type(dino).__name__}, not an encoder of pictures")
        return dino, Preparation.of(self.name, dino.config.image_size, IMAGENET_MEAN, IMAGENET_STD)

    @torch.no_grad()
    def features(self, pictures: Tensor) -> Tensor:
        """[B, C]"""
        check(pictures)
        dino, prepare = self.model
        inputs = prepare(pictures.to(self.device, torch.float32))
        return dino(pixel_values=inputs).last_hidden_state[:, 0].double().cpu()

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """[B]"""
        check(a, b)
        return 1 - F.cosine_similarity(self.features(a), self.features(b))


def _pooled(output: Any) -> Tensor:
    """The projected features: transformers 5 wraps them, 4 did not."""
    return output if isinstance(output, Tensor) else output.pooler_output
