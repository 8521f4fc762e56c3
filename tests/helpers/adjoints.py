# SPDX-License-Identifier: Apache-2.0
"""Derivatives of sums over all ranks, against differences: gradcheck for functions that communicate."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Function = Callable[[torch.Tensor], torch.Tensor]  # this rank's loss


def over_ranks(value: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Return the sum over the ranks."""
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return float(total)


def inner(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Return <x, y>, summed over the ranks."""
    return over_ranks((x.detach() * y.detach()).sum(), group)


def same_derivative(function: Function) -> Function:
    """Return this rank's part of |dL/dx|^2 as a function: its gradient is a second derivative."""

    def squared(x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
        return (grad * grad).sum()

    return squared


def check_derivative(what: str, function: Function, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Compare dL/dx with central differences, for the sum L of the ranks' losses and a float64 input."""
    step, leaf, differences = 1e-5, x.clone().requires_grad_(), torch.zeros(x.numel(), dtype=x.dtype)
    (found,) = torch.autograd.grad(function(leaf), leaf)
    counts = [0] * group.size()
    dist.all_gather_object(counts, x.numel(), group=group)
    for rank, count in enumerate(counts):
        for i in range(count):
            for sign in (1, -1):
                moved = x.flatten()
                if rank == group.rank():
                    moved = moved.index_add(
                        0, torch.tensor([i]), torch.full((1,), sign * step, dtype=x.dtype)
                    )
                total = over_ranks(function(moved.reshape(x.shape)), group)
                if rank == group.rank():
                    differences[i] += sign * total / (2 * step)
    torch.testing.assert_close(
        found, differences.reshape(x.shape), rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}"
    )
