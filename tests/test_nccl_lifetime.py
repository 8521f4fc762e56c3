"""When the nccl transport frees communicators and memory: once, never under a call, a capture or a graph.

The stand-in libnccl ends a process that uses a communicator after its abort.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import Ranks
from helpers import nccl_lifetime, standins

from spar._runtime.transports import cuda

OWNERS = pytest.mark.parametrize("native", [False, True], ids=["own", "torch's"])


@pytest.fixture(scope="module", params=["22907", "22105"], ids=["revoke", "no revoke"])
def gpus(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks whose NCCL has ncclCommRevoke, or has not."""
    folder = standins.built()
    settings = {"STANDIN_NCCL_VERSION": request.param, "STANDIN_DEVICES": "3"}
    settings["XDG_CACHE_HOME"] = str(folder / "cache")
    ranks = Ranks((2, 3), settings, [folder / name for name in standins.NAMES])
    yield ranks
    ranks.stop()
    standins.sweep()


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
