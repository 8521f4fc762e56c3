# SPDX-License-Identifier: Apache-2.0
"""Changes in place of tensors that would share memory if nothing was sharded: right, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor, nn

import spar

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def written_copy(h: Tensor) -> Tensor:
    part = h[:, 1:4]
    part.mul_(3)
    return h


def written_base(h: Tensor) -> Tensor:
    part = h[:, 1:4]
    h.mul_(3)
    return h + part.sum(1, keepdim=True)


def written_copy_of_copy(h: Tensor) -> Tensor:
    part = h[:, 1:9][:, 1:5]
    part.mul_(3)
    return h + part.sum()


def written_twin(h: Tensor) -> Tensor:
    first, second = h[:, 1:9], h[:, 1:5]
    first.mul_(3)
    return first.mean(1, keepdim=True) + second.sum(1, keepdim=True)


def written_keyword(h: Tensor) -> Tensor:
    part = torch.narrow(input=h, dim=1, start=1, length=4)
    h.mul_(3)
    return h + part.sum(1, keepdim=True)


def written_twin_alone(h: Tensor) -> Tensor:
    first, second = h[:, 1:9], h[:, 1:5]
    del h
    first.mul_(3)
    return first.mean(1, keepdim=True) + second.sum(1, keepdim=True)


def written_again(h: Tensor) -> Tensor:
    """The same calls as before, whose plans are known."""
    for _ in range(2):
        part = h[:, 1:4]
        h = h + part.sum(1, keepdim=True)
    part = h[:, 1:4]
    h.mul_(3)
    return h + part.sum(1, keepdim=True)


def returned_stale(h: Tensor) -> tuple[Tensor, Tensor]:
    part = h[:, 1:4]
    part.mul_(3)
    return part, h


def copy_alone(h: Tensor) -> Tensor:
    part = h[:, 1:9]
    del h
    part.mul_(3)
    return part + 1


def base_alone(h: Tensor) -> Tensor:
    mean = h[:, 1:4].mean(1, keepdim=True)
    h.mul_(3)
    return h + mean


def clone(h: Tensor) -> Tensor:
    part = h[:, 1:4].clone()
    h.mul_(3)
    return h + part.sum(1, keepdim=True)


def split_parts(h: Tensor) -> Tensor:
    first, second = h.split([5, 8], 1)
    second.mul_(3)
    return torch.cat([second, first + 1], 1)


def input_by_name(h: Tensor) -> Tensor:
    return torch.narrow(input=torch.mul(input=h, other=2), dim=1, start=1, length=4) + h.mean()


def view_of_part(h: Tensor) -> Tensor:
    heads = h.view(*h.shape[:2], 2, -1)
    h.mul_(3)
    return heads.flatten(2) + h


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


def model_of(function: Callable[[Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(function)).double()


def check(rank: int, world: int, group: Group, function: Callable[[Tensor], Any], is_right: bool) -> None:
    model, x = model_of(function), torch.arange(2 * 13 * 8.0).view(2, 13, 8).double() / 99
    spar.shard_model(model, group, blocks=["0"])
    for _ in range(2):  # planned, and known
        with torch.no_grad():
            if is_right:
                torch.testing.assert_close(model(x), model_of(function)(x))
            else:
                with pytest.raises(RuntimeError, match="changed in place through another one"):
                    model(x)


WRONG = [
    written_copy,
    written_base,
    written_copy_of_copy,
    written_twin,
    written_twin_alone,
    written_keyword,
    written_again,
    returned_stale,
]
RIGHT = [copy_alone, base_alone, clone, split_parts, input_by_name, view_of_part]


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_changes_that_one_process_would_see_raise(pool: Ranks, function: Any) -> None:
    pool(2, check, function, False)


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_changes_that_nobody_would_see_are_right(pool: Ranks, function: Any) -> None:
    pool(3, check, function, True)
