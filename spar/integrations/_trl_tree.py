# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of TRL's trainers that generate, over the prefix tree of each batch."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .._attention.prefix_tree import PrefixTree
from .._group.log import log
from .._model.model import states_of
from ._refusals import refuse
from ._trainer import WHERE, Sequences

_METHOD = "_get_per_token_logps_and_entropies"
_IGNORED = -100


def use_trees(trainer: Any) -> None:
    """Let a trainer compute log-probabilities and entropies over prefix trees.

    Raises:
        ValueError: trees cannot give the trainer's loss, or have nothing to merge.
    """
    _check(trainer)
    own = getattr(trainer, _METHOD)

    @functools.wraps(own)
    def compute(model: Any, *args: Any, **kwargs: Any) -> Any:
        # TRL wraps a reference itself for FSDP2: it is not parallelized, and knows no trees.
        is_sharded = bool(states_of(model))
        called = functools.partial(over_tree, model, trainer.sequences) if is_sharded else model
        return own(called, *args, **kwargs)

    setattr(trainer, _METHOD, compute)


def _check(trainer: Any) -> None:
    config = trainer.model.config.get_text_config()
    has_router_loss = trainer.aux_loss_enabled or getattr(config, "output_router_logits", False)
    adapter = getattr(trainer.model, "active_peft_config", None)
    refused = (
        (
            trainer.args.per_device_train_batch_size == 1,
            "per_device_train_batch_size is 1",
            "2 or more: a tree merges the samples of a micro-batch",
        ),
        (
            has_router_loss,
            "the loss has that of routers, which would count a shared token once",
            "router_aux_loss_coef=0, and output_router_logits=False in the model's config",
        ),
        (
            getattr(adapter, "is_prompt_learning", False),
            f"peft_config is a {type(adapter).__name__}, which puts tokens before each sample",
            "another, such as LoraConfig",
        ),
        (
            getattr(type(trainer), _METHOD).__module__.partition(".")[0] != "trl",
            f"{type(trainer).__name__} has a {_METHOD} of its own",
            "that of TRL",
        ),
    )
    refuse(WHERE, refused, "prefix_tree=True")


def over_tree(
    model: Any,
    sequences: Sequences,
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    fused_lm_head: bool,
    **others: Any,
) -> Any:
    """Call a model as TRL does, for samples `[N, T]`, but over their tree.

    Returns:
        What TRL reads of the model's output: `log_probs` and `entropy`, `[N, T - 1]`, 0 where no label is.

    Raises:
        ValueError: the samples have more than tokens, such as images.
    """
    if others:
        raise ValueError(
            f"{WHERE}: the samples have {', '.join(others)}; with prefix_tree=True expected tokens alone, as "
            "those of a model without images"
        )
    layout = "even" if sequences.options.get("layout", "even") == "even" else "balanced"
    samples = PrefixTree(input_ids, sequences.mesh.get_group(1), mask=attention_mask, layout=layout)
    tree = samples.trees[0]
    is_token, is_label = attention_mask.cpu() != 0, labels.cpu() != _IGNORED
    is_without_prompt = is_label[:, 1:] & ~is_token[:, :-1]
    if tree.layout.total < sequences.size or is_without_prompt.any():
        # A rank would be without tokens, or a label without the token that predicts it: no tree.
        return model(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=fused_lm_head
        )
    log.debug("%s: %r", WHERE, tree)
    # The places of the tokens before those that count, sample by sample.
    before = torch.cat(tree.places).roll(1)[is_label[is_token]]
    own_labels = torch.full_like(tree.labels, _IGNORED)
    own_labels[0, before] = tree.labels[0, before]
    device = input_ids.device
    output = model(
        input_ids=tree.input_ids.to(device),
        position_ids=tree.position_ids.to(device),
        attention_mask=tree.spans(),
        shift_labels=own_labels.to(device),
        fused_lm_head=fused_lm_head,
    )
    is_counted, index = is_label.to(device), before.to(device)

    def of_samples(x: Tensor | None) -> Tensor | None:
        if x is None:  # TRL asks a reference for no entropy
            return None
        return x.new_zeros(is_counted.shape).masked_scatter(is_counted, x[0, index])[:, 1:]

    return SimpleNamespace(log_probs=of_samples(output.log_probs), entropy=of_samples(output.entropy))
