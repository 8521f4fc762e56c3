# SPDX-License-Identifier: Apache-2.0
"""token_logprobs, against log_softmax over all logits in one process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spar
from spar._commands.bench.attention.measure import peak
from spar.ops import vocabulary

Group = dist.ProcessGroup
IGNORED = -100
LENGTHS = (5, 1, 9, 4)  # of packed documents: one of one token
TOKENS, VOCABULARY, WIDTH = sum(LENGTHS), 23, 6
LAYOUTS: dict[str, Callable[[Group], spar.SequenceLayout]] = {
    "even": lambda group: spar.SequenceLayout.even(TOKENS, group),
    "zigzag": lambda group: spar.SequenceLayout.zigzag(TOKENS, group),
    "packed": lambda group: spar.SequenceLayout.packed(LENGTHS, group),
}
SMALL_TILES = mock.patch.multiple(vocabulary, TOKENS=4, COLUMNS=7)


class Batch(NamedTuple):
    """Hidden states and the head, and the labels of two rows, the same on all ranks."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype = torch.float64) -> Batch:
        random = torch.Generator().manual_seed(0)
        shapes = (2, TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
        tensors = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]
        labels = torch.randint(VOCABULARY, (2, TOKENS), generator=random)
        labels[:, [4, 5, 14, -1]] = IGNORED  # the documents' last tokens
        return cls(*(x.requires_grad_() for x in tensors), labels)

    def logits(self) -> Tensor:
        wide = torch.promote_types(self.hidden.dtype, torch.float32)
        return self.hidden.to(wide) @ self.weight.to(wide).T + self.bias.to(wide)


def plain(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    all_logprobs, counts = (logits / temperature).log_softmax(-1), labels != IGNORED
    logprobs = all_logprobs.gather(-1, labels.clamp(0)[..., None])[..., 0]
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return torch.where(counts, logprobs, 0), torch.where(counts, entropy, 0)


def upper(shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(2)]


def summed(grads: Any, group: Group) -> list[Tensor]:
    totals = [grad.double() for grad in grads]
    for total in totals:
        dist.all_reduce(total, group=group)
    return totals


def check_gathered(rank: int, world: int, group: Group) -> None:
    """Values and gradients of both forms, in each layout, gathered in each way; sums over the ranks."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        batch = Batch.make(dtype)
        leaves = [batch.hidden, batch.weight, batch.bias]
        logits = batch.logits()
        expected = plain(logits, batch.labels, 0.7)
        ups = upper(expected[0].shape, expected[0].dtype)
        gradients = torch.autograd.grad(expected, leaves, ups, retain_graph=True)
        for name, make in LAYOUTS.items():
            layout = make(group)
            own = layout.index()
            for form in ("logits", "hidden"):
                hidden = batch.hidden[:, own]
                head = (hidden, batch.weight, batch.bias)
                given = logits[:, own].to(dtype) if form == "logits" else head
                with SMALL_TILES:
                    local = spar.token_logprobs(given, batch.labels[:, own], layout, temperature=0.7)
                    whole = spar.token_logprobs(
                        given,
                        batch.labels[:, own],
                        layout,
                        temperature=0.7,
                        gather="sequence",
                        grad_scale=None,
                    )
                    found = summed(
                        torch.autograd.grad(local, leaves, [x[:, own] for x in ups], retain_graph=True), group
                    )
                    again = summed(torch.autograd.grad(whole, leaves, ups, retain_graph=True), group)
                note = f"{name}, {form}, {dtype}"
                for x, y, z in zip(local, whole, expected, strict=True):
                    close = tolerance if form == "logits" else min(tolerance, 1e-5)
                    assert x.dtype == y.dtype == z.dtype
                    torch.testing.assert_close(x, z[:, own], atol=4 * close, rtol=close, msg=note)
                    torch.testing.assert_close(y, z, atol=4 * close, rtol=close, msg=note)
                for x, y, z in zip(found, again, gradients, strict=True):
                    scale = float(z.abs().max())
                    assert float((x - z).abs().max()) < 2 * tolerance * scale, note
                    assert x.equal(y), note
        assert summed([torch.ones(1)], group)[0].item() == world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_and_gradients(pool: Ranks, world: int) -> None:
    pool.transport = TRANSPORTS[0]
    pool(world, check_gathered)


def check_labels_and_temperatures(rank: int, world: int, group: Group) -> None:
    """K labels of each token, and a temperature of each: also ignored labels, and one token twice."""
    random = torch.Generator().manual_seed(2)
    labels = torch.randint(VOCABULARY, (2, TOKENS, 3), generator=random)
    labels[..., 1], labels[:, 4], labels[:, 7, 1] = labels[..., 0], IGNORED, IGNORED
    dead = (labels == IGNORED).all(-1)
    heat = (0.5 + torch.rand(2, TOKENS, generator=random)).masked_fill(dead, 0)  # as in padding
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        batch = Batch.make(dtype)
        leaves = [batch.hidden, batch.weight, batch.bias]
        scaled = batch.logits() / heat.to(dtype).masked_fill(dead, 1)[..., None]
        every = scaled.log_softmax(-1)
        logprobs = every.gather(-1, labels.clamp(0)).masked_fill(labels == IGNORED, 0)
        expected = logprobs, -(every.exp() * every).sum(-1).masked_fill(dead, 0)
        ups = [torch.randn(x.shape, generator=random, dtype=dtype) for x in expected]
        gradients = torch.autograd.grad(expected, leaves, ups, retain_graph=True)
        for make in LAYOUTS.values():
            layout = make(group)
            own = layout.index()
            head = (batch.hidden[:, own], batch.weight, batch.bias)
            for given in (batch.logits()[:, own], head):
                options: dict[str, Any] = {"temperature": heat[:, own]}
                with SMALL_TILES:
                    local = spar.token_logprobs(given, labels[:, own], layout, **options)
                    found = torch.autograd.grad(local, leaves, [x[:, own] for x in ups], retain_graph=True)
                    options["grad_scale"] = None
                    whole = spar.token_logprobs(given, labels[:, own], layout, gather="sequence", **options)
                torch.testing.assert_close(whole, expected, atol=4 * tolerance, rtol=tolerance)
                assert all(x.equal(y[:, own]) for x, y in zip(local, whole, strict=True))
                for x, y in zip(summed(found, group), gradients, strict=True):
                    assert float((x - y).abs().max()) < 2 * tolerance * float(y.abs().max())
        with torch.no_grad():
            samples, _ = spar.token_logprobs(given, labels[:, own], layout, gather="samples")
        assert [sample.shape for sample in samples] == [(length, 3) for length in (*LENGTHS, *LENGTHS)]
        one = spar.token_logprobs(head, batch.labels[:, own], layout, temperature=0.7)
        same = spar.token_logprobs(
            head,
            batch.labels[:, own, None],
            layout,
            temperature=torch.full_like(heat[:, own], 0.7, dtype=dtype),
        )
        assert one[0].equal(same[0][..., 0]) and one[1].equal(same[1])


@pytest.mark.parametrize("world", [1, 2])
def test_labels_and_temperatures_of_each_token(pool: Ranks, world: int) -> None:
    pool.transport = TRANSPORTS[0]
    pool(world, check_labels_and_temperatures)


def check_samples(rank: int, world: int, group: Group) -> None:
    batch = Batch.make()
    expected = plain(batch.logits(), batch.labels)
    for name, make in LAYOUTS.items():
        layout = make(group)
        own = layout.index()
        lengths = list(LENGTHS) if name == "packed" else [TOKENS]
        with torch.no_grad():
            found = spar.token_logprobs(
                batch.logits()[:, own], batch.labels[:, own], layout, gather="samples"
            )
        for samples, whole in zip(found, expected, strict=True):
            parts = [part for row in whole for part in row.split(lengths)]
            for sample, part in zip(samples, parts, strict=True):
                torch.testing.assert_close(sample, part.detach())


@pytest.mark.one_transport
def test_samples(ranks: Ranks) -> None:
    ranks(3, check_samples)


def check_as_in_float64(logits: Tensor, labels: Tensor, layout: spar.SequenceLayout, bound: float) -> None:
    wide = logits.detach().double().requires_grad_()
    found, expected = spar.token_logprobs(logits, labels, layout), plain(wide, labels)
    torch.testing.assert_close([x.double() for x in found], [*expected], rtol=bound, atol=bound)
    (grad,) = torch.autograd.grad(sum(x.sum() for x in found), logits)
    (known,) = torch.autograd.grad(sum(x.sum() for x in expected), wide)
    torch.testing.assert_close(grad.double(), known, rtol=bound, atol=bound)


def check_in_one_process(rank: int, world: int, group: Group) -> None:
    batch, layout = Batch.make(), spar.SequenceLayout.even(TOKENS, group)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return spar.token_logprobs((hidden, weight), batch.labels, layout)

    with SMALL_TILES:
        assert torch.autograd.gradcheck(both, (batch.hidden, batch.weight), fast_mode=True)
        # a vocabulary of which a whole tile is masked
        masked = (
            torch.randn(2, TOKENS, VOCABULARY).index_fill(2, torch.arange(9), -torch.inf).requires_grad_()
        )
        labels = torch.where(batch.labels == IGNORED, IGNORED, batch.labels.clamp(9))
        found = spar.token_logprobs(masked, labels, layout)
        kept = masked.detach()[..., 9:].requires_grad_()
        expected = plain(kept, labels - 9 * (labels != IGNORED))
        torch.testing.assert_close(found, expected)
        (grad,) = torch.autograd.grad(sum(x.sum() for x in found), masked)
        (part,) = torch.autograd.grad(sum(x.sum() for x in expected), kept)
        torch.testing.assert_close(grad, torch.nn.functional.pad(part, (9, 0)))
        # logits whose maximum is far from 0, and ones so far apart that their difference is no float
        far = (torch.randn(2, TOKENS, VOCABULARY) + 8192).requires_grad_()
        check_as_in_float64(far, labels, layout, 1e-5)
        with torch.no_grad():
            far.masked_fill_(torch.arange(VOCABULARY) < 11, -3e38).masked_fill_(far > 8193, 1e38)
        check_as_in_float64(far, torch.where(labels < 0, labels, labels.clamp(min=11)), layout, 1e-5)
        # in torch: checkpoints, autocast, frozen parts of the head
        leaves = batch.hidden, batch.weight
        gradients = torch.autograd.grad(both(*leaves)[0].sum(), leaves)
        again = torch.autograd.grad(checkpoint(both, *leaves, use_reentrant=False)[0].sum(), leaves)
        assert all(x.equal(y) for x, y in zip(gradients, again, strict=True))
        assert not any(x._is_view() for x in both(*leaves))  # type: ignore[no-untyped-call]  # FSDP2 would warn
        (of_hidden,) = torch.autograd.grad(both(batch.hidden, batch.weight.detach())[0].sum(), batch.hidden)
        (of_weight,) = torch.autograd.grad(both(batch.hidden.detach(), batch.weight)[0].sum(), batch.weight)
        assert of_hidden.equal(gradients[0]) and of_weight.equal(gradients[1])
        with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(create_graph=True\)"):
            torch.autograd.grad(both(*leaves)[0].sum(), leaves, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"none under torch\.func"):
            torch.func.grad(lambda x: both(x, batch.weight)[0].sum())(batch.hidden)
        narrow = batch.hidden.detach().float(), batch.weight.detach().float()
        with torch.autocast("cpu", torch.bfloat16):
            assert both(*narrow)[0].equal(spar.token_logprobs(narrow, batch.labels, layout)[0])
            torch.testing.assert_close(both(*narrow)[0], both(*leaves)[0].float(), atol=1e-5, rtol=1e-5)


def test_gradcheck_masked_vocabularies_and_torch(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]
    pool(1, check_in_one_process)


def peak_of(size: int, tokens: int, width: int, group: Group) -> float:
    """Return the peak of a forward and backward, without the gradients, in MB."""
    layout = spar.SequenceLayout.even(tokens, group)
    leaves = [torch.randn(1, tokens, width).requires_grad_(), torch.randn(size, width).requires_grad_()]
    labels = torch.randint(size, (1, tokens))

    def step() -> None:
        logprobs, entropy = spar.token_logprobs(leaves, labels, layout)
        torch.autograd.grad(logprobs.sum() + entropy.sum(), leaves)

    with mock.patch("torch.distributed.barrier"):  # of other ranks, which do not take part
        return (peak(step, 1) - sum(x.nbytes for x in leaves)) / 1e6


def check_peak(rank: int, world: int, group: Group) -> None:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is unmapped at once
    small, large = peak_of(8192, 1024, 8, group), peak_of(49152, 1024, 8, group)
    assert abs(large - small) < 10 and large < 80, (small, large)  # logits of float32 are 34 and 201 MB


def test_memory_does_not_grow_with_vocabulary(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]
    pool(1, check_peak)


def check_compiled(rank: int, world: int, group: Group) -> None:
    """Compile both functions."""
    batch = Batch.make()

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, layout: spar.SequenceLayout) -> Tensor:
        logprobs, entropy = spar.token_logprobs((hidden, weight), labels, layout)
        mask = labels != IGNORED
        return spar.masked_mean(logprobs + entropy, mask, layout, by="sample", averaged_by=group)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for make in (LAYOUTS["zigzag"], LAYOUTS["packed"]):
        layout = make(group)
        part, labels = batch.hidden[:, layout.index()], batch.labels[:, layout.index()]
        found, expected = (
            torch.autograd.grad(
                f(part, batch.weight, labels, layout), [part, batch.weight], retain_graph=True
            )
            for f in (compiled, loss)
        )
        assert all(x.equal(y) for x, y in zip(found, expected, strict=True))


@pytest.mark.compiler
def test_compiles_without_a_graph_break(pool: Ranks) -> None:
    pool.transport = TRANSPORTS[0]
    pool(2, check_compiled, timeout=280)


# ---- errors ----

WRONG: dict[str, tuple[Callable[[Batch, spar.SequenceLayout], Any], type[Exception], str]] = {
    "labels of all ranks": (
        lambda b, layout: (b.logits()[:, layout.index()], b.labels),
        ValueError,
        r"on rank 1 of 2: labels is of shape \[2, 19\]; expected \[2, 9\], the next token",
    ),
    "labels of four dims": (
        lambda b, layout: (b.logits()[:, layout.index()], b.labels[:, layout.index(), None, None]),
        ValueError,
        r"labels is of shape \[2, 9, 1, 1\]; expected \[2, 9\], .* or K in a third dim",
    ),
    "logits of all ranks": (
        lambda b, layout: (b.logits(), b.labels[:, layout.index()]),
        ValueError,
        r"logits is of shape \[2, 19, 23\]; expected 9 in dim 1, rank 1's shard",
    ),
    "label beyond the vocabulary": (
        lambda b, layout: (b.logits()[:, layout.index()], b.labels[:, layout.index()] + VOCABULARY),
        ValueError,
        "labels is .*; expected 0 to 22, or ignore_index",
    ),
    "float labels": (
        lambda b, layout: (b.logits()[:, layout.index()], b.labels[:, layout.index()].float()),
        TypeError,
        "labels is a tensor of torch.float32; expected a tensor of ints",
    ),
    "a mask as labels": (
        lambda b, layout: (b.logits()[:, layout.index()], b.labels[:, layout.index()] != IGNORED),
        TypeError,
        "labels is a tensor of torch.bool; expected a tensor of ints",
    ),
    "weight transposed": (
        lambda b, layout: ((b.hidden[:, layout.index()], b.weight.T), b.labels[:, layout.index()]),
        ValueError,
        r"weight is of shape \[6, 23\]; expected \[V, 6\]",
    ),
    "no head": (
        lambda b, layout: ((b.hidden,), b.labels),
        TypeError,
        r"logits is a tuple of 1; expected a tensor, \(hidden, weight\)",
    ),
    "two dims": (
        lambda b, layout: (b.logits()[0, layout.index()], b.labels[:, layout.index()]),
        ValueError,
        r"logits is of shape \[9, 23\]; expected \[B, S/P, V\]",
    ),
}


def check_wrong(rank: int, world: int, group: Group) -> None:
    batch, layout = Batch.make(), spar.SequenceLayout.even(TOKENS, group)
    own = batch.logits().detach()[:, layout.index()], batch.labels[:, layout.index()]
    for name, (wrong, error, text) in WRONG.items():
        if rank == 1:
            with pytest.raises(error, match=text), torch.no_grad():
                spar.token_logprobs(*wrong(batch, layout), layout, gather="sequence")
        else:
            with pytest.raises(spar.MismatchError, match="rank 1"):
                spar.token_logprobs(*own, layout, gather="sequence")
        assert spar.token_logprobs(*own, layout, gather="sequence")[0].shape == (2, TOKENS), name
    many = torch.randn(2, own[1].size(1), 300)
    for kind in (torch.uint8, torch.int8):  # which have no 299
        narrow = own[1].clamp(0).to(kind)
        assert spar.token_logprobs(many, narrow, layout)[0].equal(
            spar.token_logprobs(many, narrow.long(), layout)[0]
        )
    heat = torch.ones(own[1].shape)
    for options, error, text in (
        ({"ignore_index": 2**63}, ValueError, "ignore_index is 9223372036854775808; expected -"),
        (
            {"temperature": torch.ones(2, 3)},
            ValueError,
            "temperature is of shape .2, 3. on cpu; expected a number",
        ),
        ({"temperature": own[1]}, TypeError, "temperature is a tensor of torch.int64; expected floats"),
        (
            {"temperature": heat.requires_grad_()},
            TypeError,
            "that requires a gradient; expected floats without",
        ),
        (
            {"temperature": heat.detach() - 1},
            ValueError,
            "temperature is 0 of a token; expected a number above 0",
        ),
        (
            {"temperature": heat.detach() / 0},
            ValueError,
            "temperature is inf of a token; expected a number above",
        ),
        ({"temperature": 0}, ValueError, "temperature is 0; expected a number above 0"),
        ({"temperature": "1"}, TypeError, "temperature is '1'; expected a number"),
        (
            {"gather": "documents"},
            ValueError,
            'gather is \'documents\'; expected "sequence", "samples" or None',
        ),
    ):
        with pytest.raises(error, match=text):
            spar.token_logprobs(*own, layout, **options)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="grad_scale is not given"):
        spar.token_logprobs(own[0].requires_grad_(), own[1], layout, gather="sequence")
    with pytest.raises(TypeError, match="layout is 4; expected a SequenceLayout"):
        spar.token_logprobs(*own, 4)  # type: ignore[call-overload]
    other = spar.SequenceLayout.zigzag(TOKENS - 1, group) if rank else layout
    with pytest.raises((ValueError, spar.MismatchError)):
        spar.token_logprobs(*own, other, gather="sequence")


@pytest.mark.one_transport
def test_errors_are_reported_to_peers(ranks: Ranks) -> None:
    ranks(2, check_wrong)
