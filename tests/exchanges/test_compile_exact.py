# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) of layouts, lists and sizes: two graphs for any number of lengths.

A compilation takes seconds on each rank. So the ranks take turns: one compiles a function, the others run it
eagerly, and their calls match.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.orders import ORDERS
from helpers.processes import finish, start
from helpers.reference import assert_same, cells
from helpers.tables import MAKERS

import spar
from spar import SequenceLayout

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler, pytest.mark.long]

Group = dist.ProcessGroup
Function = Callable[..., torch.Tensor]
LENGTHS = (8, 10, 13, 14, 17)


def check_graphs(
    function: Function, arguments: Callable[[int], tuple[Any, ...]], compiles: bool = True, most: int = 2
) -> None:
    """Compare results and gradients with eager ones for each length; count the graphs.

    compiles: whether this rank compiles the function, or runs it twice. most: how many graphs.
    """
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in LENGTHS:
        x, *rest = arguments(length)
        results = []
        for run in (function, compiled if compiles else function):
            leaf = x.clone().requires_grad_()
            y = run(leaf, *rest)
            y.backward(cells(tuple(y.shape), y.dtype, salt=2))
            results.append((y.detach(), leaf.grad))
        for eager, other in zip(*results, strict=True):
            assert_same(other, eager, length)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert 1 <= graphs <= most if compiles else graphs == 0, graphs


def by_layout(x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    """Use each of a layout's operations, on one tensor and on a list."""
    one, two = layout.shard([x * 2, x * 3], 0, None)
    there = layout.gather(one, 0, "up") + spar.all_gather(two, layout=layout)
    first, second = layout.reduce_scatter([there, x], 0)
    columns = spar.all_to_all([first, second], None, 1, 0, layout=layout)
    first, second = spar.all_to_all(columns, None, 0, 1, gather_size=2, scatter_layout=layout)
    whole, again = layout.gather([first * 2, second], 0, backward="sum")
    return whole + again


def there_and_back(x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    return layout.gather(layout.shard(x * 2, 0, None).sin(), 0, None)


def check_layout(rank: int, world: int, group: Group, kind: str) -> None:
    maker = MAKERS[kind]
    inputs = {n: cells((n, 2), torch.float64) for n in LENGTHS}
    # the operations take a layout's pieces as numbers: those of one kind are enough, besides hybrid ones
    function = by_layout if kind == "packed" else there_and_back
    listed: dict[str, Callable[[int], SequenceLayout]] = {
        "balanced": lambda n: SequenceLayout.balanced([n], group),
        "of_runs": lambda n: SequenceLayout.of_runs([[(0, n - 3)], [(n - 3, n)]], group),
    }
    if kind in listed:
        # One document has as many runs for any length. Sizes that are equal on both ranks are one symbol,
        # so that others need a graph more. No graph makes the layout.
        check_graphs(function, lambda n: (inputs[n], listed[kind](n)), rank == 0, 3)
        return
    make = lambda n: maker.in_graph(group, *maker.of(n, world))  # noqa: E731
    check_graphs(function, lambda n: (inputs[n], make(n)), rank == 0)
    check_graphs(lambda x, n: there_and_back(x, make(n)), lambda n: (inputs[n], n), rank == 1)


@pytest.mark.parametrize("kind", MAKERS)
def test_layout_of_five_lengths_compiles_twice(ranks: Ranks, kind: str) -> None:
    """Whether it is an argument, or made from a length that is one."""
    ranks(2, check_layout, kind, timeout=280)


def check_hybrid(rank: int, folder: Path, order: str) -> None:
    ORDERS[order][0]()
    inputs = {n: cells((n, 2), torch.float64) for n in LENGTHS}
    check_graphs(by_layout, lambda n: (inputs[n], SequenceLayout.hybrid(n)), rank == 3)


@pytest.mark.parametrize("order", ["init_parallel_state", "mesh of ring x ulysses"])
def test_hybrid_layout_of_five_lengths_compiles_twice(tmp_path: Path, order: str) -> None:
    assert finish(start(check_hybrid, 4, tmp_path, order), 150) == [0] * 4


def by_list(x: torch.Tensor, group: Group, n: int) -> torch.Tensor:
    there, other = spar.all_to_all([x, x * 2], group, 1, 0, n)
    return there + other


def by_sizes(x: torch.Tensor, group: Group, n: int) -> torch.Tensor:
    return spar.all_to_all(x, group, 1, 0, scatter_sizes=[5, 1], gather_sizes=[n - 3, 3])


def by_list_of_sizes(x: torch.Tensor, group: Group, n: int) -> torch.Tensor:
    there, other = spar.all_to_all(
        [x, x * 2], group, 1, 0, scatter_sizes=[[5, 1], None], gather_sizes=[[n - 3, 3]] * 2
    )
    return there.sum(1) + other.sum(1)


def by_transposes(x: torch.Tensor, group: Group, n: int) -> torch.Tensor:
    whole, other = spar.all_gather([x, x * 2], group, 0, [[n - 3, 3]] * 2)
    first, second = spar.reduce_scatter([whole, other], group, 0, [[3, n - 3], None])
    return torch.cat((first, second))


def check_calls(rank: int, world: int, group: Group) -> None:
    def arguments(local: Callable[[int], int]) -> Callable[[int], tuple[Any, ...]]:
        return lambda n: (cells((local(n), 6), torch.float64), group, n)

    check_graphs(by_list, arguments(lambda n: len(range(rank, n, 2))), rank == 0)
    for turn, function in enumerate((by_sizes, by_list_of_sizes, by_transposes)):
        check_graphs(function, arguments(lambda n: (n - 3, 3)[rank]), rank == turn % 2)


def test_lists_and_sizes_of_five_lengths_compile_twice(ranks: Ranks) -> None:
    ranks(2, check_calls, timeout=280)
