# SPDX-License-Identifier: Apache-2.0
"""Trials of operations that move tokens by counts or by an index, or that compute losses of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .shards import Run, chosen, joined
from .trial import OWN, Setting, Tensors, Trial, numbers


def counted(s: Setting, run: Run) -> Trial:
    counts = [[(2 * p + 3 * q) % 4 for q in range(s.world)] for p in range(s.world)]

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        parts = [tensors[0].split(row, 1) for tensors, row in zip(inputs, counts, strict=True)]
        return [[torch.cat([part[rank] for part in parts], 1)] for rank in range(s.world)]

    inputs = [[numbers(2, sum(row), 3, seed=rank)] for rank, row in enumerate(counts)]
    return Trial(inputs, partial(run, counts), reference)


def rolled(s: Setting, run: Run, index: Tensors) -> Trial:
    """Each token moves by two places, the last ones to the front."""
    parts = chosen([numbers(2, sum(map(len, index)), 3)], index)
    return Trial(parts, run, lambda inputs: chosen([joined(inputs, index)[0].roll(2, 1)], index))


def wanted_by(world: int, total: int) -> Tensors:
    """Return what each rank wants of so many tokens: one twice, and of most ranks the same ones."""
    return [torch.arange(rank, 2 * total, 5) % total for rank in range(world)]


def indexed(s: Setting, run: Run, index: Tensors) -> Trial:
    """Each rank gathers tokens by their index."""
    wanted = wanted_by(s.world, sum(map(len, index)))
    parts = chosen([numbers(2, sum(map(len, index)), 3)], index)

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        whole = joined(inputs, index)[0]
        return [[whole.index_select(1, each)] for each in wanted]

    return Trial(parts, partial(run, wanted[s.rank].to(s.device)), reference)


def added_by_index(s: Setting, run: Run, index: Tensors) -> Trial:
    """Each rank adds to tokens by their index."""
    total = sum(map(len, index))
    wanted = wanted_by(s.world, total)
    inputs = [[numbers(2, len(each), 3, seed=rank)] for rank, each in enumerate(wanted)]

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        whole = torch.zeros(2, total, 3)
        for each, (rows,) in zip(wanted, inputs, strict=True):
            whole = whole.index_add(1, each, rows)
        return chosen([whole], index)

    return Trial(inputs, partial(run, wanted[s.rank].to(s.device)), reference)


def averaged(s: Setting, run: Run, scale: Callable[[Any, int], Any] | None = None) -> Trial:
    """One of several ranks has no tokens."""
    counts = [3 * rank for rank in range(1, s.world)] + [0 if s.world > 1 else 3]

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        return [[(torch.stack([part[0].double() for part in inputs]).sum() / sum(counts)).float()]] * s.world

    losses = [[numbers(1, seed=rank).sum() + rank] for rank in range(s.world)]
    return Trial(losses, partial(run, counts[s.rank]), reference, OWN, scale, tolerance=1e-6)


def masked(s: Setting, run: Run, index: Tensors) -> Trial:
    """Each row is a sample, and its mean over every third token counts as that of the others."""
    parts = chosen([numbers(2, sum(map(len, index)), 1)], index)
    marks = [part % 3 == 0 for part in index]

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        whole = joined(inputs, index)[0][:, torch.cat(index).sort().values % 3 == 0].double()
        return [[whole.mean(1).mean().float()]] * s.world

    call = partial(run, marks[s.rank].expand(2, -1).to(s.device))
    return Trial(parts, lambda x: call(x[..., 0]), reference, OWN, tolerance=1e-6)


def logprobs(s: Setting, run: Run, index: Tensors) -> Trial:
    parts = chosen([numbers(2, sum(map(len, index)), 7)], index)
    labels = [(part % 7).expand(2, -1) for part in index]

    def reference(inputs: list[Tensors]) -> list[Tensors]:
        found = [x[0].double().log_softmax(-1) for x in inputs]
        return [
            [x.gather(-1, label[..., None])[..., 0].float(), -(x.exp() * x).sum(-1).float()]
            for x, label in zip(found, labels, strict=True)
        ]

    return Trial(parts, partial(run, labels[s.rank].to(s.device)), reference, tolerance=1e-5)
