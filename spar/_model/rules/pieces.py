# SPDX-License-Identifier: Apache-2.0
"""Functions that cut a tensor, or join several.

Inside of a sequence, a cut moves tokens, such that each rank has its part of either side.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from torch import Tensor

from ..call import FunctionCall, Plan, are_ints, moves_to, part_rule, rule
from ..dtensors import is_distributed
from ..moving import cut, within
from ..part import Part, part_of, whole_shape
from .rows import index_of_rows, moves_of_value, rows, set_rows
from .windows import format_of, listed, separate


@part_rule("chunk unsafe_chunk split unsafe_split split_with_sizes tensor_split unbind", uneven=True)
def split(call: FunctionCall, part: Part) -> Plan | None:
    x = call.input
    if x.dim() == 0:
        return None
    (dim,) = call.dims(x, call.get(1 if call.name == "unbind" else 2, "dim", default=0))
    if dim != part.dim:
        return Plan(part.at(part.dim - (dim < part.dim)) if call.name == "unbind" else part)
    sizes = _sizes(call, part.whole)
    if sizes is None or not part.is_plain:
        return None
    local = _where_they_lie(part, sizes)
    if local is not None:
        counts = [piece.local for piece in local]
        return Plan(tuple(local), run=lambda x, *_, **__: x.split(counts, dim))
    cuts, at = [], 0
    for size in sizes:
        taken = _taken(x, part, range(at, at + size))
        if taken is None:
            return None
        cuts.append(taken)
        at += size
    return Plan(
        tuple([piece for piece, _ in cuts]),
        run=lambda x, *_, **__: tuple([take(x) for _, take in cuts]),
    )


def _where_they_lie(part: Part, sizes: list[int]) -> list[Part] | None:
    """Return the parts of pieces whose tokens stay on their ranks; None if one lies in several sequences."""
    found, at = [], 0
    for size in sizes:
        sequences, inside = part.between(at, at + size), _inside(part, at, at + size)
        if sequences is not None:
            found.append(part.of(part.lengths[slice(*sequences)]))
        elif inside is not None:
            found.append(part.of((inside,)))
        else:
            return None
        at += size
    return found


def _inside(part: Part, start: int, stop: int) -> int | None:
    """Return the length of a piece of one sequence, such that its tokens stay on their ranks."""
    at = 0
    for length in part.lengths if part.parts.is_in_order else ():
        if at <= start and stop <= at + length:
            runs = [part.parts.runs(length, rank) for rank in range(part.parts.world)]
            ends = [(at + begin, at + begin + size) for each in runs for begin, size in each or [(0, 0)]]
            return part.parts.length([max(0, min(stop, end) - max(start, begin)) for begin, end in ends])
        at += length
    return None


def _taken(x: Tensor, part: Part, rows: range) -> tuple[Part | None, Callable[[Tensor], Tensor]] | None:
    """Return the part of listed rows, and what takes them; fewer rows than ranks are on each rank."""
    dim, first, stop = part.dim, rows.start, rows.stop
    if part.is_plain and rows.step == 1 and len(rows):
        found = part.between(first, stop)
        if found is not None:
            begin, size, piece = _cut(part, *found)
            return piece, lambda x: x.narrow(dim, begin, size)
        if len(rows) >= part.parts.world:
            return within(part, first, stop), lambda x: cut(x, first, stop)
    return None if is_distributed(x) else listed(part, [rows])


def _sizes(call: FunctionCall, whole: int) -> list[int] | None:
    """Return into which sizes a dim is split."""
    if call.name in ("unbind", "tensor_split"):
        return None
    wanted = call.get(1, "split_size_or_sections", "split_size", "split_sizes", "chunks")
    if not isinstance(wanted, int):
        return list(wanted) if isinstance(wanted, (list, tuple)) and are_ints(wanted) else None
    each = -(-whole // wanted) if "chunk" in call.name else wanted
    return [min(each, whole - at) for at in range(0, whole, each)] if each else None


def _cut(part: Part, first: int, end: int) -> tuple[int, int, Part]:
    """Return where sequences first to before end begin on this rank, their tokens, and their part."""
    return (
        part.parts.held(part.lengths[:first]),
        part.parts.held(part.lengths[first:end]),
        part.of(part.lengths[first:end]),
    )


@part_rule("narrow", uneven=True)
def narrow(call: FunctionCall, part: Part) -> Plan | None:
    (dim,) = call.dims(call.input, call.get(1, "dim"))
    start, length = call.get(2, "start"), call.get(3, "length")
    if dim != part.dim:
        return Plan(part)
    if not are_ints((start, length)) or not -part.whole <= start <= part.whole - length or length < 0:
        return None
    start += part.whole * (start < 0)
    return _taken_and_indexed(call.input, part, (slice(None),) * dim + (slice(start, start + length),))


@part_rule("select", uneven=True)
def select(call: FunctionCall, part: Part) -> Plan | None:
    (dim,) = call.dims(call.input, call.get(1, "dim"))
    if dim != part.dim:
        return Plan(part.at(part.dim - (dim < part.dim)))
    return _taken_and_indexed(call.input, part, (slice(None),) * dim + (call.get(2, "index"),))


def _row(part: Part, index: Any) -> range | None:
    """Return the row of an index, which may count from the last; None if there is none."""
    if not isinstance(index, Integral) or not -part.whole <= int(index) < part.whole:
        return None
    return range(int(index) % part.whole, int(index) % part.whole + 1)


def indexed(x: Tensor, part: Part, index: Any) -> tuple[tuple[Any, ...], Part] | None:
    """Return an index of the part, and the part of its result; None if it needs the whole.

    It is basic, or has one list of places, in another dim than the part's.
    """
    entries = index if isinstance(index, tuple) else (index,)
    lists = sum(map(_is_list, entries))
    if lists > 1 or lists + sum(map(_is_basic, entries)) < len(entries):
        return None
    if all(entry is not Ellipsis for entry in entries):
        entries = (*entries, Ellipsis)
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    local: list[Any] = []
    dim = at = 0  # of x, and of the result
    result: Part | None = None
    for entry in entries:
        if entry is None:
            local.append(None)
            at += 1
        elif entry is Ellipsis:
            skipped = x.dim() - used
            if dim <= part.dim < dim + skipped:
                result = part.at(at + part.dim - dim)
            local += [slice(None)] * skipped
            dim, at = dim + skipped, at + skipped
        elif isinstance(entry, slice):
            if dim == part.dim:
                cut = _sliced(part, entry)
                if cut is None:
                    return None
                entry, result = cut[0], cut[1].at(at)
            local.append(entry)
            dim, at = dim + 1, at + 1
        else:
            if dim == part.dim:
                return None
            local.append(entry)
            dim, at = dim + 1, at + _is_list(entry)
    return None if result is None else (tuple(local), result)


def _is_basic(entry: Any) -> bool:
    """Whether an entry of an index is none of several places, as a tuple in it is, and no tensor."""
    if isinstance(entry, slice):
        return not _has_tensor(entry)
    is_int = isinstance(entry, Integral) and not isinstance(entry, bool)
    return entry is None or entry is Ellipsis or is_int


def _is_list(entry: Any) -> bool:
    """Whether an entry of an index is a list of places; one of bools is a mask."""
    if not isinstance(entry, (list, tuple)) or not entry:
        return False
    return all(isinstance(place, int) and not isinstance(place, bool) for place in entry)


def _has_tensor(entry: Any) -> bool:
    """Whether a slice has a tensor as a bound."""
    return isinstance(entry, slice) and not are_ints(
        [bound for bound in (entry.start, entry.stop, entry.step) if bound is not None]
    )


def _sliced(part: Part, entry: slice) -> tuple[slice, Part] | None:
    start, stop, step = entry.indices(part.whole)
    if (start, stop, step) == (0, part.whole, 1):
        return slice(None), part
    before, behind = part.padding
    if part.is_padded and part.outer == 1 and (start, stop, step) == (before, part.whole - behind, 1):
        begin = 0 if part.parts.rank else before
        plain = part.parts.part(part.dim, part.lengths, 1, part.inner)
        return slice(begin, begin + part.held * part.inner), plain
    found = part.between(start, stop) if step == 1 and part.is_plain else None
    if found is None:
        return None
    begin, size, piece = _cut(part, *found)
    return slice(begin, begin + size), piece


@rule("__getitem__", uneven=True)
def getitem(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    by_rows = index_of_rows(call.args[1])
    if by_rows is not None:
        return None if call.has_uneven else rows(call, *by_rows)
    if part is None:
        return None
    index = call.args[1]
    found = indexed(x, part, index)
    return _taken_and_indexed(x, part, index) if found is None else Plan(found[1], replaced=((1, found[0]),))


def _taken_and_indexed(x: Tensor, part: Part, index: Any) -> Plan | None:
    """Index the rows that a slice or a number takes of a sequence."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(map(_is_basic, entries)):
        return None
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[at : at + 1] = [slice(None)] * (x.dim() - used)
    at = [i for i, entry in enumerate(entries) if entry is not None][part.dim]
    entry = entries[at]
    if isinstance(entry, slice):
        rows = range(part.whole)[entry]
        taken = _taken(x, part, rows) if rows.step > 0 else None
    else:
        row = _row(part, entry)
        taken = None if row is None or is_distributed(x) else listed(part, [row])
    if taken is None:
        return None  # torch's own error
    piece, take = taken
    entries[at] = slice(None) if isinstance(entry, slice) else 0
    if piece is None:
        return Plan(run=lambda x, *_, **__: take(x)[tuple(entries)])
    found = indexed(x, piece, tuple(entries))
    return None if found is None else Plan(found[1], run=lambda x, *_, **__: take(x)[found[0]])


@rule("__setitem__")
def setitem(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    found = indexed(x, part, call.args[1]) if part is not None else None
    if found is None:
        return set_rows(call)
    index, target = found
    moves = moves_of_value(call, target, len(x[index].shape))
    return None if moves is None else Plan(moves=moves, replaced=((1, index),))


@rule("cat concat concatenate stack vstack row_stack", uneven=True)
def join(call: FunctionCall) -> Plan | None:
    tensors = list(call.get(0, "tensors"))
    first = next(x for x in call.tensors if part_of(x) is not None)
    part = part_of(first)
    assert part is not None
    dims = first.dim() + (call.name == "stack")
    if call.name in ("vstack", "row_stack") and any(x.dim() < 2 for x in tensors):
        return None
    dim = call.get(1, "dim", "axis", default=0) % dims
    if call.name != "stack" and dim == part.dim:
        return _along_tokens(call, tensors, dim)
    if any(x.dim() != first.dim() or whole_shape(x)[part.dim] != part.whole for x in tensors):
        return None
    result = part.at(part.dim + (call.name == "stack" and dim <= part.dim))
    return Plan(result, moves_to(call, [(x, part) for x in tensors]))


def _along_tokens(call: FunctionCall, tensors: list[Tensor], dim: int) -> Plan | None:
    """Join sequences: the parts of one rank lie one behind the other."""
    lengths: list[int] = []
    wanted = []
    length = _joined(call, tensors, dim)
    if length is not None:
        return Plan(call.parts.part(dim, (length,)))
    for x in tensors:
        part = part_of(x)
        if part is None:
            if x.dim() <= dim:
                continue  # an empty tensor of one dim, which joins nothing
            part = call.parts.part(dim, (x.size(dim),))
        if part.dim != dim or not part.is_plain:
            return None
        lengths += part.even.lengths
        wanted.append((x, part.even))
    return Plan(call.parts.part(dim, tuple(lengths)), moves_to(call, wanted))


def _joined(call: FunctionCall, tensors: list[Tensor], dim: int) -> int | None:
    """Return the length of pieces that lie one behind the other on the ranks, as they were cut; else None."""
    parts = [part_of(x) for x in tensors]
    if not call.has_uneven:
        return None
    total, last = [0] * call.parts.world, 0
    for part in parts:
        if part is None or part.dim != dim or not part.is_plain or len(part.lengths) != 1:
            return None
        holders = [rank for rank, size in enumerate(part.sizes) if size]
        if holders and holders[0] < last:
            return None
        last = holders[-1] if holders else last
        total = [a + b for a, b in zip(total, part.sizes, strict=True)]
    return call.parts.length(total)


@part_rule("roll", uneven=True)
def roll(call: FunctionCall, part: Part) -> Plan | None:
    """Exchange the rows that go to other ranks."""
    x, shifts, dims = call.input, call.get(1, "shifts"), call.get(2, "dims")
    if dims is None or dims == ():
        return None
    dims = call.dims(x, dims)
    shifts = list(shifts) if isinstance(shifts, (list, tuple)) else [shifts]
    if not are_ints(shifts) or len(shifts) != len(dims):
        return None
    if part.dim not in dims or not part.whole:
        return Plan(part)
    if is_distributed(x):
        return None
    by = dict.fromkeys(dims, 0)
    for shift, dim in zip(shifts, dims, strict=True):
        by[dim] += shift
    first = -by.pop(part.dim) % part.whole
    _, take = listed(part, [range(first, part.whole), range(first)], part)

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        out = take(x).contiguous(memory_format=format_of(x))
        return out.roll([*by.values()], [*by]) if by else separate(out, x)

    return Plan(part, run=run)


@part_rule("flip", uneven=True)
def flip(call: FunctionCall, part: Part) -> Plan | None:
    """Exchange the rows of mirrored places."""
    dims = call.dims(call.input, call.sizes(1, "dims"))
    if part.dim not in dims:
        return Plan(part)
    if is_distributed(call.input):
        return None
    _, take = listed(part, [range(part.whole)[::-1]], part)
    return Plan(part, run=lambda x, *_, **__: take(x).flip([dim for dim in dims if dim != part.dim]))
