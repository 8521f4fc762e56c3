# SPDX-License-Identifier: Apache-2.0
"""Train a graph network on the forces between points, which are sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/graph.py

Each rank has a part of the points, sorted along a Morton curve, and the edges to its own from the nearest
ones. Forces are gradients of the energy, so that training differentiates both exchanges of a step twice. The
losses and parameters must be those of one process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import spar

POINTS, NEAREST, WIDTH = 300, 8, 16
TOLERANCE = 1e-9  # relative, in float64


def along_a_curve(points: Tensor, bits: int = 10) -> Tensor:
    """Return the order of points [N, 3] in [0, 1) along a Morton curve."""
    places = (points * 2**bits).long()
    code = torch.zeros_like(places[:, 0])
    for bit in range(bits):
        for dim in range(3):
            code |= (places[:, dim] >> bit & 1) << (3 * bit + dim)
    return code.argsort()


class Potential(nn.Module):
    """The energy of points by their distances: two layers of message passing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.second = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, points: Tensor, table: Callable[[Tensor], Tensor], edges: Tensor) -> Tensor:
        """Return the energy of own points; table: own rows and those of others, which edges[0] indexes."""
        source, target = edges
        away = (table(points)[source] - points[target]).square().sum(-1, keepdim=True).sqrt() * 10
        message = self.first(away)
        x = message.new_zeros(len(points), WIDTH).index_add(0, target, message)
        energy: Tensor = self.second(torch.cat([table(x)[source], message], -1)).sum()
        return energy


def forces(model: Potential, points: Tensor, table: Callable[[Tensor], Tensor], edges: Tensor) -> Tensor:
    """Return the forces on own points, which energies of other ranks' points have a part in."""
    points = points.detach().requires_grad_()
    energy = model(points, table, edges)
    return -torch.autograd.grad(energy, points, create_graph=True)[0]


def springs(points: Tensor, edges: Tensor) -> Tensor:
    """Return the forces to learn."""
    between = points[edges[0]] - points[edges[1]]
    pull = between * (1 - 0.1 / between.norm(dim=-1, keepdim=True))
    return torch.zeros_like(points).index_add(0, edges[1], pull).index_add(0, edges[0], -pull)


def train(step: Callable[[Potential], Tensor], steps: int, ranks: bool) -> tuple[list[float], Tensor]:
    """Return the losses and the parameters; ranks: whether to sum losses and gradients over the ranks."""
    torch.manual_seed(0)
    model = Potential().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model)
        loss.backward()
        for x in [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]:
            if ranks:
                dist.all_reduce(x)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 2 examples/graph.py")
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(POINTS, 3, generator=generator, dtype=torch.float64)
    points = points[along_a_curve(points)]
    distances = torch.cdist(points, points).fill_diagonal_(torch.inf)
    nearest = distances.topk(NEAREST, largest=False).indices
    edges = torch.stack([nearest.flatten(), torch.arange(POINTS).repeat_interleave(NEAREST)])
    wanted = springs(points, edges)

    layout = spar.SequenceLayout.even(POINTS, dist.group.WORLD)
    own = layout.index()
    rows = layout.rows(nearest[own].flatten())  # once, for all layers and steps
    local = torch.stack([rows.local, torch.arange(len(own)).repeat_interleave(NEAREST)])

    def sharded(model: Potential) -> Tensor:
        return (forces(model, points[own], rows.table, local) - wanted[own]).square().sum() / POINTS

    def whole(model: Potential) -> Tensor:
        return (forces(model, points, lambda x: x, edges) - wanted).square().sum() / POINTS

    losses, parameters = train(sharded, args.steps, True)
    if dist.get_rank() == 0:
        expected, of_one = train(whole, args.steps, False)
        error = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        apart = float((parameters - of_one).norm() / of_one.norm())
        share = rows.received / (POINTS - rows.own)
        print(f"{rows.own} points, and {rows.received} of others: {share:.0%} of what all_gather receives")
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; in one process {expected[-1]:.4f}")
        if not error < TOLERANCE or not apart < TOLERANCE:
            sys.exit(f"losses differ by {error:.1e}, parameters by {apart:.1e}; allowed: {TOLERANCE:.0e}")
        print(f"proved: a graph network learns the same forces over {layout.group.size()} ranks.")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
