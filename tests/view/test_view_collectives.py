# SPDX-License-Identifier: Apache-2.0
"""A model's own communication in a view: each rank receives what it would if nothing was sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from conftest import Ranks
from helpers.view_cases import Inputs, compare, viewed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

from spar._model.collectives import _KNOWN, _methods

pytestmark = pytest.mark.one_transport

POOL = (4,)

# ---- collectives of torch.distributed, of z [B, N, D] ----


def first(g: Any) -> int:
    return dist.get_global_rank(g, 0)


def others(g: Any) -> list[int]:
    """Return the ranks before and behind this one in a group."""
    rank, size = g.rank(), g.size()
    return [dist.get_global_rank(g, (rank + step) % size) for step in (-1, 1)]


def waited(z: Tensor, g: Any) -> Tensor:
    work = dist.all_reduce(z, group=g, async_op=True)
    work.wait()
    assert work.is_completed()
    return z


def strided(z: Tensor, g: Any) -> Tensor:
    z = z.transpose(1, 2).contiguous().transpose(1, 2)
    dist.all_reduce(z, group=g)
    return z


def cmplx(z: Tensor, g: Any) -> Tensor:
    z = torch.complex(z, z * 2)
    dist.all_reduce(z, group=g)
    return z.real + z.imag


def coalesced(z: Tensor, g: Any) -> Tensor:
    y = z * 3
    with _coalescing_manager(group=g):
        dist.all_reduce(z, group=g)
        dist.all_reduce(y, group=g)
    return z + y


def to_whole_buffers(z: Tensor, g: Any) -> Tensor:
    """Only the sender's tensor is a part: the others receive in a new one."""
    if g.rank() != 0:
        z = torch.empty(z.shape, dtype=z.dtype)
    dist.broadcast(z, first(g), group=g)
    return z


def reduced(z: Tensor, g: Any) -> Tensor:
    dist.reduce(z, first(g), group=g)
    return z if g.rank() == 0 else z * 0


def listed(make: Callable[[Tensor], Tensor], shift: int = 0) -> Any:
    def run(z: Tensor, g: Any) -> Tensor:
        found = [make(z) for _ in range(g.size())]
        dist.all_gather(found, z.roll(shift, 1), group=g)
        return sum(i * x for i, x in enumerate(found, 1))  # type: ignore[return-value]

    return run


def stacked(z: Tensor, g: Any) -> Tensor:
    out = z.new_zeros(g.size() * z.size(0), *z.shape[1:])
    dist.all_gather_into_tensor(out, z, group=g)
    return out[: z.size(0)] - 2 * out[-z.size(0) :]


def gathered(z: Tensor, g: Any) -> Tensor:
    out = [torch.empty_like(z) for _ in range(g.size())] if g.rank() == 0 else None
    dist.gather(z, out, first(g), group=g)
    return z if out is None else out[0] - 2 * out[-1]


def scattered(z: Tensor, g: Any) -> Tensor:
    out = torch.empty_like(z)
    dist.scatter(out, [z * i for i in range(1, g.size() + 1)] if g.rank() == 0 else None, first(g), group=g)
    return out


def reduce_scattered(z: Tensor, g: Any) -> Tensor:
    out = torch.empty_like(z)
    dist.reduce_scatter_tensor(out, torch.cat([z * i for i in range(1, g.size() + 1)]), group=g)
    return out


def exchanged(z: Tensor, g: Any) -> Tensor:
    """Rows, of which ranks send different numbers."""
    rows = torch.cat([z.flatten(0, 1)] * g.size())
    count = z.size(0) * z.size(1)
    sizes = [count + (1 if g.rank() == 0 else -1)] + [count] * (g.size() - 2)
    sizes.append(count * g.size() - sum(sizes))
    sizes = [count] * g.size() if g.size() > 2 else [[count - 1, count + 1], [count - 1, count + 1]][g.rank()]
    out_sizes = sizes if g.size() > 2 else [sizes[g.rank()]] * 2
    out = rows.new_empty(sum(out_sizes), rows.size(1))
    dist.all_to_all_single(out, rows, out_sizes, sizes, group=g)
    return z + out.sum(0)


def sent(z: Tensor, g: Any) -> Tensor:
    before, after = others(g)
    out = torch.zeros_like(z)
    works = [dist.irecv(out, before, group=g), dist.isend(z, after, group=g)]
    for work in works:
        work.wait()
    return out


def batched(z: Tensor, g: Any) -> Tensor:
    before, after = others(g)
    out = torch.zeros(z.shape, dtype=z.dtype)  # a whole tensor
    operations = [dist.P2POp(dist.isend, z, after, g), dist.P2POp(dist.irecv, out, before, g)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return out


def objects(z: Tensor, g: Any) -> Tensor:
    found: list[Any] = [None] * g.size()
    dist.all_gather_object(found, {"z": z, "sum": float(z.sum())}, group=g)
    return z * found[0]["sum"] + found[-1]["z"]


def number(z: Tensor, g: Any) -> Tensor:
    found: list[Any] = [None] * g.size()
    dist.all_gather_object(found, z.sum().item(), group=g)
    return z * found[0] - found[-1]


def norm(z: Tensor, g: Any) -> Tensor:
    squares = z.square().sum(-1, keepdim=True)
    dist.all_reduce(squares, group=g)
    return z * squares.rsqrt()


def piece(z: Tensor, g: Any) -> Tensor:
    """Tokens that lie on some of the ranks only."""
    a, b = z.split([2, 10], 1)
    a = a + 1
    before = a * 2
    dist.all_reduce(a, group=g)
    return torch.cat([a * 3 + before, b], 1)


def inplace(run: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Tensor]:
    def change(z: Tensor, g: Any) -> Tensor:
        run(z, g)
        return z

    return change


APART: dict[str, Callable[[Tensor, Any], Tensor]] = {  # over other ranks than those of the sequence alone
    "reduce": reduced,
    "gather": gathered,
    "scatter": scattered,
    "reduce_scatter_tensor": reduce_scattered,
    "all_to_all_single": exchanged,
    "functional reduce_scatter": lambda z, g: functional.reduce_scatter_tensor(
        torch.cat([z] * g.size()), "sum", 0, g
    ),
    "send": sent,
    "batch_isend_irecv": batched,
    "broadcast to whole buffers": to_whole_buffers,
    "objects": objects,
}
CASES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": inplace(lambda z, g: dist.all_reduce(z, group=g)),
    "all_reduce MAX": inplace(lambda z, g: dist.all_reduce(z, dist.ReduceOp.MAX, group=g)),
    "all_reduce of data": inplace(lambda z, g: dist.all_reduce(z.data, group=g)),
    "all_reduce of detach": inplace(lambda z, g: dist.all_reduce(z.detach(), group=g)),
    "all_reduce async": waited,
    "all_reduce strided": strided,
    "all_reduce complex": cmplx,
    "all_reduce coalesced": inplace(lambda z, g: dist.all_reduce_coalesced([z], group=g)),
    "all_reduce of a piece": piece,
    "all_reduce of a sum": lambda z, g: z * inplace(lambda y, g: dist.all_reduce(y, group=g))(z.sum(), g),
    "all_reduce of a norm": norm,
    "coalescing manager": coalesced,
    "allreduce": inplace(lambda z, g: g.allreduce([z]).wait()),
    "allreduce, a tensor": inplace(lambda z, g: g.allreduce(z, dist.ReduceOp.SUM).wait()),
    "allreduce, by name": inplace(lambda z, g: g.allreduce(tensors=[z]).wait()),
    "broadcast": inplace(lambda z, g: dist.broadcast(z, first(g), group=g)),
    "all_gather to parts": listed(torch.empty_like),
    "all_gather to wholes": listed(lambda z: torch.empty(z.shape, dtype=z.dtype)),
    "all_gather of another part": listed(lambda z: torch.empty_like(z), 1),
    "all_gather_into_tensor": stacked,
    "all_gather_object": number,
    "functional all_reduce": lambda z, g: functional.all_reduce(z, "sum", g),
    "functional all_gather_tensor": lambda z, g: functional.all_gather_tensor(z, 0, g)[-2:],
    "functional broadcast": lambda z, g: functional.broadcast(z, 0, g) * 2,
    "operator all_reduce_": inplace(
        lambda z, g: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce_(z, "sum", g.group_name)
        )
    ),
}
GRADIENTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "nn.all_reduce": lambda z, g: differentiable.all_reduce(z, group=g),
    "functional all_reduce": lambda z, g: functional.all_reduce(z, "sum", g),
    "functional all_gather": lambda z, g: (
        functional.all_gather_tensor_autograd(z, 0, g).unflatten(0, (g.size(), -1)).sum(0)
    ),
}
APART_GRADIENTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "nn.reduce_scatter": lambda z, g: differentiable.reduce_scatter(
        torch.empty_like(z), [z * i for i in range(g.size())], group=g
    ),
    "nn.all_to_all_single": lambda z, g: differentiable.all_to_all_single(
        torch.empty(z.shape, dtype=z.dtype), z, group=g
    ),
    "functional reduce_scatter_tensor": lambda z, g: functional.reduce_scatter_tensor_autograd(
        torch.cat([z] * g.size()), "sum", 0, g
    ),
}


PAIRS = [("tokens", "tokens"), ("features", "features"), ("uneven", "uneven")]


def groups() -> tuple[DeviceMesh, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    return mesh, {"tp": mesh.get_group("tp"), "cp": mesh.get_group("cp"), "world": dist.group.WORLD}


def check_collectives(rank: int, world: int, _: Any) -> None:
    warnings.simplefilter("ignore")
    mesh, over = groups()
    factor = 1.0 + mesh.get_local_rank("tp")
    for which, g in over.items():
        cases = CASES | (APART if which == "tp" else {})
        differentiable = GRADIENTS | (APART_GRADIENTS if which == "tp" else {})
        for name, function in [*cases.items(), *differentiable.items()]:
            has_gradient = differentiable.get(name) is function

            def run(x: Tensor, y: Tensor, *_: Any, f: Any = function, g: Any = g) -> Tensor:
                z = (x * factor).sin() + y
                return x * f(z if has_gradient else z.detach(), g)  # noqa: B023 - it runs at once

            for pair in PAIRS if which == "tp" else PAIRS[:1]:
                assert compare(over["cp"], run, pair, Inputs(3)) is None, (which, name, pair)


def test_collectives_do_what_unsharded_ranks_would(ranks: Ranks) -> None:
    ranks(4, check_collectives)


# ---- what is refused, and reported ----


DIFFERS = "gives ranks that share a sharded sequence different results"
REFUSED: dict[str, tuple[Callable[[Tensor, Any], Any], str]] = {
    "reduce": (reduced, f"reduce at .*{DIFFERS}; communicate outside"),
    "reduce_scatter_tensor": (reduce_scattered, DIFFERS),
    "all_to_all_single": (lambda z, g: dist.all_to_all_single(torch.empty_like(z), z, group=g), DIFFERS),
    "send": (sent, DIFFERS),
    "functional": (APART["functional reduce_scatter"], DIFFERS),
    "nn": (APART_GRADIENTS["nn.all_to_all_single"], f"_AlltoAllSingle .*{DIFFERS}"),
    "objects": (objects, "pickling at .* sends a sharded tensor to ranks that share it"),
    "a backend": (
        lambda z, g: g._get_backend(torch.device("cpu")).allreduce([z]),
        "ProcessGroupGloo.allreduce at .* gets a sharded tensor",
    ),
    "an operator": (
        lambda z, g: torch.ops.c10d.send([z], g.boxed(), 0, 0),
        "c10d.send at .* does not say whether it changes a sharded tensor",
    ),
}


def check_refused(rank: int, world: int, _: Any) -> None:
    warnings.simplefilter("ignore")
    _, over = groups()
    for name, (function, text) in REFUSED.items():
        with pytest.raises(RuntimeError, match=rf"(?s){text}.*") as error:
            viewed(over["cp"], lambda _, x, f=function: f(x, over["cp"]))
        assert "test_view_collectives.py:" in str(error.value), name
    with pytest.raises(RuntimeError, match=r"broadcast at .* sends whole tensors, and would run whole"):
        viewed(over["cp"], in_block(lambda x: dist.broadcast(x, first(over["tp"]), over["tp"])), strict=True)

    def local(view: Any, x: Tensor) -> None:
        dist.all_reduce(x, group=over["tp"])
        assert not view.report.functions  # nothing was gathered

    viewed(over["cp"], local, strict=True)


def in_block(run: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], None]:
    def block(view: Any, x: Tensor) -> None:
        view.blocks += 1
        run(x)

    return block


def test_what_would_differ_between_ranks_of_a_sequence_is_refused(ranks: Ranks) -> None:
    ranks(4, check_refused)


def check_stale(rank: int, world: int, _: Any) -> None:
    """Collectives change tensors in place, which is followed as changes by torch's functions are."""
    _, over = groups()

    def change(view: Any, x: Tensor) -> Tensor:
        y = x[:, 2:5]  # a copy here
        dist.all_reduce(x, group=over["tp"])
        return y + 1

    with pytest.raises(RuntimeError, match="that was changed in place through another one"):
        viewed(over["cp"], change)


def test_what_a_collective_changes_is_followed(ranks: Ranks) -> None:
    ranks(4, check_stale)


def test_all_methods_that_take_tensors_are_known() -> None:
    """Each method of torch's ProcessGroup is classified; one that is not refuses parts."""
    assert {name for owner, name, _ in _methods() if owner is dist.ProcessGroup} <= _KNOWN
