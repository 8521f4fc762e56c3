# SPDX-License-Identifier: Apache-2.0
"""Small runs of TRL's trainers: data, a tokenizer of single characters, and what a run reports."""

from __future__ import annotations

import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers import llms, trainers
from helpers.trainers import Run

Case = dict[str, Any]
os.environ.setdefault("CI", "true")  # else TRL reports each trainer to its authors
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase[:22] + " ."
SPECIAL = ["<pad>", "<eos>", "<user>"]
# The mark of generation is what `assistant_only_loss` reads.
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}{% else %}"
    "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% endif %}{% endfor %}"
)
# Unlike a GPU's kernels in 16 bits, these agree with one process to rounding.
EXACT: Case = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
}


def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    assert len(vocabulary) == llms.VOCABULARY
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": ["<user>"]}
    return PreTrainedTokenizerFast(tokenizer_object=characters, chat_template=CHAT, **named)


def texts(count: int, seed: int, least: int = 4, most: int = 20) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most, (count,), generator=generator).tolist()
    every = [torch.randint(len(CHARACTERS), (length,), generator=generator).tolist() for length in lengths]
    return ["".join(CHARACTERS[i] for i in each) for each in every]


def rows(count: int, seed: int, least: int = 4, **columns: int) -> Any:
    """Return a dataset of random texts; columns: the most characters of each; least: the fewest of all."""
    import datasets

    found = {name: texts(count, seed + i, least, most) for i, (name, most) in enumerate(columns.items())}
    return datasets.Dataset.from_dict(found)


def talks(count: int, seed: int) -> Any:
    import datasets

    pairs = zip(texts(count, seed), texts(count, seed + 1), strict=True)
    roles = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    return datasets.Dataset.from_dict({"messages": roles})


def judged(count: int, seed: int) -> Any:
    """Return completions that are wanted or not, for KTO."""
    found = rows(count, seed, prompt=12, completion=16)
    return found.add_column("label", [i % 3 > 0 for i in range(count)])


def saved(folder: Path, name: str = "llama", **changes: Any) -> Any:
    """Return a model that was loaded from a folder, from which TRL loads its reference, too."""
    from transformers import AutoModelForCausalLM

    path = folder / name
    if not path.exists():
        options = {"initializer_range": 0.1, "use_cache": True} | changes
        llms.seeded(llms.maker(name, **options)).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def run(folder: Path, case: Case, replicas: int = 1) -> Run:
    """Train and evaluate. replicas: how many ranks' samples a batch has."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    kind = case["kind"]
    sizes = {f"per_device_{name}_batch_size": case.get("size", 2) * replicas for name in ("train", "eval")}
    options = EXACT | sizes | case.get("arguments", {})
    given: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": case["data"](12, 0)}
    if case.get("evaluates", True):
        given["eval_dataset"] = case["data"](case.get("evaluated", 4), 50)
        options = {"eval_strategy": "steps", "eval_steps": 2} | options
    if "trainer" in case:
        given |= case["trainer"](folder)
    make: Callable[[Path], Any] = case.get("model", saved)
    trainer = getattr(trl, f"{kind}Trainer")(
        make(folder), args=getattr(trl, f"{kind}Config")(str(folder / "out"), **options), **given
    )
    trainer.remove_callback(trainers.transformers.PrinterCallback)
    trainer.train()
    found = case["then"](trainer) if "then" in case else []
    return trainers.result(trainer, found)
