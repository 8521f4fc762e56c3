# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks of a view: equal to one process, or run eagerly for a reason that the report has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import compiled_blocks as blocks, compiled_containers as containers
from helpers.compiled_blocks import (
    BACKEND,
    Block,
    Compared,
    Net,
    compile_blocks,
    compile_model,
    each,
    inputs,
    of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import spar

pytestmark = [pytest.mark.one_transport, pytest.mark.compiler, pytest.mark.long]
Group = dist.ProcessGroup


RIGHT = {
    "causal": of(Block, causal=True),
    "a branch on the length": of(blocks.ByLength),
    "strides": of(blocks.ByStrides),
    "a number of a tensor": of(blocks.ByItem),
    "a counter": of(blocks.Counter),
    "buffers": of(blocks.Running),
    "keeps its result": of(blocks.KeepsOutput, blocks.KeepingNet),
    "changes its argument": of(blocks.InPlace, blocks.InPlaceNet),
    "returns its argument": of(blocks.Returns, blocks.ReturningNet),
    "fills": of(blocks.Fills),
    "dataclasses": of(containers.OfDataclasses, containers.DataclassNet),
    "containers that others refer to": of(containers.ChangesState, containers.StateNet),
    "a list that grows": of(containers.Appends, containers.AppendingNet),
    "an autograd Function": of(blocks.Custom),
    "functions that run whole": of(blocks.RunsWhole),
    "pieces": of(blocks.Pieces),
    "a checkpoint around dropout": of(blocks.Dropout, blocks.CheckpointAround),
    "a reentrant checkpoint": of(Block, blocks.ReentrantAround),
    "autocast": of(blocks.AutocastInside),
}
BY_LENGTH = ("a branch on the length", "a number of a tensor")
# With what the report says.
EAGER = {
    "a branch on a value": (of(blocks.ByValue), "Data-dependent branching"),
    "keeps its argument": (of(blocks.KeepsInput, blocks.KeepingNet), "it keeps an argument"),
    "an attribute of an argument": (
        of(containers.Tagged, containers.TaggedNet),
        "an argument has the attribute gain",
    ),
    "a hook of a gradient": (of(blocks.HooksGradient), "the operator register_hook of parts"),
    "a checkpoint inside": (of(blocks.CheckpointInside), "the operator tag_activation_checkpoint of parts"),
}


def check_right(rank: int, world: int, group: Group, name: str) -> None:
    """With two batches and more: what depends on values is no constant of the graph."""
    compared = Compared(RIGHT[name], group)
    limit = 0.1 if name == "autocast" else 1e-9
    for seed in range(3):
        compared.step(inputs(seed), limit=limit)
    if name in BY_LENGTH:
        compared.step(inputs(3, 18))
        compared.apply(nn.Module.eval)
        compared.infer(inputs(4))
    assert compared.graphs and not compared.reasons, compared.reasons


@pytest.mark.parametrize("name", RIGHT)
def test_a_compiled_block_is_right(ranks: Ranks, name: str) -> None:
    ranks(3 if name == "causal" else 2, check_right, name)


def check_eager(rank: int, world: int, group: Group, name: str) -> None:
    make, reason = EAGER[name]
    compared = Compared(make, group)
    for seed in range(4):
        compared.step(inputs(seed))
    assert reason in compared.reasons, compared.reasons


@pytest.mark.parametrize("name", EAGER)
def test_what_cannot_be_compiled_runs_eagerly_for_a_reason(ranks: Ranks, name: str) -> None:
    ranks(2, check_eager, name)


# ---- how users ask ----


def check_ways(rank: int, world: int, group: Group) -> None:
    def wrapping() -> nn.Module:
        model: Any = of(Block)()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=BACKEND)
        return model

    ways: dict[str, tuple[Callable[[Any], Any] | None, int]] = {
        "nobody": (lambda model: None, 0),
        "the model": (functools.partial(torch.compile, backend=BACKEND), 1),
        "the model in place": (lambda model: model.compile(backend=BACKEND), 1),
        "all blocks": (compile_blocks, 1),
        "wrapped blocks": (None, 1),
        "one block": (lambda model: model.blocks[1].compile(backend=BACKEND), 1),
        "by torch's functions": (lambda model: model.compile(backend="eager"), 1),
    }
    for name, (way, graphs) in ways.items():
        compared = Compared(wrapping if way is None else of(Block), group, way or (lambda model: None))
        for seed in range(3):
            compared.step(inputs(seed))
        assert compared.graphs == graphs and not compared.reasons, (name, compared.reasons)
        compiled, compared.call = compared.call, compared.model
        if name == "the model":
            compared.step(inputs(9, 17))  # the model itself is not compiled
            assert compared.graphs == graphs and compiled is not compared.model


def test_a_model_or_its_blocks_are_compiled_as_the_user_asks(ranks: Ranks) -> None:
    ranks(2, check_ways)


def check_zigzag(rank: int, world: int, group: Group) -> None:
    for method in ("ulysses", "ring"):
        compared = Compared(of(Block, causal=True), group, layout="zigzag", method=method)
        for seed in range(3):
            compared.step(inputs(seed))
        assert compared.graphs == 1 and not compared.report.eager, compared.report


def test_zigzag_layouts_are_compiled(ranks: Ranks) -> None:
    ranks(2, check_zigzag)


def check_many(rank: int, world: int, group: Group) -> None:
    """Dynamo stops tracing a function after some variants of it, of all models."""
    limit = 2
    with torch._dynamo.config.patch(recompile_limit=limit):
        for _ in range(limit + 1):
            compared = Compared(of(Block), group, keeps_graphs=True)
            for seed in range(2):
                compared.step(inputs(seed))
            assert compared.graphs == 1 and not compared.report.eager, compared.report


def test_many_models_of_a_process_are_compiled(ranks: Ranks) -> None:
    ranks(2, check_many)


def check_alone(rank: int, world: int, group: Group) -> None:
    torch._dynamo.reset()
    model = blocks.made(of(Block))
    spar.parallelize(model, group)
    torch.compile(model, fullgraph=True, backend=BACKEND)(inputs())


def test_a_model_on_one_rank_is_compiled_by_torch_alone(ranks: Ranks) -> None:
    ranks(1, check_alone)


# ---- guards ----


def check_layouts(rank: int, world: int, group: Group) -> None:
    compared, x = Compared(blocks.Joined, group), inputs()
    for cut in (8, 8, 13, 8, 13):
        compared.step(x[:, :cut], x[:, cut:])
    assert compared.graphs == 4 and not compared.reasons


def test_one_shape_of_other_layouts_is_another_graph(ranks: Ranks) -> None:
    ranks(2, check_layouts)


def check_attributes(rank: int, world: int, group: Group) -> None:
    for kind, reason in (
        (blocks.ReadsMean, "reads a part otherwise than by an argument"),
        (blocks.ReadsLength, "depends on the shape of own.__self__.shared, which is no argument"),
    ):
        compared = Compared(functools.partial(blocks.SharingNet, kind, 20 // world), group)
        for gives_part in (False, False, True, True, False):
            compared.apply(lambda model, gives_part=gives_part: setattr(model, "gives_part", gives_part))
            compared.infer(inputs(total=20))
        assert reason in compared.reasons, compared.reasons


def test_an_attribute_that_becomes_a_part_is_not_taken_for_a_whole_one(ranks: Ranks) -> None:
    ranks(2, check_attributes)


FACTOR = [1.0]


class ByGlobal(Block):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = super().forward(x) * FACTOR[0]
        return out


def check_guards(rank: int, world: int, group: Group) -> None:
    compared = Compared(of(ByGlobal), group)
    for factor in (1.0, 1.0, 2.0, 3.0):
        FACTOR[0] = factor
        compared.step(inputs())
    for frozen in (0, 1, None):
        compared.apply(
            lambda model, frozen=frozen: [
                block.requires_grad_(i != frozen) for i, block in enumerate(model.blocks)
            ]
        )
        compared.step(inputs())
    compared.apply(nn.Module.eval)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            compared._compare([compared.whole(inputs())], [compared.call(inputs())], 1e-9)
    assert not compared.reasons


def test_guards_of_values_and_modes_hold(ranks: Ranks) -> None:
    ranks(2, check_guards)


def check_hooks(rank: int, world: int, group: Group) -> None:
    """Layers that differ by hooks, or forwards of their own, are other graphs: torch's guards miss that."""

    def hooked(when: str) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            first, second = model.blocks
            if when == "both":
                for i, block in enumerate((first, second)):
                    block.mlp.register_forward_hook(lambda m, args, out, i=i: out * (1.5 + i))
            elif when == "one":
                second.norms[1].register_forward_pre_hook(lambda m, args: (args[0] + 0.1,))
            else:
                own = second.out.forward
                second.out.forward = lambda x: own(x) * 3

        return change

    for is_late, changes in ((False, ("both", "forward")), (True, ("one", "both"))):
        compared = Compared(of(Block), group)
        if is_late:
            compared.step(inputs())
            compared.step(inputs(1))
        for when in changes:
            compared.apply(hooked(when))
            for seed in range(2, 4):
                compared.step(inputs(seed))


def test_hooks_and_forwards_of_inner_modules_are_in_no_other_layers_graph(ranks: Ranks) -> None:
    ranks(2, check_hooks)


# ---- memory that tensors share ----


class SlicingNet(Net):
    """Its block gets a slice of a whole tensor, which the model reads again."""

    reads_again = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y: Tensor = self.blocks[0](x)
        return self.head(y + x if self.reads_again else y)


class Halves(Block):
    halves = False

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        if self.halves:
            x.mul_(0.5)
        out: Tensor = super().forward(x * 1)
        return out


def check_shared(rank: int, world: int, group: Group) -> None:
    for make in (of(blocks.Viewing, blocks.ViewingNet), each(Block, blocks.Two, net=blocks.OverlappingNet)):
        compared = Compared(make, group)
        for seed in range(3):
            compared.infer(inputs(seed))
        assert compared.graphs
    assert "it changes one of two arguments that share memory" in compared.reasons, compared.reasons
    compared = Compared(each(Halves, net=SlicingNet), group)
    compared.infer(inputs())
    for model in (compared.model, compared.whole):
        model.blocks[0].halves = True
    compared.infer(inputs())
    assert compared.graphs == 1
    compared.model.reads_again = True
    with torch.no_grad(), pytest.raises(RuntimeError, match="was changed in place through another one"):
        compared.call(inputs())


def check_copies(rank: int, world: int, group: Group) -> None:
    """A slice of a part is a copy: the view must see that the block returns it."""
    compared = Compared(of(blocks.Slicing, blocks.ViewingNet), group)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(RuntimeError, match="was changed in place through another one"):
            compared.call(inputs())
        vars(compared.model)["_spar_view"].view.recording = False


def test_the_view_knows_which_results_of_compiled_code_are_copies(ranks: Ranks) -> None:
    ranks(2, check_copies)


def test_changes_of_arguments_reach_what_shares_their_memory(ranks: Ranks) -> None:
    ranks(2, check_shared)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.silu(self.norm(self.down(x)))
        y = torch.nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.up(y) + x


def check_images(rank: int, world: int, group: Group) -> None:
    compared = Compared(Images, group, compile_model, blocks=[""])
    x = torch.randn(2, 3, 20, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    orders = torch.contiguous_format, torch.channels_last, torch.contiguous_format
    for order in orders:
        compared.step(x.contiguous(memory_format=order))
    assert compared.graphs and not compared.reasons, compared.reasons


def test_a_model_that_is_a_block_is_compiled_in_each_memory_order(ranks: Ranks) -> None:
    ranks(2, check_images)


def check_wrapped(rank: int, world: int, group: Group) -> None:
    from torch.distributed.fsdp import fully_shard

    # Buckets are small: Dynamo cuts a graph of DDP where one ends.
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 512):
        for compiled in (compile_model, compile_blocks):
            compared = Compared(of(Block), group, compiled)
            wrapped = DistributedDataParallel(compared.model, process_group=group, bucket_cap_mb=0.001)
            expected = compared.whole
            for seed in range(3):
                for model in (expected, wrapped):
                    model.zero_grad()
                    model(inputs(seed)).square().mean().backward()
                for a, b in zip(expected.parameters(), wrapped.parameters(), strict=True):
                    torch.testing.assert_close(b.grad, a.grad)
            assert compared.graphs == 1 and not compared.report.why_by_block and not compared.reasons

    compared = Compared(of(Block), group, compile_model)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in compared.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(compared.model, mesh=mesh)
    for seed in range(3):
        for model in (compared.whole, compared.model):
            model.zero_grad()
            model(inputs(seed)).square().mean().backward()
        for a, b in zip(compared.whole.parameters(), compared.model.parameters(), strict=True):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    assert compared.graphs == 1 and not compared.reasons
    assert compared.report.why_by_block


def test_ddp_and_fsdp_wrap_a_compiled_model(ranks: Ranks) -> None:
    ranks(2, check_wrapped)
