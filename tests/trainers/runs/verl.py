# SPDX-License-Identifier: Apache-2.0
"""Train by verl's FSDP engine: in one process, or with sequences that all ranks or two of them share."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers import missing
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.filterwarnings("ignore", ".* engine is not available")


# An engine does not use Ray and readers of data sets.
missing.replace("ray", "pandas", "datasets", "wandb", "tensorboard")
sys.modules["trl"] = None  # type: ignore[assignment] # another version than verl's is installed

import verl.utils.model  # noqa: E402
from transformers import (  # noqa: E402
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)
from verl.plugin.platform import PlatformBase, set_platform  # noqa: E402

# verl knows accelerators alone: this is a platform of CPUs.
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
CPU: dict[str, Any] = {name: mock.MagicMock() for name in PlatformBase.__abstractmethods__}
CPU |= {"device_name": "cpu", "vendor_name": "none", "device_module": torch.cpu}
CPU |= {
    "current_device": lambda self: torch.device("cpu"),
    "get_device_capability": lambda self: (None, None),
    "ray_resource_name": lambda self: "CPU",
}
set_platform(type("CPU", (PlatformBase,), CPU)())


def load_critic(local_path: str, torch_dtype: torch.dtype, model_config: Any, **options: Any) -> Any:
    critic = Qwen2ForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)
    if dist.get_world_size() > 1:  # spar must replace it
        critic.config._attn_implementation_internal = "flash_attention_2"
    return critic


# verl's asks for flash attention, which needs a GPU; so does FSDP's broadcast of the first rank's weights.
verl.utils.model.load_valuehead_model = load_critic
fsdp_init = FullyShardedDataParallel.__init__


def init_without_broadcast(self: Any, *args: Any, sync_module_states: bool = False, **kwargs: Any) -> None:
    fsdp_init(self, *args, **kwargs)


FullyShardedDataParallel.__init__ = init_without_broadcast  # type: ignore[method-assign]

from trainers.models import qwen2_config  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils.dataset.dataset_utils import DatasetPadMode  # noqa: E402
from verl.utils.tensordict_utils import get_tensordict  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    QATEngineConfig,
)
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl as own_engines  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss  # noqa: E402

LENGTHS = [(3, 8), (5, 4), (2, 12), (4, 5)]  # of prompts and responses: 43 tokens
FLOATS = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
SFT = functools.partial(sft_loss, None)


def batch(rank: int, size: int, options: dict[str, Any]) -> Any:
    """Return the samples of one of `size` data-parallel ranks."""
    torch.manual_seed(1)
    samples = [torch.randint(2, 60, (prompt + response,)) for prompt, response in LENGTHS]
    noise = [torch.randn(3, response) for _, response in LENGTHS]
    own = range(rank * len(LENGTHS) // size, (rank + 1) * len(LENGTHS) // size)

    def nested(of: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([of(i) for i in own], layout=torch.jagged)

    tensors = {
        "input_ids": nested(lambda i: samples[i]),
        "position_ids": nested(lambda i: torch.arange(sum(LENGTHS[i]))),
        "prompts": nested(lambda i: samples[i][: LENGTHS[i][0]]),
        "responses": nested(lambda i: samples[i][LENGTHS[i][0] :]),
        "loss_mask": nested(lambda i: (torch.arange(sum(LENGTHS[i])) >= LENGTHS[i][0]).float()),
        "response_mask": nested(lambda i: torch.ones(LENGTHS[i][1])),
        "old_log_probs": nested(lambda i: noise[i][0] * 0.1 - 4),
        "advantages": nested(lambda i: noise[i][1]),
        "values": nested(lambda i: noise[i][1]),
        "returns": nested(lambda i: noise[i][2]),
    }
    settings = {"temperature": 1.0, "global_batch_size": len(LENGTHS), "pad_mode": DatasetPadMode.NO_PADDING}
    return get_tensordict(tensors, settings | options)


def model_of(folder: Path, kind: Any = Qwen2ForCausalLM, tied: bool = False, **options: Any) -> Any:
    path = folder / f"{kind.__name__}-{tied}-{dist.get_rank()}"
    if not path.is_dir():
        torch.manual_seed(0)
        config = qwen2_config(tie_word_embeddings=tied, num_labels=1)
        kind(config).save_pretrained(path)
    options |= {"external_lib": "spar.integrations.verl"} if dist.get_world_size() > 1 else {}
    attention = {"attn_implementation": "sdpa"}
    return HFModelConfig(path=str(path), load_tokenizer=False, override_config=attention, **options)


def engine_of(model: Any, size: int, strategy: str = "fsdp2", **options: Any) -> Any:
    config = FSDPEngineConfig(
        strategy=strategy,
        ulysses_sequence_parallel_size=size,
        mixed_precision=FLOATS,
        use_torch_compile=False,
        **options,
    )
    optimizer = FSDPOptimizerConfig(lr=0.01, total_training_steps=4, clip_grad=0.5)
    return EngineRegistry.new(model.model_type, strategy, model, config, optimizer, CheckpointConfig())


def run(engine: Any, loss: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what verl's workers take from an engine: of all samples, then of two steps."""
    engine.initialize()
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    found: dict[str, Any] = {"rank": rank, "is_source": engine.is_mp_src_rank_with_outputs()}
    found |= {"losses": [], "norms": [], "weights": {}}
    with engine.eval_mode():
        outputs = engine.infer_batch(batch(rank, size, options))["model_output"]
        found["outputs"] = {name: value.values() for name, value in outputs.items()}
    for _ in range(2):
        with engine.train_mode():
            out = engine.train_batch(batch(rank, size, options), loss)
        total = torch.tensor(sum(out["loss"]))
        dist.all_reduce(total, group=engine.get_data_parallel_group())
        found["losses"].append(float(total) / size)
        if found["is_source"]:
            found["norms"].append(out["metrics"]["grad_norm"])
    if not isinstance(engine.module, FullyShardedDataParallel):  # its export needs a GPU
        found["weights"] = {name: value.detach().clone() for name, value in engine.get_per_tensor_param()[0]}
    return found


def refusals(folder: Path) -> list[str]:
    """Return the messages of errors of what is refused."""
    model, found = functools.partial(model_of, folder), []
    with_images = model()
    with_images.hf_config.vision_config = {}
    path = folder / f"gpt-oss-{dist.get_rank()}"
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 2}
    GptOssForCausalLM(GptOssConfig(vocab_size=64, **sizes)).save_pretrained(path)
    eager = {"attn_implementation": "eager"}
    without_documents = HFModelConfig(path=str(path), load_tokenizer=False, override_config=eager)

    def of_batch(**options: Any) -> None:
        engine = engine_of(model(), 2)
        engine.prepare_model_inputs(batch(0, 1, options))

    for refused in (
        lambda: engine_of(model(), 3),
        lambda: engine_of(model(use_fused_kernels=True), 2),
        lambda: engine_of(model(use_liger=True), 2),
        lambda: engine_of(model(), 2, qat=QATEngineConfig(enable=True)),
        lambda: engine_of(with_images, 2),
        lambda: engine_of(without_documents, 2).initialize(),
        lambda: of_batch(use_remove_padding=False),
        lambda: of_batch(distillation_use_topk=True),
    ):
        try:
            refused()
        except ValueError as error:
            found.append(str(error))
    return found


def main(folder: Path) -> Any:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    pair = min(world, 2)
    if world == 1:
        EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cpu")(own_engines.FSDPEngineWithLMHead)
        EngineRegistry.register("value_model", ["fsdp", "fsdp2"], "cpu")(own_engines.FSDPEngineWithValueHead)
    fixed = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 64 // pair}
    actor = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=1, entropy_coeff=0.1)
    critic = FSDPCriticConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    model = functools.partial(model_of, folder)
    found: dict[str, Any] = {
        "sft": run(engine_of(model(), world), SFT, fixed),
        "grpo": run(
            engine_of(model(), pair, fsdp_size=2),
            functools.partial(ppo_loss, actor),
            dynamic | {"calculate_entropy": True},
        ),
        "value": run(
            engine_of(model(Qwen2ForTokenClassification, model_type="value_model"), pair),
            functools.partial(value_loss, critic),
            dynamic,
        ),
        "lora": run(engine_of(model(**lora), world), SFT, fixed),
        "fsdp1": run(engine_of(model(tied=True), pair, "fsdp"), SFT, fixed),
    }
    if world > 1:
        found["refusals"] = refusals(folder)
    return found
