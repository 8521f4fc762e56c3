# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in the trainer of LLaMA-Factory's v1, by `cp_mode: spar` in its `dist_config`.

`torchrun --nproc-per-node N -m spar.integrations.llamafactory sft config.yaml` runs its launcher with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._model.model import states_of
from ..loss import mean_loss
from ..ops.token_logprobs import token_logprobs
from ..sequence_layout import SequenceLayout
from ._documents import check_documents
from ._parallelize import parallelize
from ._refusals import check_version

__all__ = ["install", "uninstall"]

WHERE = "integrations.llamafactory"
VERSION = 0, 9, 5  # the interfaces of its v1 are not documented: this one was tested
_LOSS = "sequence_parallel_loss"
_own_losses: list[Any] = []  # LLaMA-Factory's, while it is replaced


def install() -> None:
    """Register `cp_mode: spar` with LLaMA-Factory, until `uninstall`. Call it before the trainer is made.

    `cp_size` ranks share each sequence then. Other modes stay as they are.

    Raises:
        ImportError: the version of LLaMA-Factory is not one with which this was tested.
        RuntimeError: it is installed already.
    """
    check_version(WHERE, "llamafactory", VERSION, VERSION)
    if _own_losses:
        raise RuntimeError(f"{WHERE}.install: it is installed; call uninstall() first")
    models, losses = _plugins()
    models("spar").register()(_parallelize)
    # The trainer calls the loss of this name in any mode.
    _own_losses.append(losses(_LOSS)["__call__"])
    losses._registry[_LOSS]["__call__"] = _loss


def uninstall() -> None:
    """Undo `install`."""
    if _own_losses:
        models, losses = _plugins()
        del models._registry["spar"]
        losses._registry[_LOSS]["__call__"] = _own_losses.pop()


def _plugins() -> tuple[Any, Any]:
    from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel as theirs

    return theirs.SequenceParallelModelPlugin, theirs.SequenceParallelLossPlugin


def _parallelize(model: Any, dist_config: Mapping[str, Any]) -> None:
    """Parallelize a model that the trainer has sharded over all ranks."""
    from llamafactory.v1.accelerator.interface import Dim, DistributedInterface
    from transformers.trainer_utils import unwrap_peft_model

    group = DistributedInterface().get_group(Dim.CP)
    if group is None:
        raise ValueError(
            f"{WHERE}: cp_size is {dist_config['cp_size']}, and this is one process; expected that many "
            "ranks or more, as torchrun starts them"
        )
    inner = unwrap_peft_model(model)
    # The trainer wants flash_attention_2; spar.attention takes the place of sdpa.
    inner.set_attn_implementation("sdpa")
    parallelize(inner, group, outputs="parts")


def _loss(model: Any, batch: Mapping[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute the loss of a sequence group's micro-batch, which is the same whole one on its ranks."""
    states = states_of(model)
    if not states:
        loss: torch.Tensor = _own_losses[0](model, batch, *args, **kwargs)
        return loss
    from llamafactory.v1.accelerator.interface import DistributedInterface

    device, group = DistributedInterface().current_device, states[0].view.parts.group
    inputs = {name: x.to(device, non_blocking=True) for name, x in batch.items() if torch.is_tensor(x)}
    labels, weights = inputs.pop("labels"), inputs.pop("loss_weights")
    if "attention_mask" in inputs and inputs["attention_mask"].all():
        # position_ids say which documents there are, as for flash attention.
        del inputs["attention_mask"]
        if "position_ids" in inputs and (inputs["position_ids"].diff() < 0).any():
            check_documents(states[0].model, WHERE)
    samples, tokens = labels.shape
    if tokens < max(samples, group.size()):  # then logits are whole, or other ranks have other samples
        raise ValueError(
            f"{WHERE}: a micro-batch is of {samples} samples and {tokens} tokens; expected at least "
            f"{max(samples, group.size())} tokens: as many as samples and as ranks that share it"
        )
    layout = SequenceLayout.even(tokens, group)
    logits = model(**inputs, use_cache=False).logits  # of this rank's tokens
    labels = layout.shift(layout.shard(labels, 1), 1, fill=-100)
    weights = layout.shift(layout.shard(weights, 1), 1)
    logprobs, _ = token_logprobs(logits, labels, layout)
    # The trainer multiplies it by the number of sequence groups, and FSDP averages gradients over all ranks.
    return mean_loss(-(logprobs * weights).sum(), weights.sum(), group, averaged_by=group)


if __name__ == "__main__":
    from llamafactory.v1.launcher import main

    install()
    main()
