# SPDX-License-Identifier: Apache-2.0
"""Kernels of diffusers' dispatcher that are no torch functions, which a view does not see: flash_attn."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from ..._attention.attention import attention
from ..._view.part import mark, part_of
from ..._view.view import View
from .names import Names

_lock = threading.Lock()
_entered = 0
_own: dict[Any, Any] = {}  # what the dispatcher's table had


@contextlib.contextmanager
def kernels_of_parts(names: Names) -> Iterator[None]:
    """Let backends other than torch's receive whole sequences of some heads in place of parts."""
    global _entered
    table = names.registry._backends
    with _lock:
        _entered += 1
        if _entered == 1:
            _own.update(table)
            for member, kernel in _own.items():
                if not str(member.value).startswith(("native", "_native")):
                    table[member] = _of_parts(str(member.value), kernel)
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if _entered == 0:
                table.update({member: _own[member] for member in _own if member in table})
                _own.clear()


def _of_parts(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def run(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend over [B, S, H, D]."""
        view = _get_current_function_mode()
        part, keys = part_of(query), part_of(key)
        if not isinstance(view, View) or not (part or keys or part_of(value)):
            return kernel(query, key, value, *args, **kwargs)
        plain = part is not None and part.dim == 1 and part.is_plain and part_of(value) is keys
        named = {"attn_mask", "is_causal", "return_lse"}
        if not plain or args or any(kwargs.get(option) not in (None, False) for option in named):
            return view.outside(name, kernel, (query, key, value, *args), kwargs)
        assert part is not None
        with _pop_mode_temporarily():
            if keys is None:  # each rank has all keys
                return mark(kernel(query, key, value, **kwargs), part)
            layouts = view.parts.layout(part.lengths), view.parts.layout(keys.lengths)
            out = attention(
                query,
                key,
                value,
                layouts[0] if keys is part else layouts,
                method=view.parts.method if view.parts.method != "ring" else None,
                attend=lambda q, k, v: kernel(q, k, v, **kwargs),
            )
        return mark(out, part)

    return run
