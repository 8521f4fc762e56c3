# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the nccl transport over torch's communicators: torch's watchdog and limits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spar
from helpers import torch_nccl
from helpers.nccl_lifetime import setting
from helpers.nccl_ranks import Stream, enqueue, set_up, stalled, wait, within


def check_pointer(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The public property is preferred; without it the private function serves."""
    with torch_nccl.torch_nccl(group) as backend:
        has_property = hasattr(type(backend), "comm_ptr")
        with pytest.MonkeyPatch.context() as patch:
            if has_property:
                patch.delattr(torch_nccl.ProcessGroupNCCL, "_comm_ptr")
                patch.delattr(torch_nccl.ProcessGroupNCCL2, "_comm_ptr")
            comm = set_up(group)
            channel: Any = comm.channels["cuda"]
            assert channel.has_native
            with Stream():
                got = enqueue(comm, "gather", (0,), torch.full((2,), float(rank)))
                wait(comm)
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
        dist.barrier(group)
        comm.close()


def check_several(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Two groups have a communicator of torch's each; an abort ends that of its group only."""
    ranks = list(range(world))
    other = dist.new_group(ranks)
    with torch_nccl.torch_nccl(group) as first, torch_nccl.torch_nccl(other) as second:
        comms = [set_up(group), set_up(other)]
        pointers = [channel.device.native() for channel in (comm.channels["cuda"] for comm in comms)]  # type: ignore[attr-defined]
        assert pointers == [first._comm.value, second._comm.value] and len(set(pointers)) == 2
        with Stream() as stream:
            outputs = [enqueue(comm, "gather", (0,), torch.full((2,), float(rank))) for comm in comms]
            stream.synchronize()
            for output in outputs:
                assert torch.equal(output, torch.arange(float(world)).repeat_interleave(2))
            for comm in comms:
                wait(comm)
            dist.barrier(group)
            first.abort()
            with pytest.raises(spar.SparError, match="torch's communicator is gone"):
                enqueue(comms[0], "gather", (0,), torch.zeros(2))
            enqueue(comms[1], "gather", (0,), torch.zeros(2))
            wait(comms[1])
        dist.barrier(group)
        for comm in comms:
            comm.close()
    dist.destroy_process_group(other)


# ---- errors of the communicator ----


def check_error(rank: int, world: int, group: dist.ProcessGroup, handling: str) -> None:
    """NCCL reports an error after a call: spar raises it, if torch's watchdog leaves the process."""
    with setting(TORCH_NCCL_ASYNC_ERROR_HANDLING=handling), torch_nccl.torch_nccl(group) as backend:
        comm = set_up(group)
        dist.barrier(group)
        with Stream() as stream:
            with stalled("remote"):
                enqueue(comm, "gather", (0,), torch.zeros(2))
                time.sleep(0.3)
            with pytest.raises((spar.TransportError, spar.GroupBrokenError), match="remote error"):
                enqueue(comm, "gather", (0,), torch.zeros(2))
            within(3, backend.has_ended)
            stream.synchronize()
        dist.barrier(group)
        comm.close()
