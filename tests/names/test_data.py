# SPDX-License-Identifier: Apache-2.0
"""SPDataProcessor, padded slices of a sequence, and gathers that remove the padding, on real ranks."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import WORLDS, Ranks
from helpers.reference import assert_same, cells, part, rule
from test_sharding import sequence

import spar
from spar.data import SPDataProcessor, sp_slice_and_pad_input

pytestmark = pytest.mark.quick_ranks

Group = dist.ProcessGroup


@dataclass
class Sample:
    """A trainer's sample: text and tensors."""

    prompt: str
    tokens: torch.Tensor
    extra: dict[str, Any]


def sample(number: int) -> Sample:
    tokens = cells((number % 3, 2), torch.bfloat16, salt=number)  # various lengths, including 0
    return Sample(f"prompt {number}", tokens, {"mask": torch.tensor(number % 2 == 0), "id": number})


def assert_same_sample(a: Sample, b: Sample) -> None:
    assert (a.prompt, a.extra["id"]) == (b.prompt, b.extra["id"])
    assert_same(a.tokens, b.tokens)
    assert_same(a.extra["mask"], b.extra["mask"])


def check_samples(rank: int, world: int, group: Group) -> None:
    with sequence(group), SPDataProcessor() as processor:
        assert (processor.sp_group, processor.sp_size, processor.sp_rank) == (group, world, rank)
        own = [sample(3 * rank + i) for i in range(3)]
        every = processor.preprocess(own)
        assert len(every) == 3 * world
        for number, found in enumerate(every):
            assert_same_sample(found, sample(number))
        back = processor.postprocess(every)
        assert len(back) == 3
        for found, expected in zip(back, own, strict=True):
            assert_same_sample(found, expected)
        # different numbers of samples, and none
        every = processor.preprocess([sample(i) for i in range(rank)])
        assert [s.extra["id"] for s in every] == [i for p in range(world) for i in range(p)]
        assert processor.preprocess([]) == [] and processor.postprocess([]) == []
        assert processor.preprocess((rank,)) == tuple(range(world))
        # each tensor owns its memory
        for found in processor.preprocess([torch.zeros(4), torch.zeros(2, dtype=torch.int8)]):
            assert world == 1 or found.untyped_storage().nbytes() == found.numel() * found.element_size()


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_data_processor_samples(ranks: Ranks, world: int) -> None:
    ranks(world, check_samples)


def batch(numbers: range) -> dict[str, Any]:
    rows = [[float(n), 0.5, -n] for n in numbers]
    return {
        "ids": torch.tensor([[n, n + 1] for n in numbers], dtype=torch.int32).reshape(-1, 2),
        "nested": {"logits": torch.tensor(rows).reshape(-1, 3), "texts": [f"text {n}" for n in numbers]},
        "images": tuple(torch.full((n % 2, 2), n) for n in numbers),
        "temperature": 0.7,
        "model": "a model",
        "step": torch.tensor(5),
        "nothing": None,
    }


def assert_same_data(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(b, torch.Tensor):
        assert_same(a, b)
    elif isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in b:
            assert_same_data(a[key], b[key])
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_data(x, y)
    else:
        assert a == b


def check_batches(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        processor = SPDataProcessor()
    own = batch(range(2 * rank, 2 * rank + 2))  # the processor keeps the group of its construction
    every = processor.preprocess(own)
    assert_same_data(every, batch(range(2 * world)))
    assert_same_data(processor.postprocess(every), own)
    uneven = processor.preprocess(batch(range(10 * rank, 10 * rank + rank)))
    assert uneven["ids"][:, 0].tolist() == [10 * p + i for p in range(world) for i in range(p)]
    assert_same_data(
        processor.preprocess(UserDict(ids=[rank]) if world > 1 else {"ids": [0]}), {"ids": [*range(world)]}
    )
    # any dtype and strides; no gradient
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.complex64,
        torch.float64,
    ):
        x = cells((2, 3, 2), dtype, salt=rank).mT
        found = processor.preprocess({"x": x.clone().requires_grad_() if dtype == torch.float64 else x})["x"]
        assert world == 1 or not found.requires_grad
        assert_same(found.detach(), torch.cat([cells((2, 3, 2), dtype, salt=p).mT for p in range(world)]))
    x = cells((2, 3), torch.complex64)
    assert_same(processor.preprocess(x.conj()).resolve_conj(), torch.cat([x.conj().resolve_conj()] * world))


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_data_processor_batches(ranks: Ranks, world: int) -> None:
    ranks(world, check_batches)


def check_bad_data(rank: int, world: int, group: Group) -> None:
    odd = rank == world - 1
    with sequence(group):
        processor = SPDataProcessor()
    bad: list[tuple[Any, type[Exception], str]] = [
        (
            {"x": torch.zeros(2, 3 + odd)},
            ValueError,
            "data['x'] is [2, 3] of torch.float32 on cpu on rank 0 and [2, 4]",
        ),
        (
            {"x": torch.zeros(2, 3).to(torch.int64 if odd else torch.float32)},
            ValueError,
            "and [2, 3] of torch.int64",
        ),
        (
            {"x": [1] if odd else torch.zeros(2)},
            ValueError,
            f"on cpu on rank 0 and a list on rank {rank if odd else 1}",
        ),
        ({"x": None if odd else [1]}, ValueError, "data['x'] is a list on rank 0 and a NoneType on rank 1"),
        (
            {"x": {"y" if odd else "z": 1}},
            ValueError,
            "data['x'] is a dict of ['z'] on rank 0 and a dict of ['y']",
        ),
        ({"x": 0.5 + rank}, ValueError, "data['x'] is 0.5 on rank 0 and 1.5 on rank 1; expected the same"),
        ({"x": torch.tensor(rank)}, ValueError, "tensor(0) on rank 0 and tensor(1) on rank 1"),
        (sample(0), TypeError, "data is a Sample; expected tensors, lists"),
        ({"x": {"y": {1, 2}}}, TypeError, "data['x']['y'] is a set"),
    ]
    for data, kind, text in bad:
        with pytest.raises(kind) as caught:  # on all ranks
            processor.preprocess(data)
        assert text in str(caught.value), str(caught.value)
    assert processor.preprocess([rank]) == [0, 1]
    for data, where in (([1] * 3, "data has 3"), ({"a": {"b": torch.zeros(5, 2)}}, "data['a']['b'] has 5")):
        with pytest.raises(AssertionError) as assertion:
            processor.postprocess(data)
        assert f"postprocess on rank {rank} of 2: {where} samples; expected a multiple of 2" in str(
            assertion.value
        )


def test_preprocess_and_postprocess_reject_bad_data(ranks: Ranks) -> None:
    ranks(2, check_bad_data)


def check_unpicklable(rank: int, world: int, group: Group) -> None:
    """One rank's data cannot be pickled: the other ranks raise at once."""
    with sequence(group):
        processor = SPDataProcessor()
    processor.preprocess([0])
    with pytest.raises(TypeError if rank == 1 else spar.MismatchError) as caught:
        processor.preprocess([lambda: 0] if rank == 1 else [0])
    assert "expected picklable data" in str(caught.value), str(caught.value)
    assert processor.preprocess([rank]) == [0, 1]


def test_unpicklable_data_raises_on_all_ranks(pool: Ranks) -> None:
    pool.transport = "shm"
    pool(2, check_unpicklable)


def test_without_topology_returns_the_input() -> None:
    data = {"any": object()}
    with SPDataProcessor() as processor:
        assert (processor.sp_group, processor.sp_size, processor.sp_rank) == (None, 1, 0)
        assert processor.preprocess(data) is data and processor.postprocess(data) is data
    with pytest.raises(RuntimeError, match="inside"), SPDataProcessor():  # errors propagate
        raise RuntimeError("inside")
    ids = torch.arange(10).reshape(2, 5)
    sliced, positions, padding = sp_slice_and_pad_input(ids, None)
    assert sliced is ids and positions is None and padding == 0
    for arguments, kind, text in (
        ((ids[0], None), ValueError, "input_ids is of shape [5]; expected [bsz, seqlen]"),
        ((ids, ids), ValueError, "position_ids is of shape [2, 5]; expected [1, 5]"),
        ((ids, ids[:1, :4]), ValueError, "expected [1, 5]"),
        ((ids, [0]), TypeError, "position_ids is a list"),
        (([1], None), TypeError, "input_ids is a list"),
    ):
        with pytest.raises(kind) as caught:
            sp_slice_and_pad_input(*arguments)  # type: ignore[arg-type]
        assert text in str(caught.value), str(caught.value)


# ---- padded slices ----


def check_slices(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        for total in (1, world, 2 * world + 1, 13):
            for rows, dtype in ((1, torch.int64), (3, torch.int32)):
                ids = torch.arange(1, rows * total + 1, dtype=dtype).reshape(rows, total)
                positions = torch.arange(total, dtype=dtype)[None]
                own, padded, padding = sp_slice_and_pad_input(ids, positions)
                assert padding == -total % world and padded is not None
                whole = torch.cat([ids, torch.zeros(rows, padding, dtype=dtype)], 1)
                assert_same(own, whole.chunk(world, 1)[rank])
                assert own.is_contiguous()
                assert_same(padded, torch.cat([positions, torch.arange(padding, dtype=dtype)[None]], 1))
                assert sp_slice_and_pad_input(ids, None)[1] is None
                again = spar.gather_forward_split_backward_and_unpad(own, group, 1, padding, 1)
                assert_same(again, ids)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_slice_and_pad_input(ranks: Ranks, world: int) -> None:
    ranks(world, check_slices)


def check_unpad(rank: int, world: int, group: Group) -> None:
    gather = spar.gather_forward_split_backward_and_unpad
    for shape, dim, unpad_dim in (((2, 3 * world, 2), 1, 1), ((world, 4), 0, -1), ((3, 2 * world), -1, 0)):
        for padding in (0, 1, 2):
            whole = cells(shape, torch.float32)
            kept = shape[unpad_dim] - padding
            if kept < 0:
                continue
            own = part(whole, rule(shape[dim], world), dim, rank).contiguous().requires_grad_()
            y = gather(own, group, dim, padding, unpad_dim)
            assert_same(y.detach(), whole.narrow(unpad_dim, 0, kept))
            grad = cells(
                shape, torch.float32, salt=rank
            )  # this rank's own: backward does not exchange or scale
            (found,) = torch.autograd.grad(y, own, grad.narrow(unpad_dim, 0, kept))
            grad = grad.clone()
            grad.narrow(unpad_dim, kept, padding).zero_()
            assert_same(found, part(grad, rule(shape[dim], world), dim, rank))
    x = torch.zeros(2, 3)
    if world == 1:
        assert gather(x, group, 0) is x
        return
    for call, kind, text in (
        (lambda: gather(x, group, 2), ValueError, "dim is 2"),
        (lambda: gather(x, group, 0, 1), TypeError, "unpad_dim is None and padding_size is 1"),
        (lambda: gather(x, group, 0, 1, 2), ValueError, "unpad_dim is 2"),
        (lambda: gather(x, group, 0, -1, 0), ValueError, f"padding_size is -1; expected 0 to {2 * world}"),
        (lambda: gather(x, group, 0, 2 * world + 1, 0), ValueError, f"expected 0 to {2 * world}"),
        (lambda: gather(x, group, 0, 4, 1), ValueError, "padding_size is 4; expected 0 to 3"),
        (lambda: gather(x, group, 0, 1.0, 0), TypeError, "padding_size is 1.0"),  # type: ignore[arg-type]
        (lambda: gather(x, group, 0, True, 0), TypeError, "padding_size is True"),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value), str(caught.value)
    assert gather(x, group, 0, 2 * world, 0).shape == (0, 3)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_forward_split_backward_and_unpad(ranks: Ranks, world: int) -> None:
    ranks(world, check_unpad)
