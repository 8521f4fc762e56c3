# SPDX-License-Identifier: Apache-2.0
"""Changes in place of tensors that would share memory if nothing was sharded: right, or an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from torch import Tensor, nn

import spar
from spar._model.aliases import Aliases

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


def dropped_copy(h: Tensor) -> Tensor:
    part = h[:, 1:4]
    F.dropout(part, 0.5, True, True)
    return h + 1


def contiguous_copy(h: Tensor) -> Tensor:
    """One process copies what is not contiguous; a part is, as it was exchanged."""
    part = h[:, 1:9]
    copy = part.contiguous()
    copy.mul_(3)
    return part + copy


def reshaped_copy(h: Tensor) -> Tensor:
    part = h[:, 1:9]
    part.reshape(-1, 8).mul_(3)
    return part + 1


def reshaped_token(h: Tensor) -> Tensor:
    """One process copies, as the dims are not in order; with one token on each rank they are."""
    few = h[:, :2] * 2
    flat = few.transpose(1, 2).reshape(2, -1)
    flat.mul_(3)
    return few + flat.sum()


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


def later_input_by_name(h: Tensor) -> Tensor:
    limits = torch.arange(4.0, dtype=h.dtype)
    found = torch.searchsorted(sorted_sequence=limits, input=h)
    return torch.where(condition=h > 0, input=h * found, other=torch.polygamma(n=1, input=h))


def no_dropout(h: Tensor) -> Tensor:
    part = h[:, 1:4]
    return F.dropout(part, 0.5, False, True).sum() + h


def reshaped_parts(h: Tensor) -> Tensor:
    flat = h.reshape(-1, 8)
    flat.mul_(3)
    return flat.contiguous() + h.sum() + h[:, 1:9].contiguous().reshape(-1, 8).sum(0)


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
    spar.parallelize(model, group, blocks=["0"])
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
    dropped_copy,
    contiguous_copy,
    reshaped_copy,
    reshaped_token,
]
RIGHT = [
    copy_alone,
    base_alone,
    clone,
    split_parts,
    input_by_name,
    later_input_by_name,
    no_dropout,
    reshaped_parts,
    view_of_part,
]


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_changes_that_one_process_would_see_raise(pool: Ranks, function: Any) -> None:
    pool(2, check, function, False)


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_changes_that_nobody_would_see_are_right(pool: Ranks, function: Any) -> None:
    pool(3, check, function, True)


def check_transform(rank: int, world: int, group: Group) -> None:
    """A plan of equal shapes is known when the transform hides a tensor's."""
    x, known = torch.ones(2, 13, 8).double(), []

    def function(h: Tensor) -> Tensor:
        if not known:
            return h + (h * torch.ones(8)).sum()
        return torch.vmap(lambda scale: h * scale)(torch.ones(3, 8)).sum() + h

    model = model_of(function)
    spar.parallelize(model, group, blocks=["0"])
    model(x)
    known.append(True)
    with pytest.raises(RuntimeError, match=r"torch\.func transform of a part"):
        model(x)


def test_transforms_of_parts_raise_where_plans_are_known(pool: Ranks) -> None:
    pool(2, check_transform)


def check_addresses(rank: int, world: int, group: Group) -> None:
    aliases, base, kept = Aliases(), torch.ones(4), torch.ones(4)
    aliases.add_copies([kept], base)
    for _ in range(200):  # memory of copies that are gone is used again
        aliases.add_copies([torch.ones(4)], base)
        aliases.add_copies([], kept)
        aliases.write(torch.ones(4))
    assert not aliases.any_stale


def test_later_tensors_have_no_aliases_of_those_that_are_gone(pool: Ranks) -> None:
    pool(1, check_addresses)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.pad(F.dropout(x, 0.3, True), (1, 1, 1, 1)))


def check_memory_of_images(rank: int, world: int, group: Group) -> None:
    torch.manual_seed(0)
    model, x = Padded(), torch.ones(2, 4, 9, 6).contiguous(memory_format=torch.channels_last)
    whole = copy.deepcopy(model)
    spar.parallelize(model, group, blocks=[""])
    for mode in (torch.no_grad, torch.inference_mode):  # tensors of the latter have no versions
        with mode():
            torch.manual_seed(1)
            expected = whole(x)
            torch.manual_seed(1)
            torch.testing.assert_close(model(x), expected)


def test_padded_images_in_inference_mode_and_channels_last(pool: Ranks) -> None:
    pool(3, check_memory_of_images)


class Counting(nn.Module):
    """A block that changes the table which it shares with other blocks."""

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        tables[1].mul_(2)
        return x * tables[0] + tables[1] + x.mean(1, keepdim=True)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        tables = torch.full_like(x, 0.5), torch.ones_like(x)
        for block in self.blocks:
            x = block(x, tables)
        return x


def check_tables(rank: int, world: int, group: Group) -> None:
    """With one row a rank's part is memory of the whole table, with two a copy, which later blocks lack."""
    model = Tables()
    whole = copy.deepcopy(model)
    spar.parallelize(model, group)
    x = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        torch.testing.assert_close(model(x[:1]), whole(x[:1]))
        with pytest.raises(RuntimeError, match="changed in place through another one"):
            model(x)


def test_tables_that_a_block_changes_are_right_or_raise(pool: Ranks) -> None:
    pool(2, check_tables)
