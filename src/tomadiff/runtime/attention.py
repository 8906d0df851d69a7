"""Merge keys and values, and weight merged keys, inside the call of `scaled_dot_product_attention`.

A key that stands for n tokens counts n times if log(n) is added to its logits. Passing that as a mask would
disable the fast kernels on GPUs. So the bias is passed as extra channels instead, a constant in the queries
and the bias in the keys: q' k' = q k + bias / scale. Rotary positions must be applied before, so this happens
in the attention call itself, which is intercepted while a site runs.
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

FOLDED = {"cuda"}  # devices whose fast kernels take no mask; a CPU's do, and extra channels would cost time
MULTIPLE = 8  # the fast kernels require a multiple of this many channels
NEVER = -1e4  # the bias of a masked key; -inf in a channel would give NaN

Forward = Callable[..., Any]


def run_weighed(forward: Forward, call: Call) -> Any:
    """Run attention that gets key weights as a mask, and turn the mask into channels where that is faster."""
    with _Folding():
        return forward(**call)


@torch.compiler.disable(reason="keys are merged or weighed at the call of attention, which is not compiled")
def run_inside(hook: SiteHook, forward: Forward, inputs: Call, span: SpanState | None = None) -> Any:
    """Run a site whose keys have to be merged or weighted inside its attention call.

    span: the site's span if its tokens are already merged, and keys only have to be weighted.
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
    """Runs `attend` in place of torch's scaled_dot_product_attention."""

    attend: Callable[..., Tensor]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self.attend if function is F.scaled_dot_product_attention else function
        return run(*args, **kwargs or {})


class _Folding(_AtAttention):
    """Turns an additive mask that is the same for all queries into channels."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        if attn_mask is None or attn_mask.dtype == torch.bool:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, **more)
        return biased(query, key, value, attn_mask, **more)


class _Inside(_AtAttention):
    """Merges keys and values, unless they come from merged tokens already, and weights the keys."""

    def __init__(self, hook: SiteHook, call: ModelCall, span: SpanState) -> None:
        super().__init__()
        self.hook, self.call, self.span, self.found = hook, call, span, False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        hook, span, task = self.hook, self.span, self.call.tasks[self.hook.index]
        tokens = task.tokens if hook.site.keys_inside else task.kept
        if key.shape[2] < tokens:  # an IP-Adapter's attention, which has few keys
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
        """Keys or values, [B, H, S, D], with the image's tokens merged."""
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
    """Attention with a bias on its logits, [B, H, L, S]; as channels where that is possible and faster."""
    if query.device.type not in FOLDED or bias.ndim != 4 or bias.shape[2] != 1 or is_causal:
        more: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, bias, dropout_p, **more)
    channels = query.shape[-1]
    scale = channels**-0.5 if scale is None else scale
    query, key = with_bias_channels(query, key, bias, scale)
    value = F.pad(value, (0, query.shape[-1] - channels))  # kernels require equally many channels
    attended = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    return attended[..., :channels]


def with_bias_channels(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Extend queries [B, H, L, D] and keys [B, H', S, D] so that their products, times `scale`, include bias.

    bias: [B or 1, H' or 1, 1, S]. The queries' constant, 1 / scale, is split into a sum of two numbers, so
    that it is rounded no more than the bias is.
    """
    whole = 1 / scale
    # "cpu": the user may have set another default device, for which the host would wait
    high = torch.tensor(whole, dtype=query.dtype, device="cpu").item()
    padding = 2 + (-query.shape[-1] - 2) % MULTIPLE
    constant = query.new_zeros(padding)
    constant[0].fill_(high)
    constant[1].fill_(whole - high)
    bias = bias.to(key.dtype).clamp_min(NEVER).transpose(2, 3)
    return (
        torch.cat([query, constant.expand(*query.shape[:-1], -1)], dim=-1),
        torch.cat([key, F.pad(bias.expand(*key.shape[:-1], 2), (0, padding - 2))], dim=-1),
    )
