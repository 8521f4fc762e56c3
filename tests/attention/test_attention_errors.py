# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and failures of spar.attention, and data parallel training around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.whole_attention import whole_attention
from torch import Tensor

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
WORLD, TOTAL = 3, 12


def z(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def call(
    group: Group, q: Any = None, k: Any = None, v: Any = None, layout: Any = None, **options: Any
) -> Tensor:
    even = SequenceLayout.even(TOTAL, group)
    layout = {None: even, "and 3": (even, 3)}.get(layout, layout)
    q, k, v = (z(2, 4, 6, 8) if x is None else x for x in (q, k, v))
    return spar.attention(q, k, v, layout, **options)


Case = tuple[dict[str, Any], type[Exception], str]
CASES: dict[str, Case] = {
    "no tensor": ({"k": [1]}, TypeError, "k is a list; expected a tensor"),
    "dtype": (
        {"v": z(2, 4, 6, 8, dtype=torch.float64)},
        TypeError,
        "v is of torch.float64 on cpu; expected torch.float32",
    ),
    "three dims": ({"q": z(4, 6, 8)}, ValueError, "q is of shape [4, 6, 8]; expected four dims"),
    "heads": (
        {"k": z(2, 4, 4, 8), "v": z(2, 4, 4, 8)},
        ValueError,
        "k is of 4 heads; expected a number that divides the 6 heads of q",
    ),
    "heads of v": (
        {"k": z(2, 4, 3, 8)},
        ValueError,
        "v is of shape [2, 4, 6, 8]; expected [2, 4, 3] and a width",
    ),
    "width": (
        {"k": z(2, 4, 6, 4), "v": z(2, 4, 6, 4)},
        ValueError,
        "k is of shape [2, 4, 6, 4]; expected the batch and width of q",
    ),
    "whole sequence": (
        {"q": z(2, 12, 6, 8)},
        ValueError,
        "q is of 12 tokens; expected 4, rank 2's shard in SequenceLayout.even(12, 3 ranks). Is it the whole",
    ),
    "heads before tokens": (
        {"q": z(2, 6, 4, 8), "k": z(2, 2, 4, 8), "v": z(2, 2, 4, 8)},
        ValueError,
        "q is of 6 tokens; expected 4, rank 2's shard in SequenceLayout.even(12, 3 ranks). Are the tokens in "
        "dim 2, as in [B, H, S, D]? Pass seq_dim=2, head_dim=1",
    ),
    "equal dims": (
        {"seq_dim": 2},
        ValueError,
        "seq_dim is 2 and head_dim is 2; expected two different dims before the last",
    ),
    "local mask": (
        {"mask": z(2, 1, 4, 4)},
        ValueError,
        "mask is of shape [2, 1, 4, 4]; expected [.., 12, 12] over the whole sequence, or a key mask [2, 12]",
    ),
    "mask of ints": (
        {"mask": z(2, 12, dtype=torch.int64)},
        TypeError,
        "mask is a tensor of torch.int64; expected a bool or floating dtype; pass mask.bool() if",
    ),
    "no mask": ({"mask": 1}, TypeError, "mask is 1; expected a tensor [.., 12, 12]"),
    "method": (
        {"method": "flash"},
        ValueError,
        'method is \'flash\'; expected "ulysses", "gather", "ring", "2d", "ulysses_gather" or',
    ),
    "dropout": ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5; expected at least 0 and below 1"),
    "dropout in a ring": (
        {"dropout_p": 0.5, "method": "ring"},
        ValueError,
        "dropout_p is passed; expected none with a ring",
    ),
    "own kernel in a ring": (
        {"kernel": whole_attention, "method": "ring"},
        ValueError,
        "kernel is a function; expected a kernel's name with a ring",
    ),
    "own kernel and scale": (
        {"kernel": whole_attention, "scale": 2.0},
        ValueError,
        "scale is passed, and kernel too",
    ),
    "own kernel's shape": (
        {"kernel": lambda q, k, v: q[:1]},
        ValueError,
        "the result of kernel is of shape [1, 12, 2, 8]; expected a tensor of shape [2, 12, 2, 8]",
    ),
    "layout of k and v": (
        {"layout": "and 3"},
        TypeError,
        "attention: layout is (SequenceLayout.even(12, 3 ranks), 3); expected a SequenceLayout, or those",
    ),
    "window of -1": (
        {"window": (-1, 0)},
        ValueError,
        "window is (-1, 0); expected ints of at least 0 in (left, right): how many keys before and behind",
    ),
    "window of a bool": ({"window": (True, 0)}, TypeError, "window is (True, 0); expected (left, right)"),
    "window of an int": ({"window": 512}, TypeError, "window is 512; expected (left, right)"),
    "window of three": ({"window": (1, 2, 3)}, TypeError, "window is (1, 2, 3); expected (left, right)"),
    "window of a float": ({"window": (1.5, 0)}, TypeError, "window is (1.5, 0); expected (left, right)"),
    "window of a string": ({"window": "10"}, TypeError, "window is '10'; expected (left, right)"),
    "window of a tensor": (
        {"window": torch.tensor([3, 0])},
        TypeError,
        "window is tensor([3, 0]); expected (left, right)",
    ),
    "number of sinks": (
        {"sinks": z(5)},
        ValueError,
        "sinks is of shape [5]; expected a floating tensor [6] on cpu, a score for each head of q",
    ),
    "dims of sinks": ({"sinks": z(1, 6)}, ValueError, "sinks is of shape [1, 6]; expected a floating tensor"),
    "dtype of sinks": (
        {"sinks": z(6, dtype=torch.int64)},
        TypeError,
        "sinks is of torch.int64 on cpu; expected a floating tensor [6] on cpu",
    ),
    "device of sinks": (
        {"sinks": z(6, device="meta")},
        TypeError,
        "sinks is of torch.float32 on meta; expected a floating tensor [6] on cpu",
    ),
    "no sinks": ({"sinks": [0.0] * 6}, TypeError, "sinks is a list; expected a floating tensor [6] on cpu"),
    "softcap of 0": ({"softcap": 0}, ValueError, "softcap is 0; expected a positive number, or None"),
    "negative softcap": ({"softcap": -5.0}, ValueError, "softcap is -5.0; expected a positive number"),
    "infinite softcap": ({"softcap": float("inf")}, ValueError, "softcap is inf; expected a positive number"),
    "softcap of nan": ({"softcap": float("nan")}, ValueError, "softcap is nan; expected a positive number"),
    "softcap of a bool": ({"softcap": True}, TypeError, "softcap is True; expected a positive number"),
    "softcap of a string": ({"softcap": "30"}, TypeError, "softcap is '30'; expected a positive number"),
    "no bias": ({"bias": z(12, 12)}, TypeError, "expected a function of index tensors, or None"),
    "bias of ints": (
        {"bias": lambda b, h, q, k: q - k},
        TypeError,
        "bias returned a tensor of torch.int64; expected a floating tensor",
    ),
    "bias of a number": (
        {"bias": lambda b, h, q, k: 1.0},
        TypeError,
        "bias returned a float; expected a floating tensor",
    ),
    "shape of a bias": (
        {"bias": lambda b, h, q, k: z(5, 7)},
        ValueError,
        "bias returned a tensor of shape [5, 7] for one batch, head, query and key; expected a scalar",
    ),
    "control flow in a bias": (
        {"bias": lambda b, h, q, k: z(12)[0] if q > k else z(12)[1]},
        ValueError,
        "attention: bias failed under torch.vmap, which calls it for one batch, head, query and key",
    ),
    "learned bias": (
        {"bias": lambda b, h, q, k: z(12, requires_grad=True)[k]},
        ValueError,
        "bias returned a tensor that requires a gradient, as a learned bias (T5's) does",
    ),
    "a bias that raises": ({"bias": lambda b, h, q, k: 1 / 0}, ZeroDivisionError, "division by zero"),
    "size of spans": (
        {"mask": spar.Spans.causal(13)},
        ValueError,
        "mask is Spans of [1, 1, 13, 13]; expected Spans of [2 or 1, 6 or 1, 12, 12]",
    ),
    "batch of spans": (
        {"mask": spar.Spans.documents(torch.arange(36).view(3, 12) // torch.tensor([[1], [2], [3]]))},
        ValueError,
        "mask is Spans of [3, 1, 12, 12]; expected Spans of [2 or 1, 6 or 1, 12, 12]",
    ),
    "heads of spans": (
        {"mask": spar.Spans.of(lambda b, h, q, k: k <= q - h, (1, 4, 12, 12))},
        ValueError,
        "mask is Spans of [1, 4, 12, 12]; expected Spans of [2 or 1, 6 or 1, 12, 12]",
    ),
    "own kernel and spans": (
        {"kernel": whole_attention, "mask": spar.Spans.causal(12)},
        ValueError,
        "mask is passed, and kernel too; expected a kernel that applies it itself",
    ),
    **{
        f"own kernel and {name}": (
            {"kernel": whole_attention, name: value},
            ValueError,
            f"{name} is passed, and kernel too; expected a kernel that applies it itself",
        )
        for name, value in {
            "window": (3, 0),
            "sinks": z(6),
            "softcap": 5.0,
            "bias": lambda b, h, q, k: 0.1 * (k - q),
            "mask": z(12, 12),
            "dropout_p": 0.1,
        }.items()
    },
    **{
        f"dropout and {name}": (
            {"dropout_p": 0.25, name: value},
            ValueError,
            f"dropout_p is 0.25, and {name} is passed; expected 0 with it",
        )
        for name, value in {"sinks": z(6), "softcap": 5.0, "bias": lambda b, h, q, k: 0.1 * k}.items()
    },
    "a kernel without a cap": (
        {"kernel": "flash", "softcap": 5.0},
        ValueError,
        "kernel is 'flash'; expected a kernel that can compute this; flash cannot, as it cannot cap scores",
    ),
    "a kernel of GPUs": (
        {"kernel": "flash_attn", "window": (3, 0)},
        ValueError,
        "kernel is 'flash_attn'; expected a kernel that can compute this; flash_attn cannot, as it does",
    ),
    "own kernel raises": ({"kernel": lambda q, k, v: 1 / 0}, ZeroDivisionError, "division by zero"),
}


def check_error(rank: int, world: int, group: Group, name: str) -> None:
    """The last rank passes the wrong argument."""
    options, kind, text = CASES[name]
    last = rank == world - 1
    right: dict[str, Any] = {"method": "ring"} if options.get("method") == "ring" else {}
    if "kernel" in options and not right:
        right = {"kernel": whole_attention}
    if callable(options.get("bias")) and "dropout_p" not in options and not right:
        # It is called after the exchange: the peers wait in the next one.
        right = {"bias": lambda b, h, q, k: 0.1 * (k - q)}
    with pytest.raises(kind if last else spar.MismatchError) as caught:
        call(group, **(options if last else right))
    assert text in str(caught.value), caught.value
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1, 2], "the group is usable"


@pytest.mark.parametrize("name", CASES)
def test_error_is_reported_to_the_peers(ranks: Ranks, name: str) -> None:
    ranks(WORLD, check_error, name)
