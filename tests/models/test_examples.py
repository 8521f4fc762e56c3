# SPDX-License-Identifier: Apache-2.0
"""The examples with transformers and diffusers run, and end by saying what they proved."""

from __future__ import annotations

import contextlib
import functools
import os
import re
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
        (
            "gpus.py",
            ["--dp", "2", "--check", "--dtype", "float32", "--steps", "1"],
            "2 dp x 2 cp on cpu; shm",
        ),
        ("rl.py", ["--dp", "2", "--fsdp", "--samples", "4"], "proved: GRPO learns the same over 4 ranks"),
        ("rl.py", ["--tree", "--samples", "4"], "4 ranks, which share prefix trees, as in one process"),
    ],
)
def test_example_proves(name: str, arguments: list[str], proved: str, tmp_path: Path) -> None:
    check(tmp_path, 4, name, arguments, proved)


def apply(hunk: str, script: str) -> str:
    """Return the script with a hunk of a diff applied."""
    lines = hunk.splitlines(keepends=True)
    old, new = ("".join([line[1:] for line in lines if line[0] in kinds]) for kinds in (" -", " +"))
    assert script.count(old) == 1, hunk
    return script.replace(old, new)


def losses_of(folder: Path, world: int, script: str) -> list[float]:
    program = folder / f"{world}.py"
    program.write_text(BATCHES + re.sub(r".*torch\.cuda\..*\n", "", script))
    launch(run_example, world, folder, str(program), [])
    return [float(x) for x in re.findall(r"loss (\S+)", (folder / "printed 0").read_text())]


BATCHES = """
import torch
ids = torch.arange(150)[None] * 7 % 53
batches = [{"input_ids": ids, "labels": ids}] * 2
"""


def test_guide_from_one_gpu_leads_to_the_losses_of_one(tmp_path: Path) -> None:
    """The plain script and, on two ranks, the one after all steps of the guide; both on CPUs."""
    page = (llms.DOCS / "from-one-gpu.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.S)
    whole = functools.reduce(
        lambda done, hunk: apply(hunk, done), re.findall(r"```diff\n(.*?)```", page, re.S), script
    )
    llms.maker("llama")().save_pretrained(tmp_path / "model")
    changes = {
        "FOLDER": str(tmp_path / "model"),
        "cpu:gloo,cuda:nccl": "gloo",
        '"cuda"': '"cpu"',
        "(1, 8)": "(1, 2)",
    }
    for written, instead in changes.items():
        script, whole = script.replace(written, instead), whole.replace(written, instead)
    one, two = losses_of(tmp_path, 1, script), losses_of(tmp_path, 2, whole)
    assert len(one) == 2 and one[1] < one[0] and one == pytest.approx(two, rel=0.01)
    assert "gradient_checkpointing_enable" in whole and "fully_shard(module" in whole


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
