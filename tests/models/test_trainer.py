# SPDX-License-Identifier: Apache-2.0
"""Trainer with sequence groups beside Trainer without: one process, or as many ranks as there are groups."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from conftest import Ranks, ranks_of_world
from helpers import llms, trainers
from helpers.launched import launch
from helpers.trainers import Run, accuracy, arguments, flatten, model, pad, samples
from torch import Tensor

import spar.integrations.trainer

PRELOAD = [*llms.PRELOAD, "transformers.trainer", "peft"]
Group = dist.ProcessGroup
Case = dict[str, Any]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    yield from ranks_of_world(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    yield from ranks_of_world(4)


def run(folder: Path, case: Case, replicas: int = 1) -> Run:
    """Train and evaluate. replicas: how many ranks' samples a batch has."""
    kind, arguments_kind = case.get("kind", ("Trainer", "TrainingArguments"))
    case = {"train": samples(16), "evaluated": samples(8, seed=9), "collator": pad} | case
    sizes = {f"per_device_{kind}_batch_size": 2 * replicas for kind in ("train", "eval")}
    options = sizes | {"eval_strategy": "epoch"} | case.get("arguments", {})
    trainer = getattr(transformers, kind)(
        case.get("model", model)(),
        arguments(folder, arguments_kind, **options),
        train_dataset=case["train"],
        eval_dataset=case["evaluated"],
        data_collator=case["collator"],
        **case.get("trainer", {}),
    )
    trainer.train()
    found = case["then"](trainer) if "then" in case else []
    return trainers.result(trainer, found)


def run_ranks(rank: int, world: int, group: Group, folder: Path, case: Case, size: int) -> Run:
    trainers.as_launched(rank, world)
    if size == 1:
        return run(folder, case)
    spar.integrations.trainer.install(size)
    try:
        return run(folder, case)
    finally:
        spar.integrations.trainer.uninstall()


def predict(trainer: Any) -> list[Any]:
    found = trainer.predict(samples(7, seed=5))
    return [found.predictions, found.label_ids, found.metrics["test_loss"]]


def mean_of_all(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def ignored(every: list[trainers.Sample], *which: int) -> list[trainers.Sample]:
    """Return the samples, some of which have no label that counts."""
    for i in which:
        every[i]["labels"] = torch.full_like(every[i]["labels"], -100)
    return every


def number_of_rows(given: Any, compute_result: bool) -> dict[str, int]:
    return {"rows": len(given.label_ids)}


def with_all(given: Any) -> dict[str, Any]:
    return {"loss of rows": float(given.losses.mean()), "inputs": int(given.inputs.sum())}


def masked(every: list[trainers.Sample]) -> trainers.Sample:
    """Collate samples, of which random tokens are masked."""
    batch = pad(every)
    is_masked = torch.rand(batch["labels"].shape) < 0.3
    labels = batch["input_ids"].masked_fill(~is_masked, -100)
    return batch | {"labels": labels, "input_ids": batch["input_ids"].masked_fill(is_masked, 3)}


def classified(every: list[trainers.Sample]) -> trainers.Sample:
    batch = pad(every)
    return batch | {"labels": batch["input_ids"][:, 0] % 3}


def bert() -> Any:
    sizes = {"num_key_value_heads": 8, "max_position_embeddings": 96}
    no_dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return model("BertForMaskedLM", **sizes, **no_dropout)


def bart() -> Any:
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "initializer_range": None}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return model("BartForConditionalGeneration", dropout=0.0, init_std=0.3, **sizes, **layers, **heads)


def generated(given: Any) -> dict[str, int]:
    return {"rows": len(given.predictions), "sum": int(given.predictions.clip(0).sum())}


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model(), LoraConfig(r=4, init_lora_weights=False))


CASES: dict[str, Case] = {
    "padded": {
        "arguments": {"num_train_epochs": 2, "include_num_input_tokens_seen": "non_padding"},
        "trainer": {"compute_metrics": accuracy},
        "then": predict,
    },
    "packed": {"collator": flatten, "arguments": {"include_num_input_tokens_seen": "all"}},
    "uneven last batches": {
        "train": samples(13),
        "evaluated": samples(5, seed=9),
        "trainer": {"compute_metrics": accuracy},
        "then": predict,
    },
    "labels of each rank": {"arguments": {"average_tokens_across_devices": False}},
    "label smoothing": {"arguments": {"label_smoothing_factor": 0.1}},
    "a loss function": {"trainer": {"compute_loss_func": mean_of_all}},
    "grouped by length": {
        "arguments": {"train_sampling_strategy": "group_by_length", "num_train_epochs": 3},
        "trainer": {"compute_metrics": accuracy},
    },
    "in order": {"arguments": {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0}},
    "one long sample": {"train": samples(16, long=90), "arguments": {"max_grad_norm": 0.1}},
    "ignored labels": {
        "train": ignored(samples(16), *range(0, 16, 2)),
        "arguments": {"train_sampling_strategy": "sequential"},
    },
    "no labels in a step": {
        "train": ignored(samples(16), *range(8)),
        "arguments": {"train_sampling_strategy": "sequential"},
    },
    "extra columns": {"train": [each | {"text": "a"} for each in samples(16)]},
    "a stream": {
        "train": trainers.Stream(samples(15)),
        "arguments": {"max_steps": 5, "accelerator_config": {"dispatch_batches": False}},
    },
    "several sets, and before training": {
        "evaluated": {"short": samples(5, seed=2), "longer": samples(8, seed=3)},
        "arguments": {"eval_on_start": True},
        "trainer": {"compute_metrics": accuracy},
    },
    "metrics by batch": {
        "evaluated": samples(7, seed=9),
        "arguments": {"batch_eval_metrics": True},
        "trainer": {"compute_metrics": number_of_rows},
    },
    "metrics of inputs": {
        "evaluated": samples(7, seed=9),
        "arguments": {"include_for_metrics": ["loss", "inputs"]},
        "trainer": {"compute_metrics": with_all},
    },
    "masked tokens": {"model": bert, "collator": masked, "arguments": {"num_train_epochs": 2}},
    "classes": {
        "model": functools.partial(
            model, "LlamaForSequenceClassification", id2label={0: "a", 1: "b", 2: "c"}
        ),
        "collator": classified,
    },
    "generation": {
        "kind": ("Seq2SeqTrainer", "Seq2SeqTrainingArguments"),
        "model": bart,
        "arguments": {"predict_with_generate": True, "generation_max_length": 7},
        "trainer": {"compute_metrics": generated},
    },
    "bf16": {"arguments": {"bf16": True}, "tolerance": 2e-2},
    "checkpointed": {"arguments": {"gradient_checkpointing": True}},
    "LoRA": {"model": adapted, "then": predict},
    "experts": {"model": functools.partial(model, "qwen3 moe", output_router_logits=True)},
}


@pytest.mark.parametrize("name", CASES)
def test_sequence_groups_train_as_one_process(two: Ranks, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = run(tmp_path, case)
    for found in two(2, run_ranks, tmp_path, case, 2):
        trainers.check_same(found, expected, case.get("tolerance", 1e-5))


# Several groups change batches, sums and samplers; these cases differ by the model or an option alone.
ALIKE = ["label smoothing", "in order", "one long sample", "extra columns", "metrics of inputs", "classes"]
ALIKE += ["several sets, and before training", "masked tokens", "bf16", "checkpointed", "LoRA"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALIKE])
def test_data_parallel_groups_train_as_ranks(two: Ranks, four: Ranks, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = two(2, run_ranks, tmp_path, case, 1)[0]
    for found in four(4, run_ranks, tmp_path, case, 2):
        trainers.check_same(found, expected, case.get("tolerance", 1e-5))


@pytest.mark.parametrize("name", ["uneven last batches"])
def test_one_sequence_group_of_all_ranks(four: Ranks, name: str, tmp_path: Path) -> None:
    expected = run(tmp_path, CASES[name])
    for found in four(4, run_ranks, tmp_path, CASES[name], 4):
        trainers.check_same(found, expected, 1e-5)


WORKERS: Case = {"model": bert, "collator": masked, "arguments": {"dataloader_num_workers": 1}}


def run_with_workers(folder: Path) -> None:
    """On a rank of its own: the pool's processes may not have children."""
    torch.set_num_threads(1)
    expected = pickle.loads((folder / "expected").read_bytes())
    spar.integrations.trainer.install(2)
    trainers.check_same(run(folder, WORKERS), expected, 1e-5)
    dist.destroy_process_group()


def test_workers_of_a_group_draw_alike(tmp_path: Path) -> None:
    (tmp_path / "expected").write_bytes(pickle.dumps(run(tmp_path, WORKERS)))
    launch(run_with_workers, 2, tmp_path)
