# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks of CPUs and write docs/figures.md: `make figures`.

Run it as root, on a machine without other work. Each part is a command that users can type, with its output
on the page. Parts run one after another, for about half an hour. A part that fails is named on the page, and
the exit status is 1. With --only, the other parts stay as the page has them. Logs and JSON are in
build/figures.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bring_up import await_group

import spar
from spar._commands.bench import report
from spar._commands.printing import size_text, time_text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "figures"
PAGE = ROOT / "docs" / "figures.md"
NOISE = ("[rank", "W1", "I1", "warnings.warn", "UserWarning")


@dataclass(frozen=True)
class Part:
    """A benchmark.

    Attributes:
        name: of its files, and for --only.
        text: what its figures are.
        ranks: of torchrun; 0: the command starts its own.
        command: what runs, in the repository; `{folder}` is that of the results.
        runs: how often.
        has_table: whether the page shows a table of operations, whose figures are the medians of the runs.
        plot: the image that it draws, in the folder of the results and in docs.
    """

    name: str
    title: str
    text: str
    ranks: int
    command: tuple[str, ...]
    runs: int = 1
    has_table: bool = False
    plot: str = ""


def bench(name: str, ranks: int, *options: str, runs: int = 1, plot: str = "") -> Part:
    text = (
        "In brackets: how many times faster than the usual code over gloo and, from 1 MB on, the time as a "
        "multiple of that of `Tensor.copy_` for the same bytes. The size is that of a rank's part; "
        '"recorded": the input requires a gradient.'
    )
    command = ("-m", "spar", "bench", "--seconds", "0.2", "--out", "{folder}/bench", *options)
    return Part(name, f"Operations, {ranks} ranks", text, ranks, command, runs, True, plot)


def attention(ranks: int, plot: str = "") -> Part:
    text = "The figures are explained by `python -m spar bench --help`."
    tokens = ("1024", "2048", "4096", "8192", "16384")
    command = ("-m", "spar", "bench", "--attention", "--seconds", "2", "--tokens", *tokens, "--out")
    title = f"Attention, {ranks} ranks"
    return Part(f"attention-{ranks}", title, text, ranks, (*command, "{folder}/attention"), plot=plot)


WINDOW = ("-m", "spar", "bench", "--attention", "--window", "512", "--heads", "2", "--key-heads", "1")
PARTS = (
    bench("operations-2", 2, plot="bench.png"),
    bench("operations-4", 4, "--largest", "26214400"),
    attention(2, "attention.png"),
    attention(4),
    Part(
        "windows",
        "Windows",
        "Causal attention to the newest 512 keys, next to attention to all and next to a mask of booleans.",
        2,
        (*WINDOW, "--seconds", "2", "--out", "{folder}/windows"),
    ),
    *(
        Part(
            f"hybrid-{ranks}",
            f"Linear attention, {ranks} ranks",
            "A layer's exchanges next to the usual code over gloo, without convolution and recurrence.",
            ranks,
            ("benchmarks/hybrid.py", "--turns", "9"),
            runs=3,
        )
        for ranks in (2, 4)
    ),
    Part(
        "view",
        "A model that is not changed",
        "Wan of diffusers in a view and in one process, eager and compiled; the host's time of small layers.",
        2,
        ("benchmarks/view.py", "--turns", "15"),
        runs=3,
    ),
    Part(
        "tower",
        "A vision tower",
        "A training step of a Qwen3-VL that is nearly all tower, with two equal images.",
        2,
        ("benchmarks/tower.py",),
        runs=3,
    ),
    Part(
        "memory",
        "Memory of a rank",
        "The peak of resident memory in a step of a small Llama, over that before it, of the worst rank.",
        0,
        ("benchmarks/memory.py", "--out", "{folder}/memory.png"),
        plot="memory.png",
    ),
    Part(
        "hosts",
        "Between hosts",
        "Two hosts of two ranks, which are network namespaces of this machine, next to the usual code.",
        0,
        ("benchmarks/hosts.py",),
    ),
    *(
        Part(
            f"documents-{ranks}",
            f"Documents between hosts, {ranks * 2} ranks",
            "A step of attention over documents of log-normal lengths, two hosts on a link of 500 Mbit/s.",
            0,
            ("benchmarks/hosts.py", "--ranks", str(ranks), "--documents", "32768", "--rate", "500mbit"),
        )
        for ranks in (1, 2)
    ),
    *(
        Part(
            f"busy-{ranks}",
            f"Other work on the cores, {ranks} ranks",
            "Small calls and gathers next to processes that only compute, by the cores on which ranks run.",
            ranks,
            ("benchmarks/busy.py", *numbers),
        )
        for ranks, numbers in ((2, ("0", "1", "2", "4")), (4, ("0",)))
    ),
    Part(
        "overlap",
        "Overlap",
        "A matrix product between an exchange's start and its wait.",
        2,
        ("benchmarks/overlap.py",),
    ),
    *(
        Part(
            f"mpi-{ranks}",
            f"MPI, {ranks} ranks",
            "all_to_all next to permute and `Alltoall` of MPICH.",
            0,
            ("mpiexec", "-n", str(ranks), "{python}", "benchmarks/mpi_bench.py"),
        )
        for ranks in (2, 4)
    ),
)


def command_of(part: Part, run: int) -> list[str]:
    """Return the command line, whose first word is a program next to this Python."""
    programs = Path(sys.executable).parent
    known = {"folder": str(FOLDER / f"{part.name}.{run}"), "python": sys.executable}
    words = [word.format(**known) for word in part.command]
    if part.ranks:
        return [str(programs / "torchrun"), "--standalone", f"--nproc-per-node={part.ranks}", *words]
    if words[0] == "mpiexec":
        return [str(programs / words[0]), *words[1:]]
    return [sys.executable, *words]


def shown(part: Part) -> str:
    """Return the command as users type it."""
    known = {"folder": ".", "python": "python"}
    words = " ".join(part.command).format(**known).replace("./", "")
    start = f"torchrun --standalone --nproc-per-node {part.ranks} " if part.ranks else ""
    python = "" if part.ranks or part.command[0] == "mpiexec" else "python "
    return f"OMP_NUM_THREADS=1 {start}{python}{words}"


def execute(part: Part, limit: float) -> tuple[str, str]:
    """Run a part; return what it printed, and why it failed or an empty text."""
    printed = ""
    for run in range(part.runs):
        (FOLDER / f"{part.name}.{run}").mkdir(parents=True, exist_ok=True)
        log = FOLDER / f"{part.name}.{run}.log"
        with log.open("wb") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            status = await_group(command_of(part, run), environment, output, limit)
        printed += log.read_text(errors="replace")
        if status != 0:
            return printed, f"killed after {limit:g} s" if status is None else f"exit status {status}"
    return printed, ""


def operations_table(rows: Sequence[report.Row]) -> str:
    """Return a table of operations by sizes."""
    sizes = sorted({row.size for row in rows})
    lines = ["| | " + " | ".join(size_text(size) for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    by_name: dict[str, dict[int, str]] = {}
    for row in rows:
        faster = row.formulation.median / row.spar.median
        ratio = f"{faster:.{int(faster < 10)}f} x"
        if row.size >= report.SMALL and not report.is_view(row, rows):
            ratio += f", {row.spar.median / row.copy.median:.2f} copy"
        cell = f"{time_text(row.spar.median)} ({ratio})"
        by_name.setdefault(f"{row.operation}, {row.direction}", {})[row.size] = cell
    for name, cells in by_name.items():
        lines.append(f"| {name} | " + " | ".join(cells.get(size, "") for size in sizes) + " |")
    return "\n".join(lines)


def result_of(part: Part, printed: str) -> str:
    """Return what the page shows: a table of `spar bench`, else what the program printed."""
    if part.has_table:
        paths = [FOLDER / f"{part.name}.{run}" / "bench.json" for run in range(part.runs)]
        rows = report.median_of([report.read(path)[1] for path in paths])
        if part.plot:
            title = report.read(paths[0])[0]
            report.draw(FOLDER / part.plot, rows, title)
        runs = f"Medians of {part.runs} runs.\n\n" if part.runs > 1 else ""
        return f"{runs}{operations_table(rows)}"
    lines = [line.rstrip() for line in printed.splitlines() if not line.startswith(NOISE)]
    lines = [line for line in lines if str(FOLDER) not in line]
    text = "\n".join(lines).strip("\n")
    return f"```console\n{text}\n```"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of {model}, spar {spar.__version__}, torch {torch.__version__}"


def section(part: Part, where: str, text: str, failure: str) -> str:
    """Return what the page says of a part, behind its title."""
    today = datetime.date.today().isoformat()
    lines = [part.text, f"`{shown(part)}`, {today}; {where}.", text]
    if failure:
        lines.append(f"**It failed**: {failure}.")
    if part.plot:
        lines.append(f"![{part.title}]({part.plot})")
    return "\n\n".join(lines)


def sections(page: str) -> dict[str, str]:
    """Return the sections of a page by their titles."""
    titled = [text.partition("\n") for text in page.split("\n## ")[1:]]
    return {title: text.strip("\n") for title, _, text in titled}


def page(found: dict[str, str]) -> str:
    lines = [
        "# Figures",
        "",
        "All tables below are what `make figures` measured, one part after another on a machine without",
        "other work. Compare within a table: the machine's speed changes from hour to hour.",
        "[performance.md](performance.md) says what the figures mean, where spar does not win, and why;",
        "[gpu-verified.md](gpu-verified.md) has those of a GPU.",
        "",
    ]
    for part in PARTS:
        if part.title in found:
            lines += [f"## {part.title}", "", found[part.title], ""]
    return "\n".join(lines)


def run(parts: Sequence[Part], limit: float, out: Path) -> int:
    """Run parts, and write the page; return the exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = sections(out.read_text()) if out.exists() else {}
    failed = False
    for part in parts:
        print(f"{part.name}: {shown(part)}", flush=True)
        begin, where = time.monotonic(), machine()
        printed, failure = execute(part, limit)
        text = f"```console\n{printed[-2000:]}\n```" if failure else result_of(part, printed)
        found[part.title] = section(part, where, text, failure)
        failed |= bool(failure)
        print(f"{part.name}: {failure or 'done'} after {time.monotonic() - begin:.0f} s", flush=True)
        out.write_text(page(found))
        plot = FOLDER / part.plot if part.has_table else FOLDER / f"{part.name}.0" / part.plot
        if part.plot and plot.exists():
            shutil.copyfile(plot, out.parent / part.plot)
    print(f"the page is {out}")
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run these parts")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a run of one part (600)")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page (docs/figures.md)")
    options = parser.parse_args()
    out = options.out.resolve()
    os.chdir(ROOT)  # as the commands are typed
    return run([part for part in PARTS if part.name in options.only], options.limit, out)


if __name__ == "__main__":
    sys.exit(main())
