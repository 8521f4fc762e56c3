# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True): the gradients equal eager ones to the bit.

A graph calls one dispatcher op, whatever moves the bytes: most tests run over one transport.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.processes import finish, start
from helpers.reference import assert_same, rule
from helpers.tables import numbers
from helpers.traffic import exchanges

import spar
from spar._exchange import graph_ops
from spar._exchange.dispatch import OpCall

pytestmark = [pytest.mark.one_transport, pytest.mark.long]

Group = dist.ProcessGroup
CXX = shutil.which("g++") or shutil.which("clang++")
INDUCTOR = pytest.mark.skipif(not CXX and "CI" not in os.environ, reason="inductor needs a C++ compiler")


def model(x: torch.Tensor, weight: torch.Tensor, group: Group, seq: int, heads: int) -> torch.Tensor:
    """Split, exchange twice, gather. Small ints, so that sums are exact in any order."""
    half = spar.split_forward_gather_backward(x, group, 1) * weight
    there = spar.all_to_all(half, group, 2, 1, seq)
    back = spar.all_to_all(there * there, group, 1, 2, heads)
    return spar.gather_forward_split_backward(back, group, 1, spar.cal_split_sizes(seq, group.size()))


def compare(function: Callable[..., torch.Tensor], compiled: Callable[..., torch.Tensor], *args: Any) -> None:
    """Compare results and gradients; args: tensors with gradients first, then the rest."""
    results = []
    for run in (function, compiled):
        leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
        y = run(*leaves)
        y.backward((torch.arange(y.numel(), dtype=y.dtype) % 5).reshape(y.shape))
        results.append([y.detach(), *(a.grad for a in leaves if isinstance(a, torch.Tensor))])
    for eager, other in zip(*results, strict=True):
        assert_same(other, eager)


def check_model(rank: int, world: int, group: Group, backend: str) -> None:
    """The first rank compiles, which takes seconds; its calls match the others' eager ones."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend) if rank == 0 else model
    for seq in (8, 9, 11):  # the second makes the size symbolic; the third must not recompile
        x = (torch.arange(2 * seq * 5 * 3, dtype=torch.float32) % 13).reshape(2, seq, 5, 3)
        frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        compare(model, compiled, x, torch.full((3,), 1.5), group, seq, 5)
    if backend == "aot_eager":  # inductor may compile its own reductions for a size
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames


@pytest.mark.parametrize(("world", "transport"), [(1, "torch"), *((2, name) for name in TRANSPORTS)])
def test_compiled_equals_eager(pool: Ranks, world: int, transport: str) -> None:
    pool.transport = transport
    pool(world, check_model, "aot_eager", timeout=280)


@pytest.mark.compiler
@INDUCTOR
def test_compiled_by_inductor_equals_eager(ranks: Ranks) -> None:
    ranks(3, check_model, "inductor", timeout=280)


def gather_twice(x: torch.Tensor, group: Any) -> torch.Tensor:
    return spar.gather_forward_split_backward(x * 2, group, 0)


def call_with_two_groups(rank: int, folder: Path) -> None:
    """One compiled function, called with two groups, and with None before and after the default changes."""
    from torch.distributed.device_mesh import DeviceMesh

    torch._dynamo.reset()
    compiled = torch.compile(gather_twice, fullgraph=True, backend="aot_eager") if rank == 1 else gather_twice
    group, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    line = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("sp",))
    groups: list[tuple[Any, int]] = [(group, 3), (pair, 2), (None, 3), (group, 3), (pair, 2), (line, 3)]
    for argument, size in groups:
        if argument is pair and rank > 1:
            continue
        x = torch.full((2,), float(rank))
        expected = torch.arange(float(size)).repeat_interleave(2) * 2
        assert_same(gather_twice(x, argument), expected)
        assert_same(compiled(x, argument), expected)


def test_compiled_function_with_two_groups(tmp_path: Path) -> None:
    assert finish(start(call_with_two_groups, 3, tmp_path), 150) == [0] * 3


def reinitialize(rank: int, folder: Path) -> None:
    """After destroy and init, compiled code must not use the destroyed group."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: spar.gather_forward_split_backward(x, None, 0, None, 0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(3, requires_grad=True)
        compiled(x * 1).sum().backward()
        assert x.grad is not None
        assert_same(x.grad, torch.full((3,), 0.5))
        dist.destroy_process_group()
    (folder / "passed").touch()


def test_compiled_function_after_destroy_and_init(tmp_path: Path) -> None:
    assert finish(start(reinitialize, 1, tmp_path, initialize=False), 120) == [0]
    assert (tmp_path / "passed").exists()


def check_opcheck(rank: int, world: int, group: Group) -> None:
    """The dispatcher op passes torch.library.opcheck; its fake returns the real op's shapes."""
    from spar._group.registry import place_of

    place = place_of(group)
    whole = torch.arange(9 * 5, dtype=torch.float32).reshape(9, 5)
    mine = whole.split(rule(9, world), 0)[rank].contiguous()
    calls: list[tuple[list[torch.Tensor], str, list[list[int]]]] = [
        ([mine], "all_to_all", [[1, 0, 9]]),
        ([mine], "gather", [[0, *rule(9, world)]]),
        ([mine], "gather", [[0, 9]]),
        ([whole], "gather", [[0]]),
        ([mine, whole], "gather", [[0, 9], [1]]),
    ]
    for inputs, op, args in calls:
        flat = []
        for x, own in zip(inputs, args, strict=True):
            layouts = numbers(op, own, x.shape, world)
            flat += [len(layouts), *layouts]
        torch.library.opcheck(
            torch.ops.spar.exchange.default,
            (inputs, place[0], *OpCall(*place[1:], op, flat, 1.0, False, "", "", []).text()),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_opcheck(ranks: Ranks) -> None:
    ranks(3, check_opcheck)


def check_constants(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A tracer folds constants, but must not run an exchange of one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    spar.init(group)
    before = spar.memory_stats()
    with FakeTensorMode():
        y = spar.gather_forward_split_backward(torch.tensor([rank]), group, 0)
        x = torch.zeros(4)
        for out, kind, text in (
            (x, ValueError, r"out is a tensor of shape \[4\]; expected the output's shape, \[8\]"),
            (torch.zeros(8, dtype=torch.int64), TypeError, r"out is a tensor of torch.int64"),
        ):
            with pytest.raises(kind, match=text):  # type: ignore[arg-type]
                spar.all_gather(x, group, out=out)
    with pytest.raises(ValueError, match="dim is 7"):
        spar.all_gather(x, group, 7)
    assert y.shape == (world,)
    assert spar.memory_stats()["calls.torch"] == before["calls.torch"]
    assert spar.memory_stats()["calls.shm"] == before["calls.shm"]


def test_constants_are_not_exchanged_while_tracing(ranks: Ranks) -> None:
    ranks(2, check_constants)


def check_errors_of_compiled_code(rank: int, world: int, group: Group) -> None:
    """torch shows the text of an error that ends the trace."""
    even = spar.SequenceLayout.even(9, group)
    for function, text in (
        (lambda x: spar.all_gather(x * 2, group, 7), "all_gather on rank 0 of 1: dim is 7; expected -4 to 3"),
        (
            lambda x: spar.all_gather(x * 2, group, async_op=True),
            "all_gather: async_op=True cannot be traced",
        ),
        (lambda x: spar.attention(x * 2, x, x, even), "attention on rank 0 of 1: q is of 4 tokens; expected"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(text)):
            torch.compile(function, fullgraph=True, backend="aot_eager")(torch.zeros(1, 4, 2, 2))


def test_errors_of_compiled_code_are_readable(ranks: Ranks) -> None:
    ranks(1, check_errors_of_compiled_code)


class Gathered(torch.nn.Module):
    """Gathers a sequence of `length`."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.length = 0

    def forward(self, x: torch.Tensor, length: int | None = None) -> torch.Tensor:
        return spar.all_to_all(x * 2, self.group, 2, 1, self.length if length is None else length)


def check_lengths(rank: int, world: int, group: Group) -> None:
    module = Gathered(group)
    for as_argument, expected in ((True, 2), (False, 5)):
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="eager") if rank == 0 else module
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for length in (8, 10, 12, 14, 16):
            module.length = length
            y = compiled(torch.ones(2, length // world, 4), *([length] if as_argument else []))
            assert y.shape == (2, length, 4 // world)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == (
            expected if rank == 0 else 0
        )


def test_graph_count_for_lengths_as_arguments_and_attributes(ranks: Ranks) -> None:
    ranks(2, check_lengths)


def check_selective_checkpoint(rank: int, world: int, group: Group) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def save_exchanges(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.spar.exchange.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: torch.Tensor) -> torch.Tensor:
        there = spar.all_to_all(x * 2, group, 2, 1)
        return spar.all_to_all(there.sin(), group, 1, 2).cos()

    counts, grads = [], []
    for context in (None, lambda: create_selective_checkpoint_contexts(save_exchanges)):
        x = torch.arange(32.0).reshape(2, 4, 4).requires_grad_()
        settings: Any = {} if context is None else {"context_fn": context}
        y = checkpoint(block, x, use_reentrant=False, **settings)
        before = exchanges()
        y.sum().backward()
        counts.append(exchanges() - before)
        grads.append(x.grad)
    assert counts == [4, 2], counts
    assert_same(grads[0], grads[1])


def test_selective_checkpoint_saves_exchanges(ranks: Ranks) -> None:
    ranks(2, check_selective_checkpoint)


def check_derivatives(rank: int, world: int, group: Group) -> None:
    """Dynamo's graph has one op for each call; what runs it differentiates that as eager code does."""
    layout = spar.SequenceLayout.zigzag(6, group)
    found: list[list[tuple[str, str]]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        whole = layout.gather(layout.shard(x.sin(), 0, None).exp(), 0, "up")
        return spar.all_gather(spar.reduce_scatter(whole * whole, group), group)

    def ops_of(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nodes = [(str(node.target), node.args) for node in module.graph.nodes]
        found.append([(target, args[-1]) for target, args in nodes if "spar" in target])
        return module.forward

    def twice(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad((first * first).sum(), leaf)[0]

    def penalty(x: torch.Tensor) -> torch.Tensor:
        first = torch.func.grad(lambda x: function(x).sum())
        return torch.func.grad(lambda x: (first(x) ** 2).sum())(x)

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(function, (x,), (x.cos(),))[1]

    def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.compile(function, fullgraph=True, backend=ops_of) if rank == 0 else function

    torch._dynamo.reset()
    x = torch.arange(12, dtype=torch.float64).reshape(6, 2) / 7
    assert_same(twice(compiled(function), x), twice(function, x))
    for derivative in (penalty, slope):
        assert_same(compiled(derivative)(x), derivative(x))
    if rank == 0:
        names, codes = zip(*found[0], strict=True)
        assert names == ("spar.run",) * 4
        assert set(codes) == {graph_ops.code()}  # what torch's caches on disk know of the code


@pytest.mark.compiler
def test_derivatives_of_compiled_code(ranks: Ranks) -> None:
    ranks(2, check_derivatives, timeout=280)
