# SPDX-License-Identifier: Apache-2.0
"""Tensors that share memory if nothing is sharded, and do not here: changes of one are not in the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .memory import version_of
from .nested import tensors_in
from .part import part_of

_MADE = "_spar_made"  # a tensor's attribute: the aliases of the forward that made it


class _Alias(NamedTuple):
    """The memory of a tensor that would share that of another one.

    of_whole: it is the same memory, of the whole tensor that a part is a view of: parts have a change of
        theirs, and the whole lacks those of other ranks.
    """

    memory: StorageWeakRef
    of_whole: bool


class Aliases:
    """Those of one forward, by their storages, which views share. Each has all of its aliases."""

    def __init__(self) -> None:
        self.any_slice = False  # whether a part was sliced from a whole tensor
        self._of: dict[int, list[_Alias]] = {}
        self._memories: dict[int, StorageWeakRef] = {}  # of all in `_of`: no later one has their address
        self._dense: set[int] = set()  # storages of copies that, as views, may have gaps
        self._stale: dict[int, _Alias] = {}  # what lacks a change, by its storage

    def add_slice(self, part: Tensor, whole: Tensor) -> None:
        """Note that a part was sliced from a whole tensor."""
        self.any_slice = True
        storage = whole.untyped_storage()._cdata
        if part.untyped_storage()._cdata != storage:
            own, base = _memory(part), _memory(whole)
            self._link(own, base, self._living(base))
            if torch.empty_like(whole, device="meta").stride() != whole.stride():  # The tensor has gaps.
                self._dense.add(own.cdata)
        elif not any(alias.of_whole for alias in self._of.get(storage, ())):
            self._add(_memory(part), _Alias(_memory(whole), of_whole=True))

    def add_copies(self, copies: Sequence[Tensor], base: Tensor) -> None:
        """Note that tensors are copies that would be views of another one, and have no items in common."""
        memory = _memory(base)
        others = self._living(memory)
        for x in copies:
            own = _memory(x)
            self._link(own, memory, others)
            self._dense.add(own.cdata)

    def add_made(self, made: Any) -> Any:
        """Note that a tensor was made in this forward, by a function that reads none; return it."""
        for x in tensors_in(made):
            setattr(x, _MADE, self)
        return made

    def is_made(self, x: Tensor) -> bool:
        """Whether x was made in this forward, and is no result of others."""
        return getattr(x, _MADE, None) is self and not x.requires_grad

    def is_dense_copy(self, x: Tensor) -> bool:
        """Whether x has other gaps in its memory than if nothing was sharded."""
        return bool(self._dense) and _memory(x).cdata in self._dense

    def _add(self, memory: StorageWeakRef, alias: _Alias) -> None:
        self._memories.setdefault(memory.cdata, memory)
        self._of.setdefault(memory.cdata, []).append(alias)

    def _living(self, memory: StorageWeakRef) -> list[_Alias]:
        """Return the aliases that are still there, and forget the others."""
        found = [alias for alias in self._of.get(memory.cdata, ()) if not alias.memory.expired()]
        if found:
            self._of[memory.cdata] = found
        return list(found)

    def _link(self, own: StorageWeakRef, base: StorageWeakRef, others: list[_Alias]) -> None:
        for other in (base, *[alias.memory for alias in others]):
            if other.cdata != own.cdata:
                self._add(own, _Alias(other, of_whole=False))
                self._add(other, _Alias(own, of_whole=False))

    def would_share(self, x: Tensor, y: Tensor) -> bool:
        """Whether two tensors would share memory if nothing was sharded, and do not."""
        if not (torch._C._has_storage(x) and torch._C._has_storage(y)):
            return False
        memory = _memory(y).cdata
        return any(alias.memory.cdata == memory for alias in self._of.get(_memory(x).cdata, ()))

    def write(self, x: Tensor) -> bool:
        """Note that x is changed in place; return whether others lack that."""
        if not self._of or not torch._C._has_storage(x) or x.untyped_storage()._cdata not in self._of:
            return False
        own, is_part = _memory(x), part_of(x) is not None
        for alias in self._living(own):
            storage = alias.memory.cdata
            if storage == own.cdata and not is_part:
                continue
            known = self._stale.get(storage)
            if known is None or known.of_whole:
                self._stale[storage] = alias
        return self.any_stale

    @property
    def any_stale(self) -> bool:
        return bool(self._stale)

    def is_stale(self, x: Tensor, as_part: bool = False) -> bool:
        """Whether x, or a part that is made of it, lacks a change that was made through another tensor."""
        if not self._stale or not torch._C._has_storage(x):
            return False
        alias = self._stale.get(_memory(x).cdata)
        if alias is None or alias.memory.expired():
            return False
        return not alias.of_whole or not (as_part or part_of(x) is not None)


class Given:
    """What was sliced from the caller's tensors: a change of a part is one of what the caller has."""

    def __init__(self, inputs: Any) -> None:
        tensors = [x for x in tensors_in(inputs) if torch._C._has_storage(x)]
        self._storages = {x.untyped_storage()._cdata for x in tensors}
        self._sliced: list[tuple[Tensor, Tensor, int | None]] = []  # with the part's version

    def add(self, whole: Tensor, part: Tensor) -> None:
        if torch._C._has_storage(whole) and whole.untyped_storage()._cdata in self._storages:
            self._sliced.append((whole, part, version_of(part)))

    def write_back(self, gather: Callable[[Tensor], Tensor], aliases: Aliases) -> None:
        """Give the caller's tensors what blocks changed in place in their parts. Collective."""
        for whole, part in self.changed(aliases):
            whole.copy_(gather(part))

    def changed(self, aliases: Aliases) -> list[tuple[Tensor, Tensor]]:
        """Return the caller's tensors whose parts were changed in place, with these parts."""
        return [
            (whole, part)
            for whole, part, version in self._sliced
            if aliases.is_stale(whole) or version_of(part) != version
        ]


def _memory(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())
