# SPDX-License-Identifier: Apache-2.0
"""Masks and documents of a whole batch, as transformers' own functions define them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..._attention.spans import Spans
from ...sequence_layout import SequenceLayout

WHOLE = "spar: masks of the whole sequence"  # the name of `whole_mask` in transformers
# the attribute of a config that has the window of a kind of layers
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Functions of transformers that leave each query one interval of keys around it, if their blocks are runs.
_INTERVALS_NAMES = """
causal_mask_function bidirectional_mask_function sliding_window_overlay sliding_window_bidirectional_overlay
chunked_overlay blockwise_overlay packed_sequence_mask_function remap_positions_for_packed_sequence and_masks
or_masks
"""
_INTERVALS = frozenset(_INTERVALS_NAMES.split())


class Wanted(NamedTuple):
    """A mask that transformers asks for. `masks_of` makes its spans, in an order that is equal on all ranks.

    Attributes:
        function: of one (batch, head, query, key).
        shape: (B, 1, S, S).
        own: whether transformers made the function, of parts that are known.
        valid: bool [B, S], False for padding; None if there is none.
        device: of the tensors that the function has in it.
    """

    function: Callable[..., torch.Tensor]
    shape: tuple[int, int, int, int]
    own: bool
    valid: torch.Tensor | None
    device: torch.device

    def spans(self, group: Any) -> Spans:
        """Return the spans of the mask; the ranks of the group share the work of a function of the user's."""
        if self.own and _are_runs(self.function):
            spans = Spans.of(self.function, self.shape, contiguous=True, device=self.device)
        else:
            spans = Spans.of(self.function, self.shape, group=group, device=self.device)
        return spans if self.valid is None else spans & Spans.padding(self.valid)


def whole_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Wanted | None:
    """Return what spar.attention needs besides causality, which is nothing, or all of a mask.

    Args:
        kv_length: the length of the whole sequence, as that of the queries.
        attention_mask: bool `[B, S]`, False for padding.
        local_size: of a sliding window, or of a chunk.
        allow_is_causal_skip: whether the mask is causal, but for padding and `local_size`.
        use_vmap: whether a part of the function is the user's.
    """
    padded = attention_mask is not None and not bool(attention_mask.all())
    if allow_is_causal_skip and not padded and (local_size is None or kv_length <= local_size):
        return None
    shape = batch_size, 1, kv_length, kv_length
    valid = attention_mask if padded else None
    return Wanted(mask_function, shape, not use_vmap, valid, torch.device(device))


def leaves_intervals(function: Any) -> bool:
    """Whether a mask function is made of transformers' own, which leave each query one interval around it."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return False
    if function.__qualname__.partition(".")[0] not in _INTERVALS:
        return False
    return all(leaves_intervals(part) for part in _parts_of(function) if callable(part))


def _parts_of(function: Any) -> list[Any]:
    """Return what a function refers to: other functions, also in tuples, and tensors."""
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [part for value in values for part in (value if isinstance(value, tuple) else (value,))]


def _are_runs(function: Any) -> bool:
    """Whether all blocks of tokens in a function of transformers are runs of neighbours.

    Then a query has one interval of keys around it, as all other parts of these functions leave one.
    """
    for part in _parts_of(function):
        if isinstance(part, torch.Tensor) and function.__qualname__.startswith("blockwise_overlay"):
            starts = torch.nn.functional.pad(part[:, 1:] != part[:, :-1], (1, 0), value=True)
            begun = [ids[start & (ids >= 0)] for ids, start in zip(part, starts, strict=True)]
            if any(len(ids) > len(ids.unique()) for ids in begun):
                return False
        if callable(part) and not _are_runs(part):
            return False
    return True


def masks_of(
    model: Any,
    config: Any,
    tokens: torch.Tensor,
    attention_mask: Any,
    position_ids: torch.Tensor,
    layout: SequenceLayout,
    token_type_ids: torch.Tensor | None,
    known: bool = True,
) -> Any:
    """Return the masks of a whole batch: None, one for all layers, or a dict with one for each type of layer.

    Collective over the layout's group if the model's masks have functions of a user's in them.

    Args:
        tokens: any tensor [B, S, ..] of the batch.
        attention_mask: [B, S], 0 for padding; or 4-D, which is returned with all its queries; or Spans; or a
            dict of these by kind of layer.
        position_ids: [B or 1, S], of the whole sequence.
        layout: one of packed documents needs no mask for them.
        token_type_ids: [B, S], for models of which the masks depend on them.
        known: whether all kinds of the model's layers are; of others the windows are not known.
    """
    from transformers import masking_utils

    batch, total = tokens.shape[:2]
    if isinstance(attention_mask, dict):
        return {kind: _of_caller(attention_mask[kind], layout) for kind in sorted(attention_mask)}
    if attention_mask is not None and len(attention_mask.shape) == 4:
        return _of_caller(attention_mask, layout)
    packed = layout.is_packed
    if packed and known and attention_mask is None and longest_run(layout) <= shortest_window(config):
        return None
    whole = copy.copy(config)
    whole._attn_implementation_internal = WHOLE
    create = getattr(model, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    takes = inspect.signature(create).parameters
    cache = "cache" if "cache" in takes else "past_key_values"  # as up to transformers 5.23
    given = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
    wanted = create(
        config=whole,
        inputs_embeds=torch.empty(batch, total, 0, dtype=model.dtype, device=tokens.device),
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{cache: None},
        **{name: x for name, x in given.items() if name in takes},
    )
    if not isinstance(wanted, dict):
        return _made(wanted, layout)
    # transformers iterates over a set of types, in another order on each rank
    masks = {kind: _made(wanted[kind], layout) for kind in sorted(wanted)}
    if packed and attention_mask is None and "full_attention" in masks:
        masks["full_attention"] = None
    return masks


def _of_caller(mask: Any, layout: SequenceLayout) -> Any:
    """Return a mask as it is passed on: with all its queries."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.size(2) == 1:
        # attention_forward takes one row of queries for a key mask, to which it adds causality
        return mask.expand(-1, -1, layout.total, -1)
    return _made(mask, layout)


def _made(wanted: Any, layout: SequenceLayout) -> Any:
    """Return the spans of a mask. Of one [B, S] of padding, as in layers without attention, the shard."""
    if isinstance(wanted, torch.Tensor) and wanted.dim() == 2:
        return layout.shard(wanted, 1).contiguous()
    return wanted.spans(layout.group) if isinstance(wanted, Wanted) else wanted


def shortest_window(config: Any) -> float:
    """Return the shortest window or chunk of a model's layers; refuse one without a key."""
    kinds = getattr(config, "layer_types", None)
    names = [name for kind, name in WINDOWS.items() if kinds is None or kind in kinds]
    sizes = [(name, size) for name in names if (size := getattr(config, name, None)) is not None]
    for name, size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ValueError(
                f"shard: config.{name} is {size!r:.80}; expected an int of at least 1, the number of keys "
                "that a query attends to, or None for layers without one"
            )
    return min([size for _, size in sizes], default=float("inf"))


def longest_run(layout: SequenceLayout) -> int:
    """Return the length of the longest document, or of the sequence."""
    return max(layout.lengths)


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


def lengths_by_sample(documents: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of each sample's documents; those of one sample if all samples have the same."""
    rows = documents[:1] if bool((documents == documents[:1]).all()) else documents
    return tuple([tuple(torch.unique_consecutive(row, return_counts=True)[1].tolist()) for row in rows])


def restarting(lengths: torch.Tensor) -> torch.Tensor:
    """Return position_ids [1, S] that begin at 0 in each document."""
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return (torch.arange(len(starts), device=lengths.device) - starts)[None]
