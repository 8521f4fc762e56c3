# SPDX-License-Identifier: Apache-2.0
"""Processes outside the job that connect to a rank's socket: they get nothing, and change nothing.

A rank's socket has an abstract name, which every process of the network namespace can read and connect to.
Attackers are children of the ranks, of this user or another one. They send messages in the format of
csrc/ipc/handshake.c, without the secrets; the ranks are real.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import finish, start
from helpers.reference import assert_same
from test_refusals import root

import spar
from spar import _C

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's"),
    pytest.mark.spread,
]

gather = spar.gather_forward_split_backward

CALL, CHALLENGE, ARENA, REFUSAL, LATER = range(1, 6)
MESSAGE = struct.Struct("=8sQqQqQ16sq80s16s")
ENDPOINT_OFFSET = 24 + 160 + 40 + 8 + 8  # its offset in spar_peer_info; the secret follows
Endpoint = tuple[int, int]


def message(
    kind: int,
    sender: Endpoint,
    to: Endpoint,
    challenge: bytes = bytes(16),
    length: int = 0,
    proof: bytes = bytes(16),
) -> bytes:
    return MESSAGE.pack(b"spar 2", kind, *sender, *to, challenge, length, b"", proof)


def own_endpoint() -> Endpoint:
    peer_info = _C.peer_info()
    (found,) = _C.processes(peer_info)
    return found


def endpoints() -> list[Endpoint]:
    """Return the endpoints of all ranks; every rank listens afterwards."""
    found: list[Endpoint] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, own_endpoint())
    return found


def connect(to: Endpoint) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    line.connect(f"\0spar-{to[0]}-{to[1]:016x}")
    return line


def receive(line: socket.socket, seconds: float) -> tuple[bytes, int]:
    """Receive a message and its number of descriptors; b"" at a hang-up or after a timeout."""
    line.settimeout(seconds)
    try:
        data, fds, _, _ = socket.recv_fds(line, 1024, 8)
    except (TimeoutError, ConnectionError):
        return b"", 0
    for fd in fds:
        os.close(fd)
    return data, len(fds)


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def become_another_user() -> None:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


@contextlib.contextmanager
def attacker(attack: Callable[[], None], another_user: bool = False) -> Iterator[int]:
    """Run an attacking child until the block ends; it must not fail before."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if another_user:
                become_another_user()
            attack()
            status = 0
        except BaseException as error:
            print(f"attacker: {error!r}", file=sys.stderr, flush=True)
        os._exit(status)
    try:
        yield child
        ended, status = os.waitpid(child, os.WNOHANG)
        assert not ended or os.waitstatus_to_exitcode(status) == 0
        if ended:
            child = 0
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def expect_shm(rank: int, world: int = 2) -> None:
    """Check that an exchange works over shm."""
    y = gather(torch.full((2,), float(rank)), None, 0)
    assert_same(y, torch.arange(float(world)).repeat_interleave(2))
    assert spar.transport().name == "shm", spar.transport()


def reset_group() -> None:
    """Close the group, so that the next exchange sets it up again."""
    dist.barrier()
    spar.close()
    dist.barrier()


# ---- the same user, outside the job ----


def contact_by_stranger(rank: int, folder: Path) -> None:
    """A process with an invented endpoint gets no descriptor, and no answer that reveals the job."""
    ranks = endpoints()
    seen = folder / f"seen{rank}"

    def attack() -> None:
        nonce = int.from_bytes(os.urandom(8), "little")
        (folder / f"ready{rank}").touch()
        replies, end = [], time.monotonic() + 8
        while time.monotonic() < end and not (folder / "over").exists():
            with contextlib.suppress(BlockingIOError):
                line = connect(ranks[rank])
                with open("/dev/null") as null:
                    words = message(CALL, (os.getpid(), nonce), ranks[rank], os.urandom(16))
                    socket.send_fds(line, [words], [null.fileno()])
                replies.append(receive(line, 0.2))
        for data, count in replies:
            assert count == 0
            assert data == b"" or MESSAGE.unpack(data)[1] == LATER, data
        assert replies
        seen.touch()

    with attacker(attack):
        while not (folder / f"ready{1 - rank}").exists() or not (folder / f"ready{rank}").exists():
            time.sleep(0.01)
        for _ in range(3):
            expect_shm(rank)
            reset_group()
        if rank == 0:
            (folder / "over").touch()
        while not seen.exists():
            time.sleep(0.01)
    assert _C.connections()[2] == 0


def test_same_user_stranger_gets_no_descriptor(tmp_path: Path) -> None:
    assert finish(start(contact_by_stranger, 2, tmp_path, set_up=False), 60) == [0, 0]


def forge_endpoints(rank: int, folder: Path) -> None:
    """Messages claim the peer's endpoint without its secret: later groups still use shm."""
    ranks = endpoints()
    other, own = ranks[1 - rank], ranks[rank]
    before = descriptors(os.getpid())
    lines = []
    for kind in (CALL, CHALLENGE, ARENA, REFUSAL, LATER):
        line = connect(own)
        words = message(kind, other, own, os.urandom(16), 1 << 20, os.urandom(16))
        with open("/dev/null") as null:
            socket.send_fds(line, [words], [null.fileno()] * 6)
        lines.append(line)
    expect_shm(rank)
    line = connect(own)  # an invalid proof
    line.send(message(CALL, other, own, os.urandom(16)))
    lines.append(line)
    for _ in range(3):
        reset_group()
        expect_shm(rank)
    for line in lines:
        line.close()
    reset_group()
    expect_shm(rank)
    assert descriptors(os.getpid()) < before + 12
    assert _C.connections()[2] == 0


def test_forged_endpoint_leaves_groups_on_shm(tmp_path: Path) -> None:
    assert finish(start(forge_endpoints, 2, tmp_path, set_up=False), 60) == [0, 0]


# ---- another user ----


def flood(to: Endpoint, how: str) -> None:
    """Open connections until this process is killed; hold up to 1,100 open."""
    null = os.open("/dev/null", os.O_RDONLY)
    held: list[socket.socket] = []
    forged = message(CALL, (to[0] + 1, 5), to, os.urandom(16))
    for n in itertools.count():
        try:
            line = connect(to)
        except (BlockingIOError, ConnectionError):
            time.sleep(0.001)
            continue
        with contextlib.suppress(OSError):
            if how == "descriptors":
                socket.send_fds(line, [b"" if n % 2 else forged], [null] * 4)
            elif how == "claims":
                line.send(forged)
        held.append(line)
        if len(held) > 1100:
            held.pop(0).close()


def start_flood(rank: int, folder: Path, how: str, another_user: bool) -> list[Any]:
    """Start attackers of both ranks, and wait until they are active."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    attackers = [attacker(partial(flood, to, how), another_user) for to in endpoints()]
    return attackers if rank == 0 else []


def exchange_under_flood(rank: int, folder: Path, how: str, another_user: bool) -> None:
    before = descriptors(os.getpid())
    with contextlib.ExitStack() as stack:
        for each in start_flood(rank, folder, how, another_user):
            stack.enter_context(each)
        time.sleep(0.3)  # the backlogs are full
        most = 0
        for _ in range(4):
            expect_shm(rank)
            most = max(most, descriptors(os.getpid()))
            reset_group()
        expect_shm(rank)
        time.sleep(0.3)
        most = max(most, descriptors(os.getpid()))
        limit = time.monotonic() + 20
        while another_user and _C.connections()[0] <= 100 and time.monotonic() < limit:
            time.sleep(0.05)  # on a busy machine the flood is slow
        dist.barrier()
    spare = 4 if rank == 0 else 0  # the descriptors of the test itself
    assert most < before + 16 + spare, (before, most)
    if another_user:
        assert _C.connections()[0] > 100
    assert _C.connections()[2] == 0
    reset_group()
    expect_shm(rank)


@root
@pytest.mark.parametrize("how", ["descriptors", "silent", "claims"])
def test_other_user_flood_leaves_groups_on_shm(tmp_path: Path, how: str) -> None:
    assert finish(
        start(exchange_under_flood, 2, tmp_path, how, True, set_up=False, SPAR_TIMEOUT="40"), 90
    ) == [0, 0]


@pytest.mark.parametrize("how", ["descriptors", "silent", "claims"])
def test_same_user_flood_leaves_groups_on_shm(tmp_path: Path, how: str) -> None:
    assert finish(
        start(exchange_under_flood, 2, tmp_path, how, False, set_up=False, SPAR_TIMEOUT="40"), 90
    ) == [0, 0]


def watch_under_flood(rank: int, folder: Path) -> None:
    """Over torch, a rank detects its peer's death at once while strangers fill its backlog."""
    with contextlib.ExitStack() as stack:
        for each in start_flood(rank, folder, "silent", True):
            stack.enter_context(each)
        time.sleep(0.3)
        gather(torch.zeros(1), None, 0)
        assert spar.transport().name == "torch"
        assert "published call 1" in spar.debug()  # it has mailboxes
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(spar.PeerLostError):
            gather(torch.zeros(1), None, 0)
        assert time.monotonic() - begin < 5


@root
def test_watch_under_other_user_flood(tmp_path: Path) -> None:
    ranks = start(watch_under_flood, 2, tmp_path, set_up=False, SPAR_TRANSPORT="torch")
    assert finish(ranks, 60) == [0, -signal.SIGKILL]
