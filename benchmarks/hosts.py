# SPDX-License-Identifier: Apache-2.0
"""Time spar between hosts against torch.distributed over gloo, in turns in the same run.

    python benchmarks/hosts.py

As root: it makes the hosts, network namespaces of this machine, and starts the ranks on them. The namespaces
are gone when it ends. Their links have the speed of memory copies; --delay adds the latency of a network, and
--rate limits it to a network's speed.

A figure is the time of one call: the median, over the turns, of what the slowest rank takes for three calls
after a barrier. torch is the usual code: permute, all_to_all_single, permute; all_gather and reduce_scatter
of one tensor. A size is that of a rank's input.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import documents
import hidden
import namespaces
import torch
import torch.distributed as dist
from torch import Tensor

import spar
from spar._commands.bench.formulations import exchange
from spar._commands.bench.measure import reduced
from spar._commands.printing import KIB, MIB, size_text, table, time_text

CALLS = 3  # in a turn
TURNS = 5  # at least
SIZES = (2 * KIB, 32 * KIB, 512 * KIB, 4 * MIB)  # bytes of a rank's input
WIDTH = 64  # of a head, in float32
UNITS = {"": 1, "K": KIB, "KB": KIB, "M": MIB, "MB": MIB}
STARTED = "BENCH_HOSTS_RANK"  # set in the ranks' processes
Call = Callable[[], Tensor]

# Newer versions of torch have other names for these.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def size(text: str) -> int:
    """Return the bytes of a size such as 2K, 512KB or 32M."""
    number = text.rstrip("KMBkmb")
    unit = text[len(number) :].upper()
    if not number.isdecimal() or int(number) == 0 or unit not in UNITS:
        raise ArgumentTypeError(f"{text!r}; expected a number of bytes above 0, such as 2048, 512K or 32M")
    return int(number) * UNITS[unit]


def count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 64:
        raise ArgumentTypeError(f"{text!r}; expected an int from 1 to 64")
    return int(text)


def parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=count, default=2, help="number of hosts (2)")
    parser.add_argument("--ranks", type=count, default=2, help="number of ranks on each host (2)")
    parser.add_argument(
        "--sizes", type=size, nargs="+", default=list(SIZES), help="bytes of a rank's input (2K 32K 512K 4M)"
    )
    parser.add_argument(
        "--delay", default="", metavar="TIME", help="of each packet, such as 100us; by tc netem"
    )
    parser.add_argument(
        "--rate", default="", metavar="RATE", help="bits per second to each host, such as 10gbit; by tc tbf"
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="TOKENS",
        help="instead time a step of attention over documents of so many tokens, by layout",
    )
    parser.add_argument(
        "--attention",
        type=int,
        metavar="TOKENS",
        help="instead time how much of the exchanges is hidden in causal attention over so many tokens",
    )
    parser.add_argument("--length", type=int, help="of the documents of ulysses in --attention (TOKENS)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each operation and size (2)")
    options = parser.parse_args(arguments)
    if options.delay and options.rate:
        parser.error("--delay and --rate: expected one of them")
    return options


# ---- on the ranks ----


def operations(bytes_: int, world: int) -> dict[str, tuple[Call, Call]]:
    """Return spar's call and torch's of each operation, on this rank's input."""
    tokens = max(1, round(bytes_ / (4 * WIDTH * 2 * world)))
    x = torch.randint(-4, 5, (1, tokens, 2 * world, WIDTH)).float()  # sums of them are exact
    rows = x.flatten(0, 1)  # [S/P, H, D]
    whole = rows.transpose(0, 1).contiguous()  # its first dim is a multiple of the number of ranks

    def gather() -> Tensor:
        y = rows.new_empty(world * rows.size(0), *rows.shape[1:])
        ALL_GATHER(y, rows)
        return y

    def reduce() -> Tensor:
        y = whole.new_empty(whole.size(0) // world, *whole.shape[1:])
        REDUCE_SCATTER(y, whole)
        return y

    return {
        "all_to_all": (partial(spar.all_to_all, x, None, 2, 1), partial(exchange, x, 2, 1)),
        "all_gather": (partial(spar.all_gather, rows), gather),
        "reduce_scatter": (partial(spar.reduce_scatter, whole), reduce),
    }


def turn(call: Call) -> float:
    """Return the slowest rank's seconds for one call."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return reduced((time.perf_counter() - begin) / CALLS)


def medians(calls: Sequence[Call], seconds: float) -> list[float]:
    for call in calls:
        turn(call)  # to connect and to warm up
    lasts = CALLS * sum(turn(call) for call in calls)
    times = [[turn(call) for call in calls] for _ in range(max(TURNS, min(200, int(seconds / lasts))))]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def measure(options: Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.attention:
        rows = hidden.rows(options.attention, options.length or options.attention, TURNS)
    elif options.documents:
        rows = time_documents(options)
    else:
        rows = time_operations(options, rank, world)
    if rank == 0:
        print(table(rows, tuple(range(1, len(rows[0])))))
        place = f"{options.hosts} hosts of {options.ranks} ranks on {len(os.sched_getaffinity(0))} cores"
        network = ", ".join(
            f"{name} {value}" for name in ("delay", "rate") if (value := getattr(options, name))
        )
        parts = (place, network or "no delay", spar.transport().name, "float32", f"torch {torch.__version__}")
        print(", ".join(map(str, parts)))
    dist.barrier()
    dist.destroy_process_group()


def time_documents(options: Namespace) -> list[list[str]]:
    ways = documents.steps(options.documents)
    turns = [[step() for step in ways.values()] for _ in range(TURNS + 1)][1:]
    times = [statistics.median(column) for column in zip(*turns, strict=True)]
    rows = [["layout, method", "step", "times faster than packed by ulysses"]]
    for name, spent in zip(ways, times, strict=True):
        rows.append([name, time_text(spent), f"{times[0] / spent:.2f} x"])
    return rows


def time_operations(options: Namespace, rank: int, world: int) -> list[list[str]]:
    torch.manual_seed(rank)
    rows = [["operation", "size", "torch", "spar", "times faster"]]
    for bytes_ in options.sizes:
        for name, (ours, theirs) in operations(bytes_, world).items():
            if not torch.equal(ours(), theirs()):
                sys.exit(f"rank {rank}: the results of {name} for {bytes_} bytes differ")
            own, usual = medians((ours, theirs), options.seconds)
            rows.append([name, size_text(bytes_), time_text(usual), time_text(own), f"{usual / own:.1f} x"])
    return rows


# ---- the hosts ----


def start(options: Namespace, arguments: Sequence[str]) -> int:
    """Make the hosts, run the ranks on them, and return the exit status."""
    if reason := namespaces.unavailable():
        print(f"cannot make hosts: {reason}", file=sys.stderr)
        return 2
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(namespaces.Network(options.hosts))
        try:
            if options.delay:
                network.delay(options.delay)
            if options.rate:
                network.limit(options.rate)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
        for rank in range(options.hosts * options.ranks):
            host, local_rank = divmod(rank, options.ranks)
            place = {
                "RANK": rank,
                "WORLD_SIZE": options.hosts * options.ranks,
                "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": options.ranks,
                "MASTER_ADDR": network.addresses[0],
                "MASTER_PORT": 29500,
                "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
                "OMP_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # else torch warns that an address has no name
                STARTED: 1,
            }
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            command = network.command(host, sys.executable, str(Path(__file__).resolve()), *arguments)
            processes.append(subprocess.Popen(command, env=environment))
            stack.callback(processes[-1].kill)
        while running := [process for process in processes if process.poll() is None]:
            if any(process.returncode for process in processes):
                return 1  # the others would wait for the rank that failed
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(0.2)
        return int(any(process.returncode for process in processes))


def main() -> int:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if STARTED not in os.environ:
        return start(options, arguments)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
