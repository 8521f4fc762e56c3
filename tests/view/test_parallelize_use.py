# SPDX-License-Identifier: Apache-2.0
"""spar.parallelize in use: restored models, named blocks, streams, reports and errors."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from conftest import Ranks
from test_parallelize import WIDTH, Block, Decoder, Group, batch, check_gradients, close
from torch import Tensor, nn

import spar

pytestmark = pytest.mark.one_transport


# Exchanges over each transport are tested by other modules.
def check_restored(rank: int, world: int, group: Group) -> None:
    model = Decoder()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    spar.parallelize(model, group)
    model(*batch())
    copied = copy.deepcopy(model)
    spar.unparallelize(model)
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    ids, _ = batch()
    expected = model(ids)
    close(copied(ids), expected)  # sharded still
    spar.unparallelize(copied)
    close(copied(ids), expected)
    spar.parallelize(model, group)
    close(model(ids), expected)


def test_models_are_restored_and_copied(ranks: Ranks) -> None:
    ranks(2, check_restored)


def check_blocks(rank: int, world: int, group: Group) -> None:
    model, whole = Decoder(), Decoder()
    report = spar.parallelize(model, group, blocks=["layers.*"], method="ring", strict=True)
    close(model(*batch()), whole(*batch()))
    assert report.share < 1.6 / world
    model = Decoder()
    report = spar.parallelize(model, group, blocks=["layers.1"])
    close(model(*batch()), whole(*batch()))
    assert report.share_of_model > 0.6
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).double()
    with pytest.raises(
        ValueError, match=r'Sequential has .* spar.parallelize blocks=\["layers.\*"\].*=\[""\]'
    ):
        spar.parallelize(plain, group)
    with pytest.raises(
        ValueError, match=r'has no ModuleList of blocks; pass to spar.parallelize blocks=\[""\],'
    ):
        spar.parallelize(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()), group)
    with pytest.raises(ValueError, match=r"blocks has 'layer\.\*'; expected names of modules, such as 0, 1"):
        spar.parallelize(plain, group, blocks=["layer.*"])
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = plain(x)
    spar.parallelize(plain, group, blocks=["0"])
    close(plain(x), expected)


def test_blocks_may_be_named(ranks: Ranks) -> None:
    ranks(2, check_blocks)


class Reversed(torch.autograd.Function):
    """Runs blocks again in backward, as reversible layers and checkpoints of libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.save_for_backward(x, angles)
        ctx.layers = layers
        for layer in layers:
            x = layer(x, angles)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, angles = ctx.saved_tensors
        with torch.enable_grad():
            start = x = x.detach().requires_grad_()
            for layer in ctx.layers:
                x = x + layer.attention(
                    layer.norm(x), angles
                )  # not by the blocks, whose forward knows the view
                x = x + layer.mlp(layer.norm(x))
            x.backward(grad)
        return start.grad, None, None


class ReversedDecoder(Decoder):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        angles = torch.arange(ids.size(1))[:, None] / torch.tensor([1.0, 10.0])
        return self.head(Reversed.apply(self.embedding(ids), angles, self.layers))


class Streams(Decoder):
    """Several streams in one tensor, of which a block reads the mean, as hyper-connections have."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList([StreamsBlock(dim).double() for _ in range(2)])

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids).unsqueeze(self.dim)
        x = torch.cat([x, 2 * x, 3 * x], self.dim)
        positions = torch.arange(ids.size(1))[None]
        for layer in self.layers:
            x = layer(x, position_ids=positions)
        return self.head(x.mean(self.dim))


class StreamsBlock(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(0.0)
        self.dim = dim

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
        angles = position_ids[0, :, None] / torch.tensor([1.0, 10.0])
        return hidden_states + super().forward(hidden_states.mean(self.dim), angles).unsqueeze(self.dim)


def check_unusual(rank: int, world: int, group: Group) -> None:
    ids, _ = batch()
    for make in (ReversedDecoder, lambda: Streams(0), lambda: Streams(2)):
        model, whole = make(), make()
        report = spar.parallelize(model, group)
        for each in (model, whole):
            each(ids).square().mean().backward()
        close(model(ids), whole(ids))
        check_gradients(model, whole, group)
        assert isinstance(model, ReversedDecoder) or (report.share < 0.6 and not report.functions), report


def test_streams_and_blocks_that_backward_runs_again(ranks: Ranks) -> None:
    ranks(2, check_unusual)


class Summing(nn.Module):
    """Its second half mixes tokens by a function without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(0.0).double()])

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.ones(x.size(1), 2, dtype=x.dtype)
        return torch.stack([layer(x.cumsum(1) if i else x, angles) for i, layer in enumerate(self.layers)])[0]


class Cumulative(Block):
    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return super().forward(x, angles).cumsum(1)


def check_reports(rank: int, world: int, group: Group) -> None:
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = Summing()
    model.layers[0] = Cumulative(0.0).double()
    report = spar.parallelize(model, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x)
    found = [str(warning.message) for warning in caught if "sharded Summing" in str(warning.message)]
    assert len(found) == (rank == 0)
    (each,) = [each for each in report.functions if each.in_block]
    assert (each.function, each.calls) == ("cumsum", 1)
    assert each.place.startswith("test_parallelize_use.py:")
    spar.unparallelize(model)
    spar.parallelize(model, group, strict=True)
    with pytest.raises(
        RuntimeError, match=r"cumsum at test_parallelize_use.py:.* has no rule for these arguments"
    ):
        model(x)


def test_what_runs_whole_is_reported(ranks: Ranks) -> None:
    ranks(2, check_reports)


def check_errors(rank: int, world: int, group: Group) -> None:
    model = Decoder()
    with pytest.raises(TypeError, match=r"model is 3; expected a torch\.nn\.Module"):
        spar.parallelize(3, group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="method is 'best'"):
        spar.parallelize(model, group, method="best")
    with pytest.raises(ValueError, match=r"method is 'hybrid', and no parallel state is current"):
        spar.parallelize(model, group, method="hybrid")
    with pytest.raises(ValueError, match="the model is not parallelized"):
        spar.unparallelize(model)
    with pytest.raises(
        ValueError, match=r"model is a OptimizedModule; expected what it wraps: model\._orig_mod"
    ):
        spar.parallelize(torch.compile(model), group)  # type: ignore[arg-type]
    spar.parallelize(model, group)
    with pytest.raises(ValueError, match="parallelized already"):
        spar.parallelize(model, group)
    ids, _ = batch()
    with pytest.raises(ValueError, match=r"ids is another value on rank 1; expected equal inputs"):
        model(ids + rank)
    many = torch.zeros(2, 1000, dtype=torch.long)
    many[1, 503] = rank  # one token of 2,000
    with pytest.raises(ValueError, match=r"ids is another value on rank 1; expected equal inputs"):
        model(many)
    close(torch.compile(model, backend="eager")(ids), Decoder()(ids))  # runs as without
    close(model(ids), Decoder()(ids))
    layer = model.layers[0].attention
    if rank == 1:
        layer.forward = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises((ZeroDivisionError, spar.MismatchError)) as caught:
        model(ids)
    assert rank == 1 or "ZeroDivisionError" in str(caught.value)
    if rank == 1:
        del layer.forward
    close(model(ids), Decoder()(ids))
    model.forward = model.forward  # a wrapper of the user's would be another object
    other = model.forward
    model.forward = lambda *args: other(*args)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the forward of a Decoder was replaced since"):
        spar.unparallelize(model)


def test_errors_name_what_is_wrong(ranks: Ranks) -> None:
    ranks(2, check_errors)


def check_no_work(rank: int, world: int, group: Group) -> None:
    """A report says 100 % of no work neither before the first forward nor of a model without products."""
    model = nn.AvgPool2d(2).double()
    report = spar.parallelize(model, group, blocks=[""])
    for _ in range(2):
        assert math.isnan(report.share) and math.isnan(report.share_of_model)
        assert str(report) == "this rank has run no matrix product, convolution or attention yet"
        with warnings.catch_warnings(action="error"):
            model(torch.ones(1, 1, 8, 8, dtype=torch.float64))


class Convolutions(nn.Module):
    """A U-Net's lists of blocks, whose images are no sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
        self.up = nn.ModuleList([nn.Conv2d(4, 1, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.down, *self.up):
            x = block(x)
        return x


def check_images(rank: int, world: int, group: Group) -> None:
    for blocks, hint in ((None, True), ([""], False)):
        torch.manual_seed(0)
        model = Convolutions()
        report = spar.parallelize(model, group, blocks=blocks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(torch.ones(1, 1, 8, 8))
        assert ('pass blocks=[""] to spar.parallelize' in str(report)) == hint, report


def test_reports_name_the_blocks_of_images(ranks: Ranks) -> None:
    ranks(2, check_images)


def test_reports_without_work(ranks: Ranks) -> None:
    ranks(2, check_no_work)
