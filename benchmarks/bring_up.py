# SPDX-License-Identifier: Apache-2.0
"""Bring the CUDA code up on a machine with GPUs: python benchmarks/bring_up.py --out FOLDER [--minutes 13].

Needs this repository, torch with CUDA, and what `make bring-up-kit` built on another machine
(build/bring-up): neither a compiler nor Python's headers. Each stage is a process with a time limit, whose
whole process group is killed at its end: after a stage that hangs or crashes the next one runs. The folder
gets STAGE.json for each (status, seconds, the end of its output, figures), and page.md for
docs/gpu-verified.md.

The exit status is 1 if a stage failed, crashed or timed out, or if the kit is missing, and 2 if there is no
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bring_up_page
import kit
from report import FAILED, SKIPPED

HERE = Path(__file__).resolve().parent
TAIL = 6000  # characters of the output that are kept
MPS = "nvidia-cuda-mps-control"
LEAST = 5  # seconds that a stage must have left to begin


@dataclass(frozen=True)
class Stage:
    name: str
    title: str
    script: str  # in this folder; {kit} in the arguments is the kit's
    arguments: tuple[str, ...] = ()
    limit: float = 90  # seconds
    needs: tuple[str, ...] = ()  # of the kit
    tool: tuple[str, ...] = ()  # a program that runs it
    shares: bool = False  # whether its ranks may share a GPU


CHECK = ("--core", f"{{kit}}/{kit.CORE}")
KIT = ("--kit", "{kit}")
# What proves most comes first: where the time ends, the others are left out.
STAGES = (
    Stage("facts", "Machine", "stages/facts.py", limit=45),
    Stage("check", "Copy kernels", "gpu_check.py", ("--alone", *CHECK), 120, (kit.CORE,)),
    Stage(
        "concurrent",
        "Ranks over push whose kernels run at the same time",
        "stages/concurrent_ranks.py",
        KIT,
        90,
        (kit.CORE, kit.PACKAGE),
    ),
    Stage(
        "push", "Operations between ranks over push", "stages/push.py", KIT, needs=(kit.PACKAGE,), shares=True
    ),
    Stage(
        "kill_peer",
        "A peer that is killed while it writes",
        "stages/kill_peer.py",
        KIT,
        60,
        (kit.PACKAGE,),
        shares=True,
    ),
    Stage(
        "overlap",
        "Attention beside an exchange whose peer is late",
        "stages/late_peer.py",
        KIT,
        60,
        (kit.CORE, kit.PACKAGE),
    ),
    Stage("documents", "Attention next to its kernel alone", "stages/varlen.py", KIT, 90, (kit.PACKAGE,)),
    Stage("attention", "Attention kernels", "gpu_attention.py", (), 120, (kit.PACKAGE,), shares=True),
    Stage(
        "check_command",
        "spar check over push, and over NCCL or the loop library",
        "stages/check_command.py",
        KIT,
        150,
        (kit.PACKAGE, kit.LOOP),
        shares=True,
    ),
    Stage("models", "Models of transformers", "gpu_models.py", (), 120, (kit.PACKAGE,), shares=True),
    Stage("diffusion", "Models of diffusers", "gpu_diffusion.py", (), 60, (kit.PACKAGE,), shares=True),
    Stage(
        "view_host",
        "Host time of layers in a view",
        "stages/view_host.py",
        KIT,
        60,
        (kit.PACKAGE,),
        shares=True,
    ),
    Stage("ranks", "Operations between ranks over NCCL", "gpu_ops.py", (), 90, (kit.PACKAGE,), shares=True),
    Stage(
        "gloo",
        "The same with spar's own communicator",
        "gpu_ops.py",
        ("--backend", "gloo"),
        needs=(kit.PACKAGE,),
        shares=True,
    ),
    Stage(
        "legacy",
        "The same by torch's former NCCL backend",
        "gpu_ops.py",
        ("--backend", "nccl-legacy"),
        needs=(kit.PACKAGE,),
        shares=True,
    ),
    Stage(
        "loop",
        "Operations between two ranks on one GPU over the loop library",
        "stages/loop.py",
        KIT,
        needs=(kit.PACKAGE, kit.LOOP),
    ),
    Stage(
        "sanitizer",
        "Copy kernels under compute-sanitizer",
        "gpu_check.py",
        ("--quick", *CHECK),
        100,
        (kit.CORE,),
        ("compute-sanitizer", "--error-exitcode", "1"),
    ),
    # It compiles for as long as there is time. What is behind it ran, and has not changed since.
    Stage(
        "flex",
        "Attention by flex_attention",
        "gpu_attention.py",
        ("--flex",),
        240,
        (kit.PACKAGE,),
        shares=True,
    ),
    Stage("kernels", "Copy kernels by shape", "stages/kernels.py", KIT, needs=(kit.CORE,)),
    Stage("lifetime", "What ends when", "stages/lifetime.py", KIT, 150),
    Stage("host", "NCCL with one rank", "stages/host.py", limit=60),
    Stage("p2p", "What a peer-to-peer transport needs", "stages/p2p.py", KIT, 60, (kit.CORE,)),
)


@dataclass
class Run:
    """All stages of one run, and what they found."""

    kit: Path
    out: Path
    end: float  # time.monotonic() at which all are over
    environment: dict[str, str]
    mps: bool
    results: list[dict[str, Any]] = field(default_factory=list)

    def obstacle(self, stage: Stage) -> tuple[str, str]:
        """Return the status of a stage that cannot run and the reason, or two empty texts.

        Where there is a GPU, a missing kit is a failure: nothing would be checked.
        """
        first = self.results[0] if self.results else None
        if first and first["stage"] == STAGES[0].name and first["status"] == "skipped":
            return "skipped", str(first["reason"])
        for piece in stage.needs:
            is_there = kit.package_path(self.kit) if piece == kit.PACKAGE else Path(self.kit, piece).exists()
            if not is_there:
                return "failed", f"{piece} is not in {self.kit}; build it with `{kit.BUILD}` and copy it here"
        if stage.needs and kit.is_stale(self.kit):
            return "failed", f"{self.kit} was built of other sources; build it again with `{kit.BUILD}`"
        if stage.tool and not shutil.which(stage.tool[0]):
            return "skipped", f"{stage.tool[0]} is not installed"
        if self.end - time.monotonic() < LEAST:
            return "skipped", "no time is left (--minutes)"
        return "", ""

    def run(self, stage: Stage) -> None:
        """Run the stage, and write its file."""
        print(f"== {stage.name}: {stage.title}", flush=True)
        result: dict[str, Any] = {"stage": stage.name, "title": stage.title, "seconds": 0.0}
        status, reason = self.obstacle(stage)
        if reason:
            result |= {"status": status, "reason": reason, "output": "", "data": {}}
        else:
            result |= self.execute(stage, min(stage.limit, self.end - time.monotonic()))
        self.results.append(result)
        (self.out / f"{stage.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        bring_up_page.write(self.out / "page.md", self.results)  # after each: this may be killed, too
        why = f": {result['reason']}" if result["reason"] else ""
        print(f"== {stage.name}: {result['status']} after {result['seconds']:.1f} s{why}", flush=True)

    def execute(self, stage: Stage, seconds: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            log, data = Path(folder, "log"), Path(folder, "data.json")
            arguments = [argument.format(kit=self.kit) for argument in stage.arguments]
            command = [*stage.tool, sys.executable, str(HERE / stage.script), *arguments, "--data", str(data)]
            begin = time.monotonic()
            with log.open("wb") as output, contextlib.ExitStack() as stack:
                environment = self.environment
                if self.mps and stage.shares:
                    environment = environment | stack.enter_context(mps_server(Path(folder)))
                code = await_group(command, environment, output, seconds)
            spent = time.monotonic() - begin
            text = log.read_text(errors="replace")
            found = json.loads(data.read_text()) if data.exists() else {}
        status, reason = verdict(code, found, seconds)
        return {
            "status": status,
            "reason": reason,
            "seconds": round(spent, 1),
            "output": text[-TAIL:],
            "data": found,
        }


@contextlib.contextmanager
def mps_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start an MPS server in the folder: the kernels of several processes run at the same time.

    The block gets the variables by which its processes find the server.
    """
    variables = {f"CUDA_MPS_{kind}_DIRECTORY": str(folder) for kind in ("PIPE", "LOG")}

    def control(*arguments: str, command: bytes = b"") -> None:
        process = subprocess.Popen(
            [MPS, *arguments], stdin=subprocess.PIPE, env=os.environ | variables, start_new_session=True
        )
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # not run(), which waits for what cannot be killed
            process.communicate(command, 10)

    control("-d")
    try:
        yield variables
    finally:
        control(command=b"quit\n")


def await_group(
    command: Sequence[str], environment: dict[str, str], output: Any, seconds: float
) -> int | None:
    """Return the exit status, or None after a timeout. Nothing of the process group is left."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGABRT)  # each Python prints where it is
            process.wait(1)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)  # a process that hangs in the driver may stay


def verdict(code: int | None, found: dict[str, Any], seconds: float) -> tuple[str, str]:
    """Return a stage's status and the reason."""
    if code is None:
        return "timed out", f"killed after {seconds:.0f} s"
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        names = {each.value: each.name for each in signal.Signals}
        return "crashed", names.get(number, f"signal {number}")
    if code == SKIPPED and found.get("reason"):
        return "skipped", str(found["reason"])
    if code:
        failures = found.get("failures", [])
        return "failed", failures[0] if failures else f"exit status {code}"
    return "passed", ""


def environment(folder: Path, nccl: str | None) -> dict[str, str]:
    """Return the stages' environment: where modules lie, and tracebacks of what crashes."""
    paths = [kit.package_path(folder), HERE, HERE.parent / "tests", os.environ.get("PYTHONPATH")]
    preload = [nccl and str(Path(nccl).resolve()), os.environ.get("LD_PRELOAD")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),  # else NCCL's reasons are lost
        "LD_PRELOAD": ":".join(filter(None, preload)),
    }


def run(
    stages: Sequence[Stage],
    out: Path,
    minutes: float,
    folder: Path = kit.FOLDER,
    nccl: str | None = None,
    mps: bool = False,
) -> int:
    """Run the stages; return the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    this = Run(folder, out, time.monotonic() + 60 * minutes, environment(folder, nccl), mps)
    for stage in stages:
        this.run(stage)
    print(f"the page is {out / 'page.md'}")
    statuses = {result["status"] for result in this.results}
    if statuses <= {"skipped"}:
        return SKIPPED
    return FAILED if statuses & {"failed", "crashed", "timed out"} else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", required=True, type=Path, help="the folder for what is found")
    parser.add_argument("--minutes", type=float, default=13, help="time limit of all stages together")
    parser.add_argument("--kit", type=Path, default=kit.FOLDER, help=f"what `{kit.BUILD}` built")
    parser.add_argument("--nccl", help="a libnccl.so.2 to use in place of torch's")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run facts and these stages")
    parser.add_argument("--mps", action="store_true", help=f"let ranks share a GPU by {MPS}")
    options = parser.parse_args()
    if options.mps and not shutil.which(MPS):
        parser.error(f"--mps: {MPS} is not in PATH")
    stages = [stage for stage in STAGES if stage.name in ("facts", *options.only)]
    return run(stages, options.out, options.minutes, options.kit.resolve(), options.nccl, options.mps)


if __name__ == "__main__":
    sys.exit(main())
