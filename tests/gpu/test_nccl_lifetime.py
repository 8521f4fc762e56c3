# SPDX-License-Identifier: Apache-2.0
"""When the nccl transport frees communicators and memory: once, never under a call, a capture or a graph.

The stand-in libnccl ends a process that uses a communicator after its abort.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks, standin_ranks
from helpers import nccl_aborts, nccl_lifetime, standins

import spar
from spar._control import collectives
from spar._control.state import GroupState
from spar._transports import cuda

pytestmark = pytest.mark.waits

OWNERS = pytest.mark.parametrize("native", [False, True], ids=["own", "torch's"])


@pytest.fixture(scope="module", params=[("23007", "1"), ("22105", "0")], ids=["revoke", "no revoke"])
def gpus(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks whose NCCL has ncclCommRevoke, with the newer class of torch's backend; or both older."""
    version, newer = request.param
    settings = {"STANDIN_NCCL_VERSION": version, "TORCH_DIST_USE_NCCL2": newer, "STANDIN_DEVICES": "3"}
    yield from standin_ranks((2, 3), **settings)


def test_closed_communicator_is_not_used(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_close)


@OWNERS
def test_abort_waits_for_a_call_inside_nccl(gpus: Ranks, native: bool) -> None:
    gpus(2, nccl_lifetime.check_slow_call, native)


@OWNERS
def test_timeout_ends_a_launch_that_blocks_on_a_full_queue(gpus: Ranks, native: bool) -> None:
    gpus(2, nccl_lifetime.check_full_queue, native)


def test_setup_timeout_frees_nothing_under_its_thread(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_abandoned_setup)


def test_frees_do_not_invalidate_a_capture(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_frees)


@OWNERS
def test_graph_replay_after_close(gpus: Ranks, native: bool) -> None:
    gpus(2, nccl_lifetime.check_replay_after_close, native)


def test_peers_learn_of_a_close_before_the_abort_returns(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_slow_close)


def test_close_with_calls_in_the_stream(gpus: Ranks) -> None:
    gpus(3, nccl_lifetime.check_close_under_way)


def test_out_of_staging_memory_reaches_peers(gpus: Ranks) -> None:
    gpus(3, nccl_lifetime.check_no_staging)


@OWNERS
def test_replay_of_a_broken_group_returns(gpus: Ranks, native: bool) -> None:
    gpus(2, nccl_aborts.check_replay_of_broken, native)


def test_no_abort_under_a_kernel_launched_after_the_revocation(gpus: Ranks) -> None:
    if gpus.environment["STANDIN_NCCL_VERSION"] < str(22807):
        pytest.skip("this NCCL has no ncclCommRevoke")
    gpus(2, nccl_aborts.check_late_launch)


@OWNERS
@pytest.mark.parametrize("first", [0.3, 0.6])
def test_call_behind_a_hung_one_of_another_group(gpus: Ranks, native: bool, first: float) -> None:
    gpus(3, nccl_aborts.check_two_broken, native, first)


@OWNERS
def test_groups_beside_an_abort_that_waits_for_a_graph(gpus: Ranks, native: bool) -> None:
    gpus(3, nccl_aborts.check_set_up_beside_abort, native)


def test_torch_abort_on_the_groups_device(gpus: Ranks) -> None:
    gpus(3, nccl_aborts.check_abort_device)


def test_second_capture_beside_another_is_refused(gpus: Ranks) -> None:
    gpus(2, nccl_aborts.check_two_captures)


def test_exit_waits_for_an_abort(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_close)
    processes = list(gpus.processes)
    with pytest.raises(pytest.fail.Exception, match="the process is gone"):
        gpus(2, nccl_lifetime.check_exit)
    assert [process.exitcode for process in processes[:2]] == [0, 0]


def test_torch_abort_is_reported_as_the_timeout(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_native_aborted)


def test_destroyed_torch_communicator_is_an_error(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_native_destroyed)


def test_thread_without_current_device(gpus: Ranks) -> None:
    gpus(3, nccl_lifetime.check_native_device)


def test_call_in_a_coalescing_manager_is_rejected(gpus: Ranks) -> None:
    gpus(2, nccl_lifetime.check_open_group)


# ---- the library that torch calls ----

OTHER = "int ncclGetVersion(int *version); int ncclGetVersion(int *version) { *version = 1; return 0; }"
USER = "int ncclGetVersion(int *version); int use(void); int use(void) { int v; return ncclGetVersion(&v); }"


def check_shares(rank: int, world: int, group: dist.ProcessGroup, folder: str) -> dict[str, bool]:
    found = {}
    for name in ("linked", "own", "hidden"):
        path = str(Path(folder, f"{name}.so"))
        ctypes.CDLL(path)
        found[name] = cuda.torch_shares_nccl(path)
    return found


def test_torch_with_another_nccl_is_detected(gpus: Ranks, tmp_path: Path) -> None:
    for name, text, options in (
        ("linked", USER, [str(standins.built() / "libnccl.so.2")]),
        ("own", OTHER, []),
        ("hidden", OTHER, ["-fvisibility=hidden"]),
    ):
        (tmp_path / f"{name}.c").write_text(text)
        command = ["cc", "-shared", "-fPIC", str(tmp_path / f"{name}.c"), *options]
        subprocess.run([*command, "-o", str(tmp_path / f"{name}.so")], check=True)
    for found in gpus(2, check_shares, str(tmp_path)):
        assert found == {"linked": True, "own": False, "hidden": False}


# ---- collectives of a group that has no CPU backend ----


class Work:
    """A collective on a device that never ends: wait() returns at once, as NCCL's does."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True


class Group:
    group_name, group_desc = "stand-in", ""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def endless(seconds: float) -> None:
    group = Group()
    state = GroupState(cast(dist.ProcessGroup, group))
    state.timeout = seconds
    buffer: Any = SimpleNamespace(device=torch.device("cuda", 0))
    collective = collectives.Unfinished(state.process_group, cast(dist.Work, Work()), (buffer,))
    try:
        collectives._wait(state, "init", collective, state.deadline())
    finally:
        collectives._unfinished.remove(collective)


def test_collective_on_a_device_times_out() -> None:
    begin = time.monotonic()
    with pytest.raises(spar.ExchangeTimeoutError, match="did not make this call in time"):
        endless(0.4)
    assert 0.3 < time.monotonic() - begin < 2


def test_collective_on_a_device_is_interrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            endless(20)
    finally:
        signal.signal(signal.SIGINT, before)
