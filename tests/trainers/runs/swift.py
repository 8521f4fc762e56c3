# SPDX-License-Identifier: Apache-2.0
"""Runs of ms-swift's `swift sft`, each of a CASE,SIZE."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"  # accelerate sees one process elsewhere
import torch
from helpers import missing

# For other metrics, downloads of media and other hosts of models.
missing.replace("aiohttp", "einops", "jieba", "nltk", "oss2", "rouge")
import swift.dataset.packing  # noqa: E402
from swift.arguments import SftArguments  # noqa: E402
from swift.pipelines import SwiftSft  # noqa: E402
from trainers.models import WORDS, write_llama  # noqa: E402
from transformers import OPTConfig, OPTForCausalLM  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True},
    "padding_free": {"padding_free": True, "tuner_type": "lora", "lora_rank": 4},
}


def write_samples(path: Path, count: int, seed: int, shortest: int) -> None:
    """Write answers of up to 40 words to questions of 4."""
    generator = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist())

    rows = []
    for length in torch.randint(shortest, 41, (count,), generator=generator).tolist():
        messages = [("user", words(4)), ("assistant", words(length))]
        rows.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in messages]}))
    path.write_text("\n".join(rows))


def _pack_with_sdpa(args: Any) -> None:
    args.padding_free = args.padding_free or args.packing


def run(folder: Path, rank: int, case: str, size: int, model: str = "model") -> dict[str, Any]:
    from spar.integrations import trainer as integration

    options: dict[str, Any] = {
        "model": str(folder / model),
        "model_type": "llama",
        "template": "default",
        "dataset": [str(folder / "train.jsonl")],
        "val_dataset": [str(folder / "eval.jsonl")],
        "output_dir": str(folder / f"out-{case}"),
        "external_plugins": [str(folder / f"{model}-{case}.py")] if size else [],
        "tuner_type": "full",
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "dataloader_num_workers": 0,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "check_model": False,
    }
    if not size:  # ms-swift allows packing with flash attention alone, and the plugin, too, with sdpa
        SftArguments._check_padding_free = _pack_with_sdpa
    pipeline = SwiftSft(SftArguments(**(options | CASES[case])))
    found: dict[str, Any] = {}
    own = pipeline.train

    def train(trainer: Any) -> Any:
        result = own(trainer)
        names = ("loss", "grad_norm", "token_acc", "learning_rate", "eval_loss", "eval_token_acc", "step")
        found["logged"] = [{k: each[k] for k in names if k in each} for each in trainer.state.log_history]
        found["parameters"] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        found["share"] = trainer.sequences.report.share if size else 1.0
        return result

    pipeline.train = train
    try:
        pipeline.main()
    finally:
        integration.uninstall()
    return found


def refusal(folder: Path, rank: int, case: str) -> str:
    """Return the message of a run with a model whose masks find no documents."""
    try:
        run(folder, rank, case, 2, "opt")
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path, *runs: str) -> Any:
    rank = int(os.environ["RANK"])
    every = [(case, int(size)) for case, size in (each.split(",") for each in runs)]
    if rank == 0:
        write_llama(folder / "model")
        shutil.copytree(folder / "model", folder / "opt")
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 64}
        OPTForCausalLM(OPTConfig(**sizes)).save_pretrained(folder / "opt")
        write_samples(folder / "train.jsonl", 24, 0, 5)
        write_samples(folder / "eval.jsonl", 8, 1, 5)
        for case, size in every:
            plugin = f"import spar.integrations.swift\nspar.integrations.swift.install({size})\n"
            for model in ("model", "opt"):  # ms-swift imports each file once
                (folder / f"{model}-{case}.py").write_text(plugin)
        (folder / "ready").touch()
    # Processes that pack would import all of this again.
    swift.dataset.packing._resolve_mp_context = lambda *_: multiprocessing.get_context("fork")
    while not (folder / "ready").exists():
        time.sleep(0.01)
    found = [run(folder, rank, *each) for each in every]
    return found, [refusal(folder, rank, case) for case, size in every if size and case != "padded"]
