# SPDX-License-Identifier: Apache-2.0
"""What torch.compile must evaluate while tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def constant(function: _F) -> _F:
    """Mark a function as torch.compiler.assume_constant_result does, without importing torch._dynamo (1.4 s).

    torch.compile evaluates the function while tracing. Its result is a constant of the compiled code, which
    dynamo guards by the identity of the group. A look-up that dynamo traced would not be guarded.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
