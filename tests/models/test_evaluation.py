# SPDX-License-Identifier: Apache-2.0
"""Blocks of evaluation.md, diffusers.md, dataloading.md and rl.md for stock models, beside one process."""

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
from conftest import Ranks, ranks_of_world
from helpers.llms import PRELOAD as PRELOAD, TOLERANCE, left_padded, maker, recipe, seeded, whole
from test_diffusers_vae import wan
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import spar

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
Names = dict[str, Any]
PAGE = "evaluation.md"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    yield from ranks_of_world(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    yield from ranks_of_world(4)


def run(page: str, mark: str, names: Names) -> Names:
    names |= {"spar": spar, "torch": torch, "dist": dist, "F": F}
    exec(compile(recipe(page, mark), f"{page}, {mark}", "exec"), names)
    return names


def check_metrics(rank: int, world: int, group: Group) -> None:
    alone = [dist.new_group([each]) for each in range(world)][rank]
    for batch in (whole(), left_padded()):
        one = seeded(maker("llama")).eval()
        with torch.no_grad():
            expected = one(**batch)
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        counted = labels != -100
        names: Names = {"model": seeded(maker("llama")), "batch": batch, "cp": group, "dp": alone}
        run(PAGE, 'outputs="parts")  # logits', names)
        torch.testing.assert_close(names["loss"], expected.loss.double(), atol=1e-6, rtol=1e-6)
        right = expected.logits.argmax(-1) == labels
        torch.testing.assert_close(names["accuracy"], right[counted].float().mean())
        torch.testing.assert_close(names["logits"][counted], expected.logits[counted], atol=1e-4, rtol=1e-4)


def test_loss_accuracy_and_logits_are_those_of_one_process(two: Ranks) -> None:
    two(2, check_metrics)


def check_generation(rank: int, world: int, group: Group) -> None:
    batch = left_padded()
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    model = seeded(maker("llama", use_cache=True)).eval()
    alone = copy.deepcopy(model)
    spar.parallelize(model, group, layout=lambda batch: laid_out(batch, group), outputs="parts")
    with pytest.raises(RuntimeError, match="a part of another view or layout"):
        model.generate(**prompt, max_new_tokens=3)
    names = run(PAGE, "model.generate(", {"model": model, "cp": group, "prompt": prompt, "step": 3})
    torch.manual_seed(3)
    expected = alone.generate(**prompt, max_new_tokens=20, do_sample=True)
    assert torch.equal(names["tokens"], expected)


def laid_out(batch: Names, group: Group) -> spar.SequenceLayout:
    return spar.SequenceLayout.zigzag(batch["input_ids"].size(1), group)


def test_generation_after_training_in_another_layout(two: Ranks) -> None:
    two(2, check_generation)


def check_saving(rank: int, world: int, group: Group, folder: Path) -> None:
    model = seeded(maker("llama"))
    spar.parallelize(model, group)
    again = run(PAGE, "model.save_pretrained(", {"model": model, "folder": folder})["again"]
    assert not [name for name in again.state_dict() if "spar" in name]
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
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
    names = run("diffusers.md", "frames[0]", {"pipe": pipeline(), "inputs": inputs, "group": group})
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


# ---- docs/rl.md ----


def check_log_probabilities(rank: int, world: int, group: Group) -> None:
    """Log-probabilities of packed samples, and gradients of a mean of them, are those of padded samples."""
    batch = left_padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    alone = seeded(maker("qwen3"))
    logits = alone(input_ids=ids, attention_mask=mask).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    kept = (mask[:, 1:] * mask[:, :-1]).bool()
    expected[kept].mean().backward()
    model = seeded(maker("qwen3", use_cache=True))
    names = run("rl.md", "lm_head", {"model": model, "cp": group, "input_ids": ids, "attention_mask": mask})
    logprobs, layout = names["logprobs"], names["layout"]
    loss = spar.masked_mean(logprobs, names["labels"] != -100, layout, averaged_by=group)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected[kept].mean().detach())
    unpacked = names["packed"].unpack(logprobs.detach(), shift=1)[:, 1:]
    torch.testing.assert_close(unpacked[kept], expected[kept].detach(), atol=1e-5, rtol=1e-5)
    check_averaged(model, alone, group)


def check_averaged(model: nn.Module, alone: nn.Module, group: Group) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        dist.all_reduce(p.grad, group=group)
        error = (p.grad / group.size() - q.grad).abs().max() / q.grad.abs().max()
        assert error < TOLERANCE, (name, error)


def test_log_probabilities_of_packed_samples(two: Ranks) -> None:
    two(2, check_log_probabilities)


# ---- docs/dataloading.md ----


def samples() -> list[Names]:
    """Return eight samples that begin with 1 to 8, some of them with few labels."""
    every = [torch.arange(37).add(i) % 50 + 1 for i in range(8)]
    ignored = [torch.arange(37) < 30 * (i % 3 == 0) for i in range(8)]
    return [
        {"input_ids": ids, "labels": ids.masked_fill(none, -100)}
        for ids, none in zip(every, ignored, strict=True)
    ]


def check_loading(rank: int, world: int, group: Group) -> None:
    """The parameters are those of one process that trains on the same samples in each step."""
    model, alone = seeded(maker("llama")), seeded(maker("llama"))
    names: Names = {each.__name__: each for each in (DataLoader, DistributedSampler, init_device_mesh)}
    names |= {"DistributedDataParallel": DistributedDataParallel, "dataset": samples(), "epochs": 2}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    run("dataloading.md", "DistributedSampler(", names)
    optimizer, steps = torch.optim.SGD(alone.parameters(), lr=0.1), 0
    for epoch in range(2):
        orders = []
        for half in range(2):
            sampler: Any = DistributedSampler(samples(), 2, half, seed=0)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for i in (0, 2):
            chosen = [samples()[i] for i in orders[0][i : i + 2] + orders[1][i : i + 2]]
            alone(**{key: torch.stack([each[key] for each in chosen]) for key in chosen[0]}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert names["step"] == steps == 4
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (p - q).abs().max() < TOLERANCE * q.abs().max(), name


def test_recipe_for_data_loading(four: Ranks) -> None:
    four(4, check_loading)
