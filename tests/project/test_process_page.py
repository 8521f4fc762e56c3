# SPDX-License-Identifier: Apache-2.0
"""docs/process.md: what an import does, and which functions of torch and Python stand for others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from helpers.launched import launch

import spar

PAGE = (Path(__file__).parents[2] / "docs" / "process.md").read_text()
SPAR = str(Path(spar.__file__).parent)

STATE = """
def state():
    numbers = [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]
    handlers = [signal.getsignal(n) for n in signal.valid_signals()]
    return len(numbers), len(os.listdir("/proc/self/task")), handlers, dict(os.environ)
"""


def replaced() -> set[str]:
    """Return the names in modules and classes of torch and Python whose code is spar's."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "threading", "concurrent", "multiprocessing"):
            continue
        owners: list[Any] = [module, *(x for x in vars(module).values() if issubclass(type(x), type))]
        for owner in owners:
            for attribute, value in list(vars(owner).items()):
                is_bound = type(value) in (classmethod, staticmethod)
                function: Any = value.__func__ if is_bound else value
                if type(function) is FunctionType and function.__code__.co_filename.startswith(SPAR):
                    found.add(f"{owner.__name__}.{attribute}")
    return found


def test_import_starts_opens_and_replaces_nothing() -> None:
    code = f"""
import os, signal, sys, torch, torch.distributed, torch.utils.checkpoint
{STATE}
before = state()
import spar
assert state() == before
assert not torch.cuda.is_initialized() and not {{"transformers", "diffusers"}} & set(sys.modules)
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
from test_process_page import replaced
assert replaced() == set(), replaced()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Layer(torch.nn.TransformerEncoderLayer):
    """Records what is replaced while it runs."""

    seen: frozenset[str] = frozenset()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        Layer.seen = frozenset(replaced())
        return super().forward(*args, **kwargs)


def run_model(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(Layer(16, 4, dropout=0.0, batch_first=True), 2)
    spar.parallelize(model, dist.group.WORLD)
    model(torch.randn(1, 9, 16)).sum().backward()
    spar.unparallelize(model)
    (folder / f"seen.{dist.get_rank()}").write_text("\n".join(Layer.seen))
    (folder / f"left.{dist.get_rank()}").write_text("\n".join(replaced()))
    dist.destroy_process_group()


def test_page_lists_what_is_replaced_during_and_after_a_sharded_forward(tmp_path: Path) -> None:
    launch(run_model, 2, tmp_path)
    seen, left = ((tmp_path / f"{name}.0").read_text().split() for name in ("seen", "left"))
    of_groups = re.compile(r"ProcessGroup\.|Backend\.")
    assert len(seen) > len(left) > 20
    others = [name.rpartition(".")[2] for name in seen if not of_groups.match(name)]
    assert not [name for name in others if not re.search(rf"\b{name.removeprefix('_spar_')}`", PAGE)]
    kept = {name.rpartition(".")[2] for name in left if not of_groups.match(name) and "._spar_" not in name}
    assert kept <= {"_object_to_tensor", "to_local"}
