# SPDX-License-Identifier: Apache-2.0
"""Products, convolutions, norms and embeddings: of other dims than the tokens, or summed over ranks."""

from __future__ import annotations

from math import prod
from typing import Any

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
        parts = call.parts
        return Plan(
            run=lambda *tensors: sum_over_ranks(parts, call.function(*tensors)), work=work(local, a, of_a)
        )
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


@rule("group_norm instance_norm")
def norm_of_samples(call: FunctionCall) -> Plan | None:
    part = call.part
    return None if part is None or part.dim != 0 or call.get(1, "running_mean") is not None else Plan(part)


@rule("embedding")
def embedding(call: FunctionCall) -> Plan | None:
    index, weight = call.input, call.get(1, "weight")
    part = part_of(index)
    if call.get(3, "max_norm") is not None or call.get(5, "scale_grad_by_freq", default=False):
        return None  # of all tokens
    return None if part is None or part_of(weight) is not None else Plan(part)


@rule("conv1d conv2d conv3d")
def convolution(call: FunctionCall) -> Plan | None:
    """Convolve samples, or positions one by one."""
    x, weight, part = call.input, call.get(1, "weight"), call.part
    if part is None or x.dim() != weight.dim() or any(part_of(t) is not None for t in call.tensors[1:]):
        return None
    plain = all(size == 1 for size in weight.shape[2:]) and all(
        _all(call.get(at, name, default=value), value)
        for at, name, value in ((3, "stride", 1), (4, "padding", 0))
    )
    if part.dim == 1:
        return None
    if part.dim > 1 and not plain:
        return _with_halo(call, x, weight, part.parts.part(part.dim, (part.whole,)))
    local = x.numel() // max(x.size(1), 1) * weight.numel()
    return Plan(part, work=work(local, x, part))


def _with_halo(call: FunctionCall, x: Tensor, weight: Tensor, part: Part) -> Plan | None:
    """Convolve rows with those of other ranks around them, if the result has as many."""
    at, dims = part.dim - 2, x.dim() - 2
    stride, padding, dilation, groups = [
        call.get(place, name, default=default)
        for place, name, default in (
            (3, "stride", 1),
            (4, "padding", 0),
            (5, "dilation", 1),
            (6, "groups", 1),
        )
    ]
    if isinstance(padding, str) or part.whole < part.parts.world or part.parts.state is not None:
        return None
    strides, sides, steps = [
        list(value) * (dims // len(value)) if isinstance(value, (tuple, list)) else [value] * dims
        for value in (stride, padding, dilation)
    ]
    side = sides[at]
    if strides[at] != 1 or 2 * side != steps[at] * (weight.size(part.dim) - 1):
        return None
    sides[at] = 0
    layout, function = part.parts.layout(part.lengths), call.function

    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        rows = layout.halo(input, side, part.dim, side)
        out: Tensor = function(rows, weight, bias, strides, sides, steps, groups)
        return out

    whole = prod([size for dim, size in enumerate(whole_shape(x)) if dim != 1]) * weight.numel()
    work = shared(whole // prod(strides), part)
    return Plan(part, moves_to(call, [(x, part)]), run=run, work=work)


def _all(value: Any, wanted: int) -> bool:
    return all(each == wanted for each in value) if isinstance(value, (tuple, list)) else value == wanted
