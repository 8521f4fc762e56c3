# SPDX-License-Identifier: Apache-2.0
"""Functions of each element: whole operands are sliced to the part."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import prod

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, rule
from ..part import Part, part_of, whole_numel, whole_shape

_CONVERSIONS = """
to type type_as float half double bfloat16 int long short bool byte char cfloat cdouble cpu cuda xpu mtia
ipu get_data detach detach_ alias clone contiguous zeros_like ones_like empty_like full_like get_real
get_imag real imag conj resolve_conj resolve_neg conj_physical view_as_real view_as_complex angle
"""
_UNARY = """
abs absolute neg negative positive exp exp2 expm1 log log1p log2 log10 sqrt rsqrt
square reciprocal sin cos tan asin acos sinh cosh tanh atan asinh acosh atanh sinc sigmoid sign sgn floor
ceil round trunc frac erf erfc erfinv lgamma digamma deg2rad rad2deg silu relu relu6 gelu mish elu selu celu
softplus softsign hardswish hardsigmoid hardtanh leaky_relu log_sigmoid tanhshrink softshrink hardshrink
threshold nan_to_num logit logical_not bitwise_not __invert__ isnan isinf isfinite isposinf isneginf signbit
i0 silu_ relu_ gelu_ exp_ zero_ neg_ sigmoid_ tanh_ clamp_ clamp_min_ clamp_max_ fill_ abs_ sqrt_ rsqrt_
square_ reciprocal_ sin_ cos_ log_ round_ floor_ ceil_ trunc_ elu_ leaky_relu_ hardtanh_ nan_to_num_
logical_not_
"""
_MAYBE_INPLACE_NAMES = """
relu relu6 silu mish elu selu celu hardswish hardsigmoid hardtanh leaky_relu threshold
"""
_MAYBE_INPLACE = frozenset(_MAYBE_INPLACE_NAMES.split())
_OPERANDS = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub
maximum minimum fmax fmin atan2 hypot where masked_fill clamp clip clamp_min clamp_max lerp addcmul addcdiv
copysign xlogy complex polar isclose eq ne lt le gt ge greater greater_equal less less_equal not_equal
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __add__ __radd__ __sub__ __rsub__
__mul__ __rmul__ __truediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__ __rmod__
__rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__
__iadd__ __isub__ __imul__ __idiv__ __iand__ __ior__ __ixor__ add_ sub_ mul_ div_ pow_
masked_fill_ copy_ lerp_ addcmul_ addcdiv_ logical_and_ logical_or_ eq_ ne_ lt_ le_ gt_ ge_
"""


@rule(_CONVERSIONS, uneven=True)
def conversion(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    is_name = call.name == "type" and len(call.args) + len(call.kwargs) == 1
    if part is None or is_name:  # .to(other), of which other alone is a part
        return Plan()
    if call.name == "view_as_complex" and part.dim == x.dim() - 1:
        return None
    if call.name == "contiguous" and len(call.args) == 1 and not call.kwargs:
        return Plan(part, run=_contiguous(part))
    return Plan(part)


def _contiguous(part: Part) -> Callable[[Tensor], Tensor]:
    """Return a copy where the whole is not contiguous, though one token of it is."""
    dim = part.dim

    def run(x: Tensor) -> Tensor:
        if x.size(dim) == 1 < part.whole and x.stride(dim) != prod(x.shape[dim + 1 :]):
            return x.clone(memory_format=torch.contiguous_format)
        return x.contiguous()

    return run


def _is_true(value: object) -> bool:
    return value is True


@rule(_UNARY + _OPERANDS)
def pointwise(call: FunctionCall) -> Plan | None:
    """Run on the part of the operand that is changed, or is the largest; the others become the same part."""
    first = call.tensors[0]
    if call.kwargs.get("inplace") or (call.name in _MAYBE_INPLACE and True in map(_is_true, call.args)):
        return None  # the function's body names what it changes
    if call.is_inplace and part_of(first) is None:
        return None  # a part would change a whole tensor
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return None  # the places of its elements
    parts = [x for x in call.tensors if part_of(x) is not None]
    reference = first if part_of(first) is not None else max(parts, key=whole_numel)
    shape = _broadcast(call.tensors)
    places = {id(x): _place(x, len(shape)) for x in parts}
    part = places[id(reference)]
    if len(set(places.values())) > 1 and prod(shape) > max(map(whole_numel, call.tensors)):
        # An outer sum lies by rows, as what it is added to.
        rows = [each.at(shape.index(each.whole)) for each in places.values() if each.whole > 1]
        part = min(rows, key=lambda each: each.dim, default=part)
    moves = aligned(call.tensors, len(shape), part)
    return None if moves is None else Plan(part, moves)


def _broadcast(tensors: list[Tensor]) -> list[int]:
    """Return the whole shape of what tensors broadcast to."""
    shapes = zip_longest(*[whole_shape(x)[::-1] for x in tensors], fillvalue=1)
    return [next((size for size in sizes if size != 1), 1) for sizes in shapes][::-1]


def _place(x: Tensor, dims: int) -> Part:
    """Return the part of a result of so many dims that a part of an operand makes."""
    part = part_of(x)
    assert part is not None
    return part.at(part.dim + dims - x.dim())


def aligned(tensors: list[Tensor], dims: int, part: Part) -> tuple[tuple[int, Part | None], ...] | None:
    """Return what makes operands the same part of a result of so many dims; None if nothing does."""
    moves: list[tuple[int, Part | None]] = []
    for i, x in enumerate(tensors):
        own, dim = part_of(x), part.dim + x.dim() - dims
        if own is not None and dim >= 0 and own is part.at(dim):
            continue
        size = whole_shape(x)[dim] if dim >= 0 else 1
        if size == 1 != part.whole or dim < 0:  # each rank's tokens need all of it
            if own is not None:
                moves.append((i, None))
            continue
        if size != part.whole:
            return None
        moves.append((i, part.at(dim)))
    return tuple(moves)
