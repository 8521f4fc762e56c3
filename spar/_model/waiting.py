# SPDX-License-Identifier: Apache-2.0
"""Tensors that are computed later (`later.Later`), which an attribute tells from others."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .nested import changed, tensors_in
from .part import Parts, part_of

LATER = "_spar_later"


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
