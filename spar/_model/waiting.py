# SPDX-License-Identifier: Apache-2.0
"""Tensors that are computed later (`later.Later`), which an attribute tells from others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .nested import changed, tensors_in
from .part import Parts, part_of

LATER = "_spar_later"
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})  # of modules, which keep no results


def later_of(x: Tensor) -> Any:
    """Return the `Later` of a tensor; None if it is computed."""
    return getattr(x, LATER, None)


def waiting_in(parts: Parts, *values: Any) -> Tensor | None:
    """Return the first tensor in nested values that functions of these parts cannot read yet."""
    for x in tensors_in(*values):
        if (part := part_of(x)) is not None and part.parts.is_later and part.parts is not parts:
            return x
    return None


def computed(value: Any) -> Any:
    """Return a nested value in which tensors that are computed later are computed now."""
    return changed(lambda x: x if (later := later_of(x)) is None else later.compute(), value)


def finished(model: nn.Module, output: Any) -> Any:
    """Return a model's output with None in place of what only a loss has used; all else is computed.

    So is what modules keep as attributes, which may be read behind the forward.
    """

    def now(x: Tensor) -> Tensor | None:
        later = later_of(x)
        return x if later is None else later.value if later.is_used else later.compute()

    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if not isinstance(value, Tensor | list | tuple | dict) or name in _OF_TORCH:
                continue
            if any(later_of(x) is not None for x in tensors_in(value)):
                setattr(module, name, computed(value))
    return changed(now, output)
