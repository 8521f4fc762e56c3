# SPDX-License-Identifier: Apache-2.0
"""A mask as spans: its booleans, or floats of eager attention, are computed where a function reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._attention.spans import Spans
from .nested import changed

_aten = torch.ops.aten


@dataclass
class SpansRead:
    """What layers made of the caller's spans in a forward.

    Attributes:
        masks: how many masks layers asked for.
        along: how many functions without attention ran along their tree.
        layers: how many such functions are to, at least: one for each layer without attention.
    """

    masks: int = 0
    along: int = 0
    layers: int = 0


class _Elements:
    """The elements of a mask, which its views share: spans, booleans or floats, or both."""

    def __init__(self, spans: Spans, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.spans: Spans | None = spans  # None where the elements may have changed since
        self.dtype = dtype
        self._shape = torch.Size(shape)
        self._dense: Tensor | None = None

    def read(self) -> Tensor:
        """Return the booleans or floats, which are kept for later calls."""
        if self._dense is None:
            assert self.spans is not None
            dense = self.spans.dense()
            if self.dtype != torch.bool:
                zero = torch.zeros((), dtype=self.dtype, device=dense.device)
                dense = torch.where(dense, zero, torch.finfo(self.dtype).min)
            self._dense = dense.expand(self._shape)
        return self._dense

    def check_read(self, func: Any) -> None:
        """Refuse code that reads the mask of a tree: its biases and windows may count places."""
        if self.spans is not None and self.spans.layout is not None:
            raise ValueError(
                f"{func}: a layer reads the mask of a prefix tree in code of its own, whose biases or "
                'windows may count places; expected attention by attn_implementation="sdpa", or samples '
                "without a tree: spar.data.PackedSamples in place of PrefixTree"
            )

    def shared(self) -> Tensor:
        """Return elements whose memory the caller may alias or change, and drop the spans."""
        self._dense, self.spans = self.read().contiguous(), None
        return self._dense

    def copy(self) -> _Elements:
        """Return other elements of the same spans."""
        assert self.spans is not None
        return _Elements(self.spans, self._shape, self.dtype)


class SpansMask(Tensor):
    """A mask `[B, H, S, T]` to which the shape of its spans broadcasts: of bools, or of floats to be added.

    A function that leaves all elements in place, such as a slice of all keys, returns another SpansMask. Any
    other function gets the elements, in a view or outside. A function that may alias or change them ends the
    spans: `spans_of` then returns None.
    """

    _elements: _Elements

    @staticmethod
    def __new__(cls, elements: _Elements, shape: Sequence[int], device: torch.device) -> SpansMask:
        make: Any = Tensor._make_wrapper_subclass
        made: SpansMask = make(cls, shape, dtype=elements.dtype, device=device)
        made._elements = elements
        return made

    def __init__(self, *_: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub has it as a method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # a mode that is entered, as a view, saw the call itself
            x = args[0] if args else None
            if isinstance(x, SpansMask) and x._elements.spans is not None:
                shape = _same_elements(func, x, args[1:], kwargs)
                if shape is not None:
                    copies = func in (_aten.clone.default, _aten._to_copy.default)
                    return SpansMask(x._elements.copy() if copies else x._elements, shape, x.device)
            for y in args:
                if isinstance(y, SpansMask):
                    y._elements.check_read(func)
            if torch.Tag.inplace_view in func.tags:
                raise RuntimeError(f"{func}: changes the shape or the memory of a mask; change a clone")
            schema = func._schema
            shares = schema.is_mutable or any(each.alias_info is not None for each in schema.returns)
            args, kwargs = changed(lambda y: _plain(y, shares), (args, kwargs))
            out = func(*args, **kwargs)
            return x if schema.is_mutable and isinstance(x, SpansMask) else out

    # Methods that read memory without a call of the dispatcher:

    def numpy(self, *, force: bool = False) -> Any:
        return _plain(self, shares=True).numpy(force=force)

    def tolist(self) -> Any:
        return _plain(self).tolist()

    def data_ptr(self) -> int:
        return _plain(self, shares=True).data_ptr()

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override] # torch's stub lacks the name
        return f"SpansMask({self._elements.spans or self._elements.read()})"


def mask_of(
    spans: Spans, shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.bool
) -> SpansMask:
    """Return a mask of a shape to which that of the spans broadcasts.

    dtype: of floats, it is 0 where a query attends to a key, and the lowest number elsewhere.
    """
    return SpansMask(_Elements(spans, shape, dtype), shape, device)


def spans_of(mask: Tensor | None) -> Spans | None:
    """Return the spans of a mask of bools, if it has them."""
    return mask._elements.spans if isinstance(mask, SpansMask) and mask.dtype == torch.bool else None


def spans_of_floats(mask: Tensor | None) -> Spans | None:
    """Return the spans of a mask of floats, if it has them.

    Queries without keys attend to all keys alike by it, and to none by one of bools.
    """
    return mask._elements.spans if isinstance(mask, SpansMask) and mask.dtype != torch.bool else None


def _plain(x: Tensor, shares: bool = False) -> Tensor:
    """Return the elements of a mask of spans, with all of its memory where that is shared; other tensors."""
    if not isinstance(x, SpansMask):
        return x
    with torch._C.DisableTorchFunction():
        return (x._elements.shared() if shares else x._elements.read()).expand(x.shape)


def dense_of(mask: Tensor) -> Tensor:
    """Return an ordinary tensor of a mask's elements."""
    return _plain(mask)


def _same_elements(func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size | None:
    """Return the result's shape, if a function leaves all elements of x in their places; else None."""
    if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
        return x.shape
    if func is _aten._to_copy.default:
        same = kwargs.get("dtype") in (None, x.dtype) and kwargs.get("device") in (None, x.device)
        return x.shape if same else None
    if func is _aten.slice.Tensor:
        dim, start, end, step = args + (0, None, None, 1)[len(args) :]
        size = x.size(dim)
        is_all = (start or 0) in (0, -size) and (end is None or end >= size) and step == 1
        return x.shape if is_all else None
    if func is _aten.expand.default and len(args[0]) == x.dim() == 4:
        shape = torch.Size([own if size == -1 else size for own, size in zip(x.shape, args[0], strict=True)])
        return shape if shape[2:] == x.shape[2:] else None
    return None
