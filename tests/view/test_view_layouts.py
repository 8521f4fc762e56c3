# SPDX-License-Identifier: Apache-2.0
"""Sequences that lie on the ranks otherwise than evenly, and parts as outputs, beside one process."""

from __future__ import annotations

import copy
import functools
import re
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from test_parallelize import VOCABULARY, WIDTH, Attention, Decoder, batch, check_gradients, close
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import spar
from spar import SequenceLayout

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def check_zigzag(rank: int, world: int, group: Group) -> None:
    for method in (None, "ulysses", "gather", "ring"):
        for recompute in (None, True):
            model, whole = Decoder(recompute), Decoder()
            report = spar.parallelize(model, group, method=method, layout="zigzag")
            for tokens in (13, 2 * world, world):
                ids, labels = batch(tokens)
                close(model(ids), whole(ids))
                loss, expected = model(ids, labels=labels), whole(ids, labels)
                close(loss, expected)
            loss.backward()
            expected.backward()
            check_gradients(model, whole, group)
            assert not [each for each in report.functions if each.in_block], report


def test_zigzag_is_exact(ranks: Ranks) -> None:
    ranks(3, check_zigzag)


class MaskedAttention(Attention):
    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 8, 4).transpose(1, 2).split([4, 2, 2], 1)
        q, k = (self.rotate(t, angles) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return out


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), MaskedAttention()

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), angles, mask)


class Documents(nn.Module):
    """Documents in a row, which do not attend to each other."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([MaskedBlock() for _ in range(2)])
        self.recompute = recompute
        self.double()

    def forward(self, ids: Tensor, ends: list[int]) -> Tensor:
        places = torch.arange(ids.size(1))
        document = torch.bucketize(places, torch.tensor(ends), right=True)
        mask = (document[:, None] == document) & (places[:, None] >= places)
        x, angles = self.embedding(ids), places[:, None] / torch.tensor([1.0, 10.0])
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, angles, mask)
            else:
                x = checkpoint(layer, x, angles, mask, use_reentrant=self.recompute)
        return x.square().mean()


def check_documents(rank: int, world: int, group: Group) -> None:
    seen = []

    def layout(inputs: dict[str, Any]) -> SequenceLayout:
        ends = inputs["ends"]
        lengths = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        make = SequenceLayout.balanced if len(lengths) > 2 else SequenceLayout.packed
        seen.append(make(lengths, group))
        return seen[-1]

    for recompute in (None, False, True):
        model, whole = Documents(recompute), Documents()
        report = spar.parallelize(model, group, layout=layout)
        found, expected = [], []
        for lengths in ([7, 2, 4], [5, 8], [1] * 13, [7, 2, 4]):
            ids, ends = batch(13)[0], [*accumulate(lengths)]
            found.append(model(ids, ends=ends))
            expected.append(whole(ids, ends))
            close(found[-1], expected[-1])
        sum(found).backward()  # recomputes forwards of other layouts than the last one
        sum(expected).backward()
        check_gradients(model, whole, group)
        assert not [each for each in report.functions if each.in_block], report
    assert len({each.sizes for each in seen}) > 1 or world == 1


@pytest.mark.parametrize("world", [2, 3])
def test_layouts_of_documents_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_documents)


class Largest(TorchDispatchMode):
    """The most elements of logits, or of their gradients, that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            is_of_words = isinstance(x, Tensor) and x.dim() > 0 and x.size(-1) == VOCABULARY
            self.elements = max(self.elements, x.numel() if is_of_words else 0)
        return out


class Both(Decoder):
    """Returns logits and a loss, as models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        assert labels is not None
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
        return {"loss": loss, "logits": logits, "places": torch.arange(ids.size(1))}


def check_parts(rank: int, world: int, group: Group, layout: str) -> None:
    ids, labels = batch(13)
    of_rank = getattr(SequenceLayout, layout)(13, group)
    model, whole = Both(), Both()
    spar.parallelize(model, group, layout=layout, outputs="parts")
    for _ in range(2):
        out, expected = model(ids, labels), whole(ids, labels)
        close(out["loss"], expected["loss"])
        close(out["logits"], expected["logits"][:, of_rank.index()])
        assert torch.equal(out["places"], torch.arange(13)), "what is no part is whole"
    with Largest() as largest:
        model(ids, labels)["loss"].backward()
    whole(ids, labels)["loss"].backward()
    check_gradients(model, whole, group)
    assert 0 < largest.elements < 2 * 13 * VOCABULARY, "logits of all tokens"
    # A loss of each rank's tokens: the gradients are those of the mean of these losses.
    model.zero_grad()
    whole.zero_grad()
    (model(ids, labels)["logits"].square().sum() * world).backward()
    whole(ids, labels)["logits"].square().sum().backward()
    check_gradients(model, whole, group)


@pytest.mark.parametrize("layout", ["even", "zigzag"])
def test_parts_as_outputs(ranks: Ranks, layout: str) -> None:
    ranks(3, check_parts, layout)


def check_inputs(rank: int, world: int, group: Group, layout: str) -> None:
    model, whole = Both(), Both()
    spar.parallelize(model, group, layout=layout, inputs=["ids", "labels", "absent"], outputs="parts")
    for tokens in (13, 7, world - 1, 13):
        of_rank = getattr(SequenceLayout, layout)(tokens, group)
        own = [x[:, of_rank.index()] for x in batch(tokens)]
        out, expected = model(own[0], labels=own[1]), whole(*batch(tokens))
        close(out["loss"], expected["loss"])
        logits = expected["logits"]
        close(out["logits"], logits[:, of_rank.index()] if tokens >= world else logits)
        assert own[0].shape[1] == of_rank.sizes[rank] and not hasattr(own[0], "_spar_shard")
    out["loss"].backward()
    expected["loss"].backward()
    check_gradients(model, whole, group)
    assert spar.testing.diagnose(model, lambda: model(*own)["loss"], show=False) is None


@pytest.mark.parametrize("layout", ["even", "zigzag"])
@pytest.mark.parametrize("world", [2, 3])
def test_parts_as_inputs(ranks: Ranks, world: int, layout: str) -> None:
    ranks(world, check_inputs, layout)


class OfFeatures(Decoder):
    """Gets features of tokens, and a text that is as long as a part of them."""

    def forward(self, x: Tensor, text: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, torch.arange(x.size(1))[:, None] / torch.tensor([1.0, 10.0]))
        return x * text.mean(1, keepdim=True)


def check_gradients_of_inputs(rank: int, world: int, group: Group) -> None:
    model, whole = OfFeatures(), OfFeatures()
    generator = torch.Generator().manual_seed(3)
    x, text = (torch.randn(2, n, WIDTH, dtype=torch.float64, generator=generator) for n in (12, 12 // world))
    layout = SequenceLayout.even(12, group)
    spar.parallelize(model, group, layout=lambda batch: layout, inputs=["x"])
    mine, every = [
        (t.clone().requires_grad_(), text.clone().requires_grad_()) for t in (layout.shard(x, 1), x)
    ]
    found, expected = model(*mine), whole(*every)
    close(found, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert every[0].grad is not None and every[1].grad is not None and mine[0].grad is not None
    close(mine[0].grad, layout.shard(every[0].grad, 1))
    close(mine[1].grad, every[1].grad)
    for wrong in (x[:, :5], x[0, 0], None):
        with pytest.raises(ValueError, match=r"inputs= are|the ranks have \["):
            model(wrong, text)
    close(model(mine[0], text), expected)


def test_gradients_of_parts_as_inputs(ranks: Ranks) -> None:
    ranks(3, check_gradients_of_inputs)


class Joined(nn.Module):
    """Returns a text and its image in one sequence, and targets that it views."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, text: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.blocks[0](x)
        return torch.cat([self.blocks[0](text), found], 1), found, ids.view(-1).sum()


def check_joined(rank: int, world: int, group: Group) -> None:
    """What is no part of one sequence is whole. A rank's tokens may have gaps in memory."""
    torch.manual_seed(0)
    model = Joined()
    whole = copy.deepcopy(model)
    layout = SequenceLayout.even(12, group)
    spar.parallelize(model, group, inputs=["ids"], outputs="parts")
    x, text, ids = torch.randn(2, 12, WIDTH), torch.randn(2, 7, WIDTH), torch.arange(24).view(2, 12)
    with torch.no_grad():
        found, expected = model(x, text, layout.shard(ids, 1)), whole(x, text, ids)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], layout.shard(expected[1], 1))
    assert found[2] == expected[2]


def test_joined_sequences_are_whole(ranks: Ranks) -> None:
    ranks(2, check_joined)


def check_disagreement(rank: int, world: int, group: Group) -> None:
    """Each rank's tokens are those of its own layout: the whole shapes differ."""
    model = Decoder()

    def layout(inputs: dict[str, Any]) -> SequenceLayout:
        return SequenceLayout.even(world * inputs["ids"].size(1), group)

    spar.parallelize(model, group, layout=layout, inputs=["ids"])
    with pytest.raises(ValueError, match=r"ids\[1\] 12 on rank 1"):
        model(torch.ones(2, 4 + 2 * rank, dtype=torch.int64))
    model(torch.ones(2, 4, dtype=torch.int64))


def test_layouts_of_other_lengths_are_refused(ranks: Ranks) -> None:
    ranks(2, check_disagreement)


def check_one_fails(rank: int, world: int, group: Group) -> None:
    """A rank fails alone before anything is exchanged: all raise at once, and go on with the next forward."""

    def layout(inputs: dict[str, Any]) -> SequenceLayout:
        if inputs["ids"].size(0) == 3:
            raise ZeroDivisionError
        return SequenceLayout.even(4 * world, group)

    ids = torch.ones(2, 4, dtype=torch.int64)
    for options in ({"inputs": ["ids"]}, {"inputs": ["ids"], "layout": layout}):
        model = Decoder()
        spar.parallelize(model, group, **options)  # type: ignore[arg-type]
        for wrong in (ids[0], ids[:, :2], ids.new_ones(3, 4)):  # the first forward, and later ones
            with pytest.raises(Exception) as info:
                model(wrong if rank == world - 1 else ids)
            if rank != world - 1:
                assert isinstance(info.value, (ValueError, spar.MismatchError)), info.value
                assert re.search(r"rank 2|the ranks have \[4, 4, 2\]", str(info.value)), info.value
            model(ids)


def test_a_rank_that_fails_alone_is_reported_to_all(ranks: Ranks) -> None:
    ranks(3, check_one_fails, timeout=60)


def laid_out(inputs: dict[str, Any], group: Group) -> SequenceLayout:
    return SequenceLayout.zigzag(inputs["ids"].size(1), group)


def check_copies(rank: int, world: int, group: Group) -> None:
    model, whole = Decoder(), Decoder()
    spar.parallelize(model, group, layout=functools.partial(laid_out, group=group))
    copied = copy.deepcopy(model)
    ids, _ = batch(13)
    expected = whole(ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    close(copied(ids), expected)
    assert not model(ids).any()


def test_a_copy_has_the_layout(ranks: Ranks) -> None:
    ranks(2, check_copies)


def check_errors(rank: int, world: int, group: Group) -> None:
    model = Decoder()
    for options, message in (
        ({"layout": "packed"}, r"layout is 'packed'; expected \"even\", \"zigzag\" or a function"),
        ({"outputs": "local"}, r"outputs is 'local'; expected \"whole\" or \"parts\""),
        ({"inputs": "x"}, r"inputs is 'x'; expected names of the forward's arguments"),
        ({"layout": "zigzag", "method": "hybrid"}, r"method is \"hybrid\", whose layout is its own"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            spar.parallelize(model, group, **options)
    spar.parallelize(model, group, layout=lambda _: None)
    with pytest.raises(ValueError, match="the function layout= returned None; expected a SequenceLayout"):
        model(batch(13)[0])
    spar.unparallelize(model)
    # A rank whose function says otherwise is found by the first exchange.
    spar.parallelize(model, group, layout=lambda _: SequenceLayout.of_runs(runs(rank), group))
    with pytest.raises(spar.MismatchError):
        model(batch(13)[0])


def runs(rank: int) -> list[list[tuple[int, int]]]:
    return [[(0, 6)], [(6, 13)]] if rank else [[(0, 7)], [(7, 13)]]


def test_errors_name_what_is_wrong(ranks: Ranks) -> None:
    ranks(2, check_errors)
