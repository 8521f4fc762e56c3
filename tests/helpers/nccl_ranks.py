# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of the nccl transport over stand-in libraries. Tensors are on the CPU, as the
stand-in's memory is; spar is given addresses of them that only the stand-in can read and write.

A rank's process has loaded the stand-ins (standins.py) before spar searches for the real libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spar
from helpers.tables import numbers
from helpers.torch_nccl import torch_nccl
from spar import _C
from spar._control import collectives
from spar._group import setup
from spar._group.group import Group
from spar._transports import cuda, nccl
from spar._transports.dtypes import ITEM_TYPES

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def driver(name: str, *args: Any) -> None:
    """Call a function of the stand-in libcuda that only cuGetProcAddress returns, on device 0."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.pointer(context), ctypes.c_int(0))
    _call("cuCtxSetCurrent", context)
    try:
        _call(name, *args)
    finally:
        _call("cuCtxSetCurrent", ctypes.c_void_p())  # spar must not rely on it


def _call(name: str, *args: Any) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    function, found = ctypes.c_void_p(), ctypes.c_int()
    library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(function), 12000, ctypes.c_uint64(0), ctypes.byref(found)
    )
    assert function.value, name
    result = ctypes.CFUNCTYPE(ctypes.c_int, *map(type, args))(function.value)(*args)
    assert result == 0, f"{name}: {result}"


class Stream:
    """A stream of the stand-in, current for the calls inside `with`."""

    current = 0

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        driver("cuStreamCreate", ctypes.pointer(self.handle), ctypes.c_uint(1))

    def __enter__(self) -> Stream:
        self.before, Stream.current = Stream.current, self.handle.value or 0
        return self

    def __exit__(self, *error: object) -> None:
        Stream.current = self.before

    def synchronize(self) -> None:
        driver("cuStreamSynchronize", self.handle)


nccl.stream_of = lambda index: Stream.current


def device_address(address: int) -> int:
    """Return the device's address of memory of the host: only the stand-ins can read or write there."""
    place = ctypes.CDLL("libcuda.so.1").standin_on_device
    place.argtypes, place.restype = [ctypes.c_void_p], ctypes.c_void_p
    return place(address) or 0


class OnDevice:
    """A CPU tensor as a CUDA tensor that spar is given."""

    device = DEVICE

    def __init__(self, x: torch.Tensor, index: int = 0) -> None:
        self.shape, self.stride, self.dtype = x.shape, x.stride, x.dtype
        self.data_ptr = partial(device_address, x.data_ptr())
        self.get_device = lambda: index


class Allocator:
    """Staging memory as torch's allocator has it: what is freed is used again in the order of its stream.

    Here that is at once: the stream overwrites it. Memory of a capture belongs to the graph. Outputs are of
    `pool` while there is one: a call that has begun to allocate in it.
    """

    pool: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Any] | None = None

    def __init__(self) -> None:
        self.free: dict[int, list[torch.Tensor]] = {}  # by stream
        self.kept: list[torch.Tensor] = []
        self.taken: list[int] = []

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
        if self.pool is not None:
            return self.pool(shape, strides, dtype)
        if dtype is not torch.uint8:  # an output
            return torch.empty_strided(shape, strides, dtype=dtype)
        (count,) = shape
        stream, capturing, number = nccl.stream_of(0), ctypes.c_int(), ctypes.c_uint64()
        pointers = ctypes.pointer(capturing), ctypes.pointer(number)
        driver("cuStreamGetCaptureInfo", ctypes.c_void_p(stream), *pointers)
        free = self.free.setdefault(stream, []) if not capturing.value else self.kept
        fitting = [] if capturing.value else [x for x in free if x.numel() >= count]
        memory = fitting[0] if fitting else torch.empty(count, dtype=torch.uint8)
        if fitting:
            free[:] = [x for x in free if x is not memory]
        self.taken.append(count)

        def release() -> None:
            spoil = ctypes.CDLL("libcuda.so.1").standin_spoil
            spoil(ctypes.c_void_p(stream), ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(count))
            free.append(memory)

        view = OnDevice(memory[:count])
        weakref.finalize(view, release).atexit = False
        return view


allocator = nccl.empty = Allocator()


CHOICE = "^push"  # of the transport, as SPAR_TRANSPORT


def communicator(group: dist.ProcessGroup) -> Group:
    """Return a communicator that chooses its transport by CHOICE alone."""
    os.environ["SPAR_TRANSPORT"] = CHOICE
    return Group(group)


def set_up(group: dist.ProcessGroup, device: torch.device = DEVICE, **environment: object) -> Group:
    """Return a communicator that is set up for CUDA tensors, with these settings."""
    comm = communicator(group)
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        comm.channel("init", device)
    finally:
        for name in environment:
            os.environ.pop(name)
    return comm


_kept: list[tuple[torch.Tensor, torch.Tensor]] = []


def enqueue(
    comm: Group,
    op: str,
    args: tuple[int, ...],
    x: torch.Tensor,
    factor: float = 1.0,
    divide: bool = False,
) -> torch.Tensor:
    """Enqueue one exchange in the current stream; return its output."""
    layouts = numbers(op, args, x.shape, comm.world)
    codes = ITEM_TYPES[x.dtype].scale, divide, factor, 0
    core = _C.Exchange(
        op, f" of {x.dtype} on cuda", comm.world, comm.rank, x.element_size(), (layouts,), *codes
    )
    output = torch.full(core.plan([x], _C.SIDE_PULL)[0].out_shapes[0], 7).to(x.dtype)
    channel: Any = comm.channels["cuda"]
    tensors: Any = [OnDevice(each, channel.device.index) for each in (x, output)]
    _kept.append((x, output))  # unlike CUDA's, CPU memory may be reused as soon as it is freed
    comm.exchange(op, "cuda", core, tensors[:1], tensors[1:])
    return output


def core_of(comm: Group) -> _C.Comm:
    core = comm.channels["cuda"].core
    assert core is not None
    return core


def wait(comm: Group) -> None:
    core_of(comm).wait(time.monotonic() + 30)


Cell = tuple[str, tuple[int, ...], list[torch.Tensor], list[torch.Tensor], float, bool]


def exchange_cells(comm: Group, rank: int, cells: list[Cell]) -> None:
    """Enqueue all calls in one stream, and check the outputs when all are complete."""
    kept = []
    with Stream() as stream:
        for op, args, inputs, outputs, factor, divide in cells:
            before = inputs[rank].clone()
            got = enqueue(comm, op, args, inputs[rank], factor, divide)
            kept.append((op, got, outputs[rank], inputs[rank], before))
        stream.synchronize()
    for op, got, wanted, x, before in kept:
        assert got.shape == wanted.shape, op
        assert torch.equal(bits(got), bits(wanted)), f"{op}: {got} {wanted}"
        assert torch.equal(bits(x), bits(before)), f"{op}: an input was modified"
    wait(comm)


def check_cells(rank: int, world: int, group: dist.ProcessGroup, staging: int, cells: list[Cell]) -> str:
    """Check all calls, their alignment, and the staging memory that they take."""
    comm = set_up(group, SPAR_STAGING_MAX=staging)
    transport = comm.transport("cuda")
    assert transport.name == "nccl", transport
    before_total, allocator.taken[:] = spar.memory_stats()["staging.total_bytes"], []
    unaligned = ctypes.CDLL("libnccl.so.2").standin_nccl_unaligned
    already = unaligned()
    exchange_cells(comm, rank, cells)
    assert unaligned() == already, "NCCL copies messages at odd addresses byte by byte"
    whole = max(cell[2][rank].nbytes for cell in cells)  # of an input that is strided, but not cut
    most = max(allocator.taken, default=0)  # none where all calls are small
    assert most <= max(staging, whole + 1024)
    assert most > 0 or whole < 1 << 16
    stats = spar.memory_stats()
    assert stats["staging.total_bytes"] - before_total == sum(allocator.taken)
    assert stats["staging.peak_bytes"] >= most
    comm.close()
    return transport.reason


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def within(seconds: float, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)


@contextlib.contextmanager
def stalled(how: str = "stall") -> Iterator[None]:
    os.environ["STANDIN_NCCL_LATER"] = how
    try:
        yield
    finally:
        os.environ.pop("STANDIN_NCCL_LATER")


def expect_broken(comm: Group, error: type[spar.SparError], text: str) -> None:
    """Check that the next call raises what broke the group, and later ones that it is broken."""
    for kind in (error, spar.GroupBrokenError, spar.GroupBrokenError):
        with pytest.raises(kind, match=text if kind is error else text.split(" \\(limit")[0]) as caught:
            enqueue(comm, "gather", (0,), torch.zeros(2))
        assert type(caught.value) is kind
        assert (caught.value.op, caught.value.rank) == ("gather", comm.rank)


def check_collected(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A closed group keeps no channel, which has torch's communicator."""
    comm = set_up(group)
    with Stream() as stream:
        enqueue(comm, "gather", (0,), torch.zeros(2))
        stream.synchronize()
    channel = weakref.ref(comm.channels["cuda"])
    comm.close()
    del comm
    gc.collect()
    assert channel() is None


# ---- streams ----


def check_streams(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Each call reads its input in stream order; two streams of one group do not interfere."""
    comm = set_up(group, SPAR_STAGING_MAX=4096 * (world - 1))
    streams = [Stream(), Stream()]
    kept = []
    for turn in range(12):
        x = torch.arange(600, dtype=torch.int16).view(30, 20) + 1000 * turn + 100 * rank
        with streams[turn % 2]:
            kept.append((x, enqueue(comm, "all_to_all", (1, 0, 30 * world), x)))
    for stream in streams:
        stream.synchronize()
    for turn, (_, got) in enumerate(kept):
        whole = [
            torch.arange(600, dtype=torch.int16).view(30, 20) + 1000 * turn + 100 * p for p in range(world)
        ]
        wanted = torch.cat([x.tensor_split(world, 1)[rank] for x in whole])
        assert torch.equal(got, wanted), turn
    wait(comm)
    comm.close()


def check_capture(rank: int, world: int, group: dist.ProcessGroup, staging: int) -> None:
    """A captured call moves nothing; each replay reads its current inputs; other calls are not affected.

    The first call of the graph packs, and its inverse unpacks.
    """
    comm = set_up(group, SPAR_STAGING_MAX=staging)
    graph = ctypes.c_void_p()
    x = torch.empty(40, 12)
    with Stream() as stream, Stream() as other:
        enqueue(comm, "all_to_all", (1, 0, 40 * world), x)
        stream.synchronize()
        other.synchronize()
    with stream:
        driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
        got = enqueue(comm, "all_to_all", (1, 0, 40 * world), x, 0.5)
        back = enqueue(comm, "all_to_all", (0, 1, 12), got)
        driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
    for turn in range(3):
        x.copy_(torch.arange(480.0).view(40, 12) + 1000 * rank + turn)
        driver("cuGraphLaunch", graph, stream.handle)
        stream.synchronize()
        wanted = [(torch.arange(480.0).view(40, 12) + 1000 * p + turn) * 0.5 for p in range(world)]
        assert torch.equal(got, torch.cat([w.tensor_split(world, 1)[rank] for w in wanted])), turn
        assert torch.equal(back, x * 0.5), turn
    driver("cuGraphDestroy", graph)
    wait(comm)
    comm.close()


def check_own_beside(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A large part of the rank's own is copied while a peer is absent, not after the wire."""
    comm = set_up(group)
    x = torch.full((world, 1 << 18), float(rank + 1))
    last = rank == world - 1
    with Stream() as stream:
        if last:
            dist.barrier(group)
        got = enqueue(comm, "all_to_all", (0, 1, (1 << 18) * world), x)
        if not last:
            own = got[:, rank << 18 : (rank + 1) << 18]
            within(5, lambda: bool((own == rank + 1).all()))
            assert not bool((got == world).any()), "the last rank has not sent yet"
            dist.barrier(group)
        stream.synchronize()
    assert torch.equal(got[0, :: 1 << 18], torch.arange(1.0, world + 1))
    wait(comm)
    comm.close()


@contextlib.contextmanager
def on_hosts_of_two(rank: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "_host_id", lambda: bytes([1 + rank // 2]) * 16)
        yield


def check_all_gather(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Across hosts NCCL gathers equal parts, wherever they lie; on one host, and other parts, spar sends."""
    library, near = ctypes.CDLL("libnccl.so.2"), set_up(group)
    with on_hosts_of_two(rank):
        far = set_up(group)

    def gather(comm: Group, x: torch.Tensor, rows: int, factor: float = 1.0) -> tuple[torch.Tensor, int]:
        before = library.standin_nccl_gathers()
        got = enqueue(comm, "gather", (0, rows), x, factor)
        stream.synchronize()
        return got, library.standin_nccl_gathers() - before

    parts = [torch.arange(15.0).view(3, 5) + 100 * p for p in range(world)]
    whole, x = torch.cat(parts), parts[rank]
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(3, 5)
    strided = x.t().contiguous().t()
    with Stream() as stream:
        for mine in (x, odd, strided):
            got, gathers = gather(far, mine, 3 * world)
            assert torch.equal(got, whole) and gathers == 1
        for comm, factor in ((near, 1.0), (far, 0.5)):
            got, gathers = gather(comm, x, 3 * world, factor)
            assert torch.equal(got, whole * factor) and gathers == 0
        uneven = [torch.full((3 + (p == 0), 5), float(p)) for p in range(world)]
        got, gathers = gather(far, uneven[rank], 3 * world + 1)
        assert torch.equal(got, torch.cat(uneven)) and gathers == 0
    for comm in (far, near):
        wait(comm)
        comm.close()


def check_hosts(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Between hosts, a call issues no collective of torch in addition to NCCL's sends."""
    with on_hosts_of_two(rank):
        comm = set_up(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_issue", None)
        with Stream() as stream:
            for number in range(3):
                got = enqueue(comm, "gather", (0, 2 * world), torch.full((2,), 10.0 * number + rank))
                stream.synchronize()
                assert torch.equal(got, 10.0 * number + torch.arange(world).repeat_interleave(2))
    transport = comm.transport("cuda")
    assert (transport.name, transport.hosts) == ("nccl", ((0, 1), (2, 3)))
    assert (transport.shared_memory, transport.network) == (0.0, 2 / 3)
    wait(comm)
    comm.close()


def check_native(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """torch's communicator is used, and not freed when the group is closed."""
    with torch_nccl(group) as backend:
        comm = set_up(group)
        x = torch.full((3, 5), float(rank))
        with Stream() as stream:
            got = enqueue(comm, "gather", (0, 3 * world), x)
            stream.synchronize()
            assert torch.equal(got[:, 0], torch.arange(float(world)).repeat_interleave(3))
        dist.barrier(group)
        comm.close()
        time.sleep(0.3)
        assert not backend.has_ended()


def check_check(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """SPAR_CHECK=1: ranks compare before anything is enqueued, and a call returns when it is complete."""
    comm = set_up(group, SPAR_CHECK="1")
    with Stream():
        for _ in range(2):  # the group stays usable
            with pytest.raises(spar.MismatchError, match="calls differ") as caught:
                enqueue(comm, "gather", (0,), torch.zeros(2, 3 if rank == 0 else 4))
            assert caught.value.ranks == (0,)
        got = enqueue(comm, "gather", (0,), torch.full((2,), float(rank)))
        assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
    wait(comm)
    comm.close()


def check_uncapturable(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Setting a group up in a capture raises before anything is captured or sent."""
    comm = communicator(group)
    capturing, cuda._capturing = cuda._capturing, lambda: rank == 0
    try:
        for _ in range(2 if rank == 0 else 0):
            with pytest.raises(
                spar.SparError, match=r"init cannot be captured .* not set up yet; call spar.init"
            ):
                comm._set_up("init", DEVICE, comm.deadline())
            assert comm.transport("cuda").name is None
    finally:
        cuda._capturing = capturing
    comm.channel("init", DEVICE)  # no peer waited, and the group is not broken
    with Stream():
        got = enqueue(comm, "gather", (0,), torch.full((2,), float(rank)))
        wait(comm)
    assert torch.equal(got, torch.arange(float(world)).repeat_interleave(2))
    comm.close()
