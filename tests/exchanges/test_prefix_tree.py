# SPDX-License-Identifier: Apache-2.0
"""spar.data.PrefixTree: samples whose common prefixes are one, against walking from tokens to their roots."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor

import spar
from spar._attention.prefix_tree import SpansOfTree
from spar.data import PrefixTree, Tree
from spar.ops.tree_cut import cut_by_work

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
SAMPLES = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 9, 9],
    [1, 2, 3, 4, 5, 7],
    [1, 2, 3],  # where others go on
    [4, 4],
    [],
    [1, 2, 3, 9, 9],  # equal to another one
    [6],
]


def random_samples(seed: int) -> list[list[int]]:
    """Return samples that share prefixes: some continue another one from somewhere on."""
    generator, found = random.Random(seed), []
    vocabulary = generator.choice([1, 2, 5, 50])
    for _ in range(generator.randint(1, 12)):
        begin = generator.choice(found)[: generator.randint(0, 9)] if found else []
        found.append(begin + [generator.randrange(vocabulary) for _ in range(generator.randint(0, 9))])
    return found if any(found) else [[1]]


def least_places(samples: list[list[int]], same: list[list[int]]) -> int:
    """Return how many prefixes there are, each with its next token; an end counts where no sample goes on."""
    found = set()
    for pair in zip(samples, same, strict=True):
        tokens = tuple(zip(*pair, strict=True))
        found |= {(tokens[: i + 1], tokens[i + 1 : i + 2]) for i in range(len(tokens))}
    followed = {prefix for prefix, following in found if following}
    return sum(bool(following) or prefix not in followed for prefix, following in found)


def check_tree(tree: Tree, samples: list[list[int]], same: list[list[int]]) -> None:
    ids, depths, labels = (x[0].tolist() for x in (tree.input_ids, tree.position_ids, tree.labels))
    parents, counts = tree.parents.tolist(), [0] * len(ids)
    keys: dict[int, int] = {}
    for sample, others, places, is_first in zip(samples, same, tree.places, tree.is_first, strict=True):
        listed = places.tolist()
        assert [ids[place] for place in listed] == sample
        assert [depths[place] for place in listed] == [*range(len(sample))]
        assert [parents[place] for place in listed] == [-1, *listed][: len(listed)]
        assert [labels[place] for place in listed[:-1]] == sample[1:]
        for place, other in zip(listed, others, strict=True):
            assert keys.setdefault(place, other) == other
            counts[place] += 1
        assert len(is_first) == len(sample)
    assert counts == tree.counts.tolist() and min(counts) > 0
    first = torch.cat([places[which] for places, which in zip(tree.places, tree.is_first, strict=True)])
    assert first.sort()[0].tolist() == [*range(len(ids))]  # each place once
    has_child = set(parents)
    assert all(label == -100 for place, label in enumerate(labels) if place not in has_child)


def allowed(tree: Tree, wanted: Callable[[int, int], bool]) -> Tensor:
    parents, depths = tree.parents.tolist(), tree.position_ids[0].tolist()
    found = [[False] * len(parents) for _ in parents]
    for place, depth in enumerate(depths):
        at = place
        while at >= 0:
            found[place][at] = wanted(depth, depths[at])
            at = parents[at]
    return torch.tensor(found)


def check_random(rank: int, world: int, group: Group) -> None:
    for seed in range(60):
        samples = random_samples(seed)
        same = [[0] * len(each) for each in samples]
        if seed % 3 == 0:
            same = [
                [(token + i) % 2 if len(each) > 5 else 0 for i, token in enumerate(each)] for each in samples
            ]
        tree = PrefixTree(samples, group, same=same if seed % 3 == 0 else None).trees[0]
        check_tree(tree, samples, same)
        assert tree.input_ids.size(1) == least_places(samples, same), samples
        for left in (None, 0, 2, 5):
            dense = allowed(tree, lambda query, key, left=left: left is None or query - key <= left)
            assert tree.spans(left).dense()[0, 0].equal(dense), (samples, left)
        deepest = int(tree.position_ids.max()) + 1
        chunks = tree.along(spar.Spans.chunks(deepest, 3) | spar.Spans.prefix(deepest, 1))
        assert chunks.dense()[0, 0].equal(
            allowed(tree, lambda query, key: query // 3 == key // 3 or key == 0)
        )


def test_random_samples(pool: Ranks) -> None:
    pool(1, check_random)


def check_samples(rank: int, world: int, group: Group) -> None:
    """What PackedSamples does, over the tree's tokens; layouts, gradients of expand, edges."""
    generator = torch.Generator().manual_seed(3)
    lengths = [len(each) for each in SAMPLES]
    masks = [torch.rand(length, generator=generator) < 0.6 for length in lengths]
    ids = [torch.tensor(each, dtype=torch.int64) for each in SAMPLES]

    def cut(tree: Tree) -> spar.SequenceLayout:
        return spar.SequenceLayout.zigzag(tree.input_ids.size(1), group)

    for layout in ("even", "zigzag", "balanced", cut):
        for options in ({}, {"rows": 3}, {"max_tokens": 9}):
            samples = PrefixTree(SAMPLES, group, layout=layout, **options)
            assert sorted(n for row in samples.rows for n in row) == [*range(len(SAMPLES))]
            sizes = [tree.input_ids.size(1) for tree in samples.trees]
            assert len(sizes) >= options.get("rows", 1) and max(sizes) <= options.get("max_tokens", 99)
            outputs = []
            for row, tree in enumerate(samples.trees):
                of_tree = torch.arange(100.0, 100 + sizes[row])[None]
                x = tree.layout.shard(of_tree, 1).clone().requires_grad_()
                y = tree.expand(x)
                expected = torch.cat([of_tree[0, places] for places in tree.places])
                assert y.detach().equal(tree.samples.shard(expected[None], 1))
                y.sum().backward()
                assert x.grad is not None and x.grad.equal(tree.layout.shard(tree.counts[None].float(), 1))
                outputs.append(tree.expand(tree.layout.shard(tree.input_ids, 1)))
                assert samples.shard(ids, row).equal(outputs[-1])
                labels = tree.expand(tree.shard_labels())
                known = samples.shard(ids, row, shift=1, fill=-100)
                assert torch.where(known == -100, known, labels).equal(known)
                check_edges(samples, row, masks)
            assert all(a.equal(b) for a, b in zip(samples.unpack(outputs), ids, strict=True))


def check_edges(samples: PrefixTree, row: int, masks: list[Tensor]) -> None:
    tree = samples.trees[row]
    edges, counted = samples.edges(masks, row), samples.shard(masks, row, shift=1)
    own = edges.of(tree.layout.shard(tree.labels, 1))
    assert own.equal(edges.labels) and not (own == -100).any()
    assert edges.layout.total <= int(counted.numel() and sum(tree.samples.sizes))
    expected = tree.expand(tree.shard_labels()).where(counted, 0)
    assert edges.expand(edges.labels).where(counted, 0).equal(expected)
    whole = edges.layout.gather(edges.labels, 1)
    assert whole.size(1) == edges.layout.total == sum(edges.layout.sizes)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_samples_over_a_tree(pool: Ranks, world: int) -> None:
    pool(world, check_samples)


def attend(method: str | None, tree: Tree, window: int | None, group: Group) -> None:
    """Compare attention over a tree, and its gradients, with that of each sample alone."""
    total = tree.input_ids.size(1)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (
        torch.randn(1, total, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    parts = [tree.layout.shard(x.detach(), 1).clone().requires_grad_() for x in (q, k, v)]
    spans = tree.spans(window)
    out = spar.attention(*parts, tree.layout, mask=spans, method=method)
    dense = spans.dense()[0, 0]
    alone = torch.nn.functional.scaled_dot_product_attention(
        *[x.transpose(1, 2) for x in (q, k, v)], attn_mask=dense, enable_gqa=True
    ).transpose(1, 2)
    assert (out - tree.layout.shard(alone.detach(), 1)).abs().max() < 1e-12
    weights = torch.randn(alone.shape, dtype=torch.float64, generator=generator)
    (alone * weights).sum().backward()
    (out * tree.layout.shard(weights, 1)).sum().backward()
    for x, part in zip((q, k, v), parts, strict=True):
        assert x.grad is not None and part.grad is not None
        assert (part.grad - tree.layout.shard(x.grad, 1)).abs().max() < 1e-12


def check_attention(rank: int, world: int, group: Group) -> None:
    for layout in ("even", "balanced"):
        tree = PrefixTree(SAMPLES * 2 + [[*range(90)], [*range(60), 1, 2]], group, layout=layout).trees[0]
        for method in ("ulysses", "gather", "ring"):
            for window in (None, 3):
                attend(method, tree, window, group)


@pytest.mark.parametrize("world", [2, 3])
def test_attention(pool: Ranks, world: int) -> None:
    pool(world, check_attention)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64])
def test_ranks_have_equal_tokens_and_work(world: int) -> None:
    for seed, total in ((0, 1), (1, 5), (2, 640), (3, 6400)):
        generator = torch.Generator().manual_seed(seed)
        work = torch.rand(total, generator=generator) * torch.linspace(0, 9, total) + 1
        runs = cut_by_work(work, world)
        held = sorted((run, rank) for rank, listed in enumerate(runs) for run in listed)
        assert [start for (start, _), _ in held] == [0, *[stop for (_, stop), _ in held[:-1]]]
        assert held[-1][0][1] == total and len(held) <= max(2 * world - 1, 1)
        sizes = [sum(stop - start for start, stop in listed) for listed in runs]
        assert max(sizes) - min(sizes) <= 1
        if total >= 100 * world:
            works = [sum(float(work[start:stop].sum()) for start, stop in listed) for listed in runs]
            assert max(works) < 1.02 * float(work.sum()) / world


def check_errors(rank: int, world: int, group: Group) -> None:
    def bad(kind: type[Exception], text: str, *samples: Any, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            PrefixTree(*samples, group=group, **options)

    bad(ValueError, "samples have no tokens; expected at least one", [[], []])
    bad(ValueError, "samples have no tokens", [])
    bad(TypeError, r"samples is a str; expected a list of lists of ints", "abc")
    bad(TypeError, r"samples\[1\]\[0\] is 1.5; expected an int", [[1], [1.5]])
    bad(TypeError, r"samples\[0\] is of shape \[1\] of torch.float32; expected ints", [torch.ones(1)])
    bad(ValueError, r"same has lengths \[1\]; expected those of samples, \[2\]", [[1, 2]], same=[[1]])
    bad(ValueError, r"mask of shape \[1, 3\]; expected two tensors", torch.ones(1, 2), mask=torch.ones(1, 3))
    bad(ValueError, "max_tokens is 2, and sample 1 has 3 tokens", [[1], [1, 2, 3]], max_tokens=2)
    bad(ValueError, "rows is 3; expected at most 2", [[1], [2]], rows=3)
    bad(ValueError, "rows is 2; expected at most 1, the number of samples with tokens", [[1], []], rows=2)
    bad(ValueError, "layout is 'ring'; expected \"even\"", [[1]], layout="ring")
    bad(ValueError, "layout= returned None; expected a SequenceLayout", [[1]], layout=lambda tree: None)
    tree = PrefixTree([[1, 2, 3]], group).trees[0]
    with pytest.raises(ValueError, match=r"left is -1; expected at least 0"):
        tree.spans(-1)
    with pytest.raises(ValueError, match=r"spans is Spans\(.*expected Spans of one sample of 3 tokens"):
        tree.along(spar.Spans.causal(4))
    edges = PrefixTree([[1, 2, 3]], group).edges([torch.ones(3)])
    for of_rank in (tree.expand, edges.of, edges.expand):  # the whole row
        with pytest.raises(ValueError, match=r"x is of shape \[1, 3\]; expected \d in dim 1, this rank's"):
            of_rank(torch.zeros(1, 3))
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    padded = PrefixTree(torch.tensor([[0, 5, 6], [5, 6, 0]]), group, mask=mask)
    assert padded.trees[0].input_ids.tolist() == [[5, 6]] and padded.trees[0].counts.tolist() == [2, 2]
    restored = padded.unpack(padded.shard(torch.tensor([[0, 7, 8], [7, 8, 0]])))
    assert restored.tolist() == [[0, 7, 8], [7, 8, 0]]


def check_copies(rank: int, world: int, group: Group) -> None:
    """Spans that follow from those of a tree lie as it does, and copies have the tree."""
    tree, other = (PrefixTree(SAMPLES, group, layout=name).trees[0] for name in ("balanced", "even"))
    spans, causal = tree.spans(), spar.Spans.causal(tree.layout.total)
    for combined in (spans & causal, causal & spans, spans | causal):
        assert combined.layout is tree.layout
    with pytest.raises(ValueError, match="those of two trees"):
        spans & other.spans()
    for copied in (spans.to("meta"), copy.deepcopy(spans), copy.copy(spans)):
        assert isinstance(copied, SpansOfTree) and copied.tree is tree
    loaded = pickle.loads(pickle.dumps(tree))
    assert loaded.batch()["attention_mask"].ends.equal(spans.ends)
    assert loaded.layout.numbers == tree.layout.numbers
    loaded = pickle.loads(pickle.dumps(spans))
    assert loaded.ends.equal(spans.ends) and loaded.tree.digest == tree.digest
    with pytest.raises(AttributeError, match=r"Spans has no attribute 'sum'; .* spar.parallelize"):
        spans.sum()


def test_copies(pool: Ranks) -> None:
    pool(2, check_copies)


def test_errors(pool: Ranks) -> None:
    pool(2, check_errors)
