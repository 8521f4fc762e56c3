# SPDX-License-Identifier: Apache-2.0
"""Ranks that cannot use shared memory: all ranks fall back together, and report the reason.

Each fault is injected into one rank, after its ProcessGroup was created and before the first exchange.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import await_report, finish, report, start
from helpers.reference import assert_same

import spar
from spar import _C
from spar._group import setup, stages
from spar._group.registry import group_of
from spar.groups import process_group

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's here"),
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's id, or a namespace")
libc = ctypes.CDLL(None, use_errno=True)


def must(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def refuse(x86_64: int, aarch64: int) -> None:
    """Install a seccomp filter, as sandboxes do: the system call of this number fails with EPERM."""
    number = {"x86_64": x86_64, "aarch64": aarch64}[platform.machine()]
    code = (
        (0x20, 0, 0, 0),  # the call's number
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x00050001),  # EPERM
        (0x06, 0, 0, 0x7FFF0000),  # allowed
    )
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters))
    must(libc.prctl(38, 1, 0, 0, 0))  # no new privileges
    must(libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0))


def refuse_memfd() -> None:
    refuse(319, 279)


def refuse_messages() -> None:
    """Refuse sendmsg, the only way to pass descriptors."""
    refuse(46, 211)


def become_nobody() -> None:
    """Change the user that peers see; file access stays root's, for torch's file store."""
    os.setresuid(65534, 65534, 0)
    libc.setfsuid(0)


def leave_the_network() -> None:
    """Enter a new network namespace, to which abstract sockets are local; open connections keep working."""
    must(libc.unshare(0x40000000))


def leave_little_address_space() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


NO_TCP = "cannot be reached by TCP|refused a TCP connection|did not answer by TCP"
FAULTS: dict[str, tuple[Callable[[], None], dict[str, str]]] = {  # and why each transport is rejected
    "memfd": (refuse_memfd, dict.fromkeys(("shm", "tcp"), "memfd_create: Operation not permitted")),
    "descriptor passing": (
        refuse_messages,
        {"shm": "the arena's descriptor could not be sent: |hung up", "tcp": NO_TCP},
    ),
    "address space": (
        leave_little_address_space,
        dict.fromkeys(("shm", "tcp"), "an arena of .* bytes: Cannot allocate memory|mapping"),
    ),
    "user": (become_nobody, {"shm": "user 65534"}),
    "namespace": (leave_the_network, {"shm": "ranks 0 and 1 are on different hosts", "tcp": NO_TCP}),
}


def expect_rejected(chosen: spar.Transport, why: dict[str, str]) -> None:
    """Expect tcp in place of shm, and torch where that fails, too."""
    rejected = dict(chosen.rejected)
    assert [chosen.name, *rejected] == (
        ["torch", "shm", "tcp", "push", "nccl"] if "tcp" in why else ["tcp", "shm"]
    )
    for name, text in why.items():
        assert re.search(text, rejected[name]), rejected
    if chosen.name == "tcp":
        assert (chosen.hosts, chosen.shared_memory, chosen.network) == (
            ((0,), (1,), (2,))[: chosen.world_size],
            0,
            0,
        )


def expect_fallback(rank: int, folder: Path, fault: str) -> None:
    inject, why = FAULTS[fault]
    if rank == 1:
        inject()
    y = gather(torch.full((3,), float(rank)), None, 0)
    assert_same(y, torch.arange(3.0).repeat_interleave(3))
    chosen = spar.transport()
    expect_rejected(chosen, why)
    told_all: list[object] = [None] * 3
    dist.all_gather_object(told_all, (chosen.reason, chosen.rejected))
    assert all(one == told_all[0] for one in told_all)
    spar.close()
    dist.barrier()
    gather(torch.zeros(1), None, 0)  # the next set-up fails in the same way
    expect_rejected(spar.transport(), why)
    allocated = spar.memory_stats()["arena.allocated_bytes"]
    assert 0 < allocated < 4096 if chosen.name == "tcp" else allocated == 0, "the mailbox alone"


class Warnings(logging.Handler):
    """Keeps what spar logs from the level of warnings on, without a setting."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("spar").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def expect_warning(rank: int, folder: Path, fault: str) -> None:
    inject, why = FAULTS[fault]
    logged = Warnings()
    if rank == 1:
        inject()
    for _ in range(2):  # once for the group's set-up
        gather(torch.zeros(1), None, 0)
    expect_rejected(spar.transport(), why)
    assert len(logged.texts) == (rank == 0), logged.texts
    lost, where = ("tcp", "are on several hosts") if fault == "namespace" else ("shm", "share this host")
    for text in logged.texts:
        assert re.search(why[lost], text) and f"group '0': its 2 ranks {where}" in text
        assert text.endswith(f"SPAR_TRANSPORT={spar.transport().name}")


def expect_no_warning(rank: int, folder: Path) -> None:
    logged = Warnings()
    gather(torch.zeros(1), None, 0)
    assert spar.transport().name == os.environ["EXPECTED"] and logged.texts == []


def expect_forced_error(rank: int, folder: Path, fault: str) -> None:
    inject, why = FAULTS[fault]
    if rank == 1:
        inject()
    with pytest.raises(spar.TransportError, match=why[os.environ["SPAR_TRANSPORT"]]) as caught:
        gather(torch.zeros(3), None, 0)
    assert "SPAR_TRANSPORT" in str(caught.value)


each_fault = pytest.mark.parametrize(
    "fault",
    [
        "memfd",
        "descriptor passing",
        "address space",
        *(pytest.param(name, marks=root) for name in ("user", "namespace")),
    ],
)


@each_fault
def test_all_ranks_fall_back_together(tmp_path: Path, fault: str) -> None:
    assert finish(start(expect_fallback, 3, tmp_path, fault, set_up=False), 60) == [0, 0, 0]


@each_fault
def test_lost_shm_is_logged_once_on_one_rank(tmp_path: Path, fault: str) -> None:
    assert finish(start(expect_warning, 2, tmp_path, fault, set_up=False), 60) == [0, 0]


@pytest.mark.parametrize(
    ("setting", "expected"), [("", "shm"), ("torch", "torch"), ("tcp", "tcp"), ("^shm", "tcp")]
)
def test_transport_by_choice_is_not_logged(tmp_path: Path, setting: str, expected: str) -> None:
    environment = {"SPAR_TRANSPORT": setting, "EXPECTED": expected}
    ranks = start(expect_no_warning, 2, tmp_path, set_up=False, **environment)
    assert finish(ranks, 60) == [0, 0]


def call_over_mpi(rank: int, folder: Path) -> None:
    """Ranks on hosts of their own, whose process group says that MPI moves CPU tensors."""
    logged = Warnings()
    setup._host_id = lambda: bytes([1 + rank]) * 16
    setup.backend_name = lambda group, device: "mpi"
    assert_same(gather(torch.full((1,), float(rank)), None, 0), torch.arange(2.0))
    chosen = spar.transport()
    assert (chosen.name, chosen.network, logged.texts) == (os.environ["EXPECTED"], 1.0, [])
    if chosen.name == "torch":
        assert dict(chosen.rejected)["tcp"] == "the group's backend for CPU tensors is mpi"


@pytest.mark.parametrize(("setting", "expected"), [("", "torch"), ("tcp", "tcp")])
def test_another_backend_than_gloo_moves_bytes_between_hosts(
    tmp_path: Path, setting: str, expected: str
) -> None:
    """The user chose it for its network, unless SPAR_TRANSPORT says otherwise."""
    environment = {"SPAR_TRANSPORT": setting, "EXPECTED": expected}
    assert finish(start(call_over_mpi, 2, tmp_path, set_up=False, **environment), 60) == [0, 0]


def exclude_torch_over_mpi(rank: int, folder: Path) -> None:
    setup._host_id = lambda: bytes([1 + rank]) * 16
    setup.backend_name = lambda group, device: "mpi"
    reason = r"tcp: the group's backend for CPU tensors is mpi.*; unset it, or set it to the transport to use"
    text = rf"SPAR_TRANSPORT=\^torch leaves no transport for cpu tensors \(.*{reason}"
    with pytest.raises(spar.TransportError, match=text):
        gather(torch.zeros(1), None, 0)
    with pytest.raises(spar.SparError):  # without a wait for a peer
        gather(torch.zeros(1), None, 0)


def test_no_transport_beside_another_backend_than_gloo_is_an_error(tmp_path: Path) -> None:
    """^torch leaves none between hosts: the error says why, and which setting helps."""
    ranks = start(exclude_torch_over_mpi, 2, tmp_path, set_up=False, SPAR_TRANSPORT="^torch")
    assert finish(ranks, 60) == [0, 0]


def use_small_dev_shm(rank: int, folder: Path) -> None:
    """Mount a /dev/shm of 64 MB, as containers have; memfd memory does not count towards it."""
    private, new_namespace = 0x44000, 0x20000
    must(libc.unshare(new_namespace))
    must(libc.mount(b"none", b"/", None, private, None))
    must(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m"))
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    y = gather(torch.full((10 << 20,), float(rank)), None, 0)
    assert y.nbytes == 80 << 20 and spar.transport().name == "shm"
    assert_same(y[:: 10 << 20], torch.arange(2.0))


@root
def test_small_dev_shm_does_not_limit_shm(tmp_path: Path) -> None:
    assert finish(start(use_small_dev_shm, 2, tmp_path, set_up=False), 60) == [0, 0]


@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        pytest.param(fault, name, marks=root if fault in ("user", "namespace") else ())
        for fault, (_, why) in FAULTS.items()
        for name in why
    ],
)
def test_forced_transport_that_fails_raises_on_all_ranks(tmp_path: Path, fault: str, transport: str) -> None:
    ranks = start(expect_forced_error, 2, tmp_path, fault, set_up=False, SPAR_TRANSPORT=transport)
    assert finish(ranks, 60) == [0, 0]


# ---- no descriptors left ----


@contextlib.contextmanager
def free_descriptors(left: int) -> Iterator[None]:
    """Limit the number of descriptors that this process can still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    plugs = [os.open("/dev/null", os.O_RDONLY) for _ in set(range(max(used) + 1)) - used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + left, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for plug in plugs:
        os.close(plug)


def few_descriptors(rank: int, folder: Path) -> None:
    """With 0, 1, 2, ... descriptors left, each stage of the set-up fails once, and none leaks one."""
    seen = set()
    before = sorted(os.listdir("/proc/self/fd"))
    for left in range(8):
        group = dist.new_group([0, 1])
        dist.barrier(group)
        with free_descriptors(left) if rank == 1 else contextlib.nullcontext():
            y = gather(torch.full((3,), float(rank)), group, 0)
        assert_same(y, torch.tensor([0.0] * 3 + [1.0] * 3))
        chosen = spar.transport(group)
        seen.add(chosen.name)
        both: list[object] = [None, None]
        dist.all_gather_object(both, (chosen.name, chosen.reason, chosen.rejected))
        assert both[0] == both[1]
        if chosen.name == "torch":
            assert "rank" in chosen.rejected[0][1], chosen
        report(folder, 10 * (rank + 1) + left, f"{chosen.rejected}")
    assert seen == {"torch", "shm"}
    assert len(os.listdir("/proc/self/fd")) < len(before) + 60  # the groups' own connections


def set_up_twice(rank: int, folder: Path, left: int) -> None:
    """After a set-up that failed at any stage, the next one succeeds."""
    group, fresh = (dist.new_group([0, 1]) for _ in range(2))
    dist.barrier()
    with free_descriptors(left) if rank == 1 else contextlib.nullcontext():
        gather(torch.zeros(1), group, 0)
    gather(torch.zeros(1), fresh, 0)
    assert spar.transport(fresh).name == "shm", spar.transport(fresh)
    dist.barrier()


def test_set_up_succeeds_after_a_failed_one(tmp_path: Path) -> None:
    worlds = []
    for left in range(6):
        (tmp_path / str(left)).mkdir()
        worlds.append(start(set_up_twice, 2, tmp_path / str(left), left, set_up=False))
    assert [finish(world, 60) for world in worlds] == [[0, 0]] * 6


def test_set_up_with_few_descriptors(tmp_path: Path) -> None:
    assert finish(start(few_descriptors, 2, tmp_path, set_up=False), 90) == [0, 0]
    texts = {await_report(tmp_path, 20 + left, 1) for left in range(8)}
    assert len(texts) >= 3, "several stages have failed"


@root
@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 0), ("50000 100000", 1), ("100000 100000", 1), ("rubbish", 0), ("", 0)],
)
def test_core_count_follows_the_cgroup_quota(tmp_path: Path, quota: str, cores: int) -> None:
    """A quota below one core counts as one; without a readable quota, the affinity mask decides."""
    from helpers import core_abi

    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"31 23 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    library, child = core_abi.library(), os.fork()
    if child == 0:
        must(libc.unshare(0x00020000))  # a private mount namespace
        must(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))
        for name in ("cgroup", "mountinfo"):
            shown = f"/proc/{os.getpid()}/{name}".encode()
            must(libc.mount(str(tmp_path / name).encode(), shown, None, 0x1000, None))
        os._exit(library.spar_cores())
    expected = cores or len(os.sched_getaffinity(0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected


# ---- strangers ----


def contact_by_strangers(rank: int, folder: Path) -> None:
    """Strangers that send junk or nothing to a rank's socket, or hang up, have no effect."""
    _C.peer_info()  # the rank listens from now on
    dist.barrier()
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@spar-" in line]
    mine = [name for name in names if f"spar-{os.getpid()}-" in name]
    assert len(mine) == 1
    calls = []
    for what in (b"", b"x", b"spar 1" + b"\0" * 200, os.urandom(64), None):
        call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call.connect("\0" + mine[0][1:])
        if what is None:
            call.close()
        else:
            call.send(what)
        calls.append(call)
    with open("/dev/null") as null:  # a descriptor that is not an arena
        call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call.connect("\0" + mine[0][1:])
        socket.send_fds(call, [b"spar 1\0\0" + b"\1" * 40], [null.fileno()])
        calls.append(call)
    y = gather(torch.full((2,), float(rank)), None, 0)
    assert_same(y, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert spar.transport().name == "shm"
    for call in calls:
        call.close()


def test_strangers_do_not_disturb_ranks(tmp_path: Path) -> None:
    assert finish(start(contact_by_strangers, 2, tmp_path, set_up=False), 60) == [0, 0]


def stop_in_set_up(rank: int, folder: Path) -> None:
    """If a rank stops in the set-up before it connects, all raise at the timeout."""
    if rank == 1:
        comm = group_of(process_group(None, "test"))
        own = bytes(8) + _C.peer_info(setup._host_id())
        stages.all_gather(comm, own, "peer info", "gather", torch.device("cpu"), comm.deadline())
        report(folder, 1, "")
        time.sleep(60)
    begin = time.monotonic()
    with pytest.raises(spar.ExchangeTimeoutError):
        gather(torch.zeros(1), None, 0)
    assert time.monotonic() - begin < 4
    with pytest.raises(spar.GroupBrokenError):
        gather(torch.zeros(1), None, 0)


def test_rank_stopped_in_set_up_times_out(tmp_path: Path) -> None:
    ranks = start(stop_in_set_up, 2, tmp_path, set_up=False, SPAR_TIMEOUT="2")
    assert finish(ranks[:1], 30) == [0]
    ranks[1].kill()
