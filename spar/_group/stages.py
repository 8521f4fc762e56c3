# SPDX-License-Identifier: Apache-2.0
"""Stages of a group's set-up: each is an agreement of all ranks. Collective."""

from __future__ import annotations

import zlib

import torch

from .. import _C
from .._control.agreement import agree
from .._control.state import LOCAL, SHARED, GroupState
from ..errors import ExchangeTimeoutError


def connect(
    group: GroupState,
    core: _C.Comm,
    device: torch.device,
    op: str,
    deadline: float,
    limit: float | None = None,
) -> str:
    """Set up a communicator of the C core on all ranks; return why it failed on one, or "" on all ranks.

    limit: an earlier time than the deadline, after which it has failed, and the set-up goes on.
    """
    group.connecting = core
    failure = "it raised"
    try:
        results = b"".join(all_gather(group, core.setup_result, "opened", op, device, deadline))
        failure = _failure(results)
        if not failure:
            group.progress = SHARED
            try:
                core.connect(results, deadline if limit is None else min(limit, deadline))
            except ExchangeTimeoutError:  # its result has it, too
                if limit is None:
                    raise
            group.progress = LOCAL
            rows = all_gather(group, core.setup_result, "connected", op, device, deadline)
            failure = _failure(b"".join(rows))
    finally:
        group.connecting = None
        if failure:
            core.close()
    return failure


def _failure(results: bytes) -> str:
    """Return the reason of the first rank that failed in a stage of the set-up, or "" if none did."""
    failure = _C.setup_failure(results)
    return failure[1] if failure else ""


def all_gather(
    group: GroupState, data: bytes, stage: str, op: str, device: torch.device, deadline: float
) -> list[bytes]:
    """Gather the bytes that each rank sends in one stage of the set-up, which all ranks must have reached."""
    step = zlib.crc32(f"{stage} {device.type}".encode())
    described = f"sets up its {device.type} transport ({stage})"
    rows = agree(group, op, step, lambda: (described, None), deadline, data)
    group.progress = LOCAL
    return rows
