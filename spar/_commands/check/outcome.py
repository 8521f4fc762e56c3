# SPDX-License-Identifier: Apache-2.0
"""Run one case on this rank, and agree with the other ranks about how it ended.

Ranks agree over torch's store, not over the group that is checked: a broken group must not hide its failure.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

import spar

from ..._control.agreement import is_reported
from .trial import NO_GRADIENT, Case, Setting, Trial, difference, expected_of, listed

POLL = 0.002  # seconds between looks at the store
GRACE = 3.0  # seconds that a rank has to answer once another one found the group broken


@dataclass
class Outcome:
    """How a case ended on one rank.

    Attributes:
        failures: what was wrong; empty if the case passed.
        seconds: for forward and backward together.
        transports: those that moved bytes.
        broken: whether the group cannot be used any more.
    """

    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    transports: list[str] = field(default_factory=list)
    broken: bool = False


def attempt(case: Case, setting: Setting) -> Outcome:
    """Run a case on this rank. Every exception ends up in the outcome, except those of a signal."""
    outcome = Outcome()
    before = _exchanges()
    try:
        _run(case.make(setting), setting, outcome)
    except Exception as error:
        outcome.failures.append(f"{type(error).__name__}: {error}")
        lost = (spar.PeerLostError, spar.GroupBrokenError, spar.ExchangeTimeoutError)
        outcome.broken = isinstance(error, lost) or not is_reported(error)
        if outcome.broken and not isinstance(error, spar.SparError):
            spar.close(setting.group)  # the peers may wait for this rank: they raise at once
    outcome.transports = [name for name, count in _exchanges().items() if count > before[name]]
    return outcome


def _run(trial: Trial, setting: Setting, outcome: Outcome) -> None:
    expected, recorded = expected_of(trial, setting), trial.gradient != NO_GRADIENT
    tensors = trial.inputs[setting.rank]
    inputs = [x.to(setting.device).detach().clone().requires_grad_(recorded) for x in tensors]
    upper = [g.to(setting.device) for g in expected.upper]
    _wait_for_device(setting.device)
    begin = time.perf_counter()
    outputs = listed(trial.run(*inputs))
    gradients = list(torch.autograd.grad(outputs, inputs, upper)) if recorded else []
    _wait_for_device(setting.device)
    outcome.seconds = time.perf_counter() - begin
    kinds = (("output", outputs, expected.outputs), ("gradient of input", gradients, expected.gradients))
    for kind, actual, wanted in kinds:
        if len(actual) != len(wanted):
            outcome.failures.append(f"{len(actual)} {kind}s; expected {len(wanted)}")
        for at, (tensor, reference) in enumerate(zip(actual, wanted, strict=False)):
            if text := difference(tensor, reference, trial.tolerance):
                outcome.failures.append(f"{kind}{f' {at}' if len(wanted) > 1 else ''}: {text}")


def _wait_for_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _exchanges() -> dict[str, int]:
    counts = spar.memory_stats().items()
    return {name.removeprefix("calls."): count for name, count in counts if name.startswith("calls.")}


_runs = itertools.count()  # numbers this process's runs, because the store keeps the answers of each


class Agreement:
    """The ranks' answers about one case after another, through torch's store. Rank 0 decides how to go on.

    Attributes:
        found: the outcomes of the newest case: this rank's, and on rank 0 those of all ranks that answered.
        is_alone: rank 0, which prints, does not answer.
    """

    def __init__(self, store: Store, setting: Setting, timeout: float) -> None:
        self.store, self.rank, self.world = store, setting.rank, setting.world
        self.timeout = timeout  # seconds that a rank may take longer than this one
        self.run, self.step = next(_runs), 0
        self.outcomes: dict[int, Outcome] = {}
        self.is_alone = False

    def reach(self, outcome: Outcome) -> bool:
        """Exchange the outcomes of a case; return whether to go on."""
        self.step += 1
        self.outcomes = {self.rank: outcome}
        self.store.set(self._key(self.rank), json.dumps(asdict(outcome)))
        if self.rank > 0:
            decision = self._await(self._key("decision"), self.timeout + 2 * GRACE)
            self.is_alone = decision is None
            return decision == b"go on"
        # for GRACE only, once one found the group broken
        end = time.monotonic() + (GRACE if outcome.broken else self.timeout)
        while len(self.outcomes) < self.world and time.monotonic() < end:
            for rank in set(range(self.world)) - set(self.outcomes):
                if self.store.check([self._key(rank)]):
                    self.outcomes[rank] = Outcome(**json.loads(self.store.get(self._key(rank))))
                    if self.outcomes[rank].broken:
                        end = min(end, time.monotonic() + GRACE)
            time.sleep(POLL)
        go_on = len(self.outcomes) == self.world and not any(one.broken for one in self.outcomes.values())
        self.store.set(self._key("decision"), "go on" if go_on else "stop")
        return go_on

    def end(self, passed: bool) -> bool:
        """Return on each rank whether all checks passed, as rank 0 found, once rank 0 has printed.

        Launchers end all ranks if one fails: no rank may end before.
        """
        if self.rank == 0:
            self.store.set(self._key("end"), "passed" if passed else "failed")
            return passed
        return self._await(self._key("end"), GRACE) == b"passed"

    def _await(self, key: str, limit: float) -> bytes | None:
        """Return a key's value once it is set; None after the limit. Polls, so that signals end it."""
        end = time.monotonic() + limit
        try:
            while not self.store.check([key]):
                if time.monotonic() > end:
                    return None
                time.sleep(POLL)
            value: bytes = self.store.get(key)
            return value
        except dist.DistError:  # the process that has the store ended
            return None

    def _key(self, name: object) -> str:
        return f"spar check {self.run}/{self.step}/{name}"
