# SPDX-License-Identifier: Apache-2.0
"""`roll`: tokens that move along the sequence, and from its end to its beginning."""

from __future__ import annotations

import torch

from .._checks import check_int, check_type
from .._exchange.arguments import Arguments
from .._exchange.gather_plan import AROUND
from .._exchange.gathering_op import gather_runs
from ..sequence_layout import SequenceLayout, checked_numbers


def roll(input_: torch.Tensor, shifts: int, layout: SequenceLayout, dim: int = 1) -> torch.Tensor:
    """Move each token `shifts` places behind, and the last ones to the front, as torch.roll.

    It is this rank's shard of torch.roll of the whole sequence, or of each of its documents. One exchange
    moves the tokens that change their rank. Gradients go back the same way.

    Args:
        input_: this rank's shard, any strided tensor.
        shifts: by how many places; below 0: to the front.
        layout: how the sequence lies on the ranks. Documents of a packed layout roll each by itself.
        dim: the sequence's dim.

    Returns:
        A new tensor of the input's shape.

    Raises:
        ValueError: the input is not this rank's shard, or dim is out of range.
        TypeError: shifts is not an int.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    check_type("roll", "layout", layout, SequenceLayout, "a SequenceLayout")
    with Arguments("roll", input_, layout.group) as call:
        shifts = check_int(call.where, "shifts", shifts, -(2**62), 2**62)
        numbers = checked_numbers(call, "layout", layout, call.dim("dim", dim), False)
        return gather_runs(call, numbers, layout.is_packed, -shifts, AROUND)
