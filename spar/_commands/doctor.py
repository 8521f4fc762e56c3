# SPDX-License-Identifier: Apache-2.0
"""`spar doctor`: run a script, and compare a forward and backward of each sharded model with one process."""

from __future__ import annotations

import copy
import os
import runpy
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from typing import Any

import torch.distributed as dist

from .._doctor.diagnose import diagnose
from .._model.model import _ModelForward, replace_run
from .._model.nested import tensors_in
from .ranks import UsageError

SUMMARY = "run a script, and name where its sharded model first differs from one process"
DESCRIPTION = """\
Run a script until the first forward of a model that parallelize sharded. Run that forward, and a
backward from its loss or its outputs, over the ranks and whole on each rank, and name the first call of a
torch function whose values, or whose gradients, differ: module, function, file and line.

  torchrun --standalone --nproc-per-node 2 -m spar doctor train.py --batch 1

Each rank must have memory for the whole batch. The script ends where a model that was compared is called
again."""


class Ended(BaseException):
    """The script is not run further. Not an Exception, which scripts may catch."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--forward", type=int, default=1, metavar="N", help="compare each model's Nth forward (default: 1)"
    )
    parser.add_argument("script", help="the Python file to run")
    parser.add_argument("args", nargs=REMAINDER, metavar="...", help="its arguments")


def run(args: Namespace) -> int:
    if args.forward < 1:
        raise UsageError(f"--forward is {args.forward}; expected at least 1")
    if not os.path.isfile(args.script):
        raise UsageError(f"the script {args.script!r} is no file; expected a Python file")
    doctor = Doctor(args.forward)
    own = _ModelForward._run
    replace_run(doctor.around(own))
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    try:
        runpy.run_path(args.script, run_name="__main__")
    except Ended:
        pass
    finally:
        replace_run(own)
    if not doctor.compared:
        raise UsageError(
            f"{args.script} ended without forward {args.forward} of a sharded model on more than one rank; "
            "start it by torchrun, and shard a model with spar.parallelize"
        )
    return 1 if doctor.differs else 0


class Doctor:
    """Compares forward number `at` of each sharded model."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.compared = 0  # models
        self.differs = False
        self.calls: dict[Any, int] = {}  # by a model's forward; the forwards are kept alive
        self._busy = False

    def around(self, own: Any) -> Any:
        def run(forward: _ModelForward, asked: Any, args: Any, kwargs: Any) -> Any:
            if not (self._busy or forward.sharded.is_running):
                self._compare(forward, args, kwargs)
            return own(forward, asked, args, kwargs)

        return run

    def _compare(self, forward: _ModelForward, args: Any, kwargs: Any) -> None:
        count = self.calls[forward] = self.calls.get(forward, 0) + 1
        if count > self.at:
            raise Ended
        if count < self.at:
            return
        model = forward.sharded.model
        parts = forward.sharded.view.parts

        def step() -> Any:
            tensors = tensors_in(args, kwargs)
            memo = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in tensors}
            own = {name: _copied(value, memo) for name, value in kwargs.items()}
            return forward(*[_copied(value, memo) for value in args], **own)

        self._busy = True
        try:
            found = diagnose(model, step, show=False)
        finally:
            self._busy = False
        self.compared += 1
        if parts.rank == 0 and (found or dist.get_rank() == 0):
            ranks = ", ".join(map(str, dist.get_process_group_ranks(parts.group)))
            head = f"spar doctor: forward {count} of {type(model).__name__} on ranks {ranks}"
            print(f"{head}: {'differs:' if found else 'agrees with one process'}")
            print(f"  {found}\n" * (found is not None), end="", flush=True)
        # Ranks of other groups may find nothing here: all go on, and end at the model's next call.
        self.differs |= found is not None


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an argument, such as a cache, which a forward fills; a process group cannot be copied."""
    try:
        return copy.deepcopy(value, memo)
    except (RuntimeError, TypeError):
        return value
