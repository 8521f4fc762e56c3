# SPDX-License-Identifier: Apache-2.0
"""Which method an attention has whose caller names none."""

from __future__ import annotations

from .._group.log import log
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout
from .by_time import speeds_of, step_of
from .problem import Problem
from .request import Request
from .slices import slices_of


def chosen_method(queries: SequenceLayout, keys: SequenceLayout | None, heads: int) -> str:
    """Return the method where the caller names none: "hybrid" for q, k and v of one hybrid layout."""
    if queries.kind == "hybrid" and keys == queries:
        return "hybrid"
    exchanges_heads = heads >= place_of(queries.group).world and keys is not None
    return "ulysses" if exchanges_heads and queries.kind != "balanced" else "gather"


def fastest_method(problem: Problem, request: Request) -> str | None:
    """Return the method that takes the least time by the speeds that were measured; None: it is not known.

    The ring sends no fewer bytes than gather. The work that masks leave is not known.
    """
    is_plain = problem.mask is None and not problem.uses_spans and request.attend is None
    if problem.keys is None or problem.listed or not is_plain:
        return None
    speeds = speeds_of(problem, request)
    if speeds is None:
        return None
    slices = {method: slices_of(method, problem, request) for method in ("ulysses", "gather")}
    times = {method: step_of(speeds, method, problem, request, n) for method, n in slices.items()}
    best = min(times, key=lambda method: times[method])
    texts = [f"{method} {times[method] * 1e3:.3g} ms a step in {n} slices" for method, n in slices.items()]
    log.info("%s: %s, by the measured speeds: %s", problem.where, best, ", ".join(texts))
    return best
