"""torch.utils.checkpoint computes again in the topology of the first run."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def bind_recomputation(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """From now on what torch.utils.checkpoint will compute again is bound when it is first computed.

    That is in backward, outside of the `with` and maybe on a thread of autograd's, where nothing thread-local
    and no contextvar comes from forward; context_fn is the caller's, and use_reentrant=True has none. So the
    two functions that are given what to compute are wrapped. They are torch's own: where a torch has others
    it goes on without, and says so.
    """
    from torch.utils import checkpoint

    for mode, owner, name, given in (
        ("True", "CheckpointFunction", "forward", "run_function"),
        ("False", "_CheckpointFrame", "__init__", "recompute_fn"),
    ):
        holder = getattr(checkpoint, owner, None)
        function = getattr(holder, name, None)
        if function is None or list(inspect.signature(function).parameters)[1:2] != [given]:
            warnings.warn(
                f"spar: the checkpoint of torch {torch.__version__} has no {owner}.{name}(_, {given}, ...); "
                f"with several topologies and use_reentrant={mode} give it spar.topology.bind(function)",
                stacklevel=3,
            )
            continue
        wrapped = _first_bound(function, bind)
        setattr(holder, name, staticmethod(wrapped) if name == "forward" else wrapped)


def _first_bound(
    function: Callable[..., Any], bind: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """The function, whose second argument is bound when it is called."""

    @functools.wraps(function)
    def bound(owner: Any, later: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(owner, bind(later), *args, **kwargs)

    return bound
