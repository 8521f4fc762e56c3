# SPDX-License-Identifier: Apache-2.0
"""rank_seed: dropout that differs between ranks, and is equal from run to run and in a recompute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar.random import mixed_seed

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
FIRST = (8493733112532773764, 2481341437032877897)  # of (seed 0, rank 0) and (seed -1, rank 2)


def draws(rank: int, world: int, group: Group) -> list[list[float]]:
    torch.manual_seed(5)
    before, expected = torch.get_rng_state(), torch.rand(3)
    torch.set_rng_state(before)
    drawn = []
    for seed in (0, 1, 0):
        with spar.rank_seed(seed, group):
            drawn.append(torch.rand(3).tolist())
    with pytest.raises(KeyError), spar.rank_seed(-(2**70), group):
        with spar.rank_seed(0, group):
            drawn.append(torch.rand(3).tolist())
        drawn.append(torch.rand(3).tolist())
        raise KeyError
    assert torch.rand(3).equal(expected)  # the state from before is back

    @spar.rank_seed(1, group)
    def decorated() -> list[float]:
        numbers: list[float] = torch.rand(3).tolist()
        return numbers

    assert decorated() == decorated() == drawn[1]
    return drawn


def test_numbers_differ_between_ranks_and_seeds_and_repeat(ranks: Ranks) -> None:
    drawn = ranks(3, draws)
    assert drawn == ranks(3, draws)
    for zero, one, again, nested, negative in drawn:
        assert zero == again == nested and len({tuple(each) for each in (zero, one, negative)}) == 3
    assert len({tuple(numbers) for rank in drawn for numbers in rank}) == 9


def test_neighbouring_seeds_and_ranks_do_not_collide() -> None:
    """The CPU's generator uses the lower 32 bits of a seed."""
    for bits in (32, 64):
        pairs = {mixed_seed(seed, rank) % 2**bits for seed in range(-50, 50) for rank in range(64)}
        assert len(pairs) == 100 * 64
        assert len({mixed_seed(7, rank) % 2**bits for rank in range(5000)}) == 5000
    assert (mixed_seed(0, 0), mixed_seed(-1, 2)) == FIRST  # the same in every release


# ---- checkpoints ----


def block(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).cos()


def gradient(y: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    torch.rand(7)  # so that the generator's state has moved on
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def check_checkpoint(rank: int, world: int, group: Group) -> None:
    def seeded(x: Tensor) -> Tensor:
        with spar.rank_seed(3, group):
            return block(x)

    x = torch.arange(40.0).requires_grad_()
    expected = gradient(seeded(x), x)
    for reentrant in (True, False):
        for preserve in (True, False):
            y = checkpoint(seeded, x, use_reentrant=reentrant, preserve_rng_state=preserve)
            assert gradient(y, x).equal(expected), (reentrant, preserve)
        with spar.rank_seed(3, group):
            y = checkpoint(block, x, use_reentrant=reentrant)
        assert gradient(y, x).equal(expected), reentrant
    with spar.rank_seed(3, group):  # documented as not reproducible
        y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    assert not gradient(y, x).equal(expected)


def test_dropout_is_equal_in_the_recompute_of_a_checkpoint(ranks: Ranks) -> None:
    ranks(2, check_checkpoint)


# ---- devices ----


def check_device(rank: int, world: int, group: Group) -> None:
    """A stand-in for a device whose generator's state is its seed."""
    states = {0: "zero", 1: "one"}
    device = SimpleNamespace(
        current_device=lambda: 1,
        is_initialized=lambda: True,
        get_rng_state=lambda index: states[int(getattr(index, "index", index))],
        set_rng_state=lambda state, index: states.update({int(getattr(index, "index", index)): state}),
        manual_seed=lambda seed: states.update({1: seed}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", device)  # gloo serves this type
        patch.setattr(torch, "get_device_module", lambda kind: device)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        with spar.rank_seed(9, group):
            assert states == {0: "zero", 1: mixed_seed(9, rank)}
            numbers = torch.rand(2)
        assert states == {0: "zero", 1: "one"}
        device.is_initialized = lambda: False
        with spar.rank_seed(9, group):  # without initializing the device
            assert states == {0: "zero", 1: "one"} and torch.rand(2).equal(numbers)
        device.is_initialized = lambda: True
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        with spar.rank_seed(9, group):  # which the group does not serve
            assert states == {0: "zero", 1: "one"}


def test_the_current_device_is_seeded_and_restored(ranks: Ranks) -> None:
    ranks(2, check_device)


def check_errors(rank: int, world: int, group: Group) -> None:
    for seed in (1.0, "1", True, None):
        with (
            pytest.raises(TypeError, match=rf"rank_seed on rank {rank} of 2: seed is {seed!r}; expected"),
            spar.rank_seed(seed, group),  # type: ignore[arg-type]
        ):
            raise AssertionError
    with pytest.raises(TypeError, match="group is 3"), spar.rank_seed(1, 3):  # type: ignore[arg-type]
        raise AssertionError


def test_seed_must_be_an_int(ranks: Ranks) -> None:
    ranks(2, check_errors)
