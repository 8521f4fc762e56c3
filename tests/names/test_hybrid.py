# SPDX-License-Identifier: Apache-2.0
"""Ring x ulysses by the parallel state: one and two exchanges against a reference; the state itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS
from helpers.processes import finish, start
from helpers.reference import among, assert_same, cells, in_runs, joined, owned, packed, rule, zigzag
from helpers.traffic import exchanges

import spar
from spar import parallel_state
from spar.parallel_state import get_parallel_state, init_parallel_state

pytestmark = pytest.mark.spread

PACK = [5, 0, 9, 1, 14]


def whole_cases(ring: int, ulysses: int) -> list[tuple[tuple[int, ...], int, list[int], Any]]:
    """Return (shape, dim, owner of each index, lengths or None). Without a ring, zigzag is the size rule."""
    found: list[tuple[tuple[int, ...], int, list[int], Any]] = []
    for chunk, extents, dim in ((3, (2,), 0), (1, (3,), -1), (2, (2, 2), 1), (0, (2,), 0)):
        total = 2 * ring * chunk + (1 if ring == 1 else 0)
        at = dim % (len(extents) + 1)
        owners = zigzag(total, ring, ulysses) if ring > 1 else in_runs(rule(total, ulysses))
        found.append(((*extents[:at], total, *extents[at:]), dim, owners, None))
    for lengths in (PACK, [2], [0], []):
        found.append(((sum(lengths), 3), 0, packed(lengths, ring, ulysses), lengths))
    return found


def split(x: torch.Tensor, dim: int, lengths: Any) -> torch.Tensor:
    if lengths is None:
        return spar.split_forward_gather_backward_with_cp(x, dim)
    return spar.packed_data_split_forward_gather_backward_with_cp(x, dim, lengths)


def gather(x: torch.Tensor, dim: int, lengths: Any, total: int) -> torch.Tensor:
    if lengths is None:
        return spar.gather_forward_split_backward_with_cp(x, dim, total)
    return spar.packed_data_gather_forward_split_backward_with_cp(x, dim, lengths)


def check_topologies(rank: int, folder: Path, topologies: list[tuple[int, int]]) -> None:
    for ring, ulysses in topologies:
        for combined in (True, False) if ring > 1 and ulysses > 1 else (True,):
            check_topology(rank, ring, ulysses, combined)
            parallel_state.destroy_parallel_state()


def check_topology(rank: int, ring: int, ulysses: int, combined: bool) -> None:
    state = init_parallel_state(ring_attention_size=ring, ulysses_parallel_size=ulysses)
    assert (state.get_ring_rank(), state.get_ulysses_rank()) == (rank % ring, rank // ring)
    if not combined:
        del state._meshes["cp"]
    world = ring * ulysses
    steps = 1 if combined or ring == 1 or ulysses == 1 else 2
    for shape, dim, owners, lengths in whole_cases(ring, ulysses):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            whole = cells(shape, dtype).requires_grad_()
            before = exchanges()
            part = split(whole, dim, lengths)
            assert exchanges() == before, "a split communicates nothing"
            assert_same(part.detach(), owned(whole.detach(), owners, dim, rank), (shape, lengths))
            grads = [owned(cells(shape, dtype, salt=p), owners, dim, p) for p in range(world)]
            part.backward(grads[rank])
            assert exchanges() == before + steps
            assert whole.grad is not None
            assert_same(whole.grad, joined(grads, owners, dim) / world, (shape, lengths))
            own = part.detach().requires_grad_()
            again = gather(own, dim, lengths, whole.size(dim))
            assert exchanges() == before + 2 * steps
            assert_same(again.detach(), whole.detach(), (shape, lengths))
            grad = cells(shape, dtype, salt=9)
            again.backward(grad)
            assert exchanges() == before + 2 * steps
            assert own.grad is not None
            assert_same(own.grad, owned(grad, owners, dim, rank) * world, (shape, lengths))
    integers = torch.arange(4 * world * 2)
    assert_same(gather(split(integers, 0, None), 0, None, len(integers)), integers)
    # the second derivative is the operation itself
    x = torch.arange(4.0 * world, dtype=torch.float64).requires_grad_()
    v = torch.ones(x.numel() // world, dtype=torch.float64, requires_grad=True)
    (back,) = torch.autograd.grad(split(x, 0, None), x, v, create_graph=True)
    (twice,) = torch.autograd.grad(back, v, x.detach())
    assert_same(twice, split(x.detach(), 0, None))


@pytest.mark.parametrize(
    ("topologies", "transport"),
    [
        pytest.param(topologies, name, id=f"{' '.join(f'{a}x{b}' for a, b in topologies)} {name}")
        for topologies, names in (
            ([(2, 2)], TRANSPORTS),
            ([(2, 3), (3, 2)], TRANSPORTS[:1]),
            ([(1, 3), (3, 1)], TRANSPORTS),
        )
        for name in names
    ],
)
def test_one_and_two_exchanges_match_the_reference(
    tmp_path: Path, topologies: list[tuple[int, int]], transport: str
) -> None:
    """One exchange over the cp group, and two over the ring and ulysses groups, both match the reference."""
    world = topologies[0][0] * topologies[0][1]
    ranks = start(check_topologies, world, tmp_path, topologies, SPAR_TRANSPORT=transport)
    assert finish(ranks, 120) == [0] * world


def check_compiled(rank: int, folder: Path) -> None:
    """One rank, the second in both dims, compiles; its calls match the others' eager ones."""

    def step(x: torch.Tensor, lengths: list[int] | None) -> torch.Tensor:
        return gather(split(x * 2, 0, lengths).sin(), 0, lengths, x.size(0))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager") if rank == 3 else step
    for combined in (True, False):  # the compiled function must follow a new state
        state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
        if not combined:
            del state._meshes["cp"]
        for total in (8, 12):
            for lengths in (None, [3, total - 3]):
                results = []
                for function in (step, compiled):
                    x = (torch.arange(total * 3.0).reshape(total, 3) / 8).requires_grad_()
                    before = exchanges()
                    y = function(x, lengths)
                    assert exchanges() == before + (1 if combined else 2)
                    (y * torch.arange(total)[:, None]).sum().backward()  # type: ignore[no-untyped-call]
                    results.append((y.detach(), x.grad))
                torch.testing.assert_close(results[0], results[1])
        parallel_state.destroy_parallel_state()


@pytest.mark.compiler
def test_compiled_equals_eager(tmp_path: Path) -> None:
    assert finish(start(check_compiled, 4, tmp_path), 90) == [0] * 4


def fail_in_first_of_two(rank: int, folder: Path) -> None:
    """Calls differ in the first of two exchanges: ranks that wait in the second receive the failure."""
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    del state._meshes["cp"]
    x = torch.zeros(2)
    wrong = x.int() if rank == 3 else x
    whole = lambda x: gather(x, 0, None, 8)  # noqa: E731
    for function in (whole, torch.compile(whole, fullgraph=True, backend="aot_eager")):
        function(x)  # sets both groups up
        with pytest.raises(spar.MismatchError) as caught:
            function(wrong)
        assert ("the exchange before it failed" in str(caught.value)) == (rank in (0, 2)), caught.value
        assert_same(function(x), torch.zeros(8))  # the group is usable
    with pytest.raises(ValueError if rank == 3 else spar.MismatchError) as caught:
        gather(x, 0, None, 12 if rank == 3 else 8)  # a bad argument is reported in both groups
    assert "gather_size is 12" in str(caught.value), caught.value
    assert_same(gather(x, 0, None, 8), torch.zeros(8))  # the group is usable


def test_failed_first_exchange_is_reported_in_the_second(tmp_path: Path) -> None:
    ranks = start(fail_in_first_of_two, 4, tmp_path, SPAR_TRANSPORT="shm", SPAR_TIMEOUT="20")
    assert finish(ranks, 40) == [0] * 4


def check_errors(rank: int, folder: Path) -> None:
    init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    x = torch.zeros(6)
    for call, kind, text in (
        (lambda: split(x, 0, None), ValueError, "6 to split; expected a multiple of 4"),
        (lambda: gather(x, 0, None, 6), ValueError, "Did you pass the local size?"),
        (lambda: gather(x, 0, None, 8), ValueError, "gather_size is 8; expected 24, as rank"),
        (lambda: gather(x[:3], 0, [0, 4, 12], 12), ValueError, "cu_seqlens, which are cumulative"),
        (lambda: gather(x, 0, None, -8), ValueError, "-8"),
        (lambda: gather(x, 0, None, "8"), TypeError, "gather_size is '8'"),  # type: ignore[arg-type]
        (lambda: gather(x, 1, None, 8), ValueError, "dim is 1"),
        (lambda: split(x, 0, [4]), ValueError, "sums to 4"),
        (lambda: gather(x, 0, [4], 4), ValueError, "expected 1, its shard of 4"),
    ):
        dist.barrier()
        with pytest.raises((kind, spar.MismatchError)) as caught:  # the latter if a peer reported it first
            call()
        assert text in str(caught.value), str(caught.value)
    assert_same(gather(torch.ones(2), 0, None, 8), torch.ones(8))


# ---- the state ----


def test_single_process_returns_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state.context_parallel, "_warned", False)
    with pytest.warns(UserWarning, match="not initialized"):
        state = get_parallel_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_parallel_state()  # warns once
    assert not spar.parallel_state.is_parallel_state_initialized()
    for name in parallel_state.NAMES:
        assert (state.get_group_size(name), state.get_rank(name)) == (1, 0)
        assert state.get_group(name) is None and not state.is_group_enable(name)
    x = torch.ones(5, 2, requires_grad=True)
    assert split(x, 0, None) is x
    assert gather(x, 0, None, 5) is x
    assert split(x, 0, [2, 3]) is x
    assert gather(x, 0, [2, 3], 5) is x
    with pytest.raises(ValueError, match="dim is 2"):
        split(x, 2, None)
    with pytest.raises(ValueError, match="sums to 4"):
        gather(x, 0, [4], 4)
    with pytest.raises(ValueError, match="gather_size is 6"):
        gather(x, 0, None, 6)
    with pytest.raises(RuntimeError, match="no group named 'pp'; known: dp_replicate"):
        state.get_group("pp")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ring_attention_size": 2}, "ring 2 x tp 1 is 2 ranks; the world has 1; call torch.distributed"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; expected at least 1"),
        (
            {"fully_shard_parallel_size": 3, "ring_attention_size": 2},
            "expected a multiple of 2, ring_attention_size",
        ),
        (
            {"fully_shard_parallel_size": 4, "data_parallel_size": 6},
            "data_parallel_size is 6; expected a multiple",
        ),
        ({"expert_parallel_size": 2}, "edp 1 x efsdp 1 x ep 2 is 2 ranks"),
    ],
)
def test_layout_that_does_not_fit_the_world_raises(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        init_parallel_state(**arguments)
    assert text in str(caught.value)
    assert not parallel_state.is_parallel_state_initialized()


def check_groups(rank: int, folder: Path) -> None:
    state = init_parallel_state(
        data_parallel_size=2,
        fully_shard_parallel_size=2,
        ulysses_parallel_size=2,
        tensor_parallel_size=1,
        expert_parallel_size=2,
    )
    assert parallel_state.get_parallel_state() is state
    expected = {  # dp_replicate x dp_shard x ulysses x ring x tp is 2 x 1 x 2 x 1 x 1
        "dp": [rank % 2, rank % 2 + 2],
        "dp_replicate": [rank % 2, rank % 2 + 2],
        "ulysses": [rank // 2 * 2, rank // 2 * 2 + 1],
        "cp": [rank // 2 * 2, rank // 2 * 2 + 1],
        "fsdp": [rank // 2 * 2, rank // 2 * 2 + 1],
        "hsdp": [0, 1, 2, 3],
        "ring": [rank],
        "tp": [rank],
        "ep": [rank // 2 * 2, rank // 2 * 2 + 1],
        "edp": [rank % 2, rank % 2 + 2],
    }
    for name, ranks in expected.items():
        group = state.get_group(name)
        assert group is not None and dist.get_process_group_ranks(group) == ranks, name
        assert state.get_group_size(name) == len(ranks)
        assert state.get_rank(name) == ranks.index(rank)
        assert state.is_group_enable(name) == (len(ranks) > 1)
        mesh = state.get_device_mesh(name)
        assert mesh is not None and mesh.ndim == 1
    for name in ("dp", "cp", "ulysses", "ring", "tp", "edp", "efsdp", "ep"):
        assert getattr(state, f"get_{name}_group")() is state.get_group(name)
        assert getattr(state, f"get_{name}_group_size")() == state.get_group_size(name)
        assert getattr(state, f"get_{name}_rank")() == state.get_rank(name)
        assert getattr(state, f"is_{name}_enable")() == state.is_group_enable(name)
        assert getattr(state, f"get_{name}_device_mesh")() is state.get_device_mesh(name)
    assert (state.get_fsdp_group(), state.get_fsdp_rank()) == (state.get_group("fsdp"), rank % 2)
    assert (state.get_hsdp_group(), state.get_hsdp_group_size()) == (state.get_group("hsdp"), 4)
    mesh = state.get_hsdp_device_mesh()
    assert mesh is not None and mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
    assert mesh.get_local_rank("dp_shard_cp") == state.get_fsdp_rank(), "the index of a shard of fully_shard"
    assert state.get_rank("hsdp") == rank
    with pytest.raises(RuntimeError, match="destroy_parallel_state"):
        init_parallel_state()
    parallel_state.destroy_parallel_state()
    assert not parallel_state.is_parallel_state_initialized()
    state = init_parallel_state(ring_attention_size=4)
    mesh = state.get_hsdp_device_mesh()
    assert mesh is not None and mesh.shape == (1, 4), "2-D without replicas, too"
    assert state.get_fsdp_rank() == state.get_rank("hsdp") == rank


def test_init_parallel_state_creates_groups(tmp_path: Path) -> None:
    assert finish(start(check_groups, 4, tmp_path), 60) == [0] * 4


def test_bad_arguments_raise(tmp_path: Path) -> None:
    assert finish(start(check_errors, 4, tmp_path), 60) == [0] * 4


def test_reference_layouts() -> None:
    assert zigzag(8, 2) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert packed([3, 2], 2) == [0, 0, 1, 0, 1]
    assert among([0, 0, 1, 1, 1, 1, 0, 0], 2, 2) == [0, 0, 1, 1, 3, 3, 2, 2]
