# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout.of_runs: the chunks that another library gives each rank."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same
from helpers.whole_attention import METHODS, error_of, expected_of, inputs

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def thd_indices(lengths: list[int], world: int, rank: int) -> torch.Tensor:
    """Transformer Engine's thd_get_partitioned_indices: two of 2P equal slices of each document."""
    parts = []
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        slices = torch.arange(start, start + length).chunk(2 * world)
        parts += [slices[rank], slices[2 * world - 1 - rank]]
    return torch.cat(parts)


def check_thd(rank: int, world: int, group: Group) -> None:
    """The example of the docstring: tokens, positions and attention are those of the documents."""
    chunks, lengths = 2 * world, [2 * world * n for n in (3, 1, 4)]

    def slices(start: int, n: int) -> list[tuple[int, int]]:
        return [(start + n * i // chunks, start + n * (i + 1) // chunks) for i in range(chunks)]

    documents = list(map(slices, accumulate(lengths, initial=0), lengths))
    runs = [[cut[i] for cut in documents for i in (r, chunks - 1 - r)] for r in range(world)]
    layout = SequenceLayout.of_runs(runs, group).with_documents(lengths)
    assert_same(layout.index(), thd_indices(lengths, world, rank))
    assert layout.is_packed and layout.lengths == tuple(lengths)
    assert repr(layout) == f"SequenceLayout.with_documents({lengths}, {world} ranks)"
    tokens = [[(i, i + 1) for a, b in run for i in range(a, b)] for run in runs]
    assert SequenceLayout.of_runs(tokens, group) == SequenceLayout.of_runs(runs, group), "neighbours are one"
    whole = inputs(sum(lengths), 4, 4, torch.float64)
    expected = expected_of(whole, causal=True, documents=lengths)
    for method in METHODS:
        attend = partial(spar.attention, layout=layout, causal=True, method=method)
        assert error_of(attend, whole, expected, layout.index()) < 1e-9, method
    # Q, K, V and others of each document in one exchange: heads to all tokens, and back.
    x = whole[0][:, layout.index()]
    heads = spar.all_to_all(x, None, 2, 1, layout=layout)
    assert_same(heads, whole[0].tensor_split(world, 2)[rank])
    assert_same(spar.all_to_all(heads, None, 1, 2, gather_size=4, scatter_layout=layout), x)


@pytest.mark.parametrize("world", [2, 4])
def test_thd_of_megatron_and_transformer_engine(ranks: Ranks, world: int) -> None:
    ranks(world, check_thd)


def check_errors(rank: int, world: int, group: Group) -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        ([[(0, 4)], [(5, 9)]], ValueError, "runs leave out tokens 4 to 4; expected each token"),
        ([[(0, 4)], [(3, 9)]], ValueError, r"runs\[1\] has token 3, which another rank has, too"),
        ([[(4, 6), (0, 4)], []], ValueError, r"runs\[0\]\[1\] is \(0, 4\); .* with 6 <= start"),
        ([[(3, 0)], []], ValueError, r"runs\[0\]\[0\] is \(3, 0\); expected \(start, stop\)"),
        ([[(0, 4, 1)], []], ValueError, r"is \(0, 4, 1\); expected \(start, stop\)"),
        ([[(0, 9)]], ValueError, "runs is a list of 1; expected one of each of 2 ranks"),
        ([[(0, 2**62)], [(2**62, 2**63)]], ValueError, r"runs sum to \d+; expected a sum below 2\^63"),
        ([[(0, 4.5)], []], TypeError, r"runs\[0\]\[0\]\[1\] is 4.5; expected an int"),
        ([[0, 4], []], TypeError, r"runs\[0\]\[0\] is 0; expected a list of ints"),
        ([torch.zeros(1), []], TypeError, r"runs\[0\] is tensor"),
    ]
    for runs, kind, text in bad:
        with pytest.raises(kind, match=f"SequenceLayout.of_runs: .*{text}"):
            SequenceLayout.of_runs(runs, group)
    runs = [[(0, 4)], [(4, 9)]] if rank == 0 else [[(0, 3), (4, 5)], [(3, 4), (5, 9)]]
    with pytest.raises(spar.MismatchError, match="in the order of the gathered dim: consecutive"):
        layout = SequenceLayout.of_runs(runs, group)
        layout.gather(torch.ones(layout.sizes[rank]), 0)


def test_wrong_runs_raise(ranks: Ranks) -> None:
    ranks(2, check_errors)
