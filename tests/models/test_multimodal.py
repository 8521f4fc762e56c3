# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with images or sound beside text, by spar.parallelize: text part and towers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.averages import gradients
from helpers.multimodal import MODELS, made
from torch import nn

import spar

PRELOAD = ["transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
LIMIT = 1e-6  # in float64: a model computes its rotary positions, norms and loss in float32


def check_gradients(model: nn.Module, whole: nn.Module, group: Group) -> None:
    found = gradients(model, group)
    for (name, own), mean in zip(whole.named_parameters(), found, strict=True):
        if own.grad is None:
            continue
        error = (mean - own.grad).abs().max()
        assert error <= LIMIT * own.grad.abs().max().clamp(min=1e-6), (name, error)


def check_models(rank: int, world: int, group: Group, checkpoints: bool) -> None:
    for name in MODELS:
        model, batch = made(name)
        whole = copy.deepcopy(model)
        if checkpoints:
            if not model.supports_gradient_checkpointing:
                continue
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            whole.train()
        report = spar.parallelize(model, group)
        out, expected = model(**batch), whole(**batch)
        assert abs(out.loss - expected.loss) <= LIMIT * expected.loss, name
        assert (out.logits - expected.logits).abs().max() <= LIMIT * expected.logits.abs().max(), name
        out.loss.backward()
        expected.loss.backward()
        check_gradients(model, whole, group)
        assert report.share < 1.25 / world, (name, str(report))  # of the tower's blocks, too
        assert not [each for each in report.functions if each.in_block], (name, str(report))


def test_models_are_exact(ranks: Ranks) -> None:
    ranks(3, check_models, False)


def test_gradient_checkpointing_is_exact(ranks: Ranks) -> None:
    ranks(2, check_models, True)


def check_video(rank: int, world: int, group: Group) -> None:
    """Run a video of 2 frames in Qwen3-VL."""
    model, batch = made("qwen3_vl")
    whole = copy.deepcopy(model)
    ids = batch["input_ids"].clone()
    ids[ids > 59] = 7
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(2 * 24, 3 * 2 * 16, generator=generator, dtype=torch.float64)
    for first in (5, 14):  # each frame's tokens lie behind its timestamp
        ids[0, first : first + 6] = 62
        ids[0, first - 1], ids[0, first + 6] = 61, 60
    inputs: dict[str, Any] = {
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[2, 4, 6]]),
        "mm_token_type_ids": 2 * (ids == 62).int(),
    }
    spar.parallelize(model, group)
    out, expected = model(**batch, **inputs), whole(**batch, **inputs)
    assert (out.logits - expected.logits).abs().max() <= LIMIT * expected.logits.abs().max()
    out.loss.backward()
    expected.loss.backward()
    check_gradients(model, whole, group)


def test_video_is_exact(ranks: Ranks) -> None:
    ranks(3, check_video)
