# SPDX-License-Identifier: Apache-2.0
"""Tensors are read and made through DLPack's exchange API, and without it, as on an older torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.reference import cells, same_bits

import spar
from spar import _C

_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
DTYPES = [torch.bfloat16, torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.uint16]


@contextmanager
def without_api() -> Iterator[None]:
    _C.use_torch(torch._C._from_dlpack, torch.uint8, None)
    try:
        yield
    finally:
        _C.use_torch(torch._C._from_dlpack, torch.uint8, _API)


def results(group: dist.ProcessGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """Exchange contiguous, strided and empty tensors, one and several at once; split one in a pass."""
    whole = cells((2, 6, 8), dtype)
    strided, empty = whole.transpose(0, 2), whole[:0]
    found = [spar.all_to_all(x, group, 2, 1) for x in (whole, strided, empty)]
    found += spar.all_to_all([whole, whole[:1], empty], group, 2, 1)
    found += spar.all_gather([whole, strided], group)
    found.append(spar.load_balanced_split_forward_gather_backward(cells((8, 3), dtype), group, 0))
    out = torch.empty_like(found[0])
    return [*found, spar.all_to_all(whole, group, 2, 1, out=out)]


def check_both(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for dtype in DTYPES:
        expected = results(group, dtype)
        with without_api():
            got = results(group, dtype)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.is_contiguous() and same_bits(a, b), (dtype, a.shape)
    x = torch.zeros(6, 2, requires_grad=True)
    with without_api():
        spar.all_to_all(x, group, 1, 0).sum().backward()
        with pytest.raises(ValueError, match=r"input_ is a 0-dim tensor"):
            spar.all_gather(torch.tensor(1), group)
    assert x.grad is not None and x.grad.eq(1).all()


def test_same_results_without_the_exchange_api(ranks: Ranks) -> None:
    ranks(2, check_both)


def fail_to_import(capsule: object) -> None:
    raise RuntimeError("torch cannot import it")


def check_failed_imports(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """An output that torch does not take over frees its memory; the peers have theirs."""
    x = torch.zeros(1 << 16, 2)
    spar.all_to_all(x, group, 1, 0)
    before = spar.memory_stats()["arena.allocated_bytes"]
    with without_api():
        for _ in range(3):
            importer = fail_to_import if rank == 0 else torch._C._from_dlpack
            _C.use_torch(importer, torch.uint8, None)
            with pytest.raises(RuntimeError, match="cannot import") if rank == 0 else nullcontext():
                spar.all_to_all([x, x], group, 1, 0)
    assert spar.memory_stats()["arena.allocated_bytes"] == before
    assert spar.all_to_all(x, group, 1, 0).shape == (1 << 17, 1)


def test_failed_import_of_an_output_frees_it(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]
    pool(2, check_failed_imports)


LAYOUTS = ((3, 0, 0, 2, 1, 0, 3),)  # dim 0 gathered, dim 1 scattered


def exchange(layouts: tuple[tuple[int, ...], ...] = LAYOUTS) -> _C.Exchange:
    return _C.Exchange("op", " of items", 1, 0, 4, layouts, 0, False, 1.0, 0)


def test_exchange_plans_for_the_tensors_of_each_call() -> None:
    """It keeps the newest plan, and never uses it for other extents or strides."""
    core = exchange()
    x = torch.arange(6, dtype=torch.int32).view(2, 3)
    for each in (x, x, x.t().contiguous().t(), x):
        plan, addresses = core.plan([each], 0)
        out = torch.zeros(plan.out_shapes[0], dtype=torch.int32)
        plan.copy_own(addresses, (out.data_ptr(),), 0, False, 1.0)
        assert torch.equal(out, x) and addresses == (each.data_ptr(),)
    assert core.plan([x], _C.SIDE_PULL)[0].pull_bytes == (0,)  # which the plan before lacks
    with pytest.raises(ValueError, match="op: rank 0's input has 3 in dim 0; expected 2"):
        core.plan([torch.zeros(3, 3)], 0)
    assert (core.op, core.text, core.sums, core.scale) == ("op", " of items", False, (0, False, 1.0))


def test_wrong_arguments_raise() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="args of a tensor must be a tuple"):
        exchange(([3, 0, 0, 2, 1, 0, 3],))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="args of -1 tensors; expected a tuple of 1 to"):
        exchange([LAYOUTS[0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a sum of kind 99"):
        _C.Exchange("op", "", 1, 0, 4, LAYOUTS, 0, False, 1.0, 99)
    with pytest.raises(ValueError, match="2 tensors; expected a tuple or list of 1"):
        exchange().plan([x, x], 0)
    with pytest.raises(AttributeError, match="data_ptr"):
        exchange().plan([object()], 0)  # type: ignore[list-item]


def released(*shape: int) -> torch.Tensor:
    """Return a tensor like a parameter whose memory FSDP has freed."""
    x = torch.ones(shape)
    x.untyped_storage().resize_(0)
    return x


def check_memory(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Without memory an exchange would read address 0; the peers get the text of the rank that fails."""
    zeros = torch._efficientzerotensor((2, 6, 8), dtype=torch.int32)  # no gradient has ints
    for make in (lambda: released(2, 6, 8), lambda: zeros):
        with pytest.raises(ValueError, match=r"tensor 0 of its inputs has items but no memory"):
            spar.all_to_all(make(), group, 2, 1)
    x = torch.ones(2, 6, 8)
    expected = spar.MismatchError if rank else ValueError
    with pytest.raises(expected, match=r"tensor 1 of its inputs has items but no memory"):
        spar.all_to_all([x, x if rank else released(2, 6, 8)], group, 2, 1)
    with pytest.raises(ValueError, match=r"out is a tensor of shape \[2, 12, 4\] without memory"):
        spar.all_to_all(x, group, 2, 1, out=released(2, 12, 4))
    with pytest.raises(ValueError, match=r"no memory"):
        spar.SequenceLayout.zigzag(13, group).shard(released(13, 3), 0)
    assert spar.all_to_all(x[:0], group, 2, 1).shape == (0, 12, 4)


def test_tensors_without_memory_are_rejected(ranks: Ranks) -> None:
    ranks(2, check_memory)
