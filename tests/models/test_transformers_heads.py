# SPDX-License-Identifier: Apache-2.0
"""Classification, reward and question answering heads by `shard`: values and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.llms import (
    TOLERANCE,
    left_padded,
    maker,
    meshes,
    packed,
    recipe,
    restarts,
    seeded,
    whole,
    zigzag,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spar
from spar.integrations.transformers import shard, total_loss

PRELOAD = [*llms.PRELOAD, "transformers.models.gpt2.modeling_gpt2", "peft"]
POOL = (2, 3, 4)
Group = dist.ProcessGroup
CLASSES = {"id2label": {0: "a", 1: "b", 2: "c"}}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
HEADS: dict[str, dict[str, Any]] = {
    "LlamaForSequenceClassification": CLASSES,
    "MistralForSequenceClassification": CLASSES | {"sliding_window": 9},
    "GPT2ForSequenceClassification": GPT2 | CLASSES,
    "LlamaForQuestionAnswering": {},
    "GPT2ForQuestionAnswering": GPT2,
    "LlamaForTokenClassification": CLASSES | {"classifier_dropout": 0.0},
    "GPT2ForTokenClassification": GPT2 | CLASSES | {"classifier_dropout": 0.0},
}


def right_padded() -> dict[str, Tensor]:
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 8:] = 0  # the last token of this row is on the first rank
    return batch | {"attention_mask": mask, "input_ids": batch["input_ids"] * mask}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": whole,
    "left": left_padded,
    "right": right_padded,
    "packed": lambda: packed(5, 20, 12),
}


def labelled(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = batch["input_ids"]
    batch = {key: x for key, x in batch.items() if key != "labels"}
    if "Sequence" in name:
        return batch | {"labels": torch.tensor([2, 0])[: len(ids)]}
    if "Question" in name:
        starts, ends = torch.tensor([[12, 3], [30, 7]])
        return batch | {"start_positions": starts[: len(ids)], "end_positions": ends[: len(ids)]}
    labels = (ids % 3).masked_fill(ids == 0, -100)
    labels[:, :16] = -100  # a rank has no label
    return batch | {"labels": labels}


def trained(model: nn.Module, part: dict[str, Any]) -> Any:
    outputs = model(**part)
    outputs.loss.backward()
    return outputs


def check_like_one(
    alone: nn.Module, expected: Any, model: nn.Module, found: Any, part: dict[str, Any], group: Group
) -> None:
    """Compare outputs, the sum of the ranks' losses and that of their gradients."""
    loss = total_loss(found.loss, group=group, token_group=group)
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-5, atol=0)
    for name in expected:
        if "logits" in name:
            values = found[name].detach()
            if "inside" not in part:
                values = part["layout"].gather(values, 1)
            torch.testing.assert_close(values, expected[name].detach(), rtol=1e-5, atol=1e-5)
            copies = spar.all_gather(values[None], group)
            assert (copies == copies[0]).all(), name
    largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            own = torch.zeros_like(q) if q.grad is None else q.grad
            gradient = spar.all_gather(own[None], group).sum(0)
            error = (gradient - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-3 * largest)
            assert error < TOLERANCE, (name, float(error))


def check_head(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name, **HEADS[name])
    for kind, whole_batch in BATCHES.items():
        batch = labelled(name, whole_batch())
        # the gradients of some parameters are 0 but for rounding: adding to all logits changes no softmax
        alone = seeded(make, "sdpa").double()
        expected = trained(alone, batch)
        other = {} if kind == "packed" else {"layout": zigzag(37, group), "method": "gather"}
        for given in ({}, other):
            model = seeded(make, "spar").double()
            part = shard(model, batch, group=group, token_group=group, **given)
            check_like_one(alone, expected, model, trained(model, part), part, group)
        with torch.no_grad():  # the hooks are idle in a forward without a layout
            model.set_attn_implementation("sdpa")
            again = model(**batch)
        torch.testing.assert_close(again.loss, expected.loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", HEADS)
def test_heads_are_exact(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_head, name)


def check_tuples(rank: int, world: int, group: Group) -> None:
    """return_dict=False, of the call or of the config, and embeddings instead of ids."""
    for name in ("LlamaForSequenceClassification", "LlamaForTokenClassification"):
        make, batch = maker(name, **HEADS[name]), labelled(name, whole(1))
        alone, model = seeded(make, "sdpa"), seeded(make, "spar")
        expected = alone(**batch, return_dict=False)
        part = shard(model, batch | {"return_dict": False}, group=group, token_group=group)
        found = model(**part)
        assert isinstance(found, tuple) and len(found) == len(expected) == 2
        torch.testing.assert_close(total_loss(found[0], group=group, token_group=group), expected[0].detach())
        leaf = alone.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        part = shard(model, batch | {"inputs_embeds": leaf}, group=group, token_group=group)
        loss = model(**part).loss
        loss.backward()
        torch.testing.assert_close(total_loss(loss, group=group, token_group=group), expected[0].detach())
        twin = leaf.detach().requires_grad_()
        alone(inputs_embeds=twin, **batch).loss.backward()
        gradient = spar.all_gather(leaf.grad[None], group).sum(0)
        assert (gradient - twin.grad).abs().max() < TOLERANCE * twin.grad.abs().max()


def test_tuples_and_embeddings(pool: Ranks) -> None:
    pool(2, check_tuples)


TARGETS: dict[str, tuple[dict[str, Any], Callable[[], Tensor]]] = {
    "regression": ({"id2label": {0: "a"}}, lambda: torch.tensor([0.5, -2.0])),
    "regression of several": (CLASSES | {"problem_type": "regression"}, lambda: torch.randn(2, 3)),
    "several classes": (CLASSES, lambda: torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
    "one ignored": (CLASSES, lambda: torch.tensor([-100, 1])),
}


def check_targets(rank: int, world: int, group: Group) -> None:
    for name, (config, target) in TARGETS.items():
        torch.manual_seed(3)
        batch = left_padded() | {"labels": target()}
        make = maker("Qwen3ForSequenceClassification", **config)
        alone, model = seeded(make, "sdpa"), seeded(make, "spar")
        expected = trained(alone, batch)
        part = shard(model, batch, group=group, token_group=group)
        check_like_one(alone, expected, model, trained(model, part), part, group)
        assert alone.config.problem_type == model.config.problem_type, name


def test_kinds_of_labels(pool: Ranks) -> None:
    pool(3, check_targets)


def check_data_parallel(rank: int, world: int, group: Group) -> None:
    """Four ranks, of which two share a sequence, and two samples of five are ignored."""
    _, dp, cp = meshes()
    batch = whole(5) | {"labels": torch.tensor([0, 2, 1, -100, -100])}
    make = maker("LlamaForSequenceClassification", **CLASSES)
    alone, model = seeded(make, "sdpa"), seeded(make, "spar")
    expected = trained(alone, batch)
    mine = slice(0, 2) if dp.get_local_rank() == 0 else slice(2, 5)
    own = {name: x[mine] for name, x in batch.items()}
    wrapped = DistributedDataParallel(model)
    part = shard(wrapped, own, group=cp, token_group=dp)
    outputs = wrapped(**part)
    (outputs.loss * world).backward()
    torch.testing.assert_close(total_loss(outputs.loss, group=cp, token_group=dp), expected.loss.detach())
    torch.testing.assert_close(outputs.logits, expected.logits[mine], rtol=1e-5, atol=1e-5)
    llms.check_gradients(wrapped, {name: p.grad for name, p in alone.named_parameters()})
    # micro-batches of one sample, with the number of labels of the step
    model.zero_grad()
    losses = []
    for row in range(3 if dp.get_local_rank() == 1 else 2):
        one = {name: x[row : row + 1] for name, x in own.items()}
        if int(one["labels"]) == -100:
            continue
        part = shard(model, one | {"num_items_in_batch": 3}, group=cp, token_group=cp)
        losses.append(model(**part).loss)
        losses[-1].backward()
    total = spar.all_gather(torch.stack(losses).detach().sum()[None], dist.group.WORLD).sum()
    torch.testing.assert_close(total, expected.loss.detach())


def test_data_parallel_and_accumulation(pool: Ranks) -> None:
    pool(4, check_data_parallel)


def check_use(rank: int, world: int, group: Group) -> None:
    """Checkpoints, LoRA with a trained head, and a compiled model."""
    from peft import LoraConfig, get_peft_model

    name = "LlamaForSequenceClassification"
    make, batch = maker(name, **CLASSES), labelled(name, left_padded())

    def adapted(target: list[str]) -> Callable[[], Any]:
        def make_adapted() -> Any:
            lora = LoraConfig(r=2, target_modules=target, task_type="SEQ_CLS", init_lora_weights=False)
            return get_peft_model(make(), lora)

        return make_adapted

    def checkpointed() -> Any:
        model = make()
        model.gradient_checkpointing_enable()
        return model.train()

    for build in (make, checkpointed, adapted(["q_proj", "v_proj"])):
        alone, model = seeded(build, "sdpa"), seeded(build, "spar")
        part = shard(model, batch, group=group, token_group=group)
        expected, found = trained(alone, batch), trained(model, part)
        check_like_one(alone, expected, model, found, part, group)
    model = seeded(make, "spar")
    shard(model, batch, group=group, token_group=group)  # hooks that are there before PEFT copies the head
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS"))
    found = model(**shard(model, batch, group=group, token_group=group))
    torch.testing.assert_close(found.logits, seeded(make, "sdpa")(**batch).logits, rtol=1e-5, atol=1e-5)


def test_checkpoints_and_adapters(pool: Ranks) -> None:
    pool(2, check_use)


def check_compiled(rank: int, world: int, group: Group) -> None:
    for name in ("LlamaForSequenceClassification", "GPT2ForSequenceClassification"):
        make = maker(name, **HEADS[name], num_hidden_layers=1)  # a second one would be traced as the first
        batch = labelled(name, left_padded())
        alone, model = seeded(make, "sdpa"), seeded(make, "spar")
        part = shard(model, batch, group=group, token_group=group)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        check_like_one(alone, trained(alone, batch), model, trained(compiled, part), part, group)


def test_compiled_heads(pool: Ranks) -> None:
    pool(2, check_compiled)


def check_low_precision(rank: int, world: int, group: Group) -> None:
    name = "LlamaForSequenceClassification"
    make, batch = maker(name, **CLASSES), labelled(name, left_padded())
    expected = seeded(make, "sdpa")(**batch)
    model = seeded(make, "spar").bfloat16()
    found = model(**shard(model, batch, group=group, token_group=group))
    assert found.logits.dtype == torch.bfloat16
    assert (found.logits - expected.logits).abs().max() < 0.1 * expected.logits.abs().max()


def test_bfloat16(pool: Ranks) -> None:
    pool(2, check_low_precision)


def check_recipe(rank: int, world: int, group: Group) -> None:
    """The page's recipe: a loss of the caller's on the rewards, which every rank has."""
    make = maker("LlamaForSequenceClassification", id2label={0: "reward"})
    batch = {name: x for name, x in left_padded().items() if name != "labels"}
    alone, model = seeded(make, "sdpa"), seeded(make, "spar")
    rewards = alone(**batch).logits[:, 0]
    expected = -nn.functional.logsigmoid(rewards[0] - rewards[1])
    expected.backward()
    names = {"spar": spar, "F": nn.functional, "reward": model, "cp": group}
    names |= {"ids": batch["input_ids"], "mask": batch["attention_mask"]}
    exec(recipe("transformers.md", "reward(**part)"), names)
    torch.testing.assert_close(names["loss"], expected, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        gradient = spar.all_gather(q.grad[None], group).mean(0)  # as DDP and FSDP do
        assert (gradient - p.grad).abs().max() < TOLERANCE * p.grad.abs().max(), name
    inner = model.model  # the hooks do not change what the model inside returns to a caller of its own
    part = shard(inner, batch, group=group, token_group=group)
    assert inner(**part).last_hidden_state.size(1) == part["input_ids"].size(1) < 37


def test_recipe_for_reward_models(pool: Ranks) -> None:
    pool(2, check_recipe)


def check_errors(rank: int, world: int, group: Group) -> None:
    batch = whole()
    classifier = seeded(maker("LlamaForSequenceClassification", **CLASSES), "spar")
    answers = seeded(maker("LlamaForQuestionAnswering"), "spar")
    tokens = seeded(maker("LlamaForTokenClassification", **CLASSES), "spar")
    ids = {"input_ids": batch["input_ids"]}
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (classifier, ids | {"labels": torch.tensor([1])}, r"of shape \[1\]; expected \[2\]"),
        (classifier, ids | {"labels": torch.tensor([-100, -100])}, "-100 in all samples"),
        (classifier, ids | {"shift_labels": batch["labels"]}, r"batch\['shift_labels'\]"),
        (classifier, ids | {"start_positions": torch.tensor([1, 2])}, r"batch\['start_positions'\]"),
        (answers, ids | {"start_positions": torch.tensor([1, 2])}, r"batch has \['start_positions'\]"),
        (answers, ids | {"labels": torch.tensor([1, 2])}, r"batch\['labels'\]"),
        (tokens, ids | {"labels": torch.tensor([1, 2])}, r"of shape \[2\]"),
        (tokens, ids | {"shift_labels": batch["labels"]}, r"batch\['shift_labels'\]"),
    ]
    for model, mistake, message in wrong:
        with pytest.raises(ValueError, match=message):
            shard(model, mistake, group=group, token_group=group)
    far = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 40])}
    with pytest.raises(ValueError, match="is 40; expected less than 37"):
        shard(answers, ids | far, group=group, token_group=group)
    classifier.drop = nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"drop is a Dropout in its head.* spar.parallelize"):
        shard(classifier, ids, group=group, check=False)
    part = shard(classifier.eval(), ids, group=group, token_group=group)
    inner = classifier.model.forward
    classifier.model.forward = lambda **given: (inner(**given).last_hidden_state,)
    assert classifier.model(**part["inside"])[0].dim() == 3
    with pytest.raises(AttributeError):  # of the head: the hooks pass tuples on
        classifier(**part)
    kind = type(answers)

    class Own(kind):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            hidden = self.base_model.embed_tokens(input_ids)
            return {"start_logits": self.qa_outputs(hidden)}

    Own.__name__ = "OwnForQuestionAnswering"
    answers.__class__ = Own
    part = shard(answers, ids, group=group, token_group=group)
    with pytest.raises(ValueError, match="its forward did not call its base_model"):
        answers(**part)


def test_mistakes_with_heads(pool: Ranks) -> None:
    pool(2, check_errors)


def check_other_labels(rank: int, world: int, group: Group) -> None:
    model = seeded(maker("LlamaForSequenceClassification", **CLASSES), "spar")
    batch = whole() | {"labels": torch.tensor([rank, 1])}
    with pytest.raises(spar.MismatchError, match=r"batch\['labels'\]"):
        shard(model, batch, group=group, token_group=group)
    model = seeded(maker("LlamaForQuestionAnswering"), "spar")
    ends = torch.tensor([5, 6 + rank])
    positions = {"start_positions": torch.tensor([1, 2]), "end_positions": ends}
    with pytest.raises(spar.MismatchError, match=r"batch\['end_positions'\]"):
        shard(model, {"input_ids": whole()["input_ids"]} | positions, group=group, token_group=group)


def test_ranks_with_other_labels(pool: Ranks) -> None:
    pool(2, check_other_labels)


def check_documents(rank: int, world: int, group: Group) -> None:
    """A head pools one token of a row of packed documents, in one process as here."""
    make = maker("LlamaForSequenceClassification", **CLASSES)
    rows = whole() | {"position_ids": torch.stack([restarts(5, 20, 12), restarts(14, 23)])}
    batch = rows | {"labels": torch.tensor([0, 1])}
    alone, model = seeded(make, "sdpa"), seeded(make, "spar")
    part = shard(model, batch, group=group, token_group=group)
    check_like_one(alone, trained(alone, batch), model, trained(model, part), part, group)


def test_rows_of_other_documents(pool: Ranks) -> None:
    pool(3, check_documents)
