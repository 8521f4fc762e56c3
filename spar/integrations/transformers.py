# SPDX-License-Identifier: Apache-2.0
"""Run and train a stock transformers model over a sharded sequence: docs/transformers.md.

    spar.integrations.transformers.register()
    model.set_attn_implementation("spar")
    batch = spar.integrations.transformers.shard(model, batch, group=cp, token_group=dp)
    loss = model(**batch).loss
    (loss * world).backward()
    print(spar.integrations.transformers.total_loss(loss, group=cp, token_group=dp))

`world`: the number of ranks over which DDP or FSDP averages gradients; 1 if they are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..sequence_layout import SequenceLayout
from ..topology.resolve import Group, process_group
from ._transformers.attention import attention_forward, mask_in_forward, refuse_to_generate, registered
from ._transformers.masks import WHOLE, whole_mask
from ._transformers.models import stock
from ._transformers.sharding import Sharding

__all__ = ["register", "shard", "total_loss"]

_TOTAL = "transformers.total_loss"


def register(name: str = "spar") -> None:
    """Add spar.attention to transformers, for `model.set_attn_implementation(name)`.

    Registers an attention function and a mask function. It may be called again.

    Raises:
        ValueError: transformers has another attention of this name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if not isinstance(name, str):
        raise TypeError(f"register: name is {name!r:.80}; expected a str")
    if name not in registered and name in (*AttentionInterface().valid_keys(), "eager"):
        raise ValueError(f"register: name is {name!r}, an attention of transformers; pass another name")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask_in_forward)
    AttentionMaskInterface.register(WHOLE, whole_mask)
    registered.add(name)


def shard(
    model: Any,
    batch: Mapping[str, Any],
    layout: SequenceLayout | None = None,
    *,
    group: Group = None,
    method: str | None = None,
    scan: str | None = None,
    token_group: Group = None,
    check: bool = True,
    whole: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Turn a whole batch into this rank's keyword arguments of the model's forward.

    Collective over `group`, and over `token_group` if there are labels.

    The loss of `model(**shard(...))` is the sum of this rank's token losses over the number of all ranks'
    tokens; `total_loss` sums it. Sum gradients over all ranks; under DDP or FSDP, which average, multiply the
    loss by their number.

    Args:
        model: a causal language model of transformers that uses the registered attention, the model inside
            it, or one with a head of classification or question answering over it; it may be inside PEFT,
            DDP, FSDP2 (fully_shard) or torch.compile.
        batch: the whole batch, equal on all ranks of `group`. It has input_ids `[B, S]` or inputs_embeds
            `[B, S, D]`, and if wanted position_ids, attention_mask (`[B, S]`, `[B, 1, S, S]`,
            `spar.Spans`, or a dict of these by kind of layer; docs/transformers.md says which layers honour
            which), labels or shift_labels (classification of sequences: labels of samples; question
            answering: start_positions and end_positions), and what transformers' collators add for flash
            attention.
            With num_items_in_batch, the number of all ranks' labels in the step, labels are not counted.
        layout: how the sequence lies on the ranks. None: packed if position_ids restart, in the same places
            in each sample, and each rank then has a token; else zigzag if keys are gathered or go round a
            ring; else even.
        group: the ranks that share the sequence: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or
            None for the layout's, or the current topology's sequence group (WORLD if there is none).
        method: as in `spar.attention`.
        scan: what ranks exchange for recurrences: linear attention and state spaces. "heads": tokens for
            heads; "state": states, whose size does not depend on the length; "bytes": states, if they are
            less than half of the bytes. None: "bytes" if the ranks are on several hosts; else "heads" where
            each rank has a head, and "state" where there are fewer.
        token_group: the ranks over which labels are counted, a group as above: the data-parallel ranks, which
            have other batches; or all ranks, with those of `group`. None if `group` spans all ranks.
        check: whether to compare the batch over the group by a hash, and the states of torch's generator if
            the model has dropout. The hash copies the batch to the CPU.
        whole: patterns (fnmatch) of the paths of modules, as of `named_modules()` of the transformers model.
            Each rank runs these on the whole sequence, and keeps its own part of their outputs: the way out
            for layers that mix tokens as spar does not know. Exact, but no faster than one process. The next
            call replaces it.

    Returns:
        A dict of this rank's shards, position_ids of the whole sequence, masks over the whole sequence as
        `spar.Spans`, shifted labels, num_items_in_batch, `layout` and `method`. use_cache is False. Where a
        head has values of a whole sequence, the whole batch, with these in `inside`.

    Raises:
        ValueError: the model, the batch or the layout cannot be sharded.
        TypeError: an argument is of another type.
        MismatchError: ranks of the group have other batches, or the same random numbers. Every rank raises.
    """
    sequence_group = layout.group if group is None and isinstance(layout, SequenceLayout) else group
    real = process_group(sequence_group, "transformers.shard")
    sharding = Sharding(stock(model), real, token_group)
    refuse_to_generate()
    with sharding.reported():
        return sharding.run(batch, layout, method, scan, check, whole)


def total_loss(loss: torch.Tensor, *, group: Group = None, token_group: Group = None) -> torch.Tensor:
    """Sum the ranks' losses: the loss of one process, equal on all ranks. It is for logs, without gradients.

    Collective over `group`, and over `token_group`. If the batches of a step had num_items_in_batch, the
    values of its micro-batches sum to the loss of the step.

    Args:
        loss: that of `model(**shard(...))`, before it is multiplied for DDP or FSDP.
        group, token_group: those of `shard`. token_group is None if `group` spans all ranks.

    Returns:
        A 0-dim tensor of the loss's dtype. The sum runs in float64, in the ranks' order.

    Raises:
        ValueError: the loss is not a 0-dim float tensor, or the groups do not fit each other.
        MismatchError: another rank failed.
    """
    sharding = Sharding(None, process_group(group, _TOTAL), token_group, _TOTAL)
    with sharding.reported():
        return sharding.total(loss)
