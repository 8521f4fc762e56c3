# SPDX-License-Identifier: Apache-2.0
"""Pieces of a sequence, which stay where their tokens are; and what blocks receive beside their sequence."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.view_cases import Inputs, viewed
from torch import Tensor

import spar
from spar import SparError
from spar._model import moving
from spar._model.part import part_of
from spar._model.rules import attention
from spar._model.view import View, without_view

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def check_pieces(rank: int, world: int, group: Group) -> None:
    """Attend within windows, as the vision models of transformers do: one that ranks share is exchanged."""

    def windows(view: View, x: Tensor, sizes: list[int]) -> Tensor:
        pieces = x.split(sizes, 1)
        return torch.cat([F.scaled_dot_product_attention(piece, piece, piece) for piece in pieces], 1)

    whole = Inputs(1).x
    for sizes, count in (([3, 3, 3, 3], 0), ([6, 6], 0), ([2, 0, 1, 3, 6], 0), ([5, 7], 1), ([5, 2, 5], 1)):
        with (
            mock.patch.object(moving, "gather_pieces", side_effect=AssertionError),
            mock.patch.object(attention, "attention", wraps=attention.attention) as exchanged,
        ):
            found = viewed(group, lambda view, x, sizes=sizes: windows(view, x, sizes))
        assert exchanged.call_count == count, sizes
        part = part_of(found)
        assert part is not None and part.lengths == (12,) and not part.is_uneven
        expected = windows(None, whole, sizes)  # type: ignore[arg-type] # it needs none
        torch.testing.assert_close(part.parts.gather(found), expected)


def test_a_piece_on_one_rank_exchanges_nothing(ranks: Ranks) -> None:
    ranks(2, check_pieces)


def check_uneven_pieces(rank: int, world: int, group: Group) -> None:
    """Move a piece once to an even part, where something else than attention computes with it."""

    def run(view: View, x: Tensor) -> None:
        first, rest = x.split([2, 10], 1)
        assert [part_of(y).is_uneven for y in (first, rest)] == [True, True]  # type: ignore[union-attr]
        assert part_of(rest * 2) is view.parts.part(1, (10,))
        assert part_of(first + 1) is view.parts.part(1, (2,))
        assert part_of(x.split([1, 11], 1)[0] + 1) is None  # fewer tokens than ranks are whole
        assert not view.report.functions

    viewed(group, run)


def check_moves(rank: int, world: int, group: Group) -> None:
    """Move a piece that is read twice once, and again where it was changed, or is to have a gradient."""

    def run(view: View, x: Tensor) -> list[int]:
        counts = []
        with mock.patch.object(moving, "gather_pieces", wraps=moving.gather_pieces) as exchanged:
            for inference in (False, True):
                with torch.inference_mode(inference):
                    piece = (x * 1).split([2, 10], 1)[1]
                    (piece.square() + piece).sum(2)
                    counts.append(exchanged.call_count)
            with torch.no_grad():
                piece = (x * 1).split([2, 10], 1)[1]
                first = piece * 2
                counts.append(exchanged.call_count)
                piece.zero_()
                assert not view.output(piece * 2).any() and view.output(first).any()
                counts.append(exchanged.call_count)
            base = (x * 1).requires_grad_()
            piece = base.split([2, 10], 1)[1]
            with torch.no_grad():
                piece * 2
            assert (piece * 2).requires_grad
            counts.append(exchanged.call_count)
        return counts

    assert viewed(group, run) == [1, 3, 4, 5, 7]


def test_a_piece_is_moved_once(ranks: Ranks) -> None:
    ranks(2, check_moves)


def test_uneven_pieces_become_even(ranks: Ranks) -> None:
    ranks(2, check_uneven_pieces)


class Windows(torch.nn.Module):
    """Attends within two windows; the kernel fails where `fails` says so."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        scale = "none" if self.fails else 0.4
        attend = F.scaled_dot_product_attention
        return torch.cat([attend(p, p, p, scale=scale) for p in x.split([6, 6], 1)], 1)  # type: ignore[arg-type]


def check_failure(rank: int, world: int, group: Group) -> None:
    model = torch.nn.Sequential(Windows(), Windows(), torch.nn.Flatten(0, 1))
    whole = torch.nn.ModuleDict({"blocks": model})
    whole.forward = lambda x: model(x)  # type: ignore[method-assign]
    spar.parallelize(whole, group, blocks=["blocks.0", "blocks.1"])
    x = Inputs(1).x
    expected = whole(x)
    model[1].fails = rank == 0
    with pytest.raises((TypeError, SparError)):
        whole(x)
    model[1].fails = False
    torch.testing.assert_close(whole(x), expected)


def test_a_rank_that_fails_in_its_piece_fails_all(ranks: Ranks) -> None:
    ranks(2, check_failure)


class Turned(torch.nn.Module):
    """A block with cosines and sines as one argument, which says which parts it receives."""

    def forward(self, hidden_states: Tensor, turns: tuple[Tensor, ...]) -> Tensor:
        with without_view():
            self.found = [part_of(x) for x in (hidden_states, *turns)]
        return hidden_states * turns[0] + turns[1]


class Turning(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Turned(), Turned()])

    def forward(self, x: Tensor, *turns: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, turns)
        return x


def check_tuples(rank: int, world: int, group: Group) -> None:
    model, (x, turn) = Turning(), (Inputs(1).x, Inputs(2).x[:1])
    spar.parallelize(model, group)
    torch.testing.assert_close(model(x, turn, turn), (x * turn + turn) * turn + turn)
    for block in model.blocks:
        assert {part and part.lengths for part in block.found} == {(12,)}  # type: ignore[union-attr]


def test_tuples_of_whole_tensors_are_sharded_with_the_sequence(ranks: Ranks) -> None:
    ranks(2, check_tuples)
