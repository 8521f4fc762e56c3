# SPDX-License-Identifier: Apache-2.0
"""The methods in which ranks form rows and columns: a row's ranks put their queries together.

They then share either the keys, or the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from .._checks import digest
from .._exchange.arguments import Arguments
from .._exchange.exchange import Exchange, backward_of
from .._exchange.gather_plan import Interval
from .._exchange.layouts import Args, swapped
from .._exchange.observers import have_tangents, is_transformed
from ..ops.heads import heads_of_ranks, repeats_of
from ..sizes import as_int
from .delivery import Leg, Legs, deliver, give_back, route_of
from .float8 import DIRECTIONS, DTYPES, SCALE
from .grid import Grid, Tokens, fewest_bytes_2d, fewest_bytes_by_heads, grid_of, tokens_by_spans, tokens_of
from .kernels.kernel import accumulated
from .local import Outs, Tensors, blocks_by_runs, by_spans, by_steps, nothing, spans_of
from .methods import Run, as_given, of_heads, permuted
from .problem import Problem, Shapes
from .request import Request
from .ring import transform_error

# Of (heads, key heads, ranks): the rows and columns that are taken if the caller names none.
SHAPES = {"2d": fewest_bytes_2d, "ulysses_gather": fewest_bytes_by_heads}

# The grids by which "ulysses_gather" exchanges what other methods do, of a number of ranks.
GRIDS_LIKE: dict[str, Callable[[int], tuple[int, int]]] = {
    "ulysses": lambda world: (1, world),
    "gather": lambda world: (world, 1),
}


class _Heads(NamedTuple):
    """The first query head and key head that each rank has, and their numbers; of this rank `repeats_of`."""

    queries: list[Interval]
    keys: list[Interval]
    repeats: list[int] | None = None


def by_rows_and_columns(problem: Problem) -> Run:
    """Attend with the queries of this rank's row to the keys of its column, and merge the row's results."""
    world, shapes = problem.group.world, problem.shapes
    heads = _Heads([(0, shapes.heads)] * world, [(0, shapes.key_heads)] * world)
    return _in_grid(problem, heads, merges=True)


def ulysses_gather(problem: Problem) -> Run:
    """Attend with a share of the heads, and the queries of this rank's row, to the keys of all ranks."""
    grid, shapes, ranks = _grid_of(problem), problem.shapes, range(problem.group.world)
    columns = [grid.place(rank)[1] for rank in ranks]
    plan = heads_of_ranks(shapes.heads, shapes.key_heads, grid.columns)
    queries = [(sum(plan.queries[:column]), plan.queries[column]) for column in columns]
    keys = [(plan.first[column], plan.keys[column]) for column in columns]
    repeats = repeats_of(plan, shapes.heads // shapes.key_heads, columns[problem.group.rank])
    return _in_grid(problem, _Heads(queries, keys, repeats), merges=False)


def checked_grid(
    call: Arguments, grid: object, method: str | None, heads: int, key_heads: int
) -> tuple[int, int] | None:
    """Return the rows and columns of a method; None: it has none."""
    world = call.world
    if method is None or method not in SHAPES:
        if grid is not None:
            methods = " and ".join(f'"{name}"' for name in SHAPES)
            raise call.error("grid", f"{grid!r:.200}, and method is {method!r}", f"None; {methods} have one")
        return None
    if grid is None:
        return SHAPES[method](heads, key_heads, world)
    expected = f"(rows, columns), two ints of at least 1 whose product is {world}, the number of ranks"
    try:
        rows, columns = map(as_int, grid)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise call.type_error("grid", f"{grid!r:.200}", expected) from None
    if min(rows, columns) < 1 or rows * columns != world:
        raise call.error("grid", f"{(rows, columns)}", expected)
    return rows, columns


def checked_float8(call: Arguments, float8: object, method: str | None, shapes: Shapes) -> tuple[bool, bool]:
    """Return whether rows travel as float8 in forward, and whether in backward."""
    if not isinstance(float8, (str, type(None))) or float8 not in DIRECTIONS:
        names = ", ".join([f'"{name}"' for name in DIRECTIONS if name])
        raise call.error("float8", f"{float8!r:.200}", f"{names} or None")
    methods, dtype = (*GRIDS_LIKE, *SHAPES), call.input.dtype
    if float8 is not None and method not in methods:
        what = "that of a hybrid layout" if method is None else repr(method)
        expected = f"one of {', '.join(map(repr, methods))}"
        raise call.error("float8", f"{float8!r}, and the method is {what}", expected)
    if float8 is not None and dtype not in DTYPES:
        expected = f"None, as gradients are not exact, or {', '.join(map(str, DTYPES))}"
        raise call.error("float8", f"{float8!r}, and q is of {dtype}", expected)
    if float8 is not None and 0 in (shapes.width, shapes.value_width):
        raise call.error("float8", f"{float8!r}, and heads have no width", "None")
    return DIRECTIONS[float8]


def _grid_of(problem: Problem) -> Grid:
    assert problem.grid is not None
    is_causal_alone = problem.causal and not (problem.uses_spans or problem.packed)
    return grid_of(problem.grid, problem.queries, is_causal_alone)


def _in_grid(problem: Problem, heads: _Heads, merges: bool) -> Run:
    """Exchange tokens, attend, and return the results to the owners of the queries.

    merges: whether a row's ranks share the keys; else they share the heads.
    """
    group, grid = problem.group, _grid_of(problem)
    if problem.keys is None:
        raise problem.error("method", "one with a grid, and k and v have no layout", '"gather"')
    if not problem.blockwise:
        name, value = ("dropout_p", problem.dropout_p) if problem.dropout_p else ("kernel", "a function")
        raise problem.error(
            name, f"{value}, and the method has a grid", 'none; or method="ulysses" or "gather"'
        )
    if torch.compiler.is_compiling():
        raise problem.error("method", "one with a grid, in compiled code", '"ulysses", "gather" or "ring"')
    layouts = problem.queries, problem.keys
    if problem.causal and problem.keys != problem.queries:
        # Runs of queries and of keys overlap in part, which blocks of spans may.
        problem = replace(problem, uses_spans=True)
    parts = [problem.note, f"grid {grid.rows} x {grid.columns}", f"hash of the layouts {digest(layouts):x}"]
    note, place = ", ".join(filter(None, parts)), (grid, group.world, group.rank)
    first = heads.queries[group.rank][0]

    def exchanges(tokens: Tokens) -> tuple[Legs, Legs]:
        """Return the exchange of q, k and v and that of results, which a group remembers."""
        decided = problem.returns_lse, problem.float8
        key = ("grid", tokens, *problem.shapes, *heads.queries, problem.dtype, merges, note, *decided)
        return problem.group.remember(key, lambda: _exchanges(problem, tokens, heads, merges, note))

    fixed = None
    if not problem.uses_spans:
        # Documents that lie on all ranks are sent whole, as by the ring.
        is_causal = problem.causal and (problem.listed or not problem.packed)
        tokens = tokens_of(layouts, *place, is_causal, problem.listed, merges)
        fixed = tokens, *exchanges(tokens)

    def run(request: Request) -> Outs:
        if is_transformed() or have_tangents(request[:3]):
            raise transform_error()
        if fixed is None:
            tokens = tokens_by_spans(spans_of(problem, request), layouts, *place, merges)
            delivery, back = exchanges(tokens)
        else:
            tokens, delivery, back = fixed
        q, k, v = deliver(delivery, permuted(problem, *request[:3]))
        if heads.repeats is not None:
            index = torch.tensor(heads.repeats, dtype=torch.int64, device=k.device)
            k, v = k.index_select(1, index), v.index_select(1, index)
        of_rank = of_heads(request, first, q.size(1)) if q.size(1) < problem.shapes.heads else request
        if merges:
            of_rank = of_rank._replace(sinks=None)
        outs = _attended(problem, first, tokens, (q, k, v), of_rank)
        outs = give_back(back, outs, request.sinks if merges else None, merges)
        return as_given(problem, outs[: 1 + request.returns_lse])

    return run


def _exchanges(problem: Problem, tokens: Tokens, heads: _Heads, merges: bool, note: str) -> tuple[Legs, Legs]:
    """Decide the exchange of q, k and v and that of results."""
    group, shapes = problem.group, problem.shapes
    queries, keys = (
        route_of(shares, of_ranks, group.rank) for shares, of_ranks in zip(tokens, heads[:2], strict=True)
    )
    # What moves, in forward and in backward.
    moves: list[tuple[tuple[Args, ...], tuple[Args, ...]]] = []
    for is_float8 in problem.float8:
        size, item = (group.world, shapes.batch), 1 if is_float8 else problem.dtype.itemsize
        width, of_values = (d + SCALE * is_float8 for d in (shapes.width, shapes.value_width))
        results = queries.args(*size, of_values)
        # Numbers of rows travel as items of the dtype of the others.
        numbers = queries.args(*size, accumulated(problem.dtype).itemsize // item)
        tokens_moved = queries.args(*size, width), keys.args(*size, width), keys.args(*size, of_values)
        moves.append((tokens_moved, (results, numbers)))
    (forward, out), (backward, of_out) = moves
    if merges:
        of_out = (*of_out, of_out[1])
    elif not problem.returns_lse:
        out, of_out = out[:1], of_out[:1]
    name = backward_of("attention")
    of_tokens, narrows = (queries, keys, keys), problem.float8
    return (
        Legs(
            Leg(Exchange("attention", group, forward, note=note), of_tokens, narrows[0]),
            Leg(Exchange(name, group, tuple(map(swapped, backward))), of_tokens, narrows[1]),
        ),
        Legs(
            Leg(Exchange("attention", group, tuple(map(swapped, out))), (queries,) * len(out), narrows[0]),
            Leg(Exchange(name, group, of_out), (queries,) * len(of_out), narrows[1]),
        ),
    )


def _attended(problem: Problem, first: int, tokens: Tokens, tensors: Tensors, request: Request) -> Outs:
    """Attend with this rank's heads, from `first` on, of the row's queries to the keys that came."""
    q, k, _ = tensors
    queries, keys = tokens.queries.held, tokens.keys.held
    if problem.is_empty(q.size(1), q.size(2), k.size(2)):
        return nothing(problem, tensors, request)
    if problem.uses_spans:
        return by_spans(problem, first, queries, keys, tensors, request)
    return by_steps(problem, problem.scores(first), blocks_by_runs(problem)(queries, keys))(tensors, request)
