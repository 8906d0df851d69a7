"""Between pictures and latents: a fixed, lossless transform where a big model has its VAE."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

PATCH = 4  # pixels per side of what becomes one token
CHANNELS = 3 * PATCH**2


def orthonormal_basis() -> Tensor:
    """[48, 3, 4, 4]: cosine waves within a patch, of brightness and of two differences of colour."""
    place = torch.arange(PATCH) + 0.5
    waves = torch.cos(torch.pi / PATCH * torch.arange(PATCH)[:, None] * place) * math.sqrt(2 / PATCH)
    waves[0] /= math.sqrt(2)
    colours = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
    colours /= colours.norm(dim=1, keepdim=True)
    return torch.einsum("cr,iy,jx->cijryx", colours, waves, waves).reshape(CHANNELS, 3, PATCH, PATCH)


class PatchCodec(ModelMixin, ConfigMixin):
    """Pictures [B, 3, H, W] in [-1, 1] <-> latents [B, 48, H/4, W/4].

    Latents are a rotation of patches into waves, less the mean of the training pictures and times a scale
    for each wave. `deviation` is that of the latents over the training pictures.
    """

    mean: Tensor
    scale: Tensor
    deviation: Tensor

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        for name, values in {"mean": torch.zeros, "scale": torch.ones, "deviation": torch.ones}.items():
            self.register_buffer(name, values(CHANNELS))

    @classmethod
    def fitted(cls, pictures: Tensor) -> PatchCodec:
        """The waves have very unequal deviations: 1 of the mean colour, 0.01 of fine grain. Scaling by their
        inverse root leaves a range that a noise schedule can cover, with the coarse still drawn first."""
        codec = cls()
        rotated = codec.encode(pictures)
        deviation = rotated.std((0, 2, 3))
        codec.mean.copy_(rotated.mean((0, 2, 3)))
        codec.scale.copy_((deviation * deviation.max()).rsqrt())
        codec.deviation.copy_((deviation / deviation.max()).sqrt())
        return codec.half().float()  # as it will be loaded

    def encode(self, pictures: Tensor) -> Tensor:
        rotated = F.conv2d(pictures, orthonormal_basis().to(pictures), stride=PATCH)
        return (rotated - self.mean[:, None, None]) * self.scale[:, None, None]

    def decode(self, latents: Tensor) -> Tensor:
        mean, scale = (buffer.to(latents)[:, None, None] for buffer in (self.mean, self.scale))
        return F.conv_transpose2d(latents / scale + mean, orthonormal_basis().to(latents), stride=PATCH)
