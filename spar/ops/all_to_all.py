# SPDX-License-Identifier: Apache-2.0
"""`all_to_all`: scatter one dim, gather another."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple, overload

import torch

from .._exchange.arguments import Arguments, Key, Sizes, apply_together
from .._exchange.exchange import ONE, Scale
from .._exchange.layouts import EVEN, Args, Layout
from .._exchange.repeated import layouts_key, repeat
from .._exchange.together import entries, exchange_together
from .._exchange.work import Work
from ..sequence_layout import SequenceLayout, checked_numbers
from ..sizes import share, totals_of_share
from ..topology.resolve import Group, process_group as resolved

Layouts = SequenceLayout | Sequence[SequenceLayout | None] | None


@overload
def all_to_all(
    input_: torch.Tensor,
    process_group: Group = None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sizes | None = None,
    gather_sizes: Sizes | None = None,
    layout: SequenceLayout | None = None,
    scatter_layout: SequenceLayout | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def all_to_all(
    input_: Sequence[torch.Tensor],
    process_group: Group = None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[Sizes | None] | None = None,
    gather_sizes: Sequence[Sizes | None] | None = None,
    layout: Layouts = None,
    scatter_layout: Layouts = None,
    group: Group = None,
    async_op: Literal[False] = False,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]: ...


@overload
def all_to_all(
    input_: Any,
    process_group: Group = None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Any = None,
    gather_sizes: Any = None,
    group: Group = None,
    async_op: Literal[True],
    out: Any = None,
) -> tuple[Any, Work]: ...


def all_to_all(
    input_: torch.Tensor | Sequence[torch.Tensor],
    process_group: Group = None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sizes | Sequence[Sizes | None] | None = None,
    gather_sizes: Sizes | Sequence[Sizes | None] | None = None,
    layout: Layouts = None,
    scatter_layout: Layouts = None,
    group: Group = None,
    async_op: bool = False,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """Scatter one dim over the group and gather another, as MindSpeed-MM's `all_to_all` does.

    On rank r: y = concat over p of x_p.split(sizes, scatter_dim)[r] along gather_dim. `cal_split_sizes` gives
    the sizes. With the defaults `[B, S/P, H, D]` becomes `[B, S, H/P, D]`. The gradient is the same operation
    with the dims, and their sizes, swapped.

    Args:
        input_: any strided tensor of at least two dims, of any dtype; or a list of such tensors of one dtype
            and device, such as Q, K and V, which one exchange moves together.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the
            layout's group, else the current topology's sequence group (WORLD if there is none).
        scatter_dim: the dim to scatter. Each rank passes all of it, and receives its shard.
        gather_dim: the dim to gather. Each rank passes its shard.
        gather_size: the global size of the gather dim, of which each rank must hold its share by
            `cal_split_sizes`. By default every rank must hold the same local size.
        scatter_sizes: one size of scatter_dim for each rank, at least 0, as a list, tuple or 1-D int tensor.
            They sum to its size. By default those of `cal_split_sizes`. For a list of tensors: a list of such
            entries, or None, one for each.
        gather_sizes: one size of gather_dim for each rank, likewise; replaces gather_size.
        layout: how the gathered sequence lies on the ranks, instead of sizes: it lands in natural order. For
            a list of tensors: one for all, or a list of layouts, or None, one for each.
        scatter_layout: how the scattered sequence is to lie, likewise: it comes from natural order.
        group: the same as process_group, by the name that the other exchanges have.
        async_op: return while the exchange runs. Until the Work's `wait()` has returned, do not read the
            output, and do not modify the input.
        out: a contiguous tensor of the output's shape, of the input's dtype and device, to write the output
            to; for a list of tensors: a list. No gradient is recorded.

    Returns:
        `out`, or a new contiguous tensor; `input_` itself in a group of one rank. For a list of tensors a
        list. With async_op a tuple of that and a `spar.Work`, whose `wait()` raises what ends the exchange.

    Raises:
        ValueError: the dims are equal or out of range, the sizes do not match the input, or `out` does not
            match the output, overlaps `input_`, or is passed where a gradient is recorded.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    if group is not None:
        if process_group is not None:
            with Arguments("all_to_all", input_, process_group) as call:  # type: ignore[arg-type]
                raise TypeError(f"{call.where}: process_group and group are passed; expected one of them")
        process_group = resolved(group, "all_to_all", "group")
    if process_group is None and (layout is not None or scatter_layout is not None):
        process_group = _group_of(layout, scatter_layout)
    dims, split = (scatter_dim, gather_dim, gather_size), None
    if not (scatter_sizes is gather_sizes is layout is scatter_layout is None):
        split = SplitArguments(scatter_sizes, gather_sizes, layout, scatter_layout)
    if out is not None or async_op:
        return _together(input_, process_group, dims, split, async_op, out)
    if split is None and gather_size is None and type(scatter_dim) is type(gather_dim) is int:  # most calls
        arguments: Key = dims
    else:
        arguments = _remembered(input_, dims, split)
    output, key = repeat("all_to_all", input_, process_group, arguments)
    if output is not None:
        return output
    if isinstance(input_, (list, tuple)):
        return _together(input_, process_group, dims, split, False, None, key)
    with Arguments("all_to_all", input_, process_group) as call:  # type: ignore[arg-type]
        return apply_together((call,), (_layouts(call, dims, split),), ONE, key)[0]


def _group_of(*layouts: Any) -> Group:
    """Return the group of the first layout, also in a list."""
    for layout in layouts:
        for entry in layout if isinstance(layout, (list, tuple)) else [layout]:
            if isinstance(entry, SequenceLayout):
                return entry.group
    return None


Dims = tuple[int, int, int | None]  # scatter_dim, gather_dim, gather_size


class SplitArguments(NamedTuple):
    """Sizes and layouts of the two dims; of a list of tensors each may be a list. None: by the size rule."""

    scatter_sizes: Any
    gather_sizes: Any
    layout: Any
    scatter_layout: Any


def _remembered(inputs: object, dims: Dims, split: SplitArguments | None) -> Key:
    """Return by what `repeat` finds such calls; None: it does not."""
    scatter, gather, size = dims
    if not (type(scatter) is type(gather) is int and type(size) in (int, NoneType)):
        return None  # True is not a dim, and equals 1
    parts = () if split is None else layouts_key(inputs, *split)
    return None if parts is None else (dims, parts)


def _together(
    inputs: Any,
    group: Group,
    dims: Dims,
    split: SplitArguments | None,
    async_op: bool,
    out: Any,
    key: Key = None,
) -> Any:
    """Run an all_to_all of one tensor or several, with all options; `key` is as for `apply_together`."""

    def layouts(calls: list[Arguments], at: list[str]) -> tuple[tuple[Args, ...], Scale]:
        per_tensor: Sequence[Any] = [None] * len(calls) if split is None else _by_tensor(calls[0], split, at)
        pairs: list[Args] = []
        for i, call in enumerate(calls):
            like = i > 0 and call.shape == calls[i - 1].shape  # the tensor before it
            if like and (split is None or all(map(operator.is_, per_tensor[i], per_tensor[i - 1]))):
                pairs.append(pairs[-1])
            else:
                pairs.append(_layouts(call, dims, per_tensor[i], at[i]))
        return tuple(pairs), ONE

    return exchange_together("all_to_all", inputs, group, layouts, key, out=out, async_op=async_op)


def _by_tensor(call: Arguments, split: SplitArguments, at: list[str]) -> list[SplitArguments]:
    """Return the sizes and layouts of each tensor."""
    if at == [""]:
        return [split]
    columns = (
        entries(call, "scatter_sizes", split.scatter_sizes, at),
        entries(call, "gather_sizes", split.gather_sizes, at),
        entries(call, "layout", _repeated(split.layout, len(at)), at),
        entries(call, "scatter_layout", _repeated(split.scatter_layout, len(at)), at),
    )
    return [SplitArguments(*row) for row in zip(*columns, strict=True)]


def _repeated(layout: Any, count: int) -> Any:
    return layout if layout is None or isinstance(layout, (list, tuple)) else [layout] * count


def _layouts(call: Arguments, dims: Dims, split: SplitArguments | None, at: str = "") -> Args:
    """Check the arguments of an all_to_all; return its layouts. `at`: see `exchange_together`."""
    scatter, gather, size = dims
    ndim, shape = call.ndim, call.shape
    if not (type(scatter) is int and 0 <= scatter < ndim):
        scatter = call.dim("scatter_dim", scatter)
    if not (type(gather) is int and 0 <= gather < ndim):
        gather = call.dim("gather_dim", gather)
    if scatter == gather:
        raise call.error(
            "scatter_dim",
            f"{dims[0]} and gather_dim is {dims[1]}",
            f"two different dims of an input with {ndim}",
        )
    if split is None or split.gather_sizes is split.layout is None:
        total = shape[gather] * call.world
        if size is not None or total >= 2**62:
            total = _gather_size(call, gather, shape[gather], size)
        before: Layout = (gather, EVEN, total)
    else:
        before = _gathered(call, gather, size, split.gather_sizes, split.layout, at)
    if split is None or split.scatter_sizes is split.scatter_layout is None:
        after: Layout = (scatter, EVEN, shape[scatter])
    else:
        after = _scattered(call, scatter, split.scatter_sizes, split.scatter_layout, at)
    return len(before), *before, *after


def _scattered(call: Arguments, dim: int, sizes: Any, layout: Any, at: str) -> Layout:
    if layout is None:
        return call.parts("scatter_sizes" + at, dim, sizes)
    call.one_of(**{f"scatter_sizes{at}": sizes, f"scatter_layout{at}": layout})
    return checked_numbers(call, "scatter_layout" + at, layout, dim, True, at)


def _gathered(call: Arguments, dim: int, size: int | None, sizes: Any, layout: Any, at: str) -> Layout:
    call.one_of(**{"gather_size": size, f"gather_sizes{at}": sizes, f"layout{at}": layout})
    if layout is not None:
        return checked_numbers(call, "layout" + at, layout, dim, False, at)
    shards = call.shards("gather_sizes" + at, dim, sizes)
    assert shards is not None
    return shards


def _gather_size(call: Arguments, dim: int, local: int, total: int | None) -> int:
    """Return the global size of the gather dim, of which this rank holds `local`."""
    world, rank = call.world, call.rank
    if total is None:
        return call.gathered_size(dim)
    if type(total) is not int:
        total = call.integer("gather_size", total, "an int or None")
    if total < 0 or share(total, world, rank) != local:
        raise call.wrong_total("gather_size", total, dim, totals_of_share(local, world, rank))
    return total
