# SPDX-License-Identifier: Apache-2.0
"""Models under spar.parallelize with masks of many kinds, and what spar.attention gets of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spar
from helpers.llms import left_padded, packed, packed_rows, whole
from spar._model.rules import attention as rules
from spar.integrations._transformers import mask_makers

Group = dist.ProcessGroup
LIMIT = 1e-6  # in float64: a model computes its rotary positions, norms and loss in float32
TOTAL = 37
WINDOWS = {"sliding_window": 9}


def right_padded() -> dict[str, Tensor]:
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -13:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def holes() -> dict[str, Tensor]:
    """Padding in the middle of rows, as of tool calls that were cut out."""
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:9] = mask[0, 20] = mask[1, 30:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": whole,
    "left": left_padded,
    "right": right_padded,
    "holes": holes,
    "packed": lambda: packed(5, 20, 12),
    "packed rows": packed_rows,
}
TEXTS: dict[str, dict[str, Any]] = {
    "mistral": WINDOWS,
    "qwen3": {},
    "Gemma3": WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    "Llama4": {"attention_chunk_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4},
    "DeepseekV3": {"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 12}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 8, "first_k_dense_replace": 2},
}


class Seen:
    """What spar.attention got as masks, and by which method."""

    def __init__(self) -> None:
        self.masks: list[Any] = []
        self.methods: set[str | None] = set()


@contextmanager
def small(least: int = 0) -> Iterator[Seen]:
    """Make spans of masks from so many bytes on."""
    seen, own = Seen(), spar.attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        seen.masks.append(kwargs["mask"])
        seen.methods.add(kwargs.get("method"))
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "attention", attention)
        patch.setattr(mask_makers, "LEAST_BYTES", least)
        yield seen


def pair(
    make: Callable[[], Any], group: Group, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    one = copy.deepcopy(model)
    spar.parallelize(model, group, **options)
    return model, one


def check_step(
    model: nn.Module,
    one: nn.Module,
    batch: dict[str, Any],
    group: Group,
    what: Any,
    limit: float = LIMIT,
    exact: nn.Module | None = None,
) -> None:
    """Compare the loss, the logits and all gradients with those of one process.

    exact: the model in a wider dtype, where the rounding of one process is beyond the limit by itself, as in
    sums that cancel.
    """
    for each in filter(None, (model, one, exact)):
        each.zero_grad()
    out, expected = model(**batch), one(**batch)
    out.loss.backward()
    expected.loss.backward()
    wider = {}
    if exact is not None:
        exact(**batch).loss.backward()
        wider = {name: parameter.grad for name, parameter in exact.named_parameters()}
    assert abs(out.loss - expected.loss) <= limit * expected.loss, what
    assert (out.logits - expected.logits).abs().max() <= limit * expected.logits.abs().max(), what
    for (name, parameter), own in zip(model.named_parameters(), one.parameters(), strict=True):
        if own.grad is None:
            continue
        found = torch.zeros_like(own) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(found, group=group)
        error = (found / group.size() - own.grad).abs().max()
        rounding = (own.grad - wider[name]).abs().max() if wider else 0.0
        assert error <= limit * own.grad.abs().max().clamp(min=1e-6) + rounding, (what, name, error)
