# SPDX-License-Identifier: Apache-2.0
"""Forked children and data loaders' workers, beside the exchanges of their parents."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.data
from helpers.growth import descriptors
from helpers.processes import finish, start
from helpers.reference import assert_same

import spar

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here"),
    pytest.mark.waits,
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward


def fork_and_exchange(rank: int, folder: Path) -> None:
    y = gather(torch.full((10,), float(rank)), None, 0)
    child = os.fork()
    if child == 0:
        try:
            gather(torch.zeros(1), None, 0)
        except spar.SparError as error:
            assert "forked" in str(error)
            del y
            gc.collect()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(y, torch.tensor([0.0, 1.0]).repeat_interleave(10))
    assert_same(gather(torch.ones(2), None, 0), torch.ones(4))


def test_forked_child_exchange_raises_without_side_effects(tmp_path: Path) -> None:
    assert finish(start(fork_and_exchange, 2, tmp_path, SPAR_TRANSPORT="shm"), 40) == [0, 0]


def is_not_dumped(tensor: torch.Tensor) -> bool:
    """Whether the mapping of a tensor's memory is excluded from core dumps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in bounds.groups())
            inside = start <= tensor.data_ptr() < end
        elif inside and line.startswith("VmFlags:"):
            return "dd" in line.split()
    return False


def write_in_child(rank: int, folder: Path) -> None:
    """A forked child's writes into an output stay in the child; neither parent nor peer sees them."""
    y = gather(torch.full((1000,), float(rank)), None, 0)
    expected = y.clone()
    in_child, in_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        y[0] = 7
        os.write(in_child[1], b"x")
        os.read(in_parent[0], 1)
        expected[0] = 7
        os._exit(0 if torch.equal(y[:100], expected[:100]) and is_not_dumped(y) else 1)
    os.read(in_child[0], 1)
    assert_same(y, expected, "the child's write stays in the child")
    y.fill_(9)
    os.write(in_parent[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(gather(y[:2], None, 0), torch.full((4,), 9.0))


def test_forked_child_writes_stay_in_the_child(tmp_path: Path) -> None:
    assert finish(start(write_in_child, 2, tmp_path, SPAR_TRANSPORT="shm"), 40) == [0, 0]


def read_in_child(rank: int, folder: Path) -> None:
    """With SPAR_OUTPUT=torch, a forked child has a snapshot of an output, as of any tensor."""
    y = gather(torch.full((1000,), float(rank)), None, 0)
    expected = y.clone()
    after = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(after[0], 1)
        os._exit(0 if torch.equal(y, expected) else 1)
    y.fill_(9)
    os.write(after[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_forked_child_gets_a_snapshot_of_torch_outputs(tmp_path: Path) -> None:
    settings = {"SPAR_TRANSPORT": "shm", "SPAR_OUTPUT": "torch"}
    assert finish(start(read_in_child, 2, tmp_path, **settings), 40) == [0, 0]


class Holder(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, held: object) -> None:
        self.held = held

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def check_warning(rank: int, folder: Path) -> None:
    """Warn once, in the first worker whose dataset holds an output; not in other forks."""

    def note(message: Warning | str, *_: object, **__: object) -> None:
        with open(folder / f"warnings.{rank}", "a") as file:
            file.write(f"{message}\n")

    def load(dataset: Holder) -> str:
        loader = torch.utils.data.DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
        assert len(list(loader)) == 2
        file = folder / f"warnings.{rank}"
        return file.read_text() if file.exists() else ""

    warnings.showwarning = note  # also in children
    warnings.simplefilter("always")
    y = gather(torch.full((4,), float(rank)), None, 0)
    assert load(Holder(None)) == ""
    assert load(Holder([y.clone()])) == ""
    assert load(Holder(list(range(1_000_000)))) == ""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=os.getpid)
    process.start()
    process.join()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=os.getpid)
    text = load(Holder({"a": [Holder(y[1:])]}))
    assert text.count("\n") == 1, text
    assert "an output of spar" in text and "SPAR_OUTPUT=torch" in text and ".clone()" in text
    assert load(Holder(y)) == text, "once per program"


def test_worker_that_holds_an_output_warns_once(tmp_path: Path) -> None:
    assert finish(start(check_warning, 2, tmp_path, SPAR_TRANSPORT="shm"), 60) == [0, 0]


def check_no_warning(rank: int, folder: Path) -> None:
    y = gather(torch.full((4,), float(rank)), None, 0)
    warnings.simplefilter("always")
    warnings.showwarning = lambda *_, **__: (folder / "warned").touch()
    loader = torch.utils.data.DataLoader(Holder(y), num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 2


def test_worker_that_holds_torch_memory_does_not_warn(tmp_path: Path) -> None:
    settings = {"SPAR_TRANSPORT": "shm", "SPAR_OUTPUT": "torch"}
    assert finish(start(check_no_warning, 2, tmp_path, **settings), 60) == [0, 0]
    assert not (tmp_path / "warned").exists()


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that workers make; each reads an inherited output of spar, which is live memory."""

    def __init__(self, captured: torch.Tensor) -> None:
        self.captured = captured

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        assert torch.utils.data.get_worker_info() is not None
        return self.captured + index


def train_with_workers(rank: int, folder: Path) -> None:
    """Workers are forked during training, run beside it and end, without an effect on the exchanges."""
    captured = gather(torch.tensor([float(rank), 10.0 * rank]), None, 0)
    weight = torch.ones(4, requires_grad=True)
    files = None
    for epoch in range(3):
        loader = torch.utils.data.DataLoader(
            Samples(captured), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for step, batch in enumerate(loader):
            expected = captured + torch.arange(4.0 * step, 4.0 * step + 4)[:, None]
            assert_same(batch, expected)
            part = spar.split_forward_gather_backward(batch * weight, None, 0)
            whole = gather(part * (1 + rank), None, 0)
            assert_same(whole.detach(), torch.cat([expected[:2], 2 * expected[2:]]) * weight.detach())
            whole.sum().backward()  # type: ignore[no-untyped-call]
        del loader
        gc.collect()
        if epoch == 0:
            files = descriptors()
    assert weight.grad is not None
    now = descriptors()
    assert now == files, (files, now)
    assert_same(gather(captured, None, 0), captured.repeat(2))


def test_data_loader_with_forked_workers(tmp_path: Path) -> None:
    assert finish(start(train_with_workers, 2, tmp_path, SPAR_TRANSPORT="shm"), 90) == [0, 0]


def spawn_workers(rank: int, folder: Path) -> None:
    """Spawned workers of one rank import spar, make no exchange, and end; its peer's are forked."""
    weight = torch.ones(2, requires_grad=True)
    samples, how = Samples(torch.tensor([1.0, 2.0])), ("fork", "spawn")[rank]
    loader = torch.utils.data.DataLoader(samples, batch_size=8, num_workers=1, multiprocessing_context=how)
    for step, batch in enumerate(loader):
        expected = torch.tensor([1.0, 2.0]) + torch.arange(8.0 * step, 8.0 * step + 8)[:, None]
        assert_same(batch, expected)
        whole = gather(spar.split_forward_gather_backward(batch * weight, None, 0), None, 0)
        assert_same(whole.detach(), expected)
        whole.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_data_loader_with_spawned_workers(tmp_path: Path) -> None:
    assert finish(start(spawn_workers, 2, tmp_path, SPAR_TRANSPORT="shm"), 90) == [0, 0]
