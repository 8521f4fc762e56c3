# SPDX-License-Identifier: Apache-2.0
"""Runs of `axolotl train`, each of a CASE,SIZE,ACCUMULATED."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"  # accelerate sees one process elsewhere
import torch
import torch._dynamo  # asks for triton before it is replaced
import transformers.trainer  # noqa: F401  so does this
import yaml
from helpers import missing
from helpers.trainers import TIMED

# For quantization, other metrics, telemetry and kernels on GPUs. What numba compiles runs without it, too.
missing.replace("bitsandbytes", "evaluate", "fastcore", "fire", "numba", "posthog", "triton", "wandb")
import axolotl.cli.config  # noqa: E402
import axolotl.cli.train  # noqa: E402
import axolotl.train  # noqa: E402
from axolotl.integrations.base import PluginManager  # noqa: E402
from datasets import Dataset  # noqa: E402
from trainers.models import WORDS, write_llama  # noqa: E402
from transformers import OPTConfig, OPTForCausalLM  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sample_packing": True, "eval_sample_packing": True, "curriculum_sampling": True},
    "LoRA": {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True},
}


REFUSED: list[dict[str, Any]] = [
    {"sequence_parallel_size": None},
    {"sequence_parallel_size": "2"},
    {"context_parallel_size": 2},
    {"lora_mlp_kernel": True},
    {"attn_implementation": "flash_attention_2"},
    {"sample_packing": True, "attn_implementation": None},
    {"sample_packing": True},
    {},
]


def write_samples(path: Path, count: int, seed: int) -> None:
    """Write documents of 5 to 40 words."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in torch.randint(5, 41, (count,), generator=generator).tolist():
        words = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        rows.append(json.dumps({"text": " ".join(WORDS[i] for i in words)}))
    path.write_text("\n".join(rows))


def configuration(folder: Path, size: int, accumulated: int) -> dict[str, Any]:
    """Return the keys of a run, of which two are for sequence groups. size: of a group; 0: there are none."""
    data = {"type": "completion", "ds_type": "json"}
    plug = {"plugins": ["spar.integrations.axolotl.SequenceParallelPlugin"], "sequence_parallel_size": size}
    kernels = "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"
    return (plug if size else dict.fromkeys(kernels, False)) | {  # they need a GPU
        "base_model": str(folder / "model"),
        "datasets": [data | {"path": str(folder / "train.jsonl")}],
        "test_datasets": [data | {"path": str(folder / "eval.jsonl"), "split": "train"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "out"),
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": accumulated,
        "num_epochs": 1,
        "optimizer": "sgd",
        "lr_scheduler": "linear",
        "warmup_ratio": 0.5,
        "learning_rate": 0.1,
        "logging_steps": 1,
        "seed": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "special_tokens": {"pad_token": "<pad>"},
    }


def run(folder: Path, rank: int, case: str, size: int, accumulated: int) -> dict[str, Any]:
    from spar.integrations import trainer as integration

    path = folder / f"{case}.yml"
    if rank == 0:
        new = folder / "new.yml"
        new.write_text(yaml.safe_dump(configuration(folder, size, accumulated) | CASES[case]))
        new.rename(path)
    while not path.exists():
        time.sleep(0.01)
    cfg = axolotl.cli.config.load_cfg(str(path))
    cfg.dataset_num_proc = None  # other processes would import all of this again
    cfg.device_map = None  # axolotl's is a GPU for each rank
    found: dict[str, Any] = {}
    train = axolotl.train.execute_training

    def execute(cfg: Any, trainer: Any, *args: Any) -> None:
        assert not integration._replaced
        train(cfg, trainer, *args)
        found["logged"] = [
            {
                k: v
                for k, v in each.items()
                if not k.endswith(TIMED) and not k.startswith(("memory", "tokens"))
            }
            for each in trainer.state.log_history
        ]
        found["parameters"] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        found["share"] = trainer.sequences.report.share if size else 1.0

    axolotl.train.execute_training = execute
    try:
        axolotl.cli.train.do_train(cfg, axolotl.cli.train.TrainerCliArgs())
    finally:
        axolotl.train.execute_training = train
    return found


def refusal(folder: Path, change: dict[str, Any]) -> str:
    """Return the message of a configuration that is refused, with a model whose masks find no documents."""
    path = folder / "refused.yml"
    path.write_text(yaml.safe_dump(configuration(folder, 2, 1) | change))
    plugins = PluginManager.get_instance()
    try:
        cfg = axolotl.cli.config.load_cfg(str(path))
        plugins.pre_model_load(cfg)
        model = OPTForCausalLM(OPTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3))
        plugins.add_callbacks_pre_trainer(cfg, model)
        plugins.add_callbacks_post_trainer(cfg, None)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path, *runs: str) -> Any:
    rank = int(os.environ["RANK"])
    if rank == 0:
        write_llama(folder / "model")
        write_samples(folder / "train.jsonl", 24, 0)
        write_samples(folder / "eval.jsonl", 20, 1)
    save = Dataset.save_to_disk
    # In this process: others would import all of this again.
    Dataset.save_to_disk = lambda data, path, num_proc, **options: save(data, path, **options)
    axolotl.train.cleanup_distributed = lambda: None  # the next run has the same process group
    found = [
        run(folder, rank, case, int(size), int(n)) for case, size, n in (each.split(",") for each in runs)
    ]
    checks = REFUSED if os.environ["WORLD_SIZE"] == "1" else []
    refused = [refusal(folder, change) for change in checks]
    return found, refused
