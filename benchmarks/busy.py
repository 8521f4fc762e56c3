# SPDX-License-Identifier: Apache-2.0
"""Time small calls and gathers of 1 MB beside busy processes, by the cores on which the ranks run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/busy.py 0 1 2 4

For each number of busy processes, which rank 0 starts, it prints:

- calls of 2 KB in turns of 7, each turn after a barrier of gloo and one call that is not counted. The slowest
  rank's time, apart for calls that began with all ranks on one core; and apart for the last calls of turns:
  beside these, ranks that are ready make gloo's barrier, and take the cores of the others. Then the times of
  all ranks;
- gathers of 1 MB in such turns, in alternation with gloo's all_gather and cat;
- a loop of 2 KB calls: the time of one, the median of 5 loops of 700.

The scheduler places the ranks: `spar bench` binds them instead.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import spar
from spar._commands.bench.busy import busy_processes

TURN, LOOP = 7, 700  # calls
Samples = list[tuple[bool, list[float]]]  # whether all ranks were on one core, and microseconds of each


def turns(call: Callable[[], object], count: int) -> Samples:
    """Time the calls of some turns."""
    core_of_thread = ctypes.CDLL(None).sched_getcpu
    samples = []
    for _ in range(count):
        dist.barrier()
        call()
        for _ in range(TURN):
            core, begin = core_of_thread(), time.perf_counter()
            call()
            samples.append((float(core), (time.perf_counter() - begin) * 1e6))
    own = torch.tensor(samples, dtype=torch.float64)
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    cores, times = torch.stack(ranks).unbind(2)
    same = (cores == cores[0]).all(0)
    return list(zip(same.tolist(), times.T.tolist(), strict=True))


def median(times: list[float]) -> str:
    return f"{statistics.median(times):.0f}" if times else "none"


def slowest(samples: Samples) -> list[float]:
    return [max(times) for _, times in samples]


def text_of(times: list[float]) -> str:
    times = sorted(times)
    return f"median {median(times)}, p90 {times[len(times) * 9 // 10]:.0f} us" if times else "none"


def by_state(samples: Samples) -> dict[str, Samples]:
    return {
        "one core": [sample for sample in samples if sample[0]],
        "several cores": [sample for sample in samples if not sample[0]],
    }


def loop(call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(5):
        dist.barrier()
        for _ in range(LOOP // 2):  # in which the scheduler balances the cores
            call()
        begin = time.perf_counter()
        for _ in range(LOOP):
            call()
        times.append((time.perf_counter() - begin) / LOOP * 1e6)
    return times


def measure(count: int, number: int, group: dist.ProcessGroup) -> None:
    small, large = torch.randn(1, 8, 8, 16).bfloat16(), torch.randn(1024, 512).bfloat16()
    parts = [torch.empty_like(large) for _ in range(dist.get_world_size())]

    def exchange() -> None:
        spar.all_to_all(small, group)

    def gloo() -> None:
        dist.all_gather(parts, large)
        torch.cat(parts)

    calls = turns(exchange, number)
    ours: Samples = []
    theirs: Samples = []
    for _ in range(max(1, number // 20)):  # in alternation, as the machine's speed changes
        ours += turns(lambda: spar.all_gather(large, group), 2)
        theirs += turns(gloo, 2)
    loops = loop(exchange)
    if dist.get_rank():
        return
    print(f"next to {count} busy processes:")
    for state, samples in by_state(calls).items():
        print(f"  2 KB, {state}: {len(samples)} calls, {text_of(slowest(samples))}")
    print(f"  2 KB, all: {text_of(slowest(calls))}")
    lasts = [call for i, call in enumerate(calls) if i % TURN == TURN - 1]
    others = [call for i, call in enumerate(calls) if i % TURN < TURN - 1]
    print(f"  2 KB, the last of a turn: {text_of(slowest(lasts))}; the others: {text_of(slowest(others))}")
    print(f"  2 KB, each rank's own: {text_of([us for _, times in calls for us in times])}")
    gathers = {**by_state(ours), "all": ours}
    references = {**by_state(theirs), "all": theirs}
    for state in gathers:
        first, second = (slowest(samples[state]) for samples in (gathers, references))
        ratio = f", {statistics.median(second) / statistics.median(first):.1f} x" if first and second else ""
        print(f"  gather of 1 MB, {state}: spar {median(first)} us, gloo {median(second)} us{ratio}")
    print(f"  loop: {median(loops)} us ({min(loops):.0f} to {max(loops):.0f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("busy", type=int, nargs="+", help="numbers of busy processes")
    parser.add_argument("--turns", type=int, default=300, help="of 2 KB calls (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for count in options.busy:
        with busy_processes(0 if dist.get_rank() else count):
            measure(count, options.turns, group)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
