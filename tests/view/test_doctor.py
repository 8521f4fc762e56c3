# SPDX-License-Identifier: Apache-2.0
"""spar.testing.diagnose and `spar doctor`: each fault on purpose is named, and a right model has none."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.launched import launch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spar
from spar._commands.arguments import main
from spar._model.nested import tensors_in
from spar._model.part import part_of
from spar._model.view import current_view, without_view
from spar.testing import Difference, diagnose

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
WIDTH, TOKENS = 8, 11
TEXT = Path(__file__).read_text().splitlines()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # of Double
        return gradient * (2 if current_view() is None and not Fault.sharded else 3)


class Fault(nn.Module):
    """Twice its input; in a view something is wrong with it."""

    sharded = False  # whether the newest forward ran in a view

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        wrong = Fault.sharded = part_of(x) is not None
        if self.kind == "rank 1":
            wrong = wrong and dist.get_rank() % 2 == 1
        y = x.tanh()  # what agrees
        if self.kind == "gradient" and wrong:
            y = y + (y - y.detach())
        if self.kind == "memory" and wrong:
            with without_view():
                y.detach().mul_(1.5)
        if self.kind == "custom":
            y = Double.apply(y) / 2  # type: ignore[no-untyped-call]
        if self.kind in ("value", "rank 1"):
            y = F.softplus(y, 1.5 if wrong else 1.0)  # what differs
        if self.kind == "raises" and wrong:
            y = y.view(-1, 7)
        return y + x  # what reads


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.linear, self.fault = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Fault(kind)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.fault(self.linear(F.dropout(x, 0.1, self.training)))
        return out


class Model(nn.Module):
    calls: Tensor

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        middle = Block(kind)
        self.layers = nn.ModuleList([Block(""), middle, Block("")])
        self.middle = middle
        self.kind = kind
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        for i, block in enumerate(self.layers):
            if self.kind == "path" and i == 1 and random.random() < 0.5:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint" else block(x)
        return {"loss": x.square().mean(), "logits": x} if self.kind == "loss" else x


def line(marked: str) -> int:
    """Return the line of this file that ends in a mark."""
    (found,) = [i for i, text in enumerate(TEXT, 1) if text.endswith(marked)]
    return found


def made(kind: str, group: Group) -> tuple[Model, Tensor]:
    torch.manual_seed(1)
    model = Model(kind).double()
    spar.parallelize(model, group, blocks=["layers.*"])
    return model, torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)


def find(rank: int, world: int, group: Group, kind: str) -> Difference | None:
    model, x = made(kind, group)
    if kind == "path":
        random.seed(0 if rank == 0 else 1)  # draws of 0.84 and 0.13
    if kind == "inputs":
        x[0, 3] += rank
    if kind == "weights":
        with torch.no_grad():
            model.middle.linear.weight += rank
    return diagnose(model, lambda: model(x), show=False)


def check_right_model(rank: int, world: int, group: Group, kind: str) -> None:
    """Nothing is found, and the model, the generators and the next step are as before."""
    torch.manual_seed(rank if world == 1 else 5)
    model, x = made(kind, group)
    x.requires_grad_()
    sum(y.square().mean() for y in tensors_in(model(x))).backward()  # type: ignore[union-attr]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    forwards, state = [m.forward for m in model.modules()], torch.get_rng_state()
    shared = random.getstate()
    steps = [lambda: model(x.detach())]
    if kind != "loss":
        steps.append(lambda: F.mse_loss(model(x.detach()), x.detach() * 2))
    for step in steps:
        assert (found := diagnose(model, step, show=False)) is None, found
    assert int(model.calls) == 1 and torch.get_rng_state().equal(state) and random.getstate() == shared
    assert [m.forward for m in model.modules()] == forwards and not any(
        m._forward_hooks for m in model.modules()
    )
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, gradients, strict=True))
    spar.unparallelize(model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["", "checkpoint", "loss"])
def test_right_model_has_no_difference(ranks: Ranks, world: int, kind: str) -> None:
    ranks(world, check_right_model, kind)


@pytest.mark.parametrize(
    ("kind", "found", "function", "mark", "module"),
    [
        ("value", "value", "softplus", "# what differs", "layers.1.fault"),
        ("rank 1", "value", "softplus", "# what differs", "layers.1.fault"),
        ("memory", "value", "add", "# what reads", "layers.1.fault"),
        ("gradient", "gradient", "add", "# what reads", "layers.1.fault"),
        ("custom", "gradient", "Double", "# of Double", "layers.1.fault"),
        ("raises", "error", "view", "y.view(-1, 7)", "layers.1.fault"),
    ],
)
def test_first_difference_is_named(
    ranks: Ranks, kind: str, found: str, function: str, mark: str, module: str
) -> None:
    first, second = ranks(2, find, kind)
    assert first == second and first is not None
    assert (first.kind, first.module) == (found, module), first
    if kind != "gradient":
        wanted = inspect.getsourcelines(Double.backward)[1] if kind == "custom" else line(mark)
        assert (first.function, first.line, Path(first.file).name) == (function, wanted, "test_doctor.py")
    assert first.ranks == ((1,) if kind == "rank 1" else (0, 1)), first
    assert f"test_doctor.py:{first.line} in layers.1.fault (Fault)" in str(first)
    if kind == "memory":
        assert "the last call that agrees is `tanh`" in str(first)
    if kind == "raises":
        assert "rank 0 raised RuntimeError" in str(first)


@pytest.mark.parametrize(
    ("kind", "found", "text"),
    [
        ("inputs", "inputs", "`forward`"),
        ("weights", "inputs", "layers.1.linear (Linear) returns values that differ from rank 0's"),
        ("path", "path", "in layers.1.norm (LayerNorm)"),
    ],
)
def test_ranks_that_differ_in_one_process_are_named(ranks: Ranks, kind: str, found: str, text: str) -> None:
    first, second = ranks(2, find, kind)
    assert first == second and first is not None
    assert first.kind == found and first.ranks == (1,) and text in str(first), first


def check_step(rank: int, world: int, group: Group) -> None:
    """What a step computes outside of the model is compared, and so is the gradient of an input."""
    model, x = made("", group)
    calls = 0

    def step() -> Tensor:
        nonlocal calls
        calls += 1
        loss: Tensor = model(x).square().mean() * (1.5 if calls == 1 else 1.0)  # of the loss
        return loss

    found = diagnose(model, step, show=False)
    assert found is not None and calls == 2
    assert (found.kind, found.module, found.function) == ("value", None, "mul"), found
    assert found.line == line("# of the loss")
    leaf = x.clone().requires_grad_()
    found = diagnose(model, lambda: model(leaf), show=False)
    assert found is None and leaf.grad is None, found
    with torch.no_grad():
        assert diagnose(model, lambda: {"y": model(x)}, show=False) is None
    with pytest.raises(ValueError, match="no module of Linear is parallelized; call parallelize first"):
        diagnose(nn.Linear(2, 2), lambda: None)
    with pytest.raises(ZeroDivisionError):
        diagnose(model, lambda: 1 // 0)


def test_step_outside_of_the_model(ranks: Ranks) -> None:
    ranks(2, check_step)


SCRIPT = """
import sys, torch, torch.distributed as dist, spar
sys.path.insert(0, {folder!r})
from test_doctor import Model
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model(sys.argv[1])
spar.parallelize(model, blocks=["layers.*"])
for step in range(9):
    y = model(torch.randn(2, 11, 8))
    print("step", step)
    y.square().mean().backward()
"""


def run_command(folder: Path, *arguments: str) -> None:
    with (folder / f"printed.{os.environ['RANK']}").open("w") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            status = main(["doctor", *arguments])
        file.write(f"status {status}")
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "kind", "status", "text"),
    [
        ([], "", 0, "spar doctor: forward 1 of Model on ranks 0, 1: agrees with one process\nstep 0\n"),
        (["--forward", "3"], "value", 1, "spar doctor: forward 3 of Model on ranks 0, 1: differs:\n"),
        (["--forward", "20"], "", 2, "ended without forward 20 of a sharded model"),
    ],
)
def test_doctor_runs_a_script(options: list[str], kind: str, status: int, text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    launch(run_command, 2, tmp_path, *options, str(script), kind)
    printed = (tmp_path / "printed.0").read_text()
    assert text in printed and printed.endswith(f"status {status}"), printed
    if status == 1:
        place = f"{__file__}:{line('# what differs')}"
        assert f"  `softplus` at {place} in layers.1.fault (Fault) returns values that differ" in printed
    assert ("step 8" in printed) == (status == 2)
