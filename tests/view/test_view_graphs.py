# SPDX-License-Identifier: Apache-2.0
"""Graph networks and the functions by which they gather and scatter: those of one process, by rows."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import traffic
from helpers.graph_networks import LAYERS, Energy, Graph, Net, graph
from helpers.view_cases import View
from torch import Tensor, nn

import spar
from spar._group.registry import place_of
from spar._model.part import Parts, part_of
from spar._model.patches import intercepted

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
NODES, EDGES = 24, 96  # which 2, 3 and 4 ranks divide


def summed(group: Group, tensors: list[Tensor]) -> list[Tensor]:
    sums = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(sums, group=group)
    return [x.view_as(y) for x, y in zip(sums.split([x.numel() for x in tensors]), tensors, strict=True)]


def is_near(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, 1e-11, 1e-11)
        for a, b in zip(found, expected, strict=True)
    )


def stepped(model: nn.Module, given: Graph) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what a model returns, and gradients of its inputs and of its parameters."""
    inputs = [x.clone().requires_grad_() for x in (given.x, given.attributes, given.positions)]
    found = model(inputs[0], given.edges, *inputs[1:])
    loss = found[0].square().sum() + found[1]
    gradients = torch.autograd.grad(
        loss, [*inputs, *model.parameters()], allow_unused=True, materialize_grads=True
    )
    return [x.detach() for x in found], [*gradients[:3]], [*gradients[3:]]


def of_layer(name: str, layers: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(LAYERS[name], layers).double()


def check_networks(rank: int, world: int, group: Group) -> None:
    for name in LAYERS:
        one = of_layer(name)
        model = copy.deepcopy(one)
        report = spar.parallelize(model, group, strict=True)
        for seed, edges in ((0, EDGES), (2, 5), (3, 0)):
            given = graph(NODES + (seed > 1), edges, NODES // 2, seed)
            expected, found = stepped(one, given), stepped(model, given)
            mine = [x / world for x in summed(group, found[2])]
            for what, a, b in zip(
                ("values", "inputs", "parameters"), [*found[:2], mine], expected, strict=True
            ):
                assert is_near(a, b), f"{name}: {what} with {edges} edges"
        assert not report.functions and report.share <= 1.1 / world, f"{name}: {report}"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_graph_networks_are_exact_and_shared(ranks: Ranks, world: int) -> None:
    ranks(world, check_networks)


def check_forces(rank: int, world: int, group: Group) -> None:
    """A loss of the gradient of the model's output: second derivatives of gathers and scatters."""
    torch.manual_seed(0)
    one = Energy().double()
    model = copy.deepcopy(one)
    report = spar.parallelize(model, group, strict=True)
    given, found = graph(NODES, EDGES, NODES), []
    for each in (one, model):
        positions = given.positions.clone().requires_grad_()
        energy = each(given.x, given.edges, positions)
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        loss = energy + forces.square().sum()
        gradients = torch.autograd.grad(loss, [*each.parameters()])
        found.append(([energy, forces], [*gradients]))
    assert is_near(found[1][0], found[0][0])
    assert is_near([x / world for x in summed(group, found[1][1])], found[0][1])
    assert report.share <= 1.1 / world


@pytest.mark.parametrize("world", [2, 3])
def test_forces_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_forces)


def check_received(rank: int, world: int, group: Group) -> None:
    """Edges between near nodes, sorted by destination: ranks exchange those at the borders of their nodes."""
    nodes = 256 * world
    target = torch.arange(nodes).repeat_interleave(4)
    edges = torch.stack([(target + torch.tensor([-1, 1, 1, 2]).repeat(nodes)) % nodes, target])
    given = graph(nodes, 4 * nodes, nodes)._replace(edges=edges)
    for name in ("attention", "loops"):
        model = of_layer(name, 3)
        spar.parallelize(model, group)
        with torch.no_grad():
            model(given.x, given.edges, given.attributes, given.positions)
            before = traffic.sent()
            model(given.x, given.edges, given.attributes, given.positions)
            sent = traffic.sent() - before
        output = given.x.nbytes * (world - 1) // world  # which each rank gathers
        assert sent - output < 0.05 * given.x.nbytes, name


def test_near_nodes_exchange_few_rows(ranks: Ranks) -> None:
    ranks(2, check_received)


# ---- functions ----

F, N, E = 3, 13, 31
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def base_of(kind: str, x: Tensor, y: Tensor) -> Tensor:
    """Return rows that are a part, a tensor that the forward makes, or a whole one."""
    return x * 1 if kind == "part" else torch.full((N, F), 0.25).to(x.dtype) if kind == "made" else y * 1


def reductions() -> Iterator[tuple[str, Function]]:
    kinds, hows = ("part", "made", "whole"), ("sum", "mean", "amax", "amin")
    for kind, how, includes, end in itertools.product(kinds, hows, (True, False), ("", "_")):

        def run(
            x: Tensor, y: Tensor, s: Tensor, i: Tensor, kind: str = kind, rest: Any = (how, includes, end)
        ) -> Any:
            base, (how, includes, end) = base_of(kind, x, y), rest
            if how != "sum" and kind == "part":
                return getattr(base, f"index_reduce{end}")(0, i, s, how, include_self=includes)
            out = getattr(base, f"scatter_reduce{end}")(
                0, i[:, None].expand(-1, F), s, how, include_self=includes
            )
            return out, base * 2

        yield f"{how} {includes} {kind}{end}", run
    for kind, end in itertools.product(kinds, ("", "_")):

        def add(x: Tensor, y: Tensor, s: Tensor, i: Tensor, kind: str = kind, end: str = end) -> Any:
            wide = torch.stack([i, i.flip(0), i], 1)
            return (
                getattr(base_of(kind, x, y), f"scatter_add{end}")(0, wide, s),
                getattr(base_of(kind, x, y), f"index_add{end}")(0, i, s),
                getattr(base_of(kind, x, y), f"index_put{end}")((i - 6,), s, accumulate=True),
            )

        yield f"add {kind}{end}", add


TAKEN: dict[str, Function] = {
    "rows": lambda x, y, s, i: (x[i], x[i - 6], x.index_select(-2, i.flip(0)), x.t()[:, i]),
    "rows of rows": lambda x, y, s, i: x[torch.stack([i, i.flip(0)])],
    "items": lambda x, y, s, i: (
        x.gather(0, i[:, None].expand(-1, 2)),
        x.gather(0, torch.stack([i, i.flip(0), i], 1)),
        x.gather(1, i[:N, None] % F),
    ),
    "twice": lambda x, y, s, i: x.new_zeros(N, F).index_add_(0, i, s).index_add_(0, i.flip(0), s * 2),
    "none": lambda x, y, s, i: (
        x[i[:0]],
        x.index_add(0, i[:0], s[:0]),
        x.new_zeros(N, F).index_add_(0, i, s),
    ),
    "rows that values broadcast to": lambda x, y, s, i: (
        x.index_put((i,), s[:, :1], accumulate=True),
        (y * 1).index_put_((i,), s[:, :1], accumulate=True),
        x.t().index_put((i % F,), y[:, 0], accumulate=True),
    ),
    "few": lambda x, y, s, i: x.new_zeros(2, F).index_reduce_(0, i % 2, s, "amax", include_self=False),
}


def check_functions(rank: int, world: int, group: Group) -> None:
    place = place_of(group)
    cases = [*reductions(), *TAKEN.items()]
    for at, (name, function) in enumerate(cases):
        generator = torch.Generator().manual_seed(at)
        # Few values, of which many are equal.
        drawn = [torch.randint(0, 3, (n, F), generator=generator).double() / 4 for n in (N, N, E)]
        index = torch.randint(0, N - 2, (E,), generator=generator)
        torch.manual_seed(at)
        whole, mine = [[x.clone().requires_grad_() for x in drawn] for _ in range(2)]
        expected = _tuple(function(*[x * 1 for x in whole], index))
        view = View(Parts(group, world, place.rank, layout="zigzag" if at % 3 == 0 else "even"))
        x, y, s = [x * 1 for x in mine]
        x = view.shard(x, view.parts.part(0, (N,)))
        s = view.shard(s, view.parts.part(0, (E,))) if at % 5 else s
        with intercepted(view), view.forward():
            found = _tuple(view.output(function(x, y, s, index)))
        both = [(a, b, torch.randn_like(b)) for a, b in zip(found, expected, strict=True) if b.requires_grad]
        *outs, uppers = zip(*both, strict=True)
        gradients = [
            torch.autograd.grad(out, leaves, uppers, allow_unused=True, materialize_grads=True)
            for out, leaves in zip(outs, (mine, whole), strict=True)
        ]
        assert is_near([*found], [*expected]), name
        assert is_near([g / world for g in summed(group, [*gradients[0]])], [*gradients[1]]), (
            f"gradient: {name}"
        )


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("world", [2, 3])
def test_functions_of_rows_are_exact(ranks: Ranks, world: int) -> None:
    """Also gradients of extremes that are equal, which torch shares evenly."""
    ranks(world, check_functions)


def viewed(group: Group, run: Callable[[Tensor], Any]) -> Any:
    place = place_of(group)
    view = View(Parts(group, place.world, place.rank))
    s = view.shard(torch.ones(E, F), view.parts.part(0, (E,)))
    with intercepted(view), view.forward():
        return run(s)


def check_kept(rank: int, world: int, group: Group) -> None:
    """What others hold stays whole: only a tensor that the forward made becomes a part."""
    kept, index = torch.zeros(N, F), torch.zeros(E, dtype=torch.int64)
    viewed(group, lambda s: kept.index_add_(0, index, s))
    assert kept.shape == (N, F) and kept[0, 0] == E and not kept[1:].any()

    def of_view(s: Tensor) -> Tensor:
        made = torch.zeros(N, F)
        seen = made.view(-1)
        assert part_of(made.index_add_(0, index, s)) is part_of(made) is not None
        return seen * 2

    with pytest.raises(RuntimeError, match="changed in place through another one"):
        viewed(group, of_view)


def test_tensors_of_others_stay_whole(ranks: Ranks) -> None:
    ranks(2, check_kept)


def check_wrong_index(rank: int, world: int, group: Group) -> None:
    for value in (-1, N):
        with pytest.raises(
            IndexError, match=rf"index {value} is out of bounds for dim 0 of size {N}, on rank"
        ):
            viewed(group, lambda s, value=value: torch.zeros(N, F).index_add(0, torch.full((E,), value), s))
    index = torch.zeros(E, dtype=torch.int64)
    assert viewed(group, lambda s: torch.zeros(N, F).index_add(0, index, s)).shape[1] == F


def test_an_index_out_of_range_raises_on_all_ranks(ranks: Ranks) -> None:
    ranks(2, check_wrong_index)


def check_changed_index(rank: int, world: int, group: Group) -> None:
    """A plan is of an index as it is: one that is changed in place has another."""
    index = torch.arange(E) % N

    def run(s: Tensor) -> tuple[Tensor, Tensor]:
        rows = s.cumsum(1)[index]
        index.add_(1)
        return rows, s.cumsum(1)[index]

    x = torch.randn(E, F, generator=torch.Generator().manual_seed(0))
    view = View(Parts(group, world, rank))
    part = view.shard(x, view.parts.part(0, (E,)))
    with intercepted(view), view.forward():
        first, second = view.output(run(part))
    torch.testing.assert_close(first, x.cumsum(1)[torch.arange(E) % N])
    torch.testing.assert_close(second, x.cumsum(1)[torch.arange(E) % N + 1])
    assert not view.parts.indexes


def test_a_changed_index_is_planned_anew(ranks: Ranks) -> None:
    ranks(2, check_changed_index)


def check_compiled(rank: int, world: int, group: Group) -> None:
    one = of_layer("mean")
    model = copy.deepcopy(one)
    report = spar.parallelize(model, group)
    model.compile(backend="aot_eager")
    for seed in range(2):
        given = graph(NODES, EDGES, NODES, seed)
        for found, expected in zip(stepped(model, given)[:2], stepped(one, given)[:2], strict=True):
            assert is_near(found, expected)
    assert [each.block for each in report.eager] == ["Mean"]
    assert "known from values alone" in report.eager[0].reason


@pytest.mark.compiler
def test_compiled_layers_run_eagerly(ranks: Ranks) -> None:
    ranks(2, check_compiled)
