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
from spar._transports.dtypes import PLAIN_TYPES

_API = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
DTYPES = [torch.bfloat16, torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.uint16]


@contextmanager
def without_api() -> Iterator[None]:
    _C.use_torch(PLAIN_TYPES, torch._C._from_dlpack, torch.uint8, None)
    try:
        yield
    finally:
        _C.use_torch(PLAIN_TYPES, torch._C._from_dlpack, torch.uint8, _API)


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
            _C.use_torch(PLAIN_TYPES, importer, torch.uint8, None)
            with pytest.raises(RuntimeError, match="cannot import") if rank == 0 else nullcontext():
                spar.all_to_all([x, x], group, 1, 0)
    assert spar.memory_stats()["arena.allocated_bytes"] == before
    assert spar.all_to_all(x, group, 1, 0).shape == (1 << 17, 1)


def test_failed_import_of_an_output_frees_it(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]
    pool(2, check_failed_imports)


class Subclass(torch.Tensor):
    pass


@pytest.mark.skipif(_API is None, reason="this torch has no exchange API")
def test_shapes_are_known_of_plain_strided_tensors_only() -> None:
    x = torch.zeros(2, 3)
    assert _C.plain_shapes([x, torch.nn.Parameter(x.t())]) == ((2, 3), (3, 2))
    assert _C.plain_shapes((x[:0],)) == ((0, 3),)
    others = [
        *(x.to_sparse(), x.to_sparse_csr(), x.to("meta"), torch.tensor(1.0), x.as_subclass(Subclass)),
        *(torch.nested.nested_tensor([x, x]), torch.nested.nested_tensor([x, x], layout=torch.jagged)),
        *(x.long(), x.to_mkldnn(), None, [1.0]),
    ]
    for other in others:
        assert _C.plain_shapes([x, other]) is None, other
        assert _C.shapes_key([x, other]) is None, other
    with without_api():
        assert _C.plain_shapes([x]) is _C.shapes_key([x]) is None


@pytest.mark.skipif(_API is None, reason="this torch has no exchange API")
def test_shapes_have_keys_of_their_own() -> None:
    lists = [
        [(2, 3)],
        [(3, 2)],
        [(2, 3, 1)],
        [(2,), (3,)],
        [(2, 3), (2, 3)],
        [(1, 2), (3,)],
        [(0, 3)],
        [(2**40,)],
    ]
    tensors = [[torch.zeros(()).expand(shape) for shape in shapes] for shapes in lists]
    keys = [_C.shapes_key(each) for each in tensors]
    assert None not in keys and len(set(keys)) == len(lists)
    assert [_C.shapes_key(tuple(each)) for each in tensors] == keys  # by shapes, not by the sequence's type
    assert (
        _C.shapes_key([torch.zeros(()).expand([1] * 60)] * 16) is None
    )  # more numbers than there is room for
    assert _C.shapes_key([]) is _C.shapes_key(3) is None  # type: ignore[arg-type]


def test_wrong_arguments_raise() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="args must be a tuple"):
        _C.plan_of("op", 1, 0, 0, 4, [x], [(3, 0, 0, 2, 1, 0, 3)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="args of 2 tensors for 1"):
        _C.plan_of("op", 1, 0, 0, 4, [x], ((3, 0, 0, 2, 1, 0, 3),) * 2)
    with pytest.raises(AttributeError, match="data_ptr"):
        _C.plan_of("op", 1, 0, 0, 4, [object()], ((3, 0, 0, 2, 1, 0, 3),))  # type: ignore[list-item]
    plan, addresses = _C.plan_of("op", 1, 0, 0, 4, [x], ((3, 0, 0, 2, 1, 0, 3),))
    assert addresses == (x.data_ptr(),) and plan.out_shapes == ((2, 3),)


def released(*shape: int) -> torch.Tensor:
    """Return a tensor like a parameter whose memory FSDP has freed."""
    x = torch.ones(shape)
    x.untyped_storage().resize_(0)
    return x


def check_memory(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Without memory an exchange would read address 0; the peers get the text of the rank that fails."""
    for make in (lambda: released(2, 6, 8), lambda: torch._efficientzerotensor((2, 6, 8))):
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
