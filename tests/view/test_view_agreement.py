# SPDX-License-Identifier: Apache-2.0
"""A sharded model raises on all ranks that differ in inputs, parameters, code or random numbers."""

from __future__ import annotations

import random
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Ranks
from test_parallelize import Decoder, Group, batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spar
from spar import _C

pytestmark = pytest.mark.one_transport


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.function(x))
        return out


class Model(nn.Module):
    """Two layers of one shape, of which a forward may skip some."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(function), Layer(torch.sin)])

    def forward(self, x: Tensor, *rest: Any, skip: Any = lambda: None, scale: float = 1.0) -> Tensor:
        """rest: is not read."""
        skipped = skip()
        for i, layer in enumerate(self.layers):
            x = x if i == skipped else layer(x) * scale
        return x


def sharded(group: Group, function: Callable[[Tensor], Tensor] = torch.tanh, strict: bool = False) -> Model:
    model = Model(function)
    spar.parallelize(model, group, blocks=["layers.*"], strict=strict)
    return model


@contextmanager
def refused(kind: type[Exception], text: str) -> Iterator[None]:
    with pytest.raises(kind, match=text):
        yield


def ones(tokens: int = 8) -> Tensor:
    return torch.arange(16.0 * tokens).view(2, tokens, 8) / 100


def check_inputs(rank: int, world: int, group: Group) -> None:
    model, x = sharded(group), ones()
    with torch.no_grad():
        for _ in range(3):
            model(x)
        model(x * (1 + 1e-6 * rank))  # as another device rounds
        cases = {
            f"x is another value on rank {world - 1}": (lambda: model(x + (rank == world - 1))),
            r"x of shape \[2, 9, 8\], torch.float32 on cpu on rank 1, x of shape \[2, 8": (
                lambda: model(ones(8 + (rank == 1)))
            ),
            "scale 2.0 on rank 1, scale 1.0 on rank 0": (lambda: model(x, scale=1.0 + (rank == 1))),
            r"args\[2\] of shape \[2, 8, 8\], .* on rank 1": (lambda: model(x, x, *[x] * (rank == 1))),
            r"args\[1\] is another value on rank 1": (lambda: model(x, x + (rank == 1))),
            r"args\[1\]\['y'\] of shape .* on rank 1": (
                lambda: model(x, UserDict(y=x) if rank == 1 else None)
            ),
        }
        for text, call in cases.items():
            with refused(ValueError, text):
                call()
            model(x)
    decoder = Decoder()
    spar.parallelize(decoder, group)
    ids, _ = batch()
    for _ in range(2):
        decoder(ids)
    other = ids.clone()
    other[0, [2, 3]] += torch.tensor([rank, -rank])  # of the same sum
    with refused(ValueError, "ids is another value on rank 1; expected equal inputs.*DistributedSampler"):
        decoder(other)


@pytest.mark.parametrize("world", [2, 3])
def test_inputs_that_differ_in_any_forward_are_reported(ranks: Ranks, world: int) -> None:
    ranks(world, check_inputs)


def check_parameters(rank: int, world: int, group: Group) -> None:
    x, text = ones(), r"the parameter layers\.1\.linear\.bias is another value on rank 1.*load or broadcast"
    model = sharded(group)
    with torch.no_grad():
        model.layers[1].linear.bias[3] += rank
        with refused(ValueError, text):
            model(x)
        model.layers[1].linear.bias.allreduce = False  # as Megatron and DeepSpeed mark experts
        model(x)
    model = sharded(group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    with refused(ValueError, r"the parameter layers\.0\.linear\.weight .*average the gradients"):
        model(x)


def check_counts(rank: int, world: int, group: Group) -> None:
    """A rank that fails alone, before it compares, compares the parameters with its peers again."""
    x, model = ones(), sharded(group)
    model(x)
    with pytest.raises((RuntimeError, spar.MismatchError)):
        torch.func.vmap(model)(x[None]) if rank else model(x)
    for _ in range(4):
        model(x)
    with torch.no_grad():
        model.layers[0].linear.bias[0] += rank
    with refused(ValueError, r"the parameter layers\.0\.linear\.bias is another value on rank 1"):
        for _ in range(3):
            model(x)


def test_a_rank_that_failed_alone_compares_in_step_again(ranks: Ranks) -> None:
    ranks(2, check_counts)


def test_parameters_that_differ_or_drift_apart_are_reported(ranks: Ranks) -> None:
    ranks(2, check_parameters)


class Scale(nn.Module):
    """A block without parameters, which would tell it from others."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def check_code(rank: int, world: int, group: Group) -> None:
    x, model = ones(), sharded(group)
    model(x)
    text = r"(?s)in the hash of the code that ran: \w+ on rank 0; \w+ on rank 1; nothing was exchanged"
    scaled = Model()
    scaled.layers = nn.ModuleList([Scale(2.0), Scale(3.0)])
    spar.parallelize(scaled, group)
    with refused(spar.MismatchError, text):
        scaled(x, skip=lambda: rank)
    with refused(spar.MismatchError, rf"{text}.*forward, at its end on this rank, the ranks ran different"):
        model(x, skip=lambda: rank)
    random.seed(rank)
    with refused(spar.MismatchError, "in (the hash of the code|the state of Python's random)"):
        for _ in range(9):
            model(x, skip=lambda: random.randrange(2))
    attending = Decoder()
    spar.parallelize(attending, group)
    for _ in range(2):  # forward 3 compares no parameters
        attending(batch()[0])
    if rank:
        attending.layers = attending.layers[::-1]
    with refused(
        spar.MismatchError, rf"{text}.*at test_parallelize.py:\d+, in block layers\.\d on this rank"
    ):
        attending(batch()[0])
    handle = model.layers[0].register_forward_hook(lambda module, args, out: out * 2) if rank else None
    with refused(spar.MismatchError, text):
        model(x)
    if handle is not None:
        handle.remove()
    model(x)
    if rank:  # as for a log: it changes nothing
        model.layers[0].register_forward_hook(lambda module, args, out: (args[0].shape, out.dtype, None)[2])
    model(x)


def test_ranks_that_run_other_code_are_reported(ranks: Ranks) -> None:
    ranks(2, check_code)


LSTM, OWN = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True), torch.Generator()
for p in LSTM.parameters():  # the same in each process
    nn.init.constant_(p, 0.2)
TORCH, PYTHON, NUMPY = "torch's generators", "Python's random", "numpy.random"
numpy = pytest.importorskip("numpy")
DRAWN: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    (TORCH, lambda x: F.dropout(x, 0.5)),
    (TORCH, lambda x: LSTM(x)[0]),
    (TORCH, lambda x: torch.native_dropout(x, 0.5, True)[0]),
    (TORCH, lambda x: x * torch.distributions.Gamma(torch.ones(8), 1.0).sample()),
    (TORCH, lambda x: x * torch.binomial(torch.full((8,), 9.0), torch.full((8,), 0.5))),
    (TORCH, lambda x: F.rrelu_(x * 1, training=True)),
    (TORCH, lambda x: x + F.fractional_max_pool2d(x[None], 2, output_size=4).mean()),
    (TORCH, lambda x: checkpoint(lambda a: F.dropout(a, 0.5), x, use_reentrant=False)),
    (TORCH, lambda x: x * torch.rand(2, 8, 8, generator=OWN)),
    (PYTHON, lambda x: x * random.random()),
    (NUMPY, lambda x: x * float(numpy.random.rand())),
]


def seed(number: int) -> None:
    torch.manual_seed(number)
    OWN.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def check_generators(rank: int, world: int, group: Group) -> None:
    for which, function in DRAWN:
        model, whole, x = sharded(group, function), Model(function), ones()
        seed(0)
        y = model(x)
        y.square().mean().backward()
        seed(0)
        torch.testing.assert_close(y, whole(x))
        model, _ = sharded(group, function), seed(rank)
        with refused(spar.MismatchError, f"(?s)in the state of {which}: .* seed them alike on all ranks"):
            model(x)
    model = sharded(group, lambda x: x)
    seed(rank)
    model(x)  # nothing draws


def test_generators_that_differ_are_reported_whatever_draws(ranks: Ranks) -> None:
    ranks(2, check_generators)


def check_outside(rank: int, world: int, group: Group) -> None:
    model, x = sharded(group), ones()
    text = r"block layers\.0 runs outside of the sharded model's forward, and so whole on each rank; call"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.layers[1](model.layers[0](x))
    assert [each.filename for each in caught] == ([] if rank else [__file__])
    assert rank or re.match(text, str(caught[0].message))
    place = r"at test_view_agreement\.py:\d+ on rank \d of 2 "
    with refused(RuntimeError, text.replace("runs", place + "runs")):
        sharded(group, strict=True).layers[0](x)


def test_a_block_outside_of_its_view_warns_once_or_is_refused(ranks: Ranks) -> None:
    ranks(2, check_outside)


def check_written(rank: int, world: int, group: Group) -> None:
    for rows in (1, 2):
        for function in (
            torch.relu_,
            lambda x: x.add_(x.mean(-1, keepdim=True)),
            lambda x: x[..., :3].mul_(2),
        ):
            model, whole = sharded(group, lambda x, f=function: (f(x), x * 1)[1]), Model()
            whole.layers[0].function = lambda x, f=function: (f(x), x * 1)[1]
            a, b = ones()[:rows] - 0.3, ones()[:rows] - 0.3
            with torch.inference_mode(rows == 1):
                for _ in range(2):
                    torch.testing.assert_close(model(a), whole(b))
                    torch.testing.assert_close(a, b)


def test_a_caller_has_what_blocks_change_in_place_in_its_inputs(ranks: Ranks) -> None:
    ranks(2, check_written)


def test_words_are_compared_by_fields() -> None:
    mode = _C.Mode()
    mode._begin()
    first = mode.word
    mode._fold(2, 5)
    drew = mode.word
    assert first < 0 and drew < 0 and first != drew
    mode._fold(2, 6)
    assert _C.words_differ([drew, mode.word]) and _C.words_differ([first, 3])
    assert not _C.words_differ([first, 0, drew, first])  # a field that is not known equals any
    assert _C.words_differ([0, drew, first, mode.word])
    assert _C.words_differ([1, 0, 2]) and not _C.words_differ([0, 2, 2])
