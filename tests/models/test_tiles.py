# SPDX-License-Identifier: Apache-2.0
"""spar.parallelize(tile=): models of transformers have the values and gradients of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.averages import gradients
from helpers.float64 import in_float64
from helpers.llms import VOCABULARY, adapted, maker, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import spar

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp", "peft"]
PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gemma2", "qwen3_moe")]
POOL = (2, 4)
Group = dist.ProcessGroup
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


def step(model: Any, batch: dict[str, Tensor], group: Group) -> tuple[float, list[Tensor]]:
    """Return the loss and the averaged gradients."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), gradients(model, group)


def check_step(
    make: Callable[[], Any], batch: dict[str, Tensor], group: Group, tile: int, **options: Any
) -> spar.testing.Report:
    """Compare two steps with those without tiles."""
    torch.manual_seed(0)
    model = make().double().train()
    plain, tiled = copy.deepcopy(model), model
    spar.parallelize(plain, group, **options)
    report = spar.parallelize(tiled, group, tile=tile, **options)
    with in_float64(type(model)):
        torch.manual_seed(1)
        expected = step(plain, batch, group)
        for _ in range(2):  # the first one finds which modules run on tiles
            torch.manual_seed(1)
            loss, found = step(tiled, batch, group)
            assert abs(loss - expected[0]) < 1e-12
            for x, y in zip(found, expected[1], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    return report


HEAD = "Linear and the loss"
CASES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "llama": (maker("llama", tie_word_embeddings=True), {"LlamaMLP", "LlamaRMSNorm", HEAD}),
    "qwen3 moe": (
        maker("qwen3 moe", output_router_logits=True, experts_implementation="eager"),
        {"Qwen3MoeExperts", "Qwen3MoeRMSNorm", HEAD},
    ),
    "gemma": (maker("Gemma2", final_logit_softcapping=3.0), {"Gemma2MLP", "Gemma2RMSNorm", HEAD}),
    "masked": (
        maker("BertForMaskedLM", **NO_DROPOUT),
        {
            "BertIntermediate",
            "BertOutput",
            "BertSelfOutput",
            "BertOnlyMLMHead and the loss",
            "BertOnlyMLMHead",
        },
    ),
    "tokens": (
        maker("BertForTokenClassification", id2label=dict.fromkeys(range(VOCABULARY), "")),
        {"BertIntermediate", HEAD},
    ),
}


def check_types(rank: int, world: int, group: Group) -> None:
    for make, kinds in CASES.values():
        report = check_step(make, whole(2, 37), group, tile=7)
        assert {each.module for each in report.tiled} == kinds, report


def test_steps_are_exact(pool: Ranks) -> None:
    pool(2, check_types)


def check_sizes(rank: int, world: int, group: Group) -> None:
    make = maker("llama")
    for tile, total in ((1, 11), (5, 40), (64, 40)):
        report = check_step(make, whole(1, total), group, tile)
        assert bool(report.tiled) == (tile < 40)
    check_step(make, whole(1, 41), group, 4, layout="zigzag")


@pytest.mark.parametrize("world", [1, 3])
def test_tiles_of_all_sizes(pool: Ranks, world: int) -> None:
    pool(world, check_sizes)


def check_checkpoints(rank: int, world: int, group: Group) -> None:
    """Checkpoints of both kinds run tiles again; a frozen weight receives no gradient."""
    for is_reentrant in (False, True):

        def make(is_reentrant: bool = is_reentrant) -> Any:
            model = maker("llama")()
            model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
            return model

        check_step(make, whole(1, 22), group, 5)
    report = check_step(adapted, whole(1, 22), group, 5)
    assert "LlamaMLP" in {each.module for each in report.tiled}


def test_checkpoints_and_adapters(pool: Ranks) -> None:
    pool(2, check_checkpoints)


def check_fsdp(rank: int, world: int, group: Group) -> None:
    """FSDP2 shards an MLP alone, and its layer; in bfloat16 tiles lose no more than one sum does."""
    batch, results = whole(1, 40), []
    for kind, tile in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 3)):
        torch.manual_seed(0)
        model = maker("llama")().to(torch.bfloat16).to(kind)
        spar.parallelize(model, group, tile=tile)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer.mlp, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(**batch).loss.backward()
        results.append(torch.cat([p.grad.full_tensor().float().flatten() for p in model.parameters()]))
    exact, plain, tiled = results
    assert (tiled - exact).norm() < 1.1 * (plain - exact).norm()


def test_fsdp(pool: Ranks) -> None:
    pool(2, check_fsdp)


def check_logits(rank: int, world: int, group: Group) -> None:
    """A loss leaves no logits; other code has them, with gradients, and so has evaluation."""
    torch.manual_seed(0)
    one, batch = maker("Gemma2", final_logit_softcapping=3.0)().double(), whole(1, 30)
    tiled = copy.deepcopy(one)
    spar.parallelize(tiled, group, tile=4)
    assert tiled(**batch).logits is None
    with torch.no_grad():
        assert tiled(**batch).logits.shape == (1, 30, VOCABULARY)
    results = []
    for model in (one, tiled):
        model.zero_grad()
        logits = model(input_ids=batch["input_ids"]).logits
        loss = logits.log_softmax(-1)[..., 3].square().mean()
        loss.backward()
        results.append([loss.detach(), *gradients(model, group)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-8)


def test_logits(pool: Ranks) -> None:
    pool(2, check_logits)
