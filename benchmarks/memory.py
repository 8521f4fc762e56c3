# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of a rank in a training step of a small Llama under `spar.parallelize`.

    OMP_NUM_THREADS=1 python benchmarks/memory.py --out memory.png

It starts its own ranks, on CPUs over shm. The figure is the peak of the process's resident memory in a
forward and a backward over that before it, of the rank that needs most: activations, exchanges and what
torch's kernels allocate, without parameters, their gradients and an optimizer. One process runs the model
as it is. With --out it draws a plot.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # here, so that ranks do not import it

import spar

LAYERS, WIDTH, HEADS = 4, 256, 8


def status(name: str) -> int:
    """Return a line of this process's status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def measure(rank: int, world: int, tokens: list[int], folder: str) -> None:
    """Run a step of each length on one rank; rank 0 saves the greatest peak of all ranks for each."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 4, "head_dim": 16}
    config = LlamaConfig(
        vocab_size=64, max_position_embeddings=max(tokens), use_cache=False, **sizes, **heads
    )
    model = LlamaForCausalLM(config)
    if world > 1:
        spar.parallelize(model, dist.group.WORLD)

    def step(total: int) -> None:
        ids = torch.arange(total)[None] % 64
        model(input_ids=ids, labels=ids).loss.backward()

    step(256)  # allocates gradients, and what is kept between steps
    peaks = torch.zeros(len(tokens), dtype=torch.int64)
    for place, total in enumerate(tokens):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = status("VmRSS")
        step(total)
        peaks[place] = status("VmHWM") - before
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(peaks / 2**20, f"{folder}/{world}.pt")
    dist.destroy_process_group()


def draw(out: Path, tokens: list[int], found: dict[int, list[float]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for world, peaks in found.items():
        (line,) = axes.plot(tokens, peaks, marker="o", markersize=4)
        text = f"{world} ranks: {peaks[-1] / found[1][-1]:.2f}" if world > 1 else "one process: 1"
        axes.annotate(
            text, (tokens[-1], peaks[-1]), (6, -3), textcoords="offset points", color=line.get_color()
        )
    axes.set(xlabel="tokens of the sequence", xticks=tokens, xticklabels=[f"{total:,}" for total in tokens])
    axes.set(title="Peak memory of a rank in a training step, MiB (less is better)", ylim=0)
    axes.set_xlim(right=tokens[-1] * 1.2)
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="beside one process (2 4 8)")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1024, 2048, 4096, 8192], help="of the sequence"
    )
    parser.add_argument("--out", type=Path, help="the plot")
    args = parser.parse_args()
    found = {}
    print(f"Llama of {LAYERS} layers, width {WIDTH}, {HEADS} heads, float32, torch {torch.__version__}")
    print("ranks  " + "".join(f"{total:>7,} tokens" for total in args.tokens), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, *args.ranks):
            given = world, args.tokens, folder
            start_processes(measure, given, world, start_method="fork")
            found[world] = torch.load(f"{folder}/{world}.pt").tolist()
            print(f"{world:>5}  " + "".join(f"{peak:>10.0f} MiB" for peak in found[world]), flush=True)
    if args.out:
        draw(args.out, args.tokens, found)


if __name__ == "__main__":
    main()
