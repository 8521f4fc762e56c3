# SPDX-License-Identifier: Apache-2.0
"""The cases of `spar check`, in the order in which they run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import spar

from ..._attention.attention import METHODS
from .shards import (
    DOCUMENTS,
    DOCUMENTS_OF,
    PLACES,
    WIDE,
    Run,
    accumulate_tokens,
    add,
    attend,
    exact_gather,
    gather,
    indices,
    long_and_short,
    split,
    swap,
)
from .tokens import added_by_index, averaged, counted, indexed, logprobs, masked, rolled
from .trial import NO_GRADIENT, OWN, Case, Setting, Tensors, Trial, numbers

Call = Callable[..., Any]
Sizes = list[int]  # how large each rank's shard is
LENGTHS = list(DOCUMENTS)
NEED_GROUPS = ("SequenceLayout.hybrid", "attention (ring x")  # a parallel state of one rank has none


def case(
    operation: str, trial: Callable[..., Trial], variant: str, call: Call, where: str = "", **options: Any
) -> Case:
    """Make a case.

    Args:
        trial: builds the trial.
        call: spar's call, of the operation, the setting, the sizes of all shards if there are any, and this
            rank's inputs. It is made in the topology of ring x ulysses.
        where: where the shards lie, in PLACES.
        options: of `trial`.
    """

    def make(s: Setting) -> Trial:
        index = [PLACES[where](s)] if where else []
        sizes = [list(map(len, parts)) for parts in index]

        def run(*inputs: Any) -> Any:
            with s.topology:
                return call(operator.attrgetter(operation)(spar), s, *sizes, *inputs)

        return trial(s, run, *index, **options)

    return Case(operation, variant, make)


def cases(world: int) -> list[Case]:
    """Return the cases for a group of `world` ranks. The first one sets the group up."""
    all_cases = [*OPERATIONS, *(case for name in LAYOUTS for case in layout_cases(name)), *ATTENTION]
    return all_cases if world > 1 else [case for case in all_cases if not case.name.startswith(NEED_GROUPS)]


# ---- layouts ----


def token_runs(s: Setting) -> list[list[tuple[int, int]]]:
    with torch.device("cpu"):
        index = PLACES["documents"](s)
    return [[(place, place + 1) for place in part.tolist()] for part in index]


def documents_of_runs(s: Setting) -> spar.SequenceLayout:
    return spar.SequenceLayout.of_runs(token_runs(s), s.group).with_documents(DOCUMENTS)


# a maker of SequenceLayout: where each rank's tokens lie, and the layout of the sizes
LAYOUTS: dict[str, tuple[str, Callable[[Setting, Sizes], spar.SequenceLayout]]] = {
    "even": ("uneven", lambda s, n: spar.SequenceLayout.even(sum(n), s.group)),
    "zigzag": ("zigzag", lambda s, n: spar.SequenceLayout.zigzag(sum(n), s.group)),
    "packed": ("packed", lambda s, n: spar.SequenceLayout.packed(DOCUMENTS, s.group)),
    "balanced": ("balanced", lambda s, n: spar.SequenceLayout.balanced(long_and_short(s.world), s.group, 0)),
    "of_runs": ("documents", lambda s, n: documents_of_runs(s)),
    "joint": ("joint", lambda s, n: spar.SequenceLayout.joint(5, sum(n) - 5, s.group)),
    "from_local": ("uneven", lambda s, n: spar.SequenceLayout.from_local(n[s.rank], s.group)),
    "hybrid": ("hybrid", lambda s, n: spar.SequenceLayout.hybrid(sum(n), s.state)),
}


def layout_cases(name: str) -> list[Case]:
    where, layout = LAYOUTS[name]
    way = partial(case, f"SequenceLayout.{name}")
    return [
        way(indices, "index", lambda f, s, n: layout(s, n).index().clone(), where),
        way(split, "shard", lambda f, s, n, x: layout(s, n).shard(x, 1, None), where, scaled=False),
        way(gather, "gather", lambda f, s, n, x: layout(s, n).gather(x, 1, None), where, scaled=False),
        way(
            exact_gather,
            'gather backward="sum"',
            lambda f, s, n, x: layout(s, n).gather(x, 1, backward="sum"),
            where,
        ),
        way(add, "reduce_scatter", lambda f, s, n, x: layout(s, n).reduce_scatter(x, 1), where),
    ]


def attention_case(
    variant: str,
    name: str,
    method: str | None,
    causal: bool = True,
    masked: bool = False,
    window: int | None = None,
) -> Case:
    where, layout = LAYOUTS[name]
    options: dict[str, Any] = {"causal": causal, "method": method}
    if window is not None:
        options["window"] = (window, None)

    def call(f: Any, s: Setting, n: Sizes, mask: Tensor | None, *qkv: Tensor) -> Any:
        return f(*qkv, layout(s, n), mask=mask, **options)

    more = {"causal": causal, "masked": masked, "documents": DOCUMENTS_OF.get(name), "window": window}
    return case("attention", attend, variant, call, where, **more)


def summed_by_heads(f: Any, s: Setting, n: Sizes, x: Tensor) -> Any:
    return f(lambda whole: whole.cumsum(1), [x], spar.SequenceLayout.even(sum(n), s.group))


def summed_by_state(f: Any, s: Setting, n: Sizes, x: Tensor) -> Any:
    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = x.cumsum(1) + state[:, None, :, 0]
        return y, y[:, -1, :, None]

    batch, _, heads, width = x.shape
    layout = spar.SequenceLayout.zigzag(sum(n), s.group)
    return f(step, [x], layout, (batch, heads, 1, width), lambda x: x.new_ones(1, 1, 1, 1), decay=True)


# ---- trials of one operation each ----


def without_inputs(s: Setting, run: Run, expected: Callable[[Setting], Tensors]) -> Trial:
    """The ranks have no inputs, and all have the same outputs."""
    return Trial([[]] * s.world, run, lambda inputs: [expected(s)] * s.world, NO_GRADIENT)


def set_up(f: Any, s: Setting) -> Tensors:
    f(s.group, s.device)
    return []


def with_padding(s: Setting, run: Run) -> Trial:
    x = numbers(2, 5 * s.world + 3, 3)

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        return [[part] for part in pad(inputs[0][0], (0, 0, 0, -x.size(1) % s.world)).chunk(s.world, 1)]

    return Trial([[x]] * s.world, run, reference, scale=operator.truediv)


def unpadded(s: Setting, run: Run) -> Trial:
    def reference(inputs: list[Tensors]) -> list[Tensors]:
        return [[torch.cat([tensors[0] for tensors in inputs], 1)[:, :-2]]] * s.world

    return Trial([[numbers(2, 4, 3, seed=rank)] for rank in range(s.world)], run, reference, OWN)


def reordered(s: Setting, run: Run, index: Tensors) -> Trial:
    order = torch.cat(index).argsort()
    inputs = [[numbers(2, len(order), 3)]] * s.world
    return Trial(inputs, run, lambda inputs: [[tensors[0].index_select(1, order)] for tensors in inputs], OWN)


def validated(s: Setting, run: Run) -> Trial:
    """The gradients of its shard and gather are those of sp_shard and sp_gather."""
    return Trial([[numbers(2, 5 * s.world + 3, 3)]] * s.world, run, lambda inputs: inputs, NO_GRADIENT)


def validate(f: Any, s: Setting, x: Tensor) -> Tensor:
    validator = f()
    with validator.track():
        y: Tensor = validator.gather(validator.shard(x, "x", 1, validate_divisible=False), "x", 1)
    validator.validate()
    return y


def processed(s: Setting, run: Run) -> Trial:
    def reference(inputs: list[Tensors]) -> list[Tensors]:
        whole = torch.cat([tensors[0] for tensors in inputs])
        return [[whole, tensors[0], torch.tensor([rank, rank])] for rank, tensors in enumerate(inputs)]

    return Trial([[numbers(2, 3, seed=rank)] for rank in range(s.world)], run, reference, NO_GRADIENT)


def process(f: Any, s: Setting, x: Tensor) -> Tensors:
    with f() as processor:
        everything = processor.preprocess({"x": x, "names": [f"{s.rank}"] * 2})
        part = processor.postprocess(everything)
    return [everything["x"], part["x"], torch.tensor([int(name) for name in part["names"]], device="cpu")]


def sliced(s: Setting, run: Run) -> Trial:
    total = 5 * s.world + 3
    ids, positions = torch.arange(2 * total).view(2, total), torch.arange(total)[None]

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        padding = -total % s.world
        placed = torch.cat([positions, torch.arange(padding)[None]], 1)
        return [[part, placed] for part in pad(ids, (0, padding)).chunk(s.world, 1)]

    return Trial([[ids, positions]] * s.world, run, reference, NO_GRADIENT)


def slice_and_pad(f: Any, s: Setting, ids: Tensor, positions: Tensor) -> Tensors:
    part, placed, _ = f(ids, positions)
    return [part, positions if placed is None else placed]


def draw(f: Any, s: Setting) -> Tensor:
    """Return whether numbers repeat, whether the generator is restored, and how many ranks differ."""
    state, drawn = torch.get_rng_state(), []
    for _ in range(2):
        with f(7, s.group):
            drawn.append(torch.rand(4, device="cpu"))
    ranks = spar.all_gather(drawn[0][None].to(s.device), s.group).unique(dim=0)
    results = (torch.equal(*drawn), torch.equal(state, torch.get_rng_state()), len(ranks))
    return torch.tensor(results, device="cpu")


# ---- operations ----


def into_out(f: Any, s: Setting, n: Sizes, x: Tensor) -> Any:
    like = f(x.detach(), s.group, gather_size=sum(n))
    return f(x.detach(), s.group, gather_size=sum(n), out=torch.empty_like(like))


def waited(exchanged: tuple[Any, spar.Work]) -> Any:
    exchanged[1].wait()
    return exchanged[0]


def averaged_by(f: Any, s: Setting, count: int, x: Tensor) -> Any:
    return f(x, count, s.group, averaged_by=s.group)


def gather_packed(f: Any, s: Setting, n: Sizes, x: Tensor) -> Any:
    return f(x, spar.cal_split_sizes_multi(LENGTHS, s.world), s.group, 1)


def zigzagged(s: Setting, n: Sizes) -> spar.SequenceLayout:
    return spar.SequenceLayout.zigzag(sum(n), s.group)


def table_by_index(f: Any, s: Setting, n: Sizes, index: Tensor, x: Tensor) -> Tensor:
    rows = f(zigzagged(s, n), index)
    found: Tensor = rows.table(x, 1).index_select(1, rows.local)
    return found


def split_and_gather(name: str, variant: str, where: str, call: Call, back: Call | None = None) -> list[Case]:
    """Return the cases of a split and of its gather, whose call is `back` if it has other arguments."""
    return [
        case(name.format("split_forward_gather_backward"), split, variant, call, where),
        case(name.format("gather_forward_split_backward"), gather, variant, back or call, where),
    ]


all_to_all = partial(case, "all_to_all", swap)
all_gather = partial(case, "all_gather", exact_gather)
reduce_scatter = partial(case, "reduce_scatter", add)
OPERATIONS = [
    case("init", without_inputs, "", set_up, expected=lambda s: []),
    all_to_all("uneven", lambda f, s, n, x: f(x, s.group, gather_size=sum(n)), "uneven"),
    all_to_all(
        "even, bfloat16", lambda f, s, n, x: f(x, s.group), "even", after="even", dtype=torch.bfloat16
    ),
    all_to_all(
        "any sizes, one 0",
        lambda f, s, n, x: f(x, s.group, gather_sizes=n, scatter_sizes=n),
        "one 0",
        after="one 0",
    ),
    all_to_all("zigzag layout", lambda f, s, n, x: f(x, s.group, layout=zigzagged(s, n)), "zigzag"),
    all_to_all(
        "three tensors at once", lambda f, s, n, *x: f(x, s.group, gather_size=sum(n)), "uneven", count=3
    ),
    all_to_all(
        "async_op", lambda f, s, n, x: waited(f(x, s.group, gather_size=sum(n), async_op=True)), "uneven"
    ),
    all_to_all("out", into_out, "uneven", gradient=NO_GRADIENT),
    all_to_all("large", lambda f, s, n, x: f(x, s.group, gather_size=sum(n)), "large tokens", width=WIDE),
    case("all_to_all_single", counted, "", lambda f, s, counts, x: f(x, counts, s.group, 1)),
    all_gather("uneven", lambda f, s, n, x: f(x, s.group, 1, n), "uneven"),
    all_gather("even", lambda f, s, n, x: f(x, s.group, 1), "even"),
    all_gather("zigzag layout", lambda f, s, n, x: f(x, dim=1, layout=zigzagged(s, n)), "zigzag"),
    all_gather("async_op", lambda f, s, n, x: waited(f(x, s.group, 1, async_op=True)), "even"),
    all_gather("large", lambda f, s, n, x: f(x, s.group, 1, n), "large"),
    reduce_scatter("uneven", lambda f, s, n, x: f(x, s.group, 1), "uneven"),
    reduce_scatter("any sizes, one 0", lambda f, s, n, x: f(x, s.group, 1, n), "one 0"),
    reduce_scatter("bfloat16", lambda f, s, n, x: f(x, s.group, 1), "uneven", dtype=torch.bfloat16),
    reduce_scatter("zigzag layout", lambda f, s, n, x: f(x, dim=1, layout=zigzagged(s, n)), "zigzag"),
    reduce_scatter("async_op", lambda f, s, n, x: waited(f(x, s.group, 1, async_op=True)), "uneven"),
    reduce_scatter("large", lambda f, s, n, x: f(x, s.group, 1), "large"),
    *split_and_gather(
        "{}", "uneven", "uneven", lambda f, s, n, x: f(x, s.group, 1), lambda f, s, n, x: f(x, s.group, 1, n)
    ),
    *split_and_gather("load_balanced_{}", "zigzag", "even zigzag", lambda f, s, n, x: f(x, s.group, 1)),
    *split_and_gather(
        "packed_data_{}", "uneven", "packed", lambda f, s, n, x: f(x, s.group, LENGTHS, 1), gather_packed
    ),
    *split_and_gather(
        "{}_with_cp",
        "ring x ulysses",
        "even hybrid",
        lambda f, s, n, x: f(x, 1),
        lambda f, s, n, x: f(x, 1, sum(n)),
    ),
    *split_and_gather(
        "packed_data_{}_with_cp", "ring x ulysses", "packed hybrid", lambda f, s, n, x: f(x, 1, LENGTHS)
    ),
    case("gather_forward_split_backward_and_unpad", unpadded, "", lambda f, s, x: f(x, s.group, 1, 2, 1)),
    case(
        "reorder_output", reordered, "", lambda f, s, n, x: f(x, s.rank, s.world, s.group, 1), "even zigzag"
    ),
    case("sharding.sp_shard", split, "uneven", lambda f, s, n, x: f(x, 1, validate=False), "uneven"),
    case("sharding.sp_gather", gather, "uneven", lambda f, s, n, x: f(x, 1), "uneven"),
    case("sharding.sp_shard_with_padding", with_padding, "uneven", lambda f, s, x: f(x, 1)[0]),
    case("sharding.ShardingValidator", validated, "shard and gather", validate),
    case("data.SPDataProcessor", processed, "", process),
    case("data.sp_slice_and_pad_input", sliced, "uneven", slice_and_pad),
    case(
        "SequenceLayout.rows",
        indexed,
        "gather",
        lambda f, s, n, i, x: f(zigzagged(s, n), i).gather(x, 1),
        "zigzag",
    ),
    case("SequenceLayout.rows", indexed, "table", table_by_index, "zigzag"),
    case(
        "SequenceLayout.rows",
        added_by_index,
        "add",
        lambda f, s, n, i, x: f(zigzagged(s, n), i).add(x, 1),
        "zigzag",
    ),
    case("roll", rolled, "", lambda f, s, n, x: f(x, 2, zigzagged(s, n)), "zigzag"),
    case("mean_loss", averaged, "a rank without tokens", lambda f, s, count, x: f(x, count, s.group)),
    case("mean_loss", averaged, "averaged_by", averaged_by, scale=operator.mul),
    case(
        "masked_mean",
        masked,
        "by sample",
        lambda f, s, n, m, x: f(x, m, zigzagged(s, n), by="sample"),
        "zigzag",
    ),
    case("token_logprobs", logprobs, "", lambda f, s, n, labels, x: f(x, labels, zigzagged(s, n)), "zigzag"),
    case("rank_seed", without_inputs, "", draw, expected=lambda s: [torch.tensor((1, 1, s.world))]),
]
ATTENTION = [
    *(attention_case(method, "even", method, causal=False) for method in METHODS),
    *(
        attention_case(f"{method}, causal, {name}", name, method)
        for method in METHODS
        for name in ("zigzag", "packed")
    ),
    *(attention_case(f"{method}, key mask", "even", method, causal=False, masked=True) for method in METHODS),
    attention_case("ring x ulysses, causal", "hybrid", None),
    *(attention_case(f"{method}, window, zigzag", "zigzag", method, window=2) for method in METHODS),
    attention_case("gather, window, packed", "packed", "gather", window=2),
    *(
        attention_case(f"{method}, causal, {name}", name, method)
        for method in METHODS
        for name in ("balanced", "of_runs")
    ),
    case("by_heads", accumulate_tokens, "uneven", summed_by_heads, "uneven"),
    case("by_state", accumulate_tokens, "zigzag", summed_by_state, "zigzag"),
]
