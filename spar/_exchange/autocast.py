# SPDX-License-Identifier: Apache-2.0
"""Products that keep the dtype of what they are made of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def no_autocast(device: str) -> AbstractContextManager[None]:
    """Return a block in which autocast leaves products on a type of device in their dtype."""
    # Meta tensors have no autocast.
    is_on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_on else nullcontext()
