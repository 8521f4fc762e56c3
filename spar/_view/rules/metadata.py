# SPDX-License-Identifier: Apache-2.0
"""Functions that read or make no elements: shapes, dtypes, devices."""

from __future__ import annotations

from math import prod

import torch

from ..call import FunctionCall, Plan, rule
from ..part import whole_shape


@rule(
    "get_dtype get_device get_ndim dim ndimension get_requires_grad get_grad_fn get_layout get_is_* "
    "get_names get_itemsize get_output_nr get__version get__backward_hooks "
    "is_floating_point is_complex is_tensor is_contiguous is_conj is_neg is_inference element_size "
    "requires_grad_ set_requires_grad __hash__ stride can_cast result_type "
    "new_zeros new_ones new_full new_empty",
    uneven=True,
)
def same_for_parts(call: FunctionCall) -> Plan:
    """Run on the part: the result does not depend on the tokens."""
    return Plan()


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
