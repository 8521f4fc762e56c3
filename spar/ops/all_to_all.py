"""`all_to_all`: scatter one dim, gather another."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from .._exchange.arguments import Call, Sizes, apply_steps
from .._exchange.exchange import ONE
from .._exchange.layouts import EVEN, Args, Layout, pair
from .._exchange.move import Move
from .._exchange.outputs import write_to
from .._exchange.repeated import repeat
from .._exchange.together import checked_together, entries
from .._exchange.work import Work, launch
from ..sequence_layout import SequenceLayout, checked_numbers, kept
from ..sizes import share, totals_of_share
from ..topology.resolve import Group

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
            call = Call("all_to_all", input_, process_group)  # type: ignore[arg-type]
            error = TypeError(f"{call.where}: process_group and group are passed; expected one of them")
            call.fail(error)
            raise error
        process_group = group
    if process_group is None and (layout is not None or scatter_layout is not None):
        process_group = _group_of(layout, scatter_layout)
    dims, how = (scatter_dim, gather_dim, gather_size), (scatter_sizes, gather_sizes, layout, scatter_layout)
    key = _key(input_, dims, how) if out is None and not async_op else None
    output = repeat("all_to_all", input_, process_group, key)
    if output is not None:
        return output
    if out is not None or async_op or isinstance(input_, (list, tuple)):
        return _exchange("all_to_all", input_, process_group, dims, how, async_op, out, key)
    call = Call("all_to_all", input_, process_group)  # type: ignore[arg-type]
    try:
        return call.apply(*_transposed(call, dims, how), ONE, key)
    except BaseException as error:
        call.fail(error)
        raise


def _group_of(*layouts: Any) -> Group:
    """Return the group of the first layout, also in a list."""
    for layout in layouts:
        for each in layout if isinstance(layout, (list, tuple)) else [layout]:
            if isinstance(each, SequenceLayout):
                return each.group
    return None


Dims = tuple[int, int, int | None]  # scatter_dim, gather_dim, gather_size
How = tuple[Any, Any, Any, Any]  # scatter_sizes, gather_sizes, layout, scatter_layout


def _key(inputs: object, dims: Dims, how: How) -> tuple[object, ...] | None:
    """Return by what `repeat` finds such calls; None: it does not."""
    scatter_dim, gather_dim, size = dims
    if not (type(scatter_dim) is type(gather_dim) is int and (size is None or type(size) is int)):
        return None  # True is not a dim, and equals 1
    if how[0] is how[1] is how[2] is how[3] is None:
        return dims
    parts = kept(inputs, *how)
    return None if parts is None else (dims, parts)


def all_to_all_for(
    name: str,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    group: Group,
    dims: Dims,
    how: How,
    note: str = "",
) -> Any:
    """Run an all_to_all for the operation `name`, which its errors name; `note` is as in Operation."""
    key = _key(inputs, dims, how)
    key = None if key is None else (key, note)
    output = repeat(name, inputs, group, key)
    return _exchange(name, inputs, group, dims, how, False, None, key, note) if output is None else output


def _exchange(
    name: str,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    group: Group,
    dims: Dims,
    how: How,
    async_op: bool,
    out: Any,
    key: tuple[object, ...] | None,
    note: str = "",
) -> Any:
    """Run an all_to_all with all options; `key` is as for `apply_steps`."""
    works: list[Work] = []

    def run(calls: list[Call], at: list[str]) -> Sequence[torch.Tensor]:
        first, each = calls[0], None
        first.note = note
        if not (how[0] is how[1] is how[2] is how[3] is None):
            each = _for_each(first, how, at)
        pairs: list[Args] = []
        for i, call in enumerate(calls):
            like = i > 0 and call.shape == calls[i - 1].shape  # the tensor before it
            if like and (each is None or all(map(operator.is_, each[i], each[i - 1]))):
                pairs.append(pairs[-1])
            else:
                pairs.append(pair(*_transposed(call, dims, each[i] if each else how, at[i])))
        args = tuple(pairs)
        place = first.place
        if async_op:
            outputs, work = launch(calls, at, Move(first.name, place, args), out, async_op)
            works.append(work)
            return outputs
        if out is not None:
            return write_to(out, calls, at, Move(first.name, place, args))
        if place.world == 1:
            return [call.input for call in calls]
        return apply_steps(calls, ((place, args),), ONE, key)

    result = checked_together(name, inputs, group, run)
    return (result, works[0]) if async_op else result


def _for_each(call: Call, how: How, at: list[str]) -> list[How]:
    """Return the sizes and layouts of each tensor."""
    if at == [""]:
        return [how]
    scatter_sizes, gather_sizes, layout, scatter_layout = how
    return list(
        zip(
            entries(call, "scatter_sizes", scatter_sizes, at),
            entries(call, "gather_sizes", gather_sizes, at),
            entries(call, "layout", _repeated(layout, len(at)), at),
            entries(call, "scatter_layout", _repeated(scatter_layout, len(at)), at),
            strict=True,
        )
    )


def _repeated(layout: Any, count: int) -> Any:
    return layout if layout is None or isinstance(layout, (list, tuple)) else [layout] * count


def _transposed(call: Call, dims: Dims, how: How, at: str = "") -> tuple[Layout, Layout]:
    """Check the arguments of an all_to_all; return its layouts. `at` names the tensor: `checked_together`."""
    scatter_dim, gather_dim, gather_size = dims
    scatter_sizes, gather_sizes, layout, scatter_layout = how
    scatter = call.dim("scatter_dim", scatter_dim)
    gather = call.dim("gather_dim", gather_dim)
    if scatter == gather:
        raise call.error(
            "scatter_dim",
            f"{scatter_dim} and gather_dim is {gather_dim}",
            f"two different dims of an input with {call.ndim}",
        )
    shape = call.shape
    if gather_sizes is None and layout is None:
        before: Layout = (gather, EVEN, _gather_size(call, gather, shape[gather], gather_size))
    else:
        before = _gathered(call, gather, gather_size, gather_sizes, layout, at)
    if scatter_sizes is None and scatter_layout is None:
        return before, (scatter, EVEN, shape[scatter])
    return before, _scattered(call, scatter, scatter_sizes, scatter_layout, at)


def _scattered(call: Call, dim: int, sizes: Any, layout: Any, at: str) -> Layout:
    if layout is None:
        return call.parts("scatter_sizes" + at, dim, sizes)
    call.one_of(**{f"scatter_sizes{at}": sizes, f"scatter_layout{at}": layout})
    return checked_numbers(call, "scatter_layout" + at, layout, dim, True, at)


def _gathered(call: Call, dim: int, size: int | None, sizes: Any, layout: Any, at: str) -> Layout:
    call.one_of(**{"gather_size": size, f"gather_sizes{at}": sizes, f"layout{at}": layout})
    if layout is not None:
        return checked_numbers(call, "layout" + at, layout, dim, False, at)
    shards = call.shards("gather_sizes" + at, dim, sizes)
    assert shards is not None
    return shards


def _gather_size(call: Call, dim: int, local: int, total: int | None) -> int:
    """Return the global size of the gather dim, of which this rank holds `local`."""
    world, rank = call.world, call.rank
    if total is None:
        return call.gathered_size(dim)
    if type(total) is not int:
        total = call.integer("gather_size", total, "an int or None")
    if total < 0 or share(total, world, rank) != local:
        raise call.wrong_total("gather_size", total, dim, totals_of_share(local, world, rank))
    return total
