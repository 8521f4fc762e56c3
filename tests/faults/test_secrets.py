# SPDX-License-Identifier: Apache-2.0
"""The secrets that authenticate a job's processes to each other, tested with a simulated process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes import finish, start
from test_strangers import (
    ARENA,
    CALL,
    CHALLENGE,
    ENDPOINT_OFFSET,
    MESSAGE,
    connect,
    descriptors,
    expect_shm,
    message,
    receive,
)

import spar
from spar import _C

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's"),
    pytest.mark.waits,
    pytest.mark.spread,
]


def rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & (1 << 64) - 1


def siphash(key: bytes, data: bytes) -> bytes:
    """Compute SipHash-2-4-128."""
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
    """A simulated process in a rank's peer info, with its own secret."""

    def __init__(self, dials: bool, secret: bytes) -> None:
        peer_info = _C.peer_info()
        (self.rank,) = _C.processes(peer_info)
        self.rank_secret = peer_info[ENDPOINT_OFFSET + 16 : ENDPOINT_OFFSET + 32]
        self.secret, self.told_secret = secret, os.urandom(16)
        self.served: socket.socket | None = None
        self.own = (
            1 if dials else 1 << 40,
            int.from_bytes(os.urandom(8), "little"),
        )  # the lower endpoint dials
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0spar-{self.own[0]}-{self.own[1]:016x}")
        self.listener.listen(8)
        other = struct.pack("=qQ", *self.own) + self.told_secret
        self.peer_info = peer_info + peer_info[:ENDPOINT_OFFSET] + other + peer_info[ENDPOINT_OFFSET + 32 :]

    def key(self) -> bytes:
        pair = struct.pack("=qQqQ", *self.own, *self.rank)
        if self.rank < self.own:
            pair = pair[16:] + pair[:16]
        own, rank = siphash(self.secret, pair), siphash(self.rank_secret, pair)
        return bytes(a ^ b for a, b in zip(own, rank, strict=True))

    def prove(self, challenges: bytes, words: bytes) -> bytes:
        return words[:-16] + siphash(self.key(), challenges + words[:-16])

    @contextlib.contextmanager
    def expected(self, limit: float = 20) -> Iterator[threading.Thread]:
        """Run the block while the rank sets a group up with this process, for at most `seconds`."""
        comm = _C.comm("shm", self.peer_info, 0, 2, "test")
        result = comm.setup_result
        assert result[:4] == bytes(4), result
        other = bytes(len(result))
        ended = threading.Thread(target=lambda: comm.connect(result + other, time.monotonic() + limit))
        ended.start()
        yield ended
        self.listener.close()
        ended.join(30)
        assert not ended.is_alive()
        self.setup_result = comm.setup_result
        comm.close()


def arena_of(length: int) -> int:
    fd = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length + 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def dial_rank(
    member: Member, recorded: list[bytes] | None = None, seconds: float = 5
) -> tuple[list[bytes], bytes, int]:
    """Dial the rank; return what was sent, the rank's last reply and the number of descriptors received."""
    challenge = os.urandom(16)
    line = connect(member.rank)
    first = recorded[0] if recorded else message(CALL, member.own, member.rank, challenge)
    line.send(first)
    reply, count = receive(line, seconds)
    assert count == 0
    if not reply or MESSAGE.unpack(reply)[1] != CHALLENGE:
        return [first], reply, count
    theirs = MESSAGE.unpack(reply)[6]
    second = message(ARENA, member.own, member.rank, length=1 << 20)
    second = recorded[1] if recorded else member.prove(challenge + theirs, second)
    arena = arena_of(1 << 20)
    with contextlib.suppress(BrokenPipeError):  # the rank's set-up ended meanwhile, and it hung up
        socket.send_fds(line, [second], [arena])
    os.close(arena)
    reply, count = receive(line, 2)
    if count:
        member.served = line  # or the rank may see the hang-up before it looks at the arena
    return [first, second], reply, count


def dial_with_wrong_secret(rank: int, folder: Path) -> None:
    member = Member(True, os.urandom(16))
    before = descriptors(os.getpid())
    with member.expected():
        for _ in range(20):
            assert dial_rank(member)[1:] == (b"", 0)
        assert descriptors(os.getpid()) < before + 4
        member.secret = member.told_secret  # a valid process is served afterwards
        sent, reply, count = dial_rank(member)
        assert (MESSAGE.unpack(reply)[1], count) == (ARENA, 1)
        # a replay: to the connected pair, in a later set-up, and outside any
        assert dial_rank(member, sent)[2] == 0
    assert b"mailbox" in member.setup_result  # the handshake succeeds, but the arena has no mailbox
    with member.expected(4):  # a replay fails
        _, reply, count = dial_rank(member, sent)
        assert (reply, count) == (b"", 0)
    _, reply, count = dial_rank(member, sent, seconds=1)
    assert (reply, count) == (b"", 0)


def test_wrong_secret_and_replay_get_no_descriptor(tmp_path: Path) -> None:
    ranks = start(dial_with_wrong_secret, 1, tmp_path, initialize=False)
    assert finish(ranks, 90) == [0]


def answer_with_wrong_secret(rank: int, folder: Path, right: bool) -> None:
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
    assert (b"hung up" if right else b"authentication failed") in member.setup_result


@pytest.mark.parametrize("right", [False, True], ids=["wrong secret", "right secret"])
def test_descriptor_goes_to_proven_listener_only(tmp_path: Path, right: bool) -> None:
    ranks = start(answer_with_wrong_secret, 1, tmp_path, right, initialize=False)
    assert finish(ranks, 60) == [0]


def search_for_secret(rank: int, folder: Path) -> None:
    """The secret is neither in the socket's name nor in anything that the process logs or exposes."""
    peer_info = _C.peer_info()
    secret = peer_info[ENDPOINT_OFFSET + 16 : ENDPOINT_OFFSET + 32]
    assert secret not in (bytes(16), b"")
    expect_shm(rank)
    shown = Path("/proc/net/unix").read_bytes() + Path("/proc/self/maps").read_bytes()
    shown += Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
    shown += repr(spar.transport()).encode()
    assert secret not in shown and secret.hex().encode() not in shown
    assert secret[::-1].hex().encode() not in shown


def test_secret_is_not_shown(tmp_path: Path) -> None:
    assert finish(start(search_for_secret, 2, tmp_path, set_up=False, SPAR_LOG="debug"), 60) == [0, 0]
