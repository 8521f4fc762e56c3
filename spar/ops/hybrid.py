# SPDX-License-Identifier: Apache-2.0
"""Shard and gather over ring x ulysses, by the parallel state: MindSpeed-MM's `*_with_cp` operations.

The ring shards the sequence in zigzag order, or each packed sequence by `cal_split_sizes`. Each ring rank's
shard is then sharded among its ulysses ranks. Over the combined cp group this is one exchange; without that
group, one in each of the two, with the same result. Gradients are scaled once, by ring * ulysses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._control.state import ALONE, Place
from .._exchange.arguments import Arguments, apply_chain, cumulative_hint, from_cumulative, ranks_of
from .._exchange.exchange import Scale
from .._exchange.layouts import WHOLE, Args, Layout, even, packed, pair, zigzag
from .._group.group import Call, Group as Group_
from .._group.registry import place_of
from .._tracing import constant
from ..sizes import share, totals_of_share
from ..topology.groups_by_name import ParallelState
from ..topology.topology import current, warn_if_unsharded


@constant
def _places(name: str, state: ParallelState | None) -> tuple[Place, Place, Place]:
    """This rank's places in the ring, ulysses and cp groups; ALONE where an exchange does not need the group.

    It needs cp if both others have more than one rank, and cp orders its ranks ring by ring.
    """
    if state is None:
        warn_if_unsharded(name)
        return ALONE, ALONE, ALONE
    ring, ulysses, cp = (state.get_group(name) for name in ("ring", "ulysses", "cp"))
    in_ring = place_of(ring) if ring is not None and state.is_ring_enable() else ALONE
    in_ulysses = place_of(ulysses) if ulysses is not None and state.is_ulysses_enable() else ALONE
    needs_cp = in_ring.world > 1 and in_ulysses.world > 1 and state.is_cp_ring_by_ring()
    return in_ring, in_ulysses, place_of(cp) if cp is not None and needs_cp else ALONE


class _Hybrid(Arguments):
    """A call over the cp group if there is one, else over the ring group, the ulysses group, or both."""

    __slots__ = ("in_ring", "in_ulysses", "inner", "inner_block", "ring", "ulysses")

    def __init__(self, name: str, x: torch.Tensor, input_name: str, exchanges: int = 1) -> None:
        self.in_ring, self.in_ulysses, in_cp = _places(name, current().state)
        self.ring, self.ulysses = self.in_ring.world, self.in_ulysses.world
        self.inner = self.ulysses if in_cp.world > 1 else 1
        outer = in_cp if in_cp.world > 1 else self.in_ring
        super().__init__(name, x, outer if outer.world > 1 else self.in_ulysses, input_name, exchanges)
        self.inner_block: Call | None = None  # where a call has an exchange in each of two groups

    def __enter__(self) -> _Hybrid:
        if self.ring > 1 and self.ulysses > self.inner and not torch.compiler.is_compiling():
            self.inner_block = Call(ranks_of(self.in_ulysses, self.name), self.name, self.exchanges, None)
            self.inner_block.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if self.inner_block is not None:
            self.inner_block.device = self.device
            self.inner_block.__exit__(kind, error, trace)

    def split(self, by_ring: Layout, ring_extent: int) -> torch.Tensor:
        """Shard by the ring; then shard the ring rank's `ring_extent` items among its ulysses ranks."""
        steps = [(group, pair(WHOLE, shards)) for group, shards in self._steps(by_ring, ring_extent)]
        return apply_chain(self, steps, self._scale(divide=True)) if steps else self.input

    def gather(self, by_ring: Layout, ring_extent: int) -> torch.Tensor:
        """Undo `split`."""
        steps = [(group, pair(shards, WHOLE)) for group, shards in self._steps(by_ring, ring_extent)[::-1]]
        return apply_chain(self, steps, self._scale(divide=False)) if steps else self.input

    def _steps(self, by_ring: Layout, ring_extent: int) -> list[tuple[Group_ | Place, Layout]]:
        steps: list[tuple[Group_ | Place, Layout]] = []
        if self.ring > 1:
            steps.append((self.group, by_ring))
        if self.ulysses > self.inner:
            steps.append((ranks_of(self.in_ulysses, self.name), even(by_ring[0], ring_extent)))
        return steps

    def fitting_totals(self, local: int) -> Sequence[int]:
        """The global sizes, in zigzag order, of which this rank's local size is `local`."""
        extents = totals_of_share(local, self.ulysses, self.in_ulysses.rank)
        return extents if self.ring == 1 else [size * self.ring for size in extents if size % 2 == 0]

    def check_cumulative(self, name: str, lengths: Args, dim: int) -> None:
        """Raise if the lengths are cu_seqlens of the packed sequences whose shard this rank holds."""
        cut, size = from_cumulative(lengths), self.input.size(dim)
        if cut and self._packed_part(lengths) != size == self._packed_part(cut):
            value = f"a list of which rank {self.rank} holds {self._packed_part(lengths)}"
            raise self.error(name, value, f"{size}, the size of dim {dim}{cumulative_hint(cut)}")

    def _packed_part(self, lengths: Sequence[int]) -> int:
        extent = sum(share(length, self.ring, self.in_ring.rank) for length in lengths)
        return share(extent, self.ulysses, self.in_ulysses.rank)

    def _scale(self, divide: bool) -> Scale:
        return (float(self.ring * self.ulysses), divide)

    def ring_extent(self, lengths: Args) -> int:
        """A ring rank's local size of packed sequences; 0 if no second exchange needs it."""
        if self.inner > 1 or self.ulysses == 1:
            return 0
        return sum(share(length, self.ring, self.in_ring.rank) for length in lengths)


def split_forward_gather_backward_with_cp(input_: torch.Tensor, dim: int) -> torch.Tensor:
    """Keep this rank's shard of a sequence over ring x ulysses, as MindSpeed-MM does.

    The ring rank keeps two chunks in zigzag order, of which the ulysses rank keeps its share by
    `cal_split_sizes`. Forward communicates nothing. Backward gathers gradients into natural order and divides
    them by ring * ulysses.

    Args:
        input_: any strided tensor, the same on all ranks of the cp group. With a ring its size along `dim` is
            a multiple of 2 * ring.
        dim: the dim to split.

    Returns:
        A contiguous tensor; `input_` itself if ring and ulysses have one rank each.

    Raises:
        ValueError: dim is out of range, or its size is not a multiple of 2 * ring.
    """
    with _Hybrid("split_forward_gather_backward_with_cp", input_, "input_", exchanges=0) as call:
        dim = call.dim("dim", dim)
        total = input_.size(dim)
        if call.ring > 1:
            call.zigzag("input_", total, call.ring)
        return call.split(zigzag(dim, total, call.inner), total // call.ring)


def gather_forward_split_backward_with_cp(input_: torch.Tensor, dim: int, gather_size: int) -> torch.Tensor:
    """Undo `split_forward_gather_backward_with_cp`: gather in natural order, as MindSpeed-MM does.

    Backward keeps this rank's shard of the gradient, times ring * ulysses. It communicates nothing, and is
    exact if every rank holds the same gradient of y.

    Args:
        input_: this rank's shard; any strided tensor.
        dim: the dim that was split.
        gather_size: the global size; with a ring a multiple of 2 * ring.

    Returns:
        A new contiguous tensor; `input_` itself if ring and ulysses have one rank each.

    Raises:
        ValueError: dim is out of range, gather_size is not a multiple of 2 * ring, or it does not match the
            local size.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    with _Hybrid("gather_forward_split_backward_with_cp", input_, "input_") as call:
        dim = call.dim("dim", dim)
        gather_size, local = call.integer("gather_size", gather_size), input_.size(dim)
        ring_extent = gather_size // call.ring
        if gather_size < 0 or local != share(ring_extent, call.ulysses, call.in_ulysses.rank):
            raise call.wrong_total("gather_size", gather_size, dim, call.fitting_totals(local))
        if call.ring > 1:
            call.zigzag("gather_size", gather_size, call.ring)
        return call.gather(zigzag(dim, gather_size, call.inner), ring_extent)


def packed_data_split_forward_gather_backward_with_cp(
    x: torch.Tensor, dim: int, seq_lens: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Keep this rank's shard of several packed sequences over ring x ulysses, as MindSpeed-MM does.

    The ring shards each sequence by `cal_split_sizes`. Its ulysses ranks shard the packed result. Forward
    communicates nothing. Backward gathers gradients and divides them by ring * ulysses.

    Args:
        x: the packed sequences, the same on all ranks of the cp group; any strided tensor.
        dim: the dim along which they are packed.
        seq_lens: their lengths, as a list, tuple or 1-D int tensor. They sum to the size of `dim`.

    Returns:
        A contiguous tensor; `x` itself if ring and ulysses have one rank each.

    Raises:
        ValueError: dim is out of range, a length is negative, or they do not sum to the size of `dim`.
        TypeError: the lengths are not ints.
    """
    with _Hybrid("packed_data_split_forward_gather_backward_with_cp", x, "x", exchanges=0) as call:
        dim = call.dim("dim", dim)
        lengths = call.lengths("seq_lens", seq_lens)
        call.check_sum("seq_lens", lengths, dim)
        return call.split(packed(dim, len(lengths), lengths, call.inner), call.ring_extent(lengths))


def packed_data_gather_forward_split_backward_with_cp(
    x: torch.Tensor, dim: int, seq_lens: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Undo `packed_data_split_forward_gather_backward_with_cp`: gather whole sequences, as MindSpeed-MM does.

    Backward keeps this rank's shard of the gradient, times ring * ulysses. It communicates nothing, and is
    exact if every rank holds the same gradient of y.

    Args:
        x: this rank's shard; any strided tensor.
        dim: the dim along which the sequences are packed.
        seq_lens: the global lengths of the sequences, as a list, tuple or 1-D int tensor.

    Returns:
        A new contiguous tensor; `x` itself if ring and ulysses have one rank each.

    Raises:
        ValueError: dim is out of range, a length is negative, or they do not match the local size.
        TypeError: the lengths are not ints.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    with _Hybrid("packed_data_gather_forward_split_backward_with_cp", x, "x") as call:
        dim = call.dim("dim", dim)
        lengths = call.lengths("seq_lens", seq_lens)
        if call.ring == call.ulysses == 1:
            call.check_sum("seq_lens", lengths, dim)
        elif not torch.compiler.is_compiling():
            call.check_cumulative("seq_lens", lengths, dim)
        return call.gather(packed(dim, len(lengths), lengths, call.inner), call.ring_extent(lengths))
