# SPDX-License-Identifier: Apache-2.0
"""Make and destroy ProcessGroups without torch.distributed's global state. From vLLM."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from .._checks import check_int, check_rank, check_str, check_type
from ..groups import close
from .stateless_group import StatelessProcessGroup, open_store

# For each group made here, the rendezvous that owns its store in rank 0's process; the group is a client.
_rendezvous: weakref.WeakKeyDictionary[dist.ProcessGroup, StatelessProcessGroup] = weakref.WeakKeyDictionary()


def init_gloo_process_group(
    backend: dist.Backend,
    prefix_store: PrefixStore,
    group_rank: int,
    group_size: int,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make a gloo ProcessGroup for CPU tensors without registering it with torch.distributed. From vLLM.

    Args:
        backend: must be "gloo".
        prefix_store: the store for the rendezvous; each group needs its own prefix.
        group_rank: this process's rank in the group.
        group_size: the number of ranks.
        timeout: the timeout of the rendezvous and the default timeout of each collective.

    Raises:
        ValueError: `backend` is not "gloo", or `group_rank` is not in [0, group_size).
        TypeError: an argument has the wrong type.
    """
    caller = "init_gloo_process_group"
    check_str(caller, "backend", backend)
    if backend != dist.Backend.GLOO:
        raise ValueError(f"{caller}: backend is {backend!r}; expected 'gloo'")
    check_type(caller, "prefix_store", prefix_store, Store, "a Store")
    group_size = check_int(caller, "group_size", group_size, 1)
    group_rank = check_int(
        f"{caller} with group_size {group_size}", "group_rank", group_rank, 0, group_size - 1
    )
    check_type(caller, "timeout", timeout, timedelta, "a timedelta")
    gloo = dist.ProcessGroupGloo(prefix_store, group_rank, group_size, timeout)
    return _process_group(gloo, "cpu", dist.ProcessGroup.BackendType.GLOO, prefix_store)


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
    """Make a ProcessGroup without touching torch.distributed's global state. Collective. From vLLM.

    A process may make any number of them, before or after init_process_group. spar's operations accept the
    group, as do torch.distributed functions that need no global ranks, such as all_reduce. For the others use
    the group's methods: `group.broadcast(tensor, root).wait()`.

    Returns when all ranks are connected. From then on, only nccl and
    `stateless_destroy_torch_distributed_process_group` need the store in rank 0's process.

    Args:
        host: the name or address (IPv4 or IPv6) of rank 0, whose store listens on it only. The backend picks
            the interface that connects the ranks (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).
        port: the port of rank 0's store; 0 picks a free one if world_size is 1.
        rank: this process's rank in the group.
        world_size: the number of ranks.
        backend: "gloo" for CPU tensors, or "nccl" for CUDA tensors (not yet verified on hardware).

    Raises:
        ValueError: `backend` is unknown or not in this build of torch, or `rank` is not in [0, world_size).
        TypeError: an argument has the wrong type.
        OSError: rank 0 cannot listen on this host and port.
        MismatchError: another process has the same rank, or world_size differs between ranks.
        RuntimeError: ranks are missing after the backend's default timeout; the error names them.
    """
    caller = "stateless_init_torch_distributed_process_group"
    check_str(caller, "host", host)
    rank, world_size = check_rank(caller, rank, world_size)
    check_str(caller, "backend", backend)
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    if not available.get(backend, False):
        names = ", ".join(repr(name) for name in available if available[name])
        raise ValueError(
            f"{caller} on rank {rank}: backend is {backend!r}; "
            f"expected 'gloo' or 'nccl'; this build of torch has {names}"
        )
    timeout = default_pg_timeout
    if backend == "nccl" and default_pg_nccl_timeout is not None:
        timeout = default_pg_nccl_timeout
    limit = int(timeout.total_seconds())
    rendezvous = StatelessProcessGroup.create(host, port, rank, world_size, store_timeout=limit)
    # the group's own connection, on rank 0 too: the group may outlive the store
    port = cast(TCPStore, rendezvous.store).port
    client = PrefixStore("group", open_store(host, port, rank, world_size, timeout, None))
    if backend == "gloo":
        group = init_gloo_process_group(dist.Backend("gloo"), client, rank, world_size, timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(client, rank, world_size, options)
        group = _process_group(nccl, "cuda", dist.ProcessGroup.BackendType.NCCL, client)
    group._set_group_name(cast(Any, f"stateless {host}:{port}"))  # shown in errors
    rendezvous.barrier(limit)  # after it, no rank needs the store to connect
    _rendezvous[group] = rendezvous
    return group


def stateless_destroy_torch_distributed_process_group(pg: dist.ProcessGroup) -> None:
    """Destroy a group made by `stateless_init_torch_distributed_process_group` on this rank. From vLLM.

    Neither blocks nor is collective. On rank 0 it frees the store's port, even while references to `pg`
    remain. Also closes spar's communicator of the group; outputs of its operations stay valid.

    Raises:
        ValueError: `pg` is not such a group, or was already destroyed.
        TypeError: `pg` is not a ProcessGroup.
    """
    caller = "stateless_destroy_torch_distributed_process_group"
    check_type(caller, "pg", pg, dist.ProcessGroup, "a ProcessGroup")
    if _rendezvous.get(pg) is None:
        raise ValueError(
            f"{caller}: pg is a {type(pg).__name__} that is not a group of "
            "stateless_init_torch_distributed_process_group, or was destroyed before"
        )
    close(pg)
    if hasattr(pg, "shutdown"):
        pg.shutdown()
    else:  # torch 2.6
        cast(Any, c10d)._shutdown_backend(pg)
    del _rendezvous[pg]
