# SPDX-License-Identifier: Apache-2.0
"""Models whose result over a shard would differ from one process: refused by name, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers import llms
from helpers.llms import check_exact, left_padded, maker, packed, seeded, sharding, whole

PRELOAD = llms.PRELOAD
POOL = (2,)
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = WITHOUT_DROPOUT | {"is_decoder": True}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0}
POOLS = "its head pools the tokens of a sequence"
OWN_ATTENTION = "do not call the attention that set_attn_implementation sets"
OWN_MASK = "builds attention masks by its own code"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BertForSequenceClassification": (BERT, "its pooler takes the first token"),
    "GPT2DoubleHeadsModel": (GPT2, POOLS),
    "BertModel": (BERT, "its pooler takes the first token"),
    "BertForPreTraining": (BERT, "its seq_relationship takes the first token"),
    "RobertaForCausalLM": (BERT, "roberta.embeddings derives positions from input_ids, as RoBERTa does"),
    "XLMRobertaXLForCausalLM": (BERT, r"whose positions begin at pad_token_id \+ 1. Pass position_ids"),
    "Data2VecTextForCausalLM": (BERT, "derives positions from input_ids"),
    "MoshiForCausalLM": (
        {"sliding_window": 9},
        "its masks are those of create_sliding_window_causal_mask, and its forward calls create_causal_mask",
    ),
    "LayoutLMForTokenClassification": (WITHOUT_DROPOUT, OWN_MASK),
    "MarkupLMForTokenClassification": (WITHOUT_DROPOUT | {"max_depth": 2}, OWN_MASK),
    "DogeForCausalLM": ({}, r"self_attn builds masks itself \(prepare_dynamic_mask\)"),
    "FalconForCausalLM": ({"alibi": False}, OWN_ATTENTION),
    "BloomForCausalLM": ({}, OWN_ATTENTION),
    "BigBirdForCausalLM": (BERT, OWN_ATTENTION),
    "FNetForMaskedLM": ({"hidden_dropout_prob": 0.0}, OWN_ATTENTION),
}


def check_refused(rank: int, world: int, group: llms.Group) -> None:
    batch = {"input_ids": whole()["input_ids"]}
    for name, (config, message) in REFUSED.items():
        model = maker(name, **config)()
        with pytest.raises(ValueError, match=message) as caught:
            sharding(group)(model, batch)
        assert f"{name} cannot run over a sharded sequence" in str(caught.value)


def test_models_are_refused_by_name(pool: Ranks) -> None:
    pool(2, check_refused)


def check_positions(rank: int, world: int, group: llms.Group) -> None:
    """RoBERTa's positions, passed: those that it derives itself in one process."""
    make, batch = maker("RobertaForCausalLM", **BERT), whole()
    check_exact(make, batch | {"position_ids": torch.arange(1, 38)[None]}, group)


def test_passed_positions_are_exact(pool: Ranks) -> None:
    pool(2, check_positions)


def check_positions_of_masks(rank: int, world: int, group: llms.Group) -> None:
    """OPT counts tokens that are not padding, BioGPT all: without padding alone are both 0, 1, .."""
    padding = left_padded()
    counted = padding["attention_mask"].cumsum(1) * padding["attention_mask"] - 1
    plain = torch.arange(37).expand(2, -1)
    for name, config, positions in (("OPT", OPT, counted), ("BioGpt", WITHOUT_DROPOUT, plain)):
        make = maker(name, **config)
        for batch in (whole(), whole() | {"attention_mask": torch.ones(2, 37, dtype=torch.int64)}):
            check_exact(make, batch, group)
        for method in ("ulysses", "ring", "gather"):
            check_exact(make, padding | {"position_ids": positions}, group, method=method)
        with pytest.raises(ValueError, match="may derive positions from the attention mask, and the batch"):
            sharding(group)(make(), padding)


def test_positions_of_masks(pool: Ranks) -> None:
    pool(2, check_positions_of_masks)


def check_bare_layers(rank: int, world: int, group: llms.Group) -> None:
    """Attention that receives neither the layout nor a mask, with which it would arrive."""
    kind = type(maker("StableLm")().model.layers[0])
    with pytest.MonkeyPatch.context() as patch:
        found = "spar.integrations._transformers.sources.mixing_children"
        patch.setattr(found, lambda parent: {"self_attn": frozenset({"past_key_values"})})
        with pytest.raises(
            ValueError, match=f"{kind.__name__} passes self_attn no keyword arguments and no"
        ) as caught:
            sharding(group)(maker("StableLm")(), whole())
    assert "Pass whole=['model.layers.*.self_attn']" in str(caught.value)


def test_attention_without_arguments_and_mask(pool: Ranks) -> None:
    pool(2, check_bare_layers)


def check_documents(rank: int, world: int, group: llms.Group) -> None:
    """BERT's forward passes no position_ids to its mask: in one process documents attend to each other."""
    make, batch = maker("BertLMHeadModel", **BERT), packed(5, 20, 12)
    alone = seeded(make, "sdpa").eval()
    with torch.no_grad():
        joined = alone(**batch).logits[:, :25]
        cut = alone(**{name: x[:, 5:25] for name, x in batch.items()}).logits
    assert (joined[:, 5:] - cut).abs().max() > 0.1
    with pytest.raises(
        ValueError, match=r"passes no position_ids to its masks.* spar.Spans or a 4-D attention_mask"
    ):
        sharding(group)(make(), batch)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 20, 12]))
    mask = (document[:, None] == document) & torch.ones(37, 37, dtype=torch.bool).tril()
    for exact in (whole(), left_padded(), batch | {"attention_mask": mask[None, None]}):
        check_exact(make, exact, group)


def test_documents_that_one_process_does_not_separate(pool: Ranks) -> None:
    pool(2, check_documents)


def check_logits_to_keep(rank: int, world: int, group: llms.Group) -> None:
    """The last logits of each shard are not those of the sequence."""
    for name in ("llama", "GPTNeoX"):
        model = maker(name)()
        part = sharding(group)(model, whole())
        assert model(**part).logits.size(1) == part["input_ids"].size(1)
        with pytest.raises(TypeError, match="multiple values for keyword argument 'logits_to_keep'"):
            model(**part, logits_to_keep=8)
    assert "logits_to_keep" not in sharding(group)(maker("LlamaModel")(), {"input_ids": whole()["input_ids"]})


def test_logits_to_keep_is_passed_twice(pool: Ranks) -> None:
    pool(2, check_logits_to_keep)


def check_dropped_layout(rank: int, world: int, group: llms.Group) -> None:
    """A layer in which the loss of keyword arguments cannot be seen before the forward."""
    model = maker("llama")()
    part = sharding(group)(model, whole())
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda x, layout=None, **others: forward(x, **others)
    with pytest.raises(ValueError, match=r"layout is None.* does not pass keyword arguments on"):
        model(**part)


def test_layout_that_does_not_arrive(pool: Ranks) -> None:
    pool(2, check_dropped_layout)
