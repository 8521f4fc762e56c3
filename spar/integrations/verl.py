# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in verl: importing this module lets its FSDP engines shard sequences by spar.

verl imports it where `model.external_lib=spar.integrations.verl` names it, in each worker.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_utils import unwrap_peft_model
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from ..sequence_layout import SequenceLayout
from ._documents import check_documents
from ._parallelize import parallelize
from ._refusals import check_version, refuse

__all__ = ["SequenceParallelEngine", "SequenceParallelValueEngine"]

WHERE = "integrations.verl"
VERSION = 0, 9, 1  # methods of its engine that are not documented are overridden: this one was tested
_BACKENDS = ["fsdp", "fsdp2"]


class _SequenceParallel:
    """A mixin of verl's FSDP engines: `ulysses_sequence_parallel_size` ranks share each packed batch.

    As with verl's own Ulysses they have the same samples, and log-probabilities, entropies and values are
    those of all tokens on each. The model returns logits of this rank's tokens alone.
    """

    sequence_group: dist.ProcessGroup | None = None  # None: each rank has its own samples
    _layout: SequenceLayout  # of the newest micro-batch

    # What verl's engine has.
    engine_config: Any
    model_config: Any
    ulysses_sequence_parallel_size: int
    ulysses_parallel_group: Any

    def _init_device_mesh(self) -> None:
        size, world = self.engine_config.ulysses_sequence_parallel_size, dist.get_world_size()
        if not isinstance(size, int) or size < 1 or world % size:
            raise ValueError(
                f"{WHERE}: ulysses_sequence_parallel_size is {size!r}; must divide the number of ranks, "
                f"{world}"
            )
        super()._init_device_mesh()  # type: ignore[misc]
        if size == 1:
            return
        _check(self.model_config, self.engine_config)
        # verl's code for its own Ulysses looks at these: it neither cuts inputs nor exchanges heads.
        self.sequence_group, self.ulysses_parallel_group = self.ulysses_parallel_group, None
        self.use_ulysses_sp = False

    def _build_module(self) -> Any:
        if self.sequence_group is None:
            return super()._build_module()  # type: ignore[misc]
        size, self.ulysses_sequence_parallel_size = self.ulysses_sequence_parallel_size, 1
        try:  # verl would check the number of heads, and replace functions of the model
            module = super()._build_module()  # type: ignore[misc]
        finally:
            self.ulysses_sequence_parallel_size = size
        if hasattr(module, "v_head"):
            raise ValueError(
                f"{WHERE}: the critic is a {type(module).__name__}; with sequence parallelism expected a "
                "model for token classification"
            )
        check_documents(module, WHERE)
        if "flash" in module.config._attn_implementation:
            module.set_attn_implementation("sdpa")  # of which spar.attention takes the place
        return module

    def _build_fsdp_module(self, module: Any) -> Any:
        if self.sequence_group is not None:
            model, group = unwrap_peft_model(module), self.sequence_group
            parallelize(model, group, layout=lambda _: self._layout, outputs="parts")
        return super()._build_fsdp_module(module)  # type: ignore[misc]

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        inputs, kept = super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        if self.sequence_group is None:
            return inputs, kept
        for name, expected in (("use_remove_padding", True), ("distillation_use_topk", False)):
            found = tensordict_utils.get_non_tensor_data(micro_batch, name, expected)
            if found != expected:
                raise ValueError(
                    f"{WHERE}: {name} is {found!r}; expected {expected} with sequence parallelism"
                )
        tokens = inputs["input_ids"].size(1)
        if tokens < self.ulysses_sequence_parallel_size:
            raise ValueError(
                f"{WHERE}: a micro-batch has {tokens} tokens; expected at least "
                f"{self.ulysses_sequence_parallel_size}, the number of ranks that share it"
            )
        # Samples stay whole on a rank, where ranks stay balanced.
        starts = (inputs["position_ids"].reshape(-1)[:tokens] == 0).nonzero()[:, 0].tolist()
        lengths = [end - start for start, end in pairwise([*starts, tokens])]
        self._layout = SequenceLayout.balanced(lengths, self.sequence_group)
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            kept[name] = self._layout.shard(kept[name], 0)
        return inputs, kept

    def _gather_and_unpad_packed(self, tensor: torch.Tensor, pad_size: int) -> torch.Tensor:
        if self.sequence_group is not None:
            # All ranks compute the same loss of it, and FSDP averages gradients over them.
            tensor = self._layout.gather(tensor, 0, grad_scale="up")
        return super()._gather_and_unpad_packed(tensor, pad_size)  # type: ignore[misc, no-any-return]


def _check(model: Any, engine: Any) -> None:
    """Refuse what was not tested with sequence parallelism. model, engine: verl's configs."""
    has_images = hasattr(model.hf_config, "vision_config")
    refused = (
        (model.use_fused_kernels, "use_fused_kernels is True", "False"),
        (model.use_liger, "use_liger is True", "False"),
        (engine.qat.enable, "qat.enable is True", "False"),
        (has_images, "the model has a vision_config", "a language model"),
    )
    refuse(WHERE, refused)


def _register() -> None:
    check_version(WHERE, "verl", VERSION, VERSION)
    # verl's own engines are registered for a device; one that is registered for its vendor comes first.
    where = {"device": get_device_name(), "vendor": get_vendor()}
    for model_type, engine in (
        ("language_model", SequenceParallelEngine),
        ("value_model", SequenceParallelValueEngine),
    ):
        EngineRegistry.register(model_type, _BACKENDS, **where)(engine)


class SequenceParallelEngine(_SequenceParallel, FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP engine of actors, references and SFT, with sequences sharded by spar."""


class SequenceParallelValueEngine(_SequenceParallel, FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's FSDP engine of critics, with sequences sharded by spar."""


_register()
