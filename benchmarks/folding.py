# SPDX-License-Identifier: Apache-2.0
"""Count what a rank computes, receives and holds of blocks of ESMFold's trunk under spar.parallelize.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/folding.py 128 256

Two blocks of transformers with pairs of a width of 128 in 4 heads. Received and held are in sizes of the pair
tensor z, N^2 * 128 items, of the rank that has most: held are tensors that are made in a step, without
parameters and inputs, but with the whole output.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

import spar


class Peak(TorchDispatchMode):
    """The most bytes of tensors that are made inside of it and alive at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}  # by the addresses of storages
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given and storage.device.type != "meta":
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {at: each for at, each in self.made.items() if not each[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.made.values()))
        return out


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(value) if isinstance(x, Tensor)]


class Trunk(nn.Module):
    """Two blocks of ESMFold."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        widths = {"sequence_state_dim": 256, "sequence_head_width": 32}
        widths |= {"pairwise_state_dim": 128, "pairwise_head_width": 32}
        config = SimpleNamespace(**widths, dropout=0.0)
        self.blocks = nn.ModuleList([EsmFoldTriangularSelfAttentionBlock(config) for _ in range(2)])
        self.chunk = chunk

    def forward(self, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            s, z = block(s, z, chunk_size=self.chunk)
        return s, z


def received() -> int:
    """Return the bytes that others sent to this rank so far: as many as it sent, where shares are equal."""
    return sum(size for name, size in spar.memory_stats().items() if name.startswith("sent."))


def cost(model: nn.Module, s: Tensor, z: Tensor, backward: bool) -> list[float]:
    """Return what a rank receives and holds at most, in sizes of z."""
    before = received()
    with torch.set_grad_enabled(backward), Peak() as peak:
        outputs = model(s, z)
        if backward:
            sum(x.square().mean() for x in outputs).backward()
    found = torch.tensor([received() - before, peak.bytes]) / (z.numel() * z.element_size())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("residues", nargs="*", type=int, default=[128], help="N")
    parser.add_argument("--chunk", type=int, help="rows of a chunk of triangle attention")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Trunk(args.chunk)
    report = spar.parallelize(model, dist.group.WORLD)
    for residues in args.residues:
        s, z = torch.randn(1, residues, 256), torch.randn(1, residues, residues, 128)
        forward, step = cost(model, s, z, False), cost(model, s, z, True)
        if dist.get_rank() == 0:
            print(
                f"{dist.get_world_size()} ranks, {residues} residues: share {report.share:.3f}; forward "
                f"received {forward[0]:.2f}, held {forward[1]:.1f}; step received {step[0]:.2f}, "
                f"held {step[1]:.1f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
