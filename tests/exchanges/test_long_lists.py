# SPDX-License-Identifier: Apache-2.0
"""Lists of more tensors than one exchange moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same, cells
from helpers.traffic import exchanges

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def check_documents(rank: int, world: int, group: Group) -> None:
    """Six sections of heads of each of four documents, as Megatron's thd has them."""
    lengths, heads = (12, 7, 1, 20), (8, 8, 4, 16, 32, 4)
    layouts = [SequenceLayout.zigzag(n, group) for n in lengths for _ in heads]
    wholes = [cells((n, 1, h), torch.float64, i) for i, n in enumerate(lengths) for h in heads]
    parts = [layout.shard(x, 0).requires_grad_() for layout, x in zip(layouts, wholes, strict=True)]
    before = exchanges()
    found = spar.all_to_all(parts, None, 2, 0, layout=layouts)
    assert exchanges() == before + 2
    for y, x in zip(found, wholes, strict=True):
        assert_same(y.detach(), x.tensor_split(world, 2)[rank].contiguous())
    uppers = [cells(y.shape, y.dtype, rank) for y in found]
    grads = torch.autograd.grad(found, parts, uppers)
    assert exchanges() == before + 4
    for x, layout, upper, grad in zip(parts, layouts, uppers, grads, strict=True):
        one = spar.all_to_all(x, None, 2, 0, layout=layout)
        assert_same(grad, torch.autograd.grad(one, x, upper)[0])
    with torch.no_grad():
        outs = [torch.empty_like(y) for y in found]
        assert spar.all_to_all(parts, None, 2, 0, layout=layouts, out=outs)[23] is outs[23]
        for y, out in zip(found, outs, strict=True):
            assert_same(out, y)
        own = [part.contiguous() for part in parts]
        with pytest.raises(ValueError, match=r"out\[23\] is memory that overlaps input_\[5\]"):
            shared = torch.empty(0, dtype=torch.float64).set_(own[5].untyped_storage(), 0, found[23].shape)
            spar.all_to_all(own, None, 2, 0, layout=layouts, out=[*outs[:23], shared])
        with pytest.raises(ValueError, match=r"out is a list of 16; expected a list of 24 tensors"):
            spar.all_to_all(parts, None, 2, 0, layout=layouts, out=outs[:16])


def check_each_operation(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.even(5, group)
    wholes = [cells((5, 2), torch.float32, i) for i in range(33)]
    own = layout.shard(wholes, 0)
    before = exchanges()
    gathered = layout.gather(own, 0)
    summed = spar.reduce_scatter(wholes, group, 0)
    again, work = spar.all_gather(own, dim=0, layout=layout, async_op=True)
    assert work.wait(timeout=60) and work.is_completed() and isinstance(work, spar.Work)
    assert exchanges() == before + 9
    for x, part, y, z, total in zip(wholes, own, gathered, again, summed, strict=True):
        assert_same(y, x)
        assert_same(z, x)
        assert_same(total, part * world)
    leaves = [part.clone().requires_grad_() for part in own]
    outputs, work = spar.all_gather(leaves, dim=0, layout=layout, async_op=True)
    work.wait()
    torch.stack(outputs).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.eq(world).all() for leaf in leaves)
    count = 17 + (rank == 1)
    with pytest.raises(spar.MismatchError, match=f"tensors from 0 of 1{7 + (rank == 1)}"):
        spar.all_gather(own[:count], dim=0, layout=layout)
    assert_same(layout.gather(own[0], 0), wholes[0])


def test_documents_by_sections_of_heads(ranks: Ranks) -> None:
    ranks(2, check_documents)


def test_each_operation_takes_them(ranks: Ranks) -> None:
    ranks(2, check_each_operation)
