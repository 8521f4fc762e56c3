# SPDX-License-Identifier: Apache-2.0
"""Graph layers over `SequenceLayout.rows`: values, gradients and forces beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.graphs import NODES, WIDTH, Graph, added
from torch import Tensor, nn

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
LAYOUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    "even": lambda group: SequenceLayout.even(NODES, group),
    "zigzag": lambda group: SequenceLayout.zigzag(NODES, group),
    "a rank without nodes": lambda group: SequenceLayout(
        "local", (*(0, 20, 0)[: group.size() - 1], NODES - 20 * (group.size() > 2)), group
    ),
}


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = nn.Linear(3 * WIDTH, WIDTH)
        self.edge, self.node = nn.Sequential(wide, nn.SiLU()), nn.Linear(2 * WIDTH, WIDTH)

    def message(self, source: Tensor, target: Tensor, edges: Tensor) -> Tensor:
        return edges + self.edge(torch.cat([source, target, edges], -1))

    def update(self, x: Tensor, messages: Tensor) -> Tensor:
        return x + self.node(torch.cat([x, messages], -1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, nearest: Callable[[Tensor], Tensor]) -> Tensor:
        q, kv = self.qkv(x).split([WIDTH, 2 * WIDTH], -1)
        k, v = nearest(kv).chunk(2, -1)
        return x + ((q[:, None] * k).sum(-1).softmax(-1)[..., None] * v).sum(1)


class Energy(nn.Module):
    """Of the distances between nodes, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(
        self, points: Tensor, targets: Tensor, neighbours: Callable[[Tensor], Tensor], count: int
    ) -> Tensor:
        """Return the energies of so many nodes; targets: of edges; neighbours: rows of their sources."""
        away = (neighbours(points) - points[targets]).square().sum(-1, keepdim=True).add(1e-2).sqrt()
        near = torch.tanh(self.first(away))
        x = away.new_zeros(count, WIDTH).index_add(0, targets, near)
        pairs = torch.cat([neighbours(x), near], -1)
        return torch.tanh(
            away.new_zeros(count, 1).index_add(0, targets, self.second(pairs)) + x.sum(-1)[:, None]
        )


def over_table(graph: Graph, layers: Any, x: Tensor, layout: SequenceLayout, place: Tensor) -> Tensor:
    """Edges lie with their target."""
    mine = place[graph.target] >= 0
    rows, targets, e = layout.rows(graph.source[mine]), place[graph.target[mine]], graph.edges[mine]
    for layer in layers:
        e = layer.message(rows.table(x)[rows.local], x[targets], e)
        x = layer.update(x, added(e, targets, len(x)))
    return x


def over_sources(graph: Graph, layers: Any, x: Tensor, layout: SequenceLayout, place: Tensor) -> Tensor:
    """Edges lie with their source."""
    mine = place[graph.source] >= 0
    rows, sources, e = layout.rows(graph.target[mine]), place[graph.source[mine]], graph.edges[mine]
    for layer in layers:
        e = layer.message(x[sources], rows.gather(x), e)
        x = layer.update(x, rows.add(e))
    return x


def one_process(graph: Graph, layers: Any, x: Tensor) -> Tensor:
    e = graph.edges
    for layer in layers:
        e = layer.message(x[graph.source], x[graph.target], e)
        x = layer.update(x, added(e, graph.target, len(x)))
    return x


def over_nearest(graph: Graph, layers: Any, x: Tensor, layout: SequenceLayout, place: Tensor) -> Tensor:
    rows = layout.rows(graph.nearest[layout.index()])
    for layer in layers:
        x = layer(x, rows.gather)
    return x


def attention_of_one(graph: Graph, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, lambda kv: kv[graph.nearest])
    return x


CASES: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "edges with their target": (Messages, over_table, one_process),
    "edges with their source": (Messages, over_sources, one_process),
    "attention to the nearest": (Attention, over_nearest, attention_of_one),
}


def places(layout: SequenceLayout) -> Tensor:
    """Return where this rank holds each node; -1: it does not."""
    place = torch.full((NODES,), -1)
    place[layout.index()] = torch.arange(len(layout.index()))
    return place


def compare(group: Group, found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare gradients of parameters, which are sums over the ranks."""
    for mine, whole in zip(found, expected, strict=True):
        dist.all_reduce(mine, group=group)
        torch.testing.assert_close(mine, whole, rtol=1e-11, atol=1e-13)


def check_layers(rank: int, world: int, group: Group) -> None:
    graph = Graph()
    for name, make in LAYOUTS.items():
        layout = make(group)
        for case, (kind, sharded, of_one) in CASES.items():
            torch.manual_seed(1)
            layers = nn.ModuleList([kind(), kind()]).double()
            whole = graph.nodes.clone().requires_grad_()
            expected = of_one(graph, layers, whole)
            (grad, *grads) = torch.autograd.grad(expected.square().sum(), [whole, *layers.parameters()])
            x = graph.nodes[layout.index()].requires_grad_()
            y = sharded(graph, layers, x, layout, places(layout))
            torch.testing.assert_close(y, expected[layout.index()], msg=f"{name}, {case}")
            (mine, *found) = torch.autograd.grad(y.square().sum(), [x, *layers.parameters()])
            torch.testing.assert_close(mine, grad[layout.index()], rtol=1e-11, atol=1e-13)
            compare(group, found, grads)


def check_forces(rank: int, world: int, group: Group) -> None:
    """A loss of energy and forces has second derivatives through both exchanges."""
    graph = Graph()
    torch.manual_seed(1)
    model = Energy().double()
    points = graph.points.clone().requires_grad_()
    energy = model(points, graph.target, lambda x: x[graph.source], NODES).sum()
    (slope,) = torch.autograd.grad(energy, points, create_graph=True)
    loss = slope.square().sum() + energy.square()
    expected = torch.autograd.grad(loss, [*model.parameters()])
    for make in LAYOUTS.values():
        layout = make(group)
        place, own = places(layout), layout.index()
        mine = place[graph.target] >= 0
        rows, targets = layout.rows(graph.source[mine]), place[graph.target[mine]]
        x = graph.points[own].requires_grad_()
        for neighbours in (rows.gather, lambda x, rows=rows: rows.table(x)[rows.local]):
            energies = model(x, targets, neighbours, len(own))
            (force,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
            torch.testing.assert_close(force, slope[own])
            # All ranks compute the same term: it counts once if each has its share.
            total = spar.all_gather(energies.sum()[None], group).sum()
            torch.testing.assert_close(total, energy)
            loss = force.square().sum() + total.square() / world
            compare(group, [*torch.autograd.grad(loss, [*model.parameters()])], [*expected])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_layers_beside_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_layers)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_energies_and_forces_beside_one_process(ranks: Ranks, world: int) -> None:
    ranks(world, check_forces)
