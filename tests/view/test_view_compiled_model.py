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
import torch.nn.functional as F
from conftest import Ranks
from helpers import compiled_blocks as blocks, compiled_containers as containers
from helpers.compiled_blocks import Block, Compared, Net, compile_model, inputs, of
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import spar
from spar._model import backends

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler]
Group = dist.ProcessGroup


class Twice(Block):
    """Sees whether two arguments are one tensor, as nn.MultiheadAttention does."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = super().forward(x * 2 if rest[0] is x else x + rest[0])
        return out


class TwiceNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.blocks[0](x, x)
        return self.head(self.blocks[1](x, x * 1))


class TupleNet(Net):
    """Gives each block the same tables, in a tuple, and reads them outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        tables = x.cos(), x.sin()
        for block in self.blocks:
            x = block(x, tables)
        return self.head(x * tables[0].mean(1, keepdim=True))


class AddsTables(Block):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        cos, sin = rest[0]
        out: Tensor = super().forward(x * cos + x.flip(-1) * sin)
        return out


class TagsWhole(Net):
    """Its first block gets a whole tensor that has an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x.gain = 2.0  # type: ignore[attr-defined]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LossNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)
        labels = logits.detach().argmax(-1).roll(1, 1)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Teacher(Net):
    """Calls a block without gradients, and goes on with its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        with torch.no_grad():
            target = self.blocks[0](x)
        return self.head(self.blocks[1](x * 2 + target))


class Limited(torch.autograd.Function):
    """Its backward is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (1e-3 + gradient.abs().max())


class LimitsWhole(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = Limited.apply(self.embed(x))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LimitsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return F.linear(out, Limited.apply(self.out.weight))  # type: ignore[no-untyped-call]


class HooksWhole(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if x.requires_grad:
            x.register_hook(lambda g: g / (1 + g.abs().max()))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InferenceInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = self.embed(x).mean()
        x = self.embed(x) + float(shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Noise(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x + 0.1 * torch.randn_like(x))
        return out + 0.1 * torch.empty_like(out).uniform_()


class Mixes(Block):
    """Mixes tokens by what has a derivative in forward mode, unlike torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.mlp(self.norms[0](x)).mean(1, keepdim=True)
        return x + x * mean


class KeepsWhole(Net):
    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InPlaceOfInput(Net):
    """Its first block changes an argument of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.embed(self.blocks[0](x))))


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


RIGHT = {
    "block": of(Block),
    "causal": of(Block, causal=True),
    "a branch on the length": of(blocks.ByLength),
    "positions": of(blocks.Positions),
    "buffers": of(blocks.Running),
    "keeps its result": of(blocks.KeepsOutput, blocks.KeepingNet),
    "keeps its argument": of(blocks.KeepsInput, blocks.KeepingNet),
    "changes its argument": of(blocks.InPlace, blocks.InPlaceNet),
    "returns its argument": of(blocks.Returns, blocks.ReturningNet),
    "dataclasses": of(containers.OfDataclasses, containers.DataclassNet),
    "a list that grows": of(containers.Appends, containers.AppendingNet),
    "an autograd Function": of(blocks.Custom),
    "functions that run whole": of(blocks.RunsWhole),
    "pieces": of(blocks.Pieces),
    "dropout": of(blocks.Dropout),
    "one tensor twice": of(Twice, TwiceNet),
    "tables in a tuple": of(AddsTables, TupleNet),
    "an attribute of a whole tensor": of(containers.Tagged, TagsWhole),
    "an attribute of a part": of(containers.Tagged, containers.TaggedNet),
    "a loss": of(Block, LossNet),
    "a block without gradients": of(Block, Teacher),
    "a Function on whole tensors": of(Block, LimitsWhole),
    "a Function on a weight": of(LimitsWeight),
    "noise in each block": of(Noise),
}
BY_LENGTH = ("causal", "a branch on the length", "positions", "pieces")
# With what the report says.
BY_BLOCK = {
    "a checkpoint around blocks": (of(Block, blocks.CheckpointAround), "no block begins in its graph"),
    "a reentrant checkpoint": (of(Block, blocks.ReentrantAround), ""),
    "a branch on a value": (of(blocks.ByValue), "Data-dependent branching"),
    "a hook of a gradient": (of(blocks.HooksGradient), "the operator register_hook of parts"),
    "a hook of a whole tensor": (of(Block, HooksWhole), "the operator register_hook"),
    "inference mode inside": (of(Block, InferenceInside), "it enters inference mode"),
    "a number of a tensor in each forward": (of(blocks.Counter), "it is 4 graphs already"),
}


def check_right(rank: int, world: int, group: Group, name: str, **options: Any) -> None:
    """With two batches and more: what depends on values is no constant of the graph."""
    compared = Compared(RIGHT[name], group, compile_model, **options)
    for seed in range(3):
        compared.step(inputs(seed))
    assert compared.graphs == 1, compared.report
    if name in BY_LENGTH:
        compared.step(inputs(3, 18))
        compared.apply(nn.Module.eval)
        compared.infer(inputs(4))
    assert not compared.report.why_by_block and not compared.reasons, compared.report


@pytest.mark.parametrize("name", RIGHT)
def test_a_model_is_one_graph(ranks: Ranks, name: str) -> None:
    ranks(2, check_right, name)


@pytest.mark.parametrize("world", [3, 4])
def test_a_model_is_one_graph_on_more_ranks(ranks: Ranks, world: int) -> None:
    ranks(world, check_right, "tables in a tuple")


def check_by_block(rank: int, world: int, group: Group, name: str) -> None:
    make, reason = BY_BLOCK[name]
    compared = Compared(make, group, compile_model)
    for seed in range(7):
        compared.step(inputs(seed))
    (why,) = compared.report.why_by_block
    assert reason in why and "compiled by block" in str(compared.report), why


@pytest.mark.parametrize("name", BY_BLOCK)
def test_what_cannot_be_one_graph_is_compiled_by_block_for_a_reason(ranks: Ranks, name: str) -> None:
    ranks(2, check_by_block, name)


def check_kept(rank: int, world: int, group: Group) -> None:
    """What is whole in eager code is whole where the model keeps it, also if blocks get it."""
    compared = Compared(of(Block, KeepsWhole), group, compile_model)
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
    compared = Compared(of(Block, causal=True), group, compile_model)
    call = compared.call
    compared.call = lambda x: checkpoint(call, x, use_reentrant=False)
    for seed in range(3):
        compared.step(inputs(seed))
    assert compared.graphs == 1, compared.report


def test_a_checkpoint_around_a_compiled_model(ranks: Ranks) -> None:
    ranks(2, check_recomputed)


def check_tangents(rank: int, world: int, group: Group) -> None:
    """Compiled exchanges have no tangents: eager code runs."""
    compared = Compared(of(Mixes), group, compile_model)
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
    compared = Compared(of(Block), group, compile_model)
    for total in (21, 21, 18, 16, 21, 18, 16):
        compared.step(inputs(0, total))
    counts = {
        kind.has_blocks: kind.graphs for kind in vars(compared.model)["_spar_view"].compiled.kinds.values()
    }
    assert counts == {True: 2, False: 1}
    assert compared.report.why_by_block == ["its arguments are of more than 2 lengths or layouts"]
    # Ranks with few tokens, and with none.
    compared = Compared(of(Block), group, compile_model)
    for total in (21, 3, 2):
        compared.step(inputs(0, total))
    compared = Compared(of(Block), group, compile_model)
    for total in (21, 1, 1):
        compared.step(inputs(0, total))


def test_a_third_length_is_compiled_by_block(ranks: Ranks) -> None:
    ranks(2, check_shapes)


# ---- layouts, inputs and outputs ----


def check_layouts(rank: int, world: int, group: Group) -> None:
    for options in ({"layout": "zigzag"}, {"layout": "zigzag", "method": "ring"}):
        check_right(rank, world, group, "causal", **options)
    layouts = [
        spar.SequenceLayout.even(21, group),
        spar.SequenceLayout.zigzag(21, group),
        spar.SequenceLayout.packed([0, 9, 21], group),
    ]
    compared = Compared(of(Block), group, compile_model, layout=lambda batch: layouts[0])
    for seed in range(6):
        compared.step(inputs(seed))
        layouts.append(layouts.pop(0))
    assert compared.report.why_by_block == ["its arguments are of more than 2 lengths or layouts"]


def test_one_length_of_other_layouts_is_another_graph(ranks: Ranks) -> None:
    ranks(3, check_layouts)


def check_parts(rank: int, world: int, group: Group) -> None:
    """The model gets this rank's tokens, and returns its results of these."""
    layout = spar.SequenceLayout.even(21, group)
    compared = Compared(of(Block), group, compile_model, inputs=["x"], outputs="parts")
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
    compared = Compared(functools.partial(InPlaceOfInput, ChangesInput), group, compile_model)
    compared.apply(lambda model: model.blocks.__setitem__(1, Block().double()))
    compared.model.load_state_dict(compared.whole.state_dict())
    for seed in range(3):
        x, y = inputs(seed), inputs(seed)
        with torch.no_grad():
            compared._compare([compared.whole(x), x], [compared.call(y), y], 1e-9)


def test_a_change_of_the_callers_tensor_reaches_the_caller(ranks: Ranks) -> None:
    ranks(2, check_input)


def check_hooks(rank: int, world: int, group: Group) -> None:
    """A hook that is registered again otherwise is in another graph, as are blocks that are replaced."""
    compared = Compared(of(Block), group, compile_model)
    compared.step(inputs())

    def hook(module: Any, args: Any, *rest: Any) -> Any:
        kwargs, out = (rest[0], rest[-1]) if len(rest) == 2 else (None, rest[-1])
        return out * (2 if kwargs is None else 3)

    for with_kwargs in (False, True):
        handles: list[Any] = []
        compared.apply(
            lambda model, kw=with_kwargs, handles=handles: handles.append(
                model.blocks[1].mlp.register_forward_hook(hook, with_kwargs=kw)
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
        compared = Compared(of(Block), group, compile_model)
        for seed in range(3):
            compared.step(inputs(seed))
    expected = "no compiler here" if rank == world - 1 else "another rank could not compile it"
    assert expected in compared.report.why_by_block[0] and expected in compared.reasons


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_cannot_compile_makes_all_go_by_block(ranks: Ranks, world: int) -> None:
    ranks(world, check_one_fails)


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


class CountsOnOneRank(Net):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            self.count += 1
        return super().forward(x) * (1 + 0 * self.count)


def check_count(rank: int, world: int, group: Group) -> None:
    """A rank that alone makes another graph is an error on all ranks, at once."""
    compared = Compared(of(Block, CountsOnOneRank), group, compile_model)
    compared.call(inputs())
    compared.call(inputs())
    begin = time.monotonic()
    with pytest.raises(spar.MismatchError):
        compared.call(inputs())
    assert time.monotonic() - begin < 15


def test_a_graph_that_one_rank_alone_makes_is_an_error_at_once(ranks: Ranks) -> None:
    ranks(2, check_count)
