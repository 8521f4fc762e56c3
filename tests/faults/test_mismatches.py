# SPDX-License-Identifier: Apache-2.0
"""Calls and settings that differ between ranks: all ranks raise one error, which names the difference."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.reference import assert_same, rule

import spar
from spar._control.mismatch import first_difference

Group = dist.ProcessGroup
ALL = 7


# ---- calls that differ between ranks ----


def disagreements(rank: int, group: Group, odd: int) -> dict[str, tuple[Any, str]]:
    """Return calls that differ on rank `odd`, and what the message must name."""
    differs, others = rank == odd, ", ".join(str(other) for other in range(3) if other != odd)
    x, sizes = torch.zeros(4, 12, 12), rule(12, 3)
    half = x.narrow(1, 0, sizes[rank])
    gather, all_to_all = spar.gather_forward_split_backward, spar.all_to_all
    return {
        "shape": (
            lambda: all_to_all(torch.zeros(4 + differs, 4, 12), group, 2, 1),
            r" in the shape of the whole tensor: \[.* on rank .*\[5, 12, 12\]",
        ),
        "local extent": (
            lambda: gather(torch.zeros(4 + differs), group, 0),
            r" in the shape of the whole tensor: \[.*\[5, 5, 5\]",
        ),
        "dtype": (
            lambda: gather(half.to(torch.int32 if differs else torch.float32), group, 1),
            rf" in the dtype: .*torch\.int32 on rank {odd}[;:]",
        ),
        "dims": (
            lambda: all_to_all(torch.zeros(4, 4, 4, 4), group, 3 if differs else 2, 1),
            rf" in the scattered dim: .*3 on rank {odd}[;:]",
        ),
        "number of dims": (
            lambda: gather(half[None] if differs else half, group, 0),
            r" in the shape of the whole tensor: .*\[3, 4, 4, 12\] on rank",
        ),
        "number of tensors": (
            lambda: all_to_all([half] * (1 + differs), group, 2, 1),
            rf" in the number of tensors: .*2 on rank {odd}[;:]",
        ),
        "op": (
            lambda: gather(half, group, 1) if differs else all_to_all(half, group, 2, 1),
            rf" in the operation: .*gather_forward_split_backward on rank {odd}[;:]",
        ),
        "sizes": (
            lambda: gather(half, group, 1, [4, 4, 5] if differs and rank < 2 else [4, 4, 4]),
            r" in the shape of the whole tensor: \[.*\[4, 4, 5\]",
        ),
        "scattered sizes of a tensor": (
            lambda: all_to_all(
                [half, half], group, 2, 1, scatter_sizes=[None, [4, 4, 4] if not differs else [5, 4, 3]]
            ),
            rf" in the sizes of the scattered dim of tensor 1: .*\[5, 4, 3\] on rank {odd}[;:]",
        ),
        "requires_grad": (
            lambda: gather(half.clone().requires_grad_(differs), group, 1),
            rf": the input of rank {others} does not require a gradient, .*gradient recorded",
        ),
    }


def check_disagreement(rank: int, world: int, group: Group, what: str, odd: int) -> str:
    call, shown = disagreements(rank, group, odd)[what]
    with pytest.raises(spar.MismatchError) as caught:
        call()
    error = caught.value
    assert re.search(rf"(?s)the ranks of group '\S+'{shown}", str(error)), str(error)
    assert (error.rank, error.ranks, error.group) == (rank, (odd,), group.group_name)
    assert error.op in ("gather_forward_split_backward", "all_to_all")
    assert str(error).startswith(error.op)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks, again.call) == (str(error), error.ranks, error.call)
    x = torch.full((1,), float(rank))
    assert_same(
        spar.gather_forward_split_backward(x, group, 0), torch.arange(float(world)), "the group is usable"
    )
    return str(error).split(":", 1)[1]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", disagreements(0, None, 1))  # type: ignore[arg-type]
def test_mismatch_raises_on_all_ranks(ranks: Ranks, what: str, odd: int) -> None:
    texts = ranks(3, check_disagreement, what, odd)
    assert len(set(texts)) == 1, "the message is the same on every rank"


def check_advice(rank: int, world: int, group: Group) -> None:
    x, y = torch.zeros(3, 4 + rank), torch.zeros(3, 5 - rank)
    gather, unpad = spar.gather_forward_split_backward, spar.gather_forward_split_backward_and_unpad
    exchange = spar.all_to_all
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: gather(x, group, 1), "[4, 5] of dim 1: pass gather_sizes=[4, 5]"),
        (lambda: unpad(x, group, 1), "[4, 5] of dim 1: equal sizes are required"),
        (lambda: exchange(y, group, 0, 1), "[5, 4] of dim 1: pass gather_size=9, their sum"),
        (lambda: exchange([y, y, y], group, 0, 1), "[5, 4] of dim 1: pass gather_size=9, their sum"),
        (lambda: exchange(x, group, 0, 1), "[4, 5] of dim 1: pass gather_sizes=[4, 5]"),
        (lambda: exchange([x, x[:2]], group, 0, 1), "[4, 5] of dim 1: pass gather_sizes=[[4, 5]] * 2"),
        (
            lambda: spar.all_gather([x, x], group, 1, async_op=True)[1].wait(),
            "[4, 5] of dim 1: pass sizes=[[4, 5]] * 2",
        ),
    ]
    for call, text in calls:
        with pytest.raises(spar.MismatchError) as caught:
            call()
        assert str(caught.value).endswith(f"\nThe ranks hold {text}"), str(caught.value)
    with pytest.raises(spar.MismatchError) as caught:  # the sizes were passed
        gather(x[:, :4], group, 1, [4, 4 + rank] if rank == 0 else [4 + rank, 4])
    assert "The ranks hold" not in str(caught.value)
    with pytest.raises(spar.MismatchError) as caught:  # one pair of sizes does not fit both tensors
        spar.all_gather([x, x[:, :1]], group, 1)
    assert "The ranks hold" not in str(caught.value)
    whole = torch.zeros(6 - 2 * rank, 2, requires_grad=True)
    part = spar.split_forward_gather_backward(whole, group, 0)
    with pytest.raises(spar.MismatchError, match=r"^backward of split_forward_gather_backward on rank"):
        part.sum().backward()


def check_lines(rank: int, world: int, group: Group) -> None:
    x, odd = torch.zeros(2, 4, 12), rank == 1
    zigzag = spar.SequenceLayout.zigzag(12, group)
    with pytest.raises(spar.MismatchError) as caught:
        spar.all_gather(x, group, 1, layout=None if odd else zigzag)
    call = "all_gather [2, 12, 12]: dim 1 in [4, 4, 4]{} -> whole of torch.float32 on cpu"
    lines = [line.split(" (call")[0] for line in str(caught.value).split("\n")[1:]]
    assert lines == [f"  rank 0, 2: {call.format(' (zigzag)')}", f"  rank 1: {call.format('')}"]


def test_mismatch_says_in_words_how_pieces_lie(ranks: Ranks) -> None:
    ranks(3, check_lines)


def test_mismatch_names_the_public_operation_and_the_sizes_to_pass(ranks: Ranks) -> None:
    ranks(2, check_advice)


def test_difference_of_calls_is_the_first_of_their_descriptions() -> None:
    line = "{} [8, {}]: dim 1 in [4, 4]{} -> whole of torch.{} on cpu{}"
    right = ("gather", 8, "", "float32", " (call 7)")
    for text, found in {
        (
            "all_gather",
            9,
            "",
            "int32",
            " (call 7)",
        ): " in the operation: gather on rank 0, 1; all_gather on rank 2",
        (
            "gather",
            9,
            "",
            "int32",
            " (call 7)",
        ): " in the dtype: torch.float32 on rank 0, 1; torch.int32 on rank 2",
        (
            "gather",
            9,
            " (zigzag)",
            "float32",
            "",
        ): " in the shape of the whole tensor: [8, 8] on rank 0, 1; [8, 9] on rank 2",
        (
            "gather",
            8,
            " (zigzag)",
            "float32",
            "",
        ): " in the order of the gathered dim: consecutive on rank 0, 1; zigzag on rank 2",
        ("gather", 8, "", "float32", " * 2 (call 7)"): " in the factor: none on rank 0, 1; * 2 on rank 2",
        (
            "gather",
            8,
            "",
            "float32",
            ", gradient summed, scale 2.0 (call 7)",
        ): ": the input of rank 0, 1 does not require a gradient, or grad is disabled there",
        ("gather", 8, "", "float32", ", scale 2.0 (call 7)"): " in scale: none on rank 0, 1; 2.0 on rank 2",
        ("gather", 8, "", "float32", " (call 8)"): " in the number of the call: 7 on rank 0, 1; 8 on rank 2",
    }.items():
        assert first_difference([line.format(*right)] * 2 + [line.format(*text)]) == found
    cut = [f"all_to_all [9, 9]: dim 0 in [{size}, 4, 3... of torch.int8 on cpu" for size in (1, 2)]
    assert first_difference(cut).startswith(
        " in the layout: [9, 9]: dim 0 in [1, 4, 3... on rank 0; [9, 9]: dim"
    )
    assert first_difference(["sets up its cpu transport (peer info)", line.format(*right)]) == ""


# ---- settings that differ between ranks, or are invalid ----


def check_settings(rank: int, world: int, group: Group, variable: str, values: list[str], text: str) -> None:
    fresh = dist.new_group(list(range(ALL)))
    before = os.environ.pop("SPAR_TRANSPORT")
    os.environ[variable] = values[min(rank, 1)]
    try:
        with pytest.raises(ValueError) as caught:
            spar.gather_forward_split_backward(torch.zeros(1), fresh, 0)
        assert text in str(caught.value), str(caught.value)
    finally:
        del os.environ[variable]
        os.environ["SPAR_TRANSPORT"] = before


@pytest.mark.parametrize(
    ("variable", "values", "text"),
    [
        ("SPAR_TRANSPORT", ["torch", "^torch"], "'torch' on rank 0 and '^torch' on rank 1"),
        ("SPAR_TRANSPORT", ["carrier-pigeon"] * 2, "known: "),
        ("SPAR_CHECK", ["1", "0"], "SPAR_CHECK is '1' on rank 0 and '0' on rank 1"),
        ("SPAR_CHECK", ["auto", "maybe"], "rank 1: SPAR_CHECK is 'maybe'; known: auto|0|1"),
        ("SPAR_TIMEOUT", ["30", "soon"], "rank 1: SPAR_TIMEOUT is 'soon'; expected a number of seconds"),
        *(
            ("SPAR_TIMEOUT", ["30", value], f"rank 1: SPAR_TIMEOUT is '{value}'; expected a number")
            for value in ("9e9", "1e10", "1e15", "0x10")
        ),
        *(
            ("LOCAL_WORLD_SIZE", ["1", value], f"rank 1: LOCAL_WORLD_SIZE is '{value}'; expected an integer")
            for value in ("abc", "0", "4x")
        ),
        ("SPAR_PLAN_CACHE", ["8", "-8"], "rank 1: SPAR_PLAN_CACHE is '-8'"),
        ("SPAR_LOG", ["loud"] * 2, "known: off|warning|info|debug"),
    ],
)
def test_settings_fail_on_all_ranks(ranks: Ranks, variable: str, values: list[str], text: str) -> None:
    ranks(ALL, check_settings, variable, values, text)


def check_forced(rank: int, world: int, group: Group, transports: list[str]) -> None:
    """Force each transport; exclude each, so that another serves or none is left."""
    before = os.environ["SPAR_TRANSPORT"]
    os.environ["SPAR_CHECK"] = "0"
    try:
        for name in transports:
            fresh = dist.new_group(list(range(ALL)))
            os.environ["SPAR_TRANSPORT"] = name
            assert spar.gather_forward_split_backward(torch.zeros(1), fresh, 0).shape == (ALL,)
            assert spar.transport(fresh).name == name
            fresh = dist.new_group(list(range(ALL)))
            os.environ["SPAR_TRANSPORT"] = f"^{name}"
            if len(transports) == 1:
                with pytest.raises(spar.TransportError, match="leaves no transport"):
                    spar.gather_forward_split_backward(torch.zeros(1), fresh, 0)
            else:
                spar.gather_forward_split_backward(torch.zeros(1), fresh, 0)
                assert spar.transport(fresh).name not in (None, name)
    finally:
        del os.environ["SPAR_CHECK"]
        os.environ["SPAR_TRANSPORT"] = before


def test_forced_and_excluded_transports(ranks: Ranks) -> None:
    ranks(ALL, check_forced, TRANSPORTS)
