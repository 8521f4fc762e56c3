# SPDX-License-Identifier: Apache-2.0
"""Which tracer, mode or transform must see an exchange, and which tensors have values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling  # half of is_compiling's time

from .._transports.dtypes import PLAIN_TYPES

_plain_types = frozenset(PLAIN_TYPES)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_functorch_transforms = torch._C._are_functorch_transforms_active
# Not in torch 2.6 and 2.7.
_hooks_of_saved_tensors = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_any_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tracer or a mode must see an exchange as a dispatched op.

    Otherwise it is called directly: the dispatcher costs as much as a small exchange.
    """
    return (
        is_dynamo_compiling()  # other tracers have a mode
        or not _plain_types.issuperset(map(type, tensors))
        or _dispatch_modes() > 0
        or _functorch_transforms()
    )


def is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no values, or a mode infers shapes alone."""
    if is_dynamo_compiling():  # Dynamo cannot trace the rest.
        return x.is_meta
    return x.is_meta or hasattr(x, "fake_mode") or torch._C._get_dispatch_mode(_FAKE) is not None


def has_values(x: torch.Tensor) -> bool:
    """Whether Python may read a tensor's values: not in a graph, and on a GPU they would be waited for."""
    return not torch.compiler.is_compiling() and x.is_cpu and not is_fake(x)


def must_record(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether autograd records what is computed from the inputs, or they have tangents."""
    for x in inputs:
        if x.requires_grad:
            return torch.is_grad_enabled() or have_tangents(inputs)
    return forward_ad._current_level >= 0 and have_tangents(inputs)


def is_transformed() -> bool:
    """Whether a transform of functorch is active, outside of torch.compile."""
    return not is_dynamo_compiling() and _functorch_transforms()


def may_have_hooks() -> bool:
    """Whether hooks may replace the tensors that autograd saves; True where torch does not report them."""
    return _hooks_of_saved_tensors is None or _hooks_of_saved_tensors(False) is not None


def have_tangents(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether forward mode computes a derivative of the inputs.

    Each may have one under a transform of functorch, which shows the tangents of the innermost level alone.
    """
    if forward_ad._current_level < 0:
        return False
    any_may = is_transformed()
    return any(
        (x.is_floating_point() or x.is_complex())
        and (any_may or forward_ad.unpack_dual(x).tangent is not None)
        for x in inputs
    )
