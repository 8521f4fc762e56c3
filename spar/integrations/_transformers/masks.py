# SPDX-License-Identifier: Apache-2.0
"""The spans of masks, as transformers' own functions define these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..._attention.spans import Spans

# the attribute of a config that has the window of a kind of layers
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Functions of transformers that leave each query one interval of keys around it, if their blocks are runs.
_INTERVALS_NAMES = """
causal_mask_function bidirectional_mask_function sliding_window_overlay sliding_window_bidirectional_overlay
chunked_overlay blockwise_overlay packed_sequence_mask_function remap_positions_for_packed_sequence and_masks
or_masks
"""
_INTERVALS = frozenset(_INTERVALS_NAMES.split())


class MaskRequest(NamedTuple):
    """A mask that transformers asks for.

    Attributes:
        function: of one (batch, head, query, key).
        shape: (B, 1, S, S).
        is_known: whether transformers made the function, of parts that are known.
        valid: bool [B, S], False for padding; None if there is none.
        device: of the tensors that the function has in it.
    """

    function: Callable[..., torch.Tensor]
    shape: tuple[int, int, int, int]
    is_known: bool
    valid: torch.Tensor | None
    device: torch.device

    def spans(self, group: Any) -> Spans:
        """Return the spans of the mask; the ranks of the group share the work of a function of the user's."""
        if self.is_known and _are_runs(self.function):
            spans = Spans.of(self.function, self.shape, contiguous=True, device=self.device)
        else:
            spans = Spans.of(self.function, self.shape, group=group, device=self.device)
        return spans if self.valid is None else spans & Spans.padding(self.valid)


def leaves_intervals(function: Any) -> bool:
    """Whether a mask function is made of transformers' own, which leave each query one interval around it."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return False
    if function.__qualname__.partition(".")[0] not in _INTERVALS:
        return False
    return all(leaves_intervals(part) for part in parts_of(function) if callable(part))


def parts_of(function: Any) -> list[Any]:
    """Return what a function refers to: other functions, also in tuples, and tensors."""
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [part for value in values for part in (value if isinstance(value, tuple) else (value,))]


def _are_runs(function: Any) -> bool:
    """Whether all blocks of tokens in a function of transformers are runs of neighbours.

    Then a query has one interval of keys around it, as all other parts of these functions leave one.
    """
    for part in parts_of(function):
        if isinstance(part, torch.Tensor) and function.__qualname__.startswith("blockwise_overlay"):
            starts = torch.nn.functional.pad(part[:, 1:] != part[:, :-1], (1, 0), value=True)
            begun = [ids[start & (ids >= 0)] for ids, start in zip(part, starts, strict=True)]
            if any(len(ids) > len(ids.unique()) for ids in begun):
                return False
        if callable(part) and not _are_runs(part):
            return False
    return True
