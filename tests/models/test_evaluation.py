# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/evaluation.md for transformers and diffusers, beside one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from conftest import TRANSPORTS, Ranks
from helpers.llms import PRELOAD as PRELOAD, left_padded, maker, recipe, seeded, whole
from test_diffusers_vae import wan
from torch import Tensor

import spar

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
Names = dict[str, Any]
PAGE = "evaluation.md"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """A world of two ranks: the page's blocks use WORLD, which is all of a pool."""
    ranks = Ranks(worlds=(2,))
    ranks.transport = TRANSPORTS[0]
    yield ranks
    ranks.stop()


def run(mark: str, names: Names) -> Names:
    names |= {"spar": spar, "torch": torch, "dist": dist}
    exec(compile(recipe(PAGE, mark), f"{PAGE}, {mark}", "exec"), names)
    return names


def check_metrics(rank: int, world: int, group: Group) -> None:
    for batch in (whole(), left_padded()):
        alone = seeded(maker("llama"), "sdpa").eval()
        with torch.no_grad():
            expected = alone(**batch)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        counted = labels != -100
        names = run(
            "total_loss(", {"model": seeded(maker("llama"), "spar"), "batch": batch, "cp": group, "dp": None}
        )
        torch.testing.assert_close(names["loss"], expected.loss)
        right = expected.logits.argmax(-1) == labels
        torch.testing.assert_close(names["accuracy"], right[counted].float().mean())
        torch.testing.assert_close(names["logits"][counted], expected.logits[counted], atol=1e-4, rtol=1e-4)


def test_loss_accuracy_and_logits_are_those_of_one_process(two: Ranks) -> None:
    two(2, check_metrics)


def check_generation(rank: int, world: int, group: Group) -> None:
    batch = left_padded()
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model = seeded(maker("llama", use_cache=True), "spar").eval()
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    names = run("model.generate(", {"model": model, "cp": group, "prompt": prompt, "step": 3})
    torch.manual_seed(3)
    expected = alone.generate(**prompt, max_new_tokens=20, do_sample=True)
    assert torch.equal(names["tokens"], expected)
    with pytest.raises(ValueError, match="For generate, and for whole sequences"):
        model.generate(prompt["input_ids"], max_new_tokens=2)
    part = spar.integrations.transformers.shard(model, prompt, group=group)
    with pytest.raises(ValueError, match=r"one rank's part of the sequence, .* expected the whole batch"):
        model.generate(**part, max_new_tokens=2)


def test_generation_between_steps_of_shard(two: Ranks) -> None:
    two(2, check_generation)


def check_saving(rank: int, world: int, group: Group, folder: Path) -> None:
    for number, attention in enumerate(("spar", "sdpa")):
        model = seeded(maker("llama"), attention)
        if attention == "sdpa":
            spar.parallelize(model, group)
        names = run("model.save_pretrained(", {"model": model, "folder": folder / str(number)})
        again = names["again"]
        assert again.config._attn_implementation == "sdpa"
        assert transformers.AutoConfig.from_pretrained(folder / str(number))._attn_implementation is None
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)
        if attention == "sdpa":
            with pytest.raises(TypeError, match="cannot pickle"):
                torch.save(model, os.devnull)
            spar.unparallelize(model)
        torch.save(model, os.devnull)


def test_saved_models_load_without_spar(two: Ranks, tmp_path: Path) -> None:
    two(2, check_saving, tmp_path)


def pipeline() -> Any:
    import diffusers

    torch.manual_seed(0)
    sizes: Names = {"num_attention_heads": 3, "attention_head_dim": 24, "num_layers": 2, "ffn_dim": 64}
    sizes |= {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "rope_max_seq_len": 32}
    transformer = diffusers.WanTransformer3DModel(**sizes)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.WanPipeline(None, None, wan().float(), scheduler, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ("prompt_embeds", "negative_prompt_embeds")
    return {name: torch.randn(1, 7, 16, generator=generator) for name in names}


def check_pipeline(rank: int, world: int, group: Group, folder: Path) -> None:
    inputs = prompts() | {"height": 48, "width": 64, "num_frames": 9, "num_inference_steps": 2}
    inputs |= {"output_type": "pt"}
    alone = pipeline()
    expected = alone(**inputs, generator=torch.Generator("cpu").manual_seed(0)).frames[0]
    names = run("pipe.transformer", {"pipe": pipeline(), "inputs": inputs, "group": group})
    torch.testing.assert_close(names["video"], expected, atol=1e-4, rtol=1e-4)
    if rank == 0:
        names["pipe"].save_pretrained(folder)
    dist.barrier()
    again = type(alone.transformer).from_pretrained(folder / "transformer")
    for name, value in alone.transformer.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_pipeline_returns_the_video_of_one_process(two: Ranks, tmp_path: Path) -> None:
    two(2, check_pipeline, tmp_path)


def check_noise(rank: int, world: int, group: Group) -> None:
    pipe = pipeline()
    spar.parallelize(pipe.transformer, group)
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="expected equal inputs on all ranks"):
        pipe(**prompts(), height=48, width=64, num_frames=9, num_inference_steps=1)


def test_pipeline_without_a_generator_is_an_error(two: Ranks) -> None:
    two(2, check_noise)
