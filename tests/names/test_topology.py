# SPDX-License-Identifier: Apache-2.0
"""Topologies: three APIs to one, several in a process, and which one backward and recomputation use."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers.launched import launch
from helpers.processes import finish, start
from helpers.reference import assert_same, cells, owned, zigzag
from helpers.traffic import exchanges
from test_parallel_state import ranks_of
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import checkpoint as recompute
from torch.utils.checkpoint import checkpoint

import spar
from spar import parallel_state as ps
from spar.groups import process_group
from spar.topology import Topology, bind, current, sequence_group
from spar.topology.checkpoint import bind_recomputation

pytestmark = pytest.mark.spread


def gather(x: torch.Tensor) -> torch.Tensor:
    return spar.gather_forward_split_backward(x, None, 0, None, None)


# ---- three APIs ----


def check_three_apis(rank: int, folder: Path) -> None:
    low, high = rank % 2, rank // 2
    whole, owners = cells((16, 3), torch.float32), zigzag(16, 2, 2)
    world = process_group(None, "test")
    assert sequence_group() is None
    assert world is dist.group.WORLD, "until there is a sequence group"

    def check(ulysses: int, ring: int, ulysses_ranks: list[int], ring_ranks: list[int], steps: int) -> None:
        """All APIs report the same groups, and operations over them are correct."""
        sp, state = ps.get_sp_group(), ps.get_parallel_state()
        assert ps.is_parallel_state_initialized()
        assert sequence_group() is process_group(None, "test") is sp.device_group
        assert ps.get_sequence_parallel_group() is sp.device_group
        assert state.get_cp_group() is sp.device_group
        assert (sp.world_size, sp.rank_in_group) == (4, rank)
        assert (ps.get_sequence_parallel_world_size(), ps.get_sequence_parallel_rank()) == (4, rank)
        assert ranks_of(sp.ulysses_group) == ranks_of(state.get_ulysses_group()) == ulysses_ranks
        assert ranks_of(sp.ring_group) == ranks_of(state.get_ring_group()) == ring_ranks
        for name, place in (("ulysses", ulysses), ("ring", ring)):
            assert getattr(sp, f"{name}_world_size") == getattr(ps, f"get_{name}_parallel_world_size")() == 2
            assert getattr(sp, f"{name}_rank") == getattr(ps, f"get_{name}_parallel_rank")() == place
            assert getattr(state, f"get_{name}_rank")() == place
        part = spar.split_forward_gather_backward_with_cp(whole, 0)
        assert_same(part, owned(whole, owners, 0, ulysses * 2 + ring))
        before = exchanges()
        assert_same(spar.gather_forward_split_backward_with_cp(part, 0, 16), whole)
        assert exchanges() == before + steps
        gathered = sp.all_gather(torch.tensor([rank]))
        assert isinstance(gathered, torch.Tensor)
        assert gathered.tolist() == [0, 1, 2, 3]

    state = ps.init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    check(high, low, [low, low + 2], [2 * high, 2 * high + 1], 1)
    assert ps.get_dp_group().ranks == [rank]
    assert ps.get_data_parallel_world_size() == 1
    assert not ps.model_parallel_is_initialized()
    pair = dist.new_subgroups(2)[0]
    ps.set_sequence_parallel_group(pair)  # overrides the state's
    assert ps.get_sequence_parallel_group() is pair
    assert ps.get_ulysses_parallel_world_size() == 2
    assert ps.get_parallel_state() is state
    ps.set_sequence_parallel_group(None)
    ps.destroy_parallel_state()
    assert sequence_group() is None
    assert not ps.is_parallel_state_initialized()

    ps.initialize_model_parallel(ulysses_degree=2, ring_degree=2)
    check(low, high, [2 * high, 2 * high + 1], [low, low + 2], 2)  # its cp has another rank order
    ps.set_sequence_parallel_group(pair)
    assert ps.get_sequence_parallel_world_size() == 4, "coordinators override the given group"
    dist.barrier()
    ps.destroy_model_parallel()

    assert ps.get_sequence_parallel_group() is pair is process_group(None, "test")
    state = ps.get_parallel_state()
    assert (state.get_cp_group(), state.get_ulysses_group(), state.get_ring_group()) == (pair, pair, None)
    assert (ps.get_ring_parallel_world_size(), ps.get_ulysses_parallel_rank()) == (1, low)
    assert (ps.get_sp_group().ranks, ps.get_sp_group().ring_world_size) == (ranks_of(pair), 1)
    x = torch.arange(3.0)
    assert_same(spar.split_forward_gather_backward_with_cp(x, 0), x.split([2, 1])[low])
    assert_same(gather(torch.tensor([rank])), torch.tensor([2 * high, 2 * high + 1]))
    ps.set_sequence_parallel_group(init_device_mesh("cpu", (4,)))
    assert ps.get_sequence_parallel_world_size() == 4
    ps.set_sequence_parallel_group(None)
    assert process_group(None, "test") is world
    dist.barrier()


def test_three_apis_share_one_topology(tmp_path: Path) -> None:
    assert finish(start(check_three_apis, 4, tmp_path), 90) == [0] * 4


# ---- several topologies ----


def two_topologies(rank: int) -> tuple[Topology, Topology]:
    """Return topologies over the pairs 01 23, and 02 13."""
    a, b = Topology(), Topology()
    with a:
        ps.initialize_model_parallel(data_parallel_size=2, ulysses_degree=2)
    with b:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        ps.set_sequence_parallel_group(groups[rank % 2])
    return a, b


def check_nested_topologies(rank: int, folder: Path) -> None:
    own = torch.tensor([rank])
    a, b = two_topologies(rank)
    in_a, in_b = torch.tensor([rank // 2 * 2, rank // 2 * 2 + 1]), torch.tensor([rank % 2, rank % 2 + 2])
    all_ranks = torch.arange(4)
    assert_same(gather(own), all_ranks)
    with a:
        assert current() is a
        assert_same(gather(own), in_a)
        with b:
            assert_same(gather(own), in_b)
            with a, b, b:
                assert_same(gather(own), in_b)
            with pytest.raises(KeyError), a:
                raise KeyError
            assert_same(gather(own), in_b)
            assert not ps.model_parallel_is_initialized()
        assert_same(gather(own), in_a)
        assert ps.model_parallel_is_initialized()
        seen: list[Any] = []
        bound = bind(lambda: current())
        thread = threading.Thread(target=lambda: seen.extend([current(), bound(), current()]))
        thread.start()
        thread.join()
        assert seen[0] is seen[2] is not a, "another thread uses the default topology"
        assert seen[1] is a
    assert_same(gather(own), all_ranks)
    assert bind(torch.nn.Linear(1, 1))(torch.ones(1)).shape == (1,)
    # two threads at once, each in its own topology
    results: dict[str, torch.Tensor] = {}
    barrier = threading.Barrier(2)

    def work(name: str, topology: Topology) -> None:
        with topology:
            barrier.wait()
            for _ in range(20):
                results[name] = gather(own)

    workers = [threading.Thread(target=work, args=item) for item in (("a", a), ("b", b))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_same(results["a"], in_a)
    assert_same(results["b"], in_b)
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nested_and_concurrent_topologies(tmp_path: Path, transport: str) -> None:
    assert finish(start(check_nested_topologies, 4, tmp_path, SPAR_TRANSPORT=transport), 60) == [0] * 4


# ---- backward and recompute ----


def in_thread(function: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def layer(x: torch.Tensor) -> torch.Tensor:
    """Depends on the group's ranks: recomputation in another topology would change the gradients."""
    whole = gather(x * x).sin()
    return whole * whole.sum() * (1 + ps.get_sequence_parallel_rank())


Run = Callable[[torch.Tensor], torch.Tensor]
MODES: dict[str, Run] = {
    "plain": layer,
    "reentrant": lambda x: checkpoint(layer, x, use_reentrant=True),
    "not reentrant": lambda x: checkpoint(layer, x, use_reentrant=False),
    "nested": lambda x: checkpoint(
        lambda y: checkpoint(layer, y, use_reentrant=False), x, use_reentrant=False
    ),
}


def check_gradients(rank: int, folder: Path) -> None:
    a, b = two_topologies(rank)
    outer = Topology()

    def grad(forward: Run, topology: Topology, backward: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        x = torch.arange(3.0, dtype=torch.float64) / 5 + rank
        x.requires_grad_()
        with topology:
            y = forward(x * 1)
        backward(y)
        assert x.grad is not None
        return x.grad

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y * torch.arange(y.numel())).sum()

    def backward_in(topology: Topology) -> Callable[[torch.Tensor], None]:
        def backward(y: torch.Tensor) -> None:
            with topology:
                loss(y).backward()

        return backward

    places: dict[str, Callable[[torch.Tensor], Any]] = {
        "outside": lambda y: loss(y).backward(),
        "in a": backward_in(a),
        "in b": backward_in(b),
        "in an empty one": backward_in(outer),
        "thread": lambda y: in_thread(lambda: loss(y).backward()),
        "thread in b": lambda y: in_thread(lambda: backward_in(b)(y)),
    }
    found = []
    for topology in (a, b, current()):
        with topology:
            expected = grad(layer, topology, lambda y: loss(y).backward())
        found.append(expected)
        for where, backward in places.items():
            for name, forward in MODES.items():
                assert_same(grad(forward, topology, backward), expected, (where, name))
        assert current() is not a
        assert current() is not b
    assert not torch.equal(found[0], found[1]), "the topologies differ in their gradients"
    assert not torch.equal(found[0], found[2])
    dist.barrier()


def test_backward_and_checkpoint_use_forwards_topology(tmp_path: Path) -> None:
    assert finish(start(check_gradients, 4, tmp_path), 90) == [0] * 4


def check_context_fn(rank: int, folder: Path) -> None:
    """A caller's context_fn and modules still work."""
    a, b = two_topologies(rank)
    entered = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append((self.name, current()))

        def __exit__(self, *_: object) -> None:
            pass

    module = torch.nn.Linear(2, 2)
    with a:
        y = checkpoint(
            module,
            torch.ones(1, 2, requires_grad=True),
            use_reentrant=False,
            context_fn=lambda: (Recorder("forward"), Recorder("again")),
        )
    with b:
        y.sum().backward()
        assert current() is b
    assert entered == [("forward", a), ("again", a)]
    assert module.weight.grad is not None
    dist.barrier()


def test_checkpoint_with_context_fn(tmp_path: Path) -> None:
    assert finish(start(check_context_fn, 4, tmp_path), 60) == [0] * 4


def check_compiled(rank: int, folder: Path) -> None:
    a, b = two_topologies(rank)

    def step(x: torch.Tensor) -> torch.Tensor:
        size, place = ps.get_sequence_parallel_world_size(), ps.get_sequence_parallel_rank()
        return gather(x * 2) * size + place + ps.get_ulysses_parallel_world_size()

    fast = torch.compile(step, fullgraph=True, backend="aot_eager") if rank == 1 else step
    x = torch.full((2,), float(rank))
    for _ in range(2):  # the second time from the cache
        for topology in (current(), a, b, a, Topology()):
            with topology:
                assert_same(fast(x), step(x))
    with a:
        in_thread(lambda: assert_same(fast(x), step(x)))
    y = x.clone().requires_grad_()
    with a:
        z = fast(y)
    with b:
        z.sum().backward()
    assert y.grad is not None
    assert_same(y.grad, torch.full((2,), 4.0))
    dist.barrier()


@pytest.mark.compiler
def test_compiled_function_follows_the_current_topology(tmp_path: Path) -> None:
    assert finish(start(check_compiled, 4, tmp_path), 120) == [0] * 4


def test_unknown_checkpoint_implementation_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers must then bind the function they pass to checkpoint; as the warning states."""
    a = Topology()
    functions = [(recompute.CheckpointFunction, "forward"), (recompute._CheckpointFrame, "__init__")]
    for (holder, name), kind in zip(functions, (staticmethod, lambda function: function), strict=True):
        monkeypatch.setattr(holder, name, kind(inspect.unwrap(getattr(holder, name))))
    seen = []

    def record(x: torch.Tensor) -> torch.Tensor:
        seen.append(current())
        return x.sin()

    for mode in (True, False):
        with a:
            y = checkpoint(bind(record), torch.ones(2, requires_grad=True), use_reentrant=mode)
        y.sum().backward()
    assert seen == [a] * 4
    monkeypatch.setattr(recompute.CheckpointFunction, "forward", staticmethod(lambda ctx, other, *args: 1))
    monkeypatch.delattr(recompute, "_CheckpointFrame")
    with pytest.warns(UserWarning, match=r"spar.topology.bind\(function\)") as warned:
        bind_recomputation.__wrapped__(bind)
    assert [str(one.message).split("use_reentrant=")[1][:5] for one in warned] == ["True ", "False"]
    assert cast(Any, recompute.CheckpointFunction).forward(None, None) == 1, "not wrapped"


# ---- one model with and without ranks ----


class Layer(torch.nn.Module):
    """A sequence-parallel layer over `[S, H, D]` that takes no group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        size, place = ps.get_sequence_parallel_world_size(), ps.get_sequence_parallel_rank()
        assert place < size
        x = spar.split_forward_gather_backward_with_cp(tokens, 0) * self.weight
        if size > 1:
            x = spar.all_to_all(x, None, 1, 0, tokens.size(0))
        x = x.cumsum(0)
        if size > 1:
            x = spar.all_to_all(x, None, 0, 1, tokens.size(1))
        return spar.gather_forward_split_backward_with_cp(x, 0, tokens.size(0))


def check_layer() -> None:
    """The output and the gradient of the tokens are bitwise those of a single process."""
    tokens = cells((9, 3, 2), torch.float64).requires_grad_()
    layer = Layer()
    layer(tokens).backward(cells((9, 3, 2), torch.float64, salt=1))
    assert tokens.grad is not None
    given = cells((9, 3, 2), torch.float64, salt=1)
    assert_same(tokens.grad, given.flip(0).cumsum(0).flip(0) * layer.weight.detach())
    assert_same(layer(tokens).detach(), (tokens.detach() * layer.weight.detach()).cumsum(0))


def forward_on_ranks(folder: Path) -> None:
    ps.init_distributed_environment()
    world = ps.get_world_group()
    assert world.world_size == 2
    ps.initialize_model_parallel(ulysses_degree=2)
    check_layer()
    world.barrier()
    ps.destroy_model_parallel()
    ps.init_parallel_state(ulysses_parallel_size=2)
    check_layer()
    ps.destroy_parallel_state()
    ps.set_sequence_parallel_group(dist.group.WORLD)
    check_layer()
    world.barrier()
    ps.destroy_distributed_env()


def test_one_forward_with_and_without_ranks(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no parallel state
        check_layer()
    ps.init_parallel_state()
    try:
        check_layer()
    finally:
        ps.destroy_parallel_state()
    launch(forward_on_ranks, 2, tmp_path)
