# SPDX-License-Identifier: Apache-2.0
"""SpansMask, the mask of models in a view: each function returns what it returns for the booleans."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from spar import Spans
from spar._model.spans_mask import SpansMask, dense_of, mask_of, spans_of

B, S = 2, 6


def masks() -> tuple[SpansMask, Tensor]:
    """Return a mask, and an ordinary tensor of its elements."""
    valid = torch.ones(B, S, dtype=torch.bool)
    valid[0, 0] = valid[1, 5] = False
    spans = Spans.window(S, 2, 0) & Spans.padding(valid)
    return mask_of(spans, (B, 1, S, S), torch.device("cpu")), spans.dense().clone()


def attended(mask: Tensor) -> Tensor:
    x = torch.arange(2.0 * B * S).view(B, 1, S, 2)
    return scaled_dot_product_attention(x.sin(), x.cos(), x, mask)


KEEP: dict[str, Callable[[Any], Any]] = {
    "all keys": lambda m: m[:, :, :, :S],
    "more keys than there are": lambda m: m[:, :, :, : 2 * S],
    "all rows from the last": lambda m: m[:, :, -S:, :],
    "all": lambda m: m[...],
    "bool": lambda m: m.bool(),
    "to": lambda m: m.to("cpu", torch.bool),
    "copying to": lambda m: m.to(torch.bool, copy=True),
    "contiguous": lambda m: m.contiguous(),
    "detach": lambda m: m.detach(),
    "clone": lambda m: m.clone(),
    "heads": lambda m: m.expand(-1, 4, -1, -1),
    "deepcopy": copy.deepcopy,
}
READ: dict[str, Callable[[Any], Any]] = {
    "sum": lambda m: m.sum(),
    "not": lambda m: ~m,
    "where": lambda m: torch.where(m, 0.0, -1.0),
    "float": lambda m: m.float(),
    "any": lambda m: m.any(-1),
    "item": lambda m: torch.tensor(bool(m[0, 0, 0, 0])),
    "list": lambda m: torch.tensor(m.tolist()),
    "numpy": lambda m: torch.from_numpy(m.numpy()),
    "cat": lambda m: torch.cat([m, m]),
    "of itself": lambda m: m[m],
    "masked_fill": lambda m: torch.zeros(B, 1, S, S).masked_fill(m, 3.0),
    "vmap": lambda m: torch.vmap(lambda row: row.sum())(m),
    "pad": lambda m: pad(m, (1, 0)),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "attention": attended,
    "part": lambda m: m[:, :, 1:3, :4],
    "transposed": lambda m: m.transpose(2, 3),
    "heads of rows": lambda m: m.expand(-1, 4, -1, -1)[:, 1:3, :2],
}


@pytest.mark.parametrize("name", KEEP)
def test_what_leaves_elements_in_their_places_keeps_the_spans(name: str) -> None:
    mask, dense = masks()
    found, expected = KEEP[name](mask), KEEP[name](dense)
    assert spans_of(found) is spans_of(mask) is not None
    assert found.shape == expected.shape and torch.equal(dense_of(found), expected)


@pytest.mark.parametrize("name", READ)
def test_what_reads_elements_reads_booleans(name: str) -> None:
    mask, dense = masks()
    found, expected = READ[name](mask), READ[name](dense)
    assert torch.equal(found, expected)
    assert type(found) is Tensor


def set_item(m: Any) -> Any:
    m[0, 0, 1, 1] = False
    return m


def through_a_view(m: Any) -> Any:
    m[0][0, 2] = True
    return m


def seen_by_a_view(m: Any) -> Any:
    view = m[:, :, :, :S]
    m.logical_not_()
    return view


def through_numpy(m: Any) -> Any:
    m.numpy()[0, 0, 0, 0] = True
    return m


def as_out(m: Any) -> Any:
    torch.logical_not(m, out=m)
    return m


def added(m: Any) -> Any:
    m &= False
    return m


@pytest.mark.parametrize("write", [set_item, through_a_view, seen_by_a_view, through_numpy, as_out, added])
def test_a_change_ends_the_spans(write: Callable[[Any], Any]) -> None:
    mask, dense = masks()
    found, expected = write(mask), write(dense)
    assert spans_of(found) is spans_of(mask) is None
    assert torch.equal(dense_of(found), expected)


def test_a_copy_does_not_follow_a_change() -> None:
    mask, dense = masks()
    copied = mask.clone()
    mask.zero_()
    assert spans_of(copied) is not None and torch.equal(dense_of(copied), dense)


def test_other_shapes_in_place_are_errors() -> None:
    mask, _ = masks()
    for change in (lambda: mask.squeeze_(1), lambda: mask.t_(), lambda: mask.transpose_(2, 3)):
        with pytest.raises(RuntimeError, match="change a clone"):
            change()


def test_it_has_the_attributes_of_an_ordinary_tensor() -> None:
    mask, dense = masks()
    assert isinstance(mask, Tensor) and not mask.requires_grad
    for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda"):
        assert getattr(mask, name) == getattr(dense, name)
    assert (mask.numel(), mask.size(-1), mask.stride(), len(mask)) == (B * S * S, S, dense.stride(), B)
    assert "SpansMask(Spans(B=2" in repr(mask)
    with torch.inference_mode():
        assert torch.equal(masks()[0].sum(), dense.sum())
    saved = io.BytesIO()
    torch.save(mask, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved), dense)


def test_it_takes_no_memory_of_pairs() -> None:
    long = 1 << 22  # whose booleans would be 16 TB
    mask = mask_of(Spans.window(long, 511, 0), (1, 1, long, long), torch.device("cpu"))
    assert mask[:, :, :, :long].expand(1, 8, -1, -1).shape == (1, 8, long, long)
