# SPDX-License-Identifier: Apache-2.0
"""`SequenceLayout.with_documents`: documents of any cut, which all operations take from the layout."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import spar
from spar import SequenceLayout

Group = dist.ProcessGroup
TOTAL = 23
DOCUMENTS = [7, 0, 1, 15]
CUTS: dict[str, Callable[[Group], SequenceLayout]] = {
    "even": lambda group: SequenceLayout.even(TOTAL, group),
    "zigzag": lambda group: SequenceLayout.zigzag(TOTAL, group),
    "hybrid": lambda group: SequenceLayout("hybrid", (2 - group.size() % 2, TOTAL), group),
    "hybrid of neighbours": lambda group: SequenceLayout("hybrid", (group.size() % 2 - 2, TOTAL), group),
    "joint": lambda group: SequenceLayout.joint(9, TOTAL - 9, group),
    "local": lambda group: SequenceLayout("local", (*[0] * (group.size() - 1), TOTAL), group),
}


def attend_apart(tensors: list[Tensor]) -> Tensor:
    """Attend in each document by itself: [B, S, H, D]."""
    parts = [[part.transpose(1, 2) for part in x.split(DOCUMENTS, 1)] for x in tensors]
    outs = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outs, 2).transpose(1, 2)


def check_attention(rank: int, world: int, group: Group) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, TOTAL, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = attend_apart(leaves)
    upper = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(expected, leaves, upper)
    causal = spar.Spans.causal(TOTAL)
    for kind, make in CUTS.items():
        layout = make(group).with_documents(DOCUMENTS)
        assert layout.index().equal(make(group).index()) and layout.sizes == make(group).sizes, kind
        own = layout.index()
        for method, mask in itertools.product((None, "ulysses", "gather", "ring"), (None, causal)):
            mine = [x[:, own].clone().requires_grad_() for x in whole]
            y = spar.attention(mine[0], mine[1], mine[2], layout, causal=True, method=method, mask=mask)
            torch.testing.assert_close(y, expected[:, own])
            for x, e in zip(torch.autograd.grad(y, mine, upper[:, own]), gradients, strict=True):
                torch.testing.assert_close(x, e[:, own])


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [2, 3])
def test_attention_keeps_documents_apart(ranks: Ranks, world: int) -> None:
    ranks(world, check_attention)


def check_values(rank: int, world: int, group: Group) -> None:
    places = torch.cat([torch.arange(length) for length in DOCUMENTS])
    values = torch.randn(2, TOTAL, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    keep = values > -0.5
    keep[:, 7] = True  # the document of one token
    sums = [
        (x * k).sum(1) / k.sum(1)
        for x, k in zip(values.split(DOCUMENTS, 1), keep.split(DOCUMENTS, 1), strict=True)
        if x.size(1)
    ]
    for make in CUTS.values():
        layout = make(group).with_documents(torch.tensor(DOCUMENTS))
        own = layout.index()
        assert layout.is_packed and layout.lengths == tuple(DOCUMENTS) and layout.total == TOTAL
        assert layout.positions().equal(places[own])
        assert layout.cu_seqlens().tolist() == [0, 7, 7, 8, 23]
        assert pickle.loads(pickle.dumps(layout)) == layout != make(group)
        assert layout == make(group).with_documents(DOCUMENTS)
        assert repr(layout) == f"SequenceLayout.with_documents([7, 0, 1, 15], {world} ranks)"
        # Each sample's mean counts once.
        mean = spar.masked_mean(values[:, own], keep[:, own], layout, by="sample")
        torch.testing.assert_close(mean, torch.cat(sums).mean())
    text = "expected a layout without documents, and lengths of 23 tokens in all"
    for layout, lengths, hint in (
        (SequenceLayout.even(TOTAL, group), [7, 15], ""),
        (SequenceLayout.even(TOTAL, group), [0, 7, 23], ". These look like cu_seqlens"),
        (SequenceLayout.packed(DOCUMENTS, group), DOCUMENTS, ""),
        (SequenceLayout.even(TOTAL, group).with_documents(DOCUMENTS), DOCUMENTS, ""),
    ):
        with pytest.raises(ValueError, match=r"SequenceLayout\.with_documents: lengths is") as caught:
            layout.with_documents(lengths)
        assert text + hint in str(caught.value)


def test_layout_knows_its_documents(ranks: Ranks) -> None:
    ranks(2, check_values)
