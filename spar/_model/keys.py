# SPDX-License-Identifier: Apache-2.0
"""What the C code of a view (csrc/python/view.h) uses of torch and of this package. Importing it says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.nn import Parameter
from torch.overrides import handle_torch_function

from .._C import use_view
from .nested import tensors_in
from .part import _SHARD
from .subclasses import holds_part


def _may_hold_part(value: Any) -> bool:
    """Whether a value of a type that no key has holds a part."""
    return any(map(holds_part, tensors_in(value)))


# In a key a call's strings, dtypes and the like stand for themselves.
_VALUES = (str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis))
use_view(
    Tensor,
    Parameter,
    torch.Size,
    _VALUES,
    _may_hold_part,
    maybe_current_level,
    getattr,
    _SHARD,
    torch._C._is_torch_function_mode_enabled,
    torch._C._pop_torch_function_stack,
    torch._C._push_on_torch_function_stack,
    handle_torch_function,
)
