# SPDX-License-Identifier: Apache-2.0
"""The faults of test_fault_matrix.py: what the odd rank does, and what every rank must report."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import spar
from helpers.reference import rule

Group = dist.ProcessGroup

SIZES = (2, 3, 4)
LIMIT = 1.0  # timeout in seconds of groups that a fault breaks
CAP = 32 << 20
LOST_WITHIN = 2.0  # seconds from a death to its error, on one host
OVER = 5.0  # seconds that an error may be late: other tests run meanwhile

gather = spar.gather_forward_split_backward


@dataclass(frozen=True)
class Fault:
    """What the odd rank does, or where its call differs, and the error that every rank must raise."""

    call: Callable[[int, int, Group, Any], object]  # (rank, world, group, scene)
    error: str  # the class on all ranks except the odd one, the last rank
    patterns: tuple[str, ...]  # in every message
    odd: str = ""  # the odd rank's class if it differs; "-": it does not raise
    usable: bool = False  # whether the group stays usable
    seconds: tuple[float, float] = (0.0, OVER)  # bounds of the time until the error


class Scene:
    """What a fault needs besides its group: other groups, the processes, a timer."""

    def __init__(self, other: Group, fresh: Group, processes: list[int], rank: int) -> None:
        self.other, self.fresh, self.processes, self.rank = other, fresh, processes, rank

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Run `act` on rank 0 after a delay, while all ranks are in their calls."""
        if self.rank == 0:
            threading.Timer(seconds, act).start()

    def signal(self, number: int) -> Callable[[], None]:
        return lambda: os.kill(self.processes[-1], number)


def part(world: int, rank: int) -> torch.Tensor:
    return torch.zeros(4, rule(12, world)[rank], 12)


def odd_of(rank: int, world: int) -> bool:
    return rank == world - 1


def different_shape(rank: int, world: int, group: Group, scene: Scene) -> object:
    return spar.all_to_all(torch.zeros(4 + odd_of(rank, world), 4, 12), group, 2, 1)


def different_dtype(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(
        part(world, rank).to(torch.int32 if odd_of(rank, world) else torch.float32), group, 1, rule(12, world)
    )


def different_dim(rank: int, world: int, group: Group, scene: Scene) -> object:
    return spar.all_to_all(torch.zeros(4, 4, 4, 4), group, 3 if odd_of(rank, world) else 2, 1)


def different_sizes(rank: int, world: int, group: Group, scene: Scene) -> object:
    sizes = [2] * world
    sizes[0] += odd_of(rank, world)  # another rank's size: this rank's own is right
    return gather(torch.zeros(2), group, 0, sizes)


def different_op(rank: int, world: int, group: Group, scene: Scene) -> object:
    x = torch.zeros(2, 3)
    return gather(x, group, 0) if odd_of(rank, world) else spar.all_to_all(x, group, 1, 0)


def different_list_length(rank: int, world: int, group: Group, scene: Scene) -> object:
    return spar.all_to_all([torch.zeros(2, 12)] * (2 + odd_of(rank, world)), group, 1, 0)


def different_sizes_in_list(rank: int, world: int, group: Group, scene: Scene) -> object:
    sizes = rule(12, world) if not odd_of(rank, world) else [12, *[0] * (world - 1)]
    return spar.all_to_all([torch.zeros(2, 12)] * 2, group, 1, 0, scatter_sizes=[None, sizes])


def sum_against_gather(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        return spar.reduce_scatter(torch.zeros(2 * world), group)
    return spar.all_gather(torch.zeros(2), group)


def different_gradient(rank: int, world: int, group: Group, scene: Scene) -> object:
    x = torch.zeros(2, requires_grad=True)
    return gather(x, group, 0) if odd_of(rank, world) else spar.all_gather(x, group)


def different_requires_grad(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(2, requires_grad=odd_of(rank, world)), group, 0)


def differ_in_flight(rank: int, world: int, group: Group, scene: Scene) -> object:
    """The call that differs is between two that match."""
    sizes = (2, 2 + odd_of(rank, world), 2)
    works = [spar.all_gather(torch.zeros(n), group, async_op=True)[1] for n in sizes]
    works[0].wait()
    works[2].wait()
    return works[1].wait()


def bad_argument_in_flight(rank: int, world: int, group: Group, scene: Scene) -> object:
    _, work = spar.all_gather(torch.zeros(2), group, async_op=True)
    _, failed = spar.all_gather(torch.zeros(2), group, 7 if odd_of(rank, world) else 0, async_op=True)
    work.wait()
    return failed.wait()


def miss_in_flight(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(LIMIT + 0.8)
        return None
    return spar.all_gather(torch.zeros(2), group, async_op=True)[1].wait()


def close_in_flight(rank: int, world: int, group: Group, scene: Scene) -> object:
    if rank == 0:  # so that the other ranks' calls are in flight
        time.sleep(0.4)
    _, work = spar.all_gather(torch.zeros(2), group, async_op=True)
    if odd_of(rank, world):
        time.sleep(0.2)
        spar.close(group)
    return work.wait()


def bad_argument(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(2), group, 7 if odd_of(rank, world) else 0)


def not_a_tensor(rank: int, world: int, group: Group, scene: Scene) -> object:
    x: Any = [0.0, 0.0] if odd_of(rank, world) else torch.zeros(2)
    return gather(x, group, 0)


def bad_argument_in_first_exchange(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(2), scene.fresh, 7 if odd_of(rank, world) else 0)


class Alarm(Exception):
    """Raised by a signal handler."""


def raise_in_handler(rank: int, world: int, group: Group, scene: Scene) -> object:
    def raise_alarm(*_: object) -> None:
        raise Alarm

    if odd_of(rank, world):
        signal.signal(signal.SIGALRM, raise_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    if rank == 0:
        time.sleep(0.6)
    return gather(torch.zeros(2), group, 0)


def call_on_another_group(rank: int, world: int, group: Group, scene: Scene) -> object:
    gather(torch.zeros(1), scene.other, 0)
    if odd_of(rank, world):
        return spar.all_to_all(torch.zeros(world, 2), scene.other, 0, 1)
    return gather(torch.zeros(2), group, 0)


def make_no_call(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(LIMIT + 0.8)
        return None
    return gather(torch.zeros(2), group, 0)


def call_late(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(LIMIT + 1.8)  # the others wait in a call on another group meanwhile
    return gather(torch.zeros(2), group, 0)


def stop(rank: int, world: int, group: Group, scene: Scene) -> object:
    scene.after(0.1, scene.signal(signal.SIGSTOP))
    scene.after(LIMIT + 1.2, scene.signal(signal.SIGCONT))
    for _ in range(10_000):
        gather(torch.zeros(1000), group, 0)
    return None


def pause(rank: int, world: int, group: Group, scene: Scene) -> object:
    scene.after(0.1, scene.signal(signal.SIGSTOP))
    scene.after(0.4, scene.signal(signal.SIGCONT))
    for i in range(60):
        y = gather(torch.full((1000,), float(i)), group, 0)
        assert bool((y == i).all())
        time.sleep(0.005)
    return None


def interrupt(rank: int, world: int, group: Group, scene: Scene) -> object:
    scene.after(0.3, scene.signal(signal.SIGINT))
    if rank == 0:
        time.sleep(0.6)
    return gather(torch.zeros(2), group, 0)


def exceed_cap(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(1).expand(CAP // 4), group, 0)  # an expanded input takes no memory


def close(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(0.1)
        spar.close(group)
        time.sleep(0.2)
        return None
    return gather(torch.zeros(2), group, 0)


def close_in_call(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        threading.Timer(0.2, spar.close, (group,)).start()
    else:
        time.sleep(0.5)
    return gather(torch.zeros(2), group, 0)


def different(*shown: str) -> dict[str, Any]:
    patterns = (
        r"calls differ between .*; nothing was exchanged:\n  rank 0.*: \w+ \[.*\n  rank \d: \w+ \[",
        *shown,
    )
    return {"error": "MismatchError", "patterns": patterns, "usable": True}


NOT_CALLED = r"rank {odd} \(process {process}\) did not (?:make|end) .*SPAR_TIMEOUT"
LAST_CALLS = r"last call of each rank, on any group:\n  rank 0.*gather\S*, call \d+ on group '{group}'"
AT_TIMEOUT = (LIMIT - 0.1, LIMIT + OVER)
FAULTS = {
    "different shape": Fault(different_shape, **different(r"\[5, \d+, 12\]")),
    "different dtype": Fault(different_dtype, **different(r"torch\.int32")),
    "different dim": Fault(different_dim, **different("dim 3")),
    "different sizes": Fault(different_sizes, **different(r"\[3, 2")),
    "different op": Fault(different_op, **different("gather", "all_to_all")),
    "different list length": Fault(different_list_length, **different(r"\]; \[[^\n]*\]; \[")),
    "different sizes in a list": Fault(different_sizes_in_list, **different(r"in \[12, 0")),
    "sum against gather": Fault(sum_against_gather, **different("all_gather", "reduce_scatter")),
    "another gradient": Fault(different_gradient, **different("gradient recorded", "gradient summed")),
    "different requires_grad": Fault(different_requires_grad, **different("gradient recorded")),
    "bad argument": Fault(
        bad_argument, "MismatchError", (r"rank {odd} failed: .*dim is 7",), "ValueError", usable=True
    ),
    "not a tensor": Fault(
        not_a_tensor, "MismatchError", ("rank {odd} failed: .*input_ is a list",), "TypeError", usable=True
    ),
    "bad argument in the first call": Fault(
        bad_argument_in_first_exchange,
        "MismatchError",
        ("rank {odd} failed: .*dim is 7",),
        "ValueError",
        usable=True,
    ),
    "different shape in flight": Fault(differ_in_flight, **different(r"dim 0 in \[3, 3")),
    "bad argument in flight": Fault(
        bad_argument_in_flight,
        "MismatchError",
        ("rank {odd} failed: .*dim is 7",),
        "ValueError",
        usable=True,
    ),
    "no call in flight": Fault(
        miss_in_flight, "ExchangeTimeoutError", (NOT_CALLED,), "-", seconds=AT_TIMEOUT
    ),
    "group closed in flight": Fault(
        close_in_flight,
        "GroupBrokenError",
        (r"rank {odd} closed the group in call \d",),
        "GroupBrokenError",
    ),
    "out of memory": Fault(exceed_cap, "OutOfMemoryError", ("SPAR_ARENA_MAX",), usable=True),
    "short pause": Fault(pause, "", (), usable=True, seconds=(0, 20)),
    "another group": Fault(
        call_on_another_group,
        "ExchangeTimeoutError",
        (r"did not make .*SPAR_TIMEOUT", r"all_to_all, call 2 on group '{other}'", LAST_CALLS),
        seconds=AT_TIMEOUT,
    ),
    "no call": Fault(make_no_call, "ExchangeTimeoutError", (NOT_CALLED, LAST_CALLS), "-", seconds=AT_TIMEOUT),
    "late call": Fault(
        call_late,
        "ExchangeTimeoutError",
        (NOT_CALLED, LAST_CALLS),
        "GroupBrokenError|ExchangeTimeoutError",
        seconds=AT_TIMEOUT,
    ),
    "stopped": Fault(
        stop,
        "ExchangeTimeoutError",
        (NOT_CALLED, "last call of each rank"),
        r"GroupBrokenError|ExchangeTimeoutError|PeerLostError",
        seconds=(LIMIT - 0.1, LIMIT + 0.1 + OVER),
    ),
    "interrupted": Fault(
        interrupt,
        "GroupBrokenError",
        (r"rank {odd} was interrupted in call \d",),
        "KeyboardInterrupt",
    ),
    "handler raises": Fault(
        raise_in_handler, "GroupBrokenError", (r"rank {odd} was interrupted in call \d",), "Alarm"
    ),
    "group closed": Fault(close, "GroupBrokenError", (r"rank {odd} closed the group before call \d",), "-"),
    "group closed in a call": Fault(
        close_in_call,
        "GroupBrokenError",
        (r"rank {odd} closed the group in call \d",),
        "GroupBrokenError",
    ),
}
DEATHS = ("killed waiting", "killed copying", "exits")
