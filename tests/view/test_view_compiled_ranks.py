# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks where ranks differ, fail, wait or have few tokens: all run the same code, or raise."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.compiled_blocks import Block, Compared, compile_blocks, inputs, of

import spar
from spar._model import backends

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler]
Group = dist.ProcessGroup


def check_lengths(rank: int, world: int, group: Group) -> None:
    compared, most = Compared(of(Block), group), 3
    with torch._dynamo.config.patch(recompile_limit=most):
        for total in range(8, 8 + most + 2):
            compared.infer(inputs(0, total))
    assert compared.graphs == most
    assert compared.reasons == f"Block x2: its arguments are of more than {most} lengths or layouts"


def test_many_lengths_are_not_compiled_for_ever(ranks: Ranks) -> None:
    ranks(2, check_lengths)


def check_few_tokens(rank: int, world: int, group: Group) -> None:
    compared = Compared(of(Block), group)
    for total in (3, 2, 1, 3):
        compared.infer(inputs(0, total))
    assert (
        compared.graphs == 0
        and compared.reasons == "Block x2: a rank has less than two tokens of an argument"
    )


def test_few_tokens_run_eagerly(ranks: Ranks) -> None:
    ranks(2, check_few_tokens)


# ---- ranks ----


def check_one_fails(rank: int, world: int, group: Group) -> None:
    own = backends.Backend.make

    def make(self: Any, *rest: Any) -> Any:
        if rank == world - 1:
            raise RuntimeError("no compiler here")
        return own(self, *rest)

    with mock.patch.object(backends.Backend, "make", make):
        compared = Compared(of(Block), group)
        for seed in range(3):
            compared.step(inputs(seed))
    expected = "no compiler here" if rank == world - 1 else "another rank could not compile it"
    assert expected in compared.reasons, compared.reasons


def test_a_rank_that_cannot_compile_makes_all_run_eagerly(ranks: Ranks) -> None:
    ranks(3, check_one_fails)


def check_slow(rank: int, world: int, group: Group) -> None:
    """A rank traces while the others wait for it: tracing must not need them."""
    own = backends.Backend.make

    def slow(self: Any, *rest: Any) -> Any:
        time.sleep(3.0 * rank)
        return own(self, *rest)

    with mock.patch.object(backends.Backend, "make", slow):
        compared = Compared(of(Block), group)
        for seed in range(2):
            compared.step(inputs(seed))
    assert compared.graphs == 1


def test_a_rank_traces_alone(ranks: Ranks) -> None:
    ranks(2, check_slow)


def check_fails_later(rank: int, world: int, group: Group) -> None:
    compared = Compared(of(Block), group)
    for seed in range(2):
        compared.step(inputs(seed))

    def fail(*_: Any) -> None:
        raise ValueError("injected")

    if rank == world - 1:
        handle = compared.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError if rank == world - 1 else spar.MismatchError, match="injected"):
        compared.call(inputs())
    if rank == world - 1:
        handle.remove()
    compared.step(inputs(5))
    assert compared.graphs == 1 and not compared.reasons


def test_an_error_on_one_rank_is_one_on_all_and_the_next_forward_is_right(ranks: Ranks) -> None:
    ranks(2, check_fails_later)


def check_off(rank: int, world: int, group: Group) -> None:
    """Code that runs in torch.compile's place must not get hollow tensors."""
    compared = Compared(of(Block), group, compile_blocks)
    torch._dynamo.config.disable = True
    try:
        for seed in range(3):
            compared.step(inputs(seed))
    finally:
        torch._dynamo.config.disable = False
    assert "turned off" in compared.reasons and not compared.graphs


def test_a_compiler_that_is_turned_off_leaves_blocks_eager(ranks: Ranks) -> None:
    ranks(2, check_off)
