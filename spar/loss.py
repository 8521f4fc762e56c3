# SPDX-License-Identifier: Apache-2.0
"""The mean of a loss over the tokens of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from ._checks import check_number
from ._exchange.arguments import Arguments
from ._exchange.layouts import WHOLE, even
from ._group.registry import place_of
from ._tracing import constant
from ._transports.dtypes import add_rows
from .topology.resolve import Group, process_group

WIDE = torch.float64  # counts of up to 2^53 tokens are exact


def mean_loss(
    loss_sum: torch.Tensor,
    count: int | float | torch.Tensor,
    group: Group = None,
    *,
    averaged_by: Group = None,
) -> torch.Tensor:
    """Divide the sum of all ranks' losses by the number of all ranks' tokens.

    value = sum over p of loss_sum_p / sum over p of count_p, equal on all ranks. It is 0 if no rank has
    tokens. Call backward on it, on every rank of the group. Backward does not communicate: the gradient of
    this rank's loss_sum is 1 / tokens of all ranks, times the size of `averaged_by`. Parameter gradients
    are then right once they are summed over the ranks, or averaged over `averaged_by`.

    For gradient accumulation pass each micro-batch's loss_sum with the count of all micro-batches of the
    step, and call backward on each value. The values then sum to the loss of the step.

    Args:
        loss_sum: the sum of this rank's losses, a 0-dim tensor of a float dtype of at least 16 bits. Without
            tokens: 0, computed by the model, so that its backward makes the model's exchanges.
        count: the number of this rank's tokens that count, finite and at least 0: an int, float or 0-dim
            tensor. A tensor is not checked, and has no gradient.
        group: all ranks among which the tokens lie: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name,
            or None for the current topology's sequence group (WORLD if there is none).
        averaged_by: the ranks over which DDP or FSDP averages gradients: a group as above, or a DeviceMesh of
            any number of dims. None: gradients are summed.

    Returns:
        A 0-dim tensor, of float64 if loss_sum is, else float32. Sums run in float64, in the ranks' order.

    Raises:
        ValueError: loss_sum or count is not 0-dim, or count is negative or not finite.
        TypeError: loss_sum is not a float tensor, or count not a number.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    scalar = isinstance(loss_sum, torch.Tensor) and loss_sum.dim() == 0
    with Arguments("mean_loss", loss_sum.reshape(1) if scalar else loss_sum, group, "loss_sum") as call:
        kind = call.input.dtype
        if not scalar:
            shape = f"of shape {list(loss_sum.shape)}"
            raise call.error("loss_sum", shape, "a 0-dim tensor, the sum of this rank's losses")
        if not kind.is_floating_point or kind.itemsize < 2:
            raise call.type_error("loss_sum", f"a tensor of {kind}", "a float dtype of at least 16 bits")
        tokens = number_of(call, "count", count)
        return divided(call, call.input, tokens, averaged_by).to(torch.promote_types(kind, torch.float32))


def divided(
    call: Arguments,
    loss_sum: torch.Tensor,
    count: torch.Tensor,
    averaged_by: Group,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Divide the sum of all ranks' losses by that of their counts, or by the total; tensors of `[1]`."""
    factor = 1.0 if averaged_by is None else float(_size(averaged_by, call.name))
    if factor != 1.0:
        call.note += f", averaged by {factor:g} ranks" if call.note else f"averaged by {factor:g} ranks"
    call.input = torch.stack([loss_sum.to(WIDE), count], 1)
    rows = call.apply(even(0, call.world), WHOLE, (factor, False))
    losses, number = add_rows(rows).unbind()
    number = number.detach() if total is None else total[0]
    return torch.where(number == 0, 0, losses / torch.where(number == 0, 1, number))


def number_of(call: Arguments, name: str, count: Any) -> torch.Tensor:
    """Return a number of tokens as a tensor `[1]` like the call's input."""
    if not isinstance(count, torch.Tensor):
        check_number(call.where, name, count, 0)
        return torch.full((1,), float(count), dtype=WIDE, device=call.input.device)
    if count.dim() != 0:
        raise call.error(name, f"of shape {list(count.shape)}", "a number or a 0-dim tensor")
    if count.is_complex() or count.dtype == torch.bool:
        raise call.type_error(name, f"a tensor of {count.dtype}", "a tensor of ints or floats")
    return count.detach().reshape(1).to(call.input.device, WIDE)


@constant
def _size(averaged_by: Any, name: str) -> int:
    """Return the number of ranks of a group, or of a mesh of any number of dims."""
    if getattr(averaged_by, "ndim", 1) != 1 and hasattr(averaged_by, "get_group"):
        size: int = averaged_by.size()
        return size
    return place_of(process_group(averaged_by, name, "averaged_by")).world
