# SPDX-License-Identifier: Apache-2.0
"""What an exchange that communicates nothing does: each rank selects its shard of a whole tensor."""

from __future__ import annotations

import torch

from .. import _C
from .._control.state import Place
from .._group.group import Group
from .._transports.dtypes import ITEM_TYPES, ITEMS, SCALE_TYPES, apply_scale
from .layouts import PACKED, ZIGZAG, Args, packed_index, select

_COPYABLE = frozenset(
    {
        *SCALE_TYPES,
        torch.complex32,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)  # between strides, by torch


def scaled(part: torch.Tensor, factor: float, divide: bool) -> torch.Tensor:
    """Multiply or divide by the factor; return a view if the factor is 1 and the part is contiguous."""
    if factor != 1.0:
        return part / factor if divide else part * factor
    if part.dtype in _COPYABLE or part.is_contiguous():
        return part.contiguous()
    return part.view(ITEMS[part.dtype.itemsize]).contiguous().view(part.dtype)


def selected(
    x: torch.Tensor, name: str, group: Group | Place, args: Args, factor: float, divide: bool
) -> torch.Tensor:
    """Select this rank's shard of a whole tensor, as a view if it is contiguous and unscaled."""
    if args[3] == PACKED or (x.is_cpu and (args[3] == ZIGZAG or factor != 1.0)):
        return copied(x, name, group, args, factor, divide)
    part = select(x, args[2:], group.world, group.rank)
    assert part is not None
    if factor == 1.0 and part.is_contiguous():
        return part
    return copied(x, name, group, args, factor, divide) if x.is_cpu else scaled(part, factor, divide)


def copied(
    x: torch.Tensor, name: str, group: Group | Place, args: Args, factor: float, divide: bool
) -> torch.Tensor:
    """Copy this rank's shard, and scale it, in one pass."""
    x = x.resolve_conj().resolve_neg()
    if not x.is_cpu:
        index = packed_index(args[2:], group.world, group.rank).to(x.device)
        return scaled(x.index_select(args[2], index), factor, divide)
    size, kind, *_ = ITEM_TYPES[x.dtype]
    core = _C.Exchange(name, "", group.world, group.rank, size, (args,), kind, divide, factor, 0)
    output = None
    # reused memory: the page faults of a new tensor take longer than the copy
    if isinstance(group, Group) and not group.own_output:
        output = core.select((x,))
    if output is None:
        plan, addresses = core.plan((x,), 0)
        output = torch.empty(plan.out_shapes[0], dtype=x.dtype, device="cpu")
        plan.copy_own(addresses, (output.data_ptr(),), kind, divide, factor)
    elif output.dtype != x.dtype:
        output = output.view(x.dtype)
    if kind == 0:
        apply_scale(output, factor, divide)
    return output
