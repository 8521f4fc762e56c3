# SPDX-License-Identifier: Apache-2.0
"""Train by LLaMA-Factory's v1: in one process, or with sequences that all ranks or two of them share."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from llamafactory.v1.accelerator.interface import DistributedInterface, DistributedStrategy
from llamafactory.v1.config import BatchingStrategy, TrainingArguments
from llamafactory.v1.core.utils.rendering import Renderer
from llamafactory.v1.plugins.model_plugins.parallelization.sequence_parallel import (
    SequenceParallelLossPlugin,
    SequenceParallelModelPlugin,
)
from llamafactory.v1.trainers.sft_trainer import SFTTrainer
from llamafactory.v1.utils.callbacks import TrainerCallback
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from trainers.models import qwen2_config
from transformers import OPTConfig, OPTForCausalLM, Qwen2ForCausalLM

import spar
import spar.integrations.llamafactory as plug

torch.accelerator.synchronize = lambda: None  # which the trainer calls in each step: here is none
LENGTHS = [11, 16, 7, 9, 12, 5, 14, 10]


class Samples(Renderer):
    """Token ids in place of messages."""

    def __init__(self) -> None:
        super().__init__("none", SimpleNamespace(model_input_names=["input_ids", "attention_mask"]))

    def process_samples(self, samples: list[Any]) -> list[Any]:
        return samples


class Logged(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, logs: Any, **kwargs: Any) -> None:
        self.losses.append(logs["loss"])
        self.norms.append(logs["grad_norm"])


class OneProcess(SFTTrainer):
    """SFTTrainer without sequence groups, and with sdpa in place of flash attention, which needs a GPU."""

    def compute_loss(self, batch: Any) -> torch.Tensor:
        if batch["attention_mask"].all():  # flash attention finds documents by positions then
            batch = {name: x for name, x in batch.items() if name != "attention_mask"}
        return super().compute_loss(batch)


def samples(weighted: bool) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    found = []
    for length in LENGTHS:
        ids, weights, prompt = torch.randint(2, 60, (length,)).tolist(), torch.rand(length) + 0.5, length // 3
        sample = {
            "input_ids": ids,
            "attention_mask": [1] * length,
            "labels": [-100] * prompt + ids[prompt:],
            "loss_weights": [0.0] * prompt + (weights if weighted else torch.ones(length))[prompt:].tolist(),
            "position_ids": list(range(1, length + 1)),
        }
        found.append(sample)
    return found


def train(
    folder: Path, size: int, weighted: bool = False, lora: bool = False, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = qwen2_config(use_cache=False)
    model: Any = Qwen2ForCausalLM(config)
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
    # The trainer asks for flash attention, without which it would not have been loaded.
    model.config._attn_implementation_internal = "flash_attention_2"
    dist_config = {"name": "fsdp2", "cp_size": size, "cp_mode": "spar"} if size > 1 else None
    args = TrainingArguments(
        output_dir=str(folder),
        global_batch_size=4,
        learning_rate=0.01,
        max_steps=3,
        bf16=False,
        batching_workers=0,
        dist_config=dist_config,
        **options,
    )
    logged = Logged()
    kind = SFTTrainer if size > 1 else OneProcess
    trainer = kind(args, model, Samples(), samples(weighted), [logged])
    if size == 1:
        model.set_attn_implementation("sdpa")
    trainer.fit()
    weights = {}
    for name, p in model.named_parameters():
        weights[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return {"losses": logged.losses, "norms": logged.norms, "weights": weights}


def checks(model: Any) -> list[Any]:
    """Return what holds of the plug, whose trainer ran. model: one that is not parallelized."""
    own, found = plug._own_losses[0], []
    with mock.patch.object(DistributedInterface, "get_group", return_value=None):
        try:
            SequenceParallelModelPlugin("spar")(model, {"cp_size": 2})
        except ValueError as error:
            found.append(str(error))
    # Its masks do not find documents.
    opt = OPTForCausalLM(OPTConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=3))
    spar.parallelize(opt, dist.group.WORLD, outputs="parts")
    ones = torch.ones(1, 8, dtype=torch.int64)
    packed = dict.fromkeys(("input_ids", "attention_mask", "labels", "loss_weights"), ones)
    try:
        loss_of = SequenceParallelLossPlugin("sequence_parallel_loss")
        loss_of(opt, packed | {"position_ids": torch.arange(8)[None] % 5})
    except ValueError as error:
        found.append(str(error))
    with mock.patch.object(plug, "_own_losses", [lambda *given: given]):
        found.append(SequenceParallelLossPlugin("sequence_parallel_loss")(model, {}) == (model, {}))
    plug.uninstall()
    found.append(SequenceParallelLossPlugin("sequence_parallel_loss")["__call__"] is own)
    try:
        SequenceParallelModelPlugin("spar")(model, {})
    except ValueError as error:
        found.append(str(error))
    return found


def main(folder: Path) -> Any:
    world = int(os.environ["WORLD_SIZE"])
    dynamic = {"micro_batch_size": 2, "cutoff_len": 12}
    of_all: dict[str, Any] = {
        "padded": {"micro_batch_size": 2},
        "dynamic": {"batching_strategy": BatchingStrategy.DYNAMIC_BATCHING, **dynamic},
        "dynamic packed": {"batching_strategy": BatchingStrategy.DYNAMIC_PADDING_FREE, **dynamic},
    }
    of_pairs: dict[str, Any] = {
        "weighted": {"weighted": True},
        "packed": {"micro_batch_size": 2, "batching_strategy": BatchingStrategy.PADDING_FREE},
        "lora": {"lora": True},
    }
    if world > 1:
        plug.install()
    ranks = DistributedInterface({"name": "fsdp2", "cp_size": world})
    found = {case: train(folder, world, **options) for case, options in of_all.items()}
    pair = min(world, 2)
    ranks.strategy = DistributedStrategy(cp_size=pair)
    names = ranks.strategy.data_mesh_dim_names
    ranks.data_device_mesh = init_device_mesh("cpu", ranks.strategy.data_mesh_shape, mesh_dim_names=names)
    found |= {case: train(folder, pair, **options) for case, options in of_pairs.items()}
    checked = checks(torch.nn.Linear(1, 1)) if world > 1 else []
    return found, checked
