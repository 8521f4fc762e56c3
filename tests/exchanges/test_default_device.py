# SPDX-License-Identifier: Apache-2.0
"""A default device that is not the tensors' own: spar's internal tensors must not follow it.

test_operations.py runs each operation so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same
from helpers.tables import MAKERS

import spar


def check_default_device(rank: int, world: int, group: dist.ProcessGroup) -> None:
    total = 8 * world + 3
    x = torch.arange(12.0 * world).view(3, 2 * world, 2) + rank
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: spar.all_gather(x.to(torch.float8_e4m3fn), group).float(),
        lambda: spar.cal_split_sizes_multi([5, 7], world),
    ]
    for maker in MAKERS.values():
        make = partial(maker.of_total, total, group)
        layout = make()
        calls += [partial(lambda make: make().index(), make), layout.positions, layout.cu_seqlens]
    for call in calls:
        expected = call()
        with torch.device("meta"):
            found = call()
        assert found.device.type == "cpu"
        assert_same(found, expected)
    with torch.device("meta"), pytest.raises(spar.MismatchError, match="calls differ between the ranks"):
        spar.all_gather(x[:, : 1 + rank], group)
    if rank == 0:
        with torch.device("meta"), pytest.raises(ValueError, match="gather_size is 99"):
            spar.all_to_all(x, group, 1, 0, 99)
    else:
        with torch.device("meta"), pytest.raises(spar.MismatchError, match="rank 0 failed: ValueError"):
            spar.all_to_all(x, group, 1, 0)
    assert_same(spar.all_gather(x[:1, :1, 0], group).flatten(), torch.arange(float(world)))


def test_default_device_is_the_callers_alone(ranks: Ranks) -> None:
    ranks(2, check_default_device)
