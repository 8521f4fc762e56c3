# SPDX-License-Identifier: Apache-2.0
"""The examples with transformers and diffusers run, and end by saying what they proved."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

import pytest
from helpers import diffusion, llms
from helpers.launched import launch

PRELOAD = [*llms.PRELOAD, "transformers.models.qwen3.modeling_qwen3", "torch.distributed.fsdp"]
PRELOAD += [*diffusion.PRELOAD, "trl.trainer.grpo_trainer"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(folder: Path, name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    with (folder / f"printed {os.environ['RANK']}").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def check(folder: Path, world: int, name: str, arguments: list[str], *proved: str) -> None:
    launch(run_example, world, folder, name, arguments)
    printed = (folder / "printed 0").read_text()
    for each in proved:
        assert each in printed, printed
    assert not (folder / "printed 1").read_text()


@pytest.mark.parametrize(
    ("name", "arguments", "proved"),
    [
        ("transformers_train.py", [], "proved: a stock Qwen3ForCausalLM learns the same over 4 ranks"),
        ("transformers_train.py", ["--dp", "2", "--fsdp", "--steps", "6"], "dp 2 x cp 2, FSDP2"),
        ("vision_language.py", ["--steps", "6"], "proved: a stock Qwen3-VL learns the same over 4 ranks"),
        ("packed.py", [], "packed documents as one process does one by one"),
        ("rl.py", ["--dp", "2", "--fsdp"], "proved: GRPO learns the same over 4 ranks"),
        ("rl.py", ["--tree"], "4 ranks, which share prefix trees, as in one process"),
    ],
)
def test_example_proves(name: str, arguments: list[str], proved: str, tmp_path: Path) -> None:
    check(tmp_path, 4, name, arguments, proved)


def test_trainer_proves(tmp_path: Path) -> None:
    check(tmp_path, 2, "trainer.py", ["--packed"], "proved: Trainer learns the same over 2 ranks")


def test_graph_proves(tmp_path: Path) -> None:
    check(tmp_path, 2, "graph.py", ["--steps", "10"], "proved: a graph network learns the same forces over 2")


def test_grpo_proves(tmp_path: Path) -> None:
    check(tmp_path, 2, "grpo.py", ["--tree"], "the same over 2 ranks, over prefix trees, as in one process")


def test_diffusion_proves(tmp_path: Path) -> None:
    """On 2 ranks, which divide neither its 175 tokens nor its 3 heads, and half of the multiply-adds each."""
    proved = "Proved: 2 ranks train Wan, denoise a clip and differentiate"
    check(tmp_path, 2, "diffusion.py", [], proved, "HunyuanVideo: this rank does 5")
