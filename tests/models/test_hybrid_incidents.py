# SPDX-License-Identifier: Apache-2.0
"""Public incidents of hybrid models over sharded sequences: what went wrong there is right here.

Each test also runs with the incident's mistake, and sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers import llms
from helpers.llms import even, restarts, seeded, sharding, whole, zigzag
from torch import Tensor

import spar
from spar import SequenceLayout
from spar._exchange.gathering import Gathering
from spar.integrations._transformers.tokens import Tokens

PRELOAD = llms.PRELOAD
POOL = (2, 3, 4)
Group = dist.ProcessGroup
Mistake = Callable[[pytest.MonkeyPatch], None]
# Gates are float32 in transformers, and their gradients almost cancel.
RIGHT, WRONG = 1e-4, 1e-2

LINEAR = {
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2 = {
    "layers_block_type": ["mamba", "attention", "mamba"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
}
MODELS = {
    "qwen3_5": llms.maker("Qwen3_5", **LINEAR),
    "no attention": llms.maker("Qwen3_5", **LINEAR | {"layer_types": ["linear_attention"] * 2}),
    "nemotron_h": llms.maker("NemotronH", **MAMBA2),
}


# ---- the mistakes ----

BY_HEADS, CONVOLVE = Tokens.by_heads, Tokens.convolve


def scans_alone(patch: pytest.MonkeyPatch) -> None:
    """Each rank runs the recurrence on its shard."""

    def by_heads(
        self: Tokens, fn: Any, tensors: Any, parameters: Any = (), *dims: int, **named: int
    ) -> Tensor:
        result: Tensor = fn(*tensors, *parameters)
        return result

    patch.setattr(Tokens, "by_heads", by_heads)


def convolutions_alone(patch: pytest.MonkeyPatch) -> None:
    """The convolution begins with zeros at each shard."""
    patch.setattr(Tokens, "convolve", lambda self, fn, x, *_: fn(x))


def shards_alone(patch: pytest.MonkeyPatch) -> None:
    scans_alone(patch)
    convolutions_alone(patch)


def shared_states(patch: pytest.MonkeyPatch) -> None:
    """The recurrence knows of no documents."""
    patch.setattr(Tokens, "by_heads", lambda self, *a, **k: BY_HEADS(self._replace(documents=None), *a, **k))


def shared_convolutions(patch: pytest.MonkeyPatch) -> None:
    """The convolution knows of no documents."""
    patch.setattr(Tokens, "convolve", lambda self, *a: CONVOLVE(self._replace(documents=None), *a))


def shared(patch: pytest.MonkeyPatch) -> None:
    shared_states(patch)
    shared_convolutions(patch)


def rounded(patch: pytest.MonkeyPatch) -> None:
    """Documents begin where they would if their lengths were padded to multiples of the ranks."""

    def moved(tokens: Tokens) -> Tokens:
        assert tokens.documents is not None
        world, total = tokens.layout.group.size(), tokens.layout.total
        ends = [min(-(-end // world) * world, total) for end in accumulate(tokens.documents[0])]
        lengths = tuple([end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)])
        return tokens._replace(documents=(lengths,))

    patch.setattr(Tokens, "by_heads", lambda self, *a, **k: BY_HEADS(moved(self), *a, **k))
    patch.setattr(Tokens, "convolve", lambda self, *a: CONVOLVE(moved(self), *a))


# ---- beside each document alone ----


class Errors(NamedTuple):
    """Of this rank's logits, and the worst of all parameters' gradients, relative to the largest value."""

    logits: float
    gradients: float


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).abs().max() / reference.abs().max().clamp(min=1e-3))


def errors(
    name: str, lengths: tuple[int, ...], group: Group, layout: Any = even, mistake: Mistake | None = None
) -> Errors:
    """Compare a sharded model with runs of each document alone in one process."""
    batch, positions = whole(1, sum(lengths)), restarts(*lengths)[None]
    labels = batch["labels"].masked_fill(positions == 0, -100)
    count = int((labels != -100).sum())
    alone, model, logits = seeded(MODELS[name], "sdpa"), seeded(MODELS[name], "sdpa"), []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        of = slice(end - length, end)
        one = alone(input_ids=batch["input_ids"][:, of], labels=labels[:, of], num_items_in_batch=count)
        one.loss.backward()
        logits.append(one.logits.detach())
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            mistake(patch)
        given = {"position_ids": positions} if len(lengths) > 1 else {}
        part = sharding(group, layout=layout)(model, {**batch, "labels": labels, **given})
        output = model(**part)
        output.loss.backward()
    own = torch.cat(logits, 1)[:, part["layout"].index()]
    worst = 0.0
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        total = spar.all_gather((torch.zeros_like(p) if p.grad is None else p.grad)[None], group).sum(0)
        worst = max(worst, relative(total, torch.zeros_like(q) if q.grad is None else q.grad))
    return Errors(relative(output.logits.detach(), own), worst)


def check(rank: int, world: int, group: Group, name: str, lengths: tuple[int, ...], mistake: Mistake) -> None:
    for layout in (even, zigzag):
        found = errors(name, lengths, group, layout)
        assert max(found) < RIGHT, (layout, found)
    wrong = errors(name, lengths, group, even, mistake)
    assert wrong.gradients > WRONG, wrong


@pytest.mark.parametrize(("lengths", "mistake"), [((37,), shards_alone), ((14, 23), shared)])
def test_shards_pass_states_on_and_packed_samples_share_none(
    pool: Ranks, lengths: tuple[int, ...], mistake: Mistake
) -> None:
    # verl#5552: shards ran alone, and packed samples shared state.
    pool(2, check, "qwen3_5", lengths, mistake)


def check_isolated(rank: int, world: int, group: Group) -> None:
    lengths, rows = (15, 22), []
    for mistake in (None, shared):
        outputs = []
        for last in (7, 8):
            batch = whole(1, sum(lengths)) | {"position_ids": restarts(*lengths)[None]}
            batch["input_ids"][0, lengths[0] - 1] = last
            model = seeded(MODELS["nemotron_h"], "sdpa")
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                if mistake is not None:
                    mistake(patch)
                part = sharding(group, layout=even)(model, batch)
                logits = model(**part).logits
            outputs.append(part["layout"].all_gather(logits, 1)[:, lengths[0] :])
        rows.append(relative(*outputs))
    assert rows[0] == 0 and rows[1] > 1e-3, rows


def test_last_token_of_a_document_does_not_change_the_next_one(pool: Ranks) -> None:
    # prime-rl#3000: Nemotron-H carried its state and its convolution into the next packed document.
    pool(2, check_isolated)


@pytest.mark.parametrize("mistake", [shared_states, shared_convolutions])
def test_document_across_a_boundary_of_shards(pool: Ranks, mistake: Mistake) -> None:
    # prime-rl#3002: a made-up cu_seqlens of one sequence; documents of 37, 51 and 40 tokens on 2 ranks.
    pool(2, check, "qwen3_5", (37, 51, 40), mistake)


@pytest.mark.parametrize("lengths", [(64,), (37, 51, 40)])
def test_convolution_goes_on_across_a_boundary_of_shards(pool: Ranks, lengths: tuple[int, ...]) -> None:
    # prime-rl#3003: the convolution began anew at each shard, wrong even without packing.
    pool(2, check, "qwen3_5", lengths, convolutions_alone)


@pytest.mark.parametrize("mistake", [shards_alone, shared])
def test_mamba_passes_states_on_over_packed_documents(pool: Ranks, mistake: Mistake) -> None:
    # NeMo-RL#2529: Mamba layers over a sharded and packed sequence.
    pool(3, check, "nemotron_h", (5, 1, 18, 2, 11), mistake)


def test_linear_layers_see_more_than_their_shard(pool: Ranks) -> None:
    # LLaMA-Factory#10727: linear attention silently processed its part of the sequence, without an exchange.
    pool(2, check, "qwen3_5", (40,), scans_alone)


@pytest.mark.parametrize("mistake", [shared_states, shared_convolutions])
@pytest.mark.parametrize("name", ["qwen3_5", "no attention"])
def test_neither_state_nor_convolution_cross_samples(pool: Ranks, name: str, mistake: Mistake) -> None:
    # lmms-engine#167: the state accumulated over the packed batch, and the convolution of 4 taps bled.
    pool(3, check, name, (9, 3, 20), mistake)


def check_first_shard(rank: int, world: int, group: Group) -> None:
    right, wrong = (errors("qwen3_5", (40,), group, even, mistake) for mistake in (None, shards_alone))
    assert max(right) < RIGHT, right
    assert wrong.gradients > WRONG and (wrong.logits < RIGHT) == (rank == 0), wrong


def test_gradients_beside_a_right_forward_of_the_first_shard(pool: Ranks) -> None:
    # accelerate#4177: "the first shard's forward output stays right while its gradients are wrong".
    pool(2, check_first_shard)


@contextlib.contextmanager
def without_returned_gradients() -> Iterator[None]:
    """Halos are exchanged in forward, and their gradients are lost."""
    run = Gathering.run

    def forward_alone(self: Gathering, tensors: Any, transposed: bool, *more: int) -> list[Tensor]:
        outputs = run(self, tensors, transposed, *more)
        return [x * 0 for x in outputs] if transposed else outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gathering, "run", forward_alone)
        yield


def check_short_shards(rank: int, world: int, group: Group) -> None:
    generator, taps = torch.Generator().manual_seed(0), 4
    for sizes in ((1, 2, 0, 1), (0, 1, 1, 1), (2, 1, 3, 1)):
        layout = SequenceLayout("local", sizes, group)
        x, upper = torch.randn(2, 2, 3, sum(sizes), generator=generator, dtype=torch.float64)
        weight = torch.randn(3, 1, taps, generator=generator, dtype=torch.float64)

        def conv(x: Tensor, weight: Tensor = weight) -> Tensor:
            return F.silu(F.conv1d(x, weight, padding=taps - 1, groups=3)[:, :, : x.size(2)])

        leaf, own = x.clone().requires_grad_(), layout.index()
        (expected,) = torch.autograd.grad(conv(leaf), leaf, upper)
        for context in (contextlib.nullcontext(), without_returned_gradients()):
            with context:
                mine = x[:, :, own].requires_grad_()
                y = Tokens(layout).convolve(partial(conv), mine, taps - 1)
                (found,) = torch.autograd.grad(y, mine, upper[:, :, own])
            torch.testing.assert_close(y, conv(x)[:, :, own])
            wrong = spar.all_gather((found - expected[:, :, own]).abs().sum()[None], group)
            lost = not isinstance(context, contextlib.nullcontext)
            assert (float(wrong.sum()) > 1e-2) == lost and found.isfinite().all(), (sizes, wrong)


def test_gradients_of_a_convolution_on_shards_shorter_than_its_taps(pool: Ranks) -> None:
    # fla#774: wrong gradients of the convolution's state, and NaN where a rank has few tokens.
    pool(4, check_short_shards)


def test_boundaries_of_documents_that_the_ranks_do_not_divide(pool: Ranks) -> None:
    # mcore-bridge#162: cu_seqlens resolved by padded offsets and alignment to the ranks.
    pool(3, check, "qwen3_5", (7, 4, 10, 1, 13), rounded)
