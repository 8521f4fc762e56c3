# SPDX-License-Identifier: Apache-2.0
"""Models that are compiled as one graph: equal to one process, or compiled by block for a reason."""

from __future__ import annotations

import functools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import compiled_blocks as blocks, compiled_containers as containers, compiled_models as models
from helpers.compiled_blocks import Block, Compared, compile_model, each, inputs, of
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import spar
from spar._exchange.arguments import ranks_of
from spar._model import backends

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler, pytest.mark.long]
Group = dist.ProcessGroup


RIGHT = {
    "a branch on the length": each(blocks.ByLength),
    "blocks of several kinds": each(
        functools.partial(Block, causal=True), blocks.Running, blocks.Custom, blocks.RunsWhole, blocks.Pieces
    ),
    "random numbers": each(blocks.Dropout, models.Noise),
    "keeps its result and its argument": each(blocks.KeepsOutput, blocks.KeepsInput, net=blocks.KeepingNet),
    "changes its argument": of(blocks.InPlace, blocks.InPlaceNet),
    "returns its argument": of(blocks.Returns, blocks.ReturningNet),
    "dataclasses": of(containers.OfDataclasses, containers.DataclassNet),
    "a list that grows": of(containers.Appends, containers.AppendingNet),
    "one tensor twice": of(models.Twice, models.TwiceNet),
    "tables in a tuple": of(models.AddsTables, models.TupleNet),
    "an attribute of an argument": of(containers.Tagged, containers.TaggedNet),
    "a loss": each(Block, net=models.LossNet),
    "a block without gradients": of(Block, models.Teacher),
    "Functions on whole tensors and on a weight": each(models.LimitsWeight, net=models.LimitsWhole),
}
# With what the report says.
BY_BLOCK = {
    "a checkpoint around blocks": (of(Block, blocks.CheckpointAround), "no block begins in its graph"),
    "a reentrant checkpoint": (of(Block, blocks.ReentrantAround), "no block begins in its graph"),
    "a branch on a value": (each(blocks.ByValue), "Data-dependent branching"),
    "a hook of a gradient": (each(blocks.HooksGradient), "the operator register_hook of parts"),
    "a hook of a whole tensor": (each(Block, net=models.HooksWhole), "the operator register_hook"),
    "inference mode inside": (each(Block, net=models.InferenceInside), "it enters inference mode"),
    "a number of a tensor in each forward": (each(blocks.Counter), "it is 4 graphs already"),
}


def check_right(rank: int, world: int, group: Group, name: str) -> None:
    """With two batches and more: what depends on values is no constant of the graph."""
    compared = Compared(RIGHT[name], group, compile_model)
    for seed in range(3):
        compared.step(inputs(seed))
    assert compared.graphs == 1, compared.report
    if name == "a branch on the length":
        compared.step(inputs(3, 18))
        compared.apply(nn.Module.eval)
        compared.infer(inputs(4))
    assert not compared.report.why_by_block and not compared.reasons, compared.report


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_is_one_graph(ranks: Ranks, name: str) -> None:
    ranks(3 if name == "tables in a tuple" else 2, check_right, name)


def check_by_block(rank: int, world: int, group: Group, name: str) -> None:
    make, reason = BY_BLOCK[name]
    compared = Compared(make, group, compile_model)
    for seed in range(6):
        compared.step(inputs(seed))
    (why,) = compared.report.why_by_block
    assert reason in why and "compiled by block" in str(compared.report), why


@pytest.mark.parametrize("name", BY_BLOCK)
def test_what_cannot_be_one_graph_is_compiled_by_block_for_a_reason(ranks: Ranks, name: str) -> None:
    ranks(2, check_by_block, name)


def check_kept(rank: int, world: int, group: Group) -> None:
    """What is whole in eager code is whole where the model keeps it, also if blocks get it."""
    compared = Compared(of(Block, models.KeepsWhole), group, compile_model)
    for seed in range(3):
        for model, call in ((compared.whole, compared.whole), (compared.model, compared.call)):
            model.zero_grad()
            out = call(inputs(seed))
            (out.square().mean() + model.kept.square().mean()).backward()
        assert compared.model.kept.shape == compared.whole.kept.shape
        torch.testing.assert_close(compared.model.kept, compared.whole.kept)
    assert compared.graphs == 1


def test_a_tensor_that_the_model_keeps_is_whole(ranks: Ranks) -> None:
    ranks(2, check_kept)


def check_recomputed(rank: int, world: int, group: Group) -> None:
    """A checkpoint around the model recomputes each forward as it ran: the first one eagerly."""
    compared = Compared(each(Block), group, compile_model)
    call = compared.call
    compared.call = lambda x: checkpoint(call, x, use_reentrant=False)
    for seed in range(3):
        compared.step(inputs(seed))
    assert compared.graphs == 1, compared.report


def test_a_checkpoint_around_a_compiled_model(ranks: Ranks) -> None:
    ranks(2, check_recomputed)


def check_tangents(rank: int, world: int, group: Group) -> None:
    """Compiled exchanges have no tangents: eager code runs."""
    compared = Compared(of(models.Mixes), group, compile_model)
    for seed in range(3):
        x, tangent = inputs(seed), inputs(9)
        found = []
        for call in (compared.whole, compared.call):
            with torch.no_grad(), forward_ad.dual_level():
                found.append(forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))))
        torch.testing.assert_close(found[1].tangent, found[0].tangent)


def test_tangents_are_those_of_one_process(ranks: Ranks) -> None:
    ranks(2, check_tangents)


# ---- how many graphs ----


def check_shapes(rank: int, world: int, group: Group) -> None:
    """Two lengths are two graphs; a third is compiled by block, and the two stay."""
    compared = Compared(each(Block), group, compile_model)
    for total in (21, 21, 18, 16, 21, 18, 16):
        compared.step(inputs(0, total))
    counts = {
        kind.has_blocks: kind.graphs for kind in vars(compared.model)["_spar_view"].compiled.kinds.values()
    }
    assert counts == {True: 2, False: 1}
    assert compared.report.why_by_block == ["its arguments are of more than 2 lengths or layouts"]
    # Ranks with few tokens, and with none.
    compared = Compared(each(Block), group, compile_model)
    for total in (2, 1):
        compared.step(inputs(0, total))


def test_a_third_length_is_compiled_by_block(ranks: Ranks) -> None:
    ranks(2, check_shapes)


# ---- layouts, inputs and outputs ----


def check_layouts(rank: int, world: int, group: Group) -> None:
    layouts = [
        spar.SequenceLayout.even(21, group),
        spar.SequenceLayout.zigzag(21, group),
        spar.SequenceLayout.packed([0, 9, 21], group),
    ]
    causal = each(functools.partial(Block, causal=True))
    compared = Compared(causal, group, compile_model, layout=lambda batch: layouts[0], method="ring")
    for seed in range(6):
        compared.step(inputs(seed))
        layouts.append(layouts.pop(0))
    assert compared.report.why_by_block == ["its arguments are of more than 2 lengths or layouts"]


def test_one_length_of_other_layouts_is_another_graph(ranks: Ranks) -> None:
    ranks(2, check_layouts)


def check_parts(rank: int, world: int, group: Group) -> None:
    """The model gets this rank's tokens, and returns its results of these."""
    layout = spar.SequenceLayout.even(21, group)
    compared = Compared(each(Block), group, compile_model, inputs=["x"], outputs="parts")
    for seed in range(3):
        x = inputs(seed)
        with torch.no_grad():
            expected = layout.shard(compared.whole(x), 1)
            torch.testing.assert_close(compared.call(layout.shard(x, 1)), expected)
    assert compared.graphs == 1 and not compared.report.why_by_block


def test_parts_are_inputs_and_outputs_of_one_graph(ranks: Ranks) -> None:
    ranks(2, check_parts)


# ---- what the model and its users change ----


def check_input(rank: int, world: int, group: Group) -> None:
    make = each(models.ChangesInput, Block, net=models.InPlaceOfInput)
    compared = Compared(make, group, compile_model)
    for seed in range(3):
        x, y = inputs(seed), inputs(seed)
        with torch.no_grad():
            compared._compare([compared.whole(x), x], [compared.call(y), y], 1e-9)


def test_a_change_of_the_callers_tensor_reaches_the_caller(ranks: Ranks) -> None:
    ranks(2, check_input)


def check_hooks(rank: int, world: int, group: Group) -> None:
    """A hook that is registered again otherwise is in another graph, as are blocks that are replaced."""
    compared = Compared(each(Block), group, compile_model)
    compared.step(inputs())

    def hook(module: Any, args: Any, *rest: Any) -> Any:
        kwargs, out = (rest[0], rest[-1]) if len(rest) == 2 else (None, rest[-1])
        return out * (2 if kwargs is None else 3)

    for with_kwargs in (False, True):
        handles: list[Any] = []
        compared.apply(
            lambda model, kw=with_kwargs, handles=handles: handles.append(
                model.blocks[0].mlp.register_forward_hook(hook, with_kwargs=kw)
            )
        )
        compared.step(inputs(1))
        for handle in handles:
            handle.remove()
        compared.step(inputs(2))
    assert compared.graphs > 1


def test_hooks_of_another_kind_are_in_another_graph(ranks: Ranks) -> None:
    ranks(2, check_hooks)


# ---- ranks ----


def check_one_fails(rank: int, world: int, group: Group) -> None:
    own = backends.Backend.make

    def make(self: Any, traced: Any, *rest: Any) -> Any:
        if rank == world - 1:
            raise RuntimeError("no compiler here")
        time.sleep(1)
        return own(self, traced, *rest)

    with mock.patch.object(backends.Backend, "make", make):
        compared = Compared(each(Block), group, compile_model)
        for seed in range(3):
            compared.step(inputs(seed))
    expected = "no compiler here" if rank == world - 1 else "another rank could not compile it"
    assert expected in compared.report.why_by_block[0] and expected in compared.reasons


def test_a_rank_that_cannot_compile_makes_all_go_by_block(ranks: Ranks) -> None:
    ranks(3, check_one_fails)


def check_fails_before(rank: int, world: int, group: Group) -> None:
    """A rank fails alone before it compiles, and its peers wait for it: the next forward is right."""
    spar.init(group)
    state: Any = ranks_of(group, "")
    state.compares = False  # else the peers hear of it before they compile
    failing = [False]

    def layout(batch: Any) -> spar.SequenceLayout:
        if failing[0] and rank == world - 1:
            raise ValueError("injected")
        return spar.SequenceLayout.even(21, group)

    try:
        compared = Compared(each(Block), group, compile_model, layout=layout)
        compared.step(inputs())
        failing[0] = True
        with pytest.raises(ValueError if rank == world - 1 else spar.MismatchError, match="injected"):
            compared.call(inputs())
        failing[0] = False
        for seed in range(2):
            compared.step(inputs(seed))
    finally:
        state.compares = True
    assert compared.graphs == 1 and not compared.report.why_by_block, compared.report


def test_a_rank_that_fails_before_the_others_agree(ranks: Ranks) -> None:
    ranks(3, check_fails_before)


def check_replaced(rank: int, world: int, group: Group) -> None:
    """A block whose forward was replaced, and so ends nowhere in a graph, is right."""
    compared = Compared(of(Block), group, compile_model)
    kind = type(compared.model.blocks[0])
    compared.model.blocks[0].forward = kind.forward.__get__(compared.model.blocks[0])
    for seed in range(3):
        compared.step(inputs(seed))
    assert "its forward was replaced" in str(compared.report), compared.report


def test_a_block_whose_forward_was_replaced_is_in_no_graph(ranks: Ranks) -> None:
    ranks(2, check_replaced)


def check_fails_later(rank: int, world: int, group: Group) -> None:
    """A hook that one rank alone has is an error on all ranks, and the next forward is right."""
    compared = Compared(of(Block), group, compile_model)
    for seed in range(2):
        compared.step(inputs(seed))

    def fail(*_: Any) -> None:
        raise ValueError("injected")

    if rank == world - 1:
        handle = compared.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises((ValueError, spar.MismatchError)):
        compared.call(inputs())
    if rank == world - 1:
        handle.remove()
    compared.step(inputs(5))


def test_a_rank_that_fails_alone_is_an_error_on_all(ranks: Ranks) -> None:
    ranks(2, check_fails_later)


def check_count(rank: int, world: int, group: Group) -> None:
    """A rank that alone makes another graph is an error on all ranks, at once."""
    compared = Compared(each(Block, net=models.CountsOnOneRank), group, compile_model)
    compared.call(inputs())
    compared.call(inputs())
    begin = time.monotonic()
    with pytest.raises(spar.MismatchError):
        compared.call(inputs())
    assert time.monotonic() - begin < 15


def test_a_graph_that_one_rank_alone_makes_is_an_error_at_once(ranks: Ranks) -> None:
    ranks(2, check_count)
