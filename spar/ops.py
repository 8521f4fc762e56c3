"""The public operations on one group."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from ._runtime.call import (
    Call,
    Sizes,
    apply_steps,
    checked_together,
    cumulative_hint,
    entries,
    from_cumulative,
)
from ._runtime.exchange import ONE
from ._runtime.layouts import EVEN, WHOLE, Args, Layout, even, packed, pair, zigzag
from ._runtime.outputs import Move, write_to
from ._runtime.overlap import Work, launch
from .sequence_layout import SequenceLayout, checked_numbers
from .sizes import as_named_int, share, totals_of_share
from .topology.resolve import Group

Layouts = SequenceLayout | Sequence[SequenceLayout | None] | None


@overload
def all_to_all(
    input_: torch.Tensor,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sizes | None = None,
    gather_sizes: Sizes | None = None,
    layout: SequenceLayout | None = None,
    scatter_layout: SequenceLayout | None = None,
    async_op: Literal[False] = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def all_to_all(
    input_: Sequence[torch.Tensor],
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[Sizes | None] | None = None,
    gather_sizes: Sequence[Sizes | None] | None = None,
    layout: Layouts = None,
    scatter_layout: Layouts = None,
    async_op: Literal[False] = False,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]: ...


@overload
def all_to_all(
    input_: Any,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Any = None,
    gather_sizes: Any = None,
    async_op: Literal[True],
    out: Any = None,
) -> tuple[Any, Work]: ...


def all_to_all(
    input_: torch.Tensor | Sequence[torch.Tensor],
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sizes | Sequence[Sizes | None] | None = None,
    gather_sizes: Sizes | Sequence[Sizes | None] | None = None,
    layout: Layouts = None,
    scatter_layout: Layouts = None,
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
        async_op: return while the exchange runs. Until the Work's `wait()` has returned, do not read the
            output, and do not modify the input.
        out: a contiguous tensor of the output's shape, of the input's dtype and device, to write the output
            to; for a list of tensors: a list. No gradient is recorded.

    Returns:
        `out`, or a new contiguous tensor; `input_` itself in a group of one rank. For a list of tensors: a
        list. With async_op: a tuple of that and a `spar.Work`, whose `wait()` raises what ends the exchange.

    Raises:
        ValueError: the dims are equal or out of range, the sizes do not match the input, or `out` does not
            match the output, overlaps `input_`, or is passed where a gradient is recorded.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    if process_group is None and (layout is not None or scatter_layout is not None):
        process_group = _group_of(layout, scatter_layout)
    if out is not None or async_op or isinstance(input_, (list, tuple)):
        dims = scatter_dim, gather_dim, gather_size
        sizes = scatter_sizes, gather_sizes, layout, scatter_layout
        return _all_to_all_together(input_, process_group, dims, *sizes, async_op, out)
    call = Call("all_to_all", input_, process_group)  # type: ignore[arg-type]
    try:
        return call.apply(
            *_transposed(
                call,
                (scatter_dim, gather_dim, gather_size),
                scatter_sizes,
                gather_sizes,
                layout,
                scatter_layout,
            ),
            ONE,
        )
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


def _all_to_all_together(
    inputs: torch.Tensor | Sequence[torch.Tensor],
    group: Group,
    dims: Dims,
    scatter_sizes: Any,
    gather_sizes: Any,
    layout: Any,
    scatter_layout: Any,
    async_op: bool,
    out: Any,
) -> Any:
    works: list[Work] = []

    def run(calls: list[Call], at: list[str]) -> Sequence[torch.Tensor]:
        first, count = calls[0], len(calls)
        given = list(
            zip(
                entries(first, "scatter_sizes", scatter_sizes, at),
                entries(first, "gather_sizes", gather_sizes, at),
                entries(first, "layout", _repeated(layout, count), at),
                entries(first, "scatter_layout", _repeated(scatter_layout, count), at),
                strict=True,
            )
        )
        pairs: list[Args] = []
        for i, call in enumerate(calls):
            like = i > 0 and call.input.shape == calls[i - 1].input.shape  # the tensor before it
            if like and all(map(operator.is_, given[i], given[i - 1])):
                pairs.append(pairs[-1])
            else:
                pairs.append(pair(*_transposed(call, dims, *given[i], at[i])))
        args = tuple(pairs)
        place = first.place
        if async_op:
            outputs, work = launch(calls, at, Move.of(first, args), out, async_op)
            works.append(work)
            return outputs
        if out is not None:
            return write_to(out, calls, at, Move.of(first, args))
        if place.world == 1:
            return [call.input for call in calls]
        return apply_steps(calls, ((place, args),), ONE)

    result = checked_together("all_to_all", inputs, group, run)
    return (result, works[0]) if async_op else result


def _repeated(layout: Any, count: int) -> Any:
    return layout if layout is None or isinstance(layout, (list, tuple)) else [layout] * count


def _transposed(
    call: Call,
    dims: Dims,
    scatter_sizes: Any,
    gather_sizes: Any,
    layout: Any,
    scatter_layout: Any,
    at: str = "",
) -> tuple[Layout, Layout]:
    """Check the arguments of an all_to_all; return its layouts. `at` names the tensor: `checked_together`."""
    scatter_dim, gather_dim, gather_size = dims
    scatter = call.dim("scatter_dim", scatter_dim)
    gather = call.dim("gather_dim", gather_dim)
    if scatter == gather:
        raise call.error(
            "scatter_dim",
            f"{scatter_dim} and gather_dim is {gather_dim}",
            f"two different dims of an input with {call.ndim}",
        )
    shape = call.input.shape
    if gather_size is None and gather_sizes is None and layout is None:
        before: Layout = (gather, EVEN, shape[gather] * call.world)
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
    return call.shards("gather_sizes" + at, dim, sizes) or even(dim, _gather_size(call, dim, size))


def _gather_size(call: Call, gather: int, gather_size: int | None) -> int:
    local = call.input.shape[gather]
    if gather_size is None:
        return local * call.world
    gather_size = call.integer("gather_size", gather_size, "an int or None")
    if gather_size < 0 or share(gather_size, call.world, call.rank) != local:
        fitting = totals_of_share(local, call.world, call.rank)
        raise call.wrong_total("gather_size", gather_size, gather, fitting)
    return gather_size


def split_forward_gather_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    split_sizes: Sequence[int] | torch.Tensor | None = None,
    grad_scale: str | float | None = "down",
) -> torch.Tensor:
    """Keep this rank's shard of a tensor that all ranks hold; gather gradients, as MindSpeed-MM does.

    On rank r: y = x.split(sizes, dim)[r]. Forward communicates nothing.

    Args:
        input_: any strided tensor, the same on all ranks.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim to split.
        split_sizes: one local size per rank, as a list, tuple or 1-D int tensor. They sum to the size of
            `dim`. By default those of `cal_split_sizes`.
        grad_scale: what the gathered gradient is multiplied by: the world size ("up"), its reciprocal
            ("down"), a float, or nothing (None).

    Returns:
        A view of `input_` if the shard is contiguous, else a contiguous copy; `input_` itself in a group of
        one rank.

    Raises:
        ValueError: dim is out of range, the sizes do not sum to its size, or grad_scale is unknown.
        TypeError: the sizes are not ints, or the dtype of a recorded gradient cannot be scaled.
    """
    call = Call("split_forward_gather_backward", input_, process_group, exchanges=0)
    dim = call.dim("dim", dim)
    shards = call.parts("split_sizes", dim, split_sizes)
    return call.apply(WHOLE, shards, call.grad_scale(grad_scale))


def gather_forward_split_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    gather_sizes: Sequence[int] | torch.Tensor | None = None,
    grad_scale: str | float | None = "up",
) -> torch.Tensor:
    """Concatenate the shards of all ranks on every rank; keep this rank's shard of the gradient.

    As MindSpeed-MM does. y = concat over p of x_p along dim. Backward communicates nothing. It is exact if
    every rank holds the same gradient of y, as when all ranks compute the same loss from y.

    Args:
        input_: this rank's shard, any strided tensor.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim to concatenate.
        gather_sizes: one local size per rank, as a list, tuple or 1-D int tensor. By default all ranks must
            have the same size along `dim`.
        grad_scale: what this rank's shard of the gradient is multiplied by: the world size ("up"), its
            reciprocal ("down"), a float, or nothing (None).

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, gather_sizes[rank] is not the local size, or grad_scale is unknown.
        TypeError: the sizes are not ints, or the dtype of a recorded gradient cannot be scaled.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    call = Call("gather_forward_split_backward", input_, process_group)
    try:
        dim = call.dim("dim", dim)
        shards = call.shards("gather_sizes", dim, gather_sizes) or even(dim, input_.size(dim) * call.world)
        return call.apply(shards, WHOLE, call.grad_scale(grad_scale))
    except BaseException as error:
        call.fail(error)
        raise


def load_balanced_split_forward_gather_backward(
    input_: torch.Tensor, process_group: Group, dim: int = 0
) -> torch.Tensor:
    """Keep two chunks of a sequence, which balances the work under a causal mask, as MindSpeed-MM does.

    On rank r of P: y = chunks r and 2P-1-r of x.chunk(2P, dim) (zigzag order). Forward communicates nothing.
    Backward is one exchange: it gathers gradients into natural order and divides them by P.

    Args:
        input_: any strided tensor, the same on all ranks. Its size along `dim` is a multiple of 2P.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim to split.

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, or its size is not a multiple of 2P.
    """
    call = Call("load_balanced_split_forward_gather_backward", input_, process_group, exchanges=0)
    dim = call.dim("dim", dim)
    total = call.zigzag("input_", input_.size(dim), call.world)
    return call.apply(WHOLE, zigzag(dim, total), (float(call.world), True))


def load_balanced_gather_forward_split_backward(
    input_: torch.Tensor, process_group: Group, dim: int = 0
) -> torch.Tensor:
    """Undo `load_balanced_split_forward_gather_backward` in one exchange, as MindSpeed-MM does.

    Backward keeps this rank's two chunks of the gradient, times P. It communicates nothing, and is exact if
    every rank holds the same gradient of y.

    Args:
        input_: this rank's two chunks, any strided tensor. All ranks must have the same size along `dim`.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim that was split.

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, or its size is odd.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    call = Call("load_balanced_gather_forward_split_backward", input_, process_group)
    try:
        dim = call.dim("dim", dim)
        total = call.zigzag("input_", input_.size(dim) * call.world, call.world)
        return call.apply(zigzag(dim, total), WHOLE, (float(call.world), False))
    except BaseException as error:
        call.fail(error)
        raise


def packed_data_split_forward_gather_backward(
    hidden_states: torch.Tensor,
    process_group: Group,
    sequence_lengths: Sequence[int] | torch.Tensor,
    dim: int = 0,
) -> torch.Tensor:
    """Keep this rank's shard of each of several packed sequences, as MindSpeed-MM does.

    On rank r: y = concat over sequences s of x_s.split(cal_split_sizes(len(x_s), P), dim)[r]. Forward
    communicates nothing. Backward is one exchange for any number of sequences: it gathers gradients and
    divides them by P.

    Args:
        hidden_states: the packed sequences, the same on all ranks; any strided tensor.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        sequence_lengths: a list, tuple or 1-D int tensor. They sum to the size of `dim`; any may be 0.
        dim: the dim along which the sequences are packed.

    Returns:
        A new contiguous tensor; `hidden_states` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, a length is negative, or they do not sum to the size of `dim`.
        TypeError: the lengths are not ints.
    """
    name = "packed_data_split_forward_gather_backward"
    call = Call(name, hidden_states, process_group, "hidden_states", exchanges=0)
    dim = call.dim("dim", dim)
    lengths = call.lengths("sequence_lengths", sequence_lengths)
    call.check_sum("sequence_lengths", lengths, dim)
    return call.apply(WHOLE, packed(dim, len(lengths), lengths), (float(call.world), True))


def packed_data_gather_forward_split_backward(
    local_hidden_states: torch.Tensor,
    all_split_sizes: torch.Tensor | Sequence[Sequence[int]],
    process_group: Group,
    dim: int = 0,
) -> torch.Tensor:
    """Gather packed sequences on every rank, in one exchange for any number of them, as MindSpeed-MM does.

    y = concat over sequences s, over ranks p, of p's shard of s. Backward keeps this rank's shards of the
    gradient, times P. It communicates nothing, and is exact if every rank holds the same gradient of y.

    Args:
        local_hidden_states: this rank's shards, packed; any strided tensor.
        all_split_sizes: `[P, sequences]`, each rank's local size of each sequence, as
            `cal_split_sizes_multi` returns it: a tensor or a list of rows (nested lists under torch.compile).
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim along which the sequences are packed.

    Returns:
        A new contiguous tensor; `local_hidden_states` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, a size is negative, a row is missing, or this rank's row does not
            sum to its local size.
        TypeError: the sizes are not ints.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    name = "packed_data_gather_forward_split_backward"
    call = Call(name, local_hidden_states, process_group, "local_hidden_states")
    try:
        dim = call.dim("dim", dim)
        sequences, own, numbers = call.table("all_split_sizes", all_split_sizes)
        local = local_hidden_states.size(dim)
        if own != local:
            expected = f"{local}, the size of dim {dim} of its local_hidden_states"
            lengths = from_cumulative(numbers) if len(numbers) == sequences else ()
            if lengths and sum(share(length, call.world, call.rank) for length in lengths) == local:
                expected += cumulative_hint(lengths)
            raise call.error("all_split_sizes", f"a table whose row {call.rank} sums to {own}", expected)
        return call.apply(packed(dim, sequences, numbers), WHOLE, (float(call.world), False))
    except BaseException as error:
        call.fail(error)
        raise


def reorder_output(
    output: torch.Tensor, cp_rank: int, cp_size: int, cp_group: Group, dim: int = 0
) -> torch.Tensor:
    """Reorder zigzag chunks (0, 2P-1, 1, 2P-2, ...) into natural order, as MindSpeed-MM does.

    This is the order of `load_balanced_split_forward_gather_backward`'s shards, concatenated by rank. Nothing
    is communicated; MindSpeed-MM's callers pass cp_rank and cp_group.

    Args:
        output: any strided tensor. Its size along `dim` is a multiple of 2 * cp_size.
        cp_rank: ignored.
        cp_size: P, the number of ranks.
        cp_group: ignored.
        dim: the dim of the chunks.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: cp_size is below 1, the size is not a multiple of 2 * cp_size, or dim is out of range.
    """
    cp_size, dim = as_named_int("reorder_output: cp_size", cp_size), as_named_int("reorder_output: dim", dim)
    if cp_size < 1:
        raise ValueError(f"reorder_output: cp_size is {cp_size}; expected at least 1")
    if not -output.dim() <= dim < output.dim():
        raise ValueError(
            f"reorder_output: dim is {dim}; expected {-output.dim()} to {output.dim() - 1} "
            f"for an input of shape {list(output.shape)}"
        )
    total = output.size(dim)
    if total % (2 * cp_size):
        raise ValueError(
            f"reorder_output: output has {total} in dim {dim}; expected a multiple of {2 * cp_size}, "
            f"two chunks for each of {cp_size} ranks"
        )
    chunks = output.unflatten(dim, (2 * cp_size, total // (2 * cp_size)))
    dim %= output.dim()
    halves = chunks.unflatten(dim, (cp_size, 2)).unbind(dim + 1)
    return torch.cat((halves[0], halves[1].flip(dim)), dim).flatten(dim, dim + 1)
