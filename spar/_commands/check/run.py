# SPDX-License-Identifier: Apache-2.0
"""`spar check`: run the cases on all ranks, and print a table on rank 0."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TextIO

import torch
import torch.distributed as dist

import spar

from ...parallel_state import Topology, init_parallel_state
from ..printing import count_text, time_text
from ..ranks import Ranks, UsageError, add_device_arguments, joined, squarest
from .cases import cases
from .outcome import GRACE, Agreement, Outcome, attempt
from .trial import Case, Setting

SUMMARY = "run every operation and its gradient on all ranks, and compare with plain torch"
DESCRIPTION = """\
Run every public operation and its gradient on this machine and these ranks, and compare each with the same
in plain torch, which every rank computes by itself from seeded inputs. Rank 0 prints a table.

  torchrun --standalone --nproc-per-node 4 -m spar check
  torchrun --standalone --nproc-per-node 2 -m spar check --device cuda

Without a launcher it runs with one rank, which exchanges nothing with others."""


def add_arguments(parser: ArgumentParser) -> None:
    add_device_arguments(parser)
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="run the checks whose name contains this, such as all_gather",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (default: 30)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


@dataclass
class Row:
    """A case's result. `failures`: what was wrong, by rank."""

    name: str
    result: str  # "pass", "FAIL" or "not run"
    transports: Sequence[str] = ()
    seconds: float = 0.0
    failures: dict[int, list[str]] = field(default_factory=dict)


class Ended(BaseException):
    """A signal asked this process to end. Not an Exception, as it is not an error of a check."""


def run(args: Namespace) -> int:
    if args.timeout <= 0:
        raise UsageError(f"--timeout is {args.timeout:g}; expected a number of seconds above 0")
    os.environ.setdefault("SPAR_TIMEOUT", f"{args.timeout:g}")
    with joined(args.device, args.backend, args.timeout) as ranks:
        passed, usable = check(ranks, args.only, args.timeout, sys.stdout, args.json)
        if not usable:  # a thread of the process group may still wait for a lost rank
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    return 0 if passed else 1


def check(ranks: Ranks, only: str, timeout: float, out: TextIO, as_json: bool = False) -> tuple[bool, bool]:
    """Run the cases whose name contains `only`; print to `out` on rank 0.

    Returns:
        Whether all checks passed, on all ranks alike, and whether the group is still usable.
    """
    setting = make_setting(ranks)
    first, *later = cases(ranks.world)
    chosen = [first, *(case for case in later if only in case.name)]
    if len(chosen) == 1:
        raise UsageError(f"--only is {only!r}, which no check's name contains; try all_gather, or attention")
    width = max(len(case.name) for case in chosen)
    table = out if ranks.rank == 0 and not as_json else io.StringIO()
    say = partial(print, file=table, flush=True)
    say(
        f"spar {spar.__version__}, torch {torch.__version__}: {count_text(ranks.world, 'rank')}, "
        f"{ranks.device.type} tensors, torch.distributed over {ranks.backend}"
    )
    if ranks.world == 1:
        say(
            "One rank exchanges nothing with others; start several: "
            "torchrun --standalone --nproc-per-node 2 -m spar check"
        )
    say(f"\n{'operation':{width}}  result   transport    time")
    begin, rows, go_on = time.monotonic(), [], True
    agreement = Agreement(ranks.store, setting, timeout + 10)
    with ended_by_signals():
        for case in chosen:
            row = Row(case.name, "not run")
            if go_on:
                last, (row, go_on) = case.name, _one(case, setting, agreement)
            rows.append(row)
            seconds = time_text(row.seconds) if row.result != "not run" else "-"
            say(f"{row.name:{width}}  {row.result:7}  {'+'.join(row.transports) or '-':9}  {seconds:>8}")
        say("\n".join(_summary(rows, time.monotonic() - begin, setting)))
        if as_json and ranks.rank == 0:
            facts = {"ranks": ranks.world, "device": ranks.device.type, "backend": ranks.backend}
            print(json.dumps(facts | {"checks": [asdict(row) for row in rows]}, indent=1), file=out)
        if agreement.is_alone:
            print(f"spar check on rank {ranks.rank}: rank 0 does not answer after {last}", file=sys.stderr)
        passed = agreement.end(all(row.result == "pass" for row in rows))
    return passed, go_on


def make_setting(ranks: Ranks) -> Setting:
    """Make the groups of ring x ulysses, as square as the number of ranks allows. Collective."""
    ulysses = squarest(ranks.world)
    group = dist.group.WORLD
    assert group is not None
    with Topology() as topology:
        ring = ranks.world // ulysses
        state = init_parallel_state(ring_attention_size=ring, ulysses_parallel_size=ulysses)
    return Setting(ranks.rank, ranks.world, ranks.device, group, topology, state, ring, ulysses)


def _one(case: Case, setting: Setting, agreement: Agreement) -> tuple[Row, bool]:
    local, go_on = Outcome(), False
    agreement.outcomes = {}  # a signal may end the case before it is reached
    try:
        local = attempt(case, setting)
        go_on = agreement.reach(local)
    except Ended as error:
        local.failures.append(f"it was ended: {error}")
    outcomes = {**agreement.outcomes, setting.rank: local}
    failures = {rank: outcome.failures for rank, outcome in sorted(outcomes.items()) if outcome.failures}
    if setting.rank == 0:
        missing = set(range(setting.world)) - set(outcomes)
        failures |= {rank: ["no answer; its process ended, or waits"] for rank in missing}
    row = Row(
        case.name,
        "FAIL" if failures or not go_on else "pass",
        sorted({name for outcome in outcomes.values() for name in outcome.transports}),
        max(outcome.seconds for outcome in outcomes.values()),
        failures,
    )
    return row, go_on


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise Ended some seconds after a SIGTERM, which launchers send if another rank ended.

    Until then this rank may find out what happened, and rank 0 can print what the ranks found.
    """

    def wait(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 2 * GRACE)

    def end(number: int, frame: object) -> None:
        raise Ended("SIGTERM, as launchers send if another rank ended")

    before = signal.signal(signal.SIGTERM, wait), signal.signal(signal.SIGALRM, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])


def _summary(rows: Sequence[Row], seconds: float, setting: Setting) -> Iterator[str]:
    """Yield the failures, and how many checks passed."""
    yield ""
    for row in rows:
        if row.result == "FAIL":
            ranks = f"rank{'s' * (len(row.failures) > 1)} {', '.join(map(str, sorted(row.failures)))}"
            yield f"FAIL {row.name}, on {ranks} of {setting.world}:"
            for rank, texts in sorted(row.failures.items()):
                yield from (f"  rank {rank}: " + text.replace("\n", "\n    ") for text in texts)
    results = [row.result for row in rows]
    if missing := results.count("not run"):
        yield f"{missing} checks were not run, because the group broke or a rank did not answer"
    transport = spar.transport(setting.group, setting.device)
    used = f"{transport.name}: {transport.reason}" if transport.name else transport.reason
    yield f"{results.count('pass')} of {len(rows)} checks passed in {seconds:.1f} s; {used}"
    yield "time: forward and backward of one call, the first with these shapes; -: no exchange"
