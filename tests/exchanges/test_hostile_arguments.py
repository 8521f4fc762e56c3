# SPDX-License-Identifier: Apache-2.0
"""Hostile arguments of the public functions: a clear error, or the result of the equal int."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.processes import finish, start
from helpers.tables import MAKERS

import spar
import spar.sharding
from spar import parallel_state

HUGE, LOW = 2**62, -(2**63)
NUMPYS: list[object] = [numpy.int64(1), numpy.uint8(2), numpy.float32(1), numpy.bool_(True), numpy.array(1)]
NUMBERS: list[object] = [HUGE, LOW, 2**63, 2**64 + 1, -(2**200), 10**4000, -1, 0, 1, 2, 1000, True, False]
NUMBERS += [
    0.0,
    1.5,
    -2.0,
    float("nan"),
    float("inf"),
    1j,
    None,
    *NUMPYS,
    "1",
    b"\xff",
    "\udcff",
    (),
    object(),
    torch,
]
NUMBERS += [torch.tensor(1), torch.tensor([2]), torch.tensor(1.5), torch.tensor([]), torch.float32]
LISTS: list[object] = [[], (), [[]], {}, {1: 2}, "ab", range(2), [2], [1, 1, 1], [3, 1], (2, 2), [-2, 6]]
LISTS += [[HUGE, HUGE], [HUGE, 4 - HUGE], [2**63, 0], [2**64, 4 - 2**64], [LOW, LOW], [True, 3], [True, True]]
LISTS += [
    [1.5, 2.5],
    [2.0, 2.0],
    [float("nan")] * 2,
    [None, 4],
    ["2", "2"],
    [[2], [2]],
    [torch.tensor(2)] * 2,
]
LISTS += [torch.tensor([2, 2]), torch.tensor([2.0, 2.0]), torch.tensor([[2, 2]]), torch.tensor([True, True])]
TABLES: list[object] = [
    [[2], [2]],
    [[2]] * 3,
    [[2, 0], [0, 2]],
    [[HUGE], [HUGE]],
    [[2**63], [0]],
    [[LOW], [0]],
]
TABLES += [
    [[-1], [5]],
    [[1.5], [2.5]],
    [[None], [4]],
    [[2], [2, 0]],
    [[], []],
    [[[2]], [[2]]],
    torch.zeros(2, 0),
]
TABLES += [torch.full((2, 1), 2), torch.full((2, 1), 2.0), torch.full((2, 3), HUGE), torch.ones(2, 4).bool()]


Calls = list[tuple[str, Callable[..., Any], list[object]]]


def an_input() -> torch.Tensor:
    return torch.arange(64.0).view(4, 4, 4)


@functools.cache
def calls() -> Calls:
    """Return, for each parameter of each function, a call that passes a value, and the values to pass."""
    by_list = [*NUMBERS, *LISTS, *([value] * 2 for value in NUMBERS), *([value, 2] for value in NUMBERS)]
    by_table = [*by_list, *TABLES, *([[value], [value]] for value in NUMBERS)]
    split, gather = spar.split_forward_gather_backward, spar.gather_forward_split_backward
    zigzag_split = spar.load_balanced_split_forward_gather_backward
    zigzag_gather = spar.load_balanced_gather_forward_split_backward
    packed_split = spar.packed_data_split_forward_gather_backward
    packed_gather = spar.packed_data_gather_forward_split_backward
    table = torch.full((2, 1), 4)
    dims: list[tuple[str, Callable[..., torch.Tensor]]] = [
        ("all_to_all: scatter_dim", lambda g, v: spar.all_to_all(an_input(), g, v, 1)),
        ("all_to_all: gather_dim", lambda g, v: spar.all_to_all(an_input(), g, 0, v)),
        ("all_to_all: gather_size", lambda g, v: spar.all_to_all(an_input(), g, 0, 1, v)),
        ("split: dim", lambda g, v: split(an_input(), g, v)),
        ("split: grad_scale", lambda g, v: split(an_input().requires_grad_(), g, 0, grad_scale=v)),
        ("gather: dim", lambda g, v: gather(an_input(), g, v)),
        ("gather: grad_scale", lambda g, v: gather(an_input().requires_grad_(), g, 0, grad_scale=v)),
        ("zigzag split: dim", lambda g, v: zigzag_split(an_input(), g, v)),
        ("zigzag gather: dim", lambda g, v: zigzag_gather(an_input(), g, v)),
        ("packed split: dim", lambda g, v: packed_split(an_input(), g, [4], v)),
        ("packed gather: dim", lambda g, v: packed_gather(an_input(), table, g, v)),
        ("split: input_", lambda g, v: split(v, g, 0)),
        ("gather: input_", lambda g, v: gather(v, g, 0)),
        ("all_to_all: input_", lambda g, v: spar.all_to_all(v, g, 0, 1)),
    ]
    lists: list[tuple[str, Callable[..., torch.Tensor]]] = [
        ("split: split_sizes", lambda g, v: split(an_input(), g, 0, v)),
        ("gather: gather_sizes", lambda g, v: gather(an_input(), g, 0, v)),
        ("packed split: sequence_lengths", lambda g, v: packed_split(an_input(), g, v)),
    ]
    tables = [("packed gather: all_split_sizes", lambda g, v: packed_gather(an_input(), v, g))]
    return [
        *((name, call, NUMBERS) for name, call in dims),
        *((name, call, by_list) for name, call in lists),
        *((name, call, by_table) for name, call in tables),
    ]


def exact_calls() -> Calls:
    """The same for lists, any sizes, all_gather, reduce_scatter and layouts."""
    by_list = [*NUMBERS, *LISTS, *([value] * 2 for value in NUMBERS), *([value, 2] for value in NUMBERS)]
    by_entry = [*by_list, *([value, None] for value in LISTS)]
    x = an_input()
    exchange, gather, scatter = spar.all_to_all, spar.all_gather, spar.reduce_scatter
    one: list[tuple[str, Callable[..., Any]]] = [
        ("all_gather: input_", lambda g, v: gather(v, g)),
        ("all_gather: dim", lambda g, v: gather(x, g, v)),
        ("all_gather: layout", lambda g, v: gather(x, g, layout=v)),
        ("reduce_scatter: input_", lambda g, v: scatter(v, g)),
        ("reduce_scatter: dim", lambda g, v: scatter(x, g, v)),
        ("all_to_all: a tensor of two", lambda g, v: tuple(exchange([x, v], g, 0, 1))),
        ("all_to_all: scatter_dim of two", lambda g, v: tuple(exchange([x, x], g, v, 1))),
        ("all_to_all: gather_size of two", lambda g, v: tuple(exchange([x, x], g, 0, 1, v))),
        ("from_local: size", lambda g, v: spar.SequenceLayout.from_local(v, g).sizes),
    ]
    lists: list[tuple[str, Callable[..., Any]]] = [
        ("all_to_all: scatter_sizes", lambda g, v: exchange(x, g, 0, 1, scatter_sizes=v)),
        ("all_to_all: gather_sizes", lambda g, v: exchange(x, g, 0, 1, gather_sizes=v)),
        ("all_gather: sizes", lambda g, v: gather(x, g, 0, v)),
        ("reduce_scatter: sizes", lambda g, v: scatter(x, g, 0, v)),
    ]
    entries: list[tuple[str, Callable[..., Any]]] = [
        ("all_to_all: scatter_sizes of two", lambda g, v: tuple(exchange([x, x], g, 0, 1, scatter_sizes=v))),
        ("all_gather: sizes of two", lambda g, v: tuple(gather([x, x], g, 0, v))),
    ]
    return [
        *((name, call, NUMBERS) for name, call in one),
        *((name, call, by_list) for name, call in lists),
        *((name, call, by_entry) for name, call in entries),
    ]


def layout_calls() -> Calls:
    """The same for the makers of layouts, which communicate nothing."""
    by_list = [*NUMBERS, *LISTS, *([value] * 2 for value in NUMBERS), *([value, 2] for value in NUMBERS)]

    def sizes(name: str, at: int, group: Any, value: object) -> object:
        arguments = [*MAKERS[name].of(8, 2)]
        arguments[at] = value
        return getattr(spar.SequenceLayout, name)(*arguments, group).sizes

    return [
        (f"{name}: {at}", functools.partial(sizes, name, at), by_list if isinstance(value, list) else NUMBERS)
        for name, maker in MAKERS.items()
        if maker.traced is None  # those that communicate are in exact_calls
        for at, value in enumerate(maker.of(8, 2))
    ]


def plain(value: object) -> Any:
    """Convert to Python's ints; raise TypeError if that is impossible."""
    if isinstance(value, torch.Tensor):
        return value  # an input, or a table
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, float) else operator.index(value)  # type: ignore[arg-type]


def same(one: Any, other: Any) -> bool:
    """Compare tensors, lists of numbers, or pairs of a tensor and a number; NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def wrong_answers(rank: int | None, group: dist.ProcessGroup | None, calls: Calls) -> Iterator[str]:
    """Yield each wrong answer to a value. All ranks pass the same values, so that no call may mismatch.

    rank None: the errors name no rank.
    """
    for name, call, values in calls:
        for value in values:
            what = f"{name} = {repr(value)[:60]}: "
            try:
                result = call(group, value)
            except (ValueError, TypeError) as error:
                text = str(error)
                if rank is not None and f"rank {rank}" not in text and "is a " not in text:
                    yield f"{what}{text[:200]!r} does not name the rank"
                if "expected" not in text:
                    yield f"{what}{text[:200]!r} does not state what was expected"
            except spar.OutOfMemoryError:
                pass
            except spar.MismatchError as error:  # a size that fits what this rank holds, but not a peer
                if not re.search(r"rank \d failed: .* expected", str(error), re.DOTALL):
                    yield f"{what}{error}"
            except BaseException as error:
                yield f"{what}{type(error).__name__}: {str(error)[:200]}"
            else:
                try:
                    if not same(result, call(group, plain(value))):
                        yield f"{what}differs from the result of the equal int"
                except Exception as error:
                    yield f"{what}accepted, but the equal int is rejected: {error!r:.200}"


def probe(rank: int, world: int, group: dist.ProcessGroup) -> list[str]:
    wrong = [
        *wrong_answers(rank, group, calls()),
        *wrong_answers(rank, group, exact_calls()),
        *wrong_answers(None, group, layout_calls()),
    ]
    x = torch.full((1, 2), float(rank))
    y = spar.gather_forward_split_backward(x, group, 0)
    assert y[:, 0].tolist() == [float(r) for r in range(world)], "later calls do not match"
    return wrong


def test_hostile_arguments(ranks: Ranks) -> None:
    for rank, wrong in enumerate(ranks(2, probe)):
        assert not wrong, f"rank {rank}: {len(wrong)} answers\n" + "\n".join(wrong)


def by_topology() -> Calls:
    """The same for functions without a group argument; this rank holds half of the sequence."""
    by_list = [*NUMBERS, *LISTS, *([value] * 2 for value in NUMBERS), *([value, 2] for value in NUMBERS)]
    whole, part = torch.arange(8.0).view(4, 2), torch.arange(4.0).view(2, 2)
    pad = lambda x, v: spar.sharding.sp_shard_with_padding(x, 0, v)  # noqa: E731
    split = spar.packed_data_split_forward_gather_backward_with_cp
    gather = spar.packed_data_gather_forward_split_backward_with_cp
    one: list[tuple[str, Callable[..., Any]]] = [
        ("sp_shard: dim", lambda g, v: spar.sharding.sp_shard(whole, v)),
        ("sp_shard: tensor", lambda g, v: spar.sharding.sp_shard(v, 0, False)),
        ("sp_gather: dim", lambda g, v: spar.sharding.sp_gather(part, v)),
        ("sp_gather: dim, not validated", lambda g, v: spar.sharding.sp_gather(part, v, False)),
        ("sp_gather: tensor", lambda g, v: spar.sharding.sp_gather(v, 0)),
        ("sp_shard_with_padding: dim", lambda g, v: spar.sharding.sp_shard_with_padding(whole[:3], v)),
        ("sp_shard_with_padding: tensor", lambda g, v: spar.sharding.sp_shard_with_padding(v, 0)),
        *(
            (f"sp_shard_with_padding: pad_value of {dtype}", functools.partial(lambda x, g, v: pad(x, v), x))
            for dtype in (torch.float32, torch.float16, torch.int8, torch.int64, torch.bool, torch.complex64)
            for x in [torch.ones(3, dtype=dtype)]
        ),
        ("split with cp: dim", lambda g, v: spar.split_forward_gather_backward_with_cp(whole, v)),
        ("split with cp: input_", lambda g, v: spar.split_forward_gather_backward_with_cp(v, 0)),
        ("gather with cp: dim", lambda g, v: spar.gather_forward_split_backward_with_cp(part, v, 4)),
        ("gather with cp: gather_size", lambda g, v: spar.gather_forward_split_backward_with_cp(part, 0, v)),
        ("gather with cp: input_", lambda g, v: spar.gather_forward_split_backward_with_cp(v, 0, 4)),
        ("packed split with cp: dim", lambda g, v: split(whole, v, [4])),
        ("packed gather with cp: dim", lambda g, v: gather(part, v, [4])),
        ("packed split with cp: x", lambda g, v: split(v, 0, [4])),
    ]
    lists: list[tuple[str, Callable[..., Any]]] = [
        ("packed split with cp: seq_lens", lambda g, v: split(whole, 0, v)),
        ("packed gather with cp: seq_lens", lambda g, v: gather(part, 0, v)),
    ]
    return [*((name, call, NUMBERS) for name, call in one), *((name, call, by_list) for name, call in lists)]


def probe_by_topology(rank: int, folder: Path, ring: int, ulysses: int) -> None:
    parallel_state.init_parallel_state(ring_attention_size=ring, ulysses_parallel_size=ulysses)
    parallel_state.set_sequence_parallel_group(dist.group.WORLD)
    wrong = list(wrong_answers(rank, None, by_topology()))
    (folder / f"{rank}.wrong").write_text("\n".join(wrong))
    y = spar.gather_forward_split_backward_with_cp(torch.full((2,), float(rank)), 0, 4)
    assert y.tolist() == ([0, 1, 1, 0] if ring > 1 else [0, 0, 1, 1]), "later calls do not match"


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1)])
def test_hostile_arguments_without_group(tmp_path: Path, ring: int, ulysses: int) -> None:
    codes = finish(start(probe_by_topology, 2, tmp_path, ring, ulysses, SPAR_TRANSPORT="shm"), 100)
    for rank in range(2):
        wrong = (tmp_path / f"{rank}.wrong").read_text()
        assert not wrong, f"rank {rank}: {wrong}"
    assert codes == [0, 0]


def test_hostile_arguments_of_the_size_rule() -> None:
    by_list = [*NUMBERS, *LISTS, *([value] * 2 for value in NUMBERS), *([value, 2] for value in NUMBERS)]
    sizes, multi = spar.cal_split_sizes, spar.cal_split_sizes_multi
    calls: Calls = [
        ("cal_split_sizes: dim_size", lambda g, v: sizes(v, 3), NUMBERS),
        ("cal_split_sizes: world_size", lambda g, v: sizes(10, v), NUMBERS),
        ("cal_split_sizes_multi: sizes", lambda g, v: multi(v, 3), by_list),
        ("cal_split_sizes_multi: world_size", lambda g, v: multi([10, 3], v), NUMBERS),
    ]
    wrong = list(wrong_answers(None, None, calls))
    assert not wrong, "\n".join(wrong)


def fail_with_long_text(rank: int, world: int, group: dist.ProcessGroup, blanks: int) -> str:
    """Rank 0 fails with a text that exceeds its mailbox; return this rank's error."""
    dim = 0 if rank else " " * blanks + "\N{SNOWMAN}" * 2000
    try:
        spar.gather_forward_split_backward(torch.ones(1), group, dim)  # type: ignore[arg-type]
    except (TypeError, spar.MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_error_text_is_truncated_between_characters(pool: Ranks) -> None:
    pool.transport = "shm"
    for blanks in range(3):
        first, second = pool(2, fail_with_long_text, blanks)
        assert first.startswith("TypeError: ")
        assert second.startswith("MismatchError: ") and "\N{SNOWMAN}" * 100 in second
