# SPDX-License-Identifier: Apache-2.0
"""`out=`: outputs are written to the caller's tensors, over each transport; what cannot be written raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.operations import DIRECT
from helpers.processes import finish, start
from helpers.reference import assert_same, cells, part, rule, same_bits

import spar

Group = dist.ProcessGroup
TOTAL, HEADS = 10, 7
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn]
Operation = Callable[..., Any]


def operation(name: str, world: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, Operation]:
    """Return an input of uneven shape, and the operation as a function of inputs and `out`."""
    direct, sizes = DIRECT[name], rule(TOTAL, world)
    whole = cells((2, TOTAL, HEADS), dtype, salt=rank if direct.whole else 0)
    x = whole if direct.whole else part(whole, sizes, 1, rank).contiguous()
    return x, lambda x, group, **more: direct(x, group, sizes, **more)


def targets(like: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Return contiguous tensors: plain memory, a spar output's (shared memory on shm), parts of both."""
    count = like.numel()
    flat = spar.all_gather(torch.zeros(4096, dtype=torch.int8), group).view(like.dtype)
    inside = torch.zeros(count + 3, dtype=torch.int8).to(like.dtype)
    return [
        torch.empty_like(like),
        flat[:count].view(like.shape),
        flat[3 : 3 + count].view(like.shape),
        inside[1 : 1 + count].view(like.shape),
    ]


def check_out(rank: int, world: int, group: Group, name: str) -> None:
    for dtype in DTYPES:
        if DIRECT[name].whole and dtype == torch.float8_e4m3fn:
            continue  # torch does not add it
        x, call = operation(name, world, rank, dtype)
        before = x.clone()
        expected = call(x, group).clone()
        for out in targets(expected, group):
            assert call(x, group, out=out) is out
            assert_same(out, expected, (name, dtype))
            assert same_bits(x, before)
        if world > 1:
            assert_same(call(x.transpose(1, 2).contiguous().transpose(1, 2), group, out=out), expected)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DIRECT)
def test_out_receives_the_output(ranks: Ranks, world: int, name: str) -> None:
    ranks(world, check_out, name)


def check_list(rank: int, world: int, group: Group, name: str) -> None:
    x, call = operation(name, world, rank, torch.float32)
    expected = [y.clone() for y in call([x, 2 * x], group)]
    shared = spar.all_gather(torch.zeros(1024), group)[: expected[0].numel()]
    for first in (torch.empty_like(expected[0]), shared.view(expected[0].shape)):
        outs = (first, torch.empty_like(expected[1]))
        got = call([x, 2 * x], group, out=outs)
        assert isinstance(got, list) and all(a is b for a, b in zip(got, outs, strict=True))
        for out, wanted in zip(outs, expected, strict=True):
            assert_same(out, wanted)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", DIRECT)
def test_out_of_a_list(ranks: Ranks, world: int, name: str) -> None:
    ranks(world, check_list, name)


def check_no_second_block(rank: int, world: int, group: Group) -> None:
    x = torch.arange(1 << 18, dtype=torch.float32) + rank
    out = spar.all_gather(x, group)
    expected = out.clone()
    out.zero_()
    before = spar.memory_stats()["arena.peak_bytes"]
    assert before == spar.memory_stats()["arena.allocated_bytes"], "so that another block would be seen"
    spar.all_gather(x, group, out=out)
    assert_same(out, expected)
    assert spar.memory_stats()["arena.peak_bytes"] == before
    plain = torch.empty_like(expected)
    spar.all_gather(x, group, out=plain)
    assert_same(plain, expected)
    assert spar.memory_stats()["arena.peak_bytes"] == before + plain.nbytes


def peak_in_own_process(rank: int, folder: Path) -> None:
    check_no_second_block(rank, 2, dist.group.WORLD)


def test_peers_write_straight_into_shared_memory(tmp_path: Path) -> None:
    """An `out` in shared memory needs no other block; one in plain memory is copied from one."""
    assert finish(start(peak_in_own_process, 2, tmp_path, SPAR_TRANSPORT="shm"), 60) == [0, 0]


# ---- what cannot be written ----


def wrong(name: str) -> Any:
    """Return a wrong `out` for an input of [4] float32 on 2 ranks, whose output is [8], or for a list."""
    base = torch.zeros(40)
    return {
        "shape": torch.zeros(4),
        "dtype": torch.zeros(8, dtype=torch.float64),
        "device": torch.zeros(8, device="meta"),
        "strides": base[::5],
        "no tensor": [torch.zeros(8)],
        "sparse": torch.zeros(8).to_sparse(),
        "gradient": torch.zeros(8, requires_grad=True),
        "conjugate": torch.zeros(8, dtype=torch.complex64).conj(),
    }[name]


ERRORS = {
    "shape": (ValueError, r"out is a tensor of shape \[4\]; expected the output's shape, \[8\]"),
    "dtype": (TypeError, r"out is a tensor of torch.float64 on cpu; expected torch.float32 on cpu, as the"),
    "device": (TypeError, r"out is a tensor of torch.float32 on meta; expected torch.float32 on cpu"),
    "strides": (ValueError, r"out is of strides \[5\]; expected a contiguous tensor"),
    "no tensor": (TypeError, "out is a list; expected a tensor"),
    "sparse": (TypeError, "out is a tensor of layout torch.sparse_coo; expected a strided tensor"),
    "gradient": (ValueError, "out is a tensor that requires a gradient; expected one that does not"),
}


def check_wrong(rank: int, world: int, group: Group, name: str) -> None:
    kind, text = ERRORS[name]
    for _ in range(2):  # the group stays usable
        if rank == 0:
            with pytest.raises(kind, match=f"all_gather on rank 0 of 2: {text}"):
                spar.all_gather(torch.zeros(4), group, out=wrong(name))
        else:
            with pytest.raises(spar.MismatchError, match=f"rank 0 failed: {kind.__name__}: .*{text[:20]}"):
                spar.all_gather(torch.zeros(4), group)
        assert spar.all_gather(torch.full((1,), 1.0 + rank), group).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_out_raises_on_all_ranks(ranks: Ranks, name: str) -> None:
    ranks(2, check_wrong, name)


def check_more_errors(rank: int, world: int, group: Group) -> None:
    """All ranks make the same mistake."""
    x, y = torch.zeros(4), torch.zeros(8)
    line = torch.zeros(30)
    with pytest.raises(ValueError, match=r"out is a tensor of shape .* expected None where input_ requires"):
        spar.all_gather(torch.zeros(4, requires_grad=True), group, out=y)
    with pytest.raises(ValueError, match="out is memory that overlaps input_; expected memory of its own"):
        spar.all_gather(line[5:9], group, out=line[:8])
    with pytest.raises(ValueError, match="out is memory that overlaps input_"):
        spar.all_gather(line[0:28:9], group, out=line[8:16])
    with pytest.raises(ValueError, match=r"out\[1\] is memory that overlaps input_\[0\]"):
        spar.all_gather([line[:4], line[4:8]], group, out=[y, line[3:11]])
    with pytest.raises(ValueError, match=r"out\[1\] is memory that overlaps out\[0\]"):
        spar.all_gather([x, x], group, out=[line[:8], line[7:15]])
    with pytest.raises(ValueError, match=r"out is a tensor of shape .* expected a list of 2 tensors"):
        spar.all_gather([x, x], group, out=y)
    with pytest.raises(ValueError, match="out is a list of 1; expected a list of 2 tensors"):
        spar.all_gather([x, x], group, out=[y])
    with pytest.raises(TypeError, match=r"out\[1\] is a NoneType; expected a tensor"):
        spar.all_gather([x, x], group, out=[y, None])
    with pytest.raises(ValueError, match="out is a view that conjugates or negates; expected a"):
        spar.all_gather(x.to(torch.complex64), group, out=wrong("conjugate"))
    with pytest.raises(TypeError, match="a dtype that torch adds"):
        spar.reduce_scatter(y.to(torch.float8_e5m2), group, out=x.to(torch.float8_e5m2))
    with torch.inference_mode():
        held = torch.zeros(8)
    with pytest.raises(ValueError, match="out is a tensor made in inference mode; expected one made"):
        spar.all_gather(x, group, out=held)
    with torch.inference_mode():
        assert spar.all_gather(torch.full((4,), float(rank)), group, out=held) is held
    assert held.tolist() == [0.0] * 4 + [1.0] * 4
    assert spar.all_gather(line[8:12], group, out=line[:8]) is not None, "next to it, not over it"


def test_errors_of_out(ranks: Ranks) -> None:
    ranks(2, check_more_errors)


def check_autograd(rank: int, world: int, group: Group) -> None:
    """A write is seen by autograd: a saved tensor that changed makes backward raise."""
    x = torch.full((3,), float(rank), requires_grad=True)
    for out in (torch.zeros(3 * world), spar.all_gather(torch.zeros(3), group)):
        weight = torch.ones(3 * world, requires_grad=True)
        product = weight * out
        with torch.no_grad():
            spar.all_gather(x, group, out=out)
        assert out.tolist() == [float(p) for p in range(world) for _ in range(3)]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        parameter = torch.nn.Parameter(torch.zeros(3 * world))
        with torch.no_grad():
            spar.all_gather(x, group, out=parameter)
        assert_same(parameter.detach(), out)


@pytest.mark.parametrize("world", [1, 2])
def test_autograd_sees_the_write(ranks: Ranks, world: int) -> None:
    ranks(world, check_autograd)


def check_traced(rank: int, world: int, group: Group) -> None:
    torch._dynamo.reset()

    def double(x: torch.Tensor, out: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        y = spar.all_to_all(x * 2, group, 1, 0, out=out)
        spar.reduce_scatter(y, group, out=total)
        return y + 1

    x = torch.arange(4.0 * world).view(2, 2 * world) + rank
    expected = [torch.empty(2 * world, 2), torch.empty(2, 2)]
    wanted = double(x, *expected)
    out = [torch.empty(2 * world, 2), torch.empty(2, 2)]
    got = torch.compile(double, fullgraph=True, backend="aot_eager")(x, *out)
    for a, b in zip([got, *out], [wanted, *expected], strict=True):
        assert_same(a, b)
    meta = torch.empty(2 * world, 2, device="meta")
    assert spar.all_to_all(x.to("meta"), group, 1, 0, out=meta) is meta
    with torch.profiler.profile() as profile:
        spar.all_to_all(x, group, 1, 0, out=out[0])
    assert "spar::all_to_all" in {event.name for event in profile.events()}


@pytest.mark.one_transport
def test_out_under_compile_meta_and_the_profiler(ranks: Ranks) -> None:
    ranks(2, check_traced)


# ---- peers that come late ----


def leave_late(rank: int, folder: Path) -> None:
    group = dist.group.WORLD
    out = spar.all_gather(torch.zeros(1 << 20), group)
    with pytest.raises(spar.MismatchError):
        spar.all_gather(torch.zeros(1 << 20 if rank == 0 else 4), group, out=out if rank == 0 else None)
    spar.all_gather(torch.full((1 << 20,), float(rank)), group, out=out)
    assert out[:: 1 << 20].tolist() == [0.0, 1.0]
    dist.barrier()
    if rank == 1:
        time.sleep(2.5)
        return
    with pytest.raises(spar.ExchangeTimeoutError):
        spar.all_gather(torch.zeros(1 << 20), group, out=out)
    size = out.nbytes
    del out
    assert spar.memory_stats()["arena.quarantined_bytes"] >= size


def test_out_is_quarantined_while_a_peer_may_write_to_it(tmp_path: Path) -> None:
    processes = start(leave_late, 2, tmp_path, SPAR_TRANSPORT="shm", SPAR_TIMEOUT="1")
    assert finish(processes, 60) == [0, 0]
