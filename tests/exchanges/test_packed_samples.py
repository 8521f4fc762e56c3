# SPDX-License-Identifier: Apache-2.0
"""spar.data.PackedSamples: samples in rows without padding, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor

import spar
from spar.data import PackedSamples

Group = dist.ProcessGroup
LENGTHS = [4, 7, 0, 1, 6, 2, 7]
LONGEST = 9


def padded() -> tuple[Tensor, Tensor]:
    """Return ids and an attention mask `[N, T]`: padding on the left, on the right, and in the middle."""
    mask = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.int64)
    for sample, length in enumerate(LENGTHS):
        places = torch.randperm(LONGEST, generator=torch.Generator().manual_seed(sample))
        first = sample % 3
        mask[sample, places[:length] if first == 2 else torch.arange(length) - first * length] = 1
    return torch.arange(1, mask.numel() + 1).view_as(mask), mask


def check_rows(rank: int, world: int, group: Group) -> None:
    ids, mask = padded()
    samples = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    for given, x in ((mask, ids), (mask.bool(), ids), (LENGTHS, samples), (torch.tensor(LENGTHS), samples)):
        for options in ({}, {"max_tokens": 9}, {"rows": 3}, {"max_tokens": 20, "rows": 2}):
            packed = PackedSamples(given, group, **options)
            assert sorted(n for row in packed.rows for n in row) == list(range(len(LENGTHS)))
            totals = [layout.total for layout in packed.layouts]
            assert sum(totals) == sum(LENGTHS) and max(totals) <= options.get("max_tokens", 27)
            assert len(totals) >= options.get("rows", 1) and max(totals) - min(totals) <= 7
            outputs, shifted = [], []
            for row, layout in enumerate(packed.layouts):
                whole = packed.pack(x, row)
                assert whole.equal(torch.cat([samples[n] for n in packed.rows[row]])[None])
                own = packed.shard(x, row)
                assert own.equal(whole[:, layout.index()])
                labels = packed.pack(x, row, shift=1, fill=-100)
                expected = [torch.cat([samples[n][1:], torch.tensor([-100])]) for n in packed.rows[row]]
                assert labels.equal(
                    torch.cat([e[: LENGTHS[n]] for e, n in zip(expected, packed.rows[row], strict=True)])[
                        None
                    ]
                )
                assert packed.shard(x, row, shift=1, fill=-100).equal(labels[:, layout.index()])
                of_sample = packed.pack(torch.arange(7.0), row)
                assert of_sample.equal(
                    torch.tensor(packed.rows[row]).repeat_interleave(layout.cu_seqlens().diff())[None]
                )
                outputs.append(own)
                shifted.append(packed.shard(x, row, shift=1))
            back = packed.unpack(outputs, fill=-1)
            moved = packed.unpack(shifted, shift=1)  # each label to the token that it is
            if given is LENGTHS or given.dim() == 1:  # type: ignore[union-attr]
                assert all(y.equal(z) for y, z in zip(back, samples, strict=True))
                assert all(
                    y[1:].equal(z[1:]) and not y[:1].any() for y, z in zip(moved, samples, strict=True)
                )
            else:
                assert back.equal(torch.where(mask.bool(), ids, -1))
                first = mask.cumsum(1) * mask == 1
                assert moved.equal(ids * mask * ~first)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.one_transport
def test_samples_go_to_rows_and_back(ranks: Ranks, world: int) -> None:
    ranks(world, check_rows)


def check_gradient(rank: int, world: int, group: Group) -> None:
    """A loss of each sample's first and last output, which all ranks compute."""
    packed = PackedSamples([3, 5, 1], group)
    whole = torch.arange(18.0).view(1, 9, 2).requires_grad_()
    own = whole[:, packed.layouts[0].index()]
    with pytest.raises(ValueError, match="grad_scale is not given"):
        packed.unpack(own)
    samples = packed.unpack(own, grad_scale=None)
    expected = whole[0].split([3, 5, 1])
    weights = torch.arange(1.0, 4)
    found, one = (
        torch.autograd.grad(
            sum(w * (x[0] * x[-1]).sum() for w, x in zip(weights, parts, strict=True)), whole
        )[0]
        for parts in (samples, expected)
    )
    dist.all_reduce(found, group=group)
    torch.testing.assert_close(found, one)


@pytest.mark.one_transport
def test_gradients(ranks: Ranks) -> None:
    ranks(2, check_gradient)


WRONG: dict[str, tuple[Callable[[Group], Any], type[Exception], str]] = {
    "no samples": (
        lambda group: PackedSamples([], group),
        ValueError,
        "samples is empty; expected at least one",
    ),
    "cumulative": (lambda group: PackedSamples([3, -1], group), ValueError, r"samples\[1\] is -1; expected"),
    "text": (lambda group: PackedSamples("ab", group), TypeError, "samples is 'ab'; expected a list of ints"),
    "rows": (lambda group: PackedSamples([3, 4], group, rows=3), ValueError, "rows is 3; expected at most 2"),
    "too long": (
        lambda group: PackedSamples([3, 9], group, max_tokens=8),
        ValueError,
        "max_tokens is 8, and sample 1 has 9 tokens; expected at least as many",
    ),
    "row": (
        lambda group: PackedSamples([3], group).pack([torch.ones(3)], 1),
        ValueError,
        "row is 1; expected 0",
    ),
    "lengths": (
        lambda group: PackedSamples([3, 2], group).pack([torch.ones(3), torch.ones(3)]),
        ValueError,
        r"x is a list of lengths \[3, 3\]; expected \[2\], for each sample, or a list of tensors of",
    ),
    "nothing": (lambda group: PackedSamples([3], group).pack(None), ValueError, "x is a NoneType; expected"),  # type: ignore[arg-type]
    "shape": (
        lambda group: PackedSamples(torch.ones(2, 5), group).pack(torch.ones(2, 4)),
        ValueError,
        r"x is of shape \[2, 4\]; expected \[2\], for each sample, or \[2, 5, ...\], as the mask",
    ),
    "fill": (
        lambda group: PackedSamples([2], group).pack([torch.ones(2, dtype=torch.uint8)], shift=1, fill=-100),
        ValueError,
        r"fill is -100; expected a number that torch.uint8 has: convert x first",
    ),
    "outputs": (lambda group: PackedSamples([2], group).unpack(None), TypeError, "outputs is a NoneType"),  # type: ignore[arg-type]
    "two rows": (
        lambda group: PackedSamples([2], group).unpack(torch.ones(2, 1)),
        ValueError,
        r"outputs\[0\] is of shape \[2, 1\]; expected \[1, S/P, ...\]",
    ),
    "gradient": (
        lambda group: PackedSamples([2], group).pack([torch.ones(2, requires_grad=True)]),
        ValueError,
        r"x requires a gradient.*pass x.detach\(\)",
    ),
}


def check_many(rank: int, world: int, group: Group) -> None:
    """Rows of samples of which two do not fit are found in a few tries, not one for each number of rows."""
    tries = []
    balanced = PackedSamples._balanced
    with mock.patch.object(PackedSamples, "_balanced", lambda *args: tries.append(args) or balanced(*args)):
        packed = PackedSamples([51] * 600 + [20] * 100, group, max_tokens=100)
    assert len(packed.rows) == 600 and len(tries) < 25
    assert len(PackedSamples([50] * 600, group, max_tokens=100).rows) == 300


@pytest.mark.one_transport
def test_many_samples_of_over_half_a_row(ranks: Ranks) -> None:
    ranks(1, check_many)


def check_wrong(rank: int, world: int, group: Group) -> None:
    for wrong, error, text in WRONG.values():
        with pytest.raises(error, match=text):
            wrong(group)
    packed = PackedSamples([3, 4], group, rows=2)
    parts = [packed.shard([torch.ones(3), torch.ones(4)], row) for row in range(2)]
    if rank == 1:
        with pytest.raises(ValueError, match="outputs are of 1 rows; expected a list of 2"):
            packed.unpack(parts[0])
    else:
        with pytest.raises(spar.MismatchError, match="rank 1"):
            packed.unpack(parts)
    assert len(packed.unpack(parts)) == 2
    differing = PackedSamples([3, 4 + rank], group)
    with pytest.raises(spar.MismatchError):
        differing.unpack(differing.shard([torch.ones(3), torch.ones(4 + rank)]))
    assert len(packed.unpack(parts)) == 2


@pytest.mark.one_transport
def test_errors(ranks: Ranks) -> None:
    ranks(2, check_wrong)
