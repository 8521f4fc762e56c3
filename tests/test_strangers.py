"""Processes that are not of the job and reach a rank's socket: they get nothing, and change nothing.

A rank's socket has an abstract name, which every process of the network namespace can read and connect to.
Attackers are children of the ranks that speak the format of csrc/hello.c without the secrets, as this user or
another one; ranks are real.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import assert_same
from test_faults import finish, start
from test_refusals import root

import spar
from spar import _C, whereabouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

gather = spar.gather_forward_split_backward

CALL, CHALLENGE, ARENA, REFUSAL, LATER = range(1, 6)
MESSAGE = struct.Struct("=8sQqQqQ16sq80s16s")
FACTS_ENDPOINT = 24 + 160 + 40 + 8 + 8  # its offset in spar_facts: then the secret
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
    facts = _C.facts()
    (found,) = _C.processes(facts)
    return found


def endpoints() -> list[Endpoint]:
    """Of all ranks, by rank; every rank listens afterwards."""
    found: list[Endpoint] = [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, own_endpoint())
    return found


def connect(to: Endpoint) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    line.connect(f"\0spar-{to[0]}-{to[1]:016x}")
    return line


def receive(line: socket.socket, seconds: float) -> tuple[bytes, int]:
    """The next message and the count of its descriptors; b"" at the connection's end, or where none comes."""
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
    """A child that attacks until the block ends; it must not have failed before."""
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
    """An exchange works, over shared memory."""
    y = gather(torch.full((2,), float(rank)), None, 0)
    assert_same(y, torch.arange(float(world)).repeat_interleave(2))
    assert spar.transport().name == "shm", spar.transport()


def begin_anew() -> None:
    """The next exchange is a set-up."""
    dist.barrier()
    spar.close()
    dist.barrier()


# ---- this user, out of the job ----


def stranger_calls(rank: int, folder: Path) -> None:
    """A process with an invented endpoint gets no descriptor and no answer that tells of the job."""
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
            begin_anew()
        if rank == 0:
            (folder / "over").touch()
        while not seen.exists():
            time.sleep(0.01)
    assert _C.connections()[2] == 0


def test_same_user_stranger_gets_no_descriptor(tmp_path: Path) -> None:
    assert finish(start(stranger_calls, 2, tmp_path, meet=False), 60) == [0, 0]


def forged_endpoints(rank: int, folder: Path) -> None:
    """Messages that claim the other rank's endpoint without its secret: later groups are on shm."""
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
    line = connect(own)  # a false proof
    line.send(message(CALL, other, own, os.urandom(16)))
    lines.append(line)
    for _ in range(3):
        begin_anew()
        expect_shm(rank)
    for line in lines:
        line.close()
    begin_anew()
    expect_shm(rank)
    assert descriptors(os.getpid()) < before + 12
    assert _C.connections()[2] == 0


def test_forged_endpoint_leaves_groups_on_shm(tmp_path: Path) -> None:
    assert finish(start(forged_endpoints, 2, tmp_path, meet=False), 60) == [0, 0]


# ---- another user ----


def flood(to: Endpoint, how: str) -> None:
    """Connections until this process is killed: up to 1,100 are held open."""
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


def begin_flood(rank: int, folder: Path, how: str, another_user: bool) -> list[Any]:
    """Attackers of both ranks, once they are at work."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    attackers = [attacker(partial(flood, to, how), another_user) for to in endpoints()]
    return attackers if rank == 0 else []


def is_flooded(rank: int, folder: Path, how: str, another_user: bool) -> None:
    before = descriptors(os.getpid())
    with contextlib.ExitStack() as stack:
        for each in begin_flood(rank, folder, how, another_user):
            stack.enter_context(each)
        time.sleep(0.3)  # the backlogs are full
        most = 0
        for _ in range(4):
            expect_shm(rank)
            most = max(most, descriptors(os.getpid()))
            begin_anew()
        expect_shm(rank)
        time.sleep(0.3)
        most = max(most, descriptors(os.getpid()))
        dist.barrier()
    spare = 4 if rank == 0 else 0  # what the flood's own test machinery has
    assert most < before + 16 + spare, (before, most)
    if another_user:
        assert _C.connections()[0] > 100
    assert _C.connections()[2] == 0
    begin_anew()
    expect_shm(rank)


@root
@pytest.mark.parametrize("how", ["descriptors", "silent", "claims"])
def test_other_user_flood_leaves_groups_on_shm(tmp_path: Path, how: str) -> None:
    assert finish(start(is_flooded, 2, tmp_path, how, True, meet=False, SPAR_TIMEOUT="40"), 90) == [0, 0]


@pytest.mark.parametrize("how", ["descriptors", "silent", "claims"])
def test_same_user_flood_leaves_groups_on_shm(tmp_path: Path, how: str) -> None:
    assert finish(start(is_flooded, 2, tmp_path, how, False, meet=False, SPAR_TIMEOUT="40"), 90) == [0, 0]


def watches_under_a_flood(rank: int, folder: Path) -> None:
    """Over torch a rank sees the other's death at once, though strangers fill its backlog."""
    with contextlib.ExitStack() as stack:
        for each in begin_flood(rank, folder, "silent", True):
            stack.enter_context(each)
        time.sleep(0.3)
        gather(torch.zeros(1), None, 0)
        assert spar.transport().name == "torch"
        assert -1 not in whereabouts._pidfds.values()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(spar.PeerLostError):
            gather(torch.zeros(1), None, 0)
        assert time.monotonic() - begin < 5


@root
def test_watch_under_other_user_flood(tmp_path: Path) -> None:
    ranks = start(watches_under_a_flood, 2, tmp_path, meet=False, SPAR_TRANSPORT="torch")
    assert finish(ranks, 60) == [0, -signal.SIGKILL]


# ---- secrets ----


def rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & (1 << 64) - 1


def siphash(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 of 128 bits."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def mix(rounds: int) -> None:
        for _ in range(rounds):
            v[0] = v[0] + v[1] & (1 << 64) - 1
            v[1] = rotated(v[1], 13) ^ v[0]
            v[0] = rotated(v[0], 32)
            v[2] = v[2] + v[3] & (1 << 64) - 1
            v[3] = rotated(v[3], 16) ^ v[2]
            v[0] = v[0] + v[3] & (1 << 64) - 1
            v[3] = rotated(v[3], 21) ^ v[0]
            v[2] = v[2] + v[1] & (1 << 64) - 1
            v[1] = rotated(v[1], 17) ^ v[2]
            v[2] = rotated(v[2], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        mix(2)
        v[0] ^= word
    v[2] ^= 0xEE
    mix(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    mix(4)
    return struct.pack("<QQ", first, v[0] ^ v[1] ^ v[2] ^ v[3])


class Member:
    """A process that a rank's facts name, played by this test, with a secret of its own."""

    def __init__(self, dials: bool, secret: bytes) -> None:
        facts = _C.facts()
        (self.rank,) = _C.processes(facts)
        self.rank_secret = facts[FACTS_ENDPOINT + 16 : FACTS_ENDPOINT + 32]
        self.secret, self.told_secret = secret, os.urandom(16)
        self.own = (1 if dials else 1 << 40, int.from_bytes(os.urandom(8), "little"))  # the lower one dials
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0spar-{self.own[0]}-{self.own[1]:016x}")
        self.listener.listen(8)
        other = struct.pack("=qQ", *self.own) + self.told_secret
        self.facts = facts + facts[:FACTS_ENDPOINT] + other + facts[FACTS_ENDPOINT + 32 :]

    def key(self) -> bytes:
        pair = struct.pack("=qQqQ", *self.own, *self.rank)
        if self.rank < self.own:
            pair = pair[16:] + pair[:16]
        own, rank = siphash(self.secret, pair), siphash(self.rank_secret, pair)
        return bytes(a ^ b for a, b in zip(own, rank, strict=True))

    def prove(self, challenges: bytes, words: bytes) -> bytes:
        return words[:-16] + siphash(self.key(), challenges + words[:-16])

    @contextlib.contextmanager
    def expected(self) -> Iterator[threading.Thread]:
        """While the rank sets a group up in which this is the other process."""
        comm = _C.comm("shm", self.facts, 0, 2, "test")
        verdict = comm.verdict
        assert verdict[:4] == bytes(4), verdict
        other = bytes(len(verdict))
        ended = threading.Thread(target=lambda: comm.connect(verdict + other, time.monotonic() + 20))
        ended.start()
        yield ended
        self.listener.close()
        ended.join(30)
        assert not ended.is_alive()
        self.verdict = comm.verdict
        comm.close()


def arena_of(length: int) -> int:
    fd = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length + 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def dials_a_rank(member: Member, recorded: list[bytes] | None = None) -> tuple[list[bytes], bytes, int]:
    """What it sent, the rank's last reply, and how many descriptors came."""
    challenge = os.urandom(16)
    line = connect(member.rank)
    first = recorded[0] if recorded else message(CALL, member.own, member.rank, challenge)
    line.send(first)
    reply, count = receive(line, 5)
    assert count == 0
    if not reply or MESSAGE.unpack(reply)[1] != CHALLENGE:
        return [first], reply, count
    theirs = MESSAGE.unpack(reply)[6]
    second = message(ARENA, member.own, member.rank, length=1 << 20)
    second = recorded[1] if recorded else member.prove(challenge + theirs, second)
    arena = arena_of(1 << 20)
    socket.send_fds(line, [second], [arena])
    os.close(arena)
    return [first, second], *receive(line, 2)


def wrong_secret_dials(rank: int, folder: Path) -> None:
    member = Member(True, os.urandom(16))
    before = descriptors(os.getpid())
    with member.expected():
        for _ in range(20):
            assert dials_a_rank(member)[1:] == (b"", 0)
        assert descriptors(os.getpid()) < before + 4
        member.secret = member.told_secret  # the right one is served, after all of those
        sent, reply, count = dials_a_rank(member)
        assert (MESSAGE.unpack(reply)[1], count) == (ARENA, 1)
        # a replay: against the connected pair, in a later set-up, and out of any
        assert dials_a_rank(member, sent)[2] == 0
    assert b"mailbox" in member.verdict  # all went well but what a stranger's arena lacks
    with member.expected():
        _, reply, count = dials_a_rank(member, sent)
        assert (reply, count) == (b"", 0)
    _, reply, count = dials_a_rank(member, sent)
    assert (reply, count) == (b"", 0)


def test_wrong_secret_and_replay_get_no_descriptor(tmp_path: Path) -> None:
    ranks = start(wrong_secret_dials, 1, tmp_path, initialize=False)
    assert finish(ranks, 90) == [0]


def wrong_secret_answers(rank: int, folder: Path, right: bool) -> None:
    member = Member(False, os.urandom(16))
    if right:
        member.secret = member.told_secret
    with member.expected():
        line, _ = member.listener.accept()
        words, count = receive(line, 5)
        assert (MESSAGE.unpack(words)[1], count) == (CALL, 0)
        challenge = os.urandom(16)
        reply = message(CHALLENGE, member.own, member.rank, challenge)
        line.send(member.prove(MESSAGE.unpack(words)[6] + challenge, reply))
        words, count = receive(line, 5)
        if right:
            assert (MESSAGE.unpack(words)[1], count) == (ARENA, 1)
        else:
            assert (words, count) == (b"", 0)
        line.close()
    assert (b"hung up" if right else b"did not prove") in member.verdict


@pytest.mark.parametrize("right", [False, True], ids=["wrong secret", "right secret"])
def test_descriptor_goes_to_proven_listener_only(tmp_path: Path, right: bool) -> None:
    ranks = start(wrong_secret_answers, 1, tmp_path, right, initialize=False)
    assert finish(ranks, 60) == [0]


def secret_is_nowhere(rank: int, folder: Path) -> None:
    """Neither in the socket's name nor in what the process logs or shows of itself."""
    facts = _C.facts()
    secret = facts[FACTS_ENDPOINT + 16 : FACTS_ENDPOINT + 32]
    assert secret not in (bytes(16), b"")
    expect_shm(rank)
    shown = Path("/proc/net/unix").read_bytes() + Path("/proc/self/maps").read_bytes()
    shown += Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
    shown += repr(spar.transport()).encode()
    assert secret not in shown and secret.hex().encode() not in shown
    assert secret[::-1].hex().encode() not in shown


def test_secret_is_not_shown(tmp_path: Path) -> None:
    assert finish(start(secret_is_nowhere, 2, tmp_path, meet=False, SPAR_LOG="debug"), 60) == [0, 0]
