# SPDX-License-Identifier: Apache-2.0
"""Exchange objects between processes without torch.distributed's global state. From vLLM.

docs/utils.md describes which hosts can reach a group's port, and the security implications.
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
from socket import SOCK_STREAM, create_connection, create_server, getaddrinfo, socket as Socket
from typing import Any, NoReturn, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from .._checks import check_int, check_number, check_rank, check_str, check_type
from ..errors import MismatchError, SparError

_MIN_POLL_INTERVAL = 50e-6  # seconds
_MAX_POLL_INTERVAL = 0.05
_VERDICT_GRACE = 0.5  # seconds that rank 0 keeps the store after a failed barrier, for the others to read why


@dataclass(eq=False)
class StatelessProcessGroup:
    """A group of processes that exchange small objects, without global state. From vLLM.

    Make one with `create`. A process may join any number of groups, with a different rank in each. A group is
    not thread-safe.

    Objects are pickled and pass through a store in rank 0's process. Use the group for metadata, between
    processes that trust each other: any process that reaches the port can run code in every rank.

    When rank 0 drops its group, the port is freed and calls of the other ranks raise. Rank 0 leaves every
    barrier last, so it may drop its group right after one.

    Attributes:
        rank: this process's rank in the group.
        world_size: the number of ranks.
        store: a torch TCPStore; its timeout applies to recv_obj, broadcast_obj and all_gather_obj.
        socket: the socket on which rank 0's store listens; None on other ranks. Closed with the group.
        data_expiration_seconds: age at which sent objects are deleted, even if not received.
        send_dst_counter: number of objects sent to each rank.
        recv_src_counter: number of objects received from each rank.
        broadcast_send_counter: number of objects that this rank has broadcast.
        broadcast_recv_src_counter: number of broadcasts received from each rank.
        entries: (key, time.monotonic()) of each object this rank has put into the store, oldest first.

    Raises:
        ValueError: rank is not in [0, world_size), or data_expiration_seconds is negative.
        TypeError: an argument has the wrong type.
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
        caller = "StatelessProcessGroup"
        self.rank, self.world_size = check_rank(caller, self.rank, self.world_size)
        check_type(caller, "store", self.store, Store, "a Store")
        check_type(caller, "socket", self.socket, (Socket, type(None)), "a socket or None")
        check_int(caller, "data_expiration_seconds", self.data_expiration_seconds, 0)
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
        """Make a group. Blocks until all ranks have joined. Collective.

        Args:
            host: the name or address (IPv4 or IPv6) of rank 0, which listens on this address only.
            port: the port on which rank 0 listens; 0 picks a free one if world_size is 1.
            rank: this process's rank in the group.
            world_size: the number of ranks.
            data_expiration_seconds: age at which sent objects are deleted.
            store_timeout: timeout in seconds of each wait, here and for objects.

        Raises:
            ValueError: rank is not in [0, world_size), or another argument is out of range.
            TypeError: an argument has the wrong type.
            OSError: rank 0 cannot listen on this host and port.
            MismatchError: another process has the same rank, or world_size differs between ranks.
            RuntimeError: ranks are missing after store_timeout; the error names them.
        """
        caller = "StatelessProcessGroup.create"
        rank, world_size = check_rank(caller, rank, world_size)
        check_str(caller, "host", host)
        port = check_int(caller, "port", port, 0 if world_size == 1 else 1, 65535)
        check_int(caller, "data_expiration_seconds", data_expiration_seconds, 0)
        check_number(caller, "store_timeout", store_timeout)
        if store_timeout <= 0:
            raise ValueError(
                f"{caller} on rank {rank}: store_timeout is {store_timeout}; expected more than 0"
            )
        if not host:  # Python's sockets would listen on all interfaces
            raise ValueError(f"{caller} on rank {rank}: host is {host!r}; expected a name or an address")
        limit = timedelta(seconds=store_timeout)
        with contextlib.ExitStack() as undo:
            socket = undo.enter_context(_listen(host, port)) if rank == 0 else None
            store = open_store(host, port, rank, world_size, limit, socket)
            group = StatelessProcessGroup(rank, world_size, store, socket, data_expiration_seconds)
            # Otherwise the error's traceback would keep the port bound.
            undo.callback(delattr, group, "store")
            del store
            with group._translate_errors("create"):
                group._claim_rank()
                group._synchronize("create", store_timeout)
            undo.pop_all()
        return group

    def send_obj(self, obj: Any, dst: int) -> None:
        """Send a picklable object to rank dst. Does not wait for the receiver."""
        dst = self._check_peer("send_obj", "dst", dst)
        self._send("send_obj", f"sent/{self.rank}/{dst}/{self.send_dst_counter[dst]}", obj)
        self.send_dst_counter[dst] += 1

    def recv_obj(self, src: int) -> Any:
        """Receive the next object that rank src sends to this rank. Raises RuntimeError on timeout."""
        src = self._check_peer("recv_obj", "src", src)
        key = f"sent/{src}/{self.rank}/{self.recv_src_counter[src]}"
        obj = self._receive("recv_obj", key, src)
        self.recv_src_counter[src] += 1
        with self._translate_errors("recv_obj"):
            self.store.delete_key(key)
        return obj

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return rank src's object on every rank. Raises RuntimeError on timeout.

        The object stays in the store until it expires: use this at start-up, not in every step.

        Args:
            obj: the object on rank src; not used on the others.
            src: the source rank.
        """
        src = self._check_peer("broadcast_obj", "src", src)
        if self.rank != src:
            return self._receive_broadcast("broadcast_obj", src)
        self._send_broadcast("broadcast_obj", obj)
        return obj

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order, on every rank. Raises RuntimeError on timeout."""
        name = "all_gather_obj"
        self._send_broadcast(name, obj)
        ranks = range(self.world_size)
        return [obj if rank == self.rank else self._receive_broadcast(name, rank) for rank in ranks]

    def barrier(self, timeout: float = 30.0) -> None:
        """Block until all ranks have called this. Either all ranks pass or all raise.

        Each rank signals its arrival and waits for all, then signals its departure. Rank 0 leaves last: after
        the barrier, no rank needs the store until its next call.

        Args:
            timeout: timeout in seconds of each of the two waits. The first rank to time out ends the wait of
                all ranks; a rank that arrives later raises at once.

        Raises:
            RuntimeError: ranks did not arrive in time (the message and SparError.ranks name them), or the
                store is gone. The next barrier starts anew. Rank 0 also raises if a rank arrived but did not
                leave in time; then the next barrier raises on all ranks, because the others passed this one.
        """
        check_number(f"barrier on rank {self.rank} of {self.world_size}", "timeout", timeout, 0)
        with self._translate_errors("barrier"):
            self._synchronize("barrier", timeout)

    def expire_data(self) -> None:
        """Delete this rank's objects older than data_expiration_seconds. Every send does this first."""
        now = time.monotonic()
        while self.entries and now - self.entries[0][1] > self.data_expiration_seconds:
            with self._translate_errors("expire_data"):
                self.store.delete_key(self.entries[0][0])
            self.entries.popleft()

    def _check_peer(self, op: str, name: str, peer: int) -> int:
        return check_int(f"{op} on rank {self.rank} of {self.world_size}", name, peer, 0, self.world_size - 1)

    def _fail(self, op: str, why: str, ranks: tuple[int, ...], kind: type[SparError] = SparError) -> NoReturn:
        text = f"{op} on rank {self.rank} of {self.world_size}: {why}"
        raise kind(text, op=op, rank=self.rank, ranks=ranks)

    @contextlib.contextmanager
    def _translate_errors(self, op: str) -> Iterator[None]:
        """Raise the store's errors as SparError."""
        try:
            yield
        except SparError:
            raise
        except dist.DistError as error:
            self._fail(op, f"rank 0, which owns the store, is gone: {error}", (0,))

    def _claim_rank(self) -> None:
        """Raise MismatchError if ranks collide or world sizes differ: the ranks would never all arrive."""
        world = str(self.world_size)
        first_world = self.store.compare_set("world_size", "", world).decode()
        if first_world != world:
            why = f"another rank passed world_size {first_world}; all ranks must pass the same"
            self._fail("create", why, (), MismatchError)
        if self.store.add(f"claimed/{self.rank}", 1) > 1:
            why = f"another process is rank {self.rank}; each process must pass its own rank"
            self._fail("create", why, (self.rank,), MismatchError)

    def _send(self, op: str, key: str, obj: Any) -> None:
        data = pickle.dumps(obj)
        self.expire_data()
        with self._translate_errors(op):
            self.store.set(key, cast(str, data))  # also accepts bytes
        self.entries.append((key, time.monotonic()))

    def _receive(self, op: str, key: str, src: int) -> Any:
        limit: float = cast(Any, self.store).timeout.total_seconds()
        with self._translate_errors(op):
            if not _poll_until(lambda: self.store.check([key]), limit):
                self._fail(op, f"rank {src} sent nothing within {limit:g} s", (src,))
            data = self.store.get(key)
        return pickle.loads(data)

    def _send_broadcast(self, op: str, obj: Any) -> None:
        self._send(op, f"broadcast/{self.rank}/{self.broadcast_send_counter}", obj)
        self.broadcast_send_counter += 1

    def _receive_broadcast(self, op: str, src: int) -> Any:
        obj = self._receive(op, f"broadcast/{src}/{self.broadcast_recv_src_counter[src]}", src)
        self.broadcast_recv_src_counter[src] += 1
        return obj

    def _synchronize(self, op: str, limit: float) -> None:
        """Agree on one verdict: pass, set by the last rank to arrive, or fail, set by the first to time out.

        A rank increments the counter before it sets its own key. So once all keys are set the count is
        complete, and whichever rank sets a passing verdict, no rank is still arriving.
        """
        ranks = range(self.world_size)
        verdict = f"barrier/{self._barriers}"
        self._barriers += 1
        present, arrived = f"{verdict}/present", [f"{verdict}/{rank}" for rank in ranks]
        is_last = self.store.add(present, 1) == self.world_size
        self.store.set(arrived[self.rank], "")
        if is_last:
            self._decide(verdict, [], "")
        if not _poll_until(lambda: self.store.check([verdict]), limit):
            missing = [rank for rank in ranks if not self.store.check([arrived[rank]])]
            why = f"{_join_ranks(missing)} did not arrive while rank {self.rank} waited {limit:g} s"
            self._decide(verdict, missing, why)
        missing, why = json.loads(self.store.get(verdict))
        self.store.delete_key(arrived[self.rank])
        self.store.add(present, -1)  # from here on rank 0 may drop the store
        left = self.rank > 0 or _poll_until(
            lambda: self.store.add(present, 0) == 0, _VERDICT_GRACE if missing else limit
        )
        if missing:  # kept until it expires, for late ranks
            self.entries.extend((key, time.monotonic()) for key in (verdict, present))
            self._fail(op, why, tuple(missing))
        if not left:  # the others pass this barrier, and learn of it at the next
            stuck = [rank for rank in ranks if self.store.check([arrived[rank]])]
            stuck = stuck or [rank for rank in ranks if rank != self.rank]  # a rank between its two updates
            why = f"{_join_ranks(stuck)} arrived, but did not leave within {limit:g} s"
            self._decide(f"barrier/{self._barriers}", stuck, f"at the previous barrier {why}")
            self._fail(op, why, tuple(stuck))
        if self.rank == 0:
            for key in (verdict, present):
                self.store.delete_key(key)

    def _decide(self, verdict: str, missing: list[int], why: str) -> None:
        """Set the verdict unless it is set: all ranks pass if `missing` is empty, else all raise `why`."""
        self.store.compare_set(verdict, "", json.dumps([missing, why]))


def _join_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _poll_until(ready: Callable[[], bool], limit: float) -> bool:
    """Poll with growing intervals until `ready()`; return False after `limit` seconds.

    The store's own wait ignores Ctrl-C, blocks other threads that use the store, and logs its timeouts.
    """
    begin = time.monotonic()
    while not ready():
        waited = time.monotonic() - begin
        if waited >= limit:
            return False
        time.sleep(min(max(waited / 8, _MIN_POLL_INTERVAL), _MAX_POLL_INTERVAL, limit - waited))
    return True


def _listen(host: str, port: int) -> Socket:
    """Listen on this host's address only; a TCPStore's own socket listens on all interfaces."""
    failure: OSError | None = None
    for family, _, _, _, address in getaddrinfo(host, port, type=SOCK_STREAM):
        try:
            return create_server(cast(Any, address), family=family)
        except OSError as error:
            failure = error
    raise failure or OSError(
        f"host is {host!r}, which has no address; pass a name or address of this machine"
    )


def open_store(
    host: str, port: int, rank: int, world_size: int, timeout: timedelta, socket: Socket | None
) -> Store:
    """Return a TCPStore that serves on `socket`, or one that connects to rank 0's if `socket` is None."""
    limit = timeout.total_seconds()
    why: Exception | None = None if socket is not None else _wait_for_listener(host, port, limit)
    if why is None:
        try:
            return TCPStore(
                host,
                port if socket is None else socket.getsockname()[1],
                world_size,
                is_master=socket is not None,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=None if socket is None else os.dup(socket.fileno()),  # the store closes it
                use_libuv=False,  # libuv takes no socket in torch 2.6 and no object above 8 MiB
            )
        except dist.DistError as error:
            why = error
    text = f"cannot reach rank 0 at host {host!r}, port {port} within {limit:g} s: {why}"
    raise SparError(f"create on rank {rank} of {world_size}: {text}", op="create", rank=rank, ranks=(0,))


def _wait_for_listener(host: str, port: int, limit: float) -> OSError | None:
    """Wait until the port accepts connections; return the last error on timeout.

    The store's own wait ignores Ctrl-C.
    """
    failures: deque[OSError] = deque(maxlen=1)

    def is_listening() -> bool:
        try:
            create_connection((host, port), timeout=min(limit, 1.0)).close()
        except OSError as error:
            failures.append(error)
            return False
        return True

    return None if _poll_until(is_listening, limit) else failures[-1]
