# SPDX-License-Identifier: Apache-2.0
"""Random operations under random faults: make soak SECONDS=60 ARGS=SEED.

One world after another, of 2 to 4 ranks over each transport for CPU tensors, makes random calls, those of
`spar check`, random attentions and programs on parts; each rank checks its results by itself. Injected
faults: calls that differ, a rank that is stopped (shorter or longer than the timeout), a rank that makes no
call. Each world ends with a death; its survivors must raise, close their groups and exit.

The last line counts calls, faults and failures. The exit status is 1 if anything hung, was wrong or leaked.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import TRANSPORTS

import spar
from helpers import attention_cases, growth, view_programs
from helpers.operations import failures, setting_of_world
from helpers.processes import finish, start
from helpers.reference import cells, owned, packed, part, rule, same_bits, zigzag
from helpers.tables import MAKERS
from spar._commands.check.cases import cases
from spar._commands.check.trial import Setting

Group = dist.ProcessGroup
LIMIT = 1.5  # timeout in seconds of groups that a fault breaks
ROUND = 6.0  # seconds of calls in one world
END = 30.0  # seconds that a world may take for its start and its end
WORLD = ROUND + 6 * LIMIT + END
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64)


# ---- calls: each returns the result and the expected value ----


def shape_of(rng: random.Random, ndim: int = 1) -> list[int]:
    """Draw a shape: mostly small, sometimes of a million items, sometimes empty."""
    most = 1_000_000 if rng.random() < 0.02 else 5_000
    shape: list[int] = []
    for _ in range(rng.randint(ndim, 4)):
        shape.append(rng.randint(0 if rng.random() < 0.1 else 1, max(1, min(most, 300))))
        most //= max(1, shape[-1])
    rng.shuffle(shape)
    return shape


def sizes_of(rng: random.Random, total: int, world: int) -> list[int]:
    if rng.random() < 0.5:
        return rule(total, world)
    cuts = sorted(rng.randint(0, total) for _ in range(world - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def lengths_of(rng: random.Random) -> list[int]:
    return [rng.randint(0, 30) for _ in range(rng.randint(1, 9))]


Pair = tuple[torch.Tensor, torch.Tensor]


def all_to_all(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    shape = shape_of(rng, 2)
    scatter, gather = rng.sample(range(len(shape)), 2)
    whole = cells(tuple(shape), rng.choice(DTYPES), rng.randint(0, 9))
    x = part(whole, rule(shape[gather], world), gather, rank)
    y = spar.all_to_all(x, group, scatter, gather, shape[gather])
    return y, part(whole, rule(shape[scatter], world), scatter, rank)


def listed(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    """Exchange two tensors at once, each by its own sizes; return the second one."""
    shape, other = shape_of(rng, 2)[:2], rng.randint(0, 9)
    wholes = [cells((*shape, n), torch.float64, n) for n in (1 + other, 2)]
    here = [sizes_of(rng, shape[1], world) for _ in wholes]
    to = [sizes_of(rng, shape[0], world) for _ in wholes]
    own = [part(x, sizes, 1, rank) for x, sizes in zip(wholes, here, strict=True)]
    found = spar.all_to_all(own, group, 0, 1, scatter_sizes=to, gather_sizes=here)
    return found[1], part(wholes[1], to[1], 0, rank)


def all_gather(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    """Return the gradient, which is a sum over the ranks."""
    shape = shape_of(rng)
    dim = rng.randrange(len(shape))
    sizes = sizes_of(rng, shape[dim], world)
    whole = cells(tuple(shape), torch.float64)
    x = part(whole, sizes, dim, rank).clone().requires_grad_()
    spar.all_gather(x, group, dim, sizes).backward(whole * (rank + 1))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad, part(whole, sizes, dim, rank) * (world * (world + 1) // 2)


def reduce_scatter(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    maker = rng.choice(list(MAKERS.values()))
    arguments = rng.choice([maker.of(rng.randint(8, 300), world), *maker.examples(world)])
    owners = maker.owners(world, *arguments)
    whole = cells((len(owners), 3), rng.choice(DTYPES[2:]))
    found = spar.reduce_scatter(whole, group, layout=maker.make(group, *arguments))
    return found, owned(whole * world, owners, 0, rank)


def gather(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    shape = shape_of(rng)
    dim = rng.randrange(len(shape))
    sizes = sizes_of(rng, shape[dim], world)
    whole = cells(tuple(shape), rng.choice(DTYPES), rng.randint(0, 9))
    return spar.gather_forward_split_backward(part(whole, sizes, dim, rank), group, dim, sizes), whole


def backward_of(
    whole: torch.Tensor, split: Callable[[torch.Tensor], torch.Tensor], own: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the global tensor if each rank's output gradient is its own part of it."""
    x = torch.zeros_like(whole, requires_grad=True)
    split(x).backward(own.contiguous())  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def split(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    shape = shape_of(rng)
    dim = rng.randrange(len(shape))
    sizes = sizes_of(rng, shape[dim], world)
    whole = cells(tuple(shape), torch.float64)
    do = lambda x: spar.split_forward_gather_backward(x, group, dim, sizes, None)  # noqa: E731
    return backward_of(whole, do, part(whole, sizes, dim, rank)), whole


def zigzags(rng: random.Random, world: int) -> tuple[torch.Tensor, list[int], int]:
    shape = shape_of(rng)
    dim = rng.randrange(len(shape))
    shape[dim] = 2 * world * rng.randint(1, 6)
    return cells(tuple(shape), torch.float64), zigzag(shape[dim], world), dim


def zigzag_split(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    whole, owners, dim = zigzags(rng, world)
    do = lambda x: spar.load_balanced_split_forward_gather_backward(x, group, dim)  # noqa: E731
    return backward_of(whole, do, owned(whole, owners, dim, rank)), whole / world


def zigzag_gather(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    whole, owners, dim = zigzags(rng, world)
    own = owned(whole, owners, dim, rank)
    return spar.load_balanced_gather_forward_split_backward(own, group, dim), whole


def packs(rng: random.Random) -> tuple[torch.Tensor, list[int]]:
    lengths = lengths_of(rng)
    return cells((sum(lengths), rng.randint(1, 20)), torch.float64), lengths


def packed_split(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    whole, lengths = packs(rng)
    do = lambda x: spar.packed_data_split_forward_gather_backward(x, group, lengths)  # noqa: E731
    return backward_of(whole, do, owned(whole, packed(lengths, world), 0, rank)), whole / world


def packed_gather(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    whole, lengths = packs(rng)
    own = owned(whole, packed(lengths, world), 0, rank)
    table = spar.cal_split_sizes_multi(lengths, world)
    return spar.packed_data_gather_forward_split_backward(own, table, group), whole


def in_flight(rng: random.Random, rank: int, world: int, group: Group) -> Pair:
    """Start several calls, wait for them in another order and drop one handle; return the last result."""
    wholes = [cells(tuple(shape_of(rng)), rng.choice(DTYPES), i) for i in range(rng.randint(2, 5))]
    started = []
    for whole in wholes:
        sizes = sizes_of(rng, whole.size(0), world)
        mine = part(whole, sizes, 0, rank)
        started.append((whole, *spar.all_gather(mine, group, 0, sizes, async_op=True)))
    rng.shuffle(started)
    del started[0]
    for _, _, work in started:
        work.wait()
    return started[-1][1], started[-1][0]


CALLS = {
    function.__name__: function
    for function in (
        all_to_all,
        listed,
        all_gather,
        reduce_scatter,
        gather,
        split,
        zigzag_split,
        zigzag_gather,
        packed_split,
        packed_gather,
        in_flight,
    )
}


def attention(rng: random.Random, world: int, group: Group, setting: Setting) -> list[str]:
    """Run a random attention; return what is wrong with it."""
    state = setting.state
    seed, levels = rng.randrange(1 << 30), all(state.get_group(name) for name in ("ring", "ulysses"))
    case = attention_cases.make_case(seed, world, levels)
    with setting.topology:
        error = attention_cases.error_of_rank(case, group, attention_cases.whole(case), state)
    wrong = error >= attention_cases.LIMITS[case.dtype]
    what = f"case {seed}: {case.keywords['method']}, {', '.join(case.parts)}, {case.dtype}"
    return [f"{what} differs by {error}"] if wrong else []


# ---- faults that processes survive ----


class Broken(AssertionError):
    """A call did not end as required."""


def must_raise(error: Any, call: Callable[[], object]) -> None:
    """Expect the call to raise `error`, a class or a tuple of classes."""
    try:
        call()
    except error:
        return
    except BaseException as other:
        raise Broken(f"expected {error}, got {other!r}") from other
    raise Broken(f"expected {error}, got nothing")


def tiny(group: Group, like: torch.dtype = torch.float32) -> torch.Tensor:
    return spar.gather_forward_split_backward(torch.ones(2, dtype=like), group, 0)


def mismatch(rng: random.Random, rank: int, odd: int, pids: list[int], group: Group) -> None:
    if rng.random() < 0.5:
        like = torch.int8 if rank == odd else torch.float32
        must_raise(spar.MismatchError, lambda: tiny(group, like))
    else:
        must_raise(
            spar.MismatchError,
            lambda: tiny(group) if rank == odd else spar.all_to_all(torch.ones(len(pids), 2), group, 0, 1),
        )


def pause(rng: random.Random, rank: int, odd: int, pids: list[int], group: Group) -> None:
    """Stop a rank for less than the timeout: no rank may raise."""
    if rank == (odd + 1) % len(pids):
        threading.Timer(0.02, os.kill, (pids[odd], signal.SIGSTOP)).start()
        threading.Timer(0.2, os.kill, (pids[odd], signal.SIGCONT)).start()
    for _ in range(30):
        if not bool((tiny(group) == 1).all()):
            raise Broken("wrong bytes after a pause")
        time.sleep(0.01)


def absence(rng: random.Random, rank: int, odd: int, pids: list[int], group: Group) -> None:
    if rank == odd:
        time.sleep(LIMIT + 1.0)
        return
    must_raise(spar.ExchangeTimeoutError, lambda: tiny(group))
    must_raise(spar.GroupBrokenError, lambda: tiny(group))


def stop(rng: random.Random, rank: int, odd: int, pids: list[int], group: Group) -> None:
    """Stop a rank for longer than the timeout."""
    if rank == (odd + 1) % len(pids):
        threading.Timer(0.02, os.kill, (pids[odd], signal.SIGSTOP)).start()
        threading.Timer(LIMIT + 1.0, os.kill, (pids[odd], signal.SIGCONT)).start()

    def calls() -> None:
        for _ in range(1_000_000):
            tiny(group)

    errors: Any = spar.ExchangeTimeoutError
    if rank == odd:  # its peers have aborted by then
        errors = (spar.ExchangeTimeoutError, spar.GroupBrokenError, spar.PeerLostError)
    must_raise(errors, calls)


FAULTS = (mismatch, mismatch, mismatch, pause, absence, stop)


# ---- a world ----


def run_rank(rank: int, folder: Path, world: int, transport: str, seed: int) -> None:
    faulthandler.dump_traceback_later(WORLD - 3.0)  # says where a rank hangs
    rng = random.Random(seed)  # the same on all ranks
    counts: collections.Counter[str] = collections.Counter()
    report: dict[str, Any] = {"wrong": [], "leaked": ""}
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    steps = [dist.new_group(list(range(world))) for _ in range(3)]  # the faults break two of them
    all_ranks = dist.group.WORLD
    assert all_ranks is not None
    os.environ["SPAR_TIMEOUT"] = str(LIMIT)
    for group in steps:
        tiny(group)
    os.environ["SPAR_TIMEOUT"] = "30"
    setting = setting_of_world()
    before = descriptors()
    begin = time.monotonic()
    broken, done = 0, False
    while not done:
        for _ in range(rng.randint(20, 200)):
            counts["calls"] += 1
            if rng.random() < 0.03:  # some take milliseconds
                case = rng.choice(cases(world))
                op, wrong = case.name, list(failures(case, setting))
            else:
                op = rng.choice(list(CALLS))
                wrong = [] if same_bits(*CALLS[op](rng, rank, world, all_ranks)) else ["wrong bytes"]
            if rng.random() < 0.05:
                counts["attentions"] += 1
                wrong += attention(rng, world, all_ranks, setting)
            if rng.random() < 0.03:
                counts["programs"] += 1
                tiny(all_ranks)  # over torch, the sums of gradients must not overtake a call in flight
                wrong += view_programs.failures(rng, all_ranks)
            where = f"rank {rank} of {world} over {transport}, call {counts['calls']} of seed {seed}"
            report["wrong"] += [f"{op} on {where}: {text}" for text in wrong]
        fault, odd = rng.choice(FAULTS), rng.randrange(world)
        if fault in (absence, stop):
            if broken < 2:
                fault(rng, rank, odd, pids, steps[broken])
                spar.close(steps[broken])
                broken += 1
                counts[fault.__name__] += 1
        else:
            fault(rng, rank, odd, pids, all_ranks)
            counts[fault.__name__] += 1
        # rank 0's clock decides for all ranks when to stop
        done = bool(
            spar.gather_forward_split_backward(
                torch.tensor([float(time.monotonic() - begin > ROUND)]), all_ranks, 0
            )[0]
        )
    spar.close(steps[2])
    for subgroup in (setting.state.get_group(name) for name in ("ring", "ulysses", "cp")):
        if subgroup is not None:
            spar.close(subgroup)
    end = time.monotonic() + 8  # timers end soon, and a group's thread when it had no call for 5 s
    while (more := descriptors() - before) and time.monotonic() < end:
        time.sleep(0.05)
    if more:
        report["leaked"] = f"rank {rank}: {dict(more)}"
    report["counts"] = dict(counts)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    odd, how = rng.randrange(world), rng.choice(("waiting", "copying"))
    if rank == odd:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if how == "waiting":
            time.sleep(60)
    big = torch.ones(1 << 18)

    def calls() -> None:
        for _ in range(1_000_000):
            spar.gather_forward_split_backward(big, all_ranks, 0)

    at = time.monotonic()
    must_raise(spar.PeerLostError, calls)
    must_raise(spar.GroupBrokenError, lambda: tiny(all_ranks))
    if time.monotonic() - at > 4:
        raise Broken(f"a death was detected after {time.monotonic() - at:.1f} s")
    spar.close()


def descriptors() -> collections.Counter[str]:
    """Count this process's open descriptors by target, and its threads."""
    held = collections.Counter(growth.targets())
    held["threads"] = len(os.listdir("/proc/self/task"))
    return held


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "spar" in name}


def run_world(seed: int, counts: collections.Counter[str], failures: dict[str, list[str]]) -> None:
    """Run one world until its last process ends."""
    rng = random.Random(seed)
    world, transport = rng.randint(2, 4), rng.choice(TRANSPORTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = start(run_rank, world, folder, world, transport, seed, SPAR_TRANSPORT=transport)
        codes = finish(ranks, WORLD)
        reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    what = f"seed {seed}: {world} ranks over {transport}"
    if None in codes:
        failures["hangs"].append(f"{what}: {codes}")
    elif codes.count(-signal.SIGKILL) != 1 or codes.count(0) != world - 1 or len(reports) != world:
        failures["other failures"].append(f"{what}: {codes}")
    counts["kill"] += 1
    for report in reports:
        failures["wrong bytes"] += report["wrong"]
        failures["leaks"] += [f"{what}: {report['leaked']}"] if report["leaked"] else []
    counts.update(reports[0]["counts"] if reports else {})


def main(seconds: float, seed: int) -> int:
    counts: collections.Counter[str] = collections.Counter()
    kinds = ("hangs", "wrong bytes", "leaks", "other failures")
    failures: dict[str, list[str]] = {kind: [] for kind in kinds}
    begin, files = time.monotonic(), shared_files()
    run_world(seed, counts, failures)  # the fork server keeps running
    held = descriptors()
    while time.monotonic() - begin < seconds:
        seed += 1
        run_world(seed, counts, failures)
        line = f"{time.monotonic() - begin:.0f} s: {counts['calls']} calls, worlds up to seed {seed}"
        print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
    if more := descriptors() - held:
        failures["leaks"].append(f"the driver: {dict(more)}")
    failures["leaks"] += sorted(shared_files() - files)
    for kind, found in failures.items():
        for one in found:
            print(f"{kind}: {one}")
    work = [f"{counts[name]} {name}" for name in ("calls", "attentions", "programs")]
    faults = {name: n for name, n in sorted(counts.items()) if f"{n} {name}" not in work}
    shown = ", ".join(f"{n} x {name}" for name, n in faults.items())
    tail = ", ".join(f"{len(failures[kind])} {kind}" for kind in kinds)
    print(
        f"soak: {time.monotonic() - begin:.0f} s, {', '.join(work)}, {sum(faults.values())} faults "
        f"({shown}), {tail}"
    )
    return int(any(failures.values()))


if __name__ == "__main__":
    chosen = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 30)
    print(f"seed {chosen}")
    sys.exit(main(float(sys.argv[1]), chosen))
