# SPDX-License-Identifier: Apache-2.0
"""Hostile numbers in requests; calls that differ between ranks; a rank that makes no call."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from helpers import core
from helpers.cases import MAX, Case, Part, check_content, every_op, items
from helpers.core import CoreError, Plan, Spec, Status, World, contiguous, request
from helpers.reference import in_runs
from helpers.tables import EXCHANGES, Cut, Move, numbers

pytestmark = pytest.mark.quick

# ---- Hostile numbers --------------------------------------------------------------------------------------

HUGE = 2**62
LOW = -(2**63)


def valid(op: str, world: int = 3, ndim: int = 2) -> Spec:
    """Return rank 0's tensor of a valid call."""
    shape = [6] * ndim
    move = EXCHANGES[op].move(lambda first, last: first, shape, world)
    whole = torch.empty(*shape, 1, dtype=torch.uint8)
    return contiguous(move.before.parts(whole, world)[0].shape[:-1], move.args, 1)


def refused(words: str, op: str, world: int, rank: int, specs: Sequence[Spec], **overrides: int) -> None:
    """Check that build and get both return SPAR_INVALID with a reason."""
    for cached in (False, True):
        with pytest.raises(CoreError) as caught:
            Plan(request(op, world, rank, specs, core.SIDE_PULL, **overrides), cached)
        assert caught.value.status == Status.INVALID, caught.value
        assert words in caught.value.text


@pytest.mark.parametrize(
    ("world", "rank"), [(0, 0), (-1, 0), (LOW // 2**32, 0), (3, -1), (3, 3), (3, 2**31 - 1), (1, 1)]
)
@every_op
def test_hostile_ranks(op: str, world: int, rank: int) -> None:
    refused(f"rank {rank} of {world}", op, world, rank, [valid(op)])


@pytest.mark.parametrize("ntensors", [0, -1, -(2**31)])
@every_op
def test_hostile_counts_of_tensors(op: str, ntensors: int) -> None:
    refused("no tensor", op, 3, 0, [valid(op)], ntensors=ntensors)


@pytest.mark.parametrize("ndim", [0, -1, 65, 2**31 - 1, -(2**31)])
@every_op
def test_hostile_counts_of_dims(op: str, ndim: int) -> None:
    refused(f"{ndim} dims", op, 3, 0, [valid(op)], ndim=ndim)


@pytest.mark.parametrize("nargs", [0, -1, -5, -(2**31), None, 64])
@every_op
def test_hostile_counts_of_args(op: str, nargs: int | None) -> None:
    """None: one less than there are."""
    spec = valid(op)
    layouts = numbers(op, spec.args, spec.extents, 3)
    spec = spec._replace(args=[*layouts, *[0] * 64])
    refused("", "exchange", 3, 0, [spec], nargs=len(layouts) - 1 if nargs is None else nargs)
    assert re.search("ints|numbers|sizes|a dim is -1|inner ranks", core.last_error())


@pytest.mark.parametrize("item", [0, -1, LOW, 4097, HUGE, MAX])
@every_op
def test_hostile_item_sizes(op: str, item: int) -> None:
    refused(f"{item} bytes", op, 3, 0, [valid(op)._replace(item=item)])


@pytest.mark.parametrize("value", [-1, LOW, -HUGE])
@pytest.mark.parametrize("field", ["extents", "strides"])
@pytest.mark.parametrize("dim", [0, 1])
@every_op
def test_hostile_negatives(op: str, dim: int, field: str, value: int) -> None:
    spec = valid(op)
    values = list(getattr(spec, field))
    values[dim] = value
    refused(str(value), op, 3, 0, [spec._replace(**{field: values})])


@pytest.mark.parametrize("dim", [-1, 2, 2**31, 2**32, 2**32 + 1, MAX, LOW])
@every_op
def test_hostile_dims(op: str, dim: int) -> None:
    for which in EXCHANGES[op].dims:
        spec = valid(op)
        args = list(spec.args)
        args[which] = dim
        refused(f"{dim}; expected 0 to 1", op, 3, 0, [spec._replace(args=args)])


HOSTILE = {
    "the product of extents": ("split", 3, [contiguous([2**31, 2**31], [0], 4)], str(2**31)),
    "extent times item size": ("split", 3, [Spec(4, [HUGE], [1], [0])], str(HUGE)),
    "stride times item size": ("split", 3, [Spec(4, [2, 2], [HUGE, 1], [0])], str(HUGE)),
    "stride times extent": ("split", 3, [Spec(1, [4, 2], [HUGE, 1], [0])], str(HUGE)),
    "the sum of reaches": ("split", 3, [Spec(1, [2, 2, 2], [HUGE, HUGE, 1], [2])], str(HUGE)),
    "an output larger than its input": ("split", 1, [Spec(1, [HUGE, 4], [0, 0], [0])], str(HUGE)),
    "gather of equal parts": ("gather", 4, [Spec(1, [HUGE], [0], [0])], str(HUGE)),
    "gather of equal parts in bytes": ("gather", 4, [Spec(2, [2**60], [1], [0])], str(HUGE)),
    "the sum of sizes": ("gather", 4, [Spec(1, [5], [1], [0, 5, HUGE, HUGE, 1])], str(HUGE)),
    "a total too large": ("gather", 2, [Spec(1, [HUGE - 1, 4], [0, 1], [0, MAX - 2])], str(MAX - 2)),
    "a negative total": ("gather", 3, [contiguous([5], [0, -15])], "-15"),
    "a total that does not fit": ("gather", 3, [contiguous([5], [0, 16])], "5"),
    "a negative size": ("gather", 3, [contiguous([5], [0, 5, -1, 2])], "-1"),
    "the lowest size": ("gather", 3, [contiguous([5], [0, 5, LOW, LOW])], str(LOW)),
    "a size that is not one's own": ("gather", 3, [contiguous([5], [0, 4, 5, 5])], "4"),
    "a split's negative size": ("split", 3, [contiguous([5], [0, 6, -1, 0])], "6"),
    "a split's negative sum": ("split", 3, [contiguous([5], [0, 2, -1, 4])], "-1"),
    "a split's overflowing sum": ("split", 3, [contiguous([5], [0, HUGE, HUGE, HUGE])], str(HUGE)),
    "a split's short sum": ("split", 3, [contiguous([5], [0, 2, 2, 0])], "expected 4, the sum of all shards"),
    "a split's long sum": ("split", 3, [contiguous([5], [0, 2, 2, 2])], "expected 6"),
    "equal dims": ("all_to_all", 3, [contiguous([6, 6], [1, 1, 18])], "expected 6, the sum of all shards"),
    "a negative gather_size": ("all_to_all", 3, [contiguous([6, 6], [0, 1, -18])], "-18"),
    "the lowest gather_size": ("all_to_all", 3, [contiguous([6, 6], [0, 1, LOW])], str(LOW)),
    "the largest gather_size": ("all_to_all", 3, [contiguous([6, 6], [0, 1, MAX])], str(MAX)),
    "another rank's gather_size": ("all_to_all", 3, [contiguous([6, 6], [0, 1, 19])], "19"),
    "gather_size in bytes": (
        "all_to_all",
        3,
        [Spec(2, [4, HUGE], [0, 0], [0, 1, 3 * HUGE - 1])],
        str(HUGE + 1),
    ),
    "a zigzag's negative total": ("zigzag_gather", 3, [contiguous([2], [0, 1, -6])], "-6"),
    "a zigzag's other total": ("zigzag_split", 3, [contiguous([6], [0, 1, 12])], "12"),
    "a zigzag's other part": ("zigzag_gather", 3, [contiguous([5], [0, 1, 12])], "expected 4"),
    "the largest zigzag": ("zigzag_gather", 2, [Spec(4, [2**60], [1], [0, 1, 2**61])], str(2**61)),
    "no inner ranks": ("zigzag_split", 4, [contiguous([8], [0, 0, 8])], "0 inner ranks"),
    "inner ranks that do not divide": ("zigzag_split", 4, [contiguous([8], [0, 3, 8])], "3 inner ranks"),
    "neighbours that do not divide": ("zigzag_split", 4, [contiguous([8], [0, -3, 8])], "-3 inner ranks"),
    "the most neighbours": ("packed_split", 4, [contiguous([8], [0, -(2**63), 1, 8])], str(-(2**63))),
    "the largest inner ranks": ("packed_split", 4, [contiguous([8], [0, 2**32 + 2, 1, 8])], str(2**32 + 2)),
    "a negative length": ("packed_split", 3, [contiguous([5], [0, 1, 2, 6, -1])], "-1"),
    "lengths beyond 2^63": ("packed_gather", 3, [contiguous([5], [0, 1, 3, HUGE, HUGE, HUGE])], str(HUGE)),
    "lengths of something else": ("packed_split", 3, [contiguous([5], [0, 1, 2, 2, 2])], "expected 4"),
    "more sequences than numbers": ("packed_split", 3, [contiguous([5], [0, 1, 3, 5])], "3 sequences"),
    "negative sequences": ("packed_split", 3, [contiguous([5], [0, 1, -1, 5])], "-1 sequences"),
    "the most sequences": ("packed_split", 3, [contiguous([5], [0, 1, MAX, 5])], str(MAX)),
    "part of a table": ("packed_gather", 3, [contiguous([5], [0, 1, 2, 5, 0, 5, 0, 5])], "5 numbers"),
    "a good tensor and a bad one": ("gather", 3, [contiguous([5], [0]), contiguous([5], [1])], "0 to 0"),
    "several tensors' sum": ("split", 1, [Spec(1, [HUGE], [1], [0])] * 3, str(HUGE)),
    "several gathered tensors' sum": ("gather", 3, [Spec(1, [2**61], [1], [0])] * 4, str(2**61)),
}


@pytest.mark.parametrize(("op", "world", "specs", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_numbers(op: str, world: int, specs: list[Spec], words: str) -> None:
    refused(words, op, world, 0, specs)


# ---- Calls that differ, or are missing --------------------------------------------------------------------

RIGHT = Case(
    "gather", 4, [Part(2, (8, 6), "contiguous", Move([0], [0], Cut(0, in_runs([2, 2, 2, 2])), Cut()))]
)
ELSE = {
    "a dim": ("gather", [(2, 6)], [[1]], 2),
    "another op": ("all_to_all", [(2, 6)], [[1, 0, 8]], 2),
    "an extent": ("gather", [(2, 7)], [[0]], 2),
    "a size": ("gather", [(3, 6)], [[0]], 2),
    "a list of sizes": ("gather", [(2, 6)], [[0, 2, 3, 2, 2]], 2),
    "the number of dims": ("gather", [(2, 6, 1)], [[0]], 2),
    "the number of tensors": ("gather", [(2, 6), (2, 6)], [[0], [0]], 2),
    "a larger item": ("gather", [(2, 6)], [[0]], 4),
    "a smaller item": ("gather", [(2, 6)], [[0]], 1),
}


@pytest.mark.parametrize("other", [0, 3], ids=["first", "last"])
@pytest.mark.parametrize(("op", "shapes", "args", "item"), ELSE.values(), ids=ELSE.keys())
def test_mismatch_raises_on_all_ranks(
    op: str, shapes: list[tuple[int, ...]], args: list[list[int]], item: int, other: int
) -> None:
    plans, inputs, shared = RIGHT.plans(), RIGHT.inputs(), core.world(4)
    inputs[other] = tuple(items(*shape, item=item) for shape in shapes)
    plans[other] = Plan(
        request(op, 4, other, [Spec.of(x, a) for x, a in zip(inputs[other], args, strict=True)])
    )
    for outcome in shared.call(plans, inputs):
        assert outcome and outcome.status == Status.MISMATCH
        assert "calls differ" in outcome.text
        assert all(output.is_untouched() for output in outcome.outputs)
    check_content(RIGHT)


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_rank_times_out(missing: int) -> None:
    plans, inputs, broken = RIGHT.plans(), RIGHT.inputs(), World(4)
    some = [None if rank == missing else plan for rank, plan in enumerate(plans)]
    outcomes = broken.call(some, inputs, seconds=0.1)
    assert outcomes[missing] is None
    for outcome in outcomes:
        if outcome:
            assert outcome.status == Status.TIMEOUT, outcome.text
            assert 0.05 < outcome.seconds < 2
            assert all(output.is_untouched() for output in outcome.outputs)
    # the late rank must not write: its peers may have freed their outputs
    late = [plan if rank == missing else None for rank, plan in enumerate(plans)]
    outcome = broken.call(late, inputs, seconds=5)[missing]
    assert outcome and outcome.status == Status.TIMEOUT
    assert outcome.seconds < 2
    for earlier in (*outcomes, outcome):
        assert not earlier or all(output.is_untouched() for output in earlier.outputs)
    broken.close()


def test_plan_of_another_rank_is_rejected() -> None:
    plans, inputs = RIGHT.plans(), RIGHT.inputs()
    for wrong in ([plans[1]] * 4, [RIGHT.plans()[0], None, None, None][:1] * 4):
        outcome = core.world(4).call([None, None, None, wrong[3]], inputs)[3]
        assert outcome and outcome.status == Status.INVALID
        assert "was given to rank 3 of 4" in outcome.text
    check_content(RIGHT)
