# SPDX-License-Identifier: Apache-2.0
"""Products, norms and embeddings: of other dims than the tokens, or summed over ranks."""

from __future__ import annotations

from math import prod
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, part_rule, rule
from ..part import Part, part_of, whole_numel, whole_shape
from ..sums import sum_over_ranks
from .rows import reduced


def work(local: int, x: Tensor, part: Part | None) -> tuple[int, int]:
    """Return multiply-adds on this rank and in the whole, in proportion to the elements of x."""
    return (local, local) if part is None else (local, local // max(x.numel(), 1) * whole_numel(x))


def shared(whole: int, part: Part) -> tuple[int, int]:
    """Return multiply-adds on this rank and in the whole, of which it has its part."""
    return whole // max(part.whole, 1) * part.local, whole


@part_rule("linear")
def linear(call: FunctionCall, part: Part) -> Plan | None:
    x, weight = call.input, call.get(1, "weight")
    if part.dim == x.dim() - 1 or call.has_later_part:
        return None
    return Plan(part, work=work(x.numel() * weight.size(0), x, part))


@rule("matmul __matmul__ __rmatmul__ bmm mm")
def product(call: FunctionCall) -> Plan | None:
    """Multiply matrices: result[..., i, j] = sum over k of a[..., i, k] * b[..., k, j].

    A part along i or j stays one, and the other operand becomes whole. Along a dim before these both are
    parts, or b broadcasts. The products of parts along k are summed over the ranks.
    """
    if len(call.args) != 2 or call.kwargs:
        return None
    is_reversed = call.name == "__rmatmul__"
    a, b = call.args[::-1] if is_reversed else call.args
    if a.dim() < 2 or b.dim() < 2:
        return None
    part_a, part_b = part_of(a), part_of(b)
    index_a, index_b = _index(a, part_a, "ik"), _index(b, part_b, "kj")
    local, dims = a.numel() * b.size(-1), max(a.dim(), b.dim())
    if (index_a, index_b) in (("k", "k"), ("k", ""), ("", "k")):
        return _contracted(call, a, b, cast(Part, part_a or part_b))
    # Moves go by the operands' places: both may be the same tensor.
    if part_a and index_a == "i" and index_b != "batch":
        moves = ((int(not is_reversed), None),) if part_b else ()
        return Plan(part_a.at(dims - 2), moves, work=work(local, a, part_a))
    if part_b and index_b == "j":
        moves = ((int(is_reversed), None),) if part_a else ()
        return Plan(part_b.at(dims - 1), moves, work=work(local, b, part_b))
    if part_a and index_a == "batch":
        at = part_a.dim - a.dim()
        size = whole_shape(b)[at] if b.dim() >= -at else 1
        like_a = part_a.at(b.dim() + at) if part_b or size != 1 else None
        if part_b is like_a or (part_b is None and size == part_a.whole):
            return Plan(part_a.at(dims + at), moves_to(call, [(b, like_a)]), work=work(local, a, part_a))
    return None


def _index(x: Tensor, part: Part | None, last: str) -> str:
    """Return along which index of the product x is a part; last: the names of its last two dims."""
    if part is None:
        return ""
    at = part.dim - x.dim()
    return last[at] if at >= -2 else "batch"


def _contracted(call: FunctionCall, a: Tensor, b: Tensor, part: Part) -> Plan | None:
    """Multiply each rank's columns of a with its rows of b, and sum the products of the ranks."""
    if a is b:
        return None
    moves = moves_to(call, [(a, part.at(a.dim() - 1)), (b, part.at(b.dim() - 2))])
    parts, function, amount = call.parts, call.function, whole_numel(a) * whole_shape(b)[-1]
    return Plan(
        moves=moves,
        run=lambda *tensors: sum_over_ranks(parts, function(*tensors)),
        work=shared(amount, part),
    )


@rule("baddbmm addmm")
def product_and_sum(call: FunctionCall) -> Plan | None:
    """Multiply rows of a, or matrices of a batch; the sum's other term is the same part, or broadcast."""
    if len(call.tensors) != 3 or len({id(x) for x in call.tensors}) != 3:
        return None
    other, a, b = call.input, call.get(1, "mat1", "batch1"), call.get(2, "mat2", "batch2")
    part, dims = part_of(a), a.dim()
    if part is None or part.dim == dims - 1:
        return None
    wanted = [(b, part if part.dim == dims - 3 else None)]
    dim = part.dim - dims + other.dim()
    size = whole_shape(other)[dim] if dim >= 0 else 1
    if size not in (1, part.whole) or (size == 1 and part_of(other) is not None):
        return None
    wanted.append((other, None if size == 1 else part.at(dim)))
    return Plan(part, moves_to(call, wanted), work=shared(whole_numel(a) * b.size(-1), part))


@rule("einsum")
def einsum(call: FunctionCall) -> Plan | None:
    """Contract the part: a letter of tokens that is summed over is summed over the ranks, too.

    Operands that are parts of another letter become whole. A sum as long as the part is left on the ranks.
    """
    equation, operands = call.get(0, "equation"), call.tensors
    found = _terms(equation, operands) if isinstance(equation, str) else None
    if found is None:
        return None
    terms, output = found
    pairs = list(zip(terms, operands, strict=True))
    parts = [(term[part.dim], part) for term, x in pairs if (part := part_of(x)) is not None]
    letter, part = next(((letter, part) for letter, part in parts if letter in output), parts[0])
    if any(term.count(letter) > 1 for term in (*terms, output)):
        return None
    wanted = [part.at(term.index(letter)) if letter in term else None for term in terms]
    if any(
        to is not None and whole_shape(x)[to.dim] != part.whole
        for to, x in zip(wanted, operands, strict=True)
    ):
        return None
    moves = tuple([(i, to) for i, to in enumerate(wanted) if part_of(operands[i]) is not to])
    sizes = {name: size for term, x in pairs for name, size in zip(term, whole_shape(x), strict=True)}
    share = shared(prod(sizes.values()), part)
    if letter in output:
        return Plan(part.at(output.index(letter)), moves, work=share)
    group, function = call.parts, call.function
    if part.dim < len(output) and sizes[output[part.dim]] == part.whole and not part.is_padded:
        return Plan(part, moves, run=lambda *args: reduced(function(*args), part), work=share)
    return Plan(moves=moves, run=lambda *args: sum_over_ranks(group, function(*args)), work=share)


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


@part_rule("layer_norm rms_norm")
def norm(call: FunctionCall, part: Part) -> Plan | None:
    first = call.input.dim() - len(call.get(1, "normalized_shape"))
    return None if part.dim >= first or call.has_later_part else Plan(part)


@rule("embedding")
def embedding(call: FunctionCall) -> Plan | None:
    is_native = call.function is not F.embedding  # torch.embedding has the weight first
    weight = call.get(0, "weight") if is_native else call.get(1, "weight")
    index = call.get(1, "indices") if is_native else call.input
    part = part_of(index)
    if not is_native and call.get(3, "max_norm") is not None:
        # The rows to renormalize are those of all tokens.
        return None
    if call.get(3 if is_native else 5, "scale_grad_by_freq", default=False):
        return None
    return None if part is None or part_of(weight) is not None else Plan(part)
