# SPDX-License-Identifier: Apache-2.0
"""spar.attention in models that DDP, FSDP and FSDP2 wrap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import finish, start
from helpers.whole_attention import whole_attention
from torch import Tensor, nn

import spar
from spar import SequenceLayout

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
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = init_device_mesh("cpu", (4,))
    torch.set_default_dtype(torch.float64)
    batch = torch.randint(11, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    alone = Model()
    sum(alone(tokens, whole_attention) for tokens in batch).backward()
    layout = SequenceLayout.zigzag(13, mesh["cp"].get_group())
    tokens = batch[mesh["dp"].get_local_rank()][:, layout.index()]
    for wrap in ("ddp", "fsdp2", "fsdp2 by layer"):
        model: Any = Model()
        if wrap == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.layers if wrap == "fsdp2 by layer" else ():
                fully_shard(layer, mesh=flat)
            fully_shard(model, mesh=flat)

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            return spar.attention(q, k, v, layout, causal=causal, method=method)

        (model(tokens, attend) * 4).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            assert torch.allclose(grad, other.grad, atol=1e-10), (wrap, method)
    dist.barrier()


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_wrappers_of_data_parallel_training(tmp_path: Path, method: str) -> None:
    assert finish(start(check_wrapped, 4, tmp_path, method, set_up=False), 150) == [0] * 4
