# SPDX-License-Identifier: Apache-2.0
"""spar.integrations.transformers in training: wrappers, adapters, checkpoints, accumulation, Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.llms import (
    ROWS,
    TOLERANCE,
    check_exact,
    check_gradients,
    gradients_of_one_process,
    maker,
    meshes,
    packed,
    recipe,
    rows,
    seeded,
    sharding,
    whole,
    zigzag,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import spar
from spar.integrations.transformers import register, shard, total_loss

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp", "peft"]
POOL = (2, 4)
Group = dist.ProcessGroup


# ---- one group, gradients summed ----


def check_checkpointing(rank: int, world: int, group: Group, reentrant: bool) -> None:
    make = maker("qwen3")

    def checkpointed() -> Any:
        model = make()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    for method in ("ulysses", "ring"):
        for batch in (whole(), packed(5, 20, 12)):
            check_exact(checkpointed, batch, group, method=method)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(pool: Ranks, reentrant: bool) -> None:
    pool(2, check_checkpointing, reentrant)


def check_lora(rank: int, world: int, group: Group) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    def adapted() -> Any:
        return get_peft_model(maker("llama")(), LoraConfig(r=4, init_lora_weights=False))

    assert sum(p.requires_grad for p in adapted().parameters()) == 8
    check_exact(adapted, whole(), group, layout=zigzag)
    prompt = get_peft_model(maker("llama")(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="the adapter 'default' adds virtual tokens"):
        sharding(group)(prompt, whole())


def test_lora(pool: Ranks) -> None:
    pool(2, check_lora)


def check_loaded(rank: int, world: int, group: Group, folder: Path) -> None:
    """A model from disk, which is loaded with the attention, or gets it afterwards."""
    from transformers import AutoModelForCausalLM

    register()
    if rank == 0:
        seeded(maker("mistral"), "sdpa").save_pretrained(folder)
    spar.all_gather(torch.zeros(1), group)  # rank 0 has saved
    for given in ({}, {"attn_implementation": "spar"}):

        def load(given: dict[str, str] = given) -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder, **given)
            if given:  # compare's first model runs in one process
                model.set_attn_implementation("sdpa")
            return model.train()

        check_exact(load, whole(), group)


def test_models_from_disk(pool: Ranks, tmp_path: Path) -> None:
    pool(2, check_loaded, tmp_path)


def check_embeddings(rank: int, world: int, group: Group) -> None:
    """inputs_embeds with parameters before the split: their gradients are summed as all others."""
    make, batch = maker("llama"), whole()
    expected = gradients_of_one_process(make, batch)
    model = seeded(make, "spar")
    given = {"inputs_embeds": model.model.embed_tokens(batch["input_ids"]), "labels": batch["labels"]}
    model(**shard(model, given, group=group, token_group=group)).loss.backward()
    for p in model.parameters():
        p.grad = spar.all_gather(p.grad[None], group).sum(0)
    check_gradients(model, expected)


def test_inputs_embeds(pool: Ranks) -> None:
    pool(2, check_embeddings)


def check_compiled(rank: int, world: int, group: Group) -> None:
    """Rank 0 compiles, so that only one process does."""
    model = seeded(maker("qwen3", num_hidden_layers=1), "spar")  # a second one would be traced as the first
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for total in (24, 29, 37, 46):
        part = shard(forward, whole(1, total), group=group, token_group=group, method="ulysses")
        found = []
        for run in (model, forward):
            model.zero_grad()
            loss = run(**part).loss
            loss.backward()
            found.append([loss.detach(), model.lm_head.weight.grad, model.model.embed_tokens.weight.grad])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in ((1, 2) if rank == 0 else (0,)), graphs


def test_lengths_compile_twice(pool: Ranks) -> None:
    pool(2, check_compiled, timeout=280)


# ---- dp 2 x cp 2, gradients averaged ----


def check_fsdp2(rank: int, world: int, group: Group, folder: Path) -> None:
    """Over all ranks, and replicated over dp; the second with checkpointing. Saved, and loaded."""
    import torch.distributed.checkpoint as dcp

    mesh, dp, cp = meshes()
    make, batch = maker("qwen3"), whole(ROWS)
    expected = gradients_of_one_process(make, batch)
    for over in (mesh._flatten("world"), mesh):
        model = seeded(make, "spar")
        if over is mesh:
            model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        part = shard(model, rows(batch, dp), group=cp, token_group=dp)
        loss = model(**part).loss * world
        loss.backward()
        check_gradients(model, expected)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        saved = float(model(**part).loss)
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        assert float(model(**part).loss) == saved and saved * world != float(loss)


def test_fsdp2_and_distributed_checkpoints(pool: Ranks, tmp_path: Path) -> None:
    pool(4, check_fsdp2, tmp_path)


def check_ddp(rank: int, world: int, group: Group) -> None:
    """With two micro-batches, of different numbers of labels."""
    _, dp, cp = meshes()
    make, batches = maker("llama"), [whole(ROWS), whole(ROWS, 23)]
    expected = gradients_of_one_process(make, *batches)
    model = DistributedDataParallel(seeded(make, "spar"))
    mine = [rows(batch, dp) for batch in batches]
    count = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in mine]).sum()
    dist.all_reduce(count, group=dp.get_group())
    with model.no_sync():
        part = shard(model, mine[0] | {"num_items_in_batch": count}, group=cp)
        losses = [model(**part).loss]
        (losses[0] * world).backward()
    part = shard(model, mine[1] | {"num_items_in_batch": count}, group=cp)
    losses.append(model(**part).loss)
    (losses[1] * world).backward()
    check_gradients(model, expected)
    alone = seeded(make, "sdpa")
    total = sum(total_loss(loss, group=cp, token_group=dp) for loss in losses)
    wanted = sum(alone(**batch, num_items_in_batch=count).loss.detach() for batch in batches)
    torch.testing.assert_close(total, wanted)


def test_ddp_and_gradient_accumulation(pool: Ranks) -> None:
    pool(4, check_ddp)


def check_total(rank: int, world: int, group: Group) -> None:
    """The value to log: equal on all ranks to the bit, by each group that shard takes, without a gradient."""
    _, dp, cp = meshes()
    model, batch = seeded(maker("llama"), "spar"), whole(ROWS)
    expected = float(seeded(maker("llama"), "sdpa")(**batch).loss.detach())
    for tokens in (dp, group):
        loss = model(**shard(model, rows(batch, dp), group=cp, token_group=tokens)).loss
        total = total_loss(loss, group=cp, token_group=tokens)
        assert float(total) == pytest.approx(expected) and not total.requires_grad
        assert abs(float(loss.detach()) / expected - 1) > 0.1, "a rank's part"
        assert len(set(spar.all_gather(total[None], group).tolist())) == 1
    loss = model(**shard(model, batch)).loss
    assert float(total_loss(loss)) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"total_loss on rank . of 2: token_group is None, and group has 2"):
        total_loss(loss, group=cp)
    wrong = loss if rank else float(loss.detach())
    with pytest.raises((ValueError, spar.MismatchError), match=r"loss is .*; expected the 0-dim loss"):
        total_loss(wrong)  # type: ignore[arg-type]


def test_total_loss_is_that_of_one_process(pool: Ranks) -> None:
    pool(4, check_total)


# ---- the pages' recipes ----


def samples() -> list[dict[str, Tensor]]:
    """Return eight samples that begin with 1 to 8, some of them with few labels."""
    found = []
    for i in range(8):
        ids = torch.arange(37).add(i) % 50 + 1
        found.append(
            {"input_ids": ids, "labels": ids.masked_fill(torch.arange(37) < 30 * (i % 3 == 0), -100)}
        )
    return found


def trained(steps: list[list[int]], bf16: bool = False) -> tuple[nn.Module, list[float]]:
    """Return the model that one process trains on the samples of each step, and its losses."""
    model, losses, all_samples = seeded(maker("llama"), "sdpa"), [], samples()
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    for chosen in steps:
        batch = {name: torch.stack([all_samples[i][name] for i in chosen]) for name in all_samples[0]}
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        descent.step()
        descent.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def check_parameters(model: nn.Module, expected: nn.Module, tolerance: float = TOLERANCE) -> None:
    for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() < tolerance * p.abs().max(), name


def run_loader(rank: int, world: int, group: Group) -> None:
    from torch.utils.data import DataLoader, DistributedSampler

    model = DistributedDataParallel(seeded(maker("llama"), "spar"))
    names = {
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "dataset": samples(),
        "dist": dist,
        "epochs": 2,
        "init_device_mesh": init_device_mesh,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "spar": spar,
    }
    exec(recipe("dataloading.md", "DistributedSampler("), names)
    steps: list[list[int]] = []
    for epoch in range(2):
        orders = []
        for half in range(2):
            sampler: Any = DistributedSampler(samples(), 2, half, seed=0)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        steps += [orders[0][i : i + 2] + orders[1][i : i + 2] for i in (0, 2)]
    assert names["step"] == len(steps) == 4 and sorted(steps[0] + steps[1]) == list(range(8))
    check_parameters(model, trained(steps)[0])


def test_recipe_for_data_loading(pool: Ranks) -> None:
    pool(4, run_loader)


def run_trainer(rank: int, world: int, group: Group, folder: Path, bf16: bool) -> None:
    """Two steps of two micro-batches."""
    from transformers import TrainingArguments

    names: dict[str, Any] = {}
    exec(recipe("transformers.md", "(Trainer)"), names)
    _, dp, cp = meshes()
    model = seeded(maker("llama"), "spar")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=bf16,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = names["SequenceTrainer"](
        model, arguments, train_dataset=samples(), optimizers=(optimizer, constant), cp=cp, dp=dp
    )
    order = [int(i) for batch in trainer.get_train_dataloader() for i in (batch["input_ids"][:, 0] - 1)]
    trainer.train()
    orders: list[Any] = [None] * world
    dist.all_gather_object(orders, order)
    assert orders[0] == orders[1] and sorted(orders[0] + orders[2]) == list(range(8))
    expected, losses = trained([orders[0][i : i + 2] + orders[2][i : i + 2] for i in (0, 2)], bf16)
    check_parameters(model, expected, 1e-3 if bf16 else TOLERANCE)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=2e-3 if bf16 else 1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_recipe_for_trainer(pool: Ranks, tmp_path: Path, bf16: bool) -> None:
    pool(4, run_trainer, tmp_path, bf16)
