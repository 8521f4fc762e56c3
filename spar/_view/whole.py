# SPDX-License-Identifier: Apache-2.0
"""Code that knows no parts runs on copies of them; what it writes to these is carried back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .moving import moved
from .part import Part, Parts, changed, mark, part_of


class _Copy(NamedTuple):
    part: Part
    of: Tensor
    copy: Tensor
    version: int


class Copies:
    """Copies of the parts among a call's arguments: their wholes, or other parts of these.

    copied: returns what the call gets in the place of a part, or the part itself.
    written: the tensors that the call is known to write.
    """

    def __init__(
        self, parts: Parts, copied: Callable[[Tensor], Tensor], written: Sequence[Tensor] = ()
    ) -> None:
        self._parts, self._copied = parts, copied
        self._written = {id(x) for x in written}
        self._made: dict[int, _Copy] = {}  # by what each is of: a tensor that is passed twice has one

    def of(self, x: Tensor) -> Tensor:
        part = part_of(x)
        if part is None:
            return x
        known = self._made.get(id(x))
        if known is None:
            copy = self._copied(x)
            if copy is x:
                return x
            copy = mark(copy.clone(), part_of(copy)) if id(x) in self._written else copy
            known = self._made[id(x)] = _Copy(part, x, copy, _version(copy))
        return known.copy

    def carry_back(self, out: Any) -> Any:
        """Write to the parts what the call wrote to their copies; return its results with parts for these."""
        parts = {}
        for part, x, copy, version in self._made.values():
            if id(x) in self._written or _version(copy) != version:
                x.copy_(self._restored(copy, part))
                parts[id(copy)] = mark(x, part)
        return changed(lambda y: parts.get(id(y), y), out)

    def shared_with(self, results: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
        """Return which results share memory with the copy of which part."""
        found = []
        for _, x, copy, _ in self._made.values():
            sharing = [y for y in results if y is not x and _memory(y) == _memory(copy)]
            if sharing:
                found.append((sharing, x))
        return found

    def any_written_unseen(self) -> bool:
        """Whether the call wrote what torch did not count, as a kernel of another library or numpy does."""
        return any(
            _version(copy) == version and not _are_same(self._restored(copy, part), x)
            for part, x, copy, version in self._made.values()
            if id(x) not in self._written
        )

    def _restored(self, copy: Tensor, part: Part) -> Tensor:
        return self._parts.shard(copy, part) if part_of(copy) is None else moved(copy, part)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _memory(x: Tensor) -> int | None:
    return x.untyped_storage()._cdata if torch._C._has_storage(x) else None


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    return torch.equal(*[x.detach().contiguous().view(torch.uint8) for x in (a, b)])
