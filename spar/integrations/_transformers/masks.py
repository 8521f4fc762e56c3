# SPDX-License-Identifier: Apache-2.0
"""Masks and documents of a whole batch, as transformers' own functions define them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...sequence_layout import SequenceLayout

WHOLE = "spar: masks of the whole sequence"  # the name of `whole_mask` in transformers
# the attribute of a config that has the window of a kind of layers
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def whole_mask(
    *,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return what spar.attention needs besides causality: nothing, a key mask, or all of `[B, 1, S, S]`.

    Args:
        kv_length: the length of the whole sequence, as that of the queries.
        attention_mask: bool `[B, S]`, False for padding.
        local_size: of a sliding window, or of a chunk.
        allow_is_causal_skip: whether the mask is causal, but for padding and `local_size`.
    """
    from transformers.masking_utils import sdpa_mask

    if allow_is_causal_skip and (local_size is None or kv_length <= local_size):
        padded = attention_mask is not None and not bool(attention_mask.all())
        return attention_mask[:, None, None, :] if attention_mask is not None and padded else None
    mask: torch.Tensor = sdpa_mask(
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **kwargs,
    )
    return mask


def masks_of(
    model: Any,
    config: Any,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    layout: SequenceLayout,
) -> Any:
    """Return the masks of a whole batch: None, one for all layers, or a dict with one for each type of layer.

    Args:
        tokens: any tensor [B, S, ..] of the batch.
        attention_mask: [B, S], 0 for padding; or 4-D, which is returned with all its queries.
        position_ids: [B or 1, S], of the whole sequence.
        layout: one of packed documents needs no mask for them.
    """
    from transformers import masking_utils

    batch, total = tokens.shape[:2]
    if attention_mask is not None and attention_mask.dim() == 4:
        # attention_forward takes one row of queries for a key mask, to which it adds causality
        return attention_mask.expand(-1, -1, total, -1) if attention_mask.size(2) == 1 else attention_mask
    packed = layout.kind == "packed"
    if packed and attention_mask is None and longest_run(layout) <= _window(config):
        return None
    whole = copy.copy(config)
    whole._attn_implementation_internal = WHOLE
    create = getattr(model, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    masks = create(
        config=whole,
        inputs_embeds=torch.empty(batch, total, 0, dtype=model.dtype, device=tokens.device),
        attention_mask=attention_mask,
        past_key_values=None,
        position_ids=position_ids,
    )
    if not isinstance(masks, dict):
        return masks
    if packed and attention_mask is None and "full_attention" in masks:
        masks["full_attention"] = None
    kinds = list(masks.values())
    same = len(kinds) == 1 or all(kind is None for kind in kinds)
    return kinds[0] if same else masks


def _window(config: Any) -> float:
    """Return the shortest window or chunk of a model's layers."""
    kinds = getattr(config, "layer_types", None)
    sizes = [getattr(config, name, None) for kind, name in WINDOWS.items() if kinds is None or kind in kinds]
    return min([size for size in sizes if size is not None], default=float("inf"))


def longest_run(layout: SequenceLayout) -> int:
    """Return the length of the longest document, or of the sequence."""
    return max(layout.numbers[2:]) if layout.kind == "packed" else layout.total


def documents_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's document, [B, S], as transformers counts; None if there is one."""
    from transformers.masking_utils import find_packed_sequence_indices

    documents: torch.Tensor | None = find_packed_sequence_indices(position_ids)
    return documents


def lengths_of(documents: torch.Tensor) -> list[int] | None:
    """Return the lengths of the documents; None if they differ between the samples."""
    if not bool((documents == documents[:1]).all()):
        return None
    lengths: list[int] = torch.unique_consecutive(documents[0], return_counts=True)[1].tolist()
    return lengths


def restarting(lengths: torch.Tensor) -> torch.Tensor:
    """Return position_ids [1, S] that begin at 0 in each document."""
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return (torch.arange(len(starts), device=lengths.device) - starts)[None]
