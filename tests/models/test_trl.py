# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers with sequence groups beside the same without: SFT, preferences, rewards, GRPO and RLOO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers import llms, trainers, trl_runs
from helpers.trainers import Run
from helpers.trl_runs import Case, judged, rows, saved, talks
from test_trainer import Group, four as four, two as two

import spar.data
import spar.integrations.trainer
from spar.integrations import _trl_tree

PRELOAD = [*llms.PRELOAD, "transformers.trainer", "peft", "trl.trainer.grpo_trainer"]
PRELOAD += [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "reward", "rloo")]
TOLERANCE, LEAST = 2e-5, 0.05  # rewards and losses are differences of larger numbers


def texts(count: int, seed: int) -> Any:
    return rows(count, seed, text=24)


def completions(count: int, seed: int) -> Any:
    return rows(count, seed, prompt=12, completion=16)


def pairs(count: int, seed: int) -> Any:
    return rows(count, seed, prompt=12, chosen=16, rejected=16)


def prompts(count: int, seed: int) -> Any:
    return rows(count, seed, least=12, prompt=24)  # more tokens than a batch has samples


def adapted(folder: Path) -> Case:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)}


def reference(folder: Path) -> Case:
    torch.manual_seed(7)
    return {"ref_model": llms.maker("llama", initializer_range=0.1)()}


def scoring(folder: Path) -> Any:
    name = "LlamaForSequenceClassification"
    return llms.seeded(llms.maker(name, initializer_range=0.1, id2label={0: "score"}))


def variety(completions: Any, log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
    """Reward completions of many characters, and log a column and a number."""
    log_extra("last", [each[-1:] for each in completions])
    log_metric("longest", float(max(map(len, completions))))
    return [float(len(set(each))) for each in completions]


def of_this_rank(completions: Any, **columns: Any) -> list[float]:
    """Return other rewards on each rank of a sequence group; those of the first count."""
    group = int(os.environ.get("RANK", 0)) % 2
    return [float(len(set(each))) + group * (i % 3) for i, each in enumerate(completions)]


def varied(folder: Path) -> Case:
    return {"reward_funcs": variety}


def varied_and_adapted(folder: Path) -> Case:
    return varied(folder) | adapted(folder)


def judged_by_a_model(folder: Path) -> Case:
    tokenizer = trl_runs.tokenizer()
    given = {"reward_funcs": [scoring(folder), of_this_rank], "reward_processing_classes": [tokenizer, None]}
    given["reward_funcs"][0].config._name_or_path = "scoring"
    return given


def generated(trainer: Any) -> list[Any]:
    names = ("prompt", "completion", "advantages", "extra", "rewards")
    logs = {name: trainer._logs[name] for name in names}
    tables = {name: {key: list(x) for key, x in logs.pop(name).items()} for name in ("extra", "rewards")}
    return [{name: list(x) for name, x in logs.items()}, tables, trainer.args.generation_batch_size]


SHORT = {"num_generations": 4, "max_completion_length": 8}
GRPO: Case = {"kind": "GRPO", "data": prompts, "size": 4, "trainer": varied, "then": generated}


def grpo(kind: str = "GRPO", trainer: Any = varied, **changes: Any) -> Case:
    return GRPO | {"kind": kind, "trainer": trainer, "arguments": SHORT | changes}


def again(kind: str = "GRPO", **changes: Any) -> Case:
    """Return a case whose policy differs from that which generated: its ratios are not 1."""
    steps = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4, "eval_strategy": "no"}
    return grpo(kind, **steps, **changes)


CASES: dict[str, Case] = {
    "SFT": {"kind": "SFT", "data": texts, "evaluated": 5},
    "SFT packed": {"kind": "SFT", "data": texts, "arguments": {"packing": True, "max_length": 48}},
    "SFT padding-free": {
        "kind": "SFT",
        "data": texts,
        "arguments": {"padding_free": True, "max_length": None},
    },
    "SFT completions, DFT": {"kind": "SFT", "data": completions, "arguments": {"loss_type": "dft"}},
    "SFT assistant's turns, LoRA": {
        "kind": "SFT",
        "data": talks,
        "trainer": adapted,
        "arguments": {"assistant_only_loss": True},
    },
    "SFT label smoothing": {"kind": "SFT", "data": texts, "arguments": {"label_smoothing_factor": 0.1}},
    "DPO": {"kind": "DPO", "data": pairs},
    "DPO with a reference": {"kind": "DPO", "data": pairs, "trainer": reference},
    "DPO LoRA": {
        "kind": "DPO",
        "data": pairs,
        "trainer": adapted,
        "arguments": {"loss_type": ["ipo", "sft"]},
    },
    "KTO": {"kind": "KTO", "data": judged},
    "Reward": {"kind": "Reward", "data": pairs, "model": scoring},
    "GRPO": grpo(beta=0.1, log_completions=True),
    "GRPO by a reward model": grpo(
        trainer=judged_by_a_model, loss_type="grpo", scale_rewards="batch", mask_truncated_completions=True
    ),
    "GRPO again, bnpo": again(loss_type="bnpo", beta=0.1, top_entropy_quantile=0.5),
    "GRPO again, dr_grpo": again(
        loss_type="dr_grpo", importance_sampling_level="sequence", entropy_coef=0.01
    ),
    "GRPO again, cispo": again(loss_type="cispo", use_adaptive_entropy=True, entropy_target=3.0),
    "GRPO LoRA": grpo(trainer=varied_and_adapted, beta=0.1, temperature=0.7),
    "RLOO": grpo("RLOO"),
    "RLOO again": again("RLOO"),
}


def run_ranks(rank: int, world: int, group: Group, folder: Path, case: Case, size: int) -> Run:
    trainers.as_launched(rank, world)
    if size == 1:
        return trl_runs.run(folder, case)
    spar.integrations.trainer.install(size)
    try:
        return trl_runs.run(folder, case)
    finally:
        spar.integrations.trainer.uninstall()


@pytest.mark.parametrize("name", CASES)
def test_sequence_groups_train_as_one_process(two: Ranks, name: str, tmp_path: Path) -> None:
    expected = trl_runs.run(tmp_path, CASES[name])
    for found in two(2, run_ranks, tmp_path, CASES[name], 2):
        trainers.check_same(found, expected, TOLERANCE, least=LEAST)


def spread() -> dict[str, Case]:
    """Return cases for several sequence groups: the generations of a prompt may lie in two of them."""
    names = ("SFT", "SFT packed", "DPO", "KTO", "Reward", "GRPO", "GRPO again, bnpo", "RLOO")
    return {name: CASES[name] | {"size": min(CASES[name].get("size", 2), 2)} for name in names}


@pytest.mark.parametrize("name", spread())
def test_data_parallel_groups_train_as_ranks(two: Ranks, four: Ranks, name: str, tmp_path: Path) -> None:
    saved(tmp_path)  # not by two ranks at once
    expected = two(2, run_ranks, tmp_path, spread()[name], 1)
    for rank, found in enumerate(four(4, run_ranks, tmp_path, spread()[name], 2)):
        trainers.check_same(found, expected[rank // 2], TOLERANCE, least=LEAST)


# ---- over prefix trees ----

TREES = ("GRPO", "GRPO LoRA", "RLOO again")
Sizes = list[tuple[int, int]]


def run_over_trees(rank: int, world: int, group: Group, folder: Path, case: Case) -> tuple[Run, Sizes]:
    """Return a run, and for each tree the numbers of its samples' tokens and of its own."""
    sizes = []

    def watched(*args: Any, **kwargs: Any) -> spar.data.PrefixTree:
        samples = spar.data.PrefixTree(*args, **kwargs)
        sizes.append((samples.layouts[0].total, samples.trees[0].layout.total))
        return samples

    trainers.as_launched(rank, world)
    spar.integrations.trainer.install(2, prefix_tree=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_trl_tree, "PrefixTree", watched)
            return trl_runs.run(folder, case), sizes
    finally:
        spar.integrations.trainer.uninstall()


@pytest.mark.parametrize("name", TREES)
def test_prefix_trees_train_as_one_process(two: Ranks, name: str, tmp_path: Path) -> None:
    expected = trl_runs.run(tmp_path, CASES[name])
    for found, sizes in two(2, run_over_trees, tmp_path, CASES[name]):
        trainers.check_same(found, expected, TOLERANCE, least=LEAST)
        tokens, computed = map(sum, zip(*sizes, strict=True))
        assert computed < 0.9 * tokens and len(sizes) >= 8


def test_prefix_trees_of_data_parallel_groups(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    saved(tmp_path)
    case = CASES["GRPO again, bnpo"]
    expected = two(2, run_ranks, tmp_path, case, 1)
    for rank, (found, _) in enumerate(four(4, run_over_trees, tmp_path, case)):
        trainers.check_same(found, expected[rank // 2], TOLERANCE, least=LEAST)
