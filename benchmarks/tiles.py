# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory and the time of a training step of a small Llama with `tile`, beside those without.

    OMP_NUM_THREADS=1 python benchmarks/tiles.py

It starts its own ranks, on CPUs over shm. A peak is that of the process's resident memory in a forward and
a backward over that before it, of the rank that needs most: activations and what torch's kernels allocate,
without parameters, their gradients, an optimizer, and buffers of exchanges, which are kept between steps. A
time is a rank's time on its core, the greatest of all ranks. A figure is the median of --steps steps, in
which those with and without tiles take turns.

Where the logits of a plain step would take more than --most GiB on a rank, its peak is not measured but
computed, and has a "~": peaks grow linearly with the tokens, and so it is the line through those of two
shorter sequences. There is no time for it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM  # here, so that ranks do not import it

import spar

HEADS = 4
M_MMAP_THRESHOLD = -3  # of malloc.h


def status(name: str) -> int:
    """Return a line of this process's status in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def build(vocabulary: int, width: int, layers: int, tokens: int, tile: int | None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    spar.parallelize(model, dist.group.WORLD, tile=tile)
    return model


def step(model: LlamaForCausalLM, tokens: int) -> tuple[float, float]:
    """Return the seconds of a step on a core, and its peak in bytes, the greatest of all ranks."""
    ids = torch.arange(tokens)[None] % model.config.vocab_size
    ctypes.CDLL(None).malloc_trim(0)  # gives back what other steps have freed
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = status("VmRSS"), time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    found = torch.tensor([time.process_time() - start, status("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found[0].item(), found[1].item()


def measure(rank: int, world: int, row: tuple[int, int, int], args: argparse.Namespace, folder: str) -> None:
    """Run the steps of a row; rank 0 saves the medians of both kinds, or nan."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # what is freed leaves no gaps that count
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world)
    tokens, vocabulary, width = row
    is_plain_run = tokens / world * vocabulary * 4 <= args.most * 2**30
    kinds = {"plain": None, "tiled": args.tile} if is_plain_run else {"tiled": args.tile}
    models = {name: build(vocabulary, width, args.layers, tokens, tile) for name, tile in kinds.items()}
    for model in models.values():
        step(model, 2 * args.tile * world)  # allocates gradients, and what is kept between steps
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(args.steps if is_plain_run else 1):
        for name, model in models.items():
            found[name].append(step(model, tokens))
    if not is_plain_run:
        model, (short, long) = build(vocabulary, width, args.layers, tokens, None), (768, 1536)
        peaks = [[step(model, each)[1] for _ in range(2)][1] for each in (short, long)]
        slope = (peaks[1] - peaks[0]) / (long - short)
        found["plain"] = [(float("nan"), peaks[1] + slope * (tokens - long))]
    if rank == 0:
        medians = {
            name: [statistics.median(x) for x in zip(*runs, strict=True)] for name, runs in found.items()
        }
        torch.save(medians, f"{folder}/found.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192], help="of the sequence")
    parser.add_argument("--vocabulary", nargs="+", type=int, default=[1024, 16384])
    parser.add_argument("--width", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tile", type=int, default=512, help="tokens of a tile")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--most", type=float, default=0.5, help="GiB of a rank's logits in a plain step")
    args = parser.parse_args()
    print(
        f"Llama of {args.layers} layers, float32, tile={args.tile}, {args.ranks} ranks, "
        f"torch {torch.__version__}"
    )
    print("| tokens | vocabulary | width | plain MiB | tiled MiB | of plain | plain s | tiled s | of plain |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for row in itertools.product(args.tokens, args.vocabulary, args.width):
        with tempfile.TemporaryDirectory() as folder:
            start_processes(measure, (args.ranks, row, args, folder), args.ranks, start_method="fork")
            found = torch.load(f"{folder}/found.pt")
        (plain_time, plain), (tiled_time, tiled) = found["plain"], found["tiled"]
        is_measured = plain_time == plain_time
        cells = [f"{value:,}" for value in row]
        cells += [f"{'' if is_measured else '~'}{plain / 2**20:,.0f}", f"{tiled / 2**20:,.0f}"]
        cells += [f"{tiled / plain:.2f}"]
        cells += [f"{plain_time:.2f}" if is_measured else "", f"{tiled_time:.2f}"]
        cells += [f"{tiled_time / plain_time:.2f}" if is_measured else ""]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
