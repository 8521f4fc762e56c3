# SPDX-License-Identifier: Apache-2.0
"""Random programs that leave torch's functions, or write where a view has copies: right, or an error."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.view_cases import PAIRS, Inputs, compare
from helpers.view_programs import STEPS, Step, program
from spar._group.registry import place_of
from spar._model.part import Parts
from spar._model.view import View


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean()


class _Doubled(torch.autograd.Function):
    """It changes its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


_CENTRED, _DOUBLED = _Centred.apply, _Doubled.apply  # bound before any view


def _bound(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    if rng.random() < 0.3:
        _DOUBLED(x := x * 1)
        return x
    function: Any = rng.choice([_CENTRED, functools.partial(_CENTRED), lambda z: _Centred.apply(z)])
    out: Tensor = function(x)
    return out


def _collective(group: dist.ProcessGroup, rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    """Communicate with the ranks of the view itself, each of which has the whole where nothing is sharded."""
    z, world, kind = x.detach().contiguous() * 1, group.size(), rng.randrange(6)
    if kind == 0:
        dist.all_reduce(z, group=group)
    elif kind == 1:
        dist.broadcast(z.data, dist.get_global_rank(group, 0), group=group)
    elif kind == 2:
        dist.all_reduce(z, group=group, async_op=True).wait()  # type: ignore[union-attr]
    elif kind == 3:
        pieces = [torch.empty_like(z) for _ in range(world)]
        dist.all_gather(pieces, z, group=group)
        z = pieces[-1] - pieces[0] / 2
    elif kind == 4:
        out = z.new_empty(world * z.size(0), *z.shape[1:])
        dist.all_gather_into_tensor(out, z, group=group)
        z = out[: z.size(0)] * 2
    else:
        z = differentiable.all_reduce(z, group=group)  # type: ignore[no-untyped-call]
    return x + z


def _shared(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    """Change what shares memory in one process."""
    z = x.detach() * 1
    view = rng.choice(
        [
            lambda: torch.broadcast_tensors(z)[0],
            lambda: torch.atleast_3d(z),
            lambda: torch.as_tensor(z),
            lambda: torch.linalg.diagonal(z) if z.dim() > 1 else z,
            lambda: F.alpha_dropout(z, 0.5, False),
            lambda: F.dropout(z, 0.5, False),
            lambda: z.sum_to_size(z.shape),
            lambda: z.view(-1)[1:],
            lambda: z.reshape(-1, 1)[:, 0],
            lambda: z.unbind(rng.randrange(z.dim()))[0],
            lambda: z.data,
        ]
    )()
    view.mul_(2)
    return x + z


def _numpy(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    z = x.detach() * 1
    array = z.numpy() if rng.random() < 0.5 else z.__array__()
    if rng.random() < 0.5:
        array[..., 0] = 0
        return x + z
    return x + torch.from_numpy(array * 2)


def _other_names(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    axis = rng.randrange(-x.dim(), x.dim())
    return rng.choice(
        [
            lambda: x.sum(axis=axis, keepdims=True),
            lambda: x - x.mean(axis=axis, keepdims=True),
            lambda: torch.sum(a=x, axis=axis),
            lambda: torch.softmax(x=x, dim=axis),
            lambda: torch.cat(tensors=[x, x], axis=axis),
            lambda: x.unsqueeze(axis=axis) if x.dim() < 5 else x,
            lambda: x.chunk(2, axis=axis)[0],
            lambda: x.select(axis=axis, index=0),
            lambda: x.var(axis=axis, keepdims=True, correction=0),
            lambda: torch.mul(x1=x, x2=2),
        ]
    )()


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _modes(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    """Run steps under a dispatch mode, or in a selective checkpoint."""
    steps = [rng.choice(STEPS[:16]) for _ in range(2)]
    seed = rng.randrange(1000)

    def run(z: Tensor) -> Tensor:
        inner = random.Random(seed)
        for step in steps:
            z = step(inner, z, z) if z.dim() else z
        return z

    if rng.random() < 0.5:
        with _Names():
            return run(x)

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = "mm" in str(function)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out: Tensor = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    return out


class _Named(Tensor):
    """A subclass without a dispatch of its own."""


def _subclass(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    if rng.random() < 0.5:
        return (x.as_subclass(_Named) * 2).as_subclass(Tensor)
    weight = torch.linspace(-1, 1, x.size(-1) ** 2, dtype=x.dtype).view(x.size(-1), -1).as_subclass(_Named)
    return F.linear(x, weight).as_subclass(Tensor)


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return x.mul_(2)


def _script(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    z = x.detach() * 1
    _scripted(z)
    return x + z


HOSTILE: list[Step] = [
    _bound,
    _bound,
    _shared,
    _shared,
    _numpy,
    _other_names,
    _other_names,
    _modes,
    _subclass,
    _script,
]


def outcome(seed: int, group: dist.ProcessGroup) -> tuple[str, str]:
    """Run a hostile program on two batches: return "right", "refused" or "wrong", and what was said."""
    pair = PAIRS[seed % len(PAIRS)]
    place = place_of(group)
    view = View(Parts(group, place.world, place.rank))
    function = program(seed, 6, [*HOSTILE, *[functools.partial(_collective, group)] * 2])
    for batch in (seed, seed + 1):
        inputs = Inputs(batch)
        try:
            function(*inputs.leaves(), inputs.ids, inputs.mask)
        except Exception:
            return "right", "fails in one process"  # which compare runs before the parts
        try:
            problem = compare(group, function, pair, inputs, 1e-7, view=view)
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}"
        if problem:
            return "wrong", f"program {seed} of {pair}: {problem}"
    return "right", ""
