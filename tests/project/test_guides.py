# SPDX-License-Identifier: Apache-2.0
"""The Python code of README.md and docs/: each block runs on real ranks, or is listed here with a reason."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import socket
import textwrap
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from conftest import TRANSPORTS, Ranks
from helpers.guides import CHECKS, GIVEN, WORLD, Names
from helpers.launched import launch

import spar
from spar.parallel_state import Topology

ROOT = Path(__file__).parents[2]

# Blocks that this module only compiles, by page and number: why they do not run here.
COMPILED_ONLY = {
    ("README.md", 1): "ends the process group: test_examples_run",
    ("attention.md", 1): "ends the process group: test_examples_run",
    ("attention.md", 7): "needs a GPU and FlashAttention 3: tests/attention/test_attention_flash_impl.py",
    ("does-it-fit.md", 0): "a model of transformers: tests/models/test_plan_memory.py",
    ("dataloading.md", 0): "a model of transformers: tests/models/test_evaluation.py trains by this recipe",
    ("diffusers.md", 0): "a pipeline of diffusers: tests/models/test_evaluation.py runs this block",
    ("diffusers.md", 1): "downloads weights; tests/models/test_diffusers.py makes the same calls",
    ("from-one-gpu.md", 0): "a model of transformers: tests/models/test_examples.py runs it after each step",
    ("multimodal.md", 0): "downloads weights; tests/models/test_multimodal.py makes the same calls",
    ("diffusers.md", 2): "compiles a model of diffusers: tests/models/test_diffusers_use.py",
    ("diffusers.md", 3): "an autoencoder of diffusers: tests/models/test_diffusers_vae.py",
    ("evaluation.md", 1): "a model of transformers: tests/models/test_evaluation.py runs this block",
    ("evaluation.md", 2): "generates by a model of transformers: tests/models/test_evaluation.py",
    ("evaluation.md", 5): "saves a model of transformers: tests/models/test_evaluation.py",
    ("meshes.md", 1): "a model of transformers: tests/models/test_model_meshes.py makes these calls",
    ("meshes.md", 2): "a stage of a pipeline: tests/view/test_view_meshes.py",
    ("several-nodes.md", 0): "initializes the process group, which the ranks have",
    ("several-nodes.md", 4): "starts processes, by the function that the block before it writes to a file",
    ("hybrid.md", 0): "a model of transformers: tests/models/test_scans.py makes these calls",
    ("science.md", 0): "downloads weights; tests/models/test_folding.py makes the same calls",
    ("rl.md", 8): "a model of transformers: tests/models/test_evaluation.py runs this block",
    ("lightning.md", 0): "Lightning: tests/trainers/test_lightning.py",
    ("lightning.md", 1): "Lightning: tests/trainers/test_lightning.py",
    ("ms-swift.md", 0): "ms-swift: tests/trainers/test_swift.py",
    ("torchtitan.md", 0): "torchtitan: tests/trainers/test_torchtitan.py",
    ("trl.md", 0): "TRL: tests/models/test_trl.py",
    ("trl.md", 1): "TRL: tests/models/test_trl.py",
    ("trees.md", 0): "a model of transformers: tests/models/test_trees.py runs this block",
    **{
        ("transformers.md", n): "a model of transformers: tests/models/test_transformers_training.py"
        for n in range(6)
    },
}


HOSTED = ".integrations.swift"  # imports ms-swift


def blocks(page: str) -> list[str]:
    text = (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text()
    return [textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```", text, re.M | re.S)]


PAGES = {
    path: blocks(path)
    for path in (
        "README.md",
        *sorted(p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")),
    )
}
RUN = [page for page, code in PAGES.items() if {(page, n) for n in range(len(code))} - set(COMPILED_ONLY)]


def test_blocks_compile_and_use_names_that_exist() -> None:
    for page, code in PAGES.items():
        for block in code:
            compile(block, page, "exec")
            for name in re.findall(r"(?<![\w.])spar((?:\.[A-Za-z_]\w*)+)", block):
                if not name.startswith(HOSTED):
                    attrgetter(name[1:])(spar)
    assert all(n < len(PAGES[page]) for page, n in COMPILED_ONLY), "a block of the list is gone"


def run_page(rank: int, world: int, group: dist.ProcessGroup, page: str, ports: list[int]) -> None:
    """Run the blocks of a page, each in its own topology, with the names that the page takes as given."""
    import torch._dynamo.testing  # takes seconds, so only one rank compiles

    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(torch.compile, backend=graphs) if rank == 0 else lambda **_: lambda f: f
    for number, code in enumerate(PAGES[page]):
        if (page, number) in COMPILED_ONLY:
            continue
        code = code.replace('dist.init_process_group("gloo")\n', "").replace("10.0.0.5", "127.0.0.1")
        for written, port in zip(("29600", "29601"), ports, strict=True):
            code = code.replace(written, str(port))
        torch.manual_seed(0)
        names: Names = {"spar": spar, "torch": torch, "dist": dist, "F": F, "group": group, "rank": rank}
        names |= GIVEN.get(page, lambda group: {})(group)
        with Topology(), mock.patch("torch.compile", compiled):
            exec(compile(code, f"{page}, block {number}", "exec"), names)
        if (page, number) in CHECKS:
            CHECKS[page, number](names)
    assert graphs.frame_count == (2 if page == "compile.md" and rank == 0 else 0)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """A world of four ranks: guides also use WORLD, which is all of a pool."""
    ranks = Ranks(worlds=(WORLD,))
    ranks.transport = TRANSPORTS[0]
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.compiler if page == "compile.md" else ()) for page in RUN],
)
def test_code_of_page_runs(four: Ranks, page: str) -> None:
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = [first.getsockname()[1], second.getsockname()[1]]
    four(WORLD, run_page, page, ports)


def run_example(folder: Path, example: Path) -> None:
    with (folder / f"printed.{os.environ['RANK']}").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("page", ["README.md", "attention.md"])
@pytest.mark.parametrize("world", [1, 3])
def test_examples_run(world: int, page: str, tmp_path: Path) -> None:
    """The program of a page, as it is printed there."""
    example = tmp_path / "example.py"
    example.write_text(PAGES[page][1])
    launch(run_example, world, tmp_path, example)
    printed = "".join((tmp_path / f"printed.{rank}").read_text() for rank in range(world))
    differences = [float(x) for x in re.findall(r"within (\S+) of one process", printed)]
    assert len(differences) == world and max(differences) < 1e-4, printed
