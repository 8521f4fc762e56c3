# SPDX-License-Identifier: Apache-2.0
"""spar.utils.StatelessProcessGroup: objects, barriers, creation, and ranks that are missing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from helpers.processes import await_report, finish, report, start
from helpers.stateless import answers, concurrently, free_port, groups, is_free, reserved

import spar
from spar.utils import StatelessProcessGroup

pytestmark = pytest.mark.waits

HOSTS = ["127.0.0.1", "::1", "localhost"]


def interrupt_in(seconds: float) -> Any:
    """Raise KeyboardInterrupt, as Ctrl-C does, after `seconds`."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.fixture(autouse=True)
def _cancel_alarm() -> Iterator[None]:
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


# ---- objects ----


def check_objects(rank: int, folder: Path, host: str, port: int) -> None:
    world = 3
    group = StatelessProcessGroup.create(host, port, rank, world)
    for n in range(3):  # to all ranks, itself included; received from the last sender first
        for dst in range(world):
            group.send_obj({"from": rank, "to": dst, "n": n}, dst)
    for src in reversed(range(world)):
        for n in range(3):
            assert group.recv_obj(src) == {"from": src, "to": rank, "n": n}
    assert group.send_dst_counter == group.recv_src_counter == {0: 3, 1: 3, 2: 3}
    for src in range(world):
        assert group.broadcast_obj([src] if rank == src else None, src) == [src]
        assert group.all_gather_obj(rank * 10) == [0, 10, 20]
    assert group.broadcast_send_counter == 4
    assert group.broadcast_recv_src_counter == {peer: 0 if peer == rank else 4 for peer in range(world)}
    large = torch.arange(5 << 20)  # 40 MB
    assert torch.equal(group.broadcast_obj(large if rank == 1 else None, 1), large)
    assert not dist.is_initialized()
    # another group, with other ranks for the same processes
    group.barrier()
    port = group.broadcast_obj(free_port() if rank == 0 else None, 0)
    again = StatelessProcessGroup.create("127.0.0.1", port, 2 - rank, world)
    assert again.all_gather_obj(rank) == [2, 1, 0]
    assert group.all_gather_obj(rank) == [0, 1, 2]
    assert (group.socket is None, again.socket is None) == (rank != 0, rank != 2)
    again.barrier()
    group.barrier()


@pytest.mark.parametrize("host", HOSTS)
def test_send_recv_broadcast_and_all_gather(tmp_path: Path, host: str) -> None:
    port = free_port(host)
    assert finish(start(check_objects, 3, tmp_path, host, port, initialize=False), 60) == [0] * 3


def test_sends_to_one_rank_do_not_collide() -> None:
    a, b, c = groups(3)
    a.send_obj("from 0", 2)
    b.send_obj("from 1", 2)
    assert (c.recv_obj(1), c.recv_obj(0)) == ("from 1", "from 0")


def test_unpicklable_objects_are_not_counted() -> None:
    a, b = groups()
    for call in (lambda: a.send_obj(lambda: 1, 1), lambda: a.broadcast_obj(lambda: 1, 0)):
        with pytest.raises(Exception, match="pickle"):
            call()
    a.send_obj(1, 1)
    a.broadcast_obj(2, 0)
    assert (b.recv_obj(0), b.broadcast_obj(None, 0)) == (1, 2)


def test_expire_data() -> None:
    a, b = groups(data_expiration_seconds=1, store_timeout=3)
    a.send_obj("old", 1)
    a.broadcast_obj("old", 0)
    assert [key for key, _ in a.entries] == ["sent/0/1/0", "broadcast/0/0"]
    a.expire_data()
    assert len(a.entries) == 2, "not expired yet"
    time.sleep(1.1)
    a.broadcast_obj("new", 0)  # each send expires old objects
    assert [key for key, _ in a.entries] == ["broadcast/0/1"]
    for call in (lambda: b.recv_obj(0), lambda: b.broadcast_obj(None, 0)):
        with pytest.raises(RuntimeError, match="rank 0 sent nothing within 3 s"):
            call()
    b.broadcast_recv_src_counter[0] += 1
    assert b.broadcast_obj(None, 0) == "new"


def test_received_objects_are_deleted() -> None:
    a, b = groups()
    before = a.store.num_keys()
    for n in range(20):
        a.send_obj(n, 1)
        assert b.recv_obj(0) == n
    assert a.store.num_keys() == before


def test_recv_obj_times_out_and_names_the_sender() -> None:
    a, b = groups(store_timeout=1)
    begin = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"recv_obj on rank 1 of 2: rank 0 sent nothing within 1 s"
    ) as caught:
        b.recv_obj(0)
    assert 0.9 < time.monotonic() - begin < 2
    assert isinstance(caught.value, spar.SparError)
    assert (caught.value.op, caught.value.rank, caught.value.ranks) == ("recv_obj", 1, (0,))
    a.send_obj("late", 1)
    assert b.recv_obj(0) == "late", "a timeout does not skip an object"


def test_ctrl_c_interrupts_waits() -> None:
    _, b = groups()
    port = free_port()
    for call in (
        lambda: b.recv_obj(0),
        lambda: b.barrier(60),
        lambda: StatelessProcessGroup.create("127.0.0.1", port, 1, 2),
        lambda: StatelessProcessGroup.create("127.0.0.1", port, 0, 2),
    ):
        begin = time.monotonic()
        interrupt_in(0.3)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.monotonic() - begin < 1.5


# ---- barrier ----


def check_100_barriers(rank: int, folder: Path, port: int) -> None:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 4)
    keys = []
    for n in range(100):
        group.store.add(f"arrived {n}", 1)
        group.barrier()
        assert group.store.add(f"arrived {n}", 0) == 4, "all ranks arrived"
        keys.append(group.store.num_keys() - n)
    assert max(keys) < min(keys) + 16, "barriers leave nothing behind"
    group.barrier()


def test_100_barriers_of_4_ranks(tmp_path: Path) -> None:
    ranks = start(check_100_barriers, 4, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 4


def check_missing_rank(rank: int, folder: Path, port: int) -> None:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 4)
    group.barrier()
    if rank == 2:
        for peer in (0, 1, 3):
            await_report(folder, peer)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"barrier on rank \d of 4: rank 2 did not arrive while") as caught:
        group.barrier(timeout=1)
    waited = time.monotonic() - begin
    assert waited < 0.5 if rank == 2 else 0.9 < waited < 2, waited
    assert isinstance(caught.value, spar.SparError) and caught.value.ranks == (2,)
    report(folder, rank, "")
    group.barrier()  # the next barrier starts anew
    assert group.all_gather_obj(rank) == [0, 1, 2, 3]
    group.barrier()


def test_barrier_times_out_and_names_missing_ranks(tmp_path: Path) -> None:
    ranks = start(check_missing_rank, 4, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 4


def test_shortest_timeout_ends_the_barrier_on_all_ranks() -> None:
    a, b, _, _ = groups(4)
    begin = time.monotonic()
    errors = concurrently([lambda: a.barrier(60), lambda: b.barrier(0.5)])
    assert 0.4 < time.monotonic() - begin < 1.5
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        text = "ranks 2, 3 did not arrive while rank 1 waited 0.5 s"
        assert str(error) == f"barrier on rank {rank} of 4: {text}"


def test_barrier_names_a_rank_that_does_not_leave() -> None:
    a, b = groups()
    b.store.set("barrier/1/1", "")  # rank 1 arrives, then dies
    b.store.add("barrier/1/present", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 arrived, but did not leave within 0.5 s") as caught:
        a.barrier(0.5)
    assert isinstance(caught.value, spar.SparError) and caught.value.ranks == (1,)


class Pausing:
    """A store that blocks before its n-th call until `resume` is set. Polls of one key count as one call."""

    def __init__(self, store: Any, steps: int, resume: threading.Event) -> None:
        self.store, self.steps, self.resume = store, steps, resume
        self.previous: Any = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.store, name)

        def call(*args: Any) -> Any:
            self.steps -= (name, args) != self.previous
            self.previous = (name, args)
            if self.steps < 0:
                assert self.resume.wait(20)
            return function(*args)

        return call


@pytest.mark.parametrize("slow", [0, 1])
def test_barrier_agrees_wherever_a_rank_pauses(slow: int) -> None:
    """If a rank pauses beyond the other's timeout, both pass or both raise, at the next barrier at latest."""
    outcomes = set()
    calls = 8  # at least as many as a rank makes that the other waits for
    for steps in range(calls):
        limit = 0.2 if steps < calls - 1 else 5  # the last pause is one that no rank waits for
        pair = groups(2)
        resume = threading.Event()
        pair[slow].store = cast(Any, Pausing(pair[slow].store, steps, resume))

        def fast(
            group: StatelessProcessGroup = pair[1 - slow],
            limit: float = limit,
            resume: threading.Event = resume,
        ) -> None:
            try:
                group.barrier(limit)
            finally:
                resume.set()

        first = concurrently([fast, lambda group=pair[slow]: group.barrier(5)])  # type: ignore[misc]
        second, third = (concurrently([lambda group=group: group.barrier(5) for group in pair]) for _ in "23")  # type: ignore[misc]
        passed = [error is None for error in first]
        assert all(error is None or isinstance(error, RuntimeError) for error in first), (steps, first)
        if passed[0] == passed[1]:
            assert second == [None, None], (steps, first, second)
        else:
            assert passed == [False, True] and slow == 1, (steps, first)
            for error in second:
                text = "at the previous barrier rank 1 arrived, but did not leave within 0.2 s"
                assert text in str(error), (steps, error)
        assert third == [None, None], (steps, third)
        outcomes.add(tuple(passed))
    assert outcomes == {(True, True), (False, False)} | ({(False, True)} if slow else set())


def check_lost_store(rank: int, folder: Path, port: int) -> None:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 3)
    if rank == 0:
        for peer in (1, 2):
            await_report(folder, peer)
        os._exit(0)
    calls = [
        lambda: group.barrier(30),
        lambda: group.recv_obj(0),
        lambda: group.all_gather_obj(1),
        lambda: (group.send_obj(1, 0), group.send_obj(1, 0)),
    ]
    report(folder, rank, "")
    begin = time.monotonic()
    for call in calls:
        with pytest.raises(
            RuntimeError, match=rf"on rank {rank} of 3: rank 0, which owns the store, is gone"
        ):
            call()
    assert time.monotonic() - begin < 5


def test_calls_raise_when_rank_0_is_gone(tmp_path: Path) -> None:
    ranks = start(check_lost_store, 3, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 3


# ---- create ----


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"rank": 2}, ValueError, "with world_size 2: rank is 2; expected 0 to 1"),
        ({"rank": -1}, ValueError, "rank is -1; expected 0 to 1"),
        ({"rank": "0"}, TypeError, "rank is '0'; expected an int"),
        ({"rank": True}, TypeError, "rank is True"),
        ({"world_size": 0}, ValueError, "world_size is 0; expected at least 1"),
        ({"port": 65536}, ValueError, "port is 65536; expected 1 to 65535"),
        ({"port": 0}, ValueError, "port is 0; expected 1 to 65535"),
        ({"host": ""}, ValueError, "host is ''; expected a name or an address"),
        ({"data_expiration_seconds": -1}, ValueError, "data_expiration_seconds is -1; expected at least 0"),
        ({"store_timeout": 0}, ValueError, "store_timeout is 0; expected more than 0"),
        ({"host": "192.0.2.1"}, OSError, "192.0.2.1"),  # reserved for documentation
        ({"host": "no such host"}, OSError, "not known|resolution"),
    ],
)
def test_create_rejects(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {"host": "127.0.0.1", "port": 1, "rank": 0, "world_size": 2, **arguments}
    with pytest.raises(kind, match=text):
        StatelessProcessGroup.create(**given)


def test_constructor_rejects() -> None:
    (group,) = groups(1)
    for rank, world, expires, text in (
        (1, 1, 1, "rank is 1"),
        (0, 0, 1, "world_size is 0"),
        (0, 1, -1, "is -1"),
    ):
        with pytest.raises(ValueError, match=text):
            StatelessProcessGroup(rank, world, group.store, None, expires)
    given = StatelessProcessGroup(0, 2, group.store, None, send_dst_counter={1: 5})
    assert (given.send_dst_counter, given.recv_src_counter) == ({0: 0, 1: 5}, {0: 0, 1: 0})


def test_peers_out_of_range_are_rejected() -> None:
    a, _ = groups()
    for call in (lambda: a.send_obj(1, 2), lambda: a.recv_obj(2), lambda: a.broadcast_obj(1, 2)):
        with pytest.raises(ValueError, match=r"on rank 0 of 2: (dst|src) is 2; expected 0 to 1"):
            call()
    with pytest.raises(TypeError, match="dst is None"):
        a.send_obj(1, None)  # type: ignore[arg-type]


def test_create_names_missing_ranks_and_frees_the_port() -> None:
    """The port is free even while the error is referenced."""
    port = free_port()

    def create(rank: int) -> StatelessProcessGroup:
        return StatelessProcessGroup.create("127.0.0.1", port, rank, 3, store_timeout=1)

    begin = time.monotonic()
    errors = concurrently([lambda: create(0), lambda: create(2)])
    assert time.monotonic() - begin < 3
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "rank 1 did not arrive while rank" in str(error), error
    assert is_free("127.0.0.1", port)
    error = concurrently([lambda: create(1)])[0]
    assert isinstance(error, RuntimeError)
    assert f"create on rank 1 of 3: cannot reach rank 0 at host '127.0.0.1', port {port} within 1 s" in str(
        error
    )
    assert "refused" in str(error)


def test_create_rejects_conflicting_ranks_and_world_sizes() -> None:
    port = free_port()

    def create(rank: int, world: int) -> StatelessProcessGroup:
        return StatelessProcessGroup.create("127.0.0.1", port, rank, world, store_timeout=2)

    same = concurrently([lambda: create(0, 3), lambda: create(1, 3), lambda: create(1, 3)])
    assert sum("another process is rank 1" in str(error) for error in same) == 1, same
    assert sum(isinstance(error, spar.MismatchError) for error in same) == 1, same
    assert sum("rank 2 did not arrive" in str(error) for error in same) == 2, same
    other = concurrently([lambda: create(0, 2), lambda: create(1, 4)])
    assert sum("another rank passed world_size" in str(error) for error in other) == 1, other
    assert all(isinstance(error, RuntimeError) for error in other)


def test_create_rejects_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            StatelessProcessGroup.create("127.0.0.1", port, 0, 2)


@pytest.mark.parametrize(("host", "others"), [("127.0.0.1", ["127.0.0.2", "::1"]), ("::1", ["127.0.0.1"])])
def test_rank_0_listens_on_the_given_host_only(host: str, others: list[str]) -> None:
    port = free_port(host)
    with contextlib.ExitStack() as stack:
        for other in others:
            if is_free(other, 0):  # this machine has the address
                stack.enter_context(reserved(other, port))  # binding to all interfaces would fail
        group = StatelessProcessGroup.create(host, port, 0, 1)
        assert group.socket is not None and group.socket.getsockname()[:2] == (host, port)
        assert answers(host, port)
        assert not any(answers(other, port) for other in others)
    group.barrier()
    del group
    assert is_free(host, port), "the group closes it"


def test_group_of_one_rank_needs_no_port() -> None:
    group = StatelessProcessGroup.create("127.0.0.1", 0, 0, 1)
    assert group.all_gather_obj("alone") == ["alone"]
    assert group.broadcast_obj(1, 0) == 1
    group.send_obj(2, 0)
    assert group.recv_obj(0) == 2
    group.barrier(0)
