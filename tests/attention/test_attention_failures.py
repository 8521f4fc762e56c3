# SPDX-License-Identifier: Apache-2.0
"""A rank that fails inside spar.attention, or whose settings differ: what it raises, and its peers."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.processes import finish, start
from test_attention_errors import TOTAL, WORLD, Group, call, z
from torch.nn.functional import scaled_dot_product_attention

import spar
from spar import SequenceLayout
from spar._attention.kernels import KERNELS
from spar.parallel_state import init_parallel_state

pytestmark = pytest.mark.one_transport


def fail_at_two_levels(rank: int, folder: Path, where: str) -> None:
    """Rank 1 of ring x ulysses fails: every rank that waits for it raises at once, in both of its groups.

    If it fails in a block, its ring has its keys, and completes forward; backward waits for it.
    """
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    layout = SequenceLayout.hybrid(8, state)
    spar.attention(*[z(1, 2, 2, 8)] * 3, layout)
    begin = time.monotonic()
    options: dict[str, Any] = {"mask": z(3, 3)} if rank == 1 and where == "arguments" else {}
    inputs: list[Any] = [z(1, 2, 2, 8, requires_grad=True) for _ in range(3)]
    if rank == 1 and where == "no tensor":
        inputs[0] = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and where == "a block":
            patch.setattr(KERNELS["cpu"]["flash"], "forward", lambda *arguments: 1 / 0)
        errors = (TypeError, ValueError, ZeroDivisionError, spar.MismatchError)
        with pytest.raises(errors):
            y = spar.attention(*inputs, layout, **options)
            assert where == "a block" and rank in (0, 2)
            y.sum().backward()  # type: ignore[no-untyped-call]
    assert time.monotonic() - begin < 10
    dist.barrier()  # the exchange that rank 1 left in flight ends first
    y = spar.attention(*[torch.ones(1, 2, 2, 8)] * 3, layout)
    assert torch.equal(y, torch.ones(1, 2, 2, 8)), "both groups are in step"


@pytest.mark.parametrize("where", ["arguments", "no tensor", "a block"])
def test_failure_reaches_the_ranks_of_both_groups(tmp_path: Path, where: str) -> None:
    ranks = start(fail_at_two_levels, 4, tmp_path, where, SPAR_TIMEOUT="20")
    assert finish(ranks, 60) == [0] * 4


def check_failing_block(rank: int, world: int, group: Group) -> None:
    """Rank 1 fails in each block of a ring in turn: ranks that wait raise, and the group stays in step.

    After the last exchange of forward, ranks raise in their next call. After that of backward they wait for
    nothing.
    """
    layout, kernel = SequenceLayout.even(TOTAL, group), KERNELS["cpu"]["flash"]
    for where, block in itertools.product(("forward", "backward"), range(world)):
        blocks = itertools.count()
        right = getattr(kernel, where)

        def fails(*arguments: Any) -> Any:
            return 1 / 0 if next(blocks) == block else right(*arguments)  # noqa: B023

        inputs = [z(1, TOTAL // world, 2, 8, requires_grad=True) for _ in range(3)]
        waits = where == "forward" or block < world - 1
        peers = pytest.raises(spar.MismatchError, match="division") if waits else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(kernel, where, fails)
            with pytest.raises(ZeroDivisionError) if rank == 1 else peers:
                spar.attention(*inputs, layout, method="ring").sum().backward()  # type: ignore[no-untyped-call]
        assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world)), (where, block)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rank_that_fails_in_a_block(ranks: Ranks, world: int) -> None:
    ranks(world, check_failing_block)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("out of registers")


def check_failing_backward(rank: int, world: int, group: Group) -> None:
    """The caller's kernel raises in rank 1's backward; at its next call all ranks raise, and are in step."""
    layout = SequenceLayout.even(TOTAL, group)
    inputs = [z(1, TOTAL // world, 6, 8, requires_grad=True) for _ in range(3)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        y = scaled_dot_product_attention(*[x.transpose(1, 2) for x in tensors]).transpose(1, 2)
        return FailsInBackward.apply(y) if rank == 1 else y  # type: ignore[no-untyped-call]

    def step(method: str, kernel: Any = None) -> torch.Tensor:
        return spar.attention(*inputs, layout, method=method, kernel=kernel)

    text = "backward of attention on .*rank 0.*; {} on rank 1; nothing was exchanged"
    for method, following in itertools.product(("ulysses", "gather"), ("attention", "all_gather")):
        y = step(method, attend)
        if rank == 1:
            with pytest.raises(RuntimeError, match="out of registers"):
                y.sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(spar.MismatchError, match=text.format(following)) as caught:
            if rank != 1:
                y.sum().backward()  # type: ignore[no-untyped-call]
            elif following == "attention":
                step(method)
            else:
                spar.all_gather(inputs[0], group)
        assert caught.value.ranks == ((0,) if world == 2 else (1,))
        assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world))


@pytest.mark.parametrize("world", [2, 3])
def test_kernel_that_raises_in_one_ranks_backward(ranks: Ranks, world: int) -> None:
    ranks(world, check_failing_backward)


def check_names_attention(rank: int, world: int, group: Group) -> None:
    """Exchanges inside of attention: errors name what the user called."""
    even = SequenceLayout.even(TOTAL, group)
    x = z(2, 4, 6, 8, requires_grad=rank == 1)
    for method in ("ulysses", "gather", "ring"):
        with pytest.raises(spar.MismatchError, match=r"(?s)^attention on rank.*gradient") as caught:
            spar.attention(x, x, x, even, method=method)
        assert caught.value.op == "attention"


def test_errors_inside_attention_name_it(ranks: Ranks) -> None:
    ranks(WORLD, check_names_attention)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": True}, "causal"),
    "scale": ({"scale": 0.5}, "scale 0.5"),
    "mask": ({"mask": z(TOTAL, TOTAL)}, "mask of torch.float32"),
    "kind of mask": ({"mask": z(TOTAL, TOTAL) == 0}, "mask of torch.bool"),
    "dropout_p": ({"dropout_p": 0.25}, "dropout_p 0.25"),
}


def check_settings(rank: int, world: int, group: Group, method: str) -> None:
    """One rank's settings differ: every rank raises, the first time and repeated, and shows them."""
    for name, (options, text) in SETTINGS.items():
        if name == "dropout_p" and method == "ring":
            continue
        own = options if rank == world - 1 else {"mask": z(TOTAL, TOTAL)} if name == "kind of mask" else {}
        for _ in range(2):
            with pytest.raises(spar.MismatchError, match=text):
                call(group, method=method, **own)
        call(group, method=method, **options)


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_settings_that_differ_are_a_mismatch(ranks: Ranks, method: str) -> None:
    ranks(WORLD, check_settings, method)


def check_layouts_that_differ(rank: int, world: int, group: Group, method: str) -> None:
    """Ranks hold equally many tokens by layouts that differ."""
    pairs = [
        (SequenceLayout.even(TOTAL, group), SequenceLayout.zigzag(TOTAL, group)),
        (SequenceLayout.packed([8, 4], group), SequenceLayout.packed([4, 8], group)),
    ]
    for pair in pairs:
        x = z(2, pair[0].sizes[rank], 6, 8)
        assert pair[0].sizes == pair[1].sizes
        with pytest.raises(spar.MismatchError):
            call(group, x, x, x, pair[rank == 1], method=method)


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_layouts_of_equal_sizes_are_a_mismatch(ranks: Ranks, method: str) -> None:
    ranks(2, check_layouts_that_differ, method)


def compare_masks(rank: int, folder: Path) -> None:
    """With SPAR_CHECK=1 the values of masks are compared, also where NumPy is not installed."""
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", None)
        for shape in ((TOTAL, TOTAL), (2, TOTAL)):
            with pytest.raises(spar.MismatchError, match="hash of the mask"):
                call(group, *[z(2, 6, 6, 8)] * 3, mask=torch.full(shape, float(rank)))
            call(group, *[z(2, 6, 6, 8)] * 3, mask=torch.ones(shape))


def test_values_of_masks_are_compared_on_request(tmp_path: Path) -> None:
    assert finish(start(compare_masks, 2, tmp_path, SPAR_CHECK="1"), 60) == [0] * 2


def check_names_of_torch(rank: int, world: int, group: Group) -> None:
    layout, x = SequenceLayout.even(TOTAL, group), z(2, 4, 6, 8)
    wrong = {
        "is_causal": (True, "is_causal is not an argument; pass causal"),
        "attn_mask": (None, "attn_mask is not an argument; pass mask"),
        "enable_gqa": (True, "enable_gqa is not an argument; pass nothing, as k and v may have fewer heads"),
        "group": (group, "group is not an argument; pass layout, which has the group"),
    }
    for name, (value, text) in wrong.items():
        with pytest.raises(TypeError, match=f"^attention: {text}"):
            spar.attention(x, x, x, layout, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="query is not an argument; pass q"):
        spar.attention(query=x, key=x, value=x, layout=layout)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"^attention: layout is missing; .* spar\.SequenceLayout\.even\(total, group"
    ):
        spar.attention(x, x, v=x)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        spar.attention(x, x, x, layout, windows=3)  # type: ignore[call-arg]
    assert list(inspect.signature(spar.attention).parameters)[:5] == ["q", "k", "v", "layout", "causal"]


def test_keywords_of_torch_name_those_of_spar(ranks: Ranks) -> None:
    ranks(1, check_names_of_torch)


def check_nobody_waits(rank: int, world: int, group: Group) -> None:
    """Whole keys are not exchanged: one rank's error is its own, and the next exchange is in step."""
    layout = SequenceLayout.even(TOTAL, group)
    heads = 4 if rank == 1 else 6  # does not divide the heads of q
    k = z(2, 5, heads, 8)
    with pytest.raises(ValueError, match="k is of 4 heads") if rank == 1 else contextlib.nullcontext():
        spar.attention(z(2, 4, 6, 8), k, k, (layout, None))
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1, 2]


def test_error_that_nobody_waits_for(ranks: Ranks) -> None:
    ranks(WORLD, check_nobody_waits)


def check_local_errors(rank: int, world: int, group: Group) -> None:
    """Errors that depend on nothing of one rank alone."""
    even, packed = SequenceLayout.even(TOTAL, group), SequenceLayout.packed([TOTAL], group)
    same = z(TOTAL, 4, 6, 8)
    for options, text in (
        ({"layout": 12}, "attention: layout is 12; expected a SequenceLayout, or those of q and of k and v"),
        ({"layout": (even, packed)}, "expected one packed layout for q, k and v"),
        ({"mask": z(12, 12, requires_grad=True), "method": "ring"}, "mask is a tensor that requires a grad"),
        ({"layout": (even, SequenceLayout.zigzag(TOTAL, group)), "method": "ring"}, "two layouts"),
        (
            {"layout": (even, SequenceLayout.even(TOTAL, dist.group.WORLD))},
            "of two groups; expected layouts of one group",
        ),
        ({"k": z(2, 9, 6, 8), "v": z(2, 9, 6, 8)}, "k is of 9 tokens; expected 4, rank"),  # a KV cache, say
        ({"q": same, "k": same, "v": same, "mask": z(12, 12)}, "it may be a key mask or [12, 12]"),
        (
            {"layout": (even, None), "k": z(2, 5, 6, 8), "v": z(2, 5, 6, 8), "method": "ulysses"},
            "have no layout",
        ),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(group, **options)  # type: ignore[arg-type]
        assert text in str(caught.value), caught.value


def test_errors_of_all_ranks(ranks: Ranks) -> None:
    ranks(WORLD, check_local_errors)


def die_in_the_ring(rank: int, folder: Path) -> None:
    group = dist.group.WORLD
    layout = SequenceLayout.even(TOTAL, group)
    q = z(2, 4, 6, 8, requires_grad=True)
    y = spar.attention(q, z(2, 4, 6, 8), z(2, 4, 6, 8), layout, method="ring")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((spar.PeerLostError, spar.GroupBrokenError), match=r"rank 1|broken"):
        y.sum().backward()  # type: ignore[no-untyped-call]
    os._exit(0)


def test_rank_that_dies_before_its_backward(tmp_path: Path) -> None:
    assert finish(start(die_in_the_ring, WORLD, tmp_path), 60) == [0, -signal.SIGKILL, 0]
