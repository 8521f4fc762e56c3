"""The faults of test_fault_matrix.py: what the odd rank does, and what every rank must see of it."""

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

TRANSPORTS = ("shm", "torch")
SIZES = (2, 3, 4)
LIMIT = 1.0  # seconds, of groups whose calls do not end
CAP = 32 << 20
LOST_WITHIN = 2.0  # seconds from a death to its error, on one host
OVER = 1.5  # seconds that an error may come after the limit, on a machine that does other things, too

gather = spar.gather_forward_split_backward


@dataclass(frozen=True)
class Fault:
    """What the odd rank does, or where it differs, and what everybody must see of it."""

    call: Callable[[int, int, Group, Any], object]  # (rank, world, group, scene)
    error: str  # the class on all ranks but the odd one, which is the last
    words: tuple[str, ...]  # in every message
    odd: str = ""  # the odd rank's class, where it is another; "-": it does not call
    usable: bool = False  # the group, after it
    seconds: tuple[float, float] = (0.0, 0.9)  # until the error
    only: str = ""  # the transport that has it; the reason for the other is in NOT_THERE


class Scene:
    """What a fault needs beside its group: another one, the processes, a thread that acts meanwhile."""

    def __init__(self, other: Group, fresh: Group, processes: list[int], rank: int) -> None:
        self.other, self.fresh, self.processes, self.rank = other, fresh, processes, rank

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """On rank 0, while all are in their calls."""
        if self.rank == 0:
            threading.Timer(seconds, act).start()

    def signal(self, number: int) -> Callable[[], None]:
        return lambda: os.kill(self.processes[-1], number)


def part(world: int, rank: int) -> torch.Tensor:
    return torch.zeros(4, rule(12, world)[rank], 12)


def odd_of(rank: int, world: int) -> bool:
    return rank == world - 1


def another_shape(rank: int, world: int, group: Group, scene: Scene) -> object:
    return spar.all_to_all(torch.zeros(4 + odd_of(rank, world), 4, 12), group, 2, 1)


def another_dtype(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(
        part(world, rank).to(torch.int32 if odd_of(rank, world) else torch.float32), group, 1, rule(12, world)
    )


def another_dim(rank: int, world: int, group: Group, scene: Scene) -> object:
    return spar.all_to_all(torch.zeros(4, 4, 4, 4), group, 3 if odd_of(rank, world) else 2, 1)


def other_sizes(rank: int, world: int, group: Group, scene: Scene) -> object:
    sizes = [2] * world
    sizes[0] += odd_of(rank, world)  # a size of another rank: what this one holds is right
    return gather(torch.zeros(2), group, 0, sizes)


def another_op(rank: int, world: int, group: Group, scene: Scene) -> object:
    x = torch.zeros(2, 3)
    return gather(x, group, 0) if odd_of(rank, world) else spar.all_to_all(x, group, 1, 0)


def a_gradient(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(2, requires_grad=odd_of(rank, world)), group, 0)


def a_bad_argument(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(2), group, 7 if odd_of(rank, world) else 0)


def no_tensor(rank: int, world: int, group: Group, scene: Scene) -> object:
    x: Any = [0.0, 0.0] if odd_of(rank, world) else torch.zeros(2)
    return gather(x, group, 0)


def fails_in_the_first_exchange(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(2), scene.fresh, 7 if odd_of(rank, world) else 0)


class Alarm(Exception):
    """Of a signal's handler."""


def a_handler_raises(rank: int, world: int, group: Group, scene: Scene) -> object:
    def sound(*_: object) -> None:
        raise Alarm

    if odd_of(rank, world):
        signal.signal(signal.SIGALRM, sound)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    if rank == 0:
        time.sleep(0.6)
    return gather(torch.zeros(2), group, 0)


def another_group(rank: int, world: int, group: Group, scene: Scene) -> object:
    gather(torch.zeros(1), scene.other, 0)
    if odd_of(rank, world):
        return spar.all_to_all(torch.zeros(world, 2), scene.other, 0, 1)
    return gather(torch.zeros(2), group, 0)


def never_comes(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(LIMIT + 0.8)
        return None
    return gather(torch.zeros(2), group, 0)


def comes_too_late(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(LIMIT + 0.8)
    return gather(torch.zeros(2), group, 0)


def is_stopped(rank: int, world: int, group: Group, scene: Scene) -> object:
    scene.after(0.1, scene.signal(signal.SIGSTOP))
    scene.after(LIMIT + 1.2, scene.signal(signal.SIGCONT))
    for _ in range(10_000):
        gather(torch.zeros(1000), group, 0)
    return None


def is_stopped_for_a_moment(rank: int, world: int, group: Group, scene: Scene) -> object:
    scene.after(0.1, scene.signal(signal.SIGSTOP))
    scene.after(0.4, scene.signal(signal.SIGCONT))
    for i in range(60):
        y = gather(torch.full((1000,), float(i)), group, 0)
        assert bool((y == i).all())
        time.sleep(0.005)
    return None


def is_interrupted(rank: int, world: int, group: Group, scene: Scene) -> object:
    scene.after(0.3, scene.signal(signal.SIGINT))
    if rank == 0:
        time.sleep(0.6)
    return gather(torch.zeros(2), group, 0)


def wants_too_much(rank: int, world: int, group: Group, scene: Scene) -> object:
    return gather(torch.zeros(1).expand(CAP // 4), group, 0)  # the input takes none


def closes(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        time.sleep(0.1)
        spar.close(group)
        time.sleep(0.2)
        return None
    return gather(torch.zeros(2), group, 0)


def closes_its_own_call(rank: int, world: int, group: Group, scene: Scene) -> object:
    if odd_of(rank, world):
        threading.Timer(0.2, spar.close, (group,)).start()
    else:
        time.sleep(0.5)
    return gather(torch.zeros(2), group, 0)


def different(*shown: str) -> dict[str, Any]:
    words = (
        r"calls differ between .*; nothing was exchanged:\n  rank 0.*: \w+ \[.*\n  rank \d: \w+ \[",
        *shown,
    )
    return {"error": "MismatchError", "words": words, "usable": True}


COMING = r"rank {odd} \(process {process}\) did not make .*SPAR_TIMEOUT"
PLACES = r"last call of each rank, on any group:\n  rank 0.*gather, call \d+ on group '{group}'"
AT_THE_LIMIT = (LIMIT - 0.1, LIMIT + OVER)
FAULTS = {
    "another shape": Fault(another_shape, **different(r"\[5, \d+, 12\]")),
    "another dtype": Fault(another_dtype, **different(r"torch\.int32")),
    "another dim": Fault(another_dim, **different("dim 3")),
    "other sizes": Fault(other_sizes, **different(r"\[3, 2")),
    "another op": Fault(another_op, **different("gather", "all_to_all")),
    "a gradient": Fault(a_gradient, **different("gradient recorded")),
    "a bad argument": Fault(
        a_bad_argument, "MismatchError", (r"rank {odd} failed: .*dim is 7",), "ValueError", usable=True
    ),
    "no tensor": Fault(
        no_tensor, "MismatchError", ("rank {odd} failed: .*input_ is a list",), "TypeError", usable=True
    ),
    "the first call": Fault(
        fails_in_the_first_exchange,
        "MismatchError",
        ("rank {odd} failed: .*dim is 7",),
        "ValueError",
        usable=True,
    ),
    "too much memory": Fault(
        wants_too_much, "OutOfMemoryError", ("SPAR_ARENA_MAX",), usable=True, only="shm"
    ),
    "stopped shortly": Fault(is_stopped_for_a_moment, "", (), usable=True, seconds=(0, 20)),
    "another group": Fault(
        another_group,
        "ExchangeTimeoutError",
        (r"did not make .*SPAR_TIMEOUT", r"all_to_all, call 2 on group '{other}'", PLACES),
        seconds=AT_THE_LIMIT,
    ),
    "never comes": Fault(never_comes, "ExchangeTimeoutError", (COMING, PLACES), "-", seconds=AT_THE_LIMIT),
    "comes too late": Fault(
        comes_too_late,
        "ExchangeTimeoutError",
        (COMING, PLACES),
        "GroupBrokenError|ExchangeTimeoutError",
        seconds=AT_THE_LIMIT,
    ),
    "stopped": Fault(
        is_stopped,
        "ExchangeTimeoutError",
        (COMING, "last call of each rank"),
        r"GroupBrokenError|ExchangeTimeoutError|PeerLostError",
        seconds=(LIMIT - 0.1, LIMIT + 0.1 + OVER),
    ),
    "interrupted": Fault(
        is_interrupted,
        "GroupBrokenError",
        (r"rank {odd} was interrupted in call \d",),
        "KeyboardInterrupt",
        only="shm",
    ),
    "a raising handler": Fault(
        a_handler_raises, "GroupBrokenError", (r"rank {odd} was interrupted in call \d",), "Alarm", only="shm"
    ),
    "closed": Fault(closes, "GroupBrokenError", ("a rank closed the group",), "-", only="shm"),
    "closed in a call": Fault(
        closes_its_own_call,
        "GroupBrokenError",
        (r"rank {odd} closed the group in call \d",),
        "GroupBrokenError",
        only="shm",
    ),
}
NOT_THERE = {
    "too much memory": "none",  # there is no cap: what torch cannot allocate is in test_local_failures.py
    "interrupted": "the limit",  # the others see a rank that does not come: test_faults.py
    "a raising handler": "the limit",  # the same: test_local_failures.py
    "closed": "a new one",  # without shared memory nothing is held open
    "closed in a call": "the limit",  # the closing rank raises at once: test_local_failures.py
}
DEATHS = ("killed waiting", "killed copying", "exits")
