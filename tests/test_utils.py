"""spar.utils, by its entries: arithmetic, StatelessProcessGroup, groups without global state."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from reference import assert_same, cells
from test_faults import finish, start, tell, told

import spar
from spar import utils
from spar.utils import StatelessProcessGroup, get_pp_indices

HOSTS = ["127.0.0.1", "::1", "localhost"]


def free_port(host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as server:
            return int(server.getsockname()[1])
    except OSError as error:
        pytest.skip(f"this host has no {host}: {error}")


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def groups(world: int = 2, **settings: Any) -> list[StatelessProcessGroup]:
    """A group whose ranks are all here, made by threads: for what needs no second process."""
    port = free_port()
    with ThreadPoolExecutor(world) as threads:
        made = [
            threads.submit(StatelessProcessGroup.create, "127.0.0.1", port, rank, world, **settings)
            for rank in range(world)
        ]
        return [future.result() for future in made]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises, where they wait for one another."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(caught, calls))


def interrupt_in(seconds: float) -> Any:
    """A signal that raises, as Ctrl-C does."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


# ---- names ----


def test_every_name() -> None:
    assert set(utils.__all__) == {
        "USE_SCHED_YIELD",
        "StatelessProcessGroup",
        "divide",
        "ensure_divisibility",
        "get_pp_indices",
        "init_gloo_process_group",
        "sched_yield",
        "split_tensor_along_last_dim",
        "stateless_destroy_torch_distributed_process_group",
        "stateless_init_torch_distributed_process_group",
    }


# ---- sched_yield ----


@pytest.mark.parametrize(
    ("version", "expected"),
    [((3, 10, 7), False), ((3, 10, 8), True), ((3, 11, 0), False), ((3, 11, 1), True), ((3, 14, 0), True)],
)
def test_use_sched_yield(version: tuple[int, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(utils.__file__).with_name("arithmetic.py").read_text()
    monkeypatch.setattr(sys, "version_info", (*version, "final", 0))
    names: dict[str, Any] = {"__name__": "spar.utils.copy", "__package__": "spar.utils"}
    exec(compile(source, "arithmetic.py", "exec"), names)
    assert names["USE_SCHED_YIELD"] is expected


def test_sched_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "sched_yield", lambda: calls.append("yield"), raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(f"sleep {seconds}"))
    for use in (True, False):
        monkeypatch.setattr(utils.arithmetic, "USE_SCHED_YIELD", use)
        utils.sched_yield()
    assert calls == ["yield", "sleep 0"]


# ---- divide, ensure_divisibility, split_tensor_along_last_dim ----


def test_divide() -> None:
    assert [utils.divide(n, 4) for n in (0, 4, 12, -8)] == [0, 1, 3, -2]
    utils.ensure_divisibility(12, 4)
    for function in (utils.divide, utils.ensure_divisibility):
        for denominator in (5, 0):
            with pytest.raises(ValueError, match=f"^12 is not divisible by {denominator}$"):
                function(12, denominator)


def test_split_tensor_along_last_dim() -> None:
    x = cells((2, 3, 6), torch.float32)
    for contiguous in (False, True):
        parts = utils.split_tensor_along_last_dim(x, 3, contiguous)
        assert len(parts) == 3
        for n, part in enumerate(parts):
            assert_same(part, x[..., 2 * n : 2 * n + 2])
            assert part.is_contiguous() is contiguous
            assert (part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) is not contiguous
    assert [list(p.shape) for p in utils.split_tensor_along_last_dim(torch.zeros(2, 0), 3)] == [[2, 0]] * 3
    for tensor, partitions, text in (
        (x, 4, "6 in its last dim; expected a multiple of 4"),
        (x, 0, "num_partitions is 0; expected at least 1"),
        (torch.tensor(1.0), 1, "no dims"),
    ):
        with pytest.raises(ValueError, match=text):
            utils.split_tensor_along_last_dim(tensor, partitions)


# ---- get_pp_indices ----


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (4, [(0, 1), (1, 3), (3, 4)]),
        (5, [(0, 2), (2, 4), (4, 5)]),
        (3, [(0, 2), (2, 3)]),
        (7, [(0, 7)]),
        (2, [(0, 0), (0, 1), (1, 2), (2, 2)]),
    ],
)
def test_get_pp_indices(layers: int, expected: list[tuple[int, int]]) -> None:
    assert [get_pp_indices(layers, rank, len(expected)) for rank in range(len(expected))] == expected


def test_get_pp_indices_counts_back_from_the_one_before_the_last() -> None:
    for size in range(1, 9):
        for layers in range(30):
            sizes = [layers // size] * size
            for n in range(layers % size):
                sizes[size - 2 - n] += 1
            starts = [sum(sizes[:rank]) for rank in range(size + 1)]
            found = [get_pp_indices(layers, rank, size) for rank in range(size)]
            assert found == list(itertools.pairwise(starts)), (layers, size)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((-1, 0, 1), ValueError, "num_layers is -1; expected at least 0"),
        ((4, 0, 0), ValueError, "pp_size is 0; expected at least 1"),
        ((4, 2, 2), ValueError, "pp_rank is 2; expected 0 to 1"),
        ((4, -1, 2), ValueError, "pp_rank is -1; expected 0 to 1"),
        ((4.0, 0, 2), TypeError, "num_layers is 4.0; expected a whole number"),
    ],
)
def test_get_pp_indices_refuses(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        get_pp_indices(*arguments)


# ---- StatelessProcessGroup: objects ----


def exchanges(rank: int, folder: Path, host: str, port: int) -> None:
    world = 3
    group = StatelessProcessGroup.create(host, port, rank, world)
    for n in range(3):  # all to all, itself too; then received from the last sender first
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
    # another group, of which the same processes are other ranks
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
    assert finish(start(exchanges, 3, tmp_path, host, port, initialize=False), 60) == [0] * 3


def test_two_senders_to_one_rank_do_not_collide() -> None:
    a, b, c = groups(3)
    a.send_obj("from 0", 2)
    b.send_obj("from 1", 2)
    assert (c.recv_obj(1), c.recv_obj(0)) == ("from 1", "from 0")


def test_an_object_that_pickle_cannot_take_is_not_counted() -> None:
    a, b = groups()
    for call in (lambda: a.send_obj(lambda: 1, 1), lambda: a.broadcast_obj(lambda: 1, 0)):
        with pytest.raises(Exception, match="pickle"):
            call()
    a.send_obj(1, 1)
    a.broadcast_obj(2, 0)
    assert (b.recv_obj(0), b.broadcast_obj(None, 0)) == (1, 2)


def test_expire_data() -> None:
    a, b = groups(data_expiration_seconds=1, store_timeout=1)
    a.send_obj("old", 1)
    a.broadcast_obj("old", 0)
    assert [key for key, _ in a.entries] == ["sent/0/1/0", "broadcast/0/0"]
    a.expire_data()
    assert len(a.entries) == 2, "they are not old yet"
    time.sleep(1.1)
    a.broadcast_obj("new", 0)  # each sending call expires
    assert [key for key, _ in a.entries] == ["broadcast/0/1"]
    for call in (lambda: b.recv_obj(0), lambda: b.broadcast_obj(None, 0)):
        with pytest.raises(RuntimeError, match="rank 0 sent nothing within 1 s"):
            call()
    b.broadcast_recv_src_counter[0] += 1
    assert b.broadcast_obj(None, 0) == "new"


def test_what_was_received_leaves_nothing_behind() -> None:
    a, b = groups()
    before = a.store.num_keys()
    for n in range(20):
        a.send_obj(n, 1)
        assert b.recv_obj(0) == n
    assert a.store.num_keys() == before


def test_a_rank_that_sends_nothing() -> None:
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
    assert b.recv_obj(0) == "late", "the one that did not come in time is still the next"


def test_ctrl_c_ends_a_wait() -> None:
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


# ---- StatelessProcessGroup: barrier ----


def hundred_barriers(rank: int, folder: Path, port: int) -> None:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 4)
    keys = []
    for n in range(100):
        group.store.add(f"here {n}", 1)
        group.barrier()
        assert group.store.add(f"here {n}", 0) == 4, "all are here"
        keys.append(group.store.num_keys() - n)
    assert max(keys) < min(keys) + 16, "barriers leave nothing behind"
    group.barrier()


def test_barrier_of_4_passes_100_times(tmp_path: Path) -> None:
    ranks = start(hundred_barriers, 4, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 4


def misses_one(rank: int, folder: Path, port: int) -> None:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 4)
    group.barrier()
    if rank == 2:
        for peer in (0, 1, 3):
            told(folder, peer)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"barrier on rank \d of 4: rank 2 did not come while") as caught:
        group.barrier(timeout=1)
    waited = time.monotonic() - begin
    assert waited < 0.5 if rank == 2 else 0.9 < waited < 2, waited
    assert isinstance(caught.value, spar.SparError) and caught.value.ranks == (2,)
    tell(folder, rank, "")
    group.barrier()  # it is a new one, on which all agree
    assert group.all_gather_obj(rank) == [0, 1, 2, 3]
    group.barrier()


def test_barrier_ends_in_time_and_names_who_is_missing(tmp_path: Path) -> None:
    ranks = start(misses_one, 4, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 4


def test_the_shortest_timeout_ends_the_barrier_of_all() -> None:
    a, b, _, _ = groups(4)
    begin = time.monotonic()
    errors = at_once([lambda: a.barrier(60), lambda: b.barrier(0.5)])
    assert 0.4 < time.monotonic() - begin < 1.5
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        text = "ranks 2, 3 did not come while rank 1 waited for 0.5 s"
        assert str(error) == f"barrier on rank {rank} of 4: {text}"


def test_a_rank_that_does_not_leave_the_barrier() -> None:
    a, b = groups()
    b.store.set("barrier/1/1", "")  # it comes, and dies
    b.store.add("barrier/1/present", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 came, but did not leave within 0.5 s") as caught:
        a.barrier(0.5)
    assert isinstance(caught.value, spar.SparError) and caught.value.ranks == (1,)


def store_is_gone(rank: int, folder: Path, port: int) -> None:
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, 3)
    if rank == 0:
        for peer in (1, 2):
            told(folder, peer)
        os._exit(0)
    calls = [
        lambda: group.barrier(30),
        lambda: group.recv_obj(0),
        lambda: group.all_gather_obj(1),
        lambda: (group.send_obj(1, 0), group.send_obj(1, 0)),
    ]
    tell(folder, rank, "")
    begin = time.monotonic()
    for call in calls:
        with pytest.raises(
            RuntimeError, match=rf"on rank {rank} of 3: rank 0, which holds the store, is gone"
        ):
            call()
    assert time.monotonic() - begin < 5


def test_the_store_is_gone(tmp_path: Path) -> None:
    ranks = start(store_is_gone, 3, tmp_path, free_port(), initialize=False)
    assert finish(ranks, 60) == [0] * 3


# ---- StatelessProcessGroup: create ----


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"rank": 2}, ValueError, "with world_size 2: rank is 2; expected 0 to 1"),
        ({"rank": -1}, ValueError, "rank is -1; expected 0 to 1"),
        ({"rank": "0"}, TypeError, "rank is '0'; expected a whole number"),
        ({"rank": True}, TypeError, "rank is True"),
        ({"world_size": 0}, ValueError, "world_size is 0; expected at least 1"),
        ({"port": 65536}, ValueError, "port is 65536; expected 1 to 65535"),
        ({"port": 0}, ValueError, "port is 0; expected 1 to 65535"),
        ({"host": ""}, ValueError, "host is ''; expected a name or an address"),
        ({"data_expiration_seconds": -1}, ValueError, "data_expiration_seconds is -1; expected at least 0"),
        ({"store_timeout": 0}, ValueError, "store_timeout is 0; expected more than 0"),
        ({"host": "192.0.2.1"}, OSError, "192.0.2.1"),  # an address of documentation, not ours
        ({"host": "no such host"}, OSError, "not known|resolution"),
    ],
)
def test_create_refuses(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {"host": "127.0.0.1", "port": 1, "rank": 0, "world_size": 2, **arguments}
    with pytest.raises(kind, match=text):
        StatelessProcessGroup.create(**given)


def test_the_constructor_refuses() -> None:
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


def test_a_peer_that_is_none() -> None:
    a, _ = groups()
    for call in (lambda: a.send_obj(1, 2), lambda: a.recv_obj(2), lambda: a.broadcast_obj(1, 2)):
        with pytest.raises(ValueError, match=r"on rank 0 of 2: (dst|src) is 2; expected 0 to 1"):
            call()
    with pytest.raises(TypeError, match="dst is None"):
        a.send_obj(1, None)  # type: ignore[arg-type]


def test_a_rank_that_does_not_come_to_create() -> None:
    """The error names it, and the port is free while the error is still at hand."""
    port = free_port()

    def create(rank: int) -> StatelessProcessGroup:
        return StatelessProcessGroup.create("127.0.0.1", port, rank, 3, store_timeout=1)

    begin = time.monotonic()
    errors = at_once([lambda: create(0), lambda: create(2)])
    assert time.monotonic() - begin < 3
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "rank 1 did not come while rank" in str(error), error
    assert is_free("127.0.0.1", port)
    error = at_once([lambda: create(1)])[0]
    assert isinstance(error, RuntimeError)
    assert (
        f"create on rank 1 of 3: rank 0 was not reached at host '127.0.0.1', port {port} within 1 s"
        in str(error)
    )
    assert "refused" in str(error)


def test_ranks_that_disagree() -> None:
    port = free_port()

    def create(rank: int, world: int) -> StatelessProcessGroup:
        return StatelessProcessGroup.create("127.0.0.1", port, rank, world, store_timeout=2)

    same = at_once([lambda: create(0, 3), lambda: create(1, 3), lambda: create(1, 3)])
    assert sum("another process is rank 1" in str(error) for error in same) == 1, same
    assert sum(isinstance(error, spar.MismatchError) for error in same) == 1, same
    assert sum("rank 2 did not come" in str(error) for error in same) == 2, same
    other = at_once([lambda: create(0, 2), lambda: create(1, 4)])
    assert sum("another rank's world_size is" in str(error) for error in other) == 1, other
    assert all(isinstance(error, RuntimeError) for error in other)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            StatelessProcessGroup.create("127.0.0.1", port, 0, 2)


@pytest.mark.parametrize(("host", "others"), [("127.0.0.1", ["127.0.0.2", "::1"]), ("::1", ["127.0.0.1"])])
def test_the_port_listens_on_the_given_host_only(host: str, others: list[str]) -> None:
    port = free_port(host)
    group = StatelessProcessGroup.create(host, port, 0, 1)
    assert group.socket is not None and group.socket.getsockname()[:2] == (host, port)
    assert answers(host, port)
    for other in others:
        assert not answers(other, port)
    group.barrier()
    del group
    assert is_free(host, port), "it goes with the group"


def test_a_group_of_one_needs_no_port() -> None:
    group = StatelessProcessGroup.create("127.0.0.1", 0, 0, 1)
    assert group.all_gather_obj("alone") == ["alone"]
    assert group.broadcast_obj(1, 0) == 1
    group.send_obj(2, 0)
    assert group.recv_obj(0) == 2
    group.barrier(0)


# ---- stateless_init_torch_distributed_process_group ----


def make(rank: int, world: int, port: int, host: str = "127.0.0.1") -> dist.ProcessGroup:
    return utils.stateless_init_torch_distributed_process_group(host, port, rank, world, "gloo")


destroy = utils.stateless_destroy_torch_distributed_process_group


def serves(rank: int, folder: Path, host: str, ports: list[int], transport: str) -> None:
    world = 3
    known = set(dist.distributed_c10d._world.pg_map)
    group = make(rank, world, ports[0], host)
    other = make(2 - rank, world, ports[1], host)
    for one, place in ((group, rank), (other, 2 - rank)):
        assert (one.rank(), one.size()) == (place, world)
        x = torch.full((3,), float(place))
        dist.all_reduce(x, group=one)
        assert x.tolist() == [3.0] * 3
        x = torch.full((3,), place)
        one.broadcast(x, 1).wait()
        assert x.tolist() == [1] * 3
        one.barrier().wait()
        works_with_spar(one, place, world, transport)
    assert set(dist.distributed_c10d._world.pg_map) == known, "torch.distributed knows of none of them"
    if rank == 0:
        assert not is_free(host, ports[0])
    destroy(group)
    if rank == 0:
        assert is_free(host, ports[0]), "although the group is still referred to"
    assert group.size() == world
    with pytest.raises(ValueError, match="or was destroyed before"):
        destroy(group)
    works_with_spar(other, 2 - rank, world, transport)  # which is none of its business
    destroy(other)


def works_with_spar(group: dist.ProcessGroup, rank: int, world: int, transport: str) -> None:
    whole = cells((5, 7, 2), torch.float32)
    rows, columns = (spar.cal_split_sizes(n, world) for n in (5, 7))
    x = whole.split(rows)[rank].clone().requires_grad_()
    y = spar.all_to_all(x, group, scatter_dim=1, gather_dim=0, gather_size=5)
    assert_same(y.detach(), whole.split(columns, 1)[rank])
    y.backward(y.detach())
    assert_same(x.grad, x.detach())
    x.grad = None
    z = spar.gather_forward_split_backward(x, group, 0, rows)
    assert_same(z.detach(), whole)
    z.backward(whole)
    assert_same(x.grad, x.detach() * world)
    assert spar.transport(group).name == transport


@pytest.mark.parametrize("initialize", [False, True], ids=["alone", "beside WORLD"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_spar_over_groups_without_global_state(tmp_path: Path, transport: str, initialize: bool) -> None:
    host = "127.0.0.1" if initialize else "::1"
    ports = [free_port(host), free_port(host)]
    settings: dict[str, Any] = {"initialize": initialize, "SPAR_TRANSPORT": transport, "SPAR_TIMEOUT": "30"}
    assert finish(start(serves, 3, tmp_path, host, ports, transport, **settings), 90) == [0] * 3


def destroys_at_once(rank: int, folder: Path, port: int) -> None:
    """Rank 0 need not wait for anybody: all are connected when the group is made."""
    group = make(rank, 3, port)
    if rank == 0:
        destroy(group)
        assert is_free("127.0.0.1", port)
        tell(folder, rank, "")
        return
    told(folder, 0)
    x = torch.full((2,), rank)
    if rank == 1:
        group.send([x], 2, 0).wait()
    else:
        group.recv([x], 1, 0).wait()
    assert x.tolist() == [1, 1], "the others need no store any more"
    destroy(group)


def test_destroyed_at_once(tmp_path: Path) -> None:
    assert finish(start(destroys_at_once, 3, tmp_path, free_port(), initialize=False), 60) == [0] * 3


def test_a_group_that_is_dropped_frees_the_port_too() -> None:
    port = free_port()
    group = make(0, 1, port)
    assert not is_free("127.0.0.1", port)
    assert spar.gather_forward_split_backward(torch.ones(2), group, 0).tolist() == [1, 1]
    del group
    assert is_free("127.0.0.1", port)


def test_errors_name_the_group() -> None:
    port = free_port()
    group = make(0, 1, port)
    assert group.group_name == f"stateless 127.0.0.1:{port}"
    destroy(group)


def test_stateless_init_refuses() -> None:
    init = utils.stateless_init_torch_distributed_process_group
    with pytest.raises(ValueError, match=r"on rank 0: backend is 'mpi'; expected 'gloo' or 'nccl'"):
        init("127.0.0.1", free_port(), 0, 1, "mpi")
    with pytest.raises(ValueError, match="rank is 3; expected 0 to 1"):
        init("127.0.0.1", free_port(), 3, 2, "gloo")
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match="this torch has 'gloo'"):
            init("127.0.0.1", free_port(), 0, 1, "nccl")
    with pytest.raises(ValueError, match="pg is not a group of stateless_init"):
        destroy(dist.ProcessGroup(dist.HashStore(), 0, 1))


def test_init_gloo_process_group() -> None:
    store = dist.PrefixStore("one", dist.HashStore())
    limit = timedelta(seconds=5)
    group = utils.init_gloo_process_group(dist.Backend("gloo"), store, 0, 1, limit)
    assert group._get_backend(torch.device("cpu")).options._timeout == limit
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1]
    with pytest.raises(ValueError, match="backend is 'nccl'; expected 'gloo'"):
        utils.init_gloo_process_group(dist.Backend("nccl"), store, 0, 1, limit)
    with pytest.raises(ValueError, match="rank is 1; expected 0 to 0"):
        utils.init_gloo_process_group(dist.Backend("gloo"), store, 1, 1, limit)


class NcclOverGloo(dist.ProcessGroupGloo):
    """Stands for ProcessGroupNCCL, for the order of calls alone: it proves nothing about the hardware."""

    class Options:
        _timeout = timedelta(0)

    given: ClassVar[list[timedelta]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.given.append(options._timeout)


def test_nccl_is_registered_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclOverGloo, raising=False)
    monkeypatch.setattr(utils.process_group, "default_pg_nccl_timeout", timedelta(minutes=10))
    group = utils.stateless_init_torch_distributed_process_group("127.0.0.1", 0, 0, 1, "nccl")
    assert NcclOverGloo.given == [timedelta(minutes=10)]
    assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)
    assert group._device_types == [torch.device("cuda")]
    with pytest.raises(RuntimeError):
        group._get_backend(torch.device("cpu"))
    destroy(group)


@pytest.fixture(autouse=True)
def _no_alarm_is_left() -> Iterator[None]:
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
