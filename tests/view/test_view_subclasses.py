# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses in a view: tensor parallelism by DTensors is right, and others meet whole tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.view_cases import Inputs, compare, viewed
from helpers.wrapped import Wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import spar

pytestmark = pytest.mark.one_transport

POOL = (4,)
LENGTH, WIDTH = 11, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def plan(of: str) -> dict[str, Any]:
    """Return how each linear layer is divided: activations are local tensors between them, or DTensors."""
    found: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    found |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    if of == "DTensors":
        last = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        to_whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        found |= {"n1": SequenceParallel(), "n2": SequenceParallel(), "attention": to_whole}
        found |= {"attention.o": last, "down": last, "up": ColwiseParallel(input_layouts=Shard(1))}
    return found


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(name: Any, found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, 1e-9, 1e-9), (name, (found - expected).abs().max())


def check_tensor_parallel(rank: int, world: int, _: Any) -> None:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    reference = model()
    expected = reference(x)
    expected.square().mean().backward()
    for sizes, of, is_first in (
        ((2, 2), "tensors", True),
        ((2, 2), "tensors", False),
        ((2, 2), "DTensors", True),
        ((4, 1), "tensors", True),
    ):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("cp", "tp"))
        cp, tp, mine = mesh["cp"], mesh["tp"], model()
        shards = [
            lambda m=mine, g=cp: spar.parallelize(m, g),
            lambda m=mine, g=tp, p=of: [parallelize_module(block, g, plan(p)) for block in m.layers],
        ]
        for shard in reversed(shards) if is_first else shards:
            shard()
        given = x if of == "tensors" else DTensor.from_local(x, tp, [Replicate()])
        out = full(mine(given))
        same((sizes, of), out, expected)
        out.square().mean().backward()
        for (name, p), other in zip(mine.named_parameters(), reference.parameters(), strict=True):
            gradient = full(p.grad).clone()
            dist.all_reduce(gradient, group=cp.get_group())
            same((sizes, of, name), gradient / cp.size(), other.grad)
        with torch.no_grad():
            same((sizes, of, "no gradients"), full(mine(given)), expected)


def test_tensor_parallel_models_are_exact(ranks: Ranks) -> None:
    ranks(4, check_tensor_parallel)


def check_fsdp(rank: int, world: int, _: Any) -> None:
    """FSDP2's hooks return the parts that they get."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    reference, mine = model(), model()
    expected = reference(x)
    expected.square().mean().backward()
    mesh = init_device_mesh("cpu", (4,))
    report = spar.parallelize(mine, mesh)
    for block in mine.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(mine, mesh=mesh)
    out = mine(x)
    assert report.share < 0.5
    same("FSDP2", out, expected)
    out.square().mean().backward()
    for (name, p), other in zip(mine.named_parameters(), reference.named_parameters(), strict=True):
        same(name, full(p.grad), other[1].grad)


def test_fsdp2_beside_a_view_is_exact(ranks: Ranks) -> None:
    ranks(4, check_fsdp)


# ---- torch's functions of DTensors of parts ----


def mesh_of(name: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))[name]


def scaled_in_place(d: DTensor) -> DTensor:
    d = d * 1
    d.mul_(2)
    return d


def halves(d: DTensor) -> DTensor:
    return torch.cat([d[:, :3] * 2, d[:, 3:]], 1)


FUNCTIONS: dict[str, Callable[[DTensor], Any]] = {  # of [B, N, D]
    "by element": lambda d: d.sin() * 2 + d,
    "mean of tokens": lambda d: d - d.mean(1, keepdim=True),
    "cumsum of tokens": lambda d: d.cumsum(1),
    "flip of tokens": lambda d: d.flip(1),
    "pieces": halves,
    "norm": lambda d: F.layer_norm(d, (6,)),
    "views": lambda d: d.unflatten(-1, (3, 2)).transpose(1, 2).transpose(1, 2).flatten(2),
    "in place": scaled_in_place,
    "divided samples": lambda d: d.redistribute(placements=[Shard(0)]).softmax(1),
    "divided tokens": lambda d: d.redistribute(placements=[Shard(1)]).relu() * 2,
    "asynchronous": lambda d: d.redistribute(placements=[Replicate()], async_op=True),
    "numbers": lambda d: d * d.size(1) + d.numel(),
}


def check_functions(rank: int, world: int, _: Any) -> None:
    warnings.simplefilter("ignore")
    tp, cp = mesh_of("tp"), mesh_of("cp").get_group()
    kinds: dict[str, Callable[[Tensor], DTensor]] = {
        "copies": lambda x: DTensor.from_local(x, tp, [Replicate()]),
        "sums": lambda x: DTensor.from_local(x / 2, tp, [Partial()]),
        "shapes": lambda x: DTensor.from_local(
            x, tp, [Replicate()], shape=x.shape, stride=torch.empty(x.shape, device="meta").stride()
        ),
    }
    for kind, convert in kinds.items():
        for name, function in FUNCTIONS.items():

            def run(x: Tensor, y: Tensor, *_: Any, f: Any = function, convert: Any = convert) -> Tensor:
                out: Tensor = f(convert(x * y)).full_tensor() * y
                return out

            for pair in (("tokens", "tokens"), ("uneven", "tokens"))[: 2 if kind == "copies" else 1]:
                assert compare(cp, run, pair, Inputs(3), 1e-9) is None, (kind, name, pair)


def test_functions_of_dtensors_of_parts_are_exact(ranks: Ranks) -> None:
    ranks(4, check_functions)


# ---- what is refused of DTensors of parts ----


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "the tokens of a part": (
        lambda x: DTensor.from_local(x, mesh_of("tp"), [Shard(1)]),
        r"DTensor.from_local at .* divides dim 1, which is sharded, over other ranks; keep DTensors",
    ),
    "ranks of the sequence": (
        lambda x: DTensor.from_local(x, mesh_of("cp"), [Replicate()]),
        r"DTensor.from_local at .* is over ranks that share a sequence; take a mesh of other ranks",
    ),
    "shape": (
        lambda x: DTensor.from_local(x, mesh_of("tp"), [Replicate()], shape=(2, 6, 6), stride=(36, 6, 1)),
        r"DTensor.from_local at .* gets the shape \[2, 6, 6\], and a sharded tensor of 12 in dim 1; pass the",
    ),
    "shards of tokens": (
        lambda x: (
            DTensor.from_local(x, mesh_of("tp"), [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        ),
        r"DTensor.to_local at .* divides dim 1, which is sharded, over other ranks",
    ),
    "distribute_tensor": (
        lambda x: distribute_tensor(x, mesh_of("tp"), [Replicate()], src_data_rank=None) + 1,
        r"gets a DTensor that wraps a sharded tensor",
    ),
    "a wrapper": (
        lambda x: Wrapped(x) * 2,
        r"mul at .* gets a Wrapped that wraps a sharded tensor; convert whole",
    ),
    "as_subclass": (lambda x: torch.Tensor._make_subclass(Plain, x) * 2, "would be of this rank's part"),
}


class Plain(torch.Tensor):
    pass


def check_refused(rank: int, world: int, _: Any) -> None:
    cp = mesh_of("cp").get_group()
    for gradients in (True, False):
        for function, text in REFUSED.values():
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=text):
                viewed(cp, lambda _, x, f=function: f(x))


def test_what_would_lose_a_part_is_refused(ranks: Ranks) -> None:
    ranks(4, check_refused)


# ---- other subclasses ----


class ByFunction(torch.Tensor):
    """A weight that is scaled by the largest element of the other argument: of all tokens."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, w = args[0], args[1].as_subclass(torch.Tensor)
            return F.linear(x, w) / x.abs().amax()
        return super().__torch_function__(func, types, args, kwargs or {})


class ByDispatch(Wrapped):
    """The same below autograd."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.matmul.default):
            return func(args[0], args[1].held) / args[0].abs().amax()
        return super().__torch_dispatch__(func, types, args, kwargs)


def check_weights(rank: int, world: int, group: Any) -> None:
    warnings.simplefilter("ignore")
    for kind in (lambda w: w.detach().as_subclass(ByFunction), lambda w: ByDispatch(w.detach()), as_plain):

        def run(x: Tensor, y: Tensor, w: Tensor, *_: Any, kind: Any = kind) -> Tensor:
            return F.linear(x.detach(), kind(w)) * x + y

        for pair in (("tokens", "tokens"), ("features", "whole"), ("uneven", "tokens")):
            assert compare(group, run, pair, Inputs(3)) is None, pair


def as_plain(w: Tensor) -> Tensor:
    return w.detach().as_subclass(Plain)


def test_weights_that_compute_by_themselves_meet_whole_tensors(ranks: Ranks) -> None:
    ranks(3, check_weights)
