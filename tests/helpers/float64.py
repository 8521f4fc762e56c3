# SPDX-License-Identifier: Apache-2.0
"""Models of transformers in float64, also where their code names float32."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class _Torch(types.ModuleType):
    """torch for a module of transformers, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(model: type) -> Iterator[None]:
    """Let a class's module compute in float64 what it computes in float32."""
    with pytest.MonkeyPatch.context() as patch:
        scope = vars(sys.modules[model.__module__])
        patch.setitem(scope, "torch", _Torch("torch"))
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for kind in [value for value in scope.values() if isinstance(value, type)]:
            for function in filter(inspect.isfunction, vars(kind).values()):
                if torch.float32 in (function.__defaults__ or ()):
                    wider = [torch.float64 if x is torch.float32 else x for x in function.__defaults__]
                    patch.setattr(function, "__defaults__", tuple(wider))
        yield
