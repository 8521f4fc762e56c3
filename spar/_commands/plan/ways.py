# SPDX-License-Identifier: Apache-2.0
"""The ways in which the ranks can share an attention, what each costs, and which one is recommended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..._attention.attention import METHODS
from ..._attention.by_time import keys_of_queries, pairs_of
from ..._attention.choice import chosen_method
from ..._attention.grid import grid_of
from ..._attention.grid_methods import SHAPES
from ..._attention.ring import forward_exchanges
from ..._control.speeds import Speeds
from ..._exchange.layouts import Layout, shards
from ...ops.heads import Heads, heads_of_ranks
from ...sequence_layout import SequenceLayout, numbers_of
from ..printing import size_text, time_text
from .exchanges import exchanged
from .layer import HYBRID, OF_DOCUMENTS, Layer, placed

# Of more ranks than MOST so many are planned: each takes a second or so where there are hundreds.
MOST, FEW = 16, 8
# By how much of the mean the busiest rank may do more than in the most even way, as of balanced layouts.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Way:
    """A method over a layout, and its cost.

    Attributes:
        method, layout: their names.
        default: whether `spar.attention` chooses this method for the layout.
        refused: why `spar.attention` raises; empty if it does not. The rest is then 0.
        rank: the one that sends the most in a step.
        forward, backward: bytes that this rank sends in one layer.
        step: bytes that it sends in forward and backward of all layers.
        waited: bytes in a step of the ranks that send the most in forward and in backward, which may be two.
        held: bytes of K and V that exchanges brought, held at once in forward, on the rank with the most.
        held_rank: that rank.
        tokens: of the rank with the most.
        tokens_rank: that rank.
        activations: bytes of the hidden states of its tokens between all layers.
        work: pairs of queries and keys of the busiest rank, as a multiple of the mean.
        work_rank: that rank.
        seconds: of attention and its exchanges in a step of all layers, by measured speeds; 0: none are.
        notes: what else is to be known.
    """

    method: str
    layout: str
    default: bool = False
    refused: str = ""
    rank: int = 0
    forward: int = 0
    backward: int = 0
    step: int = 0
    waited: int = 0
    held: int = 0
    held_rank: int = 0
    tokens: int = 0
    tokens_rank: int = 0
    activations: int = 0
    work: float = 0.0
    work_rank: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def ways_of(layer: Layer) -> list[tuple[str, str]]:
    """Return each method with each layout that it can have."""
    single = [(method, kind) for method in METHODS for kind in layer.kinds]
    return [*single, (HYBRID, HYBRID)] if min(layer.ring, layer.ulysses) > 1 else single


def planned_ranks(world: int) -> list[int]:
    """Return the ranks whose exchanges are planned, the first and the last among them."""
    if world <= MOST:
        return list(range(world))
    return [i * (world - 1) // (FEW - 1) for i in range(FEW)]


def evaluate(layer: Layer, method: str, kind: str, speeds: Speeds | None = None) -> Way:
    layout = placed(layer, kind, 0).layout
    default = chosen_method(layout, layout, layer.heads) == method
    ranks = planned_ranks(layer.ranks)
    try:
        traffic = [exchanged(layer, method, kind, rank) for rank in ranks]
    except ValueError as error:
        return Way(method, kind, default, refused=_reason(error))
    sends, most = _largest([one.forward + one.backward for one in traffic])
    waited = max([one.forward for one in traffic]) + max([one.backward for one in traffic])
    holds, held = _largest([one.held for one in traffic])
    tokens_rank, tokens = _largest(layout.sizes)
    pairs = work_of(layer, method, layout)
    busiest, work = _largest(pairs)
    return Way(
        method,
        kind,
        default,
        rank=ranks[sends],
        forward=traffic[sends].forward,
        backward=traffic[sends].backward,
        step=layer.layers * most,
        waited=layer.layers * waited,
        held=held,
        held_rank=ranks[holds],
        tokens=tokens,
        tokens_rank=tokens_rank,
        activations=layer.layers * layer.batch * tokens * layer.hidden * layer.dtype.itemsize,
        work=work * len(pairs) / max(sum(pairs), 1),
        work_rank=busiest,
        seconds=_seconds(layer, method, kind, speeds, work, waited) if speeds else 0.0,
        notes=tuple(_notes(layer, method, kind)),
    )


def _largest(numbers: Sequence[int]) -> tuple[int, int]:
    """Return the place of the largest number, the first of equal ones, and the number."""
    most = max(numbers)
    return numbers.index(most), most


def _seconds(layer: Layer, method: str, kind: str, speeds: Speeds, pairs: int, sent: int) -> float:
    """Return the seconds of a step; pairs: of the busiest rank, sent: bytes, both in one layer."""
    rounds = layer.ring if method == HYBRID else layer.ranks
    of_ring = forward_exchanges(rounds) + max(rounds - 1, 2)
    exchanges = {"gather": 2, "ring": of_ring, HYBRID: 4 + of_ring}.get(method, 4)
    # The part of the work beside which exchanges are in flight.
    is_beside = layer.causal and layer.window is None and kind not in OF_DOCUMENTS
    own = {"ring": 1.0, "gather": is_beside / layer.ranks}.get(method, 0.0)
    return layer.layers * speeds.step(pairs * layer.batch * layer.width, sent, exchanges, own=own)


def _reason(error: ValueError) -> str:
    """Return the message without the operation and the rank, which are the same for all."""
    text = str(error)
    return text.partition(": ")[2] if text.startswith("attention on rank") else text


def work_of(layer: Layer, method: str, layout: SequenceLayout) -> list[int]:
    """Return each rank's pairs of a query and a key that it attends to, of all heads of one sequence."""
    keywords = layer.tokens, layer.tokens, layer.causal, layer.sides, layer.documents
    if method == HYBRID:
        # The ring computes in a zigzag layout of its own ranks: `methods.hybrid`.
        ring = placed(layer, HYBRID, 0).ring
        pairs = pairs_of(keywords, numbers_of(SequenceLayout.zigzag(layer.tokens, ring), 0), layer.ring)
        return [heads * of_rank for heads in _heads(layer, layer.ulysses).queries for of_rank in pairs]
    pairs = pairs_of(keywords, numbers_of(layout, 0), layer.ranks)
    if method == "ulysses":
        return [heads * sum(pairs) for heads in _heads(layer, layer.ranks).queries]
    if method in SHAPES:
        return _work_in_grid(layer, method, numbers_of(layout, 0), *keys_of_queries(keywords))
    return [layer.heads * of_rank for of_rank in pairs]


def _work_in_grid(
    layer: Layer, method: str, numbers: Layout, first: torch.Tensor, end: torch.Tensor
) -> list[int]:
    """Return the work of each rank in a grid; first, end: [S, intervals], those of keys of each query."""
    is_causal_alone = layer.causal and layer.window is None and not layer.documents
    grid = grid_of(shape_of(layer, method), numbers, is_causal_alone)
    places = [grid.place(rank) for rank in range(layer.ranks)]
    queries = torch.empty(layer.tokens, dtype=torch.int64, device="cpu")
    columns = torch.empty_like(queries)
    for (row, column), runs in zip(places, shards(numbers, layer.ranks), strict=True):
        for run in runs:
            queries[run.start : run.start + run.size] = row
            columns[run.start : run.start + run.size] = column

    def of_rows(pairs: torch.Tensor) -> list[int]:
        found: list[int] = pairs.new_zeros(grid.rows).index_add_(0, queries, pairs).tolist()
        return found

    if method == "ulysses_gather":
        rows, heads = of_rows((end - first).sum(1)), _heads(layer, grid.columns).queries
        return [heads[column] * rows[row] for row, column in places]
    of_columns = []
    for column in range(grid.columns):
        held = torch.nn.functional.pad((columns == column).cumsum(0), (1, 0))
        of_columns.append(of_rows((held[end] - held[first]).sum(1)))
    return [layer.heads * of_columns[column][row] for row, column in places]


def shape_of(layer: Layer, method: str) -> tuple[int, int]:
    """Return the rows and columns that `spar.attention` chooses."""
    return SHAPES[method](layer.heads, layer.key_heads, layer.ranks)


def _heads(layer: Layer, ranks: int) -> Heads:
    return heads_of_ranks(layer.heads, layer.key_heads, ranks)


def _notes(layer: Layer, method: str, kind: str) -> Iterator[str]:
    if layer.documents and kind not in OF_DOCUMENTS:
        yield f"{kind} layouts have no documents: pass mask=spar.Spans.documents(ids)"
    ranks = {"ulysses": layer.ranks, HYBRID: layer.ulysses}.get(method)
    if method in SHAPES:
        rows, columns = shape_of(layer, method)
        yield f"{method}: grid=({rows}, {columns}), rows x columns of ranks"
        ranks = columns if method == "ulysses_gather" else None
    if ranks is None:
        return
    heads = _heads(layer, ranks)
    if idle := heads.queries.count(0):
        yield f"{method}: {idle} of {ranks} ranks have none of {layer.heads} heads, and compute nothing"
    elif len(set(heads.queries)) > 1:
        counts = f"{min(heads.queries)} or {max(heads.queries)}"
        yield f"{method}: each of {ranks} ranks has {counts} of {layer.heads} heads"
    if (copies := sum(heads.keys)) > layer.key_heads:
        yield f"{method}: {layer.key_heads} key heads become {copies}, as several ranks need the same"


# ---- which one ----


def recommended(ways: Sequence[Way]) -> tuple[Way, str]:
    """Return the way to take, of which one at least is not refused, and why, in one sentence.

    The one that takes the least time, if speeds were measured. Else, of those whose busiest rank has about as
    little work as in any, the one that sends the fewest bytes in a step, then the one that holds the fewest.
    """
    possible = [way for way in ways if not way.refused]
    if all(way.seconds for way in possible):
        best = min(possible, key=lambda way: (way.seconds, way.held))
        time = f"It takes the least time by the measured speeds: {time_text(best.seconds)} in a step"
        return best, f"{time}, in which it sends {size_text(best.step)}."
    most = min([way.work for way in possible]) + TOLERANCE
    even = [way for way in possible if way.work <= most]
    best = min(even, key=lambda way: (way.waited, way.held))
    limit = f"whose busiest rank computes at most {most:.2f} times the mean"
    if len(even) == 1:
        return best, f"It is the only way {limit}."
    alone = [way.waited for way in even].count(best.waited) == 1
    sends = "it sends the fewest bytes" if alone else "none sends fewer bytes"
    sent = f"{size_text(best.waited)} in a step"
    if any(way.step < best.waited for way in even):  # the table's bytes are of one rank
        sent += ", of the ranks that send the most in forward and in backward"
    return best, f"Of the {len(even)} ways {limit}, {sends}: {sent}."
