# SPDX-License-Identifier: Apache-2.0
"""Shards and gathers over the current topology's sequence group, and the validator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, WORLDS, Ranks
from helpers.reference import assert_same, cells, part, rule
from torch.distributed.device_mesh import DeviceMesh

import spar
from spar.data import SPDataProcessor, sp_slice_and_pad_input
from spar.parallel_state import (
    ParallelState,
    destroy_parallel_state,
    set_sequence_parallel_group,
    take_over_mesh,
)
from spar.sharding import (
    ShardingValidator,
    get_sharding_validator,
    sp_gather,
    sp_shard,
    sp_shard_with_padding,
)
from spar.topology import Topology, topology

pytestmark = [pytest.mark.long, pytest.mark.quick_ranks]

Group = dist.ProcessGroup
DTYPES = (torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)


@contextmanager
def sequence(group: Group | None) -> Iterator[None]:
    """Make `group` the current topology's sequence group inside the `with`."""
    set_sequence_parallel_group(group)
    try:
        yield
    finally:
        set_sequence_parallel_group(None)


def check_even(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        for shape, dim in (((2 * world, 3), 0), ((2, 3 * world, 2), 1), ((2, world), -1), ((0, world), 1)):
            for dtype in DTYPES:
                whole = cells(shape, dtype)
                own = sp_shard(whole, dim)
                assert_same(own, part(whole, rule(shape[dim], world), dim, rank))
                assert own.is_contiguous()
                for validate in (True, False):
                    assert_same(sp_gather(own, dim, validate), whole)
                if world == 1:
                    assert own is whole and sp_gather(own, dim) is whole


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_shard_and_sp_gather_even(ranks: Ranks, world: int) -> None:
    ranks(world, check_even)


def check_uneven(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        for shape, dim in (((13, 2), 0), ((2, 3, 2), 1), ((5, 8 * world + 1), -1), ((0,), 0), ((1, 1), 1)):
            whole = cells(shape, torch.float32)
            own = sp_shard(whole, dim, validate=False)
            assert_same(own, part(whole, rule(shape[dim], world), dim, rank))
            assert_same(sp_gather(own, dim), whole)
        own = cells((2, rank), torch.int64, salt=rank)  # arbitrary sizes
        assert_same(
            sp_gather(own, 1), torch.cat([cells((2, p), torch.int64, salt=p) for p in range(world)], 1)
        )
        if world > 1:
            with pytest.raises(spar.MismatchError):  # sizes assumed equal, but they differ
                sp_gather(own, 1, validate=False)
            assert sp_gather(own, 1).shape == (2, sum(range(world)))  # the group is usable


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_shard_and_sp_gather_uneven(ranks: Ranks, world: int) -> None:
    ranks(world, check_uneven)


def check_gradients(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        for total, dim in ((2 * world, 0), (2 * world + 1, 1), (1, 0)):
            shape = (total, 3) if dim == 0 else (3, total)
            sizes = rule(total, world)
            x = cells(shape, torch.float32).requires_grad_()
            grads = [part(cells(shape, torch.float32, salt=p), sizes, dim, p) for p in range(world)]
            sp_shard(x, dim, validate=False).backward(grads[rank])
            assert x.grad is not None
            assert_same(x.grad, torch.cat(grads, dim) / world)
            own = part(x.detach(), sizes, dim, rank).contiguous().requires_grad_()
            grad = cells(shape, torch.float32, salt=9)
            sp_gather(own, dim).backward(grad)
            assert own.grad is not None
            assert_same(own.grad, part(grad, sizes, dim, rank) * world)
            # a shard and its gather leave the gradient unchanged
            x.grad = None
            sp_gather(sp_shard(x, dim, validate=False), dim).backward(grad)
            assert x.grad is not None
            torch.testing.assert_close(x.grad, grad)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_shard_and_sp_gather_gradients(ranks: Ranks, world: int) -> None:
    ranks(world, check_gradients)


def check_padding(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        for shape, dim in (((13, 2), 0), ((2, 3, 2), 1), ((3, 2 * world), -1), ((1,), 0), ((2, 0), 1)):
            for dtype in DTYPES:
                whole = cells(shape, dtype)
                padding = -shape[dim] % world
                extra = [*shape]
                extra[dim] = padding
                value = True if dtype == torch.bool else 2.0
                padded = torch.cat([whole, torch.full(extra, value, dtype=dtype)], dim)
                own, added = sp_shard_with_padding(whole, dim, value)
                assert added == padding
                assert_same(own, part(padded, rule(padded.size(dim), world), dim, rank), (shape, dtype))
                again = sp_gather(own, dim, validate=False)  # even parts
                assert_same(again.narrow(dim, 0, again.size(dim) - added), whole)
        own, added = sp_shard_with_padding(torch.ones(world + 1), 0)
        expected = ([1] * (world + 1) + [0] * (world - 1))[rank * 2 : rank * 2 + 2] if world > 1 else [1, 1]
        assert (own.tolist(), added) == (expected, world - 1)
        # the padding has no gradient; the rest has the gradient of a shard
        x = cells((world + 1, 2), torch.float32).requires_grad_()
        grads = [cells((2 if world > 1 else world + 1, 2), torch.float32, salt=p) for p in range(world)]
        sp_shard_with_padding(x, 0, 7.0)[0].backward(grads[rank])
        assert x.grad is not None
        assert_same(x.grad, torch.cat(grads)[: world + 1] / world)


@pytest.mark.one_transport
@pytest.mark.parametrize("world", WORLDS)
def test_sp_shard_with_padding(ranks: Ranks, world: int) -> None:
    ranks(world, check_padding)


def test_without_topology_returns_the_input() -> None:
    """Without a topology there is one rank, and torch.distributed is not needed."""
    x = torch.arange(7.0, requires_grad=True)
    assert sp_shard(x, 0) is x
    assert sp_gather(x, 0) is x
    assert sp_gather(x, 0, validate=False) is x
    own, padding = sp_shard_with_padding(x, 0)
    assert own is x and padding == 0


def check_errors(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        x = torch.zeros(2, world + 1)
        for call, kind, text in (
            (
                lambda: sp_shard(x, 1),
                ValueError,
                f"with size {world + 1} in dim 1; expected a multiple of {world}",
            ),
            (lambda: sp_shard(x, -1), ValueError, "sp_shard_with_padding"),
            (lambda: sp_shard(x, 2), ValueError, "dim is 2; expected -2 to 1"),
            (lambda: sp_gather(x, -3), ValueError, "sp_gather on rank"),
            (lambda: sp_gather(x, "1"), TypeError, "dim is '1'"),  # type: ignore[arg-type]
            (lambda: sp_shard_with_padding(x, 5), ValueError, "dim is 5"),
            (lambda: sp_shard_with_padding(x, 1, "0"), TypeError, "pad_value is '0'; expected a number"),  # type: ignore[arg-type]
            (lambda: sp_shard([1], 0), TypeError, "tensor is a list; expected a tensor"),  # type: ignore[arg-type]
            (lambda: sp_gather(torch.tensor(1.0), 0), ValueError, "at least one dim"),
        ):
            with pytest.raises(kind) as caught:
                call()
            assert text in str(caught.value), str(caught.value)
        assert_same(sp_gather(torch.tensor([rank]), 0), torch.arange(world))  # the group is usable


def test_sp_shard_and_sp_gather_reject_bad_arguments(ranks: Ranks) -> None:
    ranks(2, check_errors)


def check_mismatches(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        with pytest.raises(spar.MismatchError):  # another dim
            sp_gather(torch.zeros(4, 4), rank)
        with pytest.raises(spar.MismatchError):  # one rank exchanges sizes, the other does not
            sp_gather(torch.zeros(4, 4), 0, validate=rank == 0)
        with pytest.raises(spar.MismatchError):  # sizes differ in another dim
            sp_gather(torch.zeros(4, 4 + rank), 0)
        assert_same(sp_gather(torch.tensor([rank]), 0), torch.arange(world))


def test_different_calls_raise_mismatch_error(ranks: Ranks) -> None:
    ranks(2, check_mismatches)


WITHOUT_GROUP: dict[str, Callable[[torch.Tensor], Any]] = {
    "sp_shard": lambda x: sp_shard(x, 0),
    "sp_gather": lambda x: sp_gather(x, 0),
    "sp_shard_with_padding": lambda x: sp_shard_with_padding(x, 0)[0],
    "sp_slice_and_pad_input": lambda x: sp_slice_and_pad_input(x, None)[0],
    "SPDataProcessor": lambda x: SPDataProcessor().preprocess(x),
    "split_forward_gather_backward_with_cp": lambda x: spar.split_forward_gather_backward_with_cp(x, 0),
    "gather_forward_split_backward_with_cp": lambda x: spar.gather_forward_split_backward_with_cp(x, 0, 2),
}


def check_warning(rank: int, world: int, group: Group) -> None:
    x = torch.ones(2, 2)

    def warns_of(name: str, because: str = f"torch.distributed has {dist.get_world_size()} ranks") -> None:
        topology._warned = False
        expected = rf"{name} returns its input .*{because}.*take_over_mesh"
        with pytest.warns(UserWarning, match=expected) as caught:
            assert_same(WITHOUT_GROUP[name](x), x)
        assert caught[0].filename == __file__

    def no_warning() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for call in WITHOUT_GROUP.values():
                assert_same(call(x), x)

    for name in WITHOUT_GROUP:
        with Topology():
            warns_of(name)
            no_warning()  # once per process
    with Topology():
        topology._warned = False
        for name in ("sp_shard", "split_forward_gather_backward_with_cp"):
            torch._dynamo.reset()
            call = WITHOUT_GROUP[name]
            compiled = torch.compile(lambda x, call=call: call(x * 1), fullgraph=True, backend="eager")
            assert_same(compiled(x), x)
        topology._warned = False
        set_sequence_parallel_group(None)  # size 1 is intended
        no_warning()
    with Topology():
        set_sequence_parallel_group(group)
        with ThreadPoolExecutor(1) as other, Topology():
            warns_of("sp_shard")  # of another topology that has none
            topology._warned = False
            topology.process_wide().forget()  # an earlier test may have set size 1
            assert other.submit(sp_shard, x, 0).result() is x and topology._warned  # it entered none
    with Topology():
        take_over_mesh(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)))
        destroy_parallel_state()
        warns_of("sp_shard")
        topology.current().mesh_state = ParallelState()  # as init_parallel_state() in one process
        topology.current().refresh()
        topology._warned = False
        no_warning()  # a sequence group of size 1


@pytest.mark.one_transport
def test_warns_once_without_a_topology(ranks: Ranks) -> None:
    ranks(2, check_warning)


@pytest.mark.parametrize(("size", "expected"), [("2", 1), ("1", 0), ("", 0), (None, 0), ("two", 0)])
def test_warns_if_torchrun_started_ranks_that_are_not_initialized(
    monkeypatch: pytest.MonkeyPatch, size: str | None, expected: int
) -> None:
    monkeypatch.setattr(topology, "_warned", False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    with warnings.catch_warnings(record=True) as caught, Topology():
        warnings.simplefilter("always")
        sp_shard(torch.ones(2), 0)
    assert len(caught) == expected
    assert all("WORLD_SIZE is 2 and torch.distributed is not initialized" in str(w.message) for w in caught)


def check_meta(rank: int, world: int, group: Group) -> None:
    with sequence(group):
        spar.init(group)
        before = spar.memory_stats()
        own = sp_shard(torch.zeros(5, 2, device="meta"), 0, validate=False)
        assert own.shape == (3 - rank, 2)
        for validate in (True, False):  # sizes are not exchanged, but assumed equal
            assert sp_gather(own, 0, validate).shape == (2 * (3 - rank), 2)
        assert spar.memory_stats() == before


def test_meta_tensors_are_not_exchanged(ranks: Ranks) -> None:
    ranks(2, check_meta)


# ---- the validator ----


def check_validator(rank: int, world: int, group: Group) -> None:
    validator = ShardingValidator()
    x = cells((2, 2 * world, 2 * world), torch.float32)
    with sequence(group):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with validator.track() as tracked:
                assert tracked is validator
                for name, dim in (("x", 1), ("y", -1)):
                    own = validator.shard(x, name, dim)
                    assert_same(own, sp_shard(x, dim))
                    assert_same(validator.gather(own, name, dim % 3), x)  # negative dims match too
            validator.validate()
            assert set(validator._splits) == {"x", "y"} and not validator._open
            uneven = validator.shard(x[:, 1:], "untracked", 1, validate_divisible=False)
            validator.gather(uneven, "untracked too", 1)
            validator.validate()  # untracked calls are not checked
        with validator.track():
            for name in ("b", "a", "c"):
                own = validator.shard(x, name, 1)
            validator.gather(own, "c", 1)
            with pytest.raises(ValueError, match="a multiple"):
                validator.shard(x[:, 1:, 1:] if world > 1 else x, "failed", 1 if world > 1 else 9)
        with pytest.raises(ValueError) as caught:
            validator.validate()
        assert "sharded, but never gathered: 'a', 'b';" in str(caught.value), str(caught.value)
        with validator.track():
            validator.gather(validator.shard(x, "again", 1), "again", 1)
            validator.shard(x, "again", 1)
        with pytest.raises(ValueError, match="never gathered: 'again'"):
            validator.validate()
        with validator.track():  # each pass starts empty
            pass
        validator.validate()
        with validator.track():
            validator.gather(validator.shard(x, "turned", 1), "turned", 2)
            validator.gather(validator.shard(x, "kept", 1), "kept", 1)
        with pytest.raises(ValueError) as caught:
            validator.validate()
        text = str(caught.value)
        assert f"'turned' was sharded along dim 1 of group '{group.group_name}' ({world} ranks)" in text, text
        assert "but gathered along dim 2 of group" in text and "kept" not in text
        with validator.track():
            own = validator.shard(x, "moved", 1)
            set_sequence_parallel_group(None)
            assert validator.gather(own, "moved", 1) is own
            set_sequence_parallel_group(group)
        with pytest.raises(
            ValueError, match=r"'moved' was sharded along dim 1 of group .* dim 1 without a group"
        ):
            validator.validate()
        with validator.track():
            validator.shard(x, "twice", 1)
            with pytest.warns(UserWarning, match="'twice' is sharded again before its gather"):
                own = validator.shard(x, "twice", 1)
            validator.gather(own, "twice", 1)
            with pytest.warns(UserWarning, match="'never' is gathered, but was not sharded"):
                validator.gather(own, "never", 1)
        validator.validate()


@pytest.mark.one_transport
@pytest.mark.parametrize("world", [2, 3])
def test_sharding_validator(ranks: Ranks, world: int) -> None:
    ranks(world, check_validator)


def test_get_sharding_validator() -> None:
    validator = get_sharding_validator()
    assert validator is get_sharding_validator() and isinstance(validator, ShardingValidator)
    with pytest.raises(RuntimeError, match="in the model"), validator.track():
        validator.shard(torch.zeros(3), "x", 0)
        raise RuntimeError("in the model")
    assert not validator._enabled
    with pytest.raises(ValueError, match="never gathered: 'x'"):
        validator.validate()
    validator.reset()
    validator.validate()


def check_compiled(rank: int, world: int, group: Group) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        own, padding = sp_shard_with_padding(x * 2, 0)
        whole = sp_gather(own.sin(), 0, validate=False)
        whole = whole.narrow(0, 0, whole.size(0) - padding)
        return sp_gather(sp_shard(whole.repeat(world, 1), 0).cos(), 0, validate=False)

    def uneven(x: torch.Tensor) -> torch.Tensor:
        return sp_gather(sp_shard(x * 2, 0, validate=False).sin(), 0)

    with sequence(group):
        for turn, (function, fullgraph) in enumerate(((step, True), (uneven, False))):
            torch._dynamo.reset()  # the ranks take turns to compile, which takes seconds
            compiled = function
            if rank == turn:
                compiled = torch.compile(function, fullgraph=fullgraph, backend="aot_eager")
            for total in (2 * world, 2 * world + 1, 4 * world + 1):
                results = []
                for run in (function, compiled):
                    x = (torch.arange(total * 3.0).reshape(total, 3) / 8).requires_grad_()
                    y = run(x)
                    (y * torch.arange(len(y))[:, None]).sum().backward()
                    results.append((y.detach(), x.grad))
                torch.testing.assert_close(results[0], results[1])
        x = torch.ones(2 * world, 2)
        set_sequence_parallel_group(None)
        assert_same(compiled(x), (x * 2).sin())  # recompiled for another topology


@pytest.mark.compiler
def test_compiled_shards_and_gathers(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]  # a graph is the same for each
    pool(2, check_compiled)
