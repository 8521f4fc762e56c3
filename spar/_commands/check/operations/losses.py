# SPDX-License-Identifier: Apache-2.0
"""Cases of mean_loss and rank_seed."""

from __future__ import annotations

import torch
from torch import Tensor

import spar

from ..shards import Make
from ..trial import NO_GRADIENT, OWN, Case, Setting, Tensors, Trial, numbers


def loss_cases() -> list[Case]:
    def loss(averaged: bool) -> Make:
        def make(s: Setting) -> Trial:
            counts = [3 * rank for rank in range(1, s.world)] + [0 if s.world > 1 else 3]
            losses = [[numbers(1, seed=rank).sum() + rank] for rank in range(s.world)]

            def reference(inputs: list[Tensors]) -> list[Tensors]:
                mean = torch.stack([own[0].double() for own in inputs]).sum() / sum(counts)
                return [[mean.float()]] * s.world

            more = {"averaged_by": s.group} if averaged else {}
            return Trial(
                losses,
                lambda x: spar.mean_loss(x, counts[s.rank], s.group, **more),
                reference,
                OWN,
                (lambda g: g * s.world) if averaged else None,
                tolerance=1e-6,
            )

        return make

    def seeded(s: Setting) -> Trial:
        def draw() -> Tensor:
            with spar.rank_seed(7, s.group):
                return torch.rand(4, device="cpu")

        def run() -> Tensors:
            """Return whether numbers repeat, whether the generator is restored, and how many ranks differ."""
            state = torch.get_rng_state()
            first, again = draw(), draw()
            ranks = spar.all_gather(first[None].to(s.device), s.group).unique(dim=0)
            found = (torch.equal(first, again), torch.equal(state, torch.get_rng_state()), len(ranks))
            return [torch.tensor(found, device="cpu")]

        return Trial(
            [[]] * s.world, run, lambda inputs: [[torch.tensor((1, 1, s.world))]] * s.world, NO_GRADIENT
        )

    return [
        Case("mean_loss", "a rank without tokens", loss(averaged=False)),
        Case("mean_loss", "averaged_by", loss(averaged=True)),
        Case("rank_seed", "", seeded),
    ]
