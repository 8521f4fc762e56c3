# SPDX-License-Identifier: Apache-2.0
"""Tiles: parts of a rank's parts, on which only functions run that compute each token alone."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakValueDictionary

from torch import Tensor

from ..sequence_layout import SequenceLayout
from .part import Part, Parts, part_of
from .report import place_of_caller


class NotByToken(Exception):
    """Code does not compute each token alone; the text is the reason, for the user."""


class TileParts(Parts):
    """Tiles of one size of this rank's tokens, anywhere among them.

    A rule of the view holds for whatever tokens a rank has. So what a rule computes from a tile, without
    tokens of others and without the place of its own, is what it would compute of these from the rank's part.
    All else raises `NotByToken`: also what reads an attribute of `Parts` that tiles lack, such as the group.

    lengths: of the sequences whose tokens they are.
    """

    is_tile = True

    def __init__(self, base: Parts, lengths: tuple[int, ...], size: int) -> None:
        self.lengths, self.size = lengths, size
        self.world, self.rank, self.device = base.world, base.rank, base.device
        self._made = WeakValueDictionary()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @staticmethod
    def of(base: Parts, lengths: tuple[int, ...], size: int) -> TileParts:
        """Return the tiles of a size, which are the same object while plans or tensors have them."""
        found = base.tiles.get((lengths, size))
        if found is None:
            found = base.tiles[lengths, size] = TileParts(base, lengths, size)
        return found

    def _refuse(self) -> NoReturn:
        raise NotByToken(f"mixes tokens at {place_of_caller()}")

    def check_by_token(self, name: str) -> None:
        raise NotByToken(f"has {name} at {place_of_caller()}")

    def tile_of(self, part: Part) -> Part:
        """Return the part that a tile of a rank's part is."""
        return self.part(part.dim, part.lengths, part.outer, part.inner, part.padding)

    def part(
        self,
        dim: int,
        lengths: tuple[int, ...],
        outer: int = 1,
        inner: int = 1,
        padding: tuple[int, int] = (0, 0),
    ) -> Part:
        if lengths != self.lengths or padding != (0, 0):
            self._refuse()
        return super().part(dim, lengths, outer, inner)

    def runs_of(self, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
        return []

    def held(self, lengths: tuple[int, ...], rank: int | None = None) -> int:
        return self.size if rank is None else self._refuse()

    def layout(self, lengths: tuple[int, ...]) -> SequenceLayout:
        self._refuse()

    def length(self, sizes: Any) -> int:
        self._refuse()

    def runs(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        self._refuse()

    def shard(self, x: Tensor, part: Part) -> Tensor:
        self._refuse()

    def gather(self, x: Tensor) -> Tensor:
        return x if part_of(x) is None else self._refuse()
