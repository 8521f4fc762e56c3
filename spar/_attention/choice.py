# SPDX-License-Identifier: Apache-2.0
"""Which method an attention has whose caller names none, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .._group.log import log
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout
from .by_time import speeds_of, step_of
from .problem import Problem
from .request import Request
from .slices import slices_of

PASSED = "as passed"


class Choice(NamedTuple):
    """How the ranks share an attention, and why.

    Attributes:
        slices: of the heads, of which one is attended to while others are exchanged.
    """

    method: str
    slices: int
    reason: str


# Called with the choice of each attention, outside of compiled code.
noted: ContextVar[Callable[[Choice], None] | None] = ContextVar("noted", default=None)


@contextmanager
def noting(note: Callable[[Choice], None] | None) -> Iterator[None]:
    """Call a function, if there is one, with the choice of each attention in this context."""
    token = noted.set(note)
    try:
        yield
    finally:
        noted.reset(token)


def chosen_method(queries: SequenceLayout, keys: SequenceLayout | None, heads: int) -> str:
    """Return the method where the caller names none: "hybrid" for q, k and v of one hybrid layout."""
    if queries.kind == "hybrid" and keys == queries:
        return "hybrid"
    exchanges_heads = heads >= place_of(queries.group).world and keys is not None
    return "ulysses" if exchanges_heads and queries.kind != "balanced" else "gather"


def choose(problem: Problem, request: Request) -> tuple[str, str]:
    """Return the method where the caller names none, and why; not of a hybrid layout."""
    found = _by_time(problem, request)
    if found is not None:
        return found
    heads, world = problem.shapes.heads, problem.group.world
    method = chosen_method(request.queries, request.keys, heads)
    if method == "ulysses":
        return method, f"{heads} heads for {world} ranks"
    if request.keys is None:
        return method, "each rank has all keys"
    if request.queries.kind == "balanced":
        return method, "the layout is balanced"
    return method, f"{heads} heads are too few for {world} ranks"


def _by_time(problem: Problem, request: Request) -> tuple[str, str] | None:
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
    reason = f"by the measured speeds {', '.join(texts)}"
    log.info("%s: %s, %s", problem.where, best, reason)
    return best, reason
