# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of a call's host time: which functions in Python it enters, and which it calls of
the driver, in a group that pushes over the stand-ins.

The tensors are real ones, of the CPU, and outputs that peers write to are tensors over the slot. So all of
torch and spar runs that calls of CUDA tensors pass through, but torch's allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import spar
from helpers.nccl_ranks import Stream, set_up, wait
from helpers.push_direct import ON_DEVICE, Pool
from spar._group import registry
from spar._group.group import Group
from spar._transports import push
from spar._transports.cuda import OutputPool

SPAR, TESTS = str(Path(spar.__file__).parent), str(Path(__file__).parent)
Cost = tuple[
    list[str], dict[str, int]
]  # the functions that were entered, in their order; calls of the driver


class TensorPool(Pool):
    """A pool of tensors of torch, which has one segment for each size, and never frees it."""

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size, segments = math.prod(shape) * dtype.itemsize, self.free.setdefault(0, [])
        if size not in [block[1] for block in segments]:
            segments.append((self._segment(size), size))
        (address,) = [block[0] for block in segments if block[1] == size]
        return _tensor_at(address, shape, dtype)


def _tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _pooled(device: torch.device) -> OutputPool:
    pool = TensorPool()
    return OutputPool(pool.begin, pool.end, pool.release, pool)


@contextlib.contextmanager
def pushing(group: dist.ProcessGroup) -> Iterator[Group]:
    """Let exchanges of CPU tensors on the group push, as those of CUDA tensors do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push, "pooled_empty", _pooled)
        comm = set_up(group)
        assert comm.transport("cuda").name == "push"
        patch.setitem(registry.by_process_group, id(group), comm)
        comm.channels["cpu"], comm.transports["cpu"] = comm.channels["cuda"], comm.transports["cuda"]
        yield comm
        wait(comm)
        comm.close()


def is_of_spar(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(SPAR)


def cost(call: Callable[[], object]) -> Cost:
    """Return which functions of spar a call enters, and those of torch that they call; and of the driver."""
    frames: list[str] = []
    calls = ctypes.CDLL("libcuda.so.1").standin_calls
    calls.restype = ctypes.c_char_p

    def note(frame: FrameType, event: str, argument: object) -> None:
        is_stand_in = frame.f_code.co_filename.startswith(TESTS)
        if event == "call" and not is_stand_in and (is_of_spar(frame) or is_of_spar(frame.f_back)):
            frames.append(frame.f_code.co_name)

    gc.disable()
    calls()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        found = calls().decode()
        gc.enable()
    return frames, {name: int(count) for name, count in map(str.split, found.splitlines())}


def costs(rank: int, world: int, group: dist.ProcessGroup) -> dict[str, Cost]:
    """Return the cost of repeated calls of each kind, each of whose outputs is checked."""
    found: dict[str, Cost] = {}
    with pushing(group), Stream() as stream:

        def repeat(kind: str, x: torch.Tensor, is_direct: bool) -> torch.Tensor:
            outputs: list[torch.Tensor] = []
            for _ in range(3):
                outputs.clear()
                found[kind] = cost(lambda: outputs.append(spar.all_to_all(x, group, 1, 0)))
                stream.synchronize()
            wanted = [numbers(p, x.size(0)).tensor_split(world, 1)[rank] for p in range(world)]
            y, address = outputs[0], outputs[0].data_ptr()
            assert bool(address & ON_DEVICE) == is_direct
            got = _tensor_at(address & ~ON_DEVICE, y.shape, y.dtype) if is_direct else y
            assert torch.equal(got, torch.cat(wanted))
            return y

        for kind, rows in (("packed", 4), ("direct", 400)):
            repeat(kind, numbers(rank, rows), kind == "direct")
        x = numbers(rank, 4).requires_grad_()
        y = repeat("recorded", x, False)
        gradient = torch.ones_like(y)
        back: list[torch.Tensor] = []
        for _ in range(3):
            back.clear()
            found["backward"] = cost(lambda: back.extend(torch.autograd.grad(y, x, gradient, True)))
            stream.synchronize()
            assert torch.equal(back[0], torch.ones_like(x))
    return found


def numbers(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 60.0).view(rows, 60) + 1000 * rank
