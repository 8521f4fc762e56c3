"""Processes around their exchanges: forks, workers, exits in any order, crashes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from helpers.reference import assert_same
from test_faults import TEARDOWN, finish, start

import spar

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here")

gather = spar.gather_forward_split_backward


# ---- forks ----


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


def descriptors() -> list[str]:
    """Count this process's descriptors by target, so that a failure shows which ones leak.

    Pipes are not counted: spar has none, and a loader's thread closes its own at any time.
    """
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of listdir
            targets.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}")))
    return sorted(target for target in targets if not target.startswith("pipe"))


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
    """Spawned workers import spar, make no exchange, and end."""
    weight = torch.ones(2, requires_grad=True)
    loader = torch.utils.data.DataLoader(
        Samples(torch.tensor([1.0, 2.0])), batch_size=8, num_workers=1, multiprocessing_context="spawn"
    )
    for step, batch in enumerate(loader):
        expected = torch.tensor([1.0, 2.0]) + torch.arange(8.0 * step, 8.0 * step + 8)[:, None]
        assert_same(batch, expected)
        whole = gather(spar.split_forward_gather_backward(batch * weight, None, 0), None, 0)
        assert_same(whole.detach(), expected)
        whole.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_data_loader_with_spawned_workers(tmp_path: Path) -> None:
    assert finish(start(spawn_workers, 2, tmp_path, SPAR_TRANSPORT="shm"), 90) == [0, 0]


# ---- autograd ----


def recompute(rank: int, folder: Path) -> None:
    """Checkpointing, in both modes, and a retained graph do not change gradients."""
    from torch.utils.checkpoint import checkpoint

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = spar.all_to_all(x * w, None, 1, 0, 4)
        return spar.all_to_all(torch.tanh(y), None, 0, 1, 6)

    x = torch.arange(12.0).view(2, 6) / 7 + rank
    gradients = []
    for how in (None, False, True):
        w = torch.full((6,), 0.3, requires_grad=True)
        y = block(x, w) if how is None else checkpoint(block, x, w, use_reentrant=how)
        assert isinstance(y, torch.Tensor)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        gradients.append(w.grad)
    assert_same(gradients[1], gradients[0])
    assert_same(gradients[2], gradients[0])
    w = torch.full((6,), 0.3, requires_grad=True)
    loss = block(x, w).square().sum()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    assert_same(w.grad, 2 * gradients[0])


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_recompute_and_retained_graphs(tmp_path: Path, transport: str) -> None:
    assert finish(start(recompute, 2, tmp_path, SPAR_TRANSPORT=transport), 40) == [0, 0]


def exec_program(rank: int, folder: Path) -> None:
    """A program started by exec inherits no descriptor of spar."""
    gather(torch.zeros(1), None, 0)
    command = ["ls", "-l", f"/proc/{os.getpid()}/fd", "/proc/self/fd"]
    done = subprocess.run(command, close_fds=False, capture_output=True, text=True)
    mine, others = done.stdout.split("/proc/self/fd:")
    assert "memfd:spar" in mine
    assert "spar" not in others and "pidfd" not in others, others


def test_descriptors_close_at_exec(tmp_path: Path) -> None:
    assert finish(start(exec_program, 2, tmp_path, SPAR_TRANSPORT="shm"), 40) == [0, 0]


# ---- exits ----


def keep_in_a_module(y: torch.Tensor) -> None:
    spar.kept_by_a_test = y  # type: ignore[attr-defined]


def keep_in_a_cycle(y: torch.Tensor) -> None:
    cycle: list[object] = [y]
    cycle.append(cycle)


def keep_in_a_thread(y: torch.Tensor) -> None:
    threading.Thread(target=lambda: (time.sleep(30), y), daemon=True).start()


def keep_until_exit(y: torch.Tensor) -> None:
    atexit.register(lambda: float(y.sum()))


def destroy_group_first(y: torch.Tensor) -> None:
    keep_in_a_module(y)
    spar.close()
    dist.destroy_process_group()


def destroy_group_on_one_rank(y: torch.Tensor) -> None:
    keep_in_a_cycle(y)
    dist.destroy_process_group()


def exit_between_calls(y: torch.Tensor) -> None:
    keep_in_a_module(y)
    sys.exit(0)


def close_after_destroy(y: torch.Tensor) -> None:
    group = dist.group.WORLD
    dist.destroy_process_group()
    spar.close(group)
    keep_in_a_module(y)


def exit_during_thread_call(y: torch.Tensor) -> None:
    """Each rank exits while one of its threads waits in a call that no peer makes."""
    pair = dist.new_group([0, 1])
    keep_in_a_module(gather(y[:1], pair, 0))
    if dist.get_rank() == 0:
        threading.Thread(target=lambda: gather(y, pair, 0), daemon=True).start()
        time.sleep(0.2)


def exit_with_graph(y: torch.Tensor) -> None:
    keep_in_a_module(gather(torch.zeros(3, requires_grad=True), None, 0).sum())


ENDS = {
    function.__name__: function
    for function in (
        keep_in_a_module,
        keep_in_a_cycle,
        keep_in_a_thread,
        keep_until_exit,
        destroy_group_first,
        destroy_group_on_one_rank,
        close_after_destroy,
        exit_during_thread_call,
        exit_between_calls,
        exit_with_graph,
    )
}


def exit_with(rank: int, folder: Path, how: str) -> None:
    y = gather(torch.full((100_000,), float(rank)), None, 0)
    dist.barrier()
    (folder / f"{rank}.ended").touch()
    ENDS[how](y)


@pytest.mark.parametrize("how", ENDS)
def test_interpreter_exits_in_any_order(tmp_path: Path, how: str) -> None:
    assert finish(start(exit_with, 2, tmp_path, how, SPAR_TRANSPORT="shm"), 40) == [0, 0]


# ---- crashes ----


def crash(rank: int, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    place = folder / str(rank)
    place.mkdir()
    os.chdir(place)
    y = gather(torch.full((64 << 20,), 1.5), None, 0)  # 512 MiB in each arena; both ranks map both arenas
    assert y[-1] == 1.5
    dist.barrier()
    os.abort()


def test_core_dump_excludes_the_arena(tmp_path: Path) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in pattern or "|" in pattern:
        pytest.skip(f"this machine's core dumps go to {pattern}")
    codes = finish(start(crash, 2, tmp_path, SPAR_TRANSPORT="shm"), 120)
    assert codes == [-signal.SIGABRT] * 2
    for rank in range(2):
        (core,) = (tmp_path / str(rank)).iterdir()
        written = core.stat().st_blocks * 512
        core.unlink()
        assert 1 << 20 < written < 600 << 20, "the input's 256 MiB and torch's memory, but not the arenas"


def test_arenas_are_not_dumped_and_leave_no_files(tmp_path: Path) -> None:
    code = """
import os, torch, torch.distributed as dist, spar
dist.init_process_group("gloo")
y = spar.gather_forward_split_backward(torch.zeros(1000), None, 0)
assert spar.transport().name == "shm"
lines = open("/proc/self/smaps").read().split("\\n")
flags = {}
for line in lines:
    if "memfd:spar" in line:
        name = line.split()[0]; flags[name] = ""
    elif line.startswith("VmFlags") and flags and list(flags.values())[-1] == "":
        flags[list(flags)[-1]] = line
assert len(flags) == 2 and all(" dd" in text for text in flags.values()), flags
print("seen")
"""
    (tmp_path / "run.py").write_text(code)
    before = set(os.listdir("/dev/shm"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("seen") == 2, done.stderr
    assert {name for name in os.listdir("/dev/shm") if "spar" in name} <= before


def test_elastic_restart_uses_shm_again(tmp_path: Path) -> None:
    """torchrun restarts all ranks after one was killed; the new ranks use shm again."""
    code = """
import os, signal, sys, torch, torch.distributed as dist, spar
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])
# a store of its own: in the agent's, gloo may find the addresses of the ranks that were killed
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store{again}", rank=rank, world_size=2)
for _ in range(3):
    y = spar.gather_forward_split_backward(torch.full((2,), float(rank)), None, 0)
    assert y.tolist() == [0, 0, 1, 1], y
if not again:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        spar.gather_forward_split_backward(torch.zeros(1), None, 0)
    except spar.PeerLostError:
        print("lost", flush=True)
        raise
assert spar.transport().name == "shm"
print("again" if again else "never", flush=True)
"""
    (tmp_path / "run.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--max-restarts=1", "--monitor-interval=0.5", "--log-dir=logs", "--tee=3"]
    try:
        done = subprocess.run(
            [*torchrun, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{error.stdout}\n{error.stderr}\n{rank_logs(tmp_path)}")
    everything = f"{done.returncode}\n{done.stdout}\n{done.stderr}\n{rank_logs(tmp_path)}"
    assert done.returncode == 0 or TEARDOWN in everything, everything
    assert done.stdout.count("again") == 2 and "never" not in done.stdout, everything


def rank_logs(folder: Path) -> str:
    """Return what each rank wrote in each restart of torchrun."""
    files = sorted((folder / "logs").rglob("*.log"))
    return "\n".join(f"==> {file.relative_to(folder)} <==\n{file.read_text()}" for file in files)


# ---- many groups ----


class Growth:
    """Growth of descriptors, threads and spar's memory since the construction."""

    def __init__(self) -> None:
        self.files, self.threads = descriptors(), threading.active_count()
        self.held = spar.memory_stats()["arena.allocated_bytes"]

    def check(self) -> None:
        now = Growth()
        assert now.files == self.files, (self.files, now.files)
        assert now.threads == self.threads
        assert now.held <= self.held + 65536


def create_and_close(rank: int, folder: Path, rounds: int) -> None:
    """Set up and close 10,000 groups of spar on one ProcessGroup: state in C, mailbox, handle."""
    for i in range(rounds + 20):
        if i == 20:
            growth = Growth()
        y = gather(torch.full((1,), float(rank)), None, 0)
        spar.close()
    assert y.tolist() == [0.0, 1.0]
    growth.check()


def test_ten_thousand_groups_do_not_leak(tmp_path: Path) -> None:
    ranks = start(create_and_close, 2, tmp_path, 10_000, SPAR_TRANSPORT="shm")
    assert finish(ranks, 200) == [0, 0]


def mapped() -> int:
    """Count the mapped arenas of this process and its peers."""
    return Path("/proc/self/maps").read_text().count("memfd:spar")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def create_and_destroy(rank: int, folder: Path, rounds: int) -> None:
    """Create, use and destroy ProcessGroups of torch."""
    for i in range(rounds + 20):
        if i == 20:
            growth, maps, before = Growth(), mapped(), resident()
        group = dist.new_group([0, 1])
        y = gather(torch.full((1,), float(rank)), group, 0)
        assert y.tolist() == [0.0, 1.0]
        spar.close(group)
        dist.destroy_process_group(group)
        del group
    dist.barrier()
    growth.check()
    assert mapped() == maps == 2, "one's own arena and the other's"
    grown = resident() - before
    (folder / f"{rank}.grown").write_text(f"{grown} bytes in {rounds} groups")
    assert grown < (4 << 20) + rounds * 5000, grown  # one-time allocations, and what torch keeps per group


def test_torch_process_groups_do_not_leak(tmp_path: Path) -> None:
    ranks = start(create_and_destroy, 2, tmp_path, 80, SPAR_TRANSPORT="shm")
    assert finish(ranks, 120) == [0, 0]


def use_many_groups(rank: int, folder: Path) -> None:
    """Use 32 groups at once; then 8 threads with one group each, with calls of different sizes."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(32)]
    kept = [gather(torch.full((3,), float(i + rank)), group, 0) for i, group in enumerate(groups)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n in range(40):
                y = gather(torch.full((1 + 37 * n,), float(i + rank)), groups[i], 0)
                assert_same(y, torch.tensor([i, i + 1.0, i + 2.0]).repeat_interleave(1 + 37 * n))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures
    for i, y in enumerate(kept):
        assert_same(y, torch.tensor([i, i + 1.0, i + 2.0]).repeat_interleave(3))
    assert len({spar.transport(group).name for group in groups}) == 1
    dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_many_groups_and_threads(tmp_path: Path, transport: str) -> None:
    """On most machines with more ranks than cores."""
    assert finish(start(use_many_groups, 3, tmp_path, SPAR_TRANSPORT=transport), 120) == [0, 0, 0]
