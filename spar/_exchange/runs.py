# SPDX-License-Identifier: Apache-2.0
"""The core's numbers of a layout that is given run by run."""

from __future__ import annotations

from typing import Any

from .._checks import check_ints, check_sum, check_type
from .layouts import Args


def numbers_of_runs(where: str, runs: Any, world: int) -> Args:
    """Return the numbers of the kind RUNS.

    Args:
        where: names the call in messages.
        runs: for each rank, its `(start, stop)` in the sequence, ascending.

    Raises:
        ValueError: the runs of all ranks are not the sequence, each token once.
        TypeError: they are not pairs of ints.
    """
    found: list[tuple[int, int, int]] = []  # start, stop, rank
    check_type(where, "runs", runs, (list, tuple), f"a list of each of {world} ranks' runs")
    if len(runs) != world:
        raise ValueError(f"{where}: runs is a list of {len(runs)}; expected one of each of {world} ranks")
    for rank, of_rank in enumerate(runs):
        check_type(where, f"runs[{rank}]", of_rank, (list, tuple), "a list of (start, stop)")
        end = 0
        for i, run in enumerate(of_rank):
            name = f"runs[{rank}][{i}]"
            bounds = check_ints(where, name, run, 0)
            if len(bounds) != 2 or not end <= bounds[0] <= bounds[1]:
                what = f"(start, stop) with {end} <= start <= stop: a rank holds its runs in ascending order"
                raise ValueError(f"{where}: {name} is {run!r:.200}; expected {what}")
            if bounds[0] < bounds[1]:
                found.append((bounds[0], bounds[1], rank))
            end = bounds[1]
    sizes, total = [0] * world, 0
    numbers: list[int] = []  # the rank and the size of each run; neighbours of a rank are one
    for start, stop, rank in sorted(found):
        if start != total:
            wrong = f"runs leave out tokens {total} to {start - 1}"
            if start < total:
                wrong = f"runs[{rank}] has token {start}, which another rank has, too"
            raise ValueError(f"{where}: {wrong}; expected each token of the sequence on one rank")
        if numbers and numbers[-2] == rank:
            numbers[-1] += stop - start
        else:
            numbers += rank, stop - start
        sizes[rank] += stop - start
        total = stop
    check_sum(where, "runs", sizes)
    return 1, total, *numbers, *sizes
