# SPDX-License-Identifier: Apache-2.0
"""Stock transformers of diffusers over a sharded sequence: outputs and gradients are those of one process.

Each model has 3 heads, 25 tokens of image and 7 of text, a batch of 2, as classifier-free guidance has, and
masks where it takes them.
"""

from __future__ import annotations

import pytest
import torch
from conftest import Ranks
from helpers.diffusion import (
    HEADS,
    MODELS,
    OTHERS,
    PRELOAD as PRELOAD,
    WIDTH,
    Group,
    check_exact,
    flux,
    flux_inputs,
    ltx,
    ltx_inputs,
    qwen_image,
    qwen_image_inputs,
    sd3,
    sd3_inputs,
    wan,
    wan_inputs,
)

pytestmark = pytest.mark.one_transport


def check_model(rank: int, world: int, group: Group, name: str) -> None:
    make, inputs = (MODELS | OTHERS)[name]
    report = check_exact(group, make(), inputs())
    if world > 1:  # HunyuanVideo also has blocks of its text alone
        assert rank > 0 or report.share < 1 / world + 0.2, report
        assert not any(each.in_block for each in report.functions), report


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_models_are_exact(ranks: Ranks, name: str, world: int) -> None:
    ranks(world, check_model, name)


def check_variants(rank: int, world: int, group: Group) -> None:
    per_token = wan_inputs() | {"timestep": torch.arange(50).reshape(2, 25) * 10}
    check_exact(group, wan(), per_token)  # Wan 2.2
    image = wan_inputs(text=512) | {
        "encoder_hidden_states_image": wan_inputs(text=3)["encoder_hidden_states"]
    }
    check_exact(group, wan(image_dim=8, added_kv_proj_dim=HEADS * WIDTH), image)  # Wan 2.1 with an image
    check_exact(group, sd3(dual_attention_layers=(0,), qk_norm="rms_norm"), sd3_inputs())  # SD 3.5
    guided = flux_inputs() | {"guidance": torch.tensor([1.0, 3.5])}
    check_exact(group, flux(guidance_embeds=True), guided)
    check_exact(group, qwen_image(), qwen_image_inputs(masked=False))
    fused = sd3()
    fused.fuse_qkv_projections()
    check_exact(group, fused, sd3_inputs())


def test_variants_are_exact(ranks: Ranks) -> None:
    ranks(2, check_variants)


def check_lengths(rank: int, world: int, group: Group) -> None:
    # rank 0 or all ranks hold as many tokens of the image as of the text, or as the whole text has
    for text in (1, 13, 24, 25, 26):
        check_exact(group, flux(), flux_inputs(text=text))
        check_exact(group, wan(), wan_inputs(text=text))
        if text > 1:
            check_exact(group, ltx(), ltx_inputs(text=text))
    check_exact(group, wan(), wan_inputs((1, 2, 4), text=1, batch=1))  # 2 tokens
    check_exact(group, sd3(), sd3_inputs(text=1))


@pytest.mark.parametrize("world", [2, 3])
def test_any_lengths_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_lengths)
