# SPDX-License-Identifier: Apache-2.0
"""Sums of products of several tensors: matmul and einsum.

A letter names each dim of the operands and of the result. Operands may be parts along different letters:
what moves least brings them to one, which is that of the result, or is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..call import FunctionCall, Plan, rule
from ..moving import in_other_dim, turned
from ..nested import changed
from ..part import Part, mark, part_of, whole_numel, whole_shape
from ..sums import sum_over_ranks
from .products import shared
from .rows import reduced

Term = Sequence[Hashable]  # the letter of each dim; None: of a dim of size 1 that broadcasts


@rule("matmul __matmul__ __rmatmul__ bmm mm")
def product(call: FunctionCall) -> Plan | None:
    """Multiply matrices: result[..., i, j] = sum over k of a[..., i, k] * b[..., k, j]."""
    if len(call.args) != 2 or call.kwargs:
        return None
    names = ["ik", "kj"] if call.name != "__rmatmul__" else ["kj", "ik"]
    dims = [x.dim() for x in call.args]
    if min(dims) < 2:
        return None
    batch = range(max(dims) - 2)
    terms = [[*batch[max(dims) - count :], *last] for count, last in zip(dims, names, strict=True)]
    return _contraction(call, terms, [*batch, "i", "j"])


@rule("einsum")
def einsum(call: FunctionCall) -> Plan | None:
    equation = call.get(0, "equation")
    found = _terms(equation, call.tensors) if isinstance(equation, str) else None
    return None if found is None else _contraction(call, *found)


def _terms(equation: str, operands: list[Tensor]) -> tuple[list[str], str] | None:
    """Return a letter for each dim of the operands, and of the result; None if the equation has no arrow."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms, dims, free = inputs.split(","), [], ""
    for term, x in zip(terms, operands, strict=False):
        dims.append(x.dim() - len(term.replace("...", "")))
        free = "0123456789"[: max(len(free), dims[-1])] if "..." in term else free
    if not arrow or len(terms) != len(operands) or max(dims) > 10:
        return None
    if any(count < 0 or (count and "..." not in term) for count, term in zip(dims, terms, strict=True)):
        return None
    each = [t.replace("...", free[len(free) - n :]) for t, n in zip(terms, dims, strict=True)]
    return each, output.replace("...", free)


class _Letters:
    """The letters of a call.

    Attributes:
        terms, output: those of each operand's dims, and of the result's.
        sizes: of the dims that they name, in the whole.
        parts: which part each operand is.
        sharded: the letters of their dims, in order, with these parts.
    """

    def __init__(self, call: FunctionCall, terms: Sequence[Term], output: Term) -> None:
        self.call, self.output = call, list(output)
        shapes = [whole_shape(x) for x in call.tensors]
        self.sizes: dict[Hashable, int] = {}
        for term, shape in zip(terms, shapes, strict=True):
            for letter, size in zip(term, shape, strict=True):
                self.sizes[letter] = self.sizes.get(letter, 1) if size == 1 else size
        self.terms: list[list[Hashable]] = [
            [letter if size == self.sizes[letter] else None for letter, size in zip(term, shape, strict=True)]
            for term, shape in zip(terms, shapes, strict=True)
        ]
        self.parts = [part_of(x) for x in call.tensors]
        pairs = zip(self.terms, self.parts, strict=True)
        self.sharded = [(term[part.dim], part) for term, part in pairs if part is not None]

    def all_have(self, letter: Hashable, only_parts: bool = False) -> bool:
        """Whether all operands, or all that are parts, have a dim of this letter."""
        pairs = zip(self.terms, self.parts, strict=True)
        return all(letter in term for term, part in pairs if part is not None or not only_parts)

    def repeats(self, letter: Hashable) -> bool:
        """Whether an operand has several dims of this letter, of which a diagonal is taken."""
        return any(term.count(letter) > 1 for term in self.terms)

    def of_result(self, part: Part) -> Part | None:
        """Return the same part of the result's first dim that is as long and that not all operands have."""
        size, dims = part.whole, enumerate(self.output)
        found = (at for at, c in dims if self.sizes[c] == size and not self.all_have(c))
        at = next(found, None)
        return None if at is None or part.is_padded else part.at(at)

    @property
    def are_pairs(self) -> bool:
        """Whether each part has another dim that is as long, and that not all operands have."""
        for term, part in zip(self.terms, self.parts, strict=True):
            if part is None:
                continue
            others = [c for i, c in enumerate(term) if i != part.dim and self.sizes.get(c) == part.whole]
            if part.layout is None or all(map(self.all_have, others)):
                return False
        return True

    @property
    def work(self) -> int:
        return prod(self.sizes.values())


def _contraction(call: FunctionCall, terms: Sequence[Term], output: Term) -> Plan | None:
    """Plan a sum of products by the letters of each operand's dims and of the result's."""
    found = _Letters(call, terms, output)
    kept = [(letter, part) for letter, part in found.sharded if letter in found.output]
    # Along a letter that all parts have, none is gathered. A softmax is along the last letter of the result.
    kept.sort(key=lambda each: (not found.all_have(each[0], True), found.output.index(each[0])))
    letter, part = kept[0] if kept else found.sharded[0]
    if None in dict(found.sharded) or found.repeats(letter):
        return None
    result = part.at(found.output.index(letter)) if kept else found.of_result(part)
    is_apart = bool(kept) and found.all_have(letter, True)
    plan = None if is_apart or result is None else _through_channels(found, result)
    if plan is not None:
        return plan
    if kept:
        return _along(found, letter, part)
    return _along_larger(found) or _summed(found, letter, part, result)


def _moves(found: _Letters, letter: Hashable, part: Part) -> tuple[tuple[int, Part | None], ...]:
    """Return what makes operands parts along a letter, and gathers those without it."""
    wanted = [part.at(term.index(letter)) if letter in term else None for term in found.terms]
    return tuple([(i, to) for i, to in enumerate(wanted) if found.parts[i] is not to])


def _along(found: _Letters, letter: Hashable, part: Part) -> Plan:
    """Compute the result's part along a letter."""
    at = part.at(found.output.index(letter))
    return Plan(at, _moves(found, letter, part), work=shared(found.work, part))


def _along_larger(found: _Letters) -> Plan | None:
    """Compute parts, and no sums, of a result that is larger than all operands, as outer products are."""
    elements = prod([found.sizes[c] for c in found.output])
    alone = [c for c in found.output if not found.all_have(c) and found.sizes[c] >= found.call.parts.world]
    alone = [c for c in alone if not found.repeats(c)]
    if not alone or elements <= sum(map(whole_numel, found.call.tensors)):
        return None
    return _along(found, alone[0], found.call.parts.part(0, (found.sizes[alone[0]],)))


def _summed(found: _Letters, letter: Hashable, part: Part, result: Part | None) -> Plan:
    """Sum the products of parts along a letter over the ranks; a sum as long as they are is left on these."""
    parts, function, moves = found.call.parts, found.call.function, _moves(found, letter, part)

    def run(*args: Any) -> Tensor:
        out = function(*args)
        return sum_over_ranks(parts, out) if result is None else reduced(out, result)

    return Plan(result, moves, run=run, work=shared(found.work, part))


def _through_channels(found: _Letters, result: Part) -> Plan | None:
    """Multiply pair tensors along a letter that all of them have, as channels; None if there is none.

    Each channel is a product of its own. Operands are exchanged for channels, and the result back: no rank
    holds more than its share of any, as it would of a gathered operand, or of its own terms of a sum.
    """
    parts, world, sizes = found.call.parts, found.call.parts.world, found.sizes
    held = [letter for letter, _ in found.sharded]
    channels = [c for c in found.output if found.all_have(c) and c not in held and sizes[c] >= world]
    channels = [c for c in channels if not found.repeats(c)]
    if not channels or not found.are_pairs:
        return None
    channel = min(channels, key=lambda c: -(-sizes[c] // world) / sizes[c])  # whose largest share is least
    inner = parts.part(found.output.index(channel), (sizes[channel],))
    wanted = [inner.at(term.index(channel)) for term in found.terms]
    function = found.call.function

    def run(*args: Any, **kwargs: Any) -> Tensor:
        each = iter(wanted)

        def to_channels(x: Tensor) -> Tensor:
            part = next(each)
            return parts.shard(x, part) if part_of(x) is None else turned(x, part)

        args, kwargs = changed(to_channels, (args, kwargs))
        return in_other_dim(mark(function(*args, **kwargs), inner), result)

    return Plan(result, run=run, work=shared(found.work, inner))
