# SPDX-License-Identifier: Apache-2.0
"""Set up a group's transport: ranks exchange what each offers, make the same choice, and connect. Collective.

A rank that fails reports that to its peers, which raise, too. The next call starts again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from .. import _C
from .._control import speeds
from .._control.agreement import mark_reported
from .._control.process_group import backend_name
from .._control.state import OVER, GroupState, Transport
from .._deprecated import warn_of_removed_variables
from .._transports import CHANNELS, cuda
from .._transports.channel import Channel
from .._transports.nccl import NcclChannel
from .._transports.push import PushChannel
from ..errors import SparError
from . import trial
from .log import log, read_settings
from .stages import all_gather, connect


def set_up(group: GroupState, op: str, device: torch.device, deadline: float) -> tuple[Transport, Channel]:
    """Set up a transport for the device type, with all ranks of the group."""
    cuda.refuse_capture(op, device, "the group is not set up yet; call spar.init(group, device) before")
    cuda.refuse_open_group(op, device)
    try:
        with cuda.on_device(device):
            cuda.find_libraries()
            if group.peer_info is None:
                group.peer_info = _exchange_peer_info(group, op, device, deadline)
            left_out = _left_to_the_backend(group, device)
            refused = left_out
            while True:
                name, reason, rejected = _choose(group, group.peer_info, device, refused)
                channel = CHANNELS[name](group, device, op, deadline)
                core = channel.core
                failure = connect(group, core, device, op, deadline) if core is not None else ""
                if not failure and isinstance(channel, PushChannel) and _has_rival(group, device, refused):
                    channel, speeds, failure = trial.compare(group, channel, device, op, deadline)
                    if channel.name != name:
                        slower = *refused, (name, speeds)
                        name, reason, rejected = _choose(group, group.peer_info, device, slower)
                    reason = f"{reason}: {speeds}"
                if not failure:
                    break
                if channel.drop_core():
                    log.info("group %s: no mailboxes: %s", group.name, failure)
                    break
                if name == "shm":  # its ranks may still connect as those of different hosts do
                    group.peer_info = _C.part_hosts(group.peer_info)
                    group.hosts = _hosts(group.peer_info)
                else:
                    group.connects = group.connects and name != "tcp"  # torch would fail to connect likewise
                refused += ((name, failure),)
        log.info("group %s: transport %s: %s", group.name, name, reason)
        if not left_out:
            _warn_if_slower(group, name, device, rejected, refused)
        return Transport(name, reason, device.type, group.world, rejected, *_parts(group, name)), channel
    except BaseException:
        if not group.transports:
            group.peer_info = None
        raise


def _exchange_peer_info(group: GroupState, op: str, device: torch.device, deadline: float) -> bytes:
    """Return what each rank can offer, by which all choose alike."""
    own = _C.peer_info(_host_id())
    # Its place is that of other versions, whose ranks are then named.
    data = os.urandom(8) + own + speeds.read(device.type).pack()
    rows = all_gather(group, data, "peer info", op, device, deadline)
    peer_info = b"".join([row[8 : 8 + len(own)] for row in rows])
    group.shares_host = not any(first for first, _ in _C.hosts(peer_info))
    group.hosts = _hosts(peer_info)
    group.token = hashlib.blake2b(b"".join([row[:8] for row in rows]), digest_size=8).hexdigest()
    _choose(group, peer_info, device, ())
    group.measured[device.type] = speeds.unpack(rows[0][8 + len(own) :])
    _read_settings(group, peer_info)
    return peer_info


def _left_to_the_backend(group: GroupState, device: torch.device) -> tuple[tuple[str, str], ...]:
    """Leave CPU tensors between hosts to a backend that the user chose for its network, such as mpi."""
    if device.type != "cpu" or group.shares_host or _C.env("transport") == "tcp":
        return ()
    name = backend_name(group.process_group, device)
    return () if name in (None, "gloo") else (("tcp", f"the group's backend for CPU tensors is {name}"),)


def _parts(group: GroupState, name: str) -> tuple[tuple[tuple[int, ...], ...], float, float]:
    """Return the last fields of a Transport: the hosts, and what goes through memory and the network."""
    hosts = group.hosts
    # On one host tcp connects the ranks, without shared memory.
    if name == "tcp" and len(hosts) == 1:
        hosts = tuple((rank,) for rank in range(group.world))
    near = next(len(ranks) for ranks in hosts if group.rank in ranks) - 1
    shared = near / (group.world - 1) if name in ("shm", "tcp") else 0.0
    return hosts, shared, 0.0 if group.shares_host else (group.world - 1 - near) / (group.world - 1)


def _hosts(peer_info: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, those with which processes share memory."""
    firsts = [first for _, first in _C.hosts(peer_info)]
    return tuple(
        tuple(rank for rank, other in enumerate(firsts) if other == first) for first in dict.fromkeys(firsts)
    )


def _host_id() -> bytes:
    """Identify the network namespace of this running system, in which processes connect; zeros: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.blake2b((boot + os.readlink("/proc/self/ns/net")).encode(), digest_size=16).digest()
    except OSError:
        return bytes(16)


def _has_rival(group: GroupState, device: torch.device, refused: tuple[tuple[str, str], ...]) -> bool:
    """Whether nccl would serve where push does, and SPAR_TRANSPORT names neither: then time decides."""
    if _C.env("transport") == PushChannel.name:
        return False
    assert group.peer_info is not None
    rest = *refused, (PushChannel.name, "")
    return _choose(group, group.peer_info, device, rest)[0] == NcclChannel.name


def _warn_if_slower(
    group: GroupState,
    name: str,
    device: torch.device,
    rejected: tuple[tuple[str, str], ...],
    failed: tuple[tuple[str, str], ...],
) -> None:
    """Warn on rank 0 that ranks lost a faster transport by a failure, not by SPAR_TRANSPORT.

    failed: transports whose set-up failed. Others of CUDA tensors are rejected where the hardware has none.
    """
    if device.type == "cpu":
        lost = "shm" if group.shares_host else "tcp"
        why = dict(rejected).get(lost)
    else:
        lost, why = failed[0] if failed else ("", None)
    setting = _C.env("transport") or "^"
    if why is None or group.rank != 0:
        return
    if setting == f"^{lost}" or setting[0] != "^":
        return
    processes = [process for process in _C.processes(group.peer_info or b"") if process[0]]
    if len(set(processes)) < len(processes):  # ranks that are threads of one process
        return
    log.warning(
        "group %r: its %d ranks %s, but the set-up of %s failed, and %s, which is slower, "
        "moves their tensors: %s. Remove the cause (docs/errors.md, TransportError), or set "
        "SPAR_TRANSPORT=%s",
        group.name,
        group.world,
        "share this host" if group.shares_host else "are on several hosts",
        lost,
        name,
        why,
        name,
    )


def _read_settings(group: GroupState, peer_info: bytes) -> None:
    """What the environment sets, which is equal on all ranks where it must be, and this rank's cores."""
    group.compares = _C.env("check") != "0"
    group.synchronous = _C.env("check") == "1"
    group.own_output = _C.env("output") == "torch"
    group.local_ranks = _C.env("local_ranks") or max(len(ranks) for ranks in group.hosts)
    _C.plan_limit(_C.env("plan_cache"))
    group.core_share = _C.core_share(peer_info, group.rank, group.local_ranks)
    _C.threads(torch.get_num_threads(), group.core_share)
    read_settings(group)
    warn_of_removed_variables()


def known_rejections(group: GroupState, device: str) -> tuple[tuple[str, str], ...]:
    """Transports known not to serve a device's tensors; before the set-up, as far as this rank knows."""
    if device == "cpu":  # whether ranks share memory, they find out together
        return ()
    cuda.find_libraries()
    try:
        if group.peer_info is None:
            return _C.choose(_C.peer_info(), device, (), group.rank)[2]
        return _C.choose(group.peer_info, device, ())[2]
    except (ValueError, SparError):  # settings that the first exchange will report
        return ()


def _choose(
    group: GroupState, peer_info: bytes, device: torch.device, refused: tuple[tuple[str, str], ...]
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """The transport, by what all ranks know: where none can serve, every rank raises the same error."""
    try:
        return _C.choose(peer_info, device.type, refused)
    except (ValueError, SparError) as error:
        mark_reported(error, group)
        group.progress = OVER
        raise
