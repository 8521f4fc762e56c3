# SPDX-License-Identifier: Apache-2.0
"""Modules that a compiled block's graph has as one node, as experts, for what runs them on parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from .leaves import leaf


class Numbers:
    """Numbers of modules in graphs: those that differ by their weights alone have the same one.

    Attributes:
        newest: by number, the module that was numbered last, with what stands in place of its forward.
    """

    def __init__(self) -> None:
        self.newest: dict[int, tuple[nn.Module, Any]] = {}
        self._of: dict[Any, int] = {}

    def number(self, module: nn.Module, forward: Any) -> int:
        """Return the number of a module: before each call of a block, as its attributes may have changed."""
        inner = [
            (name, type(x), *[_fixed(value) for key, value in vars(x).items() if not key.startswith("_")])
            for name, x in module.named_modules()
        ]
        weights = [(name, p.shape, p.dtype) for name, p in module.named_parameters()]
        number = self._of.setdefault((*inner, *weights), len(self._of))
        self.newest[number] = module, forward
        return number


class Same:
    """An object that is equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _fixed(value: Any) -> Any:
    """Return a key for an attribute; the forward that the view has put there is in all."""
    if callable(value) and hasattr(type(value), "is_like_others"):
        return None
    return value if isinstance(value, (int, float, str)) else Same(value)


def _in_view(view: Any, number: int, count: int, *tensors: Tensor) -> Any:
    module, forward = view.leaves.newest[number]
    names = [name for name, _ in module.named_parameters()]
    with _reparametrize_module(module, dict(zip(names, tensors[:count], strict=True))):
        return forward.run(view, module, forward.own, tensors[count:], {})


@leaf(_in_view)
def in_graph(number: int, count: int, *tensors: Tensor) -> Tensor:
    """Stand for a module while Dynamo traces, by the shape of its result: that of its first argument.

    count: of the parameters, the first of tensors; the arguments follow.
    """
    hidden: Tensor = tensors[count]
    return hidden * tensors[0].flatten()[0].to(hidden.dtype)
