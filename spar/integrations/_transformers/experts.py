# SPDX-License-Identifier: Apache-2.0
"""Experts of transformers treat each row alone: they run on this rank's rows, by any implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._model.groups import is_apart, ranks_of
from ..._model.nested import changed, tensors_in
from ..._model.part import Part, mark, part_of
from ..._model.stand_ins import computing
from ..._model.view import View, without_view

# Its forward calls the implementation that the config names.
_DISPATCH = "transformers.integrations.moe"


def are_experts(module: nn.Module) -> bool:
    """Whether a module's class is decorated by transformers' `use_experts_implementation`.

    Such a forward takes hidden states `[rows, D]` and each row's experts and their weights, both `[rows, k]`.
    """
    forward = getattr(type(module), "forward", None)
    return getattr(forward, "__globals__", {}).get("__name__") == _DISPATCH


def run_experts(
    view: View, module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call experts with a rank's own rows; in the view where these differ, or where a rank has none."""
    tensors = tensors_in(args, kwargs)
    part = part_of(tensors[0]) if tensors else None
    sends = _sends_rows(view, own)
    if sends:
        view.parts.check_by_token("experts of other ranks")
    if part is None or not part.is_everywhere or not all(_is_of_rows(x, part) for x in tensors):
        if not sends:
            return own(*args, **kwargs)
        for x in tensors:
            view.check_stale("experts", x)
        with without_view():  # What ranks receive differs, and so do the functions that they run.
            return own(*view.gather(args), **view.gather(kwargs))
    if not sends:
        _check_whole(view, module)
    # Ranks with other runs of tokens select theirs by other functions.
    with computing(view, "experts", tensors, _work(module, part, tensors[1])):
        # What a router chose may be whole, as of functions that have no rule.
        args, kwargs = changed(lambda x: x if part_of(x) else view.parts.shard(x, part), (args, kwargs))
        return mark(own(*args, **kwargs), part)


def _is_of_rows(x: Tensor, part: Part) -> bool:
    own = part_of(x)
    return own is part or (own is None and x.dim() > part.dim and x.size(part.dim) == part.whole)


def _check_whole(view: View, module: nn.Module) -> None:
    """Refuse experts that are divided over ranks of the sequence: these would add up different rows."""
    for parameter in module.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # A DTensor has one.
        if mesh is not None and not is_apart(view.parts.group, ranks_of(mesh)):
            raise view.error(
                "experts",
                "are divided over ranks that have other tokens",
                'divide them over other ranks, or send rows to them by the plan "ep_dispatch_experts"',
            )


def _sends_rows(view: View, own: Callable[..., Any]) -> bool:
    """Whether experts' forward, by transformers' expert parallelism, sends each row to its expert's rank.

    It does where the ranks of experts may have other rows. Ranks of a tensor parallelism divide equal rows.
    """
    if not inspect.isfunction(own):
        return False
    held: Any = inspect.getclosurevars(own).nonlocals.get("implementation")
    return not getattr(held, "shares_batch", True) and is_apart(view.parts.group, ranks_of(held.tp_mesh))


def _work(module: nn.Module, part: Part, index: Tensor) -> tuple[int, int]:
    """Return the multiply-adds of a rank's rows and of all: each by the matrices of its k experts."""
    matrices = [p for p in module.parameters() if p.dim() == 3]
    each = sum(p.numel() // p.size(0) for p in matrices) * index.size(-1)
    return part.local * each, part.whole * each
