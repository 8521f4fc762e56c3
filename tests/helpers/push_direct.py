# SPDX-License-Identifier: Apache-2.0
"""The ranks' side of tests of direct outputs, over stand-in libraries: outputs in the slots of push."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spar
from helpers.nccl_ranks import OnDevice, Stream, allocator, core_of, driver, set_up, wait, within
from helpers.push_ranks import settle
from helpers.tables import numbers
from spar import _C
from spar._group.group import Group
from spar._transports import cuda, push
from spar._transports.cuda import OutputPool
from spar._transports.dtypes import ITEM_TYPES

ON_DEVICE = 1 << 50  # tests/standin/memory.h


class Pool:
    """torch's pool, in short: it takes segments from the core, and uses what is freed again at once, in the
    order of its stream, where work overwrites it.

    users: calls that have begun to allocate in it, and not released it.
    """

    def __init__(self) -> None:
        self.users = 0
        core = ctypes.CDLL(_C.__file__)
        core.spar_outputs_allocate.restype = ctypes.c_void_p
        self.core, self.state = core, {"open": True}
        self.free: dict[int, list[tuple[int, int]]] = {}  # by stream: address and size
        weakref.finalize(self, _close, core, self.state, self.free).atexit = False

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
        count, stream = math.prod(shape), Stream.current
        size = max(512, (count * dtype.itemsize + 511) // 512 * 512)
        free = self.free.setdefault(stream, [])
        fitting = [block for block in free if block[1] == size]
        address = fitting[-1][0] if fitting else self._segment(size)
        if fitting:
            free.remove(fitting[-1])
        place = ctypes.c_void_p(address & ~ON_DEVICE)
        memory = (ctypes.c_char * size).from_address(place.value or 0)
        x = torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        output: Any = OnDevice(x.view(shape))
        output.tensor, output.address, output.data_ptr = x.view(shape), address, lambda: address
        what = self.core, self.state, free, (address, size), stream
        weakref.finalize(output, _release, *what).atexit = False
        return output

    def begin(self) -> None:
        assert allocator.pool is None and self.users == 0
        allocator.pool, self.users = self, 1

    def end(self) -> None:
        assert allocator.pool is self
        allocator.pool = None

    def release(self) -> None:
        assert allocator.pool is None
        self.users -= 1

    def _segment(self, size: int) -> int:
        address: int = self.core.spar_outputs_allocate(ctypes.c_size_t(size), 0, None)
        return address


def _release(core: Any, state: dict[str, bool], free: list[Any], block: tuple[int, int], stream: int) -> None:
    memory = ctypes.c_void_p(block[0]), ctypes.c_size_t(block[1])
    if state["open"]:
        ctypes.CDLL("libcuda.so.1").standin_spoil(ctypes.c_void_p(stream), *memory)
        free.append(block)
    else:
        core.spar_outputs_free(*memory, 0, None)


def _close(core: Any, state: dict[str, bool], free: dict[int, list[tuple[int, int]]]) -> None:
    state["open"] = False
    for blocks in free.values():
        for address, size in blocks:
            core.spar_outputs_free(ctypes.c_void_p(address), ctypes.c_size_t(size), 0, None)


def _pooled(device: torch.device) -> OutputPool:
    pool = Pool()
    return OutputPool(pool.begin, pool.end, pool.release, pool)


push.pooled_empty = _pooled


def exchange(comm: Group, op: str, args: tuple[int, ...], xs: list[torch.Tensor]) -> list[Any]:
    """Enqueue one exchange of several tensors in the current stream; return its outputs."""
    layouts = tuple(numbers(op, args, x.shape, comm.world) for x in xs)
    codes = ITEM_TYPES[xs[0].dtype].scale, False, 1.0, 0
    text = f" of {xs[0].dtype} on cuda"
    core = _C.Exchange(op, text, comm.world, comm.rank, xs[0].element_size(), layouts, *codes)
    inputs: Any = [OnDevice(x) for x in xs]
    outputs: list[Any] = comm.exchange(op, "cuda", core, inputs)
    _kept.append([*xs, *[each for each in outputs if isinstance(each, torch.Tensor)]])
    return outputs


_kept: list[list[torch.Tensor]] = []  # unlike CUDA's, CPU memory may be reused as soon as it is freed


def numbered(turn: int, rank: int, rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) + 10000 * turn + 1000 * rank


def wanted(turn: int, rank: int, sizes: list[int], columns: int) -> torch.Tensor:
    """all_to_all of `numbered` rows of all ranks: this rank's columns of each."""
    parts = [numbered(turn, p, rows, columns) for p, rows in enumerate(sizes)]
    return torch.cat([part.tensor_split(len(sizes), 1)[rank] for part in parts])


def values(output: Any) -> torch.Tensor:
    x: torch.Tensor = getattr(output, "tensor", output)  # those of no pool are tensors
    return x


def lies_in_slot(output: Any) -> bool:
    return _C.in_slot(getattr(output, "address", 0))


def check_outputs(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Outputs that are kept until the slot is full, and beyond; then freed in another order, and new ones."""
    comm = set_up(group)
    sizes, columns = [40 + (p == 0) for p in range(world)], 100 * world + 1
    kept: list[Any] = []

    def call(turn: int) -> Any:
        x = numbered(turn, rank, sizes[rank], columns)
        return exchange(comm, "all_to_all", (1, 0, sum(sizes)), [x])[0]

    with Stream() as stream:
        for turn in range(60):  # ranks differ in what they keep
            output = call(turn)
            if rank or turn < 20:
                kept.append((turn, output))
        stream.synchronize()
        for turn, output in kept:
            assert torch.equal(values(output), wanted(turn, rank, sizes, columns)), turn
        inside = [lies_in_slot(output) for _, output in kept]
        assert inside[0] and not all(inside), inside
        first = kept[0][1].address
        del kept[1::2]
        addresses = []
        for turn in range(100, 160):  # each takes what one before had, which the stream still writes to
            output = call(turn)
            addresses += [output.address] if lies_in_slot(output) else []
        stream.synchronize()
        assert torch.equal(values(output), wanted(turn, rank, sizes, columns))
        assert first not in addresses and len(set(addresses)) < len(addresses)
        for turn, output in kept:
            assert torch.equal(values(output), wanted(turn, rank, sizes, columns)), turn
        kept.clear()
    wait(comm)
    comm.close()


def check_lists_and_gradients(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Several tensors in one call on two streams, of which some ranks' outputs are in the slot, and back."""
    comm = set_up(group)
    streams, rows = [Stream(), Stream()], 16 * world
    channel: Any = comm.channels["cuda"]
    if rank == 0:
        pool = Mixed(channel.pooled.memory)
        channel.pooled = OutputPool(pool.begin, pool.end, pool.release, pool)
    kept = []
    for turn in range(4):
        xs = [numbered(turn + k, rank, 16, 80 * world - k * world) for k in range(3)]
        with streams[turn % 2]:
            outputs = exchange(comm, "all_to_all", (1, 0, rows), xs)
            backs = [
                exchange(comm, "all_to_all", (0, 1, x.shape[1]), [values(y)])[0]
                for x, y in zip(xs, outputs, strict=True)
            ]
        kept.append((xs, outputs, backs))
    for stream in streams:
        stream.synchronize()
    for turn, (xs, outputs, backs) in enumerate(kept):
        for k, (x, output, back) in enumerate(zip(xs, outputs, backs, strict=True)):
            assert torch.equal(values(output), wanted(turn + k, rank, [16] * world, 80 * world - k * world))
            assert torch.equal(values(back), x), turn
        assert rank or [lies_in_slot(output) for output in outputs] == [False, True, False]
    del kept, xs, outputs, backs, output, back
    wait(comm)
    comm.close()


class Mixed(Pool):
    """A pool in whose slot is only the second output of a call of three, and each of the ways back."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool, self.calls = pool, 0

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
        self.calls += 1
        if self.calls % 6 not in (1, 3):
            return self.pool(shape, strides, dtype)
        x = torch.empty(shape, dtype=dtype)
        output: Any = OnDevice(x)
        output.tensor, output.address = x, output.data_ptr()
        return output


def slots() -> tuple[int, int]:
    """The bytes of this process's slots, and of them those of outputs."""
    return _C.device_stats()[2:]


def check_full(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A call whose second output cannot be allocated leaves the pool, and the group usable."""
    comm = set_up(group)
    channel: Any = comm.channels["cuda"]
    pool = channel.pooled.memory
    shapes: list[tuple[int, ...]] = []

    class Full(Pool):
        def __call__(self, shape: tuple[int, ...], *rest: Any) -> Any:
            shapes.append(shape)
            if len(shapes) == 2:
                raise torch.OutOfMemoryError("no bytes for the second output")
            return pool(shape, *rest)

    full = Full()
    channel.pooled = OutputPool(full.begin, full.end, full.release, full)
    xs = [numbered(k, rank, 40, 100) for k in range(2)]
    with Stream() as stream:
        with pytest.raises(torch.OutOfMemoryError, match="second output"):
            exchange(comm, "all_to_all", (1, 0, 40 * world), xs)
        assert shapes == [(40 * world, 100 // world)] * 2 and (allocator.pool, full.users) == (None, 0)
        dist.barrier(group)
        got = exchange(comm, "all_to_all", (1, 0, 40 * world), xs)
        stream.synchronize()
    assert all(torch.equal(values(y), wanted(k, rank, [40] * world, 100)) for k, y in enumerate(got))
    assert full.users == 0
    wait(comm)
    comm.close()


def check_close(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Outputs outlive their group; the slot goes when its last segment is returned."""
    comm = set_up(group)
    with Stream() as stream:
        outputs = exchange(comm, "all_to_all", (1, 0, 40 * world), [numbered(1, rank, 40, 100)])
        stream.synchronize()
    assert lies_in_slot(outputs[0])
    wait(comm)
    dist.barrier(group)
    comm.close()
    del comm
    settle()
    before = slots()
    assert lies_in_slot(outputs[0])
    assert torch.equal(outputs[0].tensor, wanted(1, rank, [40] * world, 100))
    outputs.clear()
    gc.collect()
    within(5, lambda: slots()[0] < before[0] and slots()[1] < before[1])
    dist.barrier(group)


def check_close_in_capture(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A group that is closed beside a capture keeps its outputs' memory: the capture is valid."""
    comm, graph = set_up(group), ctypes.c_void_p()
    with Stream() as stream:
        output = exchange(comm, "all_to_all", (1, 0, 40 * world), [numbered(1, rank, 40, 100)])
        stream.synchronize()
        assert lies_in_slot(output.pop())
        driver("cuStreamBeginCapture", stream.handle, ctypes.c_int(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "_capturing", lambda: True)
            comm.close()
        time.sleep(0.2)  # the watchdog frees the rest
        driver("cuStreamEndCapture", stream.handle, ctypes.pointer(graph))
    driver("cuGraphDestroy", graph)
    dist.barrier(group)


def check_growth(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Slots grow where an image has no room, and where a rank's outputs had none; not beyond the cap."""
    settle()
    before = slots()[0]
    comm = set_up(group, SPAR_PUSH_SLOT=6400 << 10)
    columns = 1024 * world
    assert slots()[0] - before == 800 << 10  # behind two halves of as much

    def call(turn: int, kib: int) -> Any:
        rows = kib // 4 // world
        x = numbered(turn, rank, rows, columns)
        output = exchange(comm, "all_to_all", (1, 0, rows * world), [x])[0]
        stream.synchronize()
        assert torch.equal(values(output), wanted(turn, rank, [rows] * world, columns)), turn
        return output

    with Stream() as stream:
        kept = [call(turn, 480) for turn in range(4)]
        # The first one's image has no room before the call, nor has the last output behind it.
        assert [lies_in_slot(output) for output in kept] == [False, True, True, False]
        assert slots()[0] - before == (800 + 1600) << 10
        for turn in range(4, 16):  # ranks compare once what they lack
            call(turn, 480)
        assert slots()[0] - before == (800 + 1600 + 2400) << 10
        call(16, 960)  # its image has no room below the cap: packed
        assert slots()[0] - before == (800 + 1600 + 2400) << 10
    del kept
    wait(comm)
    comm.close()


def check_no_growth(rank: int, world: int, group: dist.ProcessGroup, function: str) -> None:
    """Where a rank has no memory, no slot grows, and calls are packed; nothing is lost, and none is tried."""
    settle()
    comm = set_up(group, SPAR_PUSH_SLOT=6400 << 10)
    first, rows = slots()[0], 480 // 4 // world
    with pytest.MonkeyPatch.context() as patch, Stream() as stream:
        if rank == 1:
            patch.setenv("STANDIN_FAIL", f"{function}:1:2")
        for turn in range(2):
            x = numbered(turn, rank, rows, 1024 * world)
            output = exchange(comm, "all_to_all", (1, 0, rows * world), [x])[0]
            stream.synchronize()
            assert torch.equal(values(output), wanted(turn, rank, [rows] * world, 1024 * world))
            assert slots()[0] == first
    wait(comm)
    comm.close()


def check_growth_alone(rank: int, world: int, group: dist.ProcessGroup, makes: str) -> None:
    """A slot grows in a call that the last rank does not make, or for which it makes another one."""
    comm = set_up(group, SPAR_PUSH_SLOT=6400 << 10)
    comm.timeout, last = (1.0 if makes == "none" else 60.0), world - 1
    rows = 480 // 4 // world
    with Stream() as stream:
        dist.barrier(group)
        if rank == last and makes == "another":
            time.sleep(0.5)
            with pytest.raises(spar.MismatchError, match=f"rank {last}'s call 1 over the GPU is not"):
                exchange(comm, "gather", (0,), [torch.zeros(3)])
        begin = time.monotonic()
        if rank != last:
            kind = spar.ExchangeTimeoutError if makes == "none" else spar.MismatchError
            with pytest.raises(kind, match=f"rank {last}") as caught:
                exchange(comm, "all_to_all", (1, 0, rows * world), [numbered(0, rank, rows, 1024 * world)])
            assert makes == "another" or caught.value.ranks == (last,), caught.value
        assert time.monotonic() - begin < 4
        stream.synchronize()
    dist.barrier(group)
    comm.close()


def check_growth_death(rank: int, world: int, group: dist.ProcessGroup, folder: str) -> None:
    """A peer is killed before a call in which slots grow: the others raise which, long before the timeout."""
    comm = set_up(group, SPAR_PUSH_SLOT=6400 << 10)
    rows = 480 // 4 // world
    dist.barrier(group)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    within(5, lambda: core_of(comm).ranks()[0][4])
    with Stream() as stream:
        begin = time.monotonic()
        with pytest.raises(spar.PeerLostError, match=r"rank 0 \(process \d+\) died before") as caught:
            exchange(comm, "all_to_all", (1, 0, rows * world), [numbered(0, rank, rows, 1024 * world)])
        assert caught.value.ranks == (0,) and time.monotonic() - begin < 3
        Path(folder, str(rank)).write_text(str(caught.value).partition(") ")[2])
        stream.synchronize()
    comm.close()


def check_freed(rank: int, world: int, group: dist.ProcessGroup, kib: int) -> None:
    """Calls whose waits end early are over, packed and direct ones: their group's memory is freed."""
    settle()
    before = slots()[0]
    comm = set_up(group)
    comm.timeout, rows = 0.5, kib // 4 // world
    with Stream() as stream:
        if rank == 0:
            exchange(comm, "all_to_all", (1, 0, rows * world), [numbered(0, rank, rows, 1024 * world)])
            stream.synchronize()
            within(3, lambda: comm.channels["cuda"].core.broken is not None)  # type: ignore[union-attr]
        dist.barrier(group)
        comm.close()
        within(5, lambda: slots()[0] == before)
    dist.barrier(group)


def check_broken(rank: int, world: int, group: dist.ProcessGroup, what: str) -> None:
    """If the first exchange finds that GPUs cannot write to each other, all ranks take the next transport."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # what it writes to others does not arrive: words, or signals as well
            patch.setenv("STANDIN_ASTRAY", {"words": "8192", "signals": "0"}[what])
        begin = time.monotonic()
        comm = set_up(group)
        assert time.monotonic() - begin < 7
    transport = comm.transport("cuda")
    assert transport.name == "nccl", transport
    texts = {
        "words": "wrong words from rank 1 in",
        "signals": "rank [0-9] did not send its words in time in",
    }
    assert re.search(f"{texts[what]} the first exchange over push", dict(transport.rejected)["push"])
    comm.close()


def check_remembered(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A group that has all ranks of one whose first exchange failed takes nccl at once; others take push."""
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (0, 2), (0, 1, 2))}
    kept: list[Group] = []

    def rejection(ranks: tuple[int, ...]) -> str:
        dist.barrier(group)
        if rank not in ranks:
            return ""
        kept.append(set_up(groups[ranks]))
        transport = kept[-1].transport("cuda")
        assert transport.name == ("nccl" if "push" in dict(transport.rejected) else "push"), transport
        return dict(transport.rejected).get("push", "")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("STANDIN_ASTRAY", "8192")
        first = rejection((0, 1))
    assert rank == 2 or first == "wrong words from rank 1 in the first exchange over push"
    again = {ranks: rejection(ranks) for ranks in groups}
    text = "rank 0: earlier group: wrong words from rank 1 in the first exchange over push"
    assert again == {(0, 1): text if rank < 2 else "", (0, 2): "", (0, 1, 2): text}
    for comm in kept:
        comm.close()
