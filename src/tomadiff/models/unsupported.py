"""Models of diffusers that can't or shouldn't be merged, and why."""

from __future__ import annotations

_AUDIO = "it makes sound: its tokens are a sequence in time, with no picture to merge neighbours in"
_PRIOR = "it makes an embedding of a few tokens, among which nothing is redundant"
_CONVOLUTIONS = "it works by convolutions; its attention is on whole maps, with no blocks to merge in"
_UNDECLARED = "nobody declared it; say where its tokens are with sites=tomadiff.Sites(...)"
_ONCE = "it turns pictures into latents or back, once for each: there are no steps to make faster"
_PART = "it is a part of other models: give tomadiff the model, or the pipeline, that it is in"

REFUSED: dict[str, str] = {
    "AceStepTransformer1DModel": _AUDIO,
    "AudioLDM2UNet2DConditionModel": _AUDIO,
    "LongCatAudioDiTTransformer": _AUDIO,
    "MiniMaxMusic3RVQDepthDecoder": _AUDIO,
    "MiniMaxMusic3Transformer1DModel": _AUDIO,
    "StableAudio3DiTModel": _AUDIO,
    "StableAudioDiTModel": _AUDIO,
    "T5FilmDecoder": _AUDIO,
    "UNet1DModel": "its samples have one axis, with no picture to merge neighbours in",
    "RFD4ProteinaTransformer": "it makes proteins: its tokens are atoms and residues, each of which counts",
    "PriorTransformer": _PRIOR,
    "UNet2DModel": _CONVOLUTIONS,
    "Kandinsky3UNet": _CONVOLUTIONS,
    "Transformer2DModel": _PART,
    "DreamLiteTransformer2DModel": _PART,
    "DualTransformer2DModel": _PART,
    "TransformerTemporalModel": _PART,
    "MotionAdapter": _PART,
    "UniDiffuserModel": "it draws text and picture in one sequence, at a time of its own for each",
    "QwenImage21Transformer2DModel": (
        "its sequence mixes text and pictures under a block-causal mask, and keeps their keys in a cache"
    ),
    "JoyImageEditPlusTransformer3DModel": (
        "pictures of different sizes for each sample are one sequence, with no grid of their own to go by"
    ),
    "AnyFlowFARTransformer3DModel": _UNDECLARED,
    "Cosmos3OmniTransformer": _UNDECLARED,
    "HeliosTransformer3DModel": _UNDECLARED,
    "Kandinsky6Transformer3DModel": _UNDECLARED,
    "MiniMaxH3Transformer3DModel": _UNDECLARED,
    "SanaWMLTX2RefinerTransformer3DModel": _UNDECLARED,
    "SanaWMTransformer3DModel": _UNDECLARED,
    "WanAnimate2Transformer3DModel": _UNDECLARED,
    "Kandinsky6SRTransformer3DModel": "its block-sparse attention (NABLA) needs all tokens of 8 x 8 blocks",
}

# reasons for models that are no denoisers, by a part of their class name
OTHERS: dict[str, str] = {
    "ControlNet": "it runs beside the model that it controls: give tomadiff that one, or the pipeline",
    "Adapter": _PART,
    "Autoencoder": _ONCE,
    "VQModel": _ONCE,
    "VAE": _ONCE,
}


def why(name: str) -> str | None:
    """Why a model class, given by name, is refused; None if no reason is known."""
    return REFUSED.get(name) or no_denoiser(name)


def no_denoiser(name: str) -> str | None:
    """Why a model class, given by name, is no denoiser; None if it may be one."""
    return next((reason for part, reason in OTHERS.items() if part in name), None)
