# SPDX-License-Identifier: Apache-2.0
"""Shard a whole sequence, or gather one, by a layout: the operations that `SequenceLayout` has as methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .._group.group import Call
from .._group.registry import place_of
from ..topology.absent import AbsentGroup
from ..topology.resolve import process_group
from .arguments import Arguments, Key, ranks_of
from .exchange import GATHER, MOVE, SUM, Scale
from .grad_scale import NOT_GIVEN, GradScale, scale_error
from .layouts import WHOLE, Args, Layout, pair, shards_pair
from .observers import must_record
from .repeated import layouts_key, repeat, scale_key
from .together import exchange_together

Backward = Literal["slice", "sum"]


def gather(
    x: Any, dim: int, layout: Any, check: Callable[..., Layout], grad_scale: GradScale, backward: Backward
) -> Any:
    """Run SequenceLayout.gather: see there; layout, check: as of `shard_or_gather`."""
    name = "SequenceLayout.gather"
    if backward == "slice":
        return shard_or_gather(name, x, dim, layout, check, grad_scale, False)
    if backward == "sum" and grad_scale is NOT_GIVEN:
        return shard_or_gather(name, x, dim, layout, check, None, False, exact=True)
    ranks = ranks_of(layout.group, name)
    with Call(ranks, name):
        where = f"{name} on rank {ranks.rank} of {ranks.world}"
        if backward == "sum":
            raise ValueError(f'{where}: grad_scale is {grad_scale!r:.200}; expected none with backward="sum"')
        raise ValueError(f'{where}: backward is {backward!r:.200}; expected "slice" or "sum"')


def shard_or_gather(
    name: str,
    x: Any,
    dim: int,
    layout: Any,
    check: Callable[..., Layout],
    grad_scale: GradScale,
    splits: bool,
    exact: bool = False,
) -> Any:
    """Run the operation `name`, which its errors name, on a tensor or a list of tensors.

    Args:
        layout: a SequenceLayout. check: `checked_numbers` of it.
        splits: whether x is whole, and a shard is returned; else the reverse.
        exact: whether ranks' gradients differ, or their wholes: both are summed.
    """
    arguments: Key = None
    if (exact or not splits) and type(dim) is int:  # Only such a call exchanges.
        parts, scale = layouts_key(x, None, layout), scale_key(grad_scale)
        arguments = None if parts is None or scale is None else (dim, parts, scale, exact)
    output, key = repeat(name, x, layout.group, arguments)
    if output is not None:
        return output

    group: Any = layout.group
    if absent := isinstance(group, AbsentGroup) and splits and not exact:
        group = place_of(layout.group)  # all that a selection needs, but not its gradient

    def layouts(calls: list[Arguments], at: list[str]) -> tuple[tuple[Args, ...], Scale]:
        if absent and must_record([call.input for call in calls]):
            process_group(layout.group, calls[0].where)
        if grad_scale is NOT_GIVEN and must_record([call.input for call in calls]):
            raise scale_error(calls[0], splits)
        scale = calls[0].grad_scale(None if grad_scale is NOT_GIVEN else grad_scale)
        shards = [
            check(call, "layout", layout, call.dim("dim", dim), splits, which)
            for call, which in zip(calls, at, strict=True)
        ]
        if exact:
            return tuple([shards_pair(shard, calls[0].world, splits) for shard in shards]), scale
        return tuple([pair(WHOLE, s) if splits else pair(s, WHOLE) for s in shards]), scale

    kind = MOVE if not exact else SUM if splits else GATHER
    exchanges = 0 if splits and not exact else 1
    return exchange_together(name, x, group, layouts, key, kind, exchanges=exchanges)
