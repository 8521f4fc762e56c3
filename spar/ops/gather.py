# SPDX-License-Identifier: Apache-2.0
"""`all_gather` and `reduce_scatter`: exact transposes of each other, for any sizes.

Neither scales anything. For L = sum over r of L_r, dL/dx_p is the sum over r of rank r's gradient of part p,
which is what a reduce_scatter computes: gradients of parameters are then *summed* over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from .._exchange.arguments import Arguments, Key, Sizes
from .._exchange.exchange import GATHER, ONE, SUM, Scale
from .._exchange.layouts import Args, Layout, even, shards_pair
from .._exchange.repeated import layouts_key, repeat
from .._exchange.together import entries, exchange_together
from .._exchange.work import Work
from ..sequence_layout import SequenceLayout, checked_numbers
from ..topology.resolve import Group


@overload
def all_gather(
    input_: torch.Tensor,
    group: Group = None,
    dim: int = 0,
    sizes: Sizes | None = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: Literal[False] = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def all_gather(
    input_: Sequence[torch.Tensor],
    group: Group = None,
    dim: int = 0,
    sizes: Sequence[Sizes | None] | None = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: Literal[False] = False,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]: ...


@overload
def all_gather(
    input_: Any,
    group: Group = None,
    dim: int = 0,
    sizes: Any = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: Literal[True],
    out: Any = None,
) -> tuple[Any, Work]: ...


def all_gather(
    input_: torch.Tensor | Sequence[torch.Tensor],
    group: Group = None,
    dim: int = 0,
    sizes: Any = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: bool = False,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """Concatenate the shards of all ranks on every rank; sum the ranks' gradients of each shard.

    y = concat over p of x_p along dim, as in torch.distributed.all_gather_into_tensor. Backward is a
    reduce_scatter: exact for any loss, also one that differs between ranks.

    Args:
        input_: this rank's shard, any strided tensor; or a list of such tensors of one dtype and device,
            which one exchange moves together.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the layout's group, else
            the current topology's sequence group (WORLD if there is none).
        dim: the dim to concatenate.
        sizes: one size of `dim` for each rank, at least 0, as a list, tuple or 1-D int tensor. By default all
            ranks must have the same size. For a list of tensors: a list with one such entry, or None, for
            each.
        layout: how a sequence lies on the ranks, instead of sizes: the output is in natural order.
        async_op: return while the exchange runs. Until the Work's `wait()` has returned, do not read the
            output, and do not modify the input.
        out: a contiguous tensor of the output's shape, of the input's dtype and device, to write the output
            to; for a list of tensors: a list. No gradient is recorded.

    Returns:
        `out`, or a new contiguous tensor; `input_` itself in a group of one rank. For a list of tensors a
        list. With async_op a tuple of that and a `spar.Work`, whose `wait()` raises what ends the exchange.

    Raises:
        ValueError: dim is out of range, the sizes or the layout do not match the local size, or `out` does
            not match the output, overlaps `input_`, or is passed where a gradient is recorded.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    return transpose_for("all_gather", False, input_, group, dim, sizes, layout, async_op, out)


@overload
def reduce_scatter(
    input_: torch.Tensor,
    group: Group = None,
    dim: int = 0,
    sizes: Sizes | None = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: Literal[False] = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def reduce_scatter(
    input_: Sequence[torch.Tensor],
    group: Group = None,
    dim: int = 0,
    sizes: Sequence[Sizes | None] | None = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: Literal[False] = False,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]: ...


@overload
def reduce_scatter(
    input_: Any,
    group: Group = None,
    dim: int = 0,
    sizes: Any = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: Literal[True],
    out: Any = None,
) -> tuple[Any, Work]: ...


def reduce_scatter(
    input_: torch.Tensor | Sequence[torch.Tensor],
    group: Group = None,
    dim: int = 0,
    sizes: Any = None,
    *,
    layout: SequenceLayout | None = None,
    async_op: bool = False,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """Sum tensors over the ranks, and keep this rank's shard of the sum; gather the gradients.

    y on rank r = sum over p of x_p.split(sizes, dim)[r], as in torch.distributed.reduce_scatter_tensor. It
    sums in the order of the ranks, in float32 for 16-bit floats, so that every run gives the same bits.
    Backward is an all_gather.

    Args:
        input_: a summand of the whole size, any strided tensor of a dtype that torch adds; or a list of such
            tensors of one dtype and device, which one exchange moves together.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the layout's group, else
            the current topology's sequence group (WORLD if there is none).
        dim: the dim to scatter.
        sizes: one size of `dim` for each rank, at least 0, that sum to its size. By default those of
            `cal_split_sizes`. For a list of tensors: a list with one such entry, or None, for each.
        layout: how a sequence lies on the ranks, instead of sizes: the input is in natural order.
        async_op: as for `all_gather`.
        out: as for `all_gather`.

    Returns:
        `out`, or a new contiguous tensor; `input_` itself in a group of one rank. For a list of tensors a
        list. With async_op a tuple of that and a `spar.Work`, whose `wait()` raises what ends the exchange.

    Raises:
        ValueError: dim is out of range, the sizes or the layout do not match the size of dim, or `out` does
            not match the output, overlaps `input_`, or is passed where a gradient is recorded.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    return transpose_for("reduce_scatter", True, input_, group, dim, sizes, layout, async_op, out)


def transpose_for(
    name: str,
    sums: bool,
    input_: Any,
    group: Group,
    dim: int,
    sizes: Any,
    layout: SequenceLayout | None,
    async_op: bool = False,
    out: Any = None,
) -> Any:
    """Gather, or sum and scatter, for the operation `name`, which its errors name."""
    if group is None and isinstance(layout, SequenceLayout):
        group = layout.group
    arguments: Key = None
    if out is None and not async_op and type(dim) is int:
        parts = () if sizes is layout is None else layouts_key(input_, sizes, layout)
        arguments = None if parts is None else (dim, parts)
    output, key = repeat(name, input_, group, arguments)
    if output is not None:
        return output

    def layouts(calls: list[Arguments], at: list[str]) -> tuple[tuple[Args, ...], Scale]:
        first = calls[0]
        if layout is not None:
            first.one_of(sizes=sizes, layout=layout)
        triples = zip(calls, entries(first, "sizes", sizes, at), at, strict=True)
        shards = [_shard(call, sums, dim, its_sizes, layout, label) for call, its_sizes, label in triples]
        return tuple([shards_pair(shard, first.world, sums) for shard in shards]), ONE

    kind = SUM if sums else GATHER
    return exchange_together(name, input_, group, layouts, key, kind, out=out, async_op=async_op)


def _shard(
    call: Arguments, sums: bool, dim: int, sizes: Any, layout: SequenceLayout | None, at: str
) -> Layout:
    """Check the arguments; return which part each rank holds. `at`: see `exchange_together`."""
    of = call.dim("dim", dim)
    if layout is not None:
        return checked_numbers(call, "layout", layout, of, sums, at)
    if sums:
        return call.parts(f"sizes{at}", of, sizes)
    return call.shards(f"sizes{at}", of, sizes) or even(of, call.gathered_size(of))
