# SPDX-License-Identifier: Apache-2.0
"""spar.parallelize: plain torch models over a sharded sequence, beside one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import spar
from spar.testing import compare

# Exchanges over each transport are tested by other modules.
pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
WIDTH, VOCABULARY = 16, 11


class Attention(nn.Module):
    """Rotary positions, grouped heads and a causal mask, as decoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 8 * 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 8, 4).transpose(1, 2).split([4, 2, 2], 1)
        q, k = (self.rotate(t, angles) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return out

    @staticmethod
    def rotate(x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), angles)
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self, recompute: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(dropout) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute
        self.double()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(ids)
        angles = torch.arange(ids.size(1))[:, None] / torch.tensor([1.0, 10.0])
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, angles)
            else:  # around more than the layer
                x = checkpoint(lambda x, layer=layer: layer(x, angles) * 1, x, use_reentrant=self.recompute)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)


def batch(tokens: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(VOCABULARY, (2, tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def close(found: Tensor, expected: Tensor, limit: float = 1e-10) -> None:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert (found - expected).abs().max() <= limit * expected.abs().max().clamp(min=1e-3)


def check_gradients(model: nn.Module, whole: nn.Module, group: Group, limit: float = 1e-10) -> None:
    for (name, parameter), own in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None and own.grad is not None, name
        dist.all_reduce(parameter.grad, group=group)
        close(parameter.grad / group.size(), own.grad, limit)


def check_decoders(rank: int, world: int, group: Group) -> None:
    for recompute in (None, False, True):
        for tokens in (13, 5, 2):  # 2: fewer than ranks, so that nothing is sharded
            model, whole = Decoder(recompute), Decoder()
            report = spar.parallelize(model, group)
            ids, labels = batch(tokens)
            close(model(ids), whole(ids))
            loss, expected = model(ids, labels=labels), whole(ids, labels)
            close(loss, expected)
            loss.backward()
            expected.backward()
            check_gradients(model, whole, group)
            if tokens == 13:
                assert report.share < 1.6 / world
                assert not [each for each in report.functions if each.in_block]
                assert "multiply-adds" in str(report)
                assert [each.reason for each in report.attention] == [f"4 heads for {world} ranks"]
                assert f"  attention by ulysses x{len(model.layers)}: 4 heads" in str(report)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_decoders_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_decoders)


class Nested(Decoder):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        def inner(x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.layers[1], x, angles, use_reentrant=False)
            return out + x

        def outer(x: Tensor) -> Tensor:
            return inner(self.layers[0](x, angles)) * 2

        x = self.layers[0](self.embedding(ids), angles := torch.ones(ids.size(1), 2).double())
        return self.head(checkpoint(outer, x, use_reentrant=False))


def check_nested(rank: int, world: int, group: Group) -> None:
    model, whole = Nested(), Nested()
    spar.parallelize(model, group)
    out, expected = model(batch()[0]), whole(batch()[0])
    close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    check_gradients(model, whole, group)


def check_failing(rank: int, world: int, group: Group) -> None:
    """Fail on one rank in what backward runs again: the peers wait for its exchange."""
    for recompute in (False, True):
        model, runs = Decoder(recompute), []

        def fail(module: nn.Module, args: Any, runs: list[int] = runs) -> None:
            runs.append(1)
            if rank == 1 and len(runs) == 2:
                raise ZeroDivisionError("one rank alone")

        model.layers[1].mlp.register_forward_pre_hook(fail)
        spar.parallelize(model, group)
        loss = model(*batch())
        begin = time.monotonic()
        with pytest.raises((ZeroDivisionError, spar.MismatchError), match="one rank alone"):
            loss.backward()
        assert time.monotonic() - begin < 5
        model(*batch()).backward()  # the group goes on


def test_a_failing_recomputation_is_reported(ranks: Ranks) -> None:
    ranks(2, check_failing)


def test_checkpoints_in_checkpoints_are_exact(ranks: Ranks) -> None:
    ranks(3, check_nested)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Transformer(WIDTH, 4, 2, 2, 32, 0.0, batch_first=True).double()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1), dtype=torch.float64)
        out: Tensor = self.inner(source, target, tgt_mask=mask, tgt_is_causal=True)
        return out


class Vision(nn.Module):
    """Patches and a class token; the first token is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.token = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.encoder, self.head = encoder(), nn.Linear(WIDTH, 5)
        self.double()

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.token.expand(x.size(0), -1, -1), x], 1))
        out: Tensor = self.head(x[:, 0])
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "encoder": (encoder, [(2, 13, WIDTH)]),
    "encoder and decoder": (Translator, [(2, 13, WIDTH), (2, 7, WIDTH)]),
    "vision": (Vision, [(2, 3, 6, 8)]),
}


def check_models(rank: int, world: int, group: Group) -> None:
    for name, (make, shapes) in MODELS.items():
        model, whole = make(), make()
        report = spar.parallelize(model, group)
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        out, expected = model(*inputs), whole(*inputs)
        close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        check_gradients(model, whole, group)
        assert report.share < 1.5 / world, (name, str(report))


@pytest.mark.parametrize("world", [2, 3])
def test_models_of_torch_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_models)


def check_dropout(rank: int, world: int, group: Group) -> None:
    model, whole = Decoder(dropout=0.4), Decoder(dropout=0.4)
    spar.parallelize(model, group)
    for recompute in (None, False, True):
        model.recompute = recompute
        losses = []
        for each in (model, whole):
            torch.manual_seed(7)
            each.zero_grad()
            losses.append(each(*batch()))
            losses[-1].backward()
        close(*losses)
        check_gradients(model, whole, group)


def test_dropout_draws_as_one_process_does(ranks: Ranks) -> None:
    ranks(3, check_dropout)


def check_ddp(rank: int, world: int, group: Group) -> None:
    model, whole = Decoder(), Decoder()
    spar.parallelize(model, group)
    wrapped = DistributedDataParallel(model, process_group=group)
    for each in (wrapped, whole):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for tokens in (13, 9):
            optimizer.zero_grad()
            each(*batch(tokens)).backward()
            optimizer.step()
    for mine, own in zip(model.parameters(), whole.parameters(), strict=True):
        close(mine, own)


def test_ddp_trains_as_one_process(ranks: Ranks) -> None:
    ranks(3, check_ddp)


def check_compare(rank: int, world: int, group: Group) -> None:
    class Training(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.float()

    def shard(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        spar.parallelize(model, group)
        return inputs

    ids, labels = batch()
    report = compare(Training, {"ids": ids, "labels": labels}, shard, group, reduce="mean")
    assert report.worst.max_rel_error < 1e-4


def test_compare_accepts_sharded_models(ranks: Ranks) -> None:
    ranks(2, check_compare)
