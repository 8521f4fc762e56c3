# SPDX-License-Identifier: Apache-2.0
"""Models of transformers under spar.parallelize in training, beside one process.

Wrappers, adapters, accumulation, distributed checkpoints, and the pages' recipes.
"""

from __future__ import annotations

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
    adapted,
    check_exact,
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
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import spar

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp", "peft"]
POOL = (2, 4)
Group = dist.ProcessGroup


# ---- one group ----


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
