# SPDX-License-Identifier: Apache-2.0
"""The examples with transformers run, and end by saying what they proved."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

import pytest
from helpers.launched import launch
from helpers.llms import PRELOAD as _PRELOAD

PRELOAD = [*_PRELOAD, "transformers.models.qwen3.modeling_qwen3", "torch.distributed.fsdp"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(folder: Path, name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    with (folder / f"printed {os.environ['RANK']}").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "arguments", "proved"),
    [
        ("transformers_train.py", [], "proved: a stock Qwen3ForCausalLM learns the same over 4 ranks"),
        ("transformers_train.py", ["--dp", "2", "--fsdp", "--steps", "6"], "dp 2 x cp 2, FSDP2"),
        ("vision_language.py", ["--steps", "6"], "proved: a stock Qwen3-VL learns the same over 4 ranks"),
        ("packed.py", [], "packed documents as one process does one by one"),
        ("rl.py", ["--dp", "2", "--fsdp"], "proved: GRPO learns the same over 4 ranks"),
    ],
)
def test_example_proves(name: str, arguments: list[str], proved: str, tmp_path: Path) -> None:
    launch(run_example, 4, tmp_path, name, arguments)
    assert proved in (tmp_path / "printed 0").read_text()
    assert not (tmp_path / "printed 1").read_text()
