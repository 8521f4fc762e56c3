# SPDX-License-Identifier: Apache-2.0
"""Compare rules of docs/gradients.md, on real ranks, with the gradients of one process.

test_loss.py checks the factors of the losses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import finish, start
from torch import Tensor, nn

import spar

PAGE = (Path(__file__).parents[2] / "docs" / "gradients.md").read_text()
P, BATCH, HEADS, WIDTH, VOCABULARY = 2, 1, 3, 6, 5
IGNORED = -100


def table(heading: str) -> list[list[str]]:
    """Return the rows under a heading, without backticks."""
    lines = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


class Model(nn.Module):
    """Attention over an unevenly split sequence; the parameter `positions` is used before the split."""

    def __init__(self, seq: int, scale: str | None = "down") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seq, self.scale = seq, scale
        self.positions = nn.Parameter(torch.randn(seq, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's losses, one per token."""
        positions = spar.split_forward_gather_backward(self.positions, group, 0, grad_scale=self.scale)
        x = spar.split_forward_gather_backward(x, group, 1) + positions
        qkv = self.qkv(x).unflatten(2, (HEADS, -1))
        q, k, v = spar.all_to_all(qkv, group, 2, 1, self.seq).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        logits = self.out(spar.all_to_all(y, group, 1, 2, HEADS).flatten(2))
        own = spar.split_forward_gather_backward(labels, group, 1)
        return F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none").view_as(own)


def batches(copies: int, seq: int) -> list[tuple[Tensor, Tensor]]:
    """Return one batch per data-parallel copy, each with a different number of labels that count."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for copy in range(copies):
        labels = torch.randint(VOCABULARY, (BATCH, seq), generator=generator)
        labels[:, : 2 * copy] = IGNORED
        made.append((torch.randn(BATCH, seq, WIDTH, generator=generator, dtype=torch.float64), labels))
    return made


def expected_gradients(seq: int, data: list[tuple[Tensor, Tensor]], alone: dist.ProcessGroup) -> list[Tensor]:
    model = Model(seq)
    tokens = sum(int((labels != IGNORED).sum()) for _, labels in data)
    loss: Any = sum(model(x, labels, alone).sum() for x, labels in data) / tokens
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def ddp(model: nn.Module) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, lambda: [p.grad for p in model.parameters() if p.grad is not None]


def fsdp2(model: nn.Module, mesh: Any = None) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh or dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped: Any = fully_shard(model, mesh=mesh)
    return wrapped, lambda: [p.grad.full_tensor() for p in wrapped.parameters()]


def summed(model: nn.Module) -> tuple[nn.Module, Callable[[], list[Tensor]]]:
    def reduced() -> list[Tensor]:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
        return gradients

    return model, reduced


WRAPPERS = (ddp, fsdp2, summed)  # in the order of the page's columns


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the error of each parameter's gradient, relative to its largest element."""
    pairs = zip(found, expected, strict=True)
    return [float((own - one).abs().max() / one.abs().max()) for own, one in pairs]


class Setting:
    """One of W ranks in sequence groups of P, with the data of its copy."""

    def __init__(self, rank: int, seq: int) -> None:
        torch.set_default_dtype(torch.float64)
        self.seq, self.W, self.P = seq, dist.get_world_size(), P
        groups = [dist.new_group([*range(first, first + P)]) for first in range(0, self.W, P)]
        alone = [dist.new_group([other]) for other in range(self.W)][rank]
        self.group = groups[rank // P]
        self.data = data = batches(self.W // P, seq)
        self.x, self.labels = data[rank // P]
        self.tokens = torch.tensor(sum(int((labels != IGNORED).sum()) for _, labels in data))
        self.expected = expected_gradients(seq, data, alone)

    def loss(self, model: nn.Module, code: str, gather_scale: str | None = "up", **more: object) -> Tensor:
        def gather(own: Tensor) -> Tensor:
            sizes = spar.cal_split_sizes(self.seq, P)
            return spar.gather_forward_split_backward(own, self.group, 1, sizes, gather_scale)

        losses = model(self.x, self.labels, self.group)
        own = (spar.split_forward_gather_backward(self.labels, self.group, 1) != IGNORED).sum()
        names: dict[str, object] = {"gather": gather, "losses": losses, "tokens": self.tokens, "own": own}
        names |= {"mean_loss": spar.mean_loss, "world": dist.group.WORLD}
        loss: Tensor = eval(code, names | more)
        return loss


def average_means(rank: int, folder: Path) -> None:
    setting = Setting(rank, 11)
    model, gradients = ddp(Model(setting.seq))
    setting.loss(model, "losses.mean()").backward()  # type: ignore[no-untyped-call]
    apart = errors(gradients(), setting.expected)
    (folder / f"{rank}.apart").write_text(str(max(apart)))
    assert 0.05 < max(apart) < 0.2, apart
    dist.barrier()


def test_mean_per_rank_is_wrong(tmp_path: Path) -> None:
    assert "differ from those of one process by about 10 %" in re.sub(r"\s+", " ", PAGE)
    assert finish(start(average_means, 2, tmp_path, set_up=False), 60) == [0, 0]


def check_without_scales(rank: int, folder: Path) -> None:
    setting = Setting(rank, 11)
    for loss, between, before in table("With grad_scale=None"):
        model, gradients = summed(Model(setting.seq, None))
        setting.loss(model, loss, None).backward()  # type: ignore[no-untyped-call]
        found = gradients()
        assert (between, before) == ("sum", "average")
        found[0] /= P  # positions
        assert max(errors(found, setting.expected)) < 1e-12, loss
    dist.barrier()


def test_grad_scale_none_matches_one_process(tmp_path: Path) -> None:
    assert finish(start(check_without_scales, 2, tmp_path, set_up=False), 60) == [0, 0]
