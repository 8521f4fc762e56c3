# SPDX-License-Identifier: Apache-2.0
"""Functions that read or make no elements: shapes, dtypes, devices."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, are_ints, rule
from ..memory import memory_order
from ..part import part_of, whole_shape


@rule(
    "get_dtype get_device get_ndim dim ndimension get_requires_grad get_grad_fn get_layout get_is_* "
    "get_names get_itemsize get_output_nr get__version get__backward_hooks get__base _is_view "
    "is_floating_point is_complex is_tensor is_conj is_neg is_inference element_size "
    "requires_grad_ set_requires_grad __hash__ can_cast result_type",
    uneven=True,
)
def same_for_parts(call: FunctionCall) -> Plan:
    """Run on the part: the result does not depend on the tokens."""
    return Plan()


@rule("new_zeros new_ones new_full new_empty", uneven=True)
def new(call: FunctionCall) -> Plan:
    """Make a part if all sizes up to the dim of the tokens are those of the whole."""
    part, size, function = call.part, call.get(1, "size"), call.function
    is_listed = isinstance(size, (list, tuple))
    shape = list(size) if is_listed else call.sizes(1, "size")
    whole = [] if part is None else whole_shape(call.input)
    if part is None or not are_ints(shape) or len(shape) != len(whole):
        return Plan()
    dims = part.dim + 1
    if shape[:dims] != whole[:dims]:
        return Plan()
    shape[part.dim] = part.local
    if is_listed:
        return Plan(part, replaced=((1 if len(call.args) > 1 else "size", shape),))
    return Plan(part, run=lambda x, *_, **kwargs: function(x, shape, **kwargs))


@rule("new_tensor")
def new_tensor(call: FunctionCall) -> Plan | None:
    data = call.get(1, "data")
    if isinstance(data, Tensor):
        return Plan(part_of(data))
    return Plan() if len(call.tensors) == 1 else None


@rule("get_shape size", uneven=True)
def shape(call: FunctionCall) -> Plan:
    sizes = torch.Size(whole_shape(call.input))
    dim = call.get(1, "dim")
    result = sizes if dim is None else sizes[dim]
    return Plan(run=lambda *_, **__: result)


@rule("numel nelement __len__", uneven=True)
def count(call: FunctionCall) -> Plan:
    sizes = whole_shape(call.input)
    result = sizes[0] if call.name == "__len__" else prod(sizes)
    return Plan(run=lambda *_, **__: result)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of the whole of a part: of dims outside of the tokens' in memory they are larger."""
    part, shape, order = part_of(x), whole_shape(x), memory_order(x)
    assert part is not None
    dense, unit, local, is_dense = [0] * x.dim(), 1, 1, True
    for dim in reversed(order):
        is_dense = is_dense and (x.size(dim) < 2 or x.stride(dim) == local)
        dense[dim] = unit
        unit, local = unit * max(shape[dim], 1), local * max(x.size(dim), 1)
    if is_dense or not part.local:
        return tuple(dense)
    outside = order[: order.index(part.dim)]
    return tuple([n // part.local * part.whole if dim in outside else n for dim, n in enumerate(x.stride())])


@rule("stride", uneven=True)
def stride(call: FunctionCall) -> Plan:
    dim = call.get(1, "dim")
    return Plan(run=lambda x, *_, **__: _strides(x) if dim is None else _strides(x)[dim])


@rule("is_contiguous", uneven=True)
def is_contiguous(call: FunctionCall) -> Plan:
    """Ask of a whole tensor with such strides: one token alone is contiguous in any order."""
    shape = whole_shape(call.input)

    def run(x: Tensor, **kwargs: Any) -> bool:
        return torch.empty_strided(shape, _strides(x), device="meta").is_contiguous(**kwargs)

    return Plan(run=run)
