# SPDX-License-Identifier: Apache-2.0
"""Products with weights, and embeddings: of other dims than the tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..call import FunctionCall, Plan, moves_to, part_rule, rule
from ..part import Part, part_of, whole_numel, whole_shape


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
