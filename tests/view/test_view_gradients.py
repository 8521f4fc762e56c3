# SPDX-License-Identifier: Apache-2.0
"""Hooks and custom Functions that are not linear in the gradient: in a view they get that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import spar

pytestmark = pytest.mark.one_transport

WIDTH = 4
LIMIT = 0.01  # about the median of the gradients' elements: clamping to it changes them


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def limit(gradient: Tensor) -> None:
    gradient.clamp_(-LIMIT, LIMIT)


def mixed(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(1, keepdim=True) / 2


class Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return limited(gradient)


class Scaled(torch.autograd.Function):
    """Has two inputs, one of them whole, and two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return x * weight, x.sum(-1)

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sum: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_product, of_sum = limited(of_product), of_sum * of_sum.abs()
        return of_product * weight + of_sum[..., None], (of_product * x).sum((0, 1))


class Squared(torch.autograd.Function):
    """Has a default argument, and a context of its own; one output is not used."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
        return x * x * factor, x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_square: Tensor, of_other: Tensor | None) -> tuple[Tensor, None]:
        assert of_other is None
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * x * of_square, None


BOUND = Limited.apply  # as models bind it, before a view is there
# From torch 2.15 on each `apply` is in C.
IN_C = torch._C._FunctionBase.__dict__["apply"].__get__(None, Limited)
SQUARED_IN_C = torch._C._FunctionBase.__dict__["apply"].__get__(None, Squared)

Change = Callable[[Tensor, nn.Parameter], Tensor]


def hooked(*hooks: Any) -> Change:
    def change(x: Tensor, _: nn.Parameter) -> Tensor:
        for hook in hooks if x.requires_grad else ():  # a reentrant checkpoint runs first without gradients
            x.register_hook(hook)
        return x

    return change


def of_tokens_first(x: Tensor, _: nn.Parameter) -> Tensor:
    flat = x.transpose(0, 1).reshape(-1, WIDTH)
    if x.requires_grad:
        flat.register_hook(hook=limited)
    return flat.view(x.size(1), x.size(0), WIDTH).transpose(0, 1)


def of_a_piece(x: Tensor, _: nn.Parameter) -> Tensor:
    piece = hooked(mixed)(x[:, 1:6] * 2, _)
    return torch.cat([x[:, :1], piece, x[:, 6:]], 1)


def unhooked(x: Tensor, _: nn.Parameter) -> Tensor:
    if x.requires_grad:
        x.register_hook(limited).remove()
    return x


def of_several(x: Tensor, _: nn.Parameter) -> Tensor:
    y = x * 2
    if not x.requires_grad:
        return y + x.sin()
    seen: list[Tensor] = []

    def see(gradients: Any) -> None:
        seen[:] = [gradient.clone() for gradient in gradients]

    register_multi_grad_hook((x, y), see)

    def use(gradient: Tensor) -> Tensor:
        return gradient * sum(each.square().sum() for each in seen) if seen else gradient

    (z := x.sin()).register_hook(use)
    return y + z


def by_function(x: Tensor, _: nn.Parameter) -> Tensor:
    y: Tensor = Limited.apply(x)  # type: ignore[no-untyped-call]
    y += 1
    return y


def by_two(x: Tensor, weight: nn.Parameter) -> Tensor:
    product, total = Scaled.apply(x, weight)  # type: ignore[no-untyped-call]
    found: Tensor = product + total[..., None]
    return found


def by_reference(x: Tensor, _: nn.Parameter) -> Tensor:
    before: Tensor = BOUND(x)  # type: ignore[no-untyped-call]
    in_c: Tensor = IN_C(x)
    return before + in_c * 1


def by_one_of_two(x: Tensor, _: nn.Parameter) -> Tensor:
    square: Tensor = Squared.apply(x)[0] + SQUARED_IN_C(x, 2.0)[0]  # type: ignore[no-untyped-call]
    return square


CHANGES: dict[str, Change] = {
    "a hook": hooked(limited),
    "a hook in place": hooked(limit),
    "hooks": hooked(limited, mixed, limit),
    "a hook that returns nothing": hooked(lambda gradient: None),
    "a hook that was removed": unhooked,
    "a hook of another dim": of_tokens_first,
    "a hook of a piece": of_a_piece,
    "a hook of several": of_several,
    "a Function": by_function,
    "a Function of two": by_two,
    "a bound Function": by_reference,
    "a Function of which one output is used": by_one_of_two,
}


class Block(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change, self.before, self.behind = change, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.behind(self.change(self.before(x), self.weight).sigmoid())
        return out


class Model(nn.Module):
    """Calls `change` where tensors are whole, and `in_block` where they are parts."""

    def __init__(self, change: Change, in_block: Change, reenters: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.reenters = change, reenters
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(in_block) for _ in range(2)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(self.first(x), self.blocks[0].weight)  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x) if self.reenters is None else checkpoint(block, x, use_reentrant=self.reenters)
        return x


def gradients(model: Model, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    (out.square().sum() / 8 + out[:, 0].sum()).backward()
    return [each.grad for each in (x, *model.parameters()) if each.grad is not None]


def models(reenters: bool | None) -> Iterator[tuple[str, Callable[[], Model]]]:
    for name, change in CHANGES.items():
        yield name, lambda change=change: Model(hooked(), change, reenters)  # type: ignore[misc]
        yield f"{name}, whole", lambda change=change: Model(change, hooked(), reenters)  # type: ignore[misc]

    def with_hook() -> Model:
        model = Model(hooked(), hooked(), reenters)
        model.blocks[1].before.register_full_backward_hook(lambda _, of_input, __: (limited(of_input[0]),))
        model.blocks[0].behind.register_full_backward_pre_hook(lambda _, of_output: (limited(of_output[0]),))
        return model

    if reenters is None:  # checkpoints and hooks of modules do not go together in one process, either
        yield "a module's hooks", with_hook


def inputs(tokens: int) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def check_gradients(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for reenters in (None, False, True):
        for name, make in models(reenters):
            for tokens in (8, 7) if reenters is None else (7,):
                x = inputs(tokens)
                expected = gradients(make(), x)
                model = make()
                spar.parallelize(model, group, blocks=["blocks.*"])
                found = gradients(model, x)
                assert len(found) == len(expected)
                for own, one in zip(found, expected, strict=True):
                    dist.all_reduce(own, group=group)
                    torch.testing.assert_close(
                        own / world, one, rtol=1e-9, atol=1e-12, msg=f"{name} {tokens}"
                    )


@pytest.mark.filterwarnings("ignore:sharded Model")
def test_code_that_is_not_linear_gets_the_whole_gradient(ranks: Ranks) -> None:
    ranks(3, check_gradients)


def check_penalties(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """A penalty on the gradient of an input, as written for one process; its own gradients are averaged."""

    def penalty(model: Model, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = model(x * 1)
        (gradient,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        (gradient.square().sum() + out.square().mean()).backward()
        return [
            x for x in (gradient.detach(), x.grad, *[p.grad for p in model.parameters()]) if x is not None
        ]

    names = "a hook", "a Function", "a Function of two", "a bound Function", "a module's hooks"
    cases = dict(models(None))
    for name in (*names, *[f"{name}, whole" for name in names[:4]], "a Function of which one output is used"):
        expected = penalty(cases[name](), inputs(7))
        model = cases[name]()
        spar.parallelize(model, group, blocks=["blocks.*"])
        found = penalty(model, inputs(7))
        for i, (own, one) in enumerate(zip(found, expected, strict=True)):
            if i > 1:
                dist.all_reduce(own, group=group)
                own /= world
            torch.testing.assert_close(own, one, rtol=1e-9, atol=1e-12, msg=f"{name} {i}")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.filterwarnings("ignore:sharded Model")
def test_penalties_on_gradients_of_inputs_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_penalties)


def check_transforms(rank: int, world: int, group: dist.ProcessGroup) -> None:
    model, x = Model(hooked(), hooked(), None), inputs(7)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    spar.parallelize(model, group, blocks=["blocks.*"])
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.vjp(model, x),
        lambda: torch.func.vmap(lambda row: model(row[None])[0])(x),
        lambda: torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(weights),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=rf"Model at .* {rank} of 2 is sharded, and in a tr"):
            call()
    torch.testing.assert_close(torch.func.functional_call(model, weights, (x,)), model(x))


def test_transforms_of_torch_func_are_refused(ranks: Ranks) -> None:
    ranks(2, check_transforms)


def check_failing(rank: int, world: int, group: dist.ProcessGroup) -> None:
    def raised(gradient: Tensor) -> Tensor:
        assert list(gradient.shape) == [2, 8, WIDTH]
        if rank == 1:
            raise ZeroDivisionError("one rank alone")
        return gradient

    def of_other_shape(gradient: Tensor) -> Tensor:
        return gradient.mean(1, keepdim=True)

    x = inputs(8)
    model = Model(hooked(), hooked(raised), None)
    spar.parallelize(model, group, blocks=["blocks.*"])
    with pytest.raises((ZeroDivisionError, spar.MismatchError), match="one rank alone"):
        gradients(model, x)
    model = Model(hooked(), hooked(of_other_shape), None)
    spar.parallelize(model, group, blocks=["blocks.*"])
    with pytest.raises(
        RuntimeError, match=rf"rank {rank} of 2 returned .* \[2, 1, 4\]; expected \[2, 8, 4\]"
    ):
        gradients(model, x)
    model = Model(hooked(of_other_shape), hooked(), None)
    spar.parallelize(model, group, blocks=["blocks.*"])
    with pytest.raises(RuntimeError, match="hook 'of_other_shape' has changed the size"):  # torch's
        gradients(model, x)


def test_hooks_that_fail_are_reported(ranks: Ranks) -> None:
    ranks(2, check_failing)
