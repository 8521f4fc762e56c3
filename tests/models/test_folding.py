# SPDX-License-Identifier: Apache-2.0
"""Folding models under spar.parallelize: ESMFold, and blocks like those of Boltz and OpenFold.

Their pair tensors [B, N, N, C] are sharded by rows: work, memory and what ranks receive are divided.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.float64 import in_float64
from helpers.folding import ROWS, C, Product, Trunk, esmfold, inputs
from helpers.traffic import sent
from torch import Tensor, nn

import spar

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from folding import Peak

PRELOAD = ["transformers.models.esm.modeling_esmfold"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def compare(group: Group, model: nn.Module, whole: nn.Module, given: list[Tensor]) -> float:
    """Return the largest relative error of outputs and gradients, of a sharded model and one process."""
    found, expected = [_step(each, given) for each in (model, whole)]
    for x in found[2:]:
        dist.all_reduce(x, group=group)
        x /= group.size()
    scale = max(x.abs().max().item() for x in expected[3:])
    scales = [*(x.abs().max().item() for x in expected[:3]), *[scale] * len(expected[3:])]
    errors = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    return max(error / each for error, each in zip(errors, scales, strict=True))


def _step(model: nn.Module, given: list[Tensor]) -> list[Tensor]:
    """Return a step's outputs, and the gradients of the pair tensor and of all parameters."""
    first, z, *masks = given
    z = z.clone().requires_grad_()
    torch.manual_seed(3)
    outputs = model(first, z, *masks)
    sum(x.square().mean() for x in outputs).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [x.detach() for x in outputs] + [z.grad, *gradients]


def check_exact(rank: int, world: int, group: Group, kind: str, dropout: float, chunk: int | None) -> None:
    length = 14
    model = Trunk(kind, dropout, chunk)
    whole = copy.deepcopy(model)
    report = spar.parallelize(model, group)
    assert compare(group, model, whole, inputs(kind, length)) < 1e-12
    divided = (length, C, ROWS) if kind == "evoformer" else (length, C)
    most = max(-(-size // world) / size for size in divided)
    assert report.share <= most + 0.01, report
    assert not report.functions, report


CASES = [
    ("esmfold", 0.0, None, 2),
    ("esmfold", 0.2, 4, 3),
    ("pairformer", 0.2, None, 3),
    ("pairformer", 0.0, None, 7),
    ("evoformer", 0.0, None, 2),
    ("evoformer", 0.0, None, 4),
]


@pytest.mark.parametrize("kind, dropout, chunk, world", CASES)
def test_trunks_are_exact(ranks: Ranks, kind: str, dropout: float, chunk: int | None, world: int) -> None:
    ranks(world, check_exact, kind, dropout, chunk)


# By kind: the length, and the most that a rank holds and receives in a forward, in sizes of the pair tensor.
COSTS = {"esmfold": (48, 8.5, 6.0), "pairformer": (32, 6.5, 6.0), "evoformer": (32, 9.0, 6.0)}


def cost(group: Group, model: nn.Module, given: list[Tensor]) -> tuple[float, float]:
    """Return what a forward holds, and the mean of what ranks receive, in sizes of the pair tensor."""
    before = sent()
    with torch.no_grad(), Peak() as peak:
        model(*given)
    total = torch.tensor([sent() - before], dtype=torch.int64)
    dist.all_reduce(total, group=group)
    size = given[1].numel() * given[1].element_size()
    return peak.bytes / size, int(total) / size / group.size()


def check_cost(rank: int, world: int, group: Group, kind: str) -> None:
    length, held, received = COSTS[kind]
    model, given = Trunk(kind), inputs(kind, length)
    spar.parallelize(model, group)
    found = cost(group, model, given)
    assert found[0] <= held and found[1] <= received, found


@pytest.mark.parametrize("kind", COSTS)
def test_memory_and_exchanges_are_divided(ranks: Ranks, kind: str) -> None:
    """One process holds 31, 24 and 33 pair tensors."""
    ranks(4, check_cost, kind)


def check_whole_model(rank: int, world: int, group: Group, chunk: int | None) -> None:
    model = esmfold(chunk)
    whole = copy.deepcopy(model)
    ids = torch.randint(20, (1, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    with in_float64(type(model)):
        expected, wanted = step(whole, ids, mask)
        report = spar.parallelize(model, group)
        found, gradients = step(model, ids, mask)
    for name in (*LEARNT, "positions", "plddt"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    for gradient, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient / world, right, rtol=1e-10, atol=1e-10)
    assert report.share <= -(-13 // world) / 13 + 0.02, report
    assert not any(each.in_block for each in report.functions), report


# Rotations of the structure module, through which others are computed, are in float32.
LEARNT = ("s_s", "s_z", "distogram_logits", "ptm_logits")


def step(model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the output, and gradients of a loss of it."""
    found = model(ids, attention_mask=mask)
    sum(found[name].square().mean() for name in LEARNT).backward()
    return found, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("world, chunk", [(2, None), (3, 4)])
def test_esmfold_is_exact(ranks: Ranks, world: int, chunk: int | None) -> None:
    ranks(world, check_whole_model, chunk)


class Dropping(nn.Module):
    """A block with dropout in its chunks."""

    def forward(self, x: Tensor) -> Tensor:
        from transformers.models.esm.openfold_utils.chunk_utils import chunk_layer

        return chunk_layer(lambda x: torch.dropout(x, 0.5, True), {"x": x}, 2, 2)


def check_draws(rank: int, world: int, group: Group) -> None:
    model = nn.Sequential(Dropping())
    spar.parallelize(model, group, blocks=["0"])
    with pytest.raises(RuntimeError, match=r"chunk_layer at .* draws other numbers .* pass chunk_size=None"):
        model(torch.randn(1, 8, 4))


def test_chunks_that_draw_are_refused(ranks: Ranks) -> None:
    ranks(2, check_draws)


def check_fault(rank: int, world: int, group: Group) -> None:
    model = Trunk("pairformer")
    whole = copy.deepcopy(model)
    for product in [module for module in model.modules() if isinstance(module, Product)]:
        product.outgoing = not product.outgoing
    spar.parallelize(model, group)
    assert compare(group, model, whole, inputs("pairformer", 14)) > 0.01


def test_a_fault_is_seen(ranks: Ranks) -> None:
    """Products of incoming edges for those of outgoing ones differ."""
    ranks(2, check_fault)


def check_compiled(rank: int, world: int, group: Group) -> None:
    model = Trunk("esmfold")
    whole, given = copy.deepcopy(model), inputs("esmfold", 14)
    report = spar.parallelize(model, group)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    model(*given)  # the first forward is eager
    assert compare(group, model, whole, given) < 1e-12
    assert not report.eager, report


@pytest.mark.compiler
def test_compiled_blocks_are_exact(ranks: Ranks) -> None:
    ranks(2, check_compiled)
