# SPDX-License-Identifier: Apache-2.0
"""A small graph; and what the blocks of docs/science.md take as given, and must find."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spar import SequenceLayout

NODES, WIDTH, NEAREST = 37, 6, 4


class Graph:
    """The nearest nodes of each, which is no symmetric graph; the first nodes have no edges."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.rand(NODES, 3, generator=generator, dtype=torch.float64)
        self.nodes = torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64)
        self.nearest = torch.cdist(self.points, self.points).fill_diagonal_(9).topk(NEAREST, largest=False)[1]
        self.source = self.nearest[NODES // 2 :].reshape(-1)
        self.target = torch.arange(NODES // 2, NODES).repeat_interleave(NEAREST)
        self.edges = torch.randn(len(self.source), WIDTH, generator=generator, dtype=torch.float64)


def added(messages: Tensor, targets: Tensor, count: int) -> Tensor:
    return messages.new_zeros(count, WIDTH).index_add(0, targets, messages)


class Conv(nn.Module):
    """Called as torch_geometric's layers between two sets of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor], edges: Tensor) -> Tensor:
        source, target = x
        messages = self.message(torch.cat([source[edges[0]], target[edges[1]]], -1))
        return target + added(messages.tanh(), edges[1], len(target))


class Energy(nn.Module):
    """The sum of distances to the nearest points."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, table: Tensor, x: Tensor, local: Tensor) -> Tensor:
        away = (table[local] - x[:, None]).square().sum(-1).add(0.1).sqrt()
        return away.sum() * self.weight


def given(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the names that the page's blocks take as given."""
    graph, layout = Graph(), SequenceLayout.even(NODES, group)
    names = {"points": graph.points, "nodes": graph.nodes, "nearest": graph.nearest, "layout": layout}
    q, k, v = graph.nodes[layout.index()].repeat(1, 3).chunk(3, -1)
    torch.manual_seed(0)
    convs = [Conv().double(), Conv().double()]
    names |= {"convs": convs, "layers": [torch.mul, torch.hypot], "q": q, "k": k, "v": v}
    edges = torch.stack([graph.source, graph.target])
    return names | {"edges": edges, "model": Energy(), "forces": graph.points, "wanted": 1.0}


def check_page(number: int, names: dict[str, Any]) -> None:
    """Compare what a block computed with one process."""
    graph, layout = Graph(), names["layout"]
    x, (source, target) = graph.nodes, (graph.source, graph.target)
    if number == 0:
        after = names["points"][names["edges"]]
        torch.testing.assert_close(after, graph.points[torch.stack([source, target])])
        assert names["points"].diff(dim=0).norm() < graph.points.diff(dim=0).norm()
        return
    if number == 1:
        for conv in names["convs"]:
            x = conv((x, x), torch.stack([source, target]))
        found = names["x"]
    elif number == 2:
        for layer in names["layers"]:
            x = x + added(layer(x[source], x[target]), target, NODES)
        found = names["x"]
    elif number == 3:
        near = x[graph.nearest]
        x = ((x[:, None] * near).sum(-1).div(WIDTH**0.5).softmax(-1)[..., None] * near).sum(1)
        found = names["y"]
    else:
        points = graph.points.clone().requires_grad_()
        (x,) = torch.autograd.grad(Energy()(points, points, graph.nearest), points)
        found = names["slope"]
    torch.testing.assert_close(found, x[layout.index()])
