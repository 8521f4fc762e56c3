# SPDX-License-Identifier: Apache-2.0
"""Uses of multimodal models by spar.parallelize that go wrong elsewhere: batches, wrappers, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.multimodal import IMAGE, Batch, made
from test_multimodal import LIMIT, PRELOAD as _PRELOAD, check_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import spar
from spar.testing import compare

PRELOAD = [*_PRELOAD, "torch.distributed.fsdp", "peft"]
pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def batch_of(length: int, *rows: list[tuple[int, tuple[int, int]]]) -> Batch:
    """Return rows of Qwen3-VL, each with images: where they begin, and their sizes in patches."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 59, (len(rows), length), generator=generator)
    grids = []
    for row, images in enumerate(rows):
        for start, (height, width) in images:
            ids[row, start - 1] = 61
            ids[row, start : start + height * width // 4] = IMAGE
            grids.append([1, height, width])
    found: Batch = {"input_ids": ids, "labels": ids.masked_fill(ids > 59, -100), "use_cache": False}
    if grids:
        sizes = torch.tensor(grids)
        shape = int(sizes.prod(1).sum()), 3 * 2 * 16
        pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
        found |= {"pixel_values": pixels, "image_grid_thw": sizes}
        found["mm_token_type_ids"] = (ids == IMAGE).int()
    return found


def padded(batch: Batch, left: int, right: int) -> Batch:
    """Return the batch with padding on the left of its first row, and on the right of its last."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :left] = 0
    mask[-1, mask.size(1) - right :] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask, "labels": labels}


BATCHES: dict[str, Batch] = {
    "text alone": batch_of(37, [], []),
    "several images in a row, over the borders of shards": batch_of(
        53, [(4, (4, 6)), (20, (6, 8))], [(24, (6, 6))]
    ),
    "images on the first rank alone": batch_of(61, [(2, (4, 4))], [(3, (6, 4))]),
    "an image that is most of the row": batch_of(29, [(3, (8, 10))]),
    "padding on both sides": padded(batch_of(43, [(12, (4, 6))], [(6, (6, 8))]), 5, 7),
    "one text token for some ranks": batch_of(7, [(2, (4, 4))]),
}


def check_batches(rank: int, world: int, group: Group) -> None:
    model, _ = made("qwen3_vl")
    whole = copy.deepcopy(model)
    spar.parallelize(model, group)
    for name, batch in BATCHES.items():
        out, expected = model(**batch), whole(**batch)
        assert abs(out.loss - expected.loss) <= LIMIT * expected.loss, name
        valid = batch["labels"] != -100
        error = (out.logits - expected.logits)[valid].abs().max()
        assert error <= LIMIT * expected.logits.abs().max(), name
        for each, loss in ((model, out.loss), (whole, expected.loss)):
            each.zero_grad()
            loss.backward()
        check_gradients(model, whole, group)


@pytest.mark.parametrize("world", [2, 4])
def test_batches_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_batches)


# ---- training: batches with and without images, one behind the other ----


def train(model: nn.Module, run: Callable[..., Any], batches: list[Batch]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in batches:
        optimizer.zero_grad()
        run(**batch).loss.backward()
        optimizer.step()


def trained_in_one_process(batches: list[Batch]) -> nn.Module:
    whole, _ = made("qwen3_vl")
    train(whole, whole, batches)
    return whole


def same_parameters(model: nn.Module, whole: nn.Module) -> None:
    for (name, parameter), own in zip(model.named_parameters(), whole.parameters(), strict=True):
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert (found - own).abs().max() <= 100 * LIMIT * own.abs().max().clamp(min=1e-3), name


TRAINING = [BATCHES[name] for name in list(BATCHES)[1::-1]] + [BATCHES["images on the first rank alone"]]


def check_ddp(rank: int, world: int, group: Group) -> None:
    """Without find_unused_parameters DDP waits for gradients of a tower that ran on no image."""
    model, _ = made("qwen3_vl")
    spar.parallelize(model, group)
    train(model, DistributedDataParallel(model, process_group=group, find_unused_parameters=True), TRAINING)
    same_parameters(model, trained_in_one_process(TRAINING))


def check_fsdp(rank: int, world: int, group: Group) -> None:
    """FSDP2 gathers the tower's parameters on ranks whose tokens have no image, too."""
    model: Any = made("qwen3_vl")[0]
    spar.parallelize(model, group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(block, mesh=mesh)
    fully_shard(model.model.visual, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model, TRAINING)
    same_parameters(model, trained_in_one_process(TRAINING))


@pytest.mark.parametrize("check", [check_ddp, check_fsdp])
def test_wrappers_train_as_one_process(ranks: Ranks, check: Callable[..., None]) -> None:
    ranks(2, check)


def check_lora(rank: int, world: int, group: Group) -> None:
    """Adapters of the text and of the tower, whose base is frozen."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(4)
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
        return get_peft_model(made("qwen3_vl")[0], config).double()

    model, whole = adapted(), adapted()
    spar.parallelize(model.base_model.model, group)
    for each in (model, whole):
        each(**BATCHES["padding on both sides"]).loss.backward()
    trained = [name for name, p in whole.named_parameters() if p.grad is not None]
    assert any("visual" in name for name in trained) and any("layers" in name for name in trained)
    assert all("lora" in name for name in trained)
    check_gradients(model, whole, group)


def test_adapters_of_text_and_tower_are_exact(ranks: Ranks) -> None:
    ranks(3, check_lora)


def check_accumulation(rank: int, world: int, group: Group) -> None:
    """Micro-batches of unequal counts of labels, each divided by the count of all."""
    model, _ = made("qwen3_vl")
    whole = copy.deepcopy(model)
    spar.parallelize(model, group)
    micro = [BATCHES["padding on both sides"], BATCHES["an image that is most of the row"]]
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro)
    losses: list[Tensor] = []
    for each in (model, whole):
        total = torch.zeros((), dtype=torch.float64)
        for batch in micro:
            loss = each(**batch, num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        losses.append(total)
    assert abs(losses[0] - losses[1]) <= LIMIT * losses[1]
    check_gradients(model, whole, group)


def test_accumulation_is_exact(ranks: Ranks) -> None:
    ranks(2, check_accumulation)


def check_compare(rank: int, world: int, group: Group) -> None:
    def shard(model: nn.Module, batch: Batch) -> Batch:
        spar.parallelize(model, group)
        return batch

    batch = BATCHES["several images in a row, over the borders of shards"]
    report = compare(lambda: made("qwen3_vl")[0], batch, shard, group, reduce="mean", show=False)
    assert report.worst.max_rel_error < 1e-4


def test_compare_takes_multimodal_models(ranks: Ranks) -> None:
    ranks(2, check_compare)


# ---- the tower's work ----


def check_tower(rank: int, world: int, group: Group) -> None:
    """Two equal images in a tower that is nearly all of the work: each rank does its part of it."""
    model: Any = made("qwen3_vl")[0]
    text = model.model.language_model
    text.layers = text.layers[:1]
    report = spar.parallelize(model, group)
    with torch.no_grad():
        model(**batch_of(2 * 36 + 7, [(2, (12, 12)), (40, (12, 12))]))
    assert report.share < 1.02 / world, str(report)
    assert not [each for each in report.functions if each.in_block], str(report)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_work_of_the_tower(ranks: Ranks, world: int) -> None:
    ranks(world, check_tower)
