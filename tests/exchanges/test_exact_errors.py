# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of lists, sizes and layouts: the error has three parts, and the peers raise it at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks

import spar
from spar import SequenceLayout

Group = dist.ProcessGroup
WORLD = 3


def z(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def exchange(*inputs: Any, **options: Any) -> Callable[[Group], object]:
    """Return a call of all_to_all: of a list, or of one tensor that is no list."""
    given: Any = list(inputs) if len(inputs) != 1 or isinstance(inputs[0], list) else inputs[0]
    if isinstance(given, list) and len(inputs) == 1:
        given = given[0]
    return lambda group: spar.all_to_all(given, group, 1, 0, **options)


def gather(input_: Any, **options: Any) -> Callable[[Group], object]:
    return lambda group: spar.all_gather(input_, group, **options)


def scatter(input_: Any, **options: Any) -> Callable[[Group], object]:
    return lambda group: spar.reduce_scatter(input_, group, **options)


def of_layout(call: Callable[[SequenceLayout], object], total: Any = 6) -> Callable[[Group], object]:
    return lambda group: call(SequenceLayout.even(total, group))


def another_group(group: Group) -> object:
    return spar.all_gather(z(2), group, layout=SequenceLayout.even(6, dist.group.WORLD))


LENGTH = "0 to 9223372036854775807"
ONE, TWO, SHARD = exchange(z(2, 6)), exchange(z(2, 6), z(2, 6)), gather(z(2))
MANY = exchange(*[z(2, 6)] * 17)
LOCAL = lambda group: SequenceLayout.from_local(2, group)  # noqa: E731
Case = tuple[Callable[[Group], object], Callable[[Group], object], type[Exception], str]
# the call of the last rank, that of the others, the last rank's error and its text
CASES: dict[str, Case] = {
    "empty list": (exchange(), TWO, ValueError, "input_ is an empty list; expected at least one tensor"),
    "empty list of shards": (gather([]), SHARD, ValueError, "input_ is an empty list; expected at least"),
    "dtypes": (
        exchange(z(2, 6), z(2, 6).int()),
        TWO,
        TypeError,
        "input_[1] is of torch.int32 on cpu; expected torch.float32 on cpu, as input_[0]",
    ),
    "a meta tensor": (
        exchange(z(2, 6), z(2, 6, device="meta")),
        TWO,
        TypeError,
        "torch.float32 on meta; exp",
    ),
    "a first meta tensor": (
        exchange(z(2, 6, device="meta"), z(2, 6)),
        TWO,
        TypeError,
        "input_[1] is of torch.float32 on cpu; expected torch.float32 on meta, as input_[0]",
    ),
    "not a tensor": (exchange(z(2, 6), 3), TWO, TypeError, "input_[1] is a int; expected a tensor"),
    "no list": (exchange({"q": 1}), ONE, TypeError, "input_ is a dict; expected a tensor"),
    "no list of shards": (gather({"q": 1}), SHARD, TypeError, "input_ is a dict; expected a tensor"),
    "a wrong 17th tensor": (
        exchange(*[z(2, 6)] * 16, z(2, 6).int()),
        MANY,
        TypeError,
        "input_[16] is of torch.int32 on cpu; expected torch.float32 on cpu, as input_[0]",
    ),
    "too few entries": (
        exchange(z(2, 6), z(2, 6), scatter_sizes=[[2, 2, 2]]),
        TWO,
        ValueError,
        "scatter_sizes is [[2, 2, 2]]; expected 2 entries, one for each tensor, or None",
    ),
    "a table instead of entries": (
        exchange(z(2, 6), z(2, 6), gather_sizes=torch.full((2, 3), 2)),
        TWO,
        ValueError,
        "expected 2 entries, one for each tensor, or None",
    ),
    "sizes instead of entries": (
        exchange(z(2, 6), z(2, 6), z(2, 6), scatter_sizes=[2, 2, 2]),
        exchange(*[z(2, 6)] * 3),
        ValueError,
        "scatter_sizes[0] is 2; expected a list, tuple or 1-D int tensor",
    ),
    "entries instead of sizes": (
        exchange(z(2, 6), scatter_sizes=[[2, 2, 2]]),
        ONE,
        ValueError,
        "scatter_sizes is [[2, 2, 2]]; expected 3 sizes, one for each rank",
    ),
    "sizes by swapped arguments": (
        exchange(z(2, 600), scatter_sizes=spar.cal_split_sizes(3, 600)),
        ONE,
        ValueError,
        "; expected 3 sizes, one for each rank; did you swap the arguments of "
        "cal_split_sizes(dim_size=600, world_size=3)?",
    ),
    "a 2-D tensor of sizes": (
        exchange(z(2, 6), scatter_sizes=torch.full((2, 3), 2)),
        ONE,
        TypeError,
        "scatter_sizes is a tensor of torch.int64 with 2 dims; expected a 1-D int tensor",
    ),
    "both sizes": (
        exchange(z(2, 6), gather_size=6, gather_sizes=[2, 2, 2]),
        ONE,
        ValueError,
        "gather_size is 6 and gather_sizes is [2, 2, 2]; expected one of them",
    ),
    "both sizes of one of two": (
        exchange(z(2, 6), z(2, 6), gather_size=6, gather_sizes=[None, (2, 2, 2)]),
        TWO,
        ValueError,
        "gather_size is 6 and gather_sizes[1] is (2, 2, 2); expected one of them",
    ),
    "negative": (
        exchange(z(2, 6), scatter_sizes=[-1, 5, 2]),
        ONE,
        ValueError,
        "scatter_sizes is [-1, 5, 2]; expected ints of at least 0",
    ),
    "a float": (exchange(z(2, 6), scatter_sizes=[2.0, 2, 2]), ONE, ValueError, "expected ints of at least 0"),
    "wrong sum": (
        exchange(z(2, 6), scatter_sizes=[1, 5, 2]),
        ONE,
        ValueError,
        "scatter_sizes is [1, 5, 2]; expected sizes that sum to 6, the size of dim 1",
    ),
    "wrong sum of the second": (
        exchange(z(2, 6), z(2, 6), scatter_sizes=[None, [1, 5, 2]]),
        TWO,
        ValueError,
        "scatter_sizes[1] is [1, 5, 2]; expected sizes that sum to 6, the size of dim 1",
    ),
    "wrong own size": (
        exchange(z(2, 6), z(2, 6), gather_sizes=[None, [2, 2, 3]]),
        TWO,
        ValueError,
        "gather_sizes[1] is [2, 2, 3]; expected 2 at index 2, rank 2's size of dim 0",
    ),
    "wrong own size of a shard": (
        gather([z(2)], sizes=[[2, 2, 1]]),
        SHARD,
        ValueError,
        "sizes[0] is [2, 2, 1]; expected 2 at index 2, rank 2's size of dim 0",
    ),
    "wrong sum of a sum": (
        scatter(z(6), sizes=[2, 2, 1]),
        scatter(z(6)),
        ValueError,
        "sizes is [2, 2, 1]; expected sizes that sum to 6, the size of dim 0",
    ),
    "dim of a list": (
        exchange(z(2, 6), z(7)),
        TWO,
        ValueError,
        "scatter_dim is 1; expected -1 to 0 for input_[1] of shape [7]",
    ),
    "layout of the other dim": (
        of_layout(lambda layout: spar.all_to_all(z(2, 6), None, 0, 1, layout=layout)),
        of_layout(lambda layout: spar.all_to_all(z(6, 2), None, 0, 1, scatter_layout=layout)),
        ValueError,
        "input_ is of size 6 in dim 1; expected 2, rank 2's shard in SequenceLayout.even(6, 3 ranks)",
    ),
    "layout and size": (
        of_layout(lambda layout: spar.all_to_all(z(2, 6), None, 1, 0, 6, layout=layout)),
        exchange(z(2, 6)),
        ValueError,
        "gather_size is 6 and layout is SequenceLayout.even(6, 3 ranks); expected one of them",
    ),
    "one layout of a list": (
        of_layout(lambda layout: spar.all_to_all([z(2, 6)] * 2, None, 1, 0, layout=[layout])),
        exchange(z(2, 6), z(2, 6)),
        ValueError,
        "layout is [SequenceLayout.even(6, 3 ranks)]; expected 2 entries, one for each tensor, or None",
    ),
    "no layout": (gather(z(2), layout=6), SHARD, TypeError, "layout is 6; expected a SequenceLayout or None"),
    "layout of another group": (
        another_group,
        SHARD,
        ValueError,
        "layout is SequenceLayout.even(6, 4 ranks) of another group; expected a layout of the call's group",
    ),
    "layout and sizes": (
        of_layout(lambda layout: spar.all_gather(z(2), sizes=[2, 2, 2], layout=layout)),
        SHARD,
        ValueError,
        "sizes is [2, 2, 2] and layout is SequenceLayout.even(6, 3 ranks); expected one of them",
    ),
    "layout of another length": (
        of_layout(lambda layout: layout.gather([z(2), z(3)], 0)),
        of_layout(lambda layout: layout.gather([z(2), z(2)], 0)),
        ValueError,
        "input_[1] is of size 3 in dim 0; expected 2, rank 2's shard in SequenceLayout.even(6, 3 ranks)",
    ),
    "layout of another total": (
        of_layout(lambda layout: layout.reduce_scatter(z(5), 0)),
        scatter(z(6)),
        ValueError,
        "input_ is of size 5 in dim 0; expected 6, the length of the sequence in SequenceLayout.even(6, 3",
    ),
    "from_local": (
        lambda group: SequenceLayout.from_local(-1, group),
        LOCAL,
        ValueError,
        "SequenceLayout.from_local on rank 2 of 3: size is -1; expected 0 to 9223372036854775807",
    ),
    "from_local of a str": (
        lambda group: SequenceLayout.from_local("2", group),  # type: ignore[arg-type]
        LOCAL,
        TypeError,
        "size is '2'; expected an int, 0 to 9223372036854775807",
    ),
}


def check_bad_argument(rank: int, world: int, group: Group, name: str) -> None:
    wrong, right, kind, text = CASES[name]
    last = rank == world - 1
    with pytest.raises(kind if last else spar.MismatchError) as caught:
        (wrong if last else right)(group)
    assert text in str(caught.value), caught.value
    assert f"on rank {world - 1} of {world}: " in str(caught.value)
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1, 2], "the group is usable"


@pytest.mark.parametrize("name", CASES)
def test_bad_argument_is_reported_to_the_peers(ranks: Ranks, name: str) -> None:
    ranks(WORLD, check_bad_argument, name)


def check_layout_arguments(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout
    bad: list[tuple[Callable[..., object], tuple[Any, ...], str]] = [
        (layout.even, (-1,), f"even: total is -1; expected {LENGTH}"),
        (layout.even, ("6",), f"even: total is '6'; expected an int, {LENGTH}"),
        (layout.even, (2**63,), f"even: total is {2**63}; expected {LENGTH}"),
        (layout.packed, ([2**62, 2**62],), f"packed: lengths sum to {2**63}; expected a sum below 2^63"),
        (layout.joint, (2**62, 2**62), f"joint: text and image sum to {2**63}; expected a sum below 2^63"),
        (layout.zigzag, (True,), f"zigzag: total is True; expected an int, {LENGTH}"),
        (layout.packed, (5,), "packed: lengths is 5; expected a list of ints"),
        (layout.packed, ("ab",), "packed: lengths is 'ab'; expected a list of ints"),
        (layout.packed, (None,), "packed: lengths is None; expected a list of ints"),
        (layout.packed, ([1, -1],), "packed: lengths[1] is -1; expected at least 0"),
        (layout.packed, (torch.tensor([1.0]),), "packed: lengths[0] is 1.0; expected an int"),
        (layout.packed, (torch.tensor(3),), "packed: lengths is 3; expected a list of ints"),
        (layout.joint, (7, -25), f"joint: image is -25; expected {LENGTH}"),
        (layout.joint, ("7", 25), f"joint: text is '7'; expected an int, {LENGTH}"),
    ]
    for make, arguments, text in bad:
        with pytest.raises((TypeError, ValueError)) as caught:
            make(*arguments, group)
        assert text in str(caught.value), caught.value
    with pytest.raises(TypeError, match=r"SequenceLayout.even: group is 3"):
        layout.even(6, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group is 'nothing'; expected the name of a group"):
        layout.even(6, "nothing")
    with pytest.raises(TypeError, match="hybrid: state is 3; expected a ParallelState or None"):
        layout.hybrid(8, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no parallel state; call init_parallel_state first"):
        layout.hybrid(8)
    for call, text in (
        (
            lambda: layout.even(6, group).shard(z(5), 0),
            "input_ is of size 5 in dim 0; expected 6, the length",
        ),
        (lambda: layout.even(6, group).shard(z(6), 1), "dim is 1; expected -1 to 0"),
        (lambda: layout.even(6, group).shard([z(6), z(6)], 1), "-1 to 0 for input_[0] of shape [6]"),
        (lambda: layout.packed([0, 3, 8], group).shard(z(8), 0), "cumulative; pass the lengths: [3, 5]"),
        (lambda: layout.even(6, group).shard([], 0), "input_ is an empty list; expected at least one"),
        (lambda: layout.even(6, group).shard(z(6), 0, "x"), "grad_scale is 'x'; expected \"up\""),
    ):
        with pytest.raises(ValueError, match="on rank") as caught:
            call()
        assert text in str(caught.value), caught.value


def test_bad_arguments_of_layouts(ranks: Ranks) -> None:
    ranks(WORLD, check_layout_arguments)
