"""ProcessGroups without torch.distributed's global state. Source: seed 004."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from .._runtime.checks import check_int, check_rank, check_str, check_type
from ..groups import close
from .stateless_group import StatelessProcessGroup, open_store

# Of each group made here, what holds its store in rank 0's process: the group itself is only a client.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, StatelessProcessGroup] = weakref.WeakKeyDictionary()


def init_gloo_process_group(
    backend: dist.Backend,
    prefix_store: PrefixStore,
    group_rank: int,
    group_size: int,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """A ProcessGroup over gloo, for CPU tensors, that torch.distributed does not know of. Source: seed 004.

    Args:
        backend: "gloo".
        prefix_store: where the ranks meet; each group needs a prefix of its own.
        group_rank: this process's rank in the group.
        group_size: how many ranks there are.
        timeout: limit of the meeting and, by default, of each collective.

    Raises:
        ValueError: another backend, a rank that is none of the group's.
    """
    where = "init_gloo_process_group"
    check_str(where, "backend", backend)
    if backend != dist.Backend.GLOO:
        raise ValueError(f"{where}: backend is {backend!r}; expected 'gloo'")
    check_type(where, "prefix_store", prefix_store, Store, "a Store")
    group_size = check_int(where, "group_size", group_size, 1)
    group_rank = check_int(
        f"{where} with group_size {group_size}", "group_rank", group_rank, 0, group_size - 1
    )
    check_type(where, "timeout", timeout, timedelta, "a timedelta")
    gloo = dist.ProcessGroupGloo(prefix_store, group_rank, group_size, timeout)
    return _process_group(gloo, "cpu", dist.ProcessGroup.BackendType.GLOO, prefix_store)


def _init_nccl_process_group(
    prefix_store: PrefixStore, group_rank: int, group_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(prefix_store, group_rank, group_size, options)
    return _process_group(nccl, "cuda", dist.ProcessGroup.BackendType.NCCL, prefix_store)


def _process_group(
    backend: Any, device: str, kind: dist.ProcessGroup.BackendType, store: PrefixStore
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(device), kind, backend)
    return group


def stateless_init_torch_distributed_process_group(
    host: str, port: int, rank: int, world_size: int, backend: str
) -> dist.ProcessGroup:
    """A ProcessGroup that leaves torch.distributed's global state alone. Collective. Source: seed 004.

    It works whether or not init_process_group was called, and beside any number of others. spar's operations
    take it as their group, as do those of torch.distributed that need no global ranks, such as all_reduce;
    the others are methods of the group: group.broadcast(tensor, root).wait(). Returns when all ranks are
    connected; from then on only `stateless_destroy_torch_distributed_process_group` and nccl need the store
    in rank 0's process.

    Args:
        host: a name or address, IPv4 or IPv6, of rank 0, whose store listens on it alone. The connections
            between ranks are the backend's, which chooses its own interface (GLOO_SOCKET_IFNAME,
            NCCL_SOCKET_IFNAME).
        port: rank 0's store listens here; 0 picks one where the group has one rank.
        rank: this process's rank in the group.
        world_size: how many ranks there are.
        backend: "gloo", for CPU tensors, or "nccl", for CUDA tensors: not yet verified on hardware.

    Raises:
        ValueError: another backend, one that this torch lacks, a rank that is none of world_size.
        OSError: rank 0 cannot listen there.
        MismatchError: another process has this rank, or the ranks give different world_size.
        RuntimeError: a rank did not come within the backend's default timeout; says which.
    """
    where = "stateless_init_torch_distributed_process_group"
    check_str(where, "host", host)
    rank, world_size = check_rank(where, rank, world_size)
    check_str(where, "backend", backend)
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    if not there.get(backend, False):
        has = ", ".join(repr(name) for name in there if there[name])
        raise ValueError(
            f"{where} on rank {rank}: backend is {backend!r}; expected 'gloo' or 'nccl'; this torch has {has}"
        )
    timeout = default_pg_timeout
    if backend == "nccl" and default_pg_nccl_timeout is not None:
        timeout = default_pg_nccl_timeout
    limit = int(timeout.total_seconds())
    meeting = StatelessProcessGroup.create(host, port, rank, world_size, store_timeout=limit)
    # a connection of the group's own, on rank 0 too: the store can end before the group does
    port = cast(TCPStore, meeting.store).port
    client = PrefixStore("group", open_store(host, port, rank, world_size, timeout, None))
    if backend == "gloo":
        group = init_gloo_process_group(dist.Backend("gloo"), client, rank, world_size, timeout)
    else:
        group = _init_nccl_process_group(client, rank, world_size, timeout)
    group._set_group_name(cast(Any, f"stateless {host}:{port}"))  # it is in the texts of errors
    meeting.barrier(limit)  # nobody needs the store to connect any more
    _meetings[group] = meeting
    return group


def stateless_destroy_torch_distributed_process_group(pg: dist.ProcessGroup) -> None:
    """Ends a group of `stateless_init_torch_distributed_process_group` on this rank. Source: seed 004.

    Neither waits nor is collective. On rank 0 it frees the store's port, even while `pg` is still referred
    to. spar's part in the group ends too; outputs of its operations stay valid.

    Raises:
        ValueError: pg is no such group, or was destroyed before.
    """
    check_type(
        "stateless_destroy_torch_distributed_process_group", "pg", pg, dist.ProcessGroup, "a ProcessGroup"
    )
    if _meetings.get(pg) is None:
        raise ValueError(
            "stateless_destroy_torch_distributed_process_group: pg is not a group of "
            "stateless_init_torch_distributed_process_group, or was destroyed before"
        )
    close(pg)
    if hasattr(pg, "shutdown"):
        pg.shutdown()
    else:  # torch 2.6
        cast(Any, c10d)._shutdown_backend(pg)
    del _meetings[pg]
