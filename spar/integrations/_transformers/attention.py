# SPDX-License-Identifier: Apache-2.0
"""The functions that transformers calls in a forward pass: attention, and its masks."""

from __future__ import annotations

from typing import Any

import torch

from ..._attention.attention import attention
from ...sequence_layout import SequenceLayout
from .masks import longest_run

_REFUSED = {  # keywords of other attentions, with what they are
    "softcap": "a cap of the scores (logit softcapping)",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "a paged KV cache",
}
_WHOLE = 'For generate, and for whole sequences, call model.set_attn_implementation("sdpa")'
_CACHE = (
    "there is a KV cache ({} keys for {} queries); expected none. Pass no past_key_values, and "
    "use_cache=False as shard does"
)
registered: set[str] = set()  # the names of attention_forward in transformers


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    layout: SequenceLayout | None = None,
    method: str | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call spar.attention as transformers calls an attention function.

    Args:
        module: the attention layer.
        query: `[B, H, S_local, D]`.
        key, value: `[B, K, S_local, D]`.
        attention_mask: over the whole sequence: `[B, 1, S, S]`; `[B, 1, 1, S]` or None are causal besides.
        layout, method: from `shard`.

    Returns:
        `[B, S_local, H, D]`, and None for the weights.

    Raises:
        ValueError: there is no layout, or the layer needs what spar.attention does not compute.
    """
    caller = f"attention of {type(module).__name__}"
    if layout is None:
        raise ValueError(
            f"{caller}: layout is None; pass the batch through spar.integrations.transformers.shard. If it "
            "went through it, the model does not pass keyword arguments on to this layer, and cannot run "
            f"over a sharded sequence. {_WHOLE}"
        )
    for name, feature in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{caller}: {name} is passed: {feature}, which spar.attention does not compute")
    if kwargs.get("use_cache") or key.size(2) != query.size(2):
        raise ValueError(f"{caller}: {_CACHE.format(key.size(2), query.size(2))}")
    if kwargs.get("output_attentions"):
        raise ValueError(f"{caller}: output_attentions is True; spar.attention has no weights to return")
    if attention_mask is None and sliding_window is not None and longest_run(layout) > sliding_window:
        raise ValueError(
            f"{caller}: sliding_window is {sliding_window} and there is no mask for {layout}; pass the batch "
            "through spar.integrations.transformers.shard, with this model"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None and attention_mask.size(2) > 1:  # it has causality in it
        causal = False
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layout,
        causal=causal,
        mask=attention_mask,
        scale=scaling,
        dropout_p=dropout,
        method=method,
    )
    return out, None


def mask_in_forward(
    *, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any
) -> None:
    """Return no mask: `shard` has built those that are needed. Refuse the caller's."""
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask is of shape {list(attention_mask.shape)}, and shard did not build it; pass the "
            f"whole batch, with its attention_mask, through spar.integrations.transformers.shard. {_WHOLE}"
        )
    if kv_length != q_length:
        raise ValueError(_CACHE.format(kv_length, q_length))
