# SPDX-License-Identifier: Apache-2.0
"""Bind recomputation in torch.utils.checkpoint to the topology of the original forward."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def bind_recomputation(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make torch.utils.checkpoint bind each function that it will recompute, when it first runs it.

    Recomputation happens in backward: outside the `with`, possibly on an autograd thread, which sees none of
    forward's thread-locals and contextvars. `context_fn` belongs to the caller, and use_reentrant=True has
    none. So this wraps the two private functions of torch that receive the function to recompute. Where a
    torch version has different ones, it leaves them alone and warns.
    """
    from torch.utils import checkpoint

    for mode, owner, name, parameter in (
        ("True", "CheckpointFunction", "forward", "run_function"),
        ("False", "_CheckpointFrame", "__init__", "recompute_fn"),
    ):
        holder = getattr(checkpoint, owner, None)
        function = getattr(holder, name, None)
        if function is None or list(inspect.signature(function).parameters)[1:2] != [parameter]:
            warnings.warn(
                f"spar: torch {torch.__version__} has no {owner}.{name}(_, {parameter}, ...) in "
                "torch.utils.checkpoint: recomputation will run in the topology that is current in backward. "
                f"For use_reentrant={mode} pass spar.topology.bind(function) to checkpoint",
                stacklevel=3,
            )
            continue
        wrapped = _bind_second_argument(function, bind)
        setattr(holder, name, staticmethod(wrapped) if name == "forward" else wrapped)


def _bind_second_argument(
    function: Callable[..., Any], bind: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Wrap `function` so that it binds its second argument, a callable, on each call."""

    @functools.wraps(function)
    def wrapper(owner: Any, recomputed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(owner, bind(recomputed), *args, **kwargs)

    return wrapper
