# SPDX-License-Identifier: Apache-2.0
"""Functions of one (batch, head, query, key): `Spans.of` and `bias=` call them as flex_attention does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

import spar
from spar import Spans
from spar._attention import mask_functions

SHAPE = 2, 3, 6, 8
IDS = torch.tensor([[i // 3, i // 2 % 2] for i in range(8)])
NEAR = torch.stack([torch.arange(8) - 1, torch.arange(8) + 2], 1)
TABLE = torch.arange(8)[:, None] >= torch.arange(8)
GENERATOR = torch.Generator().manual_seed(1)
BOOLEANS = torch.rand(2, 3, 8, 8, generator=GENERATOR) > 0.4
FEATURES = torch.randn(8, 4, generator=GENERATOR, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "places": lambda b, h, q, k: (q >= k) & (q - k <= b + h),
    "a lookup": lambda b, h, q, k: IDS[q, 0] == IDS[k, 0],
    "a lookup of all indices": lambda b, h, q, k: BOOLEANS[b, h, q, k],
    "a reduction over features": lambda b, h, q, k: (IDS[q] == IDS[k]).all(),
    "a reduction over the last dim": lambda b, h, q, k: (IDS[q] != IDS[k]).any(-1),
    "a product of features": lambda b, h, q, k: FEATURES[q] @ FEATURES[k] > 0,
    "a row of a table": lambda b, h, q, k: (k >= (row := NEAR[q])[0]) & (k < row[1]),
    "a slice of a row": lambda b, h, q, k: (NEAR[q, :1] <= k).all() & (k < NEAR[q, 1]),
    "an int beside an index": lambda b, h, q, k: (NEAR[q, 0] <= k) & TABLE[q, 3],
    "a shifted lookup": lambda b, h, q, k: TABLE[(q + 1) % 8, k],
    "index_select": lambda b, h, q, k: TABLE.index_select(0, q[None])[0].index_select(0, k[None])[0],
    "gather": lambda b, h, q, k: BOOLEANS[b, h].gather(0, q.expand(1, 8))[0].gather(0, k[None])[0],
    "where": lambda b, h, q, k: torch.where(q < 3, k < 4, TABLE[q, k] & (h > 0)),
    "the key alone": lambda b, h, q, k: k < 4,
    "the query alone": lambda b, h, q, k: q != 2,
    "the head alone": lambda b, h, q, k: h == 1,
    "a constant": lambda b, h, q, k: torch.tensor(True),
    "floats": lambda b, h, q, k: (q / 2).floor() == (k / 2).floor(),
    "an einsum": lambda b, h, q, k: torch.einsum("c,c", FEATURES[q], FEATURES[k]) > h - 1.0,
    "of all keys": lambda b, h, q, k: (FEATURES @ FEATURES[q]).argmax() == k,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spans_are_those_of_create_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = create_mask(FUNCTIONS[name], *SHAPE, device="cpu")
    for pairs in (1 << 20, 100):
        monkeypatch.setattr(mask_functions, "_PAIRS", pairs)
        spans = Spans.of(FUNCTIONS[name], SHAPE)
        assert torch.equal(spans.dense().expand(SHAPE), expected)


def test_bisection_calls_a_function_for_one_pair() -> None:
    function = lambda b, h, q, k: (IDS[q, :1] == IDS[k, :1]).all() & (q - k <= b + h)  # noqa: E731
    expected = create_mask(function, 2, 3, 8, 8, "cpu")
    assert torch.equal(Spans.of(function, (2, 3, 8, 8), contiguous=True).dense(), expected)


REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "control flow": (lambda b, h, q, k: k <= q if q > 3 else k == q, "data-dependent control flow"),
    "item": (lambda b, h, q, k: IDS[int(q), 0] == IDS[k, 0], "calling .item()"),
    "a list": (lambda b, h, q, k: [k < 2, k < 3][q % 2], "calling .item()"),
    "numpy": (lambda b, h, q, k: torch.from_numpy(q.numpy() > 3), "data pointer"),
    "a size from values": (lambda b, h, q, k: IDS[IDS[:, 0] == IDS[q, 0]].sum() > k, "dynamic shape"),
    "in place": (lambda b, h, q, k: torch.zeros(()).add_(q) > k, "vmap"),
    "random numbers": (lambda b, h, q, k: torch.rand(()) > 0.5, "random operation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_vmap_cannot_batch_are_refused(name: str) -> None:
    function, text = REFUSED[name]
    with pytest.raises(ValueError, match=r"Spans\.of: the function failed under torch\.vmap") as caught:
        Spans.of(function, SHAPE)  # type: ignore[arg-type]
    assert text in str(caught.value)


SLOPES = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
BIASES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "slopes": lambda b, h, q, k: SLOPES[h] * (k - q) + 0.1 * b,
    "a product of features": lambda b, h, q, k: (FEATURES[q] * FEATURES[k]).sum(),
    "a row": lambda b, h, q, k: FEATURES[q].gather(0, (k % 4)[None])[0],
    "of the head alone": lambda b, h, q, k: SLOPES[h],
    "of the key alone": lambda b, h, q, k: FEATURES[k].norm(),
    "minus infinity": lambda b, h, q, k: torch.where((IDS[q] == IDS[k]).any(), 0.0, -torch.inf),
}


def check_biases(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Each bias, against a mask of its values for one pair at a time."""
    layout = spar.SequenceLayout.zigzag(8, group)
    q, k, v = torch.randn(3, 2, 8, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for bias in BIASES.values():
        each = [
            bias(*torch.tensor(pair)) for pair in itertools.product(range(2), range(3), range(8), range(8))
        ]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        by_heads = [x.transpose(1, 2) for x in leaves]
        mask = torch.stack(each).view(2, 3, 8, 8)
        whole = scaled_dot_product_attention(by_heads[0], by_heads[1], by_heads[2], mask).transpose(1, 2)
        whole.square().sum().backward()
        for method in ("ulysses", "gather", "ring"):
            own = [layout.shard(x, 1).requires_grad_() for x in (q, k, v)]
            y = spar.attention(own[0], own[1], own[2], layout, bias=bias, method=method)
            y.square().sum().backward()
            torch.testing.assert_close(y, layout.shard(whole.detach(), 1))
            for x, leaf in zip(own, leaves, strict=True):
                assert leaf.grad is not None
                torch.testing.assert_close(x.grad, layout.shard(leaf.grad, 1))


def test_biases_are_those_of_each_pair(ranks: Ranks) -> None:
    ranks(2, check_biases)
