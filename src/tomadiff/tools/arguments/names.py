"""Names that commands accept, known without importing what they name; a test compares them with that."""

from __future__ import annotations

EMBEDDED = ("emoji-unet", "emoji-flux")
ARCHITECTURES = ("sd15", "sd21", "sdxl", "sd35-medium", "flux-dev", "sana", "wan-1.3b")
DTYPES = ("fp32", "fp16", "bf16")
OFFLOADS = ("model", "group", "sequential")
METRICS = ("psnr", "ssim", "lpips", "dino", "clip", "fid")

# fields of `Config` with a fixed set of values, for `generate` and `merge-map`
CHOICES = {
    "method": ("toma", "tome", "tofu", "todo"),
    "where": ("block", "module", "span", "kv"),
    "regions": ("tile", "stripe", "global"),
    "assign": ("region", "global"),
    "share": ("kind", "block"),
}
PRESETS = ("toma", "toma_once", "toma_tile", "toma_stripe")

# what `bench` and `eval` compare
DENSE, OURS, AUTO = "dense", "tomadiff", "auto"
RIVALS = ("tomesd", "steps", "first-block", "taylorseer", "magcache", "deepcache", "dbcache")
METHODS = (DENSE, AUTO, "ideal", OURS, *PRESETS, "tome", "tofu", "todo", *RIVALS)

SAMPLERS = (
    "euler",
    "euler-a",
    "heun",
    "ddim",
    "ddpm",
    "pndm",
    "lcm",
    "tcd",
    "dpm++",
    "dpm++sde",
    "unipc",
    "deis",
    "stochastic",
)
