# SPDX-License-Identifier: Apache-2.0
"""Products, norms and embeddings: of other dims than the tokens, or summed over ranks."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, rule
from ..part import Part, part_of, whole_numel, whole_shape
from ..sums import sum_over_ranks


def work(local: int, x: Tensor, part: Part | None) -> tuple[int, int]:
    """Return multiply-adds on this rank and in the whole, in proportion to the elements of x."""
    return (local, local) if part is None else (local, local // max(x.numel(), 1) * whole_numel(x))


def shared(whole: int, part: Part) -> tuple[int, int]:
    """Return multiply-adds on this rank and in the whole, of which it has its part."""
    return whole // max(part.whole, 1) * part.local, whole


@rule("linear")
def linear(call: FunctionCall) -> Plan | None:
    x, weight, part = call.input, call.get(1, "weight"), call.part
    if part is None or part.dim == x.dim() - 1 or any(part_of(t) is not None for t in call.tensors[1:]):
        return None
    return Plan(part, work=work(x.numel() * weight.size(0), x, part))


@rule("matmul __matmul__ __rmatmul__ bmm mm")
def product(call: FunctionCall) -> Plan | None:
    if len(call.args) != 2 or call.kwargs:
        return None
    a, b = call.args[::-1] if call.name == "__rmatmul__" else call.args
    if a.dim() < 2 or b.dim() < 2:
        return None
    of_a, of_b = part_of(a), part_of(b)
    at_a = of_a.dim - a.dim() if of_a else 0  # dims from the last, in which a and b broadcast
    at_b = of_b.dim - b.dim() if of_b else 0
    dims = max(a.dim(), b.dim())
    local = a.numel() * b.size(-1)
    at = (1, 0) if call.name == "__rmatmul__" else (0, 1)  # a and b may be the same tensor
    if of_a and of_b and at_a == -1 and at_b == -2 and of_a.at(0) is of_b.at(0):
        parts, function = call.parts, call.function
        return Plan(run=lambda *tensors: sum_over_ranks(parts, function(*tensors)), work=work(local, a, of_a))
    if of_a and at_a == -2:
        if of_b and at_b < -2:
            return None
        moves = ((at[1], None),) if of_b else ()
        return Plan(of_a.at(dims - 2), moves, work=work(local, a, of_a))
    if of_b and at_b == -1:
        moves = ((at[0], None),) if of_a else ()
        return Plan(of_b.at(dims - 1), moves, work=work(local, b, of_b))
    if of_a and at_a < -2:
        other = of_a.at(b.dim() + at_a) if b.dim() >= -at_a else None
        if of_b is other and of_b is not None:
            return Plan(of_a.at(dims + at_a), work=work(local, a, of_a))
        if of_b is None and (other is None or b.shape[at_a] == 1):
            return Plan(of_a.at(dims + at_a), work=work(local, a, of_a))
        if of_b is None and b.shape[at_a] == of_a.whole:
            return Plan(of_a.at(dims + at_a), moves_to(call, [(b, other)]), work=work(local, a, of_a))
    return None


@rule("baddbmm addmm")
def product_and_sum(call: FunctionCall) -> Plan | None:
    """Multiply rows of a, or matrices of a batch; the sum's other term is the same part, or broadcast."""
    if len(call.tensors) != 3 or len({id(x) for x in call.tensors}) != 3:
        return None
    other, a, b = call.tensors
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
    """Contract the part: a letter of tokens that is summed over is summed over the ranks, too."""
    equation = call.get(0, "equation")
    operands = call.tensors
    if not isinstance(equation, str) or "..." in equation:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or [len(term) for term in terms] != [x.dim() for x in operands]:
        return None
    pairs = list(zip(terms, operands, strict=True))
    found = [(term, part) for term, x in pairs if (part := part_of(x)) is not None]
    letter, first = found[0][0][found[0][1].dim], found[0][1]
    if any(term[part.dim] != letter or part.at(0) is not first.at(0) for term, part in found):
        return None
    if any(term.count(letter) > 1 for term in terms):
        return None
    wholes = [id(x) for x in operands if part_of(x) is None]
    if len(set(wholes)) < len(wholes):  # one tensor would be of several parts
        return None
    wanted = [(x, first.at(term.index(letter))) for term, x in pairs if letter in term]
    if any(whole_shape(x)[part.dim] != first.whole for x, part in wanted):
        return None
    sizes = {name: size for term, x in pairs for name, size in zip(term, whole_shape(x), strict=True)}
    whole = prod(sizes.values())
    share = whole // max(first.whole, 1) * first.local, whole
    if letter in output:
        return Plan(first.at(output.index(letter)), moves_to(call, wanted), work=share)
    parts, function = call.parts, call.function
    return Plan(
        moves=moves_to(call, wanted),
        run=lambda *args: sum_over_ranks(parts, function(*args)),
        work=share,
    )


@rule("layer_norm rms_norm")
def norm(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    dims = call.get(1, "normalized_shape")
    if (
        part is None
        or part.dim >= x.dim() - len(dims)
        or any(part_of(t) is not None for t in call.tensors[1:])
    ):
        return None
    return Plan(part)


@rule("embedding")
def embedding(call: FunctionCall) -> Plan | None:
    index, weight = call.input, call.get(1, "weight")
    part = part_of(index)
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq", default=False):
        return None  # of all tokens
    return None if part is None or part_of(weight) is not None else Plan(part)
