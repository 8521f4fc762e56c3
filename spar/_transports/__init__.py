# SPDX-License-Identifier: Apache-2.0
"""The transports, by name: what csrc/transports lists, on Python's side.

To add one: a module here with a class that has the methods of `channel.Channel`, and its row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch as _torch

from .._control.state import GroupState
from . import nccl, push, shm, torch
from .channel import Channel

# Each call is the first stage of a set-up, for a device of this rank and the operation that needs it.
CHANNELS: dict[str, Callable[[GroupState, _torch.device, str, float], Channel]] = {
    "shm": shm.ShmChannel,
    "tcp": shm.TcpChannel,
    "push": push.PushChannel,
    "nccl": nccl.NcclChannel,
    "torch": torch.TorchChannel,
}
