# SPDX-License-Identifier: Apache-2.0
"""spar.attention in models that DDP, FSDP and FSDP2 wrap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.processes import finish, start
from helpers.whole_attention import whole_attention
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout
from spar._attention import slices
from spar._group.registry import group_of

pytestmark = pytest.mark.one_transport


class Model(nn.Module):
    """Two layers of causal attention over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 48) for _ in range(2))

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(2, (8, 6)).split([4, 2, 2], 2)
            x = x + attend(q, k, v, causal=True).flatten(2)
        return F.cross_entropy(x[..., :11].flatten(0, 1), tokens.flatten(), reduction="sum")


def check_wrapped(rank: int, folder: Path, method: str) -> None:
    """dp x cp, 2 x 2: parameter gradients are averaged over all four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = init_device_mesh("cpu", (4,))
    torch.set_default_dtype(torch.float64)
    batch = torch.randint(11, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    alone = Model()
    sum(alone(tokens, whole_attention) for tokens in batch).backward()
    layout = SequenceLayout.zigzag(13, mesh["cp"].get_group())
    tokens = batch[mesh["dp"].get_local_rank()][:, layout.index()]
    for wrap in ("ddp", "fsdp2", "fsdp2 by layer", "fsdp2 by layer, offloaded"):
        model: Any = Model()
        if wrap == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            policy = CPUOffloadPolicy(pin_memory=False) if "offloaded" in wrap else OffloadPolicy()
            for layer in model.layers if "by layer" in wrap else ():
                fully_shard(layer, mesh=flat, offload_policy=policy)
            fully_shard(model, mesh=flat, offload_policy=policy)

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            return spar.attention(q, k, v, layout, causal=causal, method=method)

        with save_on_cpu() if "offloaded" in wrap else nullcontext():
            loss = model(tokens, attend)
        (loss * 4).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            assert torch.allclose(grad, other.grad, atol=1e-10), (wrap, method)
    dist.barrier()


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_wrappers_of_data_parallel_training(tmp_path: Path, method: str) -> None:
    assert finish(start(check_wrapped, 4, tmp_path, method, set_up=False), 150) == [0] * 4


class Offload(saved_tensors_hooks):
    """Copies what autograd saves, as save_on_cpu does of tensors on a GPU, and counts its bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        super().__init__(self.pack, torch.clone)

    def pack(self, x: Tensor) -> Tensor:
        self.bytes += x.nbytes
        return x.detach().clone()


def check_offload(rank: int, world: int, group: dist.ProcessGroup, method: str) -> None:
    """With exchanges in flight; of a checkpointed block its input alone is saved."""
    layout = SequenceLayout.zigzag(13, group)
    x = torch.randn(1, layout.sizes[rank], 12, 8, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_()

    def block(x: Tensor) -> Tensor:
        q, k, v = (x * x).split(4, 2)
        return spar.attention(q, k, v, layout, causal=True, method=method)

    def gradient(y: Tensor) -> Tensor:
        return torch.autograd.grad(y.square().sum(), x)[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "spans_hosts", lambda *_: True)
        patch.setattr(slices, "LEAST", 1)
        patch.setattr(group_of(group).channel("attention", x.device), "in_flight_from", 0)
        plain, all_saved, saved = gradient(block(x)), Offload(), Offload()
        with all_saved:
            y = block(x)
        assert torch.equal(gradient(y), plain) and all_saved.bytes > 3 * x.nbytes
        with saved:
            y = checkpoint(block, x, use_reentrant=False)
        assert saved.bytes == x.nbytes and torch.equal(gradient(y), plain)


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_offload_of_activations(ranks: Ranks, method: str) -> None:
    ranks(2, check_offload, method)
