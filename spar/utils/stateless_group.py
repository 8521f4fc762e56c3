"""Objects between processes, without torch.distributed's global state. Source: seed 004.

docs/utils.md says who can reach a group's port, and what that means.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from socket import SOCK_STREAM, create_connection, create_server, getaddrinfo
from socket import socket as Socket
from typing import Any, NoReturn, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from .._runtime.checks import check_int, check_number, check_rank, check_str, check_type
from ..errors import MismatchError, SparError

_LOOK = 50e-6  # seconds between the first two looks at the store
_LOOK_AT_MOST = 0.05
_TO_READ_THE_VERDICT = 0.5  # what rank 0 leaves the others where not all came, before it raises


@dataclass(eq=False)
class StatelessProcessGroup:
    """Processes that exchange small objects, without torch.distributed's global state. Source: seed 004.

    `create` makes one; a process may be in any number of them, with another rank in each. Objects travel by
    pickle through a store in rank 0's process: use it for metadata, among processes that trust one another.
    Whoever can reach the port can run code in every rank (docs/utils.md). One thread at a time uses a group.

    When rank 0 drops its group, the port is free and the others' groups end: rank 0 leaves every barrier
    last, so that it may do so behind one.

    Attributes:
        rank: this process's rank in the group.
        world_size: how many ranks there are.
        store: torch's TCPStore; its timeout is the limit of recv_obj, broadcast_obj and all_gather_obj.
        socket: what the store listens on, on rank 0; else None. It is closed with the group.
        data_expiration_seconds: what was sent longer ago is deleted, even where nobody has received it.
        send_dst_counter: objects sent to each rank.
        recv_src_counter: objects received from each rank.
        broadcast_send_counter: objects that this rank has broadcast.
        broadcast_recv_src_counter: broadcasts received from each rank.
        entries: (key, time.monotonic()) of what this rank has put into the store, oldest first.

    Raises:
        ValueError: a rank that is none of world_size, a negative data_expiration_seconds.
        TypeError: these are no whole numbers.
    """

    rank: int
    world_size: int
    store: Store
    socket: Socket | None
    data_expiration_seconds: int = 3600
    send_dst_counter: dict[int, int] = field(default_factory=dict)
    recv_src_counter: dict[int, int] = field(default_factory=dict)
    broadcast_send_counter: int = 0
    broadcast_recv_src_counter: dict[int, int] = field(default_factory=dict)
    entries: deque[tuple[str, float]] = field(default_factory=deque)
    _barriers: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        where = "StatelessProcessGroup"
        self.rank, self.world_size = check_rank(where, self.rank, self.world_size)
        check_type(where, "store", self.store, Store, "a Store")
        check_type(where, "socket", self.socket, (Socket, type(None)), "a socket or None")
        check_int(where, "data_expiration_seconds", self.data_expiration_seconds, 0)
        for counter in (self.send_dst_counter, self.recv_src_counter, self.broadcast_recv_src_counter):
            for peer in range(self.world_size):
                counter.setdefault(peer, 0)
        if self.socket is not None:
            weakref.finalize(self, self.socket.close)

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
    ) -> StatelessProcessGroup:
        """Makes a group, and returns when all its ranks have come. Collective.

        Args:
            host: a name or address, IPv4 or IPv6, of rank 0, which listens on it alone.
            port: rank 0 listens here; 0 picks one where the group has one rank.
            rank: this process's rank in the group.
            world_size: how many ranks there are.
            data_expiration_seconds: what was sent longer ago is deleted.
            store_timeout: limit of each wait in seconds, here and for objects.

        Raises:
            ValueError: a rank that is none of world_size, another bad argument.
            OSError: rank 0 cannot listen there.
            MismatchError: another process has this rank, or the ranks give different world_size.
            RuntimeError: a rank did not come within store_timeout; says which.
        """
        where = "StatelessProcessGroup.create"
        rank, world_size = check_rank(where, rank, world_size)
        check_str(where, "host", host)
        port = check_int(where, "port", port, 0 if world_size == 1 else 1, 65535)
        check_int(where, "data_expiration_seconds", data_expiration_seconds, 0)
        check_number(where, "store_timeout", store_timeout)
        if store_timeout <= 0:
            raise ValueError(
                f"{where} on rank {rank}: store_timeout is {store_timeout}; expected more than 0"
            )
        if not host:  # to Python's sockets it would mean all interfaces
            raise ValueError(f"{where} on rank {rank}: host is {host!r}; expected a name or an address")
        limit = timedelta(seconds=store_timeout)
        with contextlib.ExitStack() as undo:
            socket = undo.enter_context(_listen(host, port)) if rank == 0 else None
            store = open_store(host, port, rank, world_size, limit, socket)
            group = StatelessProcessGroup(rank, world_size, store, socket, data_expiration_seconds)
            undo.callback(delattr, group, "store")  # the error's traceback would keep the port
            del store
            with group._call("create"):
                group._claim()
                group._meet("create", store_timeout)
            undo.pop_all()
        return group

    def send_obj(self, obj: Any, dst: int) -> None:
        """Sends an object that pickle can take to rank dst; does not wait for it to be received."""
        dst = self._check_peer("send_obj", "dst", dst)
        self._put("send_obj", f"sent/{self.rank}/{dst}/{self.send_dst_counter[dst]}", obj)
        self.send_dst_counter[dst] += 1

    def recv_obj(self, src: int) -> Any:
        """The next object that rank src sends to this rank; RuntimeError where none comes in time."""
        src = self._check_peer("recv_obj", "src", src)
        key = f"sent/{src}/{self.rank}/{self.recv_src_counter[src]}"
        obj = self._take("recv_obj", key, src)
        self.recv_src_counter[src] += 1
        with self._call("recv_obj"):
            self.store.delete_key(key)
        return obj

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Rank src's object, on every rank; the others' obj is not used. RuntimeError where it does not come.

        It stays in the store until it expires: meant for a start-up, not for every step.
        """
        src = self._check_peer("broadcast_obj", "src", src)
        if self.rank != src:
            return self._broadcast_of("broadcast_obj", src)
        self._broadcast("broadcast_obj", obj)
        return obj

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order, on every rank. RuntimeError where one does not come."""
        name = "all_gather_obj"
        self._broadcast(name, obj)
        ranks = range(self.world_size)
        return [obj if rank == self.rank else self._broadcast_of(name, rank) for rank in ranks]

    def barrier(self, timeout: float = 30.0) -> None:
        """Waits until all ranks are here. Either all of them pass or all raise.

        First each rank says that it is here, and waits for all; then each says that it leaves. Rank 0 leaves
        last: behind the barrier nobody needs the store until its next call.

        Args:
            timeout: limit of each of the two waits in seconds; the first rank to reach its own ends the wait
                of all, and a rank that comes later raises at once.

        Raises:
            RuntimeError: a rank did not come in time (says which; SparError.ranks holds them), or the store
                is gone; the next barrier is a new one. On rank 0 also: a rank came and did not leave; then
                the next barrier raises on all ranks, as the others have passed this one.
        """
        check_number(f"barrier on rank {self.rank} of {self.world_size}", "timeout", timeout, 0)
        with self._call("barrier"):
            self._meet("barrier", timeout)

    def expire_data(self) -> None:
        """Deletes what this rank sent more than data_expiration_seconds ago. Every sending call does so."""
        now = time.monotonic()
        while self.entries and now - self.entries[0][1] > self.data_expiration_seconds:
            with self._call("expire_data"):
                self.store.delete_key(self.entries[0][0])
            self.entries.popleft()

    def _check_peer(self, op: str, name: str, peer: int) -> int:
        return check_int(f"{op} on rank {self.rank} of {self.world_size}", name, peer, 0, self.world_size - 1)

    def _fail(self, op: str, why: str, ranks: tuple[int, ...], kind: type[SparError] = SparError) -> NoReturn:
        text = f"{op} on rank {self.rank} of {self.world_size}: {why}"
        raise kind(text, op=op, rank=self.rank, ranks=ranks)

    @contextlib.contextmanager
    def _call(self, op: str) -> Iterator[None]:
        """Around what uses the store: its errors in spar's words."""
        try:
            yield
        except SparError:
            raise
        except dist.DistError as error:
            self._fail(op, f"rank 0, which holds the store, is gone: {error}", (0,))

    def _claim(self) -> None:
        """Two processes with one rank, or of two minds about the group, would wait for ever."""
        world = str(self.world_size)
        said = self.store.compare_set("world_size", "", world).decode()
        if said != world:
            self._fail("create", f"another rank's world_size is {said}", (), MismatchError)
        if self.store.add(f"claimed/{self.rank}", 1) > 1:
            self._fail("create", f"another process is rank {self.rank}", (self.rank,), MismatchError)

    def _put(self, op: str, key: str, obj: Any) -> None:
        data = pickle.dumps(obj)
        self.expire_data()
        with self._call(op):
            self.store.set(key, cast(str, data))  # it takes both
        self.entries.append((key, time.monotonic()))

    def _take(self, op: str, key: str, src: int) -> Any:
        limit: float = cast(Any, self.store).timeout.total_seconds()
        with self._call(op):
            if not _until(lambda: self.store.check([key]), limit):
                self._fail(op, f"rank {src} sent nothing within {limit:g} s", (src,))
            data = self.store.get(key)
        return pickle.loads(data)

    def _broadcast(self, op: str, obj: Any) -> None:
        self._put(op, f"broadcast/{self.rank}/{self.broadcast_send_counter}", obj)
        self.broadcast_send_counter += 1

    def _broadcast_of(self, op: str, src: int) -> Any:
        obj = self._take(op, f"broadcast/{src}/{self.broadcast_recv_src_counter[src]}", src)
        self.broadcast_recv_src_counter[src] += 1
        return obj

    def _meet(self, op: str, limit: float) -> None:
        """One verdict, set once, by the last rank to come or by the first to give up.

        A rank is counted before it says who came: so where all have said it all are counted, and a verdict to
        pass, whoever sets it, finds nobody on the way.
        """
        ranks = range(self.world_size)
        verdict = f"barrier/{self._barriers}"
        self._barriers += 1
        present, here = f"{verdict}/present", [f"{verdict}/{rank}" for rank in ranks]
        last = self.store.add(present, 1) == self.world_size
        self.store.set(here[self.rank], "")
        if last:
            self._decide(verdict, [], "")
        if not _until(lambda: self.store.check([verdict]), limit):
            missing = [rank for rank in ranks if not self.store.check([here[rank]])]
            why = f"{_ranks(missing)} did not come while rank {self.rank} waited for {limit:g} s"
            self._decide(verdict, missing, why)
        missing, why = json.loads(self.store.get(verdict))
        self.store.delete_key(here[self.rank])
        self.store.add(present, -1)  # the last that rank 0 waits for: it may drop the store then
        left = self.rank > 0 or _until(
            lambda: self.store.add(present, 0) == 0, _TO_READ_THE_VERDICT if missing else limit
        )
        if missing:  # a late rank finds the verdict as long as it is kept
            self.entries.extend((key, time.monotonic()) for key in (verdict, present))
            self._fail(op, why, tuple(missing))
        if not left:  # the others pass, but not once more before they know
            stuck = [rank for rank in ranks if self.store.check([here[rank]])]
            stuck = stuck or [rank for rank in ranks if rank != self.rank]  # one, between two steps
            why = f"{_ranks(stuck)} came, but did not leave within {limit:g} s"
            self._decide(f"barrier/{self._barriers}", stuck, f"before it {why}")
            self._fail(op, why, tuple(stuck))
        if self.rank == 0:
            for key in (verdict, present):
                self.store.delete_key(key)

    def _decide(self, verdict: str, missing: list[int], why: str) -> None:
        """Unless it is decided: all ranks pass where nobody is missing."""
        self.store.compare_set(verdict, "", json.dumps([missing, why]))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _until(ready: Callable[[], bool], limit: float) -> bool:
    """Looks until it is so, seldom where it takes long; False after `limit` seconds.

    A wait of the store itself would not hear Ctrl-C, would lock other threads out, and logs when it ends.
    """
    begin = time.monotonic()
    while not ready():
        waited = time.monotonic() - begin
        if waited >= limit:
            return False
        time.sleep(min(max(waited / 8, _LOOK), _LOOK_AT_MOST, limit - waited))
    return True


def _listen(host: str, port: int) -> Socket:
    """On this host's address alone: a store that opens its port itself listens on all interfaces."""
    failure: OSError | None = None
    for family, _, _, _, address in getaddrinfo(host, port, type=SOCK_STREAM):
        try:
            return create_server(cast(Any, address), family=family)
        except OSError as error:
            failure = error
    raise failure or OSError(f"host {host!r} has no address")


def open_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, socket: Socket | None
) -> Store:
    """The store that listens on the socket, or one that is connected to it."""
    limit = timeout.total_seconds()
    why: Exception | None = None if socket is not None else _unreached(host, port, limit)
    if why is None:
        try:
            return TCPStore(
                host,
                port if socket is None else socket.getsockname()[1],
                world_size,
                is_master=socket is not None,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=None if socket is None else os.dup(socket.fileno()),  # it closes its own
                use_libuv=False,  # which torch 2.6 gives no socket, and which takes no object above 8 MiB
            )
        except dist.DistError as error:
            why = error
    text = f"rank 0 was not reached at host {host!r}, port {port} within {limit:g} s: {why}"
    raise SparError(f"create on rank {rank} of {world_size}: {text}", op="create", rank=rank, ranks=(0,))


def _unreached(host: str, port: int, limit: float) -> OSError | None:
    """Waits until somebody listens there; else what was wrong. The store's own wait does not hear Ctrl-C."""
    failures: deque[OSError] = deque(maxlen=1)

    def answers() -> bool:
        try:
            create_connection((host, port), timeout=min(limit, 1.0)).close()
        except OSError as error:
            failures.append(error)
            return False
        return True

    return None if _until(answers, limit) else failures[-1]
