# SPDX-License-Identifier: Apache-2.0
"""Time layers of hybrid models of transformers under `spar.parallelize`, by heads and by state.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/scans.py 2048 8192 32768

Layers of a width of 64, so that nearly all of their time is that of recurrences and their exchanges, forward
and backward: a gated delta rule of 4 key and 8 value heads of 64, and Mamba 2 of 8 heads of 64, a state size
of 64 and 1 group. transformers' own code, without kernels. Median of the slowest rank; MB are what all ranks
send in forward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

import spar
from spar.integrations._transformers.tokens import Tokens

HIDDEN, KEY_HEADS, HEADS, WIDTH = 64, 4, 8, 64


def delta_rule() -> Any:
    sizes = {"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": HEADS}
    widths = {"linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH}
    return Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=HIDDEN, **sizes, **widths), 0)


def mamba2() -> Any:
    sizes = {"num_heads": HEADS, "head_dim": WIDTH, "expand": HEADS * WIDTH // HIDDEN, "chunk_size": 64}
    config = Mamba2Config(hidden_size=HIDDEN, state_size=64, n_groups=1, num_hidden_layers=1, **sizes)
    return Mamba2Mixer(config, 0)


def seconds_of(call: Callable[[], Tensor], turns: int) -> float:
    times = []
    for _ in range(turns + 1):
        dist.barrier()
        begin = time.perf_counter()
        call().sum().backward()
        elapsed = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        times.append(float(elapsed))
    return statistics.median(times[1:])


def sent() -> int:
    """Return the bytes that this rank's exchanges sent to others so far."""
    return sum(size for name, size in spar.memory_stats().items() if name.startswith("sent."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[2048, 8192, 32768], help="of the sequence")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layout", choices=("even", "zigzag"), default="even")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{world} ranks, {os.cpu_count()} cores, torch {torch.__version__}, float32, {args.layout}")
        columns = ("ms heads", "ms state", "ratio", "MB heads", "MB state")
        print(f"{'':>12} {'tokens':>7}", *(f"{column:>9}" for column in columns))
    for make in (delta_rule, mamba2):
        for total in args.tokens:
            torch.manual_seed(0)
            layer, x = make(), torch.randn(1, total, HIDDEN)
            spar.parallelize(layer, blocks=[""], layout=args.layout, outputs="parts")
            times, moved = [], []
            for by_state in (False, True):
                with mock.patch.object(Tokens, "passes_states", return_value=by_state):
                    times.append(1e3 * seconds_of(partial(layer, x), args.turns))
                    before = sent()
                    layer(x)
                bytes_ = torch.tensor(float(sent() - before))
                dist.all_reduce(bytes_)
                moved.append(float(bytes_) / 1e6)
            if rank == 0:
                figures = [*times, times[1] / times[0], *moved]
                print(f"{make.__name__:>12} {total:7}", *(f"{x:9.2f}" for x in figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
