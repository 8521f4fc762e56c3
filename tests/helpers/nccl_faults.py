# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the nccl transport over stand-in libraries: faults."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spar
from helpers.nccl_ranks import (
    DEVICE,
    Stream,
    communicator,
    core_of,
    enqueue,
    expect_broken,
    set_up,
    stalled,
    wait,
    within,
)
from helpers.tables import numbers
from spar._exchange.exchange import Exchange
from spar._group.group import Group
from spar._transports import nccl


def check_absent(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """If a rank makes no call, the others' calls return; their streams continue at the timeout."""
    comm = set_up(group)
    comm.timeout = 1.0
    if rank != 0:
        with Stream() as stream:
            begin = time.monotonic()
            enqueue(comm, "gather", (0,), torch.zeros(2))
            stream.synchronize()  # ended by the abort
            assert 0.9 < time.monotonic() - begin < 2.0
            expect_broken(
                comm,
                spar.ExchangeTimeoutError,
                r"in time; not called by rank 0 \(process \d+\) \(limit 1 s, SPAR_TIMEOUT\)",
            )
    dist.barrier(group)
    comm.close()


def check_not_enqueued(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """NCCL does not enqueue a call in time: the call raises, and the group is broken."""
    comm = set_up(group)
    comm.timeout = 0.3
    with Stream() as stream, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_NCCL_PENDING_MS", "1500")
        begin = time.monotonic()
        with pytest.raises(spar.ExchangeTimeoutError, match="in time"):
            enqueue(comm, "gather", (0,), torch.zeros(2))
        assert time.monotonic() - begin < 1.4
        with pytest.raises(spar.GroupBrokenError):
            enqueue(comm, "gather", (0,), torch.zeros(2))
        stream.synchronize()
    time.sleep(1.5)
    dist.barrier(group)
    comm.close()


def check_wait(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """wait returns when all calls are complete, and raises what broke the group."""
    comm = set_up(group)
    x = torch.full((1000,), float(rank))
    with Stream():
        got = enqueue(comm, "gather", (0,), x)
        wait(comm)
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(1000))
        dist.barrier(group)
        comm.timeout = 1.0
        with stalled():
            enqueue(comm, "gather", (0,), x)
        with pytest.raises(spar.ExchangeTimeoutError, match="did not finish call 2 in time"):
            core_of(comm).wait(time.monotonic() + 0.2)
        within(3, lambda: core_of(comm).broken is not None)  # or the device would be blocked until then
    dist.barrier(group)
    comm.close()


def expect_abort(comm: Group, stream: Stream, text: str) -> None:
    """After a peer aborted, check that this rank's call ends within 0.5 s and the next raises why."""
    with contextlib.suppress(spar.GroupBrokenError):  # if the peer aborted earlier
        enqueue(comm, "gather", (0,), torch.zeros(2))
    within(0.5, lambda: core_of(comm).broken is not None)
    stream.synchronize()
    with pytest.raises(spar.GroupBrokenError, match=text):
        enqueue(comm, "gather", (0,), torch.zeros(2))


def check_error_at_once(rank: int, world: int, group: dist.ProcessGroup, function: str) -> None:
    """An error that NCCL returns in a call is raised there, with NCCL's last error."""
    comm = set_up(group)
    comm.timeout = 1.0
    with Stream() as stream:
        if rank == world - 1:
            os.environ["STANDIN_NCCL_FAIL"] = f"{function}:1"
            with pytest.raises(
                spar.TransportError, match=f"nccl{function}: system error: the stand-in"
            ) as caught:
                enqueue(comm, "gather", (0,), torch.zeros(2))
            os.environ.pop("STANDIN_NCCL_FAIL")
            assert caught.value.op == "gather"
            with pytest.raises(spar.GroupBrokenError, match=f"nccl{function}: system error"):
                enqueue(comm, "gather", (0,), torch.zeros(2))
        else:
            text = f"rank {world - 1}: nccl{function}: system error: the stand-in"
            expect_abort(comm, stream, text)
    dist.barrier(group)
    comm.close()


def check_error_later(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """An asynchronous error of NCCL ends a call; the stream continues, and the next call raises."""
    comm = set_up(group)
    dist.barrier(group)  # so that each rank finds its own error, before those of its peers
    with Stream() as stream:
        with stalled("remote"):
            enqueue(comm, "gather", (0,), torch.zeros(2))
        begin = time.monotonic()
        stream.synchronize()
        assert time.monotonic() - begin < 1.0
        expect_broken(comm, spar.TransportError, "remote error: the stand-in's remote error")
    dist.barrier(group)
    comm.close()


def check_refused(
    rank: int, world: int, group: dist.ProcessGroup, variable: str, fault: str, why: str
) -> None:
    """If one rank cannot use the transport, all fall back together, and report the reason."""
    if rank == 0:
        os.environ[variable] = fault
    live = ctypes.CDLL("libcuda.so.1").standin_live
    before = live()
    comm = set_up(group)
    os.environ.pop(variable, None)
    chosen = comm.transport("cuda")
    assert chosen.name == "torch", chosen
    assert [name for name, _ in chosen.rejected] == ["shm", "tcp", "push", "nccl"]
    assert re.search(f"rank 0: .*{why}", chosen.rejected[3][1]), chosen
    within(3, lambda: live() <= before)
    comm.close()


def check_no_meeting(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """If one rank's NCCL cannot connect, its peers end NCCL's set-up long before the timeout."""
    last = world - 1
    if rank == last:
        os.environ["STANDIN_NCCL_FAIL"] = "CommInitRank:1"
    begin = time.monotonic()
    comm = set_up(group)
    assert time.monotonic() - begin < 2
    os.environ.pop("STANDIN_NCCL_FAIL", None)
    chosen = comm.transport("cuda")
    assert chosen.name == "torch", chosen
    assert re.fullmatch(
        f"rank {last}: ncclCommInitRank: system error: the stand-in.*", chosen.rejected[3][1]
    ), chosen
    comm.close()


def check_failure_before_set_up(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank fails before its first call: its peers in the set-up raise, and the next call sets up."""
    comm = communicator(group)
    begin = time.monotonic()
    if rank == 0:
        comm.fail("gather", "cuda", ValueError("no such dim"))
    else:
        failed = pytest.raises(spar.MismatchError, match="rank 0 failed: ValueError: no such dim")
        with failed:
            comm.channel("gather", DEVICE)
    assert time.monotonic() - begin < 2
    check_works(comm, rank, world)


def check_failure_in_set_up(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank fails between two stages of the set-up: its peers raise, and the next call sets up."""
    comm = communicator(group)
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(nccl.Device, "native", lambda self: 1 // 0)
        kind: type[Exception] = ZeroDivisionError if rank == 0 else spar.MismatchError
        with pytest.raises(kind) as caught:
            comm.channel("gather", DEVICE)
        if rank != 0:
            assert "rank 0 failed: ZeroDivisionError" in str(caught.value), caught.value
    assert time.monotonic() - begin < 2
    check_works(comm, rank, world)


def check_works(comm: Group, rank: int, world: int) -> None:
    comm.channel("gather", DEVICE)
    assert comm.transport("cuda").name == "nccl"
    with Stream() as stream:
        got = enqueue(comm, "gather", (0,), torch.full((2,), float(rank)))
        stream.synchronize()
    assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
    dist.barrier(comm.process_group)
    comm.close()


def check_death(rank: int, world: int, group: dist.ProcessGroup, folder: str, when: str) -> None:
    """A peer is killed before or in a call: all others raise long before the timeout."""
    comm = set_up(group)
    with Stream() as stream:
        enqueue(comm, "gather", (0,), torch.zeros(2))
        stream.synchronize()
        dist.barrier(group)
        if rank == 0 and when == "before it":
            os.kill(os.getpid(), signal.SIGKILL)
        with stalled() if when == "in it" else contextlib.nullcontext():
            enqueue(comm, "gather", (0,), torch.zeros(2))
        if when == "in it":
            dist.barrier(group)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        stream.synchronize()
        waited = time.monotonic() - begin
        expect_broken(comm, spar.PeerLostError, r"rank 0 \(process \d+\) died before the end of call 2")
    comm.close()
    Path(folder, str(rank)).write_text(str(waited))


def check_end(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank that exits after its calls completed is not a failure, however late its peers' streams are."""
    comm = set_up(group)
    x = torch.full((2, world - 1), float(rank))  # the last rank receives nothing
    args = (1, 0, 2 * world)
    with Stream() as stream:
        if rank == world - 1:
            enqueue(comm, "all_to_all", args, x)
            stream.synchronize()
            ctypes.CDLL(None).exit(0)  # multiprocessing's exit skips exit handlers
        slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda unused: time.sleep(2.5))
        ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream.handle, slow, None)
        begin = time.monotonic()
        got = enqueue(comm, "all_to_all", args, x)
        stream.synchronize()
        assert time.monotonic() - begin > 2
    assert torch.equal(got[:, 0], torch.arange(float(world)).repeat_interleave(2))
    assert core_of(comm).broken is None
    comm.close()


# ---- reports between ranks of one host ----


def check_disagreement(rank: int, world: int, group: dist.ProcessGroup, late: int) -> None:
    """The later rank detects the difference before it enqueues anything; the others' calls end."""
    comm = set_up(group)
    x = torch.zeros(2, 3 + (rank == late))
    with Stream() as stream:
        begin = time.monotonic()
        if rank != late:
            enqueue(comm, "gather", (0,), x)
        dist.barrier(group)
        if rank == late:
            with pytest.raises(spar.MismatchError) as caught:
                enqueue(comm, "gather", (0,), x)
            text = str(caught.value)
            assert f"rank {late}'s call 1 over the GPU is not rank {int(late == 0)}'s" in text
            first, *others = [other for other in range(world) if other != late]
            for one in (late, first):
                shape = f"[{2 * world}, {3 + (one == late)}]"
                assert f"rank {one}: gather {shape}: dim 0 in" in text, text
            assert text.count("of torch.float32 on cuda") == 2
            assert all(f"rank {other}: as rank {first}" in text for other in others), text
        stream.synchronize()  # ended by the abort
        within(2, lambda: core_of(comm).broken is not None)
        if rank != late:
            with pytest.raises(spar.MismatchError, match=f"rank {late}'s call 1 over the GPU is not rank"):
                enqueue(comm, "gather", (0,), x)
        with pytest.raises(spar.GroupBrokenError, match=f"rank {late}'s call 1 over the GPU is not rank"):
            enqueue(comm, "gather", (0,), x)
        assert time.monotonic() - begin < 5
    dist.barrier(group)
    comm.close()


def check_gathered_sizes(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A mismatch carries what each rank holds of the gathered dim."""
    comm = set_up(group)
    last = world - 1
    with Stream() as stream:
        if rank != last:
            enqueue(comm, "gather", (1,), torch.zeros(2, 4))
        dist.barrier(group)
        if rank == last:
            with pytest.raises(spar.MismatchError) as caught:
                enqueue(comm, "gather", (1,), torch.zeros(2, 5))
            assert caught.value._gathered_sizes == (1, [4] * last + [5])
        stream.synchronize()
    dist.barrier(group)
    comm.close()


def check_unchecked(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """SPAR_CHECK=0 compares nothing: calls whose blocks have the same sizes pass."""
    comm = set_up(group, SPAR_CHECK="0")
    with Stream():
        got = enqueue(comm, "gather", (0,), torch.full((2, 3) if rank else (3, 2), float(rank)))
        wait(comm)
    assert torch.equal(got.flatten(), torch.arange(float(world)).repeat_interleave(6))
    comm.close()


def check_failures(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A call that no rank can make leaves the group usable; a call that one rank cannot make breaks it."""
    comm = set_up(group)
    x = torch.full((2,), float(rank))
    with Stream() as stream:
        comm.fail("gather", "cuda", ValueError("all of them"))
        dist.barrier(group)
        got = enqueue(comm, "gather", (0,), x)
        stream.synchronize()
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
        dist.barrier(group)
        if rank == 0:
            comm.fail("gather", "cuda", RuntimeError("no memory for it"))
        else:
            with contextlib.suppress(spar.MismatchError):  # rank 0 may have been earlier
                enqueue(comm, "gather", (0,), x)
        within(2, lambda: core_of(comm).broken is not None or rank == 0)
        stream.synchronize()
        dist.barrier(group)
        with pytest.raises(spar.SparError, match="failed: RuntimeError: no memory for it"):
            enqueue(comm, "gather", (0,), x)
    dist.barrier(group)
    comm.close()


def check_own_failure(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A failure in Python before the call, here an output that torch cannot allocate, is reported."""
    comm = set_up(group)
    if rank == 0:
        x: Any = SimpleNamespace(
            is_cpu=False,
            is_neg=lambda: False,
            _is_zerotensor=lambda: False,
            device=DEVICE,
            dtype=torch.float32,
            shape=(2,),
            element_size=lambda: 4,
            stride=lambda: (1,),
            get_device=lambda: 0,
            data_ptr=lambda: 4096,
        )
        gather = Exchange("gather", comm, (numbers("gather", (0,), x.shape, world),))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl, "empty", lambda shape, strides, dtype: torch.zeros(-1))
            with pytest.raises(RuntimeError, match=r"non-negative|negative dimension"):
                gather.run([x], traced=False)
    dist.barrier(group)
    if rank != 0:
        with Stream(), pytest.raises(spar.MismatchError, match=r"rank 0: failed: RuntimeError"):
            enqueue(comm, "gather", (0,), torch.zeros(2))
    dist.barrier(group)
    comm.close()


def interrupted(deadline: float) -> None:
    raise KeyboardInterrupt


def check_interrupt(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Ctrl-C on one rank ends the others' calls, with the reason."""
    comm = set_up(group)
    with Stream() as stream:
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                comm.in_turn("gather", "cuda", interrupted)
        else:
            expect_abort(comm, stream, "was interrupted on rank 0")
    dist.barrier(group)
    comm.close()


def check_far_ahead(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Calls of a rank that is ahead by more than the ring's length are not compared; results stay correct."""
    comm = set_up(group)
    calls = 1100
    kept = []
    with Stream() as stream:
        for turn in range(2):
            if rank == turn:
                dist.barrier(group)
            for n in range(calls):
                kept.append((n, enqueue(comm, "gather", (0,), torch.full((2,), float(calls * rank + n)))))
            if rank != turn:
                dist.barrier(group)
        stream.synchronize()
    for n, got in kept:
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2) * calls + n), n
    wait(comm)
    comm.close()


def check_closed(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """After a rank closed the group, its peers may finish their calls; one more call is rejected."""
    live = ctypes.CDLL("libcuda.so.1").standin_live
    before = live() + 1  # with a stream
    comm = set_up(group)
    x = torch.full((2, world - 1), float(rank))  # the last rank receives nothing
    args = (1, 0, 2 * world)
    with Stream() as stream:
        if rank == world - 1:
            enqueue(comm, "all_to_all", args, x)
            comm.close()
            within(5, lambda: live() <= before)  # the close is published when the call is complete
            dist.barrier(group)
            dist.barrier(group)
            return
        dist.barrier(group)
        got = enqueue(comm, "all_to_all", args, x)
        stream.synchronize()
        assert torch.equal(got[:, 0], torch.arange(float(world)).repeat_interleave(2))
        with pytest.raises(spar.GroupBrokenError, match=f"rank {world - 1} closed the group before call 2"):
            enqueue(comm, "all_to_all", args, x)
    dist.barrier(group)
    comm.close()
