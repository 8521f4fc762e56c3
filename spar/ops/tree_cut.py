# SPDX-License-Identifier: Apache-2.0
"""Divide a row of tokens among ranks: equal tokens, and nearly equal work."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sizes import share

# By how much of a rank's work a window may miss it for the sake of fewer cuts. Errors of P ranks add up to at
# most ln P times as much.
_TOLERANCE = 0.002


def cut_by_work(work: Tensor, world: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the runs `(start, stop)` that it holds, ascending.

    Ranks have equal tokens but for one, and nearly equal work, by at most 2 P - 1 runs. Of what is left,
    closed to a ring, each rank takes a window of its share of the tokens: over all turns of the window its
    mean work is its share, and one turn changes it by one token's. So one of them has the work wanted.

    work: `[S]`, of each token, above 0.
    """
    total = len(work)
    left, works = torch.arange(total, device="cpu"), work.to("cpu", torch.float64)
    mean = float(works.sum()) / world
    found = []
    for rank in range(world - 1):
        size = share(total, world, rank)
        first = _window(left, works, size, float(works.sum()) / (world - rank), _TOLERANCE * mean)
        # The ring begins behind the window.
        left, works = left.roll(-first), works.roll(-first)
        found.append(_runs(left[:size]))
        left, works = left[size:], works[size:]
    return [*found, _runs(left)]


def _window(places: Tensor, works: Tensor, size: int, target: float, tolerance: float) -> int:
    """Return where a window of `size` tokens of a ring begins: that of fewest cuts whose work is right."""
    if size == len(places) or size == 0:
        return 0
    sums = torch.cat([works.new_zeros(1), torch.cat([works, works[: size - 1]]).cumsum(0)])
    error = (sums[size:] - sums[:-size] - target).abs()
    joins = places == places.roll(1) + 1  # with the token before it: a window that begins here cuts a run
    cuts = joins.to(torch.float64) + joins.roll(-size)
    limit = max(tolerance, float(error.min()))
    return int((cuts + error / (2 * limit)).masked_fill(error > limit, torch.inf).argmin())


def _runs(places: Tensor) -> list[tuple[int, int]]:
    if not len(places):
        return []
    ordered = places.sort()[0]
    cuts = (ordered.diff() != 1).nonzero()[:, 0] + 1
    starts = ordered[torch.cat([cuts.new_zeros(1), cuts])]
    stops = ordered[torch.cat([cuts - 1, cuts.new_full((1,), len(ordered) - 1)])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
