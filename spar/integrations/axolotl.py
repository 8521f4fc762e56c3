# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in axolotl: a plugin, which a configuration names."""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from . import trainer as integration
from ._documents import check_documents
from ._refusals import check_version

WHERE = "integrations.axolotl"
VERSION = 0, 19  # the order in which it calls plugins is not documented: this one was tested
NAME = f"{__name__}.SequenceParallelPlugin"
# Kernels that take whole sequences, and which axolotl turns on if a configuration does not turn them off.
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "sdpa_varlen")
# What was not run with sequence groups, or divides ranks and sequences in another way.
_REFUSED = (
    *_KERNELS,
    *("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "expert_parallel_size"),
    *("dp_shard_size", "dp_replicate_size", "deepspeed", "use_ray"),
    *("rl", "reward_model", "process_reward_model", "orpo_alpha", "pretraining_dataset", "streaming"),
    *("cut_cross_entropy", "chunked_cross_entropy", "tiled_mlp", "fused_attn_kernel"),
    *("liger_fused_linear_cross_entropy", "liger_cross_entropy", "liger_rope", "liger_rms_norm"),
    *("liger_glu_activation", "liger_layer_norm"),
)


class SequenceParallelArgs(BaseModel):  # type: ignore[misc]
    """Keys of a configuration.

    Attributes:
        sequence_parallel_size: as that of `spar.integrations.trainer.install`.
        sequence_parallel_check: its `check`.
        sequence_parallel_layout: `layout` of `spar.parallelize`.
        sequence_parallel_method: `method` of `spar.parallelize`.
    """

    sequence_parallel_size: int | None = None
    sequence_parallel_check: bool = False
    sequence_parallel_layout: str = "even"
    sequence_parallel_method: str | None = None


class _SequenceParallel(integration.SequenceParallel):
    readers_of_loss = AxolotlTrainer.compute_loss, AxolotlTrainer.prediction_step


class SequenceParallelPlugin(BasePlugin):  # type: ignore[misc]
    """Let the trainer that axolotl makes shard its sequences over ranks.

    axolotl calls its plugins for each later configuration, too, also for one that does not name them.
    """

    def register(self, cfg: Any) -> None:
        """Check a configuration, before axolotl does."""
        size = cfg.get("sequence_parallel_size")
        if NAME in (cfg.get("plugins") or []) and (type(size) is not int or size < 1):
            raise ValueError(f"{WHERE}: sequence_parallel_size is {size!r}; expected an int from 1")
        if (size or 1) == 1:
            return
        for name in _REFUSED:
            value = cfg.get(name)
            if value and (value is True or value != 1):  # a size of 1 divides nothing
                raise ValueError(
                    f"{WHERE}: {name} is {value!r:.200}; with sequence_parallel_size leave it out"
                )
        for name in _KERNELS:
            cfg[name] = False

    def get_input_args(self) -> str:
        return f"{__name__}.{SequenceParallelArgs.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Let axolotl count the steps of an epoch: each sequence group has its own samples."""
        if not preprocess and cfg.world_size > 1:
            cfg.batch_size //= cfg.sequence_parallel_size or 1

    def pre_model_load(self, cfg: Any) -> None:
        attention = cfg.attn_implementation
        # Without a name axolotl passes a mask by which packed samples attend to each other.
        allowed = ("sdpa", "eager") if cfg.sample_packing else (None, "sdpa", "eager")
        if (cfg.sequence_parallel_size or 1) > 1 and attention not in allowed:
            raise ValueError(
                f"{WHERE}: attn_implementation is {attention!r}; with sequence_parallel_size expected sdpa "
                "or eager, which spar computes by its own kernels"
            )

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Install sequence groups: axolotl calls this last before it makes the trainer."""
        if cfg.sequence_parallel_size:
            if cfg.sample_packing and cfg.sequence_parallel_size > 1:
                check_documents(model, WHERE)
            options = {"layout": cfg.sequence_parallel_layout, "method": cfg.sequence_parallel_method}
            check = cfg.sequence_parallel_check
            check_version(WHERE, "axolotl", VERSION, VERSION)
            integration.uninstall()  # that of a trainer which could not be made
            integration.install(cfg.sequence_parallel_size, check=check, mixin=_SequenceParallel, **options)
        return []

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Uninstall: axolotl calls this first after it made the trainer."""
        if cfg.sequence_parallel_size:
            integration.uninstall()
        return []
