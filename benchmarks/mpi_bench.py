# SPDX-License-Identifier: Apache-2.0
"""Time spar.all_to_all against MPI's Alltoall between two permutations, interleaved in the same run.

    mpiexec -n 2 python benchmarks/mpi_bench.py

Needs mpi4py and an MPI library (`pip install -e '.[mpi]'`). The ranks that mpiexec starts also join a
gloo group, which spar uses for its set-up. Figures are medians as in `spar bench`, with
copies of the same bytes.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import spar
from spar._commands.bench.binding import bind
from spar._commands.bench.measure import copying, timed
from spar._commands.printing import KIB, MIB, size_text

SIZES = (2 * KIB, 64 * KIB, MIB, 25 * MIB)  # bytes of a rank's part


def join_group(world: Any) -> None:
    """Initialize torch.distributed over gloo with the ranks of an MPI communicator."""
    rank, size = world.Get_rank(), world.Get_size()
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world.bcast(store.port)
    else:
        store = TCPStore("127.0.0.1", world.bcast(None))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def exchange(world: Any, memory: Any, x: Tensor) -> Tensor:
    """Scatter dim 2 and gather dim 1: permute, Alltoall, permute."""
    parts = x.unflatten(2, (world.Get_size(), -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(parts)
    world.Alltoall(*[memory.fromaddress(tensor.data_ptr(), tensor.nbytes) for tensor in (parts, received)])
    return received.movedim(0, 1).flatten(1, 2).contiguous()


def measure(world: Any, memory: Any, sizes: Sequence[int], seconds: float) -> None:
    """Print a row for each size."""
    if world.Get_rank() == 0:
        print(f"{'part':>7}{'spar':>14}{'MPI':>14}{'copy_':>14}{'times faster':>14}")
    for size in sizes:
        heads = 8 if size == SIZES[0] else 24
        x = torch.randn(1, max(1, round(size / (heads * 256))), heads, 128).to(torch.bfloat16)
        ours, theirs = partial(spar.all_to_all, x, None, 2, 1), partial(exchange, world, memory, x)
        if not torch.equal(ours(), theirs()):
            sys.exit(f"rank {dist.get_rank()}: the results for {size} bytes differ")
        times = [found.median for found in timed([ours, theirs, copying(x.nbytes)], seconds)]
        if world.Get_rank() == 0:
            shown_times = "".join(f"{each * 1e6:11.1f} us" for each in times)
            print(f"{size_text(size):>7}{shown_times}{times[1] / times[0]:12.1f} x", flush=True)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of a rank's part")
    parser.add_argument("--bind-to", choices=("core", "none"), default="core", help="as in `spar bench`")
    args = parser.parse_args()
    from mpi4py import MPI

    torch.set_num_threads(1)  # the ranks share the cores
    world = MPI.COMM_WORLD
    join_group(world)
    cores = len(os.sched_getaffinity(0))
    bound = args.bind_to == "core" and bind(world.Get_rank(), world.Get_size())
    sizes = [size for size in SIZES if size <= args.largest]
    measure(world, MPI.memory, sizes, args.seconds)
    if world.Get_rank() == 0:
        library = MPI.Get_library_version().split("\n")[0].strip()
        where = f"{cores} cores, {'each bound to one' if bound else 'not bound'}"
        kind = spar.transport().name
        print(f"{world.Get_size()} ranks on {where}, {kind}, bf16, torch {torch.__version__}, {library}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
