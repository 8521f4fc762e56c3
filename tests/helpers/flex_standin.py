# SPDX-License-Identifier: Apache-2.0
"""A stand-in for spar's compiled flex_attention, which needs a GPU, and what lets CPU tensors reach it.

It computes all scores, and checks that the blocks of a BlockMask are those of its mask function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from spar._attention.kernels import KERNELS, flex
from spar._attention.kernels.kernel import Needs

# The shape [queries, keys] of each call, and whether it had a BlockMask.
CALLS: list[tuple[int, int, bool]] = []


class AnyDevice(flex.Flex):
    """Flex for CPU tensors; of 16-bit and 32-bit dtypes, as on a GPU."""

    def refuses(self, q: Tensor, v: Tensor, needs: Needs) -> str:
        if needs.window or q.dtype == torch.float64 or torch.compiler.is_compiling():
            return "it takes no window, no float64, and is not compiled again"
        return ""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp, with gradients."""
    assert enable_gqa == (q.size(1) != k.size(1))
    CALLS.append((q.size(2), k.size(2), block_mask is not None))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    places = torch.meshgrid(*[torch.arange(n) for n in scores.shape], indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places)
    if block_mask is not None:
        assert block_mask.shape[-2:] == scores.shape[-2:]
        assert all(n in (1, m) for n, m in zip(block_mask.shape[:2], scores.shape[:2], strict=True))
        allowed = block_mask.mask_mod(*places)
        check_blocks(block_mask, allowed)
        scores = scores.masked_fill(~allowed, -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    weights = scores.masked_fill(empty[..., None], 0.0).softmax(-1).masked_fill(empty[..., None], 0.0)
    lse = scores.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, -torch.inf)
    return (weights @ v.float()).to(q.dtype), lse


def check_blocks(block_mask: Any, allowed: Tensor) -> None:
    """Check the blocks that a BlockMask leaves out, calls full, and has by queries, against its pairs."""
    size, (queries, keys) = block_mask.BLOCK_SIZE[0], allowed.shape[-2:]
    rows, columns = -(-queries // size), -(-keys // size)
    listed, full = (
        _dense(getattr(block_mask, f"{name}_num_blocks"), getattr(block_mask, f"{name}_indices"), columns)
        for name in ("kv", "full_kv")
    )
    for name, by_keys in (("q", listed), ("full_q", full)):
        counts, indices = (getattr(block_mask, f"{name}_{part}") for part in ("num_blocks", "indices"))
        assert torch.equal(_dense(counts, indices, rows).transpose(-1, -2), by_keys)
    assert not (listed & full).any()
    padded = torch.nn.functional.pad(allowed, (0, columns * size - keys, 0, rows * size - queries))
    blocks = padded.unflatten(3, (columns, size)).unflatten(2, (rows, size)).transpose(3, 4)
    pairs = blocks.sum((-1, -2))
    assert not pairs[~(listed | full).expand(pairs.shape)].any(), "a block with pairs is left out"
    assert (pairs[full.expand(pairs.shape)] == size * size).all(), "a block is not full"


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return the booleans [B, H, rows, columns] of a table; check that its rows are in order."""
    assert counts.dtype == indices.dtype == torch.int32 and counts.shape == indices.shape[:-1]
    assert counts.is_contiguous() and indices.is_contiguous()
    rows, lengths = indices.flatten(0, -2).tolist(), counts.flatten().tolist()
    dense = torch.zeros(len(rows), columns, dtype=torch.bool)
    for place, (entries, length) in enumerate(zip(rows, lengths, strict=True)):
        row = entries[:length]
        assert len(row) == length and row == sorted(set(row))
        dense[place, row] = True
    return dense.view(*counts.shape, columns)


@contextmanager
def installed(shortest: int = 0) -> Iterator[None]:
    """Let CPU tensors reach the stand-in. shortest: as many queries has a block that is given it unnamed."""
    with (
        mock.patch.dict(KERNELS["cpu"], flex=AnyDevice()),
        mock.patch.object(flex, "_compiled", lambda variant: attend),
        mock.patch.object(flex, "_SHORTEST", shortest),
    ):
        CALLS.clear()
        yield
