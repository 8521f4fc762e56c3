# SPDX-License-Identifier: Apache-2.0
"""Small runs of transformers' Trainer, each of which returns all that it reports and trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from helpers import llms

Sample = dict[str, Any]
VOCABULARY = llms.VOCABULARY
# What depends on the clock.
TIMED = ("runtime", "per_second", "preparation_time", "step_time")


class Run(NamedTuple):
    """What one rank of a run has at its end.

    Attributes:
        logged: the trainer's log, without times.
        parameters: of the model, whole.
        found: what the run returns, such as predictions.
    """

    logged: list[dict[str, Any]]
    parameters: dict[str, Tensor]
    found: list[Any]


def model(name: str = "llama", **changes: Any) -> Any:
    return llms.seeded(llms.maker(name, **({"initializer_range": 0.1} | changes)))


def samples(count: int, seed: int = 0, long: int = 0) -> list[Sample]:
    """Return documents of 5 to 24 tokens, or one of `long`; a third of them have ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 25, (count,), generator=generator).tolist()
    found = []
    for i, length in enumerate(lengths):
        ids = torch.randint(
            1, VOCABULARY, (long if long and i == count // 2 else length,), generator=generator
        )
        labels = ids.clone()
        labels[: len(ids) // 2 * (i % 3 == 0)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class Stream(torch.utils.data.IterableDataset[Sample]):
    def __init__(self, every: list[Sample]) -> None:
        self.every = every

    def __iter__(self) -> Iterator[Sample]:
        yield from self.every


def pad(every: list[Sample]) -> Sample:
    """Collate samples by padding on the right."""
    longest = max(len(each["input_ids"]) for each in every)

    def padded(name: str, value: int) -> Tensor:
        rows = [F.pad(each[name], (0, longest - len(each[name])), value=value) for each in every]
        return torch.stack(rows)

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}


def flatten(every: list[Sample]) -> Any:
    """Collate samples without padding, as one row whose positions restart."""
    from transformers import DataCollatorWithFlattening

    rows = [{name: each[name].tolist() for name in ("input_ids", "labels")} for each in every]
    return DataCollatorWithFlattening()(rows)


def accuracy(given: Any) -> dict[str, float]:
    predicted, labels = given.predictions[:, :-1].argmax(-1), given.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((predicted == labels)[counted].mean()), "labels": int(counted.sum())}


def arguments(folder: Path, kind: str = "TrainingArguments", **changes: Any) -> Any:
    options: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
    }
    return getattr(transformers, kind)(str(folder), **(options | changes))


def as_launched(rank: int, world: int) -> None:
    """Set the environment that torchrun sets, which accelerate reads."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})


def result(trainer: Any, found: list[Any]) -> Run:
    logged = [
        {name: value for name, value in entry.items() if not name.endswith(TIMED)}
        for entry in trainer.state.log_history
    ]
    parameters = {}
    for name, p in trainer.accelerator.unwrap_model(
        trainer.model, keep_torch_compile=False
    ).named_parameters():
        p = p.detach()
        parameters[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
    return Run(logged, parameters, found)


def check_same(found: Any, expected: Any, tolerance: float, where: str = "", least: float = 1e-5) -> None:
    """Compare nested results, of which numbers may differ by rounding, relative to `least` or more."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            check_same(found[name], expected[name], tolerance, f"{where} {name}", least)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_same(one, other, tolerance, f"{where}[{i}]", least)
    elif isinstance(expected, (float, np.ndarray, Tensor)):
        one, other = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        assert one.shape == other.shape, (where, one.shape, other.shape)
        assert torch.equal(one.isnan(), other.isnan()), (where, found, expected)
        error = (one - other).nan_to_num().abs().max() / other.nan_to_num().abs().max().clamp(min=least)
        assert error < tolerance, (where, float(error), found, expected)
    else:
        assert found == expected, (where, found, expected)
