# SPDX-License-Identifier: Apache-2.0
"""mean_loss, and each factor of docs/gradients.md, against the loss and the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.processes import finish, start
from helpers.reference import cells
from test_gradients import WRAPPERS, Model, P, Setting, ddp, errors, expected_gradients, fsdp2, table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import spar

Group = dist.ProcessGroup
NONE = "none is right"
Loss = Callable[[Tensor], Tensor]  # of a weight: this rank's sum of losses


# ---- the table of docs/gradients.md ----


def check_factors(rank: int, folder: Path) -> None:
    setting = Setting(rank, 11)
    rows = table("Which factor")
    assert len(rows) == 6
    for loss, *factors in rows:
        for wrap, factor in zip(WRAPPERS, factors, strict=True):
            model, gradients = wrap(Model(setting.seq))
            names = {"W": setting.W, "P": P, "tokens": int(setting.tokens)}
            scale = 1.0 if factor == NONE else float(eval(factor, names))
            (setting.loss(model, loss) * scale).backward()  # type: ignore[no-untyped-call]
            if factor == NONE:
                assert best_fit(gradients(), setting.expected) > 0.01, (loss, wrap.__name__)
            else:
                apart = errors(gradients(), setting.expected)
                assert max(apart) < 1e-12, (loss, wrap.__name__, factor, apart)
    dist.barrier()


def best_fit(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error that the best factor leaves."""
    own, one = (torch.cat([x.flatten() for x in tensors]) for tensors in (found, expected))
    factor = (own @ one) / (own @ own)
    return max(errors([x * factor for x in found], expected))


@pytest.mark.parametrize("world", [2, 4])
def test_loss_factors_match_one_process(tmp_path: Path, world: int) -> None:
    assert finish(start(check_factors, world, tmp_path, set_up=False), 200) == [0] * world


def check_mesh(rank: int, folder: Path) -> None:
    """Two copies of a sequence group of 2: FSDP2 over dp x cp, and DDP with a mean per copy."""
    setting = Setting(rank, 11)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    own = "mean_loss(losses.sum(), own, world, averaged_by=mesh)"
    for over, averaged_by in ((None, mesh), (mesh, mesh), (mesh, dist.group.WORLD)):
        model, gradients = fsdp2(Model(setting.seq), over)  # of 2 dims: HSDP
        setting.loss(model, own, mesh=averaged_by).backward()  # type: ignore[no-untyped-call]
        apart = errors(gradients(), setting.expected)
        assert max(apart) < 1e-12, (over, apart)
    alone = [dist.new_group([other]) for other in range(4)][rank]
    copies = [expected_gradients(11, [data], alone) for data in setting.data]
    mean_of_means = [sum(parts) / 2 for parts in zip(*copies, strict=True)]
    model, gradients = ddp(Model(setting.seq))
    cp = (mesh, "cp")
    per_copy = "mean_loss(losses.sum(), own, cp, averaged_by=cp)"
    setting.loss(model, per_copy, cp=cp).backward()  # type: ignore[no-untyped-call]
    found = gradients()
    assert max(errors(found, mean_of_means)) < 1e-12  # type: ignore[arg-type]
    assert max(errors(found, setting.expected)) > 0.01
    dist.barrier()


def test_dp_and_cp_mesh_matches_one_process(tmp_path: Path) -> None:
    assert finish(start(check_mesh, 4, tmp_path, set_up=False), 200) == [0] * 4


def check_accumulation(rank: int, folder: Path) -> None:
    """Two micro-batches of different numbers of tokens, under DDP, FSDP2 and a sum."""
    setting = Setting(rank, 11)
    first, second = setting.x, setting.x.flip(1)
    short = setting.labels.clone()
    short[:, 2:] = -100  # the second rank has no tokens in this one
    batches = [(first, setting.labels), (second, short)]
    alone = [dist.new_group([other]) for other in range(2)][rank]
    expected = expected_gradients(11, batches, alone)
    own = sum((spar.split_forward_gather_backward(y, setting.group, 1) != -100).sum() for _, y in batches)
    for wrap in WRAPPERS:
        model, gradients = wrap(Model(setting.seq))
        averaged_by = None if wrap is WRAPPERS[2] else dist.group.WORLD
        values = []
        for x, labels in batches:
            losses = model(x, labels, setting.group)
            values.append(spar.mean_loss(losses.sum(), own, averaged_by=averaged_by))
            values[-1].backward()  # type: ignore[no-untyped-call]
        apart = errors(gradients(), expected)
        assert max(apart) < 1e-12, (wrap.__name__, apart)
    dist.barrier()


def test_gradient_accumulation_matches_one_process(tmp_path: Path) -> None:
    assert finish(start(check_accumulation, 2, tmp_path, set_up=False), 100) == [0, 0]


# ---- values ----


def check_values(rank: int, world: int, group: Group) -> None:
    counts = [0 if p == 1 else 3 + p for p in range(world)]  # rank 1 has no tokens
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        sums = [(cells((1,), kind, salt=p)[0] * (count > 0)) for p, count in enumerate(counts)]
        exact = sum(s.double() for s in sums) / sum(counts)
        for count in (
            counts[rank],
            float(counts[rank]),
            torch.tensor(counts[rank]),
            torch.tensor(counts[rank] / 1),
        ):
            for averaged_by, factor in ((None, 1), (group, world), (dist.group.WORLD, dist.get_world_size())):
                own = sums[rank].clone().requires_grad_()
                value = spar.mean_loss(own, count, group, averaged_by=averaged_by)
                assert value.dtype == torch.promote_types(kind, torch.float32)
                assert value.item() == exact.to(value.dtype).item() and value.dim() == 0
                (grad,) = torch.autograd.grad(value, own)
                expected = torch.tensor(factor / sum(counts), dtype=torch.float64)
                torch.testing.assert_close(grad, expected.to(kind))
                with torch.no_grad():
                    assert spar.mean_loss(own, count, group, averaged_by=averaged_by).equal(value)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_value_and_gradient(ranks: Ranks, world: int) -> None:
    ranks(world, check_values)


def check_limits(rank: int, world: int, group: Group) -> None:
    for count in (0, torch.tensor(0.0)):
        loss = torch.tensor(5.0, requires_grad=True)
        value = spar.mean_loss(loss, count, group)
        value.backward()  # type: ignore[no-untyped-call]
        assert value.item() == 0 and loss.grad is not None and loss.grad.item() == 0
    many = 2**53 // world - 1  # no float32 has this value
    own = spar.mean_loss(torch.tensor(float(many * world), dtype=torch.float64), many, group)
    assert own.item() == world
    for huge in (2**80, 2.0**80):
        assert spar.mean_loss(torch.tensor(2.0**80), huge, group).item() == 1
    assert spar.mean_loss(torch.tensor(float("inf") if rank else 1.0), 2, group).item() == float("inf")


def test_no_tokens_and_2_to_the_53_tokens(ranks: Ranks) -> None:
    ranks(2, check_limits)


# ---- in torch ----


def sums(rank: int, group: Group) -> Loss:
    """Return a loss in which each rank's value depends on every rank's tokens."""
    x = cells((rank + 2, 3), torch.float64) + rank

    def function(weight: Tensor) -> Tensor:
        keys = spar.all_gather((x @ weight).tanh(), group, 0, [p + 2 for p in range(group.size())])
        return ((x @ weight) @ keys.T).square().sum()

    return function


def summed(grad: Tensor, group: Group) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


def check_in_torch(rank: int, world: int, group: Group) -> None:
    """Compare compiled, checkpointed and autocast losses with plain ones."""
    function, weight = sums(rank, group), cells((3, 2), torch.float64).requires_grad_()

    def mean(weight: Tensor, count: int) -> Tensor:
        return spar.mean_loss(function(weight), count, group, averaged_by=group)

    expected = {count: torch.autograd.grad(mean(weight, count), weight)[0] for count in (3, 4, 6, 7)}
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = torch.compile(mean, fullgraph=True, backend="aot_eager")
    forms: dict[str, Callable[[Tensor, int], Tensor]] = {"compiled": compiled}
    for reentrant in (True, False):
        forms[f"checkpoint, reentrant={reentrant}"] = lambda w, n, how=reentrant: checkpoint(  # type: ignore
            mean, w, n, use_reentrant=how
        )
    for name, form in forms.items():
        for count, gradient in expected.items():
            (found,) = torch.autograd.grad(form(weight, count), weight) if "True" not in name else (None,)
            if found is None:  # reentrant checkpoints support backward only
                weight.grad = None
                form(weight, count).backward()  # type: ignore[no-untyped-call]
                found = weight.grad
            torch.testing.assert_close(found, gradient, msg=lambda text, name=name: f"{name}: {text}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2
    by_mesh = torch.compile(
        lambda loss, mesh: spar.mean_loss(loss, 2, group, averaged_by=mesh),
        fullgraph=True,
        backend="aot_eager",
    )
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    loss = torch.ones((), requires_grad=True)
    (found,) = torch.autograd.grad(by_mesh(loss, mesh), loss)
    assert found.item() == dist.get_world_size() / (2 * world)
    with torch.autocast("cpu", torch.bfloat16):
        short = weight.detach().float().requires_grad_()
        value = spar.mean_loss(torch.mm(short, short.T).sum(), 3, group)
        assert value.dtype == torch.float32
    (grad,) = torch.autograd.grad(value, short)
    exact = torch.mm(short.bfloat16(), short.bfloat16().T).sum() / 3
    torch.testing.assert_close(value, exact.float(), rtol=1e-2, atol=1e-2)
    assert grad.dtype == torch.float32


@pytest.mark.compiler
def test_compile_checkpoint_and_autocast(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]
    pool(2, check_in_torch, timeout=280)


def check_double_backward(rank: int, world: int, group: Group) -> None:
    """Penalize the gradient of each rank's tokens, for a loss that is not linear in the mean."""

    def whole(weight: Tensor, x: Tensor) -> Tensor:
        y = x @ weight
        return (y @ y.tanh().T).square().sum()

    sizes = [p + 2 for p in range(world)]
    tokens = cells((sum(sizes), 3), torch.float64) / 7
    weight = (cells((3, 2), torch.float64, salt=1) / 5).requires_grad_()
    x = tokens.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((whole(weight, x) / len(x)).square(), x, create_graph=True)
    penalty = gradient.square().sum()
    (expected,) = torch.autograd.grad(penalty, weight)

    own = tokens.split(sizes)[rank].clone().requires_grad_()
    y = own @ weight
    mean = spar.mean_loss((y @ spar.all_gather(y.tanh(), group, 0, sizes).T).square().sum(), len(own), group)
    (found,) = torch.autograd.grad(mean.square(), own, create_graph=True)
    torch.testing.assert_close(found, gradient.split(sizes)[rank])
    (second,) = torch.autograd.grad(found.square().sum(), weight)
    torch.testing.assert_close(summed(second, group), expected)


def test_double_backward_matches_one_process(ranks: Ranks) -> None:
    ranks(3, check_double_backward)


# ---- errors ----

WRONG: dict[str, tuple[Callable[[Group], Any], type[Exception], str]] = {
    "tokens": (
        lambda group: spar.mean_loss(torch.ones(4), 4, group),
        ValueError,
        r"mean_loss on rank 1 of 2: loss_sum is of shape \[4\]; expected a 0-dim tensor",
    ),
    "number": (lambda group: spar.mean_loss(0.0, 4, group), TypeError, "loss_sum is a float"),  # type: ignore
    "ints": (lambda group: spar.mean_loss(torch.tensor(1), 4, group), TypeError, "a tensor of torch.int64"),
    "negative": (lambda group: spar.mean_loss(torch.ones(()), -1, group), ValueError, "count is -1"),
    "infinite": (
        lambda group: spar.mean_loss(torch.ones(()), float("inf"), group),
        ValueError,
        "count is inf; expected at least 0, and finite",
    ),
    "not a number": (
        lambda group: spar.mean_loss(torch.ones(()), float("nan"), group),
        ValueError,
        "count is nan; expected at least 0, and finite",
    ),
    "beyond a float": (
        lambda group: spar.mean_loss(torch.ones(()), 2**2000, group),
        ValueError,
        "count is an int beyond a float's range; expected at least 0, and finite",
    ),
    "string": (lambda group: spar.mean_loss(torch.ones(()), "4", group), TypeError, "count is '4'"),  # type: ignore
    "mask": (
        lambda group: spar.mean_loss(torch.ones(()), torch.ones(3, dtype=torch.bool), group),
        ValueError,
        r"count is of shape \[3\]",
    ),
    "bool": (
        lambda group: spar.mean_loss(torch.ones(()), torch.tensor(True), group),
        TypeError,
        "count is a tensor of torch.bool",
    ),
    "averaged": (
        lambda group: spar.mean_loss(torch.ones(()), 4, group, averaged_by=2),  # type: ignore
        TypeError,
        "is 2 ",
    ),
}


def check_error(rank: int, world: int, group: Group, case: str) -> None:
    wrong, error, text = WRONG[case]
    if rank == 1:
        with pytest.raises(error, match=text):
            wrong(group)
    else:
        with pytest.raises(spar.MismatchError, match="rank 1"):
            spar.mean_loss(torch.ones(()), 4, group)
    assert spar.mean_loss(torch.ones(()), 1, group).item() == 1  # the group stays usable


@pytest.mark.parametrize("case", WRONG)
def test_error_is_reported_to_peers(ranks: Ranks, case: str) -> None:
    ranks(2, check_error, case)
