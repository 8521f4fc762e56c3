# SPDX-License-Identifier: Apache-2.0
"""Graph networks of plain torch, whose layers gather and scatter as those of torch_geometric do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH, HEADS, EDGE = 8, 2, 3


class Graph(NamedTuple):
    """edges: ints [2, E], sources and destinations."""

    x: Tensor
    edges: Tensor
    attributes: Tensor
    positions: Tensor


def graph(nodes: int, edges: int, reached: int, seed: int = 0) -> Graph:
    """Return a graph that is not symmetric, with edges that are equal; its last nodes receive nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ends = [torch.randint(0, most, (edges,), generator=generator) for most in (nodes, reached)]
    index = torch.stack(ends)
    index[:, : edges // 8] = index[:, :1]
    return Graph(draw(nodes, WIDTH), index, draw(edges, EDGE), draw(nodes, 3))


def aggregated(values: Tensor, index: Tensor, count: int, how: str) -> Tensor:
    """Return what each of so many nodes has of the values of its edges."""
    shape = [count, *values.shape[1:]]
    wide = index.view([-1] + [1] * (values.dim() - 1)).expand_as(values)
    if how == "sum":
        return values.new_zeros(shape).scatter_add_(0, wide, values)
    return values.new_zeros(shape).scatter_reduce_(0, wide, values, how, include_self=False)


def of_edges(scores: Tensor, index: Tensor, count: int) -> Tensor:
    """Return the softmax of scores over the edges of each node."""
    most = aggregated(scores.detach(), index, count, "amax")
    weights = (scores - most.index_select(0, index)).exp()
    return weights / (aggregated(weights, index, count, "sum") + 1e-16).index_select(0, index)


class Looped(nn.Module):
    """Each node has an edge to itself, behind the others, whose attributes are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, edges: Tensor, attributes: Tensor, *_: Any) -> Tensor:
        loops = torch.arange(x.size(0)).expand(2, -1)
        zeros = attributes.new_zeros(x.size(0), EDGE)
        return self.inner(x, torch.cat([edges, loops], 1), torch.cat([attributes, zeros]))


class Mean(nn.Module):
    def __init__(self, how: str = "mean") -> None:
        super().__init__()
        self.own, self.others, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor, edges: Tensor, *_: Any) -> Tensor:
        messages = x.index_select(0, edges[0])
        found = self.others(aggregated(messages, edges[1], x.size(0), self.how))
        return torch.tanh(self.own(x) + found)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.edge = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(EDGE, WIDTH),
        )
        self.weight = nn.Parameter(torch.randn(1, HEADS, WIDTH // HEADS))

    def forward(self, x: Tensor, edges: Tensor, attributes: Tensor, *_: Any) -> Tensor:
        source, target = [f(x).view(-1, HEADS, WIDTH // HEADS) for f in (self.source, self.target)]
        messages = source[edges[0]]
        mixed = messages + target[edges[1]] + self.edge(attributes).view_as(messages)
        weights = of_edges((torch.tanh(mixed) * self.weight).sum(-1), edges[1], x.size(0))
        return x + aggregated(messages * weights[..., None], edges[1], x.size(0), "sum").flatten(1)


class Featured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(EDGE, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, edges: Tensor, attributes: Tensor, *_: Any) -> Tensor:
        messages = (x[edges[0]] + self.edge(attributes)).relu()
        return self.net(x + torch.zeros_like(x).index_add_(0, edges[1], messages))


class Moving(nn.Module):
    """An equivariant layer: positions move along the differences to neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH + 1 + EDGE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.node, self.step = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(
        self, x: Tensor, edges: Tensor, attributes: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        row, column = edges
        along = positions[row] - positions[column]
        far = along.square().sum(1, keepdim=True)
        messages = self.edge(torch.cat([x[row], x[column], far, attributes], 1))
        moved = torch.zeros(x.size(0), 3, dtype=x.dtype)
        moved.scatter_reduce_(0, row[:, None].expand(-1, 3), along * self.step(messages), "mean")
        found = torch.zeros(x.size(0), WIDTH, dtype=x.dtype).index_add_(0, row, messages)
        return x + self.node(torch.cat([x, found], 1)), positions + moved


class Net(nn.Module):
    """Layers of one kind, and a number for the graph."""

    def __init__(self, layer: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(
        self, x: Tensor, edges: Tensor, attributes: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            found = layer(x, edges, attributes, positions)
            x, positions = found if isinstance(found, tuple) else (found, positions)
        return x, self.head(x).sum() + positions.square().sum()


class Energy(nn.Module):
    """Continuous filters over distances: forces are gradients of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Filtered() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor, positions: Tensor) -> Tensor:
        far = (positions[edges[0]] - positions[edges[1]]).square().sum(1)
        bumps = (-(far[:, None] - torch.arange(EDGE)).square()).exp()
        for layer in self.layers:
            x = x + layer(x, edges, far, bumps)
        return self.head(x).sum()


class Filtered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters, self.values = nn.Linear(EDGE, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, edges: Tensor, far: Tensor, bumps: Tensor) -> Tensor:
        filters = self.filters(bumps).tanh() * (-far).exp()[:, None]
        return aggregated(self.values(x)[edges[0]] * filters, edges[1], x.size(0), "sum").tanh()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mean": Mean,
    "max": lambda: Mean("amax"),
    "attention": Attention,
    "loops": Looped,
    "edge features": Featured,
    "positions": Moving,
}
