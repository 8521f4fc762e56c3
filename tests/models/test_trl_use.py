# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers with sequence groups in use: work that is shared, seeds, references, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers import llms, trainers, trl_runs
from helpers.trainers import Run
from helpers.trl_runs import Case, saved
from test_trainer import Group, four as four, two as two
from test_trainer_use import FSDP2, installed, sharding_on_cpus, stock
from test_trl import (
    CASES,
    GRPO,
    LEAST,
    PRELOAD as PRELOAD,
    SHORT,
    TOLERANCE,
    grpo,
    pairs,
    run_ranks,
    varied,
)

import spar.integrations.trainer
from spar._model.model import states_of
from spar.integrations import _trl, _trl_tree
from spar.integrations._trainer import Sequences

# ---- what each rank computes ----


def shares(trainer: Any) -> list[Any]:
    report = trainer.sequences.report
    outside = [str(each) for each in report.functions if "ChunkedLogProb" in str(each)]
    return [report.share_of_model < 0.6, outside]


@pytest.mark.parametrize("name", ["SFT packed", "DPO"])
def test_ranks_share_the_head(two: Ranks, name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    for found in two(2, run_ranks, tmp_path, CASES[name] | {"then": shares}, 2):
        assert found.found == [True, []]


# ---- references that are computed before training ----


def on_disk(folder: Path, kind: str, world: int) -> None:
    """Write datasets, beside which TRL writes its reference's log-probabilities."""
    make = pairs if kind == "DPO" else trl_runs.judged
    for name, count, seed in (("train", 12, 0), ("evaluated", 4, 50)):
        make(count, seed).save_to_disk(folder / f"{kind} {world} {name}")


def precomputed(folder: Path, kind: str, world: int) -> Run:
    import datasets

    def load(count: int, seed: int) -> Any:
        return datasets.load_from_disk(str(folder / f"{kind} {world} {'evaluated' if seed else 'train'}"))

    options = {"precompute_ref_log_probs": True}
    return trl_runs.run(folder, {"kind": kind, "data": load, "arguments": options})


def precomputed_on_ranks(
    rank: int, world: int, group: Group, folder: Path, kind: str
) -> tuple[Run, list[bool]]:
    """Return a run, and whether each model was sharded that computed log-probabilities of the reference."""
    import trl

    trainer, sharded = getattr(trl, f"{kind}Trainer"), []
    own = trainer.compute_ref_log_probs

    def watched(self: Any, model: Any, batch: Any) -> Any:
        sharded.append(bool(states_of(model)))
        return own(self, model, batch)

    with installed(rank, world, 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "compute_ref_log_probs", watched)
        return precomputed(folder, kind, world), sharded


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_precomputed_references(two: Ranks, kind: str, tmp_path: Path) -> None:
    for world in (1, 2):
        on_disk(tmp_path, kind, world)
    expected = precomputed(tmp_path, kind, 1)
    for found, sharded in two(2, precomputed_on_ranks, tmp_path, kind):
        assert sharded and all(sharded)
        trainers.check_same(found, expected, TOLERANCE, least=LEAST)


# ---- sharded parameters ----


def sharded_on_ranks(
    rank: int, world: int, group: Group, folder: Path, case: Case, options: dict[str, Any]
) -> Run:
    with installed(rank, world, 2, **options), sharding_on_cpus():
        return trl_runs.run(folder, case | {"arguments": case["arguments"] | FSDP2})


@pytest.mark.parametrize(
    ("name", "options"), [("SFT packed", {}), ("GRPO", {}), ("GRPO", {"prefix_tree": True})]
)
def test_parameters_that_fsdp2_shards(two: Ranks, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = trl_runs.run(tmp_path, CASES[name])
    for found in two(2, sharded_on_ranks, tmp_path, CASES[name], options):
        trainers.check_same(found, expected, TOLERANCE, least=LEAST)


# ---- calls of a model over prefix trees ----


def call(mask: str, *rows: list[int], keep: int = 3) -> dict[str, Any]:
    """Return what TRL passes to a model. mask: of the tokens, in rows; keep: how many are completions'."""
    ids, is_token = torch.tensor(rows), torch.tensor([[int(x) for x in row] for row in mask.split()])
    labels = ids.masked_fill(is_token == 0, -100)
    labels[:, :-keep] = -100
    return {"input_ids": ids, "attention_mask": is_token, "labels": labels, "fused_lm_head": True}


CALLS = {
    "padded": (call("01111 11110 11111", [0, 5, 6, 7, 8], [9, 5, 6, 7, 0], [9, 5, 6, 8, 8]), True),
    "equal samples": (call("11111 11111", [9, 5, 6, 7, 8], [9, 5, 6, 7, 8]), True),
    "a completion that begins as a prompt goes on": (
        call("01111 11111", [0, 9, 5, 6, 7], [9, 5, 6, 7, 8]),
        True,
    ),
    "a truncated completion that does not count": (
        call("11000 11111", [9, 5, 6, 7, 8], [9, 5, 6, 7, 8]),
        True,
    ),
    "no label": (call("11000 11000", [9, 5, 6, 7, 8], [9, 5, 6, 7, 8]), True),
    "fewer tokens than ranks": (call("01000 01000", [0, 5, 6, 7, 8], [0, 5, 6, 7, 8]), False),
    "no prompt": (call("00111 11111", [0, 0, 6, 7, 8], [9, 5, 6, 7, 8]), False),
}


def calls_on_ranks(rank: int, world: int, group: Group) -> None:
    from trl.trainer import utils

    model, one = (llms.seeded(llms.maker("llama")) for _ in range(2))
    for each in (model, one):
        utils.add_fused_lm_head(each, temperature=0.7, outputs=("log_probs", "entropy"))
    sequences = Sequences(2, {})
    sequences.begin(torch.device("cpu"))
    sequences.parallelize(model)
    trees: list[bool] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: trees.append(isinstance(kwargs["attention_mask"], spar.Spans)),
        with_kwargs=True,
    )
    for name, (given, has_tree) in CALLS.items():
        expected = one(**given)
        for on_gpus in (False, True):  # where TRL selects the tokens that have a label first
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(utils, "_use_triton", lambda device, found=on_gpus: found)
                found = _trl_tree.over_tree(model, sequences, **given)
            assert trees.pop() == has_tree, name
            for kind in ("log_probs", "entropy"):
                torch.testing.assert_close(getattr(found, kind), expected[kind], rtol=1e-5, atol=1e-5)


def test_calls_over_trees(two: Ranks) -> None:
    two(2, calls_on_ranks)


# ---- seeds, and a mixin in place of install ----


def mixed_on_ranks(rank: int, world: int, group: Group, folder: Path) -> tuple[Run, list[int]]:
    """Return a run of a class that derives from the mixin, and the numbers that are drawn by each seed."""
    import trl
    from accelerate.utils import set_seed

    trainers.as_launched(rank, world)
    base = trl.GRPOTrainer
    kind = type("Mixed", (spar.integrations.trainer.SequenceParallel, base), {})
    trl.GRPOTrainer = lambda *args, **kwargs: kind(*args, sequence_parallel_size=2, **kwargs)
    try:
        found = trl_runs.run(folder, grpo())
    finally:
        trl.GRPOTrainer = base
    drawn = []
    for size in (1, 2):
        with installed(rank, world, size):
            set_seed(5, device_specific=True)
        drawn.append(int(torch.randint(10**9, ())))
    return found, drawn


def test_mixin_and_seeds(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    saved(tmp_path)
    expected = two(2, run_ranks, tmp_path, grpo(), 1)
    found = four(4, mixed_on_ranks, tmp_path)
    for rank, (run, _) in enumerate(found):
        trainers.check_same(run, expected[rank // 2], TOLERANCE, least=LEAST)
    by_rank, by_group = zip(*[drawn for _, drawn in found], strict=True)
    assert len(set(by_rank)) == 4
    assert by_group == (by_rank[0], by_rank[0], by_rank[1], by_rank[1])


# ---- what is refused ----


REFUSED: dict[str, Case] = {
    "use_vllm is True; with sequence parallelism expected False": {"use_vllm": True},
    "use_transformers_continuous_batching is True": {"use_transformers_continuous_batching": True},
    r"generation x 1 sequence groups is 8; must be divisible by the number of generations, 16": {
        "num_generations": 16,
        "eval_strategy": "no",
    },
    "per_device_eval_batch_size x 1 sequence groups is 4; must be divisible by .* 8": {
        "num_generations_eval": 8
    },
}


def no_rollout(prompts: Any, trainer: Any) -> Any:
    raise AssertionError("it was called")


def refuse_on_ranks(rank: int, world: int, group: Group, folder: Path) -> None:
    import importlib.metadata

    from trl.experimental.cpo import CPOConfig, CPOTrainer

    def refused(message: str, case: Case, **options: Any) -> None:
        error: Any = ImportError if "trl 1" in message else ValueError
        with installed(rank, world, 2, **options), pytest.raises(error, match=message):
            trl_runs.run(folder, case)

    for message, changes in REFUSED.items():
        refused(message, GRPO | {"arguments": SHORT | changes})
    refused("rollout_func is given", grpo(trainer=with_rollout))
    refused("check is True; .* expected False for a trainer that generates", grpo(), check=True)
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.metadata, "version", lambda name: "1.17.0" if name == "trl" else version(name)
        )
        refused(r"trl 1.17.0 is installed; expected 1.16, with", CASES["SFT"])
    with (
        installed(rank, world, 2),
        pytest.raises(ValueError, match="CPOTrainer of TRL was not tested; expected SFTTrainer, Rew"),
    ):
        options = CPOConfig(str(folder / "out"), **trl_runs.EXACT)
        CPOTrainer(saved(folder), options, train_dataset=pairs(4, 0), processing_class=trl_runs.tokenizer())


def with_rollout(folder: Path) -> Case:
    return varied(folder) | {"rollout_func": no_rollout}


def test_refused(two: Ranks, tmp_path: Path) -> None:
    saved(tmp_path)
    two(2, refuse_on_ranks, tmp_path)


def tuned_prompts(folder: Path) -> Case:
    from peft import PromptTuningConfig

    return varied(folder) | {"peft_config": PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)}


def experts(folder: Path) -> Any:
    return saved(folder, "qwen3 moe")


def refuse_trees_on_ranks(rank: int, world: int, group: Group, folder: Path) -> None:
    import trl
    from transformers import Trainer

    class Own(trl.GRPOTrainer):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it was called")

    single = grpo(num_generations=2, eval_strategy="no") | {"size": 1}
    refused = {
        "prefix_tree is True for SFTTrainer; expected False, or GRPOTrainer or RLOOTrainer": CASES["SFT"],
        "per_device_train_batch_size is 1; with prefix_tree=True expected 2 or more": single,
        "that of routers, .* expected router_aux_loss_coef=0": grpo() | {"model": experts},
        "peft_config is a PromptTuningConfig": grpo(trainer=tuned_prompts),
    }
    with installed(rank, world, 2, prefix_tree=True):
        for message, case in refused.items():
            with pytest.raises(ValueError, match=message):
                trl_runs.run(folder, case)
        with pytest.raises(ValueError, match="prefix_tree is True for Trainer; expected False"):
            stock(folder, Trainer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trl, "GRPOTrainer", Own)
            with pytest.raises(ValueError, match="Own has a _get_per_token_logps_and_entropies of its own"):
                trl_runs.run(folder, grpo())


def test_refused_trees(two: Ranks, tmp_path: Path) -> None:
    for name in ("llama", "qwen3 moe"):
        saved(tmp_path, name)
    two(2, refuse_trees_on_ranks, tmp_path)
    with pytest.raises(ValueError, match="prefix_tree is True, and sequence_parallel_size is 1"):
        spar.integrations.trainer.install(1, prefix_tree=True)
    given = CALLS["padded"][0] | {"pixel_values": None, "image_sizes": None}
    with pytest.raises(ValueError, match="the samples have pixel_values, image_sizes; with prefix_tree=True"):
        _trl_tree.over_tree(None, Sequences(2, {}), **given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tools", [no_rollout], "tools are given; .* expected none"),
        ("environment_factories", {None: no_rollout}, "environment_factory is given; .* expected None"),
    ],
)
def test_refused_tools_and_environments(name: str, value: Any, message: str) -> None:
    """Of a stand-in: TRL takes them only with a tokenizer of a chat that calls tools."""
    arguments = SimpleNamespace(use_vllm=False, use_transformers_continuous_batching=False)
    with pytest.raises(ValueError, match=message):
        _trl._check_generation(SimpleNamespace(args=arguments, **{name: value}), False)
