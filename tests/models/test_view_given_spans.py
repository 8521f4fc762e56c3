# SPDX-License-Identifier: Apache-2.0
"""spar.Spans as attention_mask of a model under spar.parallelize: right in each layer, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import hybrid_models
from helpers.llms import MIXED, maker, whole
from helpers.view_masks import LIMIT, pair, small

from spar import MismatchError, Spans

PRELOAD = ["transformers.models.mistral.modeling_mistral", "transformers.models.gemma3.modeling_gemma3"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOTAL = 37
CAUSAL = Spans.causal(TOTAL)
BRANCH = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 15, 12]))
TREE = CAUSAL & (Spans.documents(BRANCH) | Spans.prefix(TOTAL, 10))


def check_exact(rank: int, world: int, group: Group) -> None:
    """One process has a tensor of the same elements; eager attention has one of floats."""
    for attention in ("sdpa", "eager"):
        for spans in (TREE, TREE & Spans.padding(torch.stack([BRANCH >= 0, BRANCH < 2]))):
            model, one = pair(maker("llama", attn_implementation=attention), group)
            dense = spans.dense()
            if attention == "eager":
                dense = torch.zeros(dense.shape, dtype=torch.float64).masked_fill(~dense, torch.finfo().min)
            with small(1 << 30) as seen:
                loss = model(**whole(), attention_mask=spans).loss
            assert seen.masks and all(isinstance(mask, Spans) for mask in seen.masks), seen.masks
            expected = one(**whole(), attention_mask=dense.expand(2, -1, -1, -1)).loss
            assert abs(loss - expected) < LIMIT * expected, attention
            loss.backward()
            expected.backward()
            for p, q in zip(model.parameters(), one.parameters(), strict=True):
                dist.all_reduce(p.grad, group=group)
                assert (p.grad / world - q.grad).abs().max() < LIMIT * q.grad.abs().max()


@pytest.mark.parametrize("world", [2, 3])
def test_spans_are_the_mask_of_each_layer(pool: Ranks, world: int) -> None:
    pool(world, check_exact)


def check_windows(rank: int, world: int, group: Group) -> None:
    short = TREE & Spans.window(TOTAL, 8, 0)
    for name, config in (("mistral", {}), ("Gemma3", MIXED)):
        model, one = pair(maker(name, **config), group)
        with pytest.raises(ValueError, match=r"attention_mask is Spans\(.*outside of a layer's own mask"):
            model(**whole(), attention_mask=TREE)
        loss = model(**whole(), attention_mask=short).loss
        expected = one(**whole(), attention_mask=short.dense().expand(2, -1, -1, -1)).loss
        assert abs(loss - expected) < LIMIT * expected, name
    model, _ = pair(maker("llama"), group)
    with pytest.raises(
        ValueError, match=r"this layer has 37 queries and 36 keys of 2 samples; expected Spans"
    ):
        model(**whole(), attention_mask=Spans.causal(36))
    with pytest.raises((MismatchError, ValueError)):
        model(**whole(), attention_mask=TREE if rank else CAUSAL)


def check_states(rank: int, world: int, group: Group) -> None:
    for name in ("qwen3_5_text", "lfm2", "bamba"):
        make = hybrid_models.maker(name, **hybrid_models.ONE_OF_EACH[name])
        model, one = pair(make, group, torch.float32)
        with pytest.raises(ValueError, match=r"which ignore it; expected Spans\.causal"):
            model(**whole(), attention_mask=TREE)
        loss, expected = model(**whole(), attention_mask=CAUSAL).loss, one(**whole()).loss
        assert abs(loss - expected) < 1e-4 * expected, name


def check_unread(rank: int, world: int, group: Group) -> None:
    for name in ("mamba2", "rwkv"):
        model, _ = pair(hybrid_models.maker(name), group, torch.float32)
        with pytest.raises(ValueError, match=r"Spans, which all layers of the \w+ ignore"):
            model(input_ids=whole()["input_ids"], attention_mask=TREE)


def test_spans_that_a_layer_would_not_honour_are_refused(pool: Ranks) -> None:
    pool(2, check_windows)
    pool(2, check_states)
    pool(2, check_unread)
