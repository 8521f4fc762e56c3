# SPDX-License-Identifier: Apache-2.0
"""The functions that transformers calls in a forward pass: attention, and its masks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..._attention.attention import attention
from ..._attention.spans import Spans
from ...sequence_layout import SequenceLayout
from .masks import longest_run
from .router import Routed
from .tokens import Carried

_REFUSED = {  # keywords of other attentions, with what they are
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
NO_LAYOUT = (
    "{}: layout is None; pass the batch through spar.integrations.transformers.shard. If it went through it, "
    "the model does not pass keyword arguments on to this layer, and cannot run over a sharded sequence. "
    "transformers' Trainer calls shard by the recipe in docs/transformers.md, Trainer. " + _WHOLE
)
Mask = torch.Tensor | Spans | Routed | Carried | None
registered: set[str] = set()  # the names of attention_forward in transformers


def refuse_to_generate() -> None:
    """Let `generate` say what to do with what `shard` returns; transformers' error lists argument names."""
    from transformers import GenerationMixin

    own: Any = getattr(GenerationMixin, "_validate_model_kwargs", None)
    if own is None or hasattr(own, "of_transformers"):
        return

    @functools.wraps(own)
    def validate(self: Any, model_kwargs: dict[str, Any]) -> None:
        if isinstance(model_kwargs.get("layout"), SequenceLayout):
            raise ValueError(
                f"{type(self).__name__}.generate: the arguments are one rank's part of the sequence, by "
                "spar.integrations.transformers.shard; expected the whole batch. Call "
                'set_attn_implementation("sdpa"), and pass the batch itself: docs/evaluation.md, Generation'
            )
        own(self, model_kwargs)

    validate.of_transformers = own  # type: ignore[attr-defined]
    GenerationMixin._validate_model_kwargs = validate


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    layout: SequenceLayout | None = None,
    method: str | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Call spar.attention as transformers calls an attention function.

    Args:
        module: the attention layer.
        query: `[B, H, S_local, D]`.
        key, value: `[B, K, S_local, D]`.
        attention_mask: over the whole sequence: Spans, or `[B, 1, S, S]`; None is causal.
        layout, method: from `shard`; those of the mask, where it carries them.
        softcap: what limits the scores.
        s_aux, sinks: `[H]`, the scores of attention sinks: transformers' models have two names for them.

    Returns:
        `[B, S_local, H, D]`, and None for the weights.

    Raises:
        ValueError: there is no layout, or the layer needs what spar.attention does not compute.
    """
    caller = f"attention of {type(module).__name__}"
    mask: Any = attention_mask.mask if isinstance(attention_mask, Routed) else attention_mask
    if isinstance(mask, Carried):
        mask, layout, method = mask.mask, mask.tokens.layout, mask.method
    if layout is None:
        raise ValueError(NO_LAYOUT.format(caller))
    for name, feature in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{caller}: {name} is passed: {feature}, which spar.attention does not compute")
    if kwargs.get("use_cache") or key.size(2) != query.size(2):
        raise ValueError(f"{caller}: {_CACHE.format(key.size(2), query.size(2))}")
    if kwargs.get("output_attentions"):
        raise ValueError(f"{caller}: output_attentions is True; spar.attention has no weights to return")
    if mask is None and sliding_window is not None and longest_run(layout) > sliding_window:
        raise ValueError(
            f"{caller}: sliding_window is {sliding_window} and there is no mask for {layout}; pass the batch "
            "through spar.integrations.transformers.shard, with this model"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if isinstance(mask, Spans) or (mask is not None and mask.size(2) > 1):  # it has causality in it
        causal = False
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        layout,
        causal=causal,
        mask=mask,
        sinks=s_aux if sinks is None else sinks,
        softcap=softcap,
        scale=scaling,
        dropout_p=dropout,
        method=method,
    )
    return out, None


def mask_in_forward(*, q_length: int, kv_length: int, attention_mask: Any = None, **_: Any) -> Any:
    """Return the mask that `shard` has built, or none. Refuse the caller's."""
    if isinstance(attention_mask, (Spans, Routed, Carried)):
        return attention_mask
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask is of shape {list(attention_mask.shape)}, and shard did not build it; pass the "
            f"whole batch, with its attention_mask, through spar.integrations.transformers.shard. {_WHOLE}"
        )
    if kv_length != q_length:
        raise ValueError(_CACHE.format(kv_length, q_length))
    return None
