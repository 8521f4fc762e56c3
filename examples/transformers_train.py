# SPDX-License-Identifier: Apache-2.0
"""Train a stock transformers model with its sequences sharded over ranks, beside one process.

    torchrun --standalone --nproc-per-node 4 examples/transformers_train.py [--dp 2] [--fsdp]

The text is Python's own documentation. Both runs start from one seed and use the same batches, so their
losses must agree in each step. If they do not, all ranks exit with an error.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from llm import documents, largest_difference, make_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import spar

TOLERANCE = 1e-4  # relative, of losses in float32


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dp", type=int, default=1, help="data-parallel groups; the other ranks share a sequence"
    )
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters by FSDP2, too; else DDP")
    parser.add_argument("--method", choices=("ulysses", "gather", "ring"), help="of attention")
    parser.add_argument("--zigzag", action="store_true", help="balance the work of gather and ring")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2, help="samples of all data-parallel groups")
    parser.add_argument("--seq", type=int, default=509, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 4 examples/transformers_train.py")
    if int(os.environ["WORLD_SIZE"]) % args.dp:
        parser.error(f"--dp must divide the number of ranks, {os.environ['WORLD_SIZE']}, got {args.dp}")
    if args.batch % args.dp:
        parser.error(f"--batch must be a multiple of --dp, got {args.batch} and {args.dp}")
    return args


def make_batches(args: Namespace) -> list[dict[str, Tensor]]:
    text = torch.cat(documents())
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - args.seq, (args.steps, args.batch, 1), generator=generator)
    batches = text[starts + torch.arange(args.seq)]
    return [{"input_ids": ids, "labels": ids} for ids in batches]


def train_in_one_process(args: Namespace, batches: list[dict[str, Tensor]]) -> list[float]:
    model, losses = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def wrapped(model: Any, args: Namespace, mesh: DeviceMesh) -> Any:
    """Let DDP or FSDP2 average gradients over all ranks."""
    if not args.fsdp:
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_sharded(args: Namespace, batches: list[dict[str, Tensor]]) -> tuple[list[float], Any]:
    """Return the losses, and the report of what ran where."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (args.dp, world // args.dp), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh["dp"], mesh["cp"]
    model, losses = make_model(), []
    layout = "zigzag" if args.zigzag else "even"
    report = spar.parallelize(model, cp, method=args.method, layout=layout)
    model = wrapped(model, args, mesh)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for whole in batches:
        batch = {name: x[dp.get_local_rank() :: dp.size()] for name, x in whole.items()}
        count = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(count, group=dp.get_group())  # the labels of all samples
        loss = model(**batch, num_items_in_batch=count).loss
        (loss * dp.size()).backward()  # the wrapper averages what is to be summed over dp
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=dp.get_group())
        losses.append(float(total))
    return losses, report


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = make_batches(args)
    known = [train_in_one_process(args, batches) if rank == 0 else []]
    dist.broadcast_object_list(known, src=0)
    (single,) = known
    begin = time.perf_counter()
    losses, report = train_sharded(args, batches)
    seconds = time.perf_counter() - begin
    error = largest_difference(losses, single)
    if rank == 0:
        print(" step   one process   sharded")
        for step, (one, other) in enumerate(zip(single, losses, strict=True)):
            print(f"{step:5}   {one:11.6f}   {other:.6f}")
        how = f"dp {args.dp} x cp {world // args.dp}, {'FSDP2' if args.fsdp else 'DDP'}"
        print(f"{world} ranks ({how}): {len(losses)} steps in {seconds:.1f} s")
        print(report)
    dist.destroy_process_group()
    if not error < TOLERANCE or not losses[-1] < losses[0]:
        sys.exit(f"losses differ by {error:.1e}, relative; allowed: {TOLERANCE:.0e}. They must also fall")
    if rank == 0:
        print(f"proved: a stock Qwen3ForCausalLM learns the same over {world} ranks as in one process.")
        print(f"All {len(losses)} losses agree within {error:.0e}, after {len(losses) - 1} updates.")


if __name__ == "__main__":
    main()
