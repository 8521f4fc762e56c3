"""The nccl transport over stand-in libraries: what its ranks do when something goes wrong."""

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
    expect_broken,
    give,
    set_up,
    stalled,
    wait,
    within,
)
from spar._runtime.channel import Operation
from spar._runtime.communicator import Communicator
from spar._runtime.transports import nccl


def check_absent(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank that does not come: the call has returned; the stream goes on when the limit is over."""
    comm = set_up(group)
    comm.timeout = 1.0
    if rank != 0:
        with Stream() as stream:
            begin = time.monotonic()
            give(comm, "gather", (0,), torch.zeros(2))
            stream.synchronize()  # ended by the abort
            assert 0.9 < time.monotonic() - begin < 2.0
            expect_broken(
                comm,
                spar.ExchangeTimeoutError,
                r"in time; not called by rank 0 \(process \d+\) \(limit 1 s, SPAR_TIMEOUT\)",
            )
    dist.barrier(group)
    comm.close()


def check_wait(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """wait returns when all is over, and tells what broke."""
    comm = set_up(group)
    x = torch.full((1000,), float(rank))
    with Stream():
        got = give(comm, "gather", (0,), x)
        wait(comm)
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(1000))
        dist.barrier(group)
        comm.timeout = 1.0
        with stalled():
            give(comm, "gather", (0,), x)
        with pytest.raises(spar.ExchangeTimeoutError, match="did not finish call 2 in time"):
            core_of(comm).wait(time.monotonic() + 0.2)
        within(3, lambda: core_of(comm).broken is not None)  # or it would hold the device until then
    dist.barrier(group)
    comm.close()


def expect_told(comm: Communicator, stream: Stream, text: str) -> None:
    """Another rank gives up: this one's call ends half a second later at most, and the next says why."""
    with contextlib.suppress(spar.GroupBrokenError):  # if the other was earlier
        give(comm, "gather", (0,), torch.zeros(2))
    within(0.5, lambda: core_of(comm).broken is not None)
    stream.synchronize()
    with pytest.raises(spar.GroupBrokenError, match=text):
        give(comm, "gather", (0,), torch.zeros(2))


def check_error_at_once(rank: int, world: int, group: dist.ProcessGroup, function: str) -> None:
    """What NCCL refuses in the call: its last error's text, on the rank where it happens."""
    comm = set_up(group)
    comm.timeout = 1.0
    with Stream() as stream:
        if rank == world - 1:
            os.environ["STANDIN_NCCL_FAIL"] = f"{function}:1"
            with pytest.raises(
                spar.TransportError, match=f"nccl{function}: system error: the stand-in"
            ) as caught:
                give(comm, "gather", (0,), torch.zeros(2))
            os.environ.pop("STANDIN_NCCL_FAIL")
            assert caught.value.op == "gather"
            with pytest.raises(spar.GroupBrokenError, match=f"nccl{function}: system error"):
                give(comm, "gather", (0,), torch.zeros(2))
        else:
            text = f"rank {world - 1}: nccl{function}: system error: the stand-in"
            expect_told(comm, stream, text)
    dist.barrier(group)
    comm.close()


def check_error_later(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """What only ncclCommGetAsyncError tells: seen without a call; the stream goes on, a call raises."""
    comm = set_up(group)
    with Stream() as stream:
        with stalled("remote"):
            give(comm, "gather", (0,), torch.zeros(2))
        begin = time.monotonic()
        stream.synchronize()
        assert time.monotonic() - begin < 1.0
        expect_broken(comm, spar.TransportError, "remote error: the stand-in's remote error")
    dist.barrier(group)
    comm.close()


def check_refused(
    rank: int, world: int, group: dist.ProcessGroup, variable: str, fault: str, why: str
) -> None:
    """Where one rank cannot, all leave the transport together, and know why."""
    if rank == 0:
        os.environ[variable] = fault
    comm = set_up(group)
    os.environ.pop(variable, None)
    chosen = comm.transport("cuda")
    assert chosen.name == "torch", chosen
    assert [name for name, _ in chosen.rejected] == ["shm", "nccl"]
    assert re.search(f"rank 0: .*{why}", chosen.rejected[1][1]), chosen
    within(3, lambda: spar.memory_stats()["staging.allocated_bytes"] == 0)
    comm.close()


def check_no_meeting(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A rank whose NCCL cannot be connected: its peers leave NCCL's set-up with it, long before the limit."""
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
        f"rank {last}: ncclCommInitRank: system error: the stand-in.*", chosen.rejected[1][1]
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
        with failed, comm.turn("gather"):
            comm.set_up("gather", DEVICE, comm.deadline())
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
        with pytest.raises(kind) as caught, comm.turn("gather"):
            comm.set_up("gather", DEVICE, comm.deadline())
        if rank != 0:
            assert "rank 0 failed: ZeroDivisionError" in str(caught.value), caught.value
    assert time.monotonic() - begin < 2
    check_works(comm, rank, world)


def check_works(comm: Communicator, rank: int, world: int) -> None:
    with comm.turn("gather"):
        comm.set_up("gather", DEVICE, comm.deadline())
    assert comm.transport("cuda").name == "nccl"
    with Stream() as stream:
        got = give(comm, "gather", (0,), torch.full((2,), float(rank)))
        stream.synchronize()
    assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
    dist.barrier(comm.group)
    comm.close()


def check_death(rank: int, world: int, group: dist.ProcessGroup, folder: str, when: str) -> None:
    """A peer that is killed, before a call or in it: all others know, long before the limit."""
    comm = set_up(group)
    with Stream() as stream:
        give(comm, "gather", (0,), torch.zeros(2))
        stream.synchronize()
        dist.barrier(group)
        if rank == 0 and when == "before it":
            os.kill(os.getpid(), signal.SIGKILL)
        with stalled() if when == "in it" else contextlib.nullcontext():
            give(comm, "gather", (0,), torch.zeros(2))
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
    """A rank whose calls are over, and which ends, is no failure, however late the others' streams are."""
    comm = set_up(group)
    x = torch.full((2, world - 1), float(rank))  # of which the last rank gets nothing
    args = (1, 0, 2 * world)
    with Stream() as stream:
        if rank == world - 1:
            give(comm, "all_to_all", args, x)
            stream.synchronize()
            ctypes.CDLL(None).exit(0)  # multiprocessing's own end leaves out what is to be done at exit
        slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda unused: time.sleep(2.5))
        ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream.handle, slow, None)
        begin = time.monotonic()
        got = give(comm, "all_to_all", args, x)
        stream.synchronize()
        assert time.monotonic() - begin > 2
    assert torch.equal(got[:, 0], torch.arange(float(world)).repeat_interleave(2))
    assert core_of(comm).broken is None
    comm.close()


# ---- what ranks of one host tell each other ----


def check_disagreement(rank: int, world: int, group: dist.ProcessGroup, late: int) -> None:
    """Who comes later finds the difference before it gives anything to its stream; the others' calls end."""
    comm = set_up(group)
    x = torch.zeros(2, 3 + (rank == late))
    with Stream() as stream:
        begin = time.monotonic()
        if rank != late:
            give(comm, "gather", (0,), x)
        dist.barrier(group)
        if rank == late:
            with pytest.raises(spar.MismatchError) as caught:
                give(comm, "gather", (0,), x)
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
                give(comm, "gather", (0,), x)
        with pytest.raises(spar.GroupBrokenError, match=f"rank {late}'s call 1 over the GPU is not rank"):
            give(comm, "gather", (0,), x)
        assert time.monotonic() - begin < 5
    dist.barrier(group)
    comm.close()


def check_gathered_sizes(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A mismatch carries what each rank holds of the gathered dim."""
    comm = set_up(group)
    last = world - 1
    with Stream() as stream:
        if rank != last:
            give(comm, "gather", (1,), torch.zeros(2, 4))
        dist.barrier(group)
        if rank == last:
            with pytest.raises(spar.MismatchError) as caught:
                give(comm, "gather", (1,), torch.zeros(2, 5))
            assert caught.value._gathered_sizes == (1, [4] * last + [5])
        stream.synchronize()
    dist.barrier(group)
    comm.close()


def check_unchecked(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """SPAR_CHECK=0 compares nothing: calls whose blocks have the same sizes pass."""
    comm = set_up(group, SPAR_CHECK="0")
    with Stream():
        got = give(comm, "gather", (0,), torch.full((2, 3) if rank else (3, 2), float(rank)))
        wait(comm)
    assert torch.equal(got.flatten(), torch.arange(float(world)).repeat_interleave(6))
    comm.close()


def check_failures(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A call that no rank can make leaves the group as it was; one that one rank cannot breaks it for all."""
    comm = set_up(group)
    x = torch.full((2,), float(rank))
    with Stream() as stream:
        comm.fail("gather", "cuda", ValueError("all of them"))
        dist.barrier(group)
        got = give(comm, "gather", (0,), x)
        stream.synchronize()
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
        dist.barrier(group)
        if rank == 0:
            comm.fail("gather", "cuda", RuntimeError("no memory for it"))
        else:
            with contextlib.suppress(spar.MismatchError):  # rank 0 may have been earlier
                give(comm, "gather", (0,), x)
        within(2, lambda: core_of(comm).broken is not None or rank == 0)
        stream.synchronize()
        dist.barrier(group)
        with pytest.raises(spar.SparError, match="failed: RuntimeError: no memory for it"):
            give(comm, "gather", (0,), x)
    dist.barrier(group)
    comm.close()


def check_own_failure(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """What fails in Python before a call: here, an output that torch cannot allocate."""
    comm = set_up(group)
    if rank == 0:
        x: Any = SimpleNamespace(
            is_cpu=False,
            is_conj=lambda: False,
            is_neg=lambda: False,
            device=DEVICE,
            dtype=torch.float32,
            shape=(2,),
            element_size=lambda: 4,
            stride=lambda: (1,),
            get_device=lambda: 0,
        )
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            comm.exchange(Operation("gather", (0,), 1.0, False, False), x)
        assert not isinstance(caught.value, spar.SparError)
    dist.barrier(group)
    if rank != 0:
        with Stream(), pytest.raises(spar.MismatchError, match=r"rank 0: failed: (Runtime|Assertion)Error"):
            give(comm, "gather", (0,), torch.zeros(2))
    dist.barrier(group)
    comm.close()


def check_interrupt(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Ctrl-C on one rank: the others' calls end, and tell why."""
    comm = set_up(group)
    with Stream() as stream:
        if rank == 0:
            with pytest.raises(KeyboardInterrupt), comm.turn("gather"):
                raise KeyboardInterrupt
        else:
            expect_told(comm, stream, "was interrupted on rank 0")
    dist.barrier(group)
    comm.close()


def check_far_ahead(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Who is further ahead than is remembered is not compared with, and nothing else changes."""
    comm = set_up(group)
    calls = 1100
    kept = []
    with Stream() as stream:
        for turn in range(2):
            if rank == turn:
                dist.barrier(group)
            for n in range(calls):
                kept.append((n, give(comm, "gather", (0,), torch.full((2,), float(calls * rank + n)))))
            if rank != turn:
                dist.barrier(group)
        stream.synchronize()
    for n, got in kept:
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2) * calls + n), n
    wait(comm)
    comm.close()


def check_closed(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Who closes the group has made its calls: the others may still be at them, and one more is refused."""
    comm = set_up(group)
    x = torch.full((2, world - 1), float(rank))  # of which the last rank gets nothing
    args = (1, 0, 2 * world)
    with Stream() as stream:
        if rank == world - 1:
            give(comm, "all_to_all", args, x)
            comm.close()
            dist.barrier(group)
            dist.barrier(group)
            return
        dist.barrier(group)
        time.sleep(0.3)  # the goodbye comes when the call is over
        got = give(comm, "all_to_all", args, x)
        stream.synchronize()
        assert torch.equal(got[:, 0], torch.arange(float(world)).repeat_interleave(2))
        with pytest.raises(spar.GroupBrokenError, match=f"rank {world - 1} closed the group before call 2"):
            give(comm, "all_to_all", args, x)
    dist.barrier(group)
    comm.close()
