# SPDX-License-Identifier: Apache-2.0
"""Models of transformers under spar.parallelize in training, beside one process.

Wrappers, adapters, precision, accumulation, distributed checkpoints, and the pages' recipes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers import llms
from helpers.llms import (
    ROWS,
    SMALL,
    TOLERANCE,
    check_gradients,
    gradients_of_one_process,
    left_padded,
    maker,
    meshes,
    packed,
    recipe,
    rows,
    seeded,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import spar
from spar.testing import compare

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp", "peft"]
POOL = (2, 4)
Group = dist.ProcessGroup
KINDS = (torch.bfloat16, torch.float16)
TOLERANCES = {kind: 10 * torch.finfo(kind).eps for kind in KINDS}  # a mistake is off by 0.1 and more


def check_exact(
    make: Callable[[], Any],
    batch: dict[str, Tensor],
    group: Group,
    tolerance: float = TOLERANCE,
    has_logits: bool = True,
    **options: Any,
) -> None:
    """Compare the loss, equal on all ranks, the logits, and the averaged gradients with one process."""

    def parallelized(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        spar.parallelize(model, group, **options)
        return batch

    report = compare(make, batch, parallelized, group, reduce="mean", show=False)
    for entry in report.entries:  # the gradient of a bias of keys is 0, but for rounding
        zero = entry.reference_norm < 1e-6 and entry.max_abs_error < 1e-6
        assert zero or entry.max_rel_error < tolerance, f"{entry}, {options}\n{report}"
    assert (report.entries[1].name == "logits") == has_logits and report.reference_loss > 1


# ---- one group ----


def adapted(name: str = "llama") -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(maker(name)(), LoraConfig(r=4, init_lora_weights=False))


def check_peft(rank: int, world: int, group: Group) -> None:
    """The adapted model is parallelized, or the model inside of it, before or afterwards."""
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    assert sum(p.requires_grad for p in adapted().parameters()) == 8
    check_exact(adapted, whole(), group, layout="zigzag")
    expected = gradients_of_one_process(adapted, whole())
    for is_before in (True, False):
        torch.manual_seed(0)
        model = maker("llama")()
        if is_before:
            spar.parallelize(model, group)
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False))
        if not is_before:
            spar.parallelize(model.get_base_model(), group)
        wrapped = DistributedDataParallel(model, process_group=group)
        wrapped(**whole()).loss.backward()
        check_gradients(wrapped, expected)

    def prompted() -> Any:
        return get_peft_model(
            maker("llama")(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        )

    check_exact(prompted, whole(), group)


def test_adapters_of_peft(pool: Ranks) -> None:
    pool(2, check_peft)


def check_embeddings(rank: int, world: int, group: Group) -> None:
    """inputs_embeds that parameters made outside of the model have the gradients of one process."""
    make, batch = maker("llama"), whole()
    expected = gradients_of_one_process(make, batch)
    for blocks in (None, ["model.embed_tokens", "model.layers.*"]):
        model = seeded(make)
        spar.parallelize(model, group, blocks=blocks)
        embedded = model.model.embed_tokens(batch["input_ids"])
        given = {"inputs_embeds": embedded} if blocks is None else {"input_ids": batch["input_ids"]}
        model(**given, labels=batch["labels"]).loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
        check_gradients(model, expected)


def test_embeddings(pool: Ranks) -> None:
    pool(2, check_embeddings)


def check_router_losses(rank: int, world: int, group: Group) -> None:
    """The load-balancing loss is of all tokens but padding."""
    for name, changes in (("Mixtral", {"num_local_experts": 4}), ("qwen3 moe", {})):
        make = maker(name, output_router_logits=True, router_aux_loss_coef=0.5, **changes)
        for layout in ("even", "zigzag"):
            check_exact(make, left_padded(), group, layout=layout)


def test_router_losses(pool: Ranks) -> None:
    pool(2, check_router_losses)


def check_question_answering(rank: int, world: int, group: Group) -> None:
    import transformers

    known = {k: v for k, v in SMALL.items() if hasattr(transformers.Qwen2Config(), k)}

    def make() -> Any:
        return transformers.Qwen2ForQuestionAnswering(transformers.Qwen2Config(**known))

    given = {k: v for k, v in left_padded().items() if k != "labels"}
    given |= {"start_positions": torch.tensor([20, 3]), "end_positions": torch.tensor([30, 36])}
    check_exact(make, given, group, has_logits=False)  # they are start_logits and end_logits


def test_question_answering(pool: Ranks) -> None:
    pool(2, check_question_answering)


# ---- precision ----


def cast(make: Callable[[], Any], kind: torch.dtype) -> Callable[[], Any]:
    """Return what makes a model whose forward runs under autocast, as accelerate's does."""

    def under_autocast() -> Any:
        model = make()
        model.forward = torch.autocast("cpu", kind)(model.forward)
        return model

    return under_autocast


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {}, "ulysses"),
    ("Qwen2", {}, "gather"),
    ("qwen3", {}, "ring"),
    ("mistral", {}, "ring"),
    ("Gemma3", {"sliding_window": 9}, None),
]


def check_autocast(rank: int, world: int, group: Group, kind: torch.dtype) -> None:
    """Norms and rotary embeddings leave q and k in float32 beside a v of 16 bits."""
    for name, config, method in CASES:
        make = cast(maker(name, **config), kind)
        check_exact(make, whole(), group, TOLERANCES[kind], method=method)
    added = torch.zeros(1, 1, 37, 37).masked_fill(~torch.ones(37, 37, dtype=torch.bool).tril(), -torch.inf)
    for batch in (left_padded(), whole() | {"attention_mask": added}):
        check_exact(cast(maker("llama"), kind), batch, group, TOLERANCES[kind])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_autocast(pool: Ranks, kind: torch.dtype) -> None:
    pool(2, check_autocast, kind)


def check_recomputed(rank: int, world: int, group: Group) -> None:
    def checkpointed(reentrant: bool) -> Any:
        model = maker("qwen3")()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    for make in (lambda: checkpointed(False), lambda: checkpointed(True), adapted):
        check_exact(cast(make, torch.bfloat16), whole(), group, TOLERANCES[torch.bfloat16])


def test_autocast_with_checkpointing_and_lora(pool: Ranks) -> None:
    pool(2, check_recomputed)


def check_scaler(rank: int, world: int, group: Group) -> None:
    """DDP over dp 2 x cp 2: scaled gradients are those of one process, and an overflow skips every rank."""
    _, dp, cp = meshes()
    make, batch = cast(maker("llama"), torch.float16), whole(ROWS)
    alone = seeded(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(alone(**batch).loss).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    inner, mine = seeded(make), rows(batch, dp)
    spar.parallelize(inner, cp)
    model = DistributedDataParallel(inner)
    scaler.scale(model(**mine).loss).backward()  # both halves of the batch have as many labels
    check_gradients(model, expected, TOLERANCES[torch.float16])
    descent, before = torch.optim.SGD(model.parameters()), model.module.lm_head.weight.detach().clone()
    if rank == 1:
        model.module.lm_head.weight.register_hook(lambda grad: grad * torch.inf)
    descent.zero_grad()
    scaler.scale(model(**mine).loss).backward()
    scaler.step(descent)
    scaler.update()
    assert scaler.get_scale() == 2.0**7 and before.equal(model.module.lm_head.weight)


def test_grad_scaler(pool: Ranks) -> None:
    pool(4, check_scaler)


def check_mixed_precision(rank: int, world: int, group: Group) -> None:
    """FSDP2 casts the parameters itself, without autocast: dp 2 x cp 2 beside a mesh of one rank."""
    mesh, dp, cp = meshes()
    alone = DeviceMesh.from_group([dist.new_group([r]) for r in range(world)][rank], "cpu")
    kind, batch = torch.bfloat16, whole(ROWS)
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)

    def sharded(over: DeviceMesh, group: DeviceMesh | None = None) -> Any:
        model = seeded(maker("qwen3"))
        if group is not None:
            spar.parallelize(model, group)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=over, mp_policy=policy)
        return model

    reference = sharded(alone)
    reference(**batch).loss.backward()
    expected = {name: p.grad.full_tensor() for name, p in reference.named_parameters()}
    model = sharded(mesh._flatten("world"), cp)
    model(**rows(batch, dp)).loss.backward()
    check_gradients(model, expected, TOLERANCES[kind])


def test_fsdp2_mixed_precision(pool: Ranks) -> None:
    pool(4, check_mixed_precision)


# ---- dp 2 x cp 2 ----


def check_fsdp2(rank: int, world: int, group: Group, folder: Path) -> None:
    """Over all ranks, and replicated over dp; the second with checkpointing. Saved, and loaded."""
    import torch.distributed.checkpoint as dcp

    mesh, dp, cp = meshes()
    make, batch = maker("qwen3"), whole(ROWS)
    expected = gradients_of_one_process(make, batch)
    for over in (mesh._flatten("world"), mesh):
        model = seeded(make)
        spar.parallelize(model, cp)
        if over is mesh:
            model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
        mine = rows(batch, dp)
        loss = model(**mine).loss
        loss.backward()
        check_gradients(model, expected)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        saved = float(model(**mine).loss)
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        assert float(model(**mine).loss) == saved != float(loss.detach())


def test_fsdp2_and_distributed_checkpoints(pool: Ranks, tmp_path: Path) -> None:
    pool(4, check_fsdp2, tmp_path)


def unequal(size: int, total: int) -> dict[str, Tensor]:
    """Return a batch whose rows have other numbers of labels."""
    batch = whole(size, total)
    for row in range(size):
        batch["labels"][row, : 4 * row] = -100
    return batch


def check_accumulation(rank: int, world: int, group: Group) -> None:
    """The page's block: two micro-batches, whose labels differ in number over dp, too."""
    _, dp, cp = meshes()
    make, batches = maker("llama"), [unequal(ROWS, 37), unequal(ROWS, 23)]
    expected = gradients_of_one_process(make, *batches)
    model = seeded(make)
    spar.parallelize(model, cp)
    names: dict[str, Any] = {
        "dist": dist,
        "dp": dp,
        "micro_batches": [rows(batch, dp) for batch in batches],
        "model": DistributedDataParallel(model),
    }
    exec(recipe("transformers.md", "micro_batches"), names)
    check_gradients(names["model"], expected)
    count, alone = names["count"], seeded(make)
    wanted = sum(alone(**batch, num_items_in_batch=count).loss.detach() for batch in batches)
    torch.testing.assert_close(names["total"], wanted)


def test_recipe_for_data_parallel_ranks(pool: Ranks) -> None:
    pool(4, check_accumulation)


# ---- the other recipes of the pages ----


def run_first_lines(rank: int, world: int, group: Group) -> None:
    make, batch = maker("llama"), whole()
    expected = gradients_of_one_process(make, batch)
    names: dict[str, Any] = {"batch": batch, "cp": group, "model": seeded(make), "spar": spar}
    names["DistributedDataParallel"] = DistributedDataParallel
    exec(recipe("transformers.md", "DistributedDataParallel(model)"), names)
    check_gradients(names["model"], expected)
    assert float(names["loss"].detach()) == pytest.approx(float(seeded(make)(**batch).loss.detach()))


def test_first_lines_of_the_page(pool: Ranks) -> None:
    pool(4, run_first_lines)


def run_packed(rank: int, world: int, group: Group) -> None:
    """Documents in any layout have the values and gradients of one process, where they are a mask."""
    make = maker("llama")
    for batch in (packed(5, 20, 12), packed(1, 30, 2, 4)):
        expected, reference = gradients_of_one_process(make, batch), seeded(make)(**batch)
        names: dict[str, Any] = {"cp": group, "model": seeded(make), "spar": spar, "batch": batch}
        exec(recipe("transformers.md", "SequenceLayout.balanced"), names)
        torch.testing.assert_close(names["loss"].detach(), reference.loss.detach())
        for p in names["model"].parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
        check_gradients(names["model"], expected)


def test_recipe_for_packed_documents(pool: Ranks) -> None:
    pool(2, run_packed)


def run_parts(rank: int, world: int, group: Group) -> None:
    """The log-probabilities of this rank's tokens are those of one process, and so are the gradients."""
    make, batch = maker("llama"), whole()
    alone, ids = seeded(make), batch["input_ids"]
    known = alone(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    known.mean().neg().backward()
    names: dict[str, Any] = {"cp": group, "model": seeded(make), "spar": spar, "ids": ids}
    exec(recipe("transformers.md", "token_logprobs"), names)
    own = names["layout"].index()
    found = names["logprobs"][:, own < ids.size(1) - 1]
    torch.testing.assert_close(found.detach(), known[:, own[own < ids.size(1) - 1]].detach())
    torch.testing.assert_close(names["loss"].detach(), known.mean().neg().detach())
    for p in names["model"].parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= world
    check_gradients(names["model"], {name: p.grad for name, p in alone.named_parameters()})


def test_recipe_for_parts(pool: Ranks) -> None:
    pool(2, run_parts)


def run_reward(rank: int, world: int, group: Group) -> None:
    """Pairs of a reward model, whose pooled tokens lie on different ranks."""
    import transformers

    known = {k: v for k, v in SMALL.items() if hasattr(transformers.Qwen2Config(), k)}

    def make() -> Any:
        return transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**known, num_labels=1))

    batch, alone, model = left_padded(), seeded(make), seeded(make)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ids[1, 9:] = mask[1, 9:] = 0
    names: dict[str, Any] = {"cp": group, "F": F, "ids": ids, "mask": mask, "spar": spar}
    exec(recipe("transformers.md", "F.logsigmoid"), names | {"reward": model})
    chosen, rejected = alone(input_ids=ids, attention_mask=mask).logits[:, 0]
    (-F.logsigmoid(chosen - rejected)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= world
    check_gradients(model, {name: p.grad for name, p in alone.named_parameters()})


def test_recipe_for_reward_models(pool: Ranks) -> None:
    pool(2, run_reward)


def samples() -> list[dict[str, Tensor]]:
    """Return eight samples that begin with 1 to 8, some of them with few labels."""
    found = []
    for i in range(8):
        ids = torch.arange(37).add(i) % 50 + 1
        found.append(
            {"input_ids": ids, "labels": ids.masked_fill(torch.arange(37) < 30 * (i % 3 == 0), -100)}
        )
    return found


def trained(
    steps: list[list[int]], bf16: bool = False, smoothing: float = 0.0
) -> tuple[nn.Module, list[float]]:
    """Return the model that one process trains on the samples of each step, and its losses."""
    from transformers.trainer_pt_utils import LabelSmoother

    model, losses, all_samples = seeded(maker("llama")), [], samples()
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    for chosen in steps:
        batch = {name: torch.stack([all_samples[i][name] for i in chosen]) for name in all_samples[0]}
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = model(**batch)
        loss = outputs.loss
        if smoothing:
            loss = LabelSmoother(smoothing)(outputs, batch["labels"], shift_labels=True)
        loss.backward()
        descent.step()
        descent.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def check_parameters(model: nn.Module, expected: nn.Module, tolerance: float = TOLERANCE) -> None:
    for (name, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert (p - q).abs().max() < tolerance * p.abs().max(), name


def run_trainer(rank: int, world: int, group: Group, folder: Path, options: dict[str, Any]) -> None:
    """Two steps of two micro-batches."""
    from transformers import TrainingArguments

    names: dict[str, Any] = {}
    exec(recipe("transformers.md", "(Trainer)"), names)
    _, dp, cp = meshes()
    model = seeded(maker("llama"))
    spar.parallelize(model, cp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = names["SequenceTrainer"](
        model, arguments, train_dataset=samples(), optimizers=(optimizer, constant), dp=dp
    )
    order = [int(i) for batch in trainer.get_train_dataloader() for i in (batch["input_ids"][:, 0] - 1)]
    trainer.train()
    orders: list[Any] = [None] * world
    dist.all_gather_object(orders, order)
    assert orders[0] == orders[1] and sorted(orders[0] + orders[2]) == list(range(8))
    bf16, smoothing = options.get("bf16", False), options.get("label_smoothing_factor", 0.0)
    steps = [orders[0][i : i + 2] + orders[2][i : i + 2] for i in (0, 2)]
    expected, losses = trained(steps, bf16, smoothing)
    check_parameters(model, expected, 1e-3 if bf16 else TOLERANCE)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=2e-3 if bf16 else 1e-4)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_recipe_for_trainer(pool: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    pool(4, run_trainer, tmp_path, options)
