"""HunyuanVideo whose first frame is given: treated apart, as if it had no noise."""

from __future__ import annotations

from . import hunyuan_video

MODEL = "HunyuanVideoTransformer3DModel"
SETTINGS = hunyuan_video.SETTINGS | {"image_condition_type": "token_replace"}
GRID, ODD = (2, 8, 8), (3, 5, 7)
call = hunyuan_video.call
