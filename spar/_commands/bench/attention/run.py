# SPDX-License-Identifier: Apache-2.0
"""`spar bench --attention`: time attention layers by each method of spar and as people write them today."""

from __future__ import annotations

import ctypes
import os
import sys
from argparse import ArgumentParser, Namespace

import torch
import torch.distributed as dist

from ...printing import progress
from ...ranks import Ranks, UsageError
from .measure import DTYPES, Layer, Row, measure_balance, measure_memory, measure_outside, measure_steps
from .report import report

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
SECONDS = 10.0  # by default, for each number of tokens and figure

DESCRIPTION = """\
With --attention: time attention layers, forward and backward, in these ways. All are causal; the usual ones
are over torch.distributed with gloo:

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
- error: the largest difference from one process, of outputs and gradients."""


def add_arguments(parser: ArgumentParser) -> None:
    layer = parser.add_argument_group("the layers of --attention")
    layer.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths of the whole sequence")
    layer.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    layer.add_argument("--key-heads", type=int, default=2, help="(default: %(default)s)")
    layer.add_argument("--width", type=int, default=64, help="of a head (default: %(default)s)")
    layer.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")


def check(args: Namespace) -> None:
    """Raise UsageError if the layers cannot be measured."""
    if sys.platform != "linux":
        raise UsageError("--attention reads the peak of memory from /proc, which only Linux has")
    for name in ("tokens", "heads", "key_heads", "width"):
        given = getattr(args, name)
        if min(given if name == "tokens" else [given]) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {given}; expected at least 1")
    if args.heads % args.key_heads:
        raise UsageError(f"--heads is {args.heads}; expected a multiple of --key-heads, {args.key_heads}")


def run(args: Namespace, ranks: Ranks) -> None:
    rows: list[Row] = []
    for tokens in progress(args.tokens, len(args.tokens), lambda n: f"{n} tokens", ranks.rank == 0):
        layer = Layer(tokens, args, args.key_heads)
        found = measure_steps(layer, tokens, args.seconds)
        measure_outside(layer, found, args.seconds)
        measure_balance(layer, found, args.seconds)
        rows += found
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed leaves the process
    for tokens in args.tokens:
        measure_memory(tokens, args, [row for row in rows if row.tokens == tokens])
    if ranks.rank == 0:
        heads = f"{args.heads} heads and {args.key_heads} key heads of {args.width}"
        title = f"{ranks.world} ranks on {len(os.sched_getaffinity(0))} cores, {args.dtype}, {heads}, causal"
        report(args.out, f"{title}, torch {torch.__version__}", rows, ranks.world)
    dist.barrier()
