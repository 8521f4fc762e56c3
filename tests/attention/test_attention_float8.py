# SPDX-License-Identifier: Apache-2.0
"""Exchanges of attention as float8: each element's bound, what is rounded, the bytes, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.traffic import sent
from helpers.whole_attention import expected_of, inputs
from torch import Tensor

import spar
from spar import SequenceLayout
from spar._attention.float8 import DTYPES, narrowed_rows, widened_rows

pytestmark = pytest.mark.one_transport
POOL = (4,)
Group = dist.ProcessGroup
METHODS = "ulysses", "gather", "2d", "ulysses_gather"


def rounded(x: Tensor) -> Tensor:
    return widened_rows(narrowed_rows(x), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_element_is_within_the_bound(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 24, generator=generator) * 10.0 ** torch.randint(
        -6, 5, (4000, 24), generator=generator
    )
    x[0] = 0
    x[1:3] = torch.linspace(-1, 1, 24) * torch.tensor([[1e-39], [1e-44]])  # denormals
    x[3:2000] = x[3:2000].sign() * x[3:2000].abs().amax(1, keepdim=True)
    x = x.to(dtype)
    assert x.isfinite().all()
    exact, y = x.double(), rounded(x).double()
    most = exact.abs().amax(1, keepdim=True)
    scale = (most / 448).clamp(min=torch.finfo(torch.float32).tiny)
    # What the dtype of the result rounds besides.
    own = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (y - exact).abs()
    assert (error <= torch.maximum(exact.abs() / 16, scale / 1024) * (1 + 1e-6) + own).all()
    assert (error <= torch.maximum(most / 28, scale / 1024) * (1 + 1e-6) + own).all()
    assert (y[0] == 0).all()
    # A row alone, whose scale is not where float32 may be.
    assert (widened_rows(narrowed_rows(x[:2, :3])[1:], dtype) == rounded(x[1:2, :3])).all()


def test_rows_with_an_infinity_or_nan_become_nan() -> None:
    x = torch.ones(4, 8)
    x[0, 3], x[1, 3], x[2, 3] = torch.inf, -torch.inf, torch.nan
    y = rounded(x)
    assert y[:3].isnan().all() and (y[3] == 1).all()


def attended(layout: SequenceLayout, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Return this rank's output and gradients."""
    *leaves, upper = [x[:, layout.index()].clone() for x in tensors]
    for leaf in leaves:
        leaf.requires_grad_()
    y = spar.attention(*leaves, layout, causal=True, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, upper)]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check_directions(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.zigzag(45, group)
    whole = inputs(45, 4, 2, torch.float32, 16)
    exact = [x[:, layout.index()] for x in expected_of(whole, causal=True)]
    of_rounded = expected_of([*map(rounded, whole[:3]), whole[3]], causal=True)
    of_rounded = [x[:, layout.index()] for x in of_rounded]
    for method in METHODS:
        y, *gradients = attended(layout, whole, method=method, float8="forward")
        # Rounding an element by 1/16 at most moves the norm no further, nor do weights that sum to 1.
        assert 1e-3 < distance(y, of_rounded[0]) < 1 / 16
        for found, expected in zip(gradients, of_rounded[1:], strict=True):
            # By "2d" the gradient has the rounded output in it.
            assert distance(found, expected) < (0.05 if method == "2d" else 1e-5), method
        y, *gradients = attended(layout, whole, method=method, float8="backward")
        assert distance(y, exact[0]) < 1e-5
        both = attended(layout, whole, method=method, float8="both")
        for found, expected in zip([*gradients, *both], [*exact[1:], *exact], strict=True):
            assert 1e-3 < distance(found, expected) < 0.15, (method, distance(found, expected))


def check_bytes(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(64, group)
    whole = inputs(64, 8, 4, torch.bfloat16, 128)
    for method, others in (("ulysses_gather", 0), ("2d", 8 * (1 + 2))):
        moved = []
        for float8 in (None, "both"):
            before = sent()
            attended(layout, whole, method=method, grid=(2, 2), float8=float8)
            moved.append(sent() - before)
        # Log-sum-exps go to one rank, and they and row sums back: 4 bytes for 2 x 16 queries each.
        numbers = others * 2 * 16 * 4
        assert (moved[1] - numbers) * 256 == (moved[0] - numbers) * (128 + 4), (method, moved)


def check_errors(rank: int, world: int, group: Group) -> None:
    layout, double = SequenceLayout.even(24, group), inputs(24, 4, 4, torch.float64)
    single = [x.float() for x in double]
    names = "'ulysses', 'gather', '2d', 'ulysses_gather'"
    wrong: list[tuple[list[Tensor], dict[str, Any], str]] = [
        (
            double,
            {"float8": "both"},
            "float8 is 'both', and q is of torch.float64; expected None, as",
        ),
        (single, {"float8": "both", "method": "ring"}, f"the method is 'ring'; expected one of {names}"),
        (single, {"float8": "yes"}, 'float8 is \'yes\'; expected "forward", "backward", "both" or None'),
        (single, {"float8": True}, "float8 is True; expected"),
        (single, {"float8": "both", "dropout_p": 0.1}, "dropout_p is 0.1"),
    ]
    for tensors, options, text in wrong:
        with pytest.raises(ValueError) as caught:
            attended(layout, tensors, **options)
        assert text in str(caught.value), caught.value
    with pytest.raises(spar.MismatchError, match="float8"):
        attended(layout, single, float8="forward" if rank else "both")


@pytest.mark.parametrize("check", [check_directions, check_bytes, check_errors])
def test_float8(ranks: Ranks, check: Any) -> None:
    ranks(4, check)
