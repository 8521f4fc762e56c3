# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with sequence groups beside the same Trainer in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
Result = dict[str, Any]
RANKS = 4
WORDS = ["manual", "itself", "bf16", "again"]  # each on two sequence groups
ONE = ["one", "one-2", *(f"one-{word}" for word in WORDS if word != "again")]
CASES = [*ONE, "sp4", "sp2", *(f"sp2-{word}" for word in WORDS), "sp2-fsdp", "sp2-workers"]


@pytest.fixture(scope="module")
def results(launch: Callable[..., list[Any]]) -> list[dict[str, Result]]:
    """Return what each of 4 ranks found, by case."""
    return launch("lightning", " ".join([f"{RANKS}", *CASES, "fabric", "refusals"]))[0]


def close(found: Any, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def mean_of_groups(results: list[dict[str, Result]], case: str, name: str) -> torch.Tensor:
    return torch.tensor([each[case][name] for each in results], dtype=torch.float64).mean(0)


def check_training(results: list[dict[str, Result]], case: str, one: str, tolerance: float = 2e-6) -> None:
    """Compare losses, norms, metrics and weights with those of one process on the same samples."""
    expected = results[0][one]
    losses = torch.tensor(expected["losses"], dtype=torch.float64)
    close(mean_of_groups(results, case, "losses"), losses, tolerance)
    for each in results:
        found = each[case]
        close(found["norms"], expected["norms"], 5 * tolerance)
        # The worst of larger batches is another.
        metrics = {
            name: x for name, x in expected["metrics"].items() if name not in ("loss_step", "val_worst")
        }
        close({name: found["metrics"][name] for name in metrics}, metrics, tolerance)
        assert found["rate"] == expected["rate"] and found["is_plain"]
        assert all(0.1 < share < 0.7 for share in found["shares"].values()), found["shares"]
        close(found["weights"], expected["weights"], tolerance)


@pytest.mark.parametrize(("case", "one"), [("sp4", "one-2"), ("sp2", "one"), ("sp2-fsdp", "one")])
def test_fit_validate_test_predict_and_resume_as_one_process(
    results: list[dict[str, Result]], case: str, one: str
) -> None:
    check_training(results, case, one)
    expected = results[0][one]
    close(mean_of_groups(results, case, "resumed"), torch.tensor(expected["resumed"], dtype=torch.float64))
    predicted: dict[int, torch.Tensor] = {}
    for rank, each in enumerate(results):
        found = each[case]
        for name in ("val_loss", "val_tokens"):
            assert abs(found["validated"][0][name] - expected["validated"][0][name]) < 2e-6
        assert abs(found["tested"][0]["test_loss"] - expected["tested"][0]["test_loss"]) < 2e-6
        assert found["tested"][0]["test_gathered"] == expected["tested"][0]["test_gathered"]
        own = {int(i): y for ids, out in found["predicted"] for i, y in zip(ids, out, strict=True)}
        # Ranks of a sequence group have the same samples, other groups others.
        assert not rank % int(case[2]) or own.keys() <= predicted.keys()
        assert rank % int(case[2]) or not own.keys() & predicted.keys()
        predicted |= own
    whole = {int(i): y for ids, out in expected["predicted"] for i, y in zip(ids, out, strict=True)}
    close(dict(sorted(predicted.items())), dict(sorted(whole.items())), 5e-6)


def test_sequence_groups_have_each_sample_once_in_an_epoch(results: list[dict[str, Result]]) -> None:
    seen = [each["sp2"]["seen"][:7] for each in results]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(14))


@pytest.mark.parametrize("word", WORDS)
def test_other_modules_and_options_as_one_process(results: list[dict[str, Result]], word: str) -> None:
    one = "one" if word == "again" else f"one-{word}"
    check_training(results, f"sp2-{word}", one, 3e-3 if word == "bf16" else 2e-6)


def test_workers_augment_alike_in_a_sequence_group(results: list[dict[str, Result]]) -> None:
    losses = [each["sp2-workers"]["losses"] for each in results]
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_fabric_trains_a_parallelized_model(results: list[dict[str, Result]]) -> None:
    assert all(max(map(abs, each["fabric"].values())) < 1e-6 for each in results)


def test_mistakes_are_errors_that_say_what_to_pass(results: list[dict[str, Result]]) -> None:
    expected = {
        "size": "sequence_parallel_size is 3; must divide the number of ranks, 4",
        "no int": "sequence_parallel_size is '2'; expected an int from 1",
        "models": "models has 'encoder2'; expected names of modules of Module, such as model, tokens",
        "options": "outputs is 'parts'; expected none, as a trainer's batches and outputs are whole",
        "base": "Single derives from other strategies; expected one of DDPStrategy, ModelParallelStrategy",
        "tensor parallel": "tensor_parallel_size is 2; expected 1, and data_parallel_size=4: all ranks",
        "reduction": "reduce_op is 'product'; expected mean, sum, min or max, or a group",
    }
    expected = {name: f"integrations.lightning: {text}" for name, text in expected.items()}
    assert all(each["refusals"] == expected for each in results)


FORMER_NAME = """
import sys
import pytorch_lightning as pl, torch
import spar.integrations.lightning as plug

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.model = torch.compile(torch.nn.TransformerEncoder(layer, 1), backend="eager")

    def predict_step(self, batch, index):
        assert vars(self.model._orig_mod).get("forward") is not None
        return self.model(batch)

strategy = plug.SequenceParallelStrategy(1)
assert isinstance(strategy, pl.strategies.DDPStrategy)
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
trainer, module = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **quiet), Module()
assert trainer.predict(module, torch.ones(1, 1, 4, 8))[0].shape == (1, 4, 8)
assert [*strategy.reports] == ["model"] and "forward" not in vars(module.model._orig_mod)
assert "lightning.pytorch" not in sys.modules
"""


def test_former_name_of_the_package_and_a_compiled_model(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "build/trainers/lightning"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORMER_NAME]
    done = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
