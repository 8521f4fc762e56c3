"""A default device that is not the tensors' own: spar's internal tensors must not follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same

import spar
from spar import SequenceLayout


def waited(pair: tuple[torch.Tensor, spar.Work]) -> torch.Tensor:
    pair[1].wait()
    return pair[0]


def gradient(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    call(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def check_default_device(rank: int, world: int, group: dist.ProcessGroup) -> None:
    total = 8 * world + 3
    even, zigzag = SequenceLayout.even(total, group), SequenceLayout.zigzag(total, group)
    packed = SequenceLayout.packed([5, total - 5], group)
    x = torch.arange(12.0 * world).view(3, 2 * world, 2) + rank
    whole = torch.arange(6.0 * total).view(2, total, 3).transpose(1, 2)
    out = torch.empty(3 * world, 2 * world, 2)
    calls: list[Callable[[], Any]] = [
        lambda: spar.all_to_all(x, group, 1, 0),
        lambda: spar.all_to_all([x, x], group, 1, 0)[1],
        lambda: waited(spar.all_to_all(x, group, 1, 0, async_op=True)),
        lambda: spar.all_gather(x, group, out=out),
        lambda: spar.reduce_scatter(x, group, 1),
        lambda: spar.all_gather(x.to(torch.float8_e4m3fn), group).float(),
        lambda: gradient(lambda x: spar.all_to_all(x, group, 1, 0), x),
        lambda: gradient(lambda x: zigzag.shard(x, 2, "down"), whole),
        lambda: spar.split_forward_gather_backward(whole, group, 2),
        lambda: spar.load_balanced_split_forward_gather_backward(whole[..., : 4 * world], group, 2),
        lambda: packed.all_gather(packed.shard(whole, 2), 2),
        lambda: spar.cal_split_sizes_multi([5, 7], world),
        lambda: spar.mean_loss(x.sum(), 3, group),
        lambda: torch.tensor(SequenceLayout.from_local(rank + 1, group).sizes, device="cpu"),
        *[layout.index for layout in (even, zigzag, packed)],
        *[layout.positions for layout in (even, packed)],
        packed.cu_seqlens,
    ]
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
