# SPDX-License-Identifier: Apache-2.0
"""Parts that were sliced from whole tensors: a change in place of one is missing in the other."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Slices:
    """The slices of one forward, by their storages, which views share."""

    def __init__(self) -> None:
        self._wholes: dict[int, tuple[StorageWeakRef, StorageWeakRef]] = {}  # of a slice, and of its whole
        self.written: dict[int, StorageWeakRef] = {}  # storages of whole tensors of which a slice was changed

    def add(self, part: Tensor, whole: Tensor) -> None:
        found = _storage(part)
        self._wholes[found.cdata] = found, _storage(whole)

    @property
    def any(self) -> bool:
        return bool(self._wholes)

    def write(self, x: Tensor) -> None:
        """Note that x is changed in place."""
        part, whole = self._wholes.get(_storage(x).cdata, (None, None))
        if part is not None and whole is not None and not part.expired() and not whole.expired():
            self.written[whole.cdata] = whole

    def is_stale(self, x: Tensor) -> bool:
        """Whether x is a whole tensor, or a view of one, of which a slice was changed."""
        whole = self.written.get(_storage(x).cdata)
        return whole is not None and not whole.expired()


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())
