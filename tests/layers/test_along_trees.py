# SPDX-License-Identifier: Apache-2.0
"""by_heads and by_state along a prefix tree: the results and gradients of the separate samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor

import spar
from spar.data import PrefixTree, Tree
from spar.ops.convolution import convolve_tree

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
PROMPT = [*range(11)]
SAMPLES = [[*PROMPT, 1, 2, 3], [*PROMPT, 1, 2, 4, 4], [*PROMPT], [*PROMPT, 7, 7], [5, 6], [5, 6, 7], [5]]
HEADS, KEYS, VALUES = 3, 4, 5


def step(k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run linear attention of keys [B, T, H, K] and values [B, T, H, V], with a decay by the keys' sums."""
    outputs = []
    for i in range(k.size(1)):
        decay = torch.sigmoid(k[:, i].sum(-1))[..., None, None]
        state = decay * state + k[:, i, :, :, None] * v[:, i, :, None, :]
        outputs.append((k[:, i, :, None, :] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state


def transition(k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(k.sum(-1)).prod(1)[..., None, None]


def whole_tensors(tree: Tree) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = tree.layout.total, HEADS
    return [
        torch.randn(1, *sizes, width, dtype=torch.float64, generator=generator) for width in (KEYS, VALUES)
    ]


def of_samples(tree: Tree, tensors: list[Tensor]) -> Tensor:
    """Return what each place's token is in one of its samples, each run alone."""
    out = torch.zeros(1, tree.layout.total, HEADS, VALUES, dtype=torch.float64)
    for places in tree.places:
        y, _ = step(
            *[x[:, places] for x in tensors], torch.zeros(1, HEADS, KEYS, VALUES, dtype=torch.float64)
        )
        out = out.index_copy(1, places, y)
    return out


def check_gradients(tree: Tree, run: Any, expected: Tensor, tensors: list[Tensor], dim: int = 1) -> None:
    parts = [tree.layout.shard(x.detach(), dim).clone().requires_grad_() for x in tensors]
    out = run(*parts)
    torch.testing.assert_close(out, tree.layout.shard(expected.detach(), dim), rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    known = torch.autograd.grad((expected * weights).sum(), tensors, retain_graph=True)
    found = torch.autograd.grad((out * tree.layout.shard(weights, dim)).sum(), parts)
    for own, whole in zip(found, known, strict=True):
        torch.testing.assert_close(own, tree.layout.shard(whole, dim), rtol=0, atol=1e-12)


def check_recurrences(rank: int, world: int, group: Group) -> None:
    state = 1, HEADS, KEYS, VALUES
    for layout in ("even", "zigzag", "balanced"):
        tree = PrefixTree(SAMPLES, group, layout=layout).trees[0]
        tensors = [x.requires_grad_() for x in whole_tensors(tree)]
        expected = of_samples(tree, tensors)

        def by_heads(k: Tensor, v: Tensor, tree: Tree = tree) -> Any:
            return spar.by_heads(step, [k, v], tree.layout, like=1, tree=tree, state=state)

        def by_state(k: Tensor, v: Tensor, tree: Tree = tree) -> Tensor:
            given = {"decay": True, "like": 1, "tree": tree}
            return spar.by_state(step, [k, v], tree.layout, state, transition, **given)

        for run in (by_heads, by_state):
            check_gradients(tree, run, expected, tensors)


def check_convolutions(rank: int, world: int, group: Group) -> None:
    generator = torch.Generator().manual_seed(2)
    for before in (1, 3, 14):  # up to more than a path
        weight = torch.randn(2, 1, before + 1, dtype=torch.float64, generator=generator)

        def convolve(x: Tensor, weight: Tensor = weight, before: int = before) -> Tensor:
            padded = torch.nn.functional.pad(x, (before, 0))
            return torch.nn.functional.conv1d(padded, weight, groups=2)

        for layout in ("even", "balanced"):
            tree = PrefixTree(SAMPLES, group, layout=layout).trees[0]
            x = torch.randn(
                1, 2, tree.layout.total, dtype=torch.float64, generator=generator
            ).requires_grad_()
            expected = torch.zeros_like(x)
            for places in tree.places:
                expected = expected.index_copy(2, places, convolve(x[:, :, places]))

            def run(part: Tensor, tree: Tree = tree, fn: Any = convolve, before: int = before) -> Tensor:
                return convolve_tree(fn, part, tree, before)

            check_gradients(tree, run, expected, [x], 2)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_are_those_of_samples(pool: Ranks, world: int) -> None:
    pool(world, check_recurrences)
    pool(world, check_convolutions)


def check_few(rank: int, world: int, group: Group) -> None:
    """Ranks without tokens."""
    tree = PrefixTree([[1, 2], [1, 3]], group).trees[0]
    tensors = [x.requires_grad_() for x in whole_tensors(tree)]

    def by_state(k: Tensor, v: Tensor) -> Tensor:
        given = {"decay": True, "like": 1, "tree": tree}
        return spar.by_state(step, [k, v], tree.layout, (1, HEADS, KEYS, VALUES), transition, **given)

    check_gradients(tree, by_state, of_samples(tree, tensors), tensors)
    x = torch.ones(1, 2, tree.layout.total, dtype=torch.float64, requires_grad=True)

    def convolve(x: Tensor) -> Tensor:
        return x + torch.nn.functional.pad(x, (1, 0))[:, :, :-1]

    expected = torch.zeros_like(x)
    for places in tree.places:
        expected = expected.index_copy(2, places, convolve(x[:, :, places]))
    check_gradients(tree, lambda part: convolve_tree(convolve, part, tree, 1), expected, [x], 2)


def test_ranks_without_tokens(pool: Ranks) -> None:
    pool(7, check_few)


def check_errors(rank: int, world: int, group: Group) -> None:
    tree = PrefixTree(SAMPLES, group).trees[0]
    tensors = [tree.layout.shard(x, 1) for x in whole_tensors(tree)]
    state = 1, HEADS, KEYS, VALUES
    with pytest.raises(TypeError, match=r"tree is a PrefixTree; expected a Tree"):
        spar.by_heads(step, tensors, tree.layout, like=1, tree=PrefixTree(SAMPLES, group), state=state)  # type: ignore[arg-type]
    even = spar.SequenceLayout.even(tree.layout.total, group)
    with pytest.raises(ValueError, match=r"layout is .*; expected that of the tree"):
        spar.by_state(step, tensors, even, state, transition, decay=True, like=1, tree=tree)
    for wrong in ((), (1, HEADS + 1, KEYS, VALUES)):
        with pytest.raises(ValueError, match=r"state is .*; expected a shape \[B, 3, \.\.\.\]"):
            spar.by_heads(step, tensors, tree.layout, like=1, tree=tree, state=wrong)
    other = PrefixTree([*SAMPLES[:-1], [6 if rank else 5]], group).trees[0]
    with pytest.raises((spar.MismatchError, ValueError)):
        spar.by_heads(step, tensors, other.layout, like=1, tree=other, state=state)
    same_shape = PrefixTree([[1, 2, 3], [1, 4 + rank]], group).trees[0]
    parts = [same_shape.layout.shard(x, 1) for x in whole_tensors(same_shape)]
    with pytest.raises(spar.MismatchError, match=r"ranks \[0\] and \[1\] have other samples in the tree"):
        spar.by_heads(step, parts, same_shape.layout, like=1, tree=same_shape, state=state)
    spar.by_heads(step, tensors, tree.layout, like=1, tree=tree, state=state)  # the group stays usable


def test_errors(pool: Ranks) -> None:
    pool(2, check_errors)
