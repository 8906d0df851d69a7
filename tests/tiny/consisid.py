from __future__ import annotations

from . import cogvideox

MODEL = "ConsisIDTransformer3DModel"
SETTINGS = cogvideox.SETTINGS | {"norm_elementwise_affine": True}
GRID, ODD, call = cogvideox.GRID, cogvideox.ODD, cogvideox.call
