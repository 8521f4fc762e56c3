# SPDX-License-Identifier: Apache-2.0
"""Check and time ranks over push whose kernels run at the same time: streams of one process on one GPU.

Random uneven calls, replays of graphs, times beside a copy of all ranks' bytes, and calls that must end by
their limits: without a peer, and with more CTAs than fit the GPU. Slots grow as the calls need. No time has a
wire in it: all slots are memory of one GPU.
"""

from __future__ import annotations

import os
import random
import sys
import time
from functools import partial
from typing import NamedTuple

# Streams that share one of 8 connections, the default, run one after another: a wait would block its peer.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import gpu_core
import torch
from gpu_core import MIB, Gpu
from push_streams import Exchange, Group, PushCall, slot_limit
from report import Report, stage

ROW = 256  # bytes
LEAD = 4_000_000  # cycles, in which the host enqueues all ranks' calls
CROWD = 8  # ranks with too many CTAs
LIMIT_S, END_S = 2.0, 15.0  # the limit of calls that may not end by themselves; by then they have


class Sizes(NamedTuple):
    """What a run has on a GPU, or over stand-ins."""

    seconds: float  # of random calls in each group
    groups: tuple[tuple[int, int], ...]  # ranks, and the bytes that a slot may have
    worlds: tuple[int, ...]  # whose groups exist at the same time
    slot: int  # bytes that each of their slots may have
    replayed: tuple[int, ...]  # bytes of a rank in calls of graphs
    calls: int  # of a graph
    timed: tuple[int, ...]  # bytes of a rank
    turns: int


def on_gpu() -> Sizes:
    worlds = (2, 4, 8)
    slot = slot_limit(sum(worlds))
    return Sizes(
        2.0,
        ((2, slot), (2, MIB), (3, MIB // 4), (4, slot), (8, 16 * MIB)),
        worlds,
        slot,
        (2 << 10, 64 << 10, MIB),
        50,
        tuple(each * MIB for each in (2, 8, 24, 64, 192)),
        7,
    )


OVER_STAND_INS = Sizes(
    0.5, ((2, MIB), (3, MIB), (8, MIB)), (2, 4), 4 * MIB, (2 << 10,), 3, (64 << 10, MIB // 2), 1
)


def fitting_ctas(world: int) -> int:
    """Return the CTAs of each rank with which all ranks' fit the GPU; 0: those that push chooses do.

    An SM has room for two: 512 threads with 64 registers each.
    """
    if world == 2 or gpu_core.machine.device != "cuda":
        return 0
    return 2 * torch.cuda.get_device_properties(0).multi_processor_count * 10 // 11 // world


def all_calls(group: Group, exchange: Exchange, draw: random.Random | None = None) -> list[PushCall]:
    """Return each rank's call. Outputs are direct where they can be, or where they can and a draw says so."""
    calls = []
    for rank, (x, plan) in enumerate(zip(exchange.inputs, exchange.plans, strict=True)):
        y = torch.full_like(exchange.wanted[rank], 0xEE) if draw and draw.random() < 0.5 else None
        calls.append(group.call(rank, plan, x, y))
    return calls


def images(group: Group, exchange: Exchange) -> list[PushCall]:
    """Return each rank's call with an output of ordinary memory."""
    outputs = map(torch.empty_like, exchange.wanted)
    return [
        group.call(rank, plan, x, y)
        for rank, (plan, x, y) in enumerate(zip(exchange.plans, exchange.inputs, outputs, strict=True))
    ]


def wrong_outputs(exchange: Exchange, calls: list[PushCall]) -> list[int]:
    """Return the ranks whose outputs are wrong."""
    pairs = enumerate(zip(calls, exchange.wanted, strict=True))
    return [rank for rank, (call, wanted) in pairs if not torch.equal(call.output, wanted)]


def random_exchange(draw: random.Random, world: int) -> Exchange:
    item = draw.choice([1, 2, 4, 16])
    tokens = draw.randint(world, draw.choice([64, 512, 4096]))
    whole = gpu_core.random_bytes(tokens, draw.randint(world, 3 * world), item * draw.randint(1, 64))
    return Exchange(whole, world, item)


def check_random_calls(report: Report, world: int, slot: int, seconds: float) -> None:
    """Make calls, up to four at once, of which some ranks are late; compare all outputs."""
    group, draw = Group(world, slot, fitting_ctas(world)), random.Random(world)
    what = f"{world} ranks, slots of at most {slot >> 10} KiB"
    made = direct = wrong = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        exchanges = [random_exchange(draw, world) for _ in range(draw.randint(1, 4))]
        calls = [all_calls(group, exchange, draw) for exchange in exchanges]
        gpu_core.machine.synchronize()  # the streams do not wait for the one that made the tensors
        order = draw.sample(range(world), world)
        gpu_core.machine.delay(group.streams[order[0]], draw.choice([1, 100_000]))
        for each in calls:
            for rank in order:
                group.run(rank, each[rank])
        failures = group.failures()
        report.expect(not failures, f"{what}: {failures}")
        if failures:
            return
        wrong += sum(map(len, map(wrong_outputs, exchanges, calls)))
        made += world * len(calls)
        direct += sum(call.is_direct for each in calls for call in each)
        del calls
    report.expect(not wrong, f"{what}: {wrong} wrong outputs of {made}")
    report.expect(direct > 0, f"{what}: no output was direct")
    ctas, kib = str(group.ctas or "default"), [each >> 10 for each in memory_of(group).values()]
    report.row(str(world), *map(str, kib), ctas, str(made), str(direct), str(wrong))
    found = {"calls": made, "direct": direct, "wrong": wrong, "slot": memory_of(group)}
    report.figure(f"{world} ranks, {slot >> 10} KiB", found)
    group.close()


def memory_of(group: Group) -> dict[str, int]:
    """Return the bytes of a rank's slot: at first, now, and at most."""
    return {"first": group.first_bytes, "now": group.slot_bytes, "limit": group.limit}


def even_exchange(world: int, size: int, heads: int) -> Exchange:
    """Return an exchange of `size` bytes of each rank, in rows of 256 bytes."""
    return Exchange(gpu_core.random_bytes(max(1, size // (heads * ROW)) * world, heads, ROW), world)


def run_all(group: Group, calls: list[PushCall], count: int) -> None:
    """Make all ranks' calls, between two points of the current stream."""
    gpu_core.machine.fork(group.streams)
    for _ in range(count):
        for rank, call in enumerate(calls):
            group.run(rank, call)
    gpu_core.machine.join(group.streams)


def replay_time(report: Report, group: Group, size: int, sizes: Sizes) -> float:
    """Capture calls in a graph for each rank; return the microseconds of a call in replays."""
    machine, exchange = gpu_core.machine, even_exchange(group.world, size, group.world)
    calls = images(group, exchange)
    machine.synchronize()

    def work(rank: int) -> None:
        for _ in range(sizes.calls):
            group.run(rank, calls[rank], captured=True)

    replays = [machine.capture_on(stream, partial(work, rank)) for rank, stream in enumerate(group.streams)]

    def replay_all() -> None:
        machine.fork(group.streams)
        for replay in replays:
            replay()
        machine.join(group.streams)

    us = gpu_core.microseconds({"graphs": replay_all}, sizes.turns, LEAD)["graphs"] / sizes.calls
    for call in calls:  # what replays wrote last is not to count
        call.output.zero_()
    for x, byte in zip(exchange.inputs, range(1, group.world + 1), strict=True):
        x.fill_(byte)
    machine.synchronize()
    replay_all()
    what = f"{group.world} ranks, {size} bytes in graphs"
    report.expect(not (failures := group.failures()), f"{what}: {failures}")
    parts = [torch.full_like(x[:, :1, :1], byte) for byte, x in enumerate(exchange.inputs, 1)]
    for call in calls:
        report.expect(bool((call.output == torch.cat(parts)).all()), f"{what}: wrong bytes of a replay")
    return us


def time_replays(report: Report, groups: dict[int, Group], sizes: Sizes) -> None:
    report.say()
    report.say(f"Microseconds of a call in graphs of {sizes.calls} calls, by bytes of a rank:")
    report.table("ranks", *(f"{size >> 10} KiB" for size in sizes.replayed))
    for world, group in groups.items():
        us = {size: replay_time(report, group, size, sizes) for size in sizes.replayed}
        report.row(str(world), *(f"{each:.1f}" for each in us.values()))
        report.figure(f"us in graphs, {world} ranks", us)


def time_size(report: Report, group: Group, size: int, turns: int) -> None:
    """Time all ranks' calls, with outputs of push's choice and ordinary ones, beside a copy of all bytes."""
    world, machine = group.world, gpu_core.machine
    if 10 * world * size > machine.free_bytes():  # inputs, outputs and copies of all ranks
        report.say(f"Not run with {world} ranks of {size / MIB:g} MiB: too little memory is free.")
        return
    exchange, count = even_exchange(world, size, 8 * world), 1 if size >= 32 * MIB else 4
    run_all(group, images(group, exchange), 1)  # slots grow: then they have room for direct outputs, too
    chosen, ordinary = all_calls(group, exchange), images(group, exchange)
    whole = torch.cat([x.flatten() for x in exchange.inputs])
    copied = torch.empty_like(whole)
    machine.synchronize()
    ways: gpu_core.Ways = {
        "chosen": partial(run_all, group, chosen, count),
        "ordinary": partial(run_all, group, ordinary, count),
        "copy": lambda: [copied.copy_(whole) for _ in range(count)],
    }
    us = {name: us / count for name, us in gpu_core.microseconds(ways, turns, LEAD).items()}
    what = f"{world} ranks, {size / MIB:g} MiB"
    report.expect(not (failures := group.failures()), f"{what}: {failures}")
    wrong = wrong_outputs(exchange, chosen) + wrong_outputs(exchange, ordinary)
    report.expect(not wrong, f"{what}: wrong outputs of ranks {wrong}")
    direct = sum(call.is_direct for call in chosen)
    cells = f"{us['chosen']:.1f} us", str(direct), f"{us['ordinary']:.1f} us", f"{us['copy']:.1f} us"
    report.row(str(world), f"{size / MIB:g}", *cells, f"{us['chosen'] / us['copy']:.2f}")
    report.figure(f"us, {what}", us | {"direct": direct})


def time_sizes(report: Report, groups: dict[int, Group], sizes: Sizes) -> None:
    report.say()
    ctas = ", ".join(f"{group.ctas or 'the default'} with {world} ranks" for world, group in groups.items())
    report.say(f"All ranks' calls, rows of {ROW} bytes; CTAs of a rank: {ctas}.")
    report.say("Goals: at most 1.35 times a copy from 24 MiB on, 1.2 times from 64 MiB on.")
    columns = ("outputs of push's choice", "of these direct", "ordinary outputs", "a copy", "times a copy")
    report.table("ranks", "MiB a rank", *columns)
    for group in groups.values():
        for size in sizes.timed:
            time_size(report, group, size, sizes.turns)
    report.say()
    for world, group in groups.items():
        memory = memory_of(group)
        first, now, limit = (f"{each / MIB:g}" for each in memory.values())
        report.say(f"Slots of {world} ranks had {first} MiB each at first and {now} after that, of {limit}.")
        report.figure(f"bytes of a slot, {world} ranks", memory)


def check_absence(report: Report, slot: int, size: int) -> None:
    """The last of three ranks makes no call; those of the others end by their limit."""
    group, exchange = Group(3, slot, fitting_ctas(3)), even_exchange(3, size, 3)
    calls = all_calls(group, exchange)
    gpu_core.machine.synchronize()
    begin = time.monotonic()
    for rank in range(2):
        group.run(rank, calls[rank], LIMIT_S)
    failures = group.failures()
    took = time.monotonic() - begin
    report.expect(set(failures) == {0, 1}, f"beside a rank without a call, those with errors: {failures}")
    report.expect(LIMIT_S <= took < END_S, f"calls with a limit of {LIMIT_S} s took {took:.1f} s")
    report.say()
    report.say(f"Without the last of 3 ranks, calls ended after {took:.1f} s: {failures.get(0)}.")
    report.figure("absent", {"seconds": took, "failures": failures})
    group.close()


def check_crowd(report: Report, slot: int, size: int) -> None:
    """Make calls whose CTAs do not all fit: some ranks' kernels begin when those of others have ended."""
    group, exchange = Group(CROWD, slot), even_exchange(CROWD, size, CROWD)
    rounds = [all_calls(group, exchange) for _ in range(2)]
    gpu_core.machine.synchronize()
    begin = time.monotonic()
    for calls in rounds:
        for rank, call in enumerate(calls):
            group.run(rank, call, LIMIT_S)
    failures = group.failures()
    took = time.monotonic() - begin
    wrong = {rank for calls in rounds for rank in wrong_outputs(exchange, calls)}
    report.expect(took < END_S, f"calls with a limit of {LIMIT_S} s took {took:.1f} s")
    report.expect(wrong <= set(failures), f"ranks {wrong - set(failures)}: wrong outputs without an error")
    how = f"{len(failures)} ranks failed: {min(failures.items())[1]}" if failures else "all bytes were right"
    report.say()
    report.say(f"{CROWD} ranks with the default number of CTAs: ended after {took:.1f} s; {how}.")
    report.figure("crowd", {"seconds": took, "failures": failures, "wrong": sorted(wrong)})
    group.close()
    later = Group(CROWD, slot, fitting_ctas(CROWD))
    calls = all_calls(later, exchange)
    gpu_core.machine.synchronize()
    run_all(later, calls, 1)
    is_right = not (failures := later.failures()) and not wrong_outputs(exchange, calls)
    report.expect(is_right, f"a group after it: {failures or 'wrong bytes'}")
    later.close()


def main() -> int:
    report, options = stage(__doc__)
    if options.stand_ins:
        gpu_core.use_stand_ins()
    elif not gpu_core.machine.available():
        report.skip("torch has no CUDA device")
    gpu_core.use_core(f"{options.kit}/core.so")
    gpu_core.machine.prepare()
    Gpu()
    sizes = OVER_STAND_INS if options.stand_ins else on_gpu()
    report.say("Random calls, each output compared:")
    memory = "KiB of a slot at first", "at the end", "at most"
    report.table("ranks", *memory, "CTAs of a rank", "calls", "direct outputs", "wrong")
    for world, slot in sizes.groups:
        check_random_calls(report, world, slot, sizes.seconds)
    groups = {world: Group(world, sizes.slot, fitting_ctas(world)) for world in sizes.worlds}
    time_sizes(report, groups, sizes)
    time_replays(report, groups, sizes)  # the last: slots of a group with captured calls stay as they are
    for group in groups.values():
        group.close()
    groups.clear()  # their memory is that of the groups below
    check_absence(report, sizes.slot, sizes.timed[-1] // 8)
    check_crowd(report, sizes.slot, sizes.timed[-1] // 8)
    return report.status()


if __name__ == "__main__":
    sys.exit(main())
