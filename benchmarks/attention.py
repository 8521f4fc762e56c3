"""Time attention layers, forward and backward, by each method of spar and as people write them today.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/attention.py

The ways (attention_ways.py), all causal; the usual ones are over torch.distributed with gloo:

- one process: scaled_dot_product_attention of the whole sequence, on rank 0 while the others wait;
- ulysses, gather, ring: spar.attention in a zigzag layout;
- usual ulysses: permutes and three all_to_all_single, one after another, and one more after the kernel;
- usual gather: K and V padded, gathered and put in order; the kernel has a mask for each of a rank's chunks;
- usual ring: K and V go round by batch_isend_irecv, and blocks are merged in torch.

Figures of a step, which is a forward and a backward; of times, the slowest rank's median:

- step: the time; in brackets how many times as fast as one process;
- outside: the time with a kernel that does nothing, and how much of the usual formulation's that is;
- peak: by how much a step raises this process's memory, shared memory included, mean of the ranks;
- K/V: by how much 8 key heads raise that peak, say, estimated from the peaks of all key heads and of one;
- slowest: the kernels of the slowest rank by the ranks' mean, in multiply-adds and in CPU time;
- error: the largest difference from one process, of outputs and gradients.

Prints a table and whether the bars hold; writes JSON and a plot.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention_ways import GATHER, RING, ULYSSES, USUAL, WHOLE, Way, counted, no_kernel, ways
from torch import Tensor
from tqdm import tqdm

import spar
from spar._commands.bench.timing import least, timed
from spar._commands.printing import MIB

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
OUTSIDE, SLOWEST, KEYS = 0.25, 1.1, 0.6  # the bars
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """Times in seconds, memory in bytes."""

    tokens: int
    way: str
    step: float
    error: float
    outside: float = 0.0
    peak: float = 0.0
    keys: float = 0.0
    products: float = 0.0  # of the slowest rank, by the mean
    seconds: float = 0.0


class Layer:
    """A step's tensors: q, k, v and the gradient of the output; the whole sequence, equal on all ranks."""

    def __init__(self, tokens: int, args: Namespace, key_heads: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = [(1, tokens, n, args.width) for n in (args.heads, key_heads, key_heads, args.heads)]
        kind = DTYPES[args.dtype]
        self.whole = [torch.randn(shape, generator=generator).to(kind) for shape in shapes]
        self.ways = ways(tokens)

    def step(self, name: str) -> Callable[[], list[Tensor]]:
        """Return a function that returns the output and the gradients; it does nothing where others wait."""
        way = self.ways[name]
        if name == WHOLE and dist.get_rank() > 0:
            return list
        *inputs, upper = [x[:, way.own].contiguous() for x in self.whole]
        return partial(_step, way, inputs, upper)


def _step(way: Way, inputs: Sequence[Tensor], upper: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = way.function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upper)]


def reduced(number: float, by: Any = dist.ReduceOp.MAX) -> float:
    numbers = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(numbers, by)
    return float(numbers)


# ---- times ----


def once(step: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    begin = time.perf_counter()
    result = step()
    return time.perf_counter() - begin, result


def measure_steps(layer: Layer, tokens: int, seconds: float) -> list[Row]:
    """Time the steps in alternating turns; a first turn compares the results with those of one process."""
    rows, times, steps = [], [], [layer.step(name) for name in layer.ways]
    expected: list[Tensor] = []
    for name, step in zip(layer.ways, steps, strict=True):
        took, found = once(step)
        times.append([reduced(took)])
        if name == WHOLE:
            expected = found or [torch.empty_like(layer.whole[i]) for i in (3, 0, 1, 2)]
            for x in expected:
                dist.broadcast(x, 0)
        index = layer.ways[name].own
        parts = zip(found, expected, strict=False)
        error = max((float((a - b[:, index]).abs().max()) for a, b in parts), default=0.0)
        rows.append(Row(tokens, name, 0.0, reduced(error)))
        del found
    first = sum(took for (took,) in times)
    for turn in range(max(3 if first < seconds else 0, min(15, int(seconds / first)))):
        for step, found in zip(steps, times, strict=True):
            if turn == 0:
                found.clear()  # it warmed up
            found.append(reduced(once(step)[0]))
    for row, found in zip(rows, times, strict=True):
        row.step = statistics.median(found)
    return rows


def measure_outside(layer: Layer, rows: list[Row], seconds: float) -> None:
    shared = [row for row in rows if row.way != WHOLE]
    with no_kernel():
        found = timed([layer.step(row.way) for row in shared], seconds)
    for row, took in zip(shared, found, strict=True):
        row.outside = reduced(took.median)


def measure_balance(layer: Layer, rows: list[Row], seconds: float) -> None:
    for row in rows:
        if row.way not in (GATHER, RING):
            continue
        step, times, products = layer.step(row.way), [], 0
        for _ in range(max(1, min(5, int(least(seconds / row.step))))):
            dist.barrier()
            with counted() as work:
                step()
            times.append(work.seconds)
            products = work.products
        row.products, row.seconds = _over_mean(products), _over_mean(min(times))


def _over_mean(own: float) -> float:
    return reduced(own) / (reduced(own, dist.ReduceOp.SUM) / dist.get_world_size())


# ---- memory ----


def peak(step: Callable[[], Any], turns: int = 3) -> float:
    """Return by how much this process's memory grows at most, in bytes.

    VmHWM counts memory of the peers that is mapped, too: of shared memory only this process's is added.
    """
    step()
    gc.collect()
    spar.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, shared = _status(), spar.memory_stats()["arena.reserved_bytes"]
    for _ in range(turns):
        step()
    after = _status()
    anonymous = after["VmHWM"] - after["RssShmem"] - after["RssFile"] - before["RssAnon"]
    return anonymous + spar.memory_stats()["arena.reserved_bytes"] - shared


def _status() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0][:3] in ("VmH", "Rss")}


def measure_memory(tokens: int, args: Namespace, rows: list[Row]) -> None:
    layer, world = Layer(tokens, args, args.key_heads), dist.get_world_size()
    with no_kernel(copies=True):
        for row in rows:
            ranks = 1 if row.way == WHOLE else world
            row.peak = reduced(peak(layer.step(row.way)), dist.ReduceOp.SUM) / ranks
        for key_heads in (args.heads, 1) if args.heads > 1 else ():
            layer, sign = Layer(tokens, args, key_heads), 1 if key_heads > 1 else -1
            for row in rows:
                if row.way in (GATHER, RING):
                    found = reduced(peak(layer.step(row.way)), dist.ReduceOp.SUM) / world
                    row.keys += sign * found * args.heads / (args.heads - 1)


# ---- what is shown ----


def print_table(rows: list[Row]) -> None:
    titles = {"tokens": 6, "way": 14, "step": 19, "outside": 18, "peak": 9, "K/V": 9, "slowest": 13}
    print(*(f"{title:{width}}" for title, width in titles.items()), "error")
    steps = {(row.tokens, row.way): row for row in rows}
    for row in rows:
        alone = steps[row.tokens, WHOLE].step
        usual = steps.get((row.tokens, USUAL.get(row.way, "")))
        cells = [f"{row.step * 1e3:9.1f} ms " + (f"({alone / row.step:.2f})" if row.way != WHOLE else "")]
        outside = f"{row.outside * 1e3:8.2f} ms" if row.outside else ""
        cells.append(outside + (f" ({row.outside / usual.outside:4.2f})" if usual else ""))
        cells.append(f"{row.peak / MIB:6.1f} MB")
        cells.append(f"{row.keys / MIB:6.1f} MB" if row.keys else "")
        cells.append(f"{row.products:.3f}, {row.seconds:.2f}" if row.products else "")
        widths = list(titles.values())[2:]
        shown = " ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        print(f"{row.tokens:6} {row.way:14} {shown} {row.error:.1e}")


def bars(rows: list[Row], world: int) -> list[tuple[str, float, float]]:
    """Return what is to be held, the worst figure measured, and the most that it may be."""
    by_name = {(row.tokens, row.way): row for row in rows}
    found = []
    for way in (ULYSSES, GATHER, RING):
        parts = [
            row.outside / by_name[row.tokens, USUAL[way]].outside
            for row in rows
            if row.way == way and (row.tokens, USUAL[way]) in by_name
        ]
        if parts:
            found.append((f"{way}: time outside the kernel, of the {USUAL[way]}'s", max(parts), OUTSIDE))
    largest = by_name[max(row.tokens for row in rows), RING]
    gather = by_name[largest.tokens, GATHER]
    at = f"at {largest.tokens} tokens"
    found.append((f"ring: multiply-adds of the slowest rank, of the mean, {at}", largest.products, SLOWEST))
    found.append((f"ring: kernel time of the slowest rank, of the mean, {at}", largest.seconds, SLOWEST))
    if world >= 4 and gather.keys > 0:
        found.append((f"ring: peak memory for K and V, of gather's, {at}", largest.keys / gather.keys, KEYS))
    return found


def draw(path: Path, rows: list[Row], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    figure.suptitle(title)
    panels: list[tuple[str, Callable[[Row], float]]] = [
        ("a step, seconds", lambda row: row.step),
        ("outside the kernel, milliseconds", lambda row: row.outside * 1e3),
        ("peak memory of a rank, MB", lambda row: row.peak / MIB),
    ]
    for axes, (meaning, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for i, way in enumerate(dict.fromkeys(row.way for row in rows)):
            points = [(row.tokens, value(row)) for row in rows if row.way == way and value(row) > 0]
            if points:
                style = "--" if way.startswith("usual") else ":" if way == WHOLE else "-"
                axes.plot(*zip(*points, strict=True), style, color=f"C{i}", marker=".", label=way)
        axes.set(title=meaning, xlabel="tokens", xscale="log", yscale="log")
        tokens = sorted({row.tokens for row in rows})
        axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def report(out: Path, title: str, rows: list[Row], world: int) -> None:
    print(title)
    print_table(rows)
    held = bars(rows, world)
    for what, found, most in held:
        print(f"{what}: {found:.3f}, of at most {most}: {'held' if found <= most else 'MISSED'}")
    facts = {"title": title, "spar": spar.__version__, "rows": [asdict(row) for row in rows], "bars": held}
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1))
    draw(Path(f"{out}.png"), rows, title)
    print(f"{out}.json, {out}.png")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for each number of tokens and figure, about"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("attention"), help="OUT.json and OUT.png are written"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 benchmarks/attention.py")
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world, rows = dist.get_rank(), dist.get_world_size(), []
    for tokens in tqdm(args.tokens, disable=rank != 0, ascii=True):
        layer = Layer(tokens, args, args.key_heads)
        found = measure_steps(layer, tokens, args.seconds)
        measure_outside(layer, found, args.seconds)
        measure_balance(layer, found, args.seconds)
        rows += found
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed leaves the process
    for tokens in args.tokens:
        measure_memory(tokens, args, [row for row in rows if row.tokens == tokens])
    if rank == 0:
        heads = f"{args.heads} heads and {args.key_heads} key heads of {args.width}"
        title = f"{world} ranks on {len(os.sched_getaffinity(0))} cores, {args.dtype}, {heads}, causal"
        report(args.out, f"{title}, torch {torch.__version__}", rows, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
