"""What sites change at the very call of attention: merged keys and values, and weights without a mask.

A key that stands for n tokens counts n times where log(n) is added to its logits. As a mask, that turns fast
kernels of GPUs off. So the bias comes as channels of queries and keys, a constant of the former and the bias
of the latter: q' k' = q k + bias / scale. Positions rotate queries and keys before, so this happens at the
call of `scaled_dot_product_attention`, which is watched for while a site runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tomadiff.core import destination_rows
from tomadiff.errors import UnsupportedModelError
from tomadiff.models import Call

from .model_call import ModelCall, SpanState

if TYPE_CHECKING:
    from .hook import SiteHook

FOLDED = {"cuda"}  # types of devices whose fast kernels take no mask; those of CPUs do, and pay for channels
MULTIPLE = 8  # of channels, which these kernels want
NEVER = -1e4  # as a bias; -inf would be NaN as a channel

Forward = Callable[..., Any]


def run_weighed(forward: Forward, call: Call) -> Any:
    """Run attention whose mask weighs keys, without a mask where that is faster."""
    with _Folding():
        return forward(**call)


@torch.compiler.disable(reason="keys are merged or weighed at the call of attention, which is not compiled")
def run_inside(hook: SiteHook, forward: Forward, inputs: Call, span: SpanState | None = None) -> Any:
    """Run a site whose keys and values can't be merged, or weighed, before its attention.

    span: where tokens are merged already, and only have to be weighed.
    """
    call = hook.session.require_call(hook)
    if span is None:
        span = hook.begin_span(inputs)
        hook.replace_what_belongs_to_tokens(inputs, call, span)
    inside = _Inside(hook, call, span)
    with inside:
        output = forward(**inputs)
    if not inside.found:
        raise UnsupportedModelError(
            f"{hook.bound.name} did not call torch's scaled_dot_product_attention, where keys are merged and "
            'weighed: use the attention backend "native" and the processors that came with the model'
        )
    return output


class _AtAttention(TorchFunctionMode):
    """Runs `attend` in the place of torch's attention."""

    attend: Callable[..., Tensor]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self.attend if function is F.scaled_dot_product_attention else function
        return run(*args, **kwargs or {})


class _Folding(_AtAttention):
    """A mask that is the same for all queries becomes channels."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        if attn_mask is None or attn_mask.dtype == torch.bool:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        return biased(query, key, value, attn_mask, **more)


class _Inside(_AtAttention):
    """Keys and values are merged, unless they come from merged tokens already, and keys are weighed."""

    def __init__(self, hook: SiteHook, call: ModelCall, span: SpanState) -> None:
        super().__init__()
        self.hook, self.call, self.span, self.found = hook, call, span, False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        hook, span, task = self.hook, self.span, self.call.tasks[self.hook.index]
        tokens = task.tokens if hook.site.keys_inside else task.kept
        if key.shape[2] < tokens:  # of an adapter's few
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        self.found = True
        around = self.call.layout.around(key.transpose(1, 2), hook.site, tokens)
        if hook.site.keys_inside:
            if attn_mask is not None:
                attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
                if attn_mask.shape[-1] > 1:
                    attn_mask = destination_rows(span.destinations, tokens, attn_mask, 3, around[0])
            key, value = self._merged(key, around), self._merged(value, around)
        if span.key_bias is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        bias = F.pad(span.key_bias, around)[:, None, None].to(query.dtype)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = bias.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            bias = bias + attn_mask
        return biased(query, key, value, bias, **more)

    def _merged(self, x: Tensor, around: tuple[int, int]) -> Tensor:
        """[B, H, S, D] with merged tokens."""
        span = self.span._replace(prefix=around[0], suffix=around[1])
        sequence = self.hook.merge_like(x.transpose(1, 2).flatten(2), span)
        return sequence.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


def biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with a bias on its logits, [B, H, L, S], as channels where it may be and pays."""
    if query.device.type not in FOLDED or bias.ndim != 4 or bias.shape[2] != 1 or is_causal:
        more: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, bias, dropout_p, **more)
    channels = query.shape[-1]
    scale = channels**-0.5 if scale is None else scale
    query, key = with_bias_channels(query, key, bias, scale)
    value = F.pad(value, (0, query.shape[-1] - channels))  # kernels want as many channels for values
    attended = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    return attended[..., :channels]


def with_bias_channels(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries [B, H, L, D] and keys [B, H', S, D] whose products, times `scale`, have the bias in them.

    bias: [B or 1, H' or 1, 1, S]. The constant for the queries, 1 / scale, comes as a sum of two numbers, so
    that it is not rounded more than the bias is.
    """
    whole = 1 / scale
    high = torch.tensor(whole, dtype=query.dtype).item()
    padding = 2 + (-query.shape[-1] - 2) % MULTIPLE
    constant = query.new_zeros(padding)
    constant[0].fill_(high)
    constant[1].fill_(whole - high)
    bias = bias.to(key.dtype).clamp_min(NEVER).transpose(2, 3)
    return (
        torch.cat([query, constant.expand(*query.shape[:-1], -1)], dim=-1),
        torch.cat([key, F.pad(bias.expand(*key.shape[:-1], 2), (0, padding - 2))], dim=-1),
    )
