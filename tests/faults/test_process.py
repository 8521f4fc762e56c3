# SPDX-License-Identifier: Apache-2.0
"""What a process does around its exchanges: recomputation, other programs, ends in any order, crashes."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers.processes import finish, start
from helpers.reference import assert_same

import spar

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here"),
    pytest.mark.waits,
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward


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


@pytest.mark.parametrize("transport", TRANSPORTS)
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


EXITS = int(os.environ.get("SOAK_EXITS", "1"))  # `make soak` sets more


@pytest.mark.timeout(60 + 30 * EXITS)  # a busy machine starves the threads for as long as an exit waits
def test_exit_waits_for_threads_of_gloo(tmp_path: Path) -> None:
    """They release the last collective's tensors, for which they need the GIL."""
    command = [sys.executable, "-m", "helpers.exits", str(EXITS), str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["0 0 0 0"] * EXITS, ended.stderr


# ---- crashes ----


def crash(rank: int, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    place = folder / str(rank)
    place.mkdir()
    os.chdir(place)
    y = gather(torch.full((16 << 20,), 1.5), None, 0)  # 128 MiB in each arena; both ranks map both arenas
    assert y[-1] == 1.5
    dist.barrier()
    (folder / f"own {rank}").write_text(str(own_memory()))
    os.abort()


def own_memory() -> int:
    """Return the bytes that a core dump of this process has of memory that it shares with no other.

    Of mapped files the kernel writes all of a mapping of which the process has changed a page.
    """
    total, size, is_file = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name:
            is_file = "/" in line
        elif name == "Size":
            size = int(value.split()[0])
        elif name == "Anonymous":
            anonymous = int(value.split()[0])
            total += size if is_file and anonymous else anonymous
    return total * 1024


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
        own = int((tmp_path / f"own {rank}").read_text())
        assert 1 << 20 < written < own + (64 << 20), (
            "the input's 64 MiB and torch's memory, but not the arenas"
        )


def maps_without_dumps(rank: int, folder: Path) -> None:
    gather(torch.zeros(1000), None, 0)
    assert spar.transport().name == "shm"
    flags: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "memfd:spar" in line:
            flags[line.split()[0]] = ""
        elif line.startswith("VmFlags") and flags and not list(flags.values())[-1]:
            flags[list(flags)[-1]] = line
    assert len(flags) == 2 and all(" dd" in text for text in flags.values()), flags


def test_arenas_are_not_dumped_and_leave_no_files(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    assert finish(start(maps_without_dumps, 2, tmp_path), 120) == [0, 0]
    assert {name for name in os.listdir("/dev/shm") if "spar" in name} <= before


def lose_a_rank(folder: Path) -> str:
    """As a rank of torchrun: the first time, rank 1 is killed; the second time, all exchange over shm."""
    again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    # a store of its own: in the agent's, gloo may find the addresses of the ranks that were killed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{again}", rank=rank, world_size=2)
    for _ in range(3):
        y = gather(torch.full((2,), float(rank)), None, 0)
        assert y.tolist() == [0, 0, 1, 1], y
    if not again:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(torch.zeros(1), None, 0)
        (folder / "returned").touch()  # it must raise, or the agent ends it while it waits
    return f"{spar.transport().name} {again}"


def launch_with_restart(rank: int, folder: Path) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",  # torchrun's ranks would import torch again
    )
    ends = elastic_launch(config, lose_a_rank)(folder)  # in the order in which the ranks end
    (folder / "ends").write_text(repr([ends[rank] for rank in range(2)]))


def test_elastic_restart_uses_shm_again(tmp_path: Path) -> None:
    """torchrun's agent restarts all ranks after one was killed; the new ranks use shm again."""
    assert finish(start(launch_with_restart, 1, tmp_path, initialize=False), 120) == [0]
    assert (tmp_path / "ends").read_text() == repr(["shm 1", "shm 1"])
    assert not (tmp_path / "returned").exists(), "an exchange with a rank that was killed"
