# SPDX-License-Identifier: Apache-2.0
"""Eager attention of transformers under spar.parallelize: spans where the formula is the usual one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.llms import MIXED, left_padded, maker, packed_rows, whole
from helpers.view_masks import BATCHES, TEXTS, WINDOWS, check_step, pair, small

from spar._attention.spans import Spans
from spar.integrations._transformers.eager import formula_of

PRELOAD = ["transformers.models.mistral.modeling_mistral", "transformers.models.gemma3.modeling_gemma3"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
EAGER_LIMIT = 2e-5  # in float32, in which eager attention computes its softmax whatever the weights are
EAGER: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOWS,
    "Gemma3": TEXTS["Gemma3"],
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 8},
    "GPTNeoX": {},
    "DeepseekV3": TEXTS["DeepseekV3"],
    "Gemma2": WINDOWS
    | {"attn_logit_softcapping": 2.0, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def eager(name: str, **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = maker(name, **config)()
        model.set_attn_implementation("eager")
        return model

    return make


def check_usual(rank: int, world: int, group: Group, name: str) -> None:
    """Queries of padding, which have no keys, are those of one process, too: the loss has a label of one."""
    model, one = pair(eager(name, **EAGER[name]), group, torch.float32)
    exact = None
    if name == "GptOss":  # the gradients of sinks are sums that cancel
        exact = copy.deepcopy(one).double()
        exact.set_experts_implementation("batched_mm")  # others compute no float64
    for kind, make in BATCHES.items():
        batch = make()
        if kind == "left" and name != "Gemma2":
            batch["labels"] = whole()["labels"]
        with small() as seen:
            check_step(model, one, batch, group, (name, kind), EAGER_LIMIT, exact)
        # A capped score of a query without keys has gradients that no spans have.
        is_own = name == "Gemma2" and kind in ("left", "right", "holes")
        assert is_own or len(seen.masks) == 2, (name, kind)
        assert all(isinstance(mask, Spans) for mask in seen.masks), (name, kind)


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_of_the_usual_formula_has_spans(pool: Ranks, name: str) -> None:
    pool(3, check_usual, name)


def check_unusual(rank: int, world: int, group: Group) -> None:
    """Where somebody reads the weights, or the formula is another, the model's own code runs."""
    batch = left_padded()
    bias = {"position_biased_input": False}
    for make in (
        eager("llama"),
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL_BERT, **bias)),
    ):
        model, one = pair(make, group, torch.float32)
        if one.config.model_type == "bert":
            for each in (model, one):
                each.set_attn_implementation("eager")
        options = {"output_attentions": True}
        with small() as seen:
            found, expected = model(**batch, **options), one(**batch, **options)
            check_step(model, one, batch | options, group, one.config.model_type, EAGER_LIMIT)
        assert not seen.masks
        for x, y in zip(found.attentions or (), expected.attentions or (), strict=True):
            torch.testing.assert_close(x, y)
        assert len(found.attentions) == 2
    model, one = pair(eager("llama"), group, torch.float32)
    shapes: list[Any] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda m, a, out: shapes.append(out[1].shape))
    with small() as seen:
        check_step(model, one, batch, group, "a hook that reads weights", EAGER_LIMIT)
    assert [shape[2:] for shape in shapes] == [(37, 37)]


SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def test_eager_attention_whose_weights_are_read_keeps_them(pool: Ranks) -> None:
    pool(2, check_unusual)


def check_eager_use(rank: int, world: int, group: Group) -> None:
    """Both kinds of checkpoints, dropout in training, low precision, and generate."""
    for reentrant in (False, True):
        model, one = pair(eager("mistral", **WINDOWS), group, torch.float32)
        for each in (model, one):
            each.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        with small() as seen:
            check_step(model, one, packed_rows(), group, reentrant, EAGER_LIMIT)
        assert len(seen.masks) == 4 and all(isinstance(mask, Spans) for mask in seen.masks)
    model, one = pair(eager("llama", attention_dropout=0.5), group, torch.float32)
    with small() as seen:
        check_step(model, one, left_padded(), group, "no dropout in evaluation", EAGER_LIMIT)
        assert len(seen.masks) == 2
        for each in (model, one):
            each.train()
            torch.manual_seed(3)
            each.loss = each(**left_padded()).loss.detach()
        assert len(seen.masks) == 2 and torch.allclose(model.loss, one.loss)
    model, one = pair(eager("mistral", **WINDOWS, use_cache=True), group, torch.float32)
    batch = {name: x for name, x in left_padded().items() if name != "labels"}
    with small():
        found, expected = [each.generate(**batch, max_new_tokens=9, do_sample=False) for each in (model, one)]
    assert torch.equal(found, expected)
    model, one = [each.bfloat16() for each in (model, one)]
    with small() as seen, torch.no_grad():
        error = (model(**batch).logits - one(**batch).logits).abs().max()
    assert seen.masks and error < 0.1 * one(**batch).logits.abs().max()


def test_eager_attention_in_use(pool: Ranks) -> None:
    pool(2, check_eager_use)


def test_formulas_of_eager_attention() -> None:
    """Which models' functions are the usual formula: a changed one is another."""
    from importlib import import_module

    def function(name: str) -> Any:
        return import_module(f"transformers.models.{name}.modeling_{name}").eager_attention_forward

    usual = (
        "llama mistral gemma2 gemma3 bert gpt2 clip vit whisper qwen2_vl gpt_neox internvl bigbird_pegasus"
    )
    assert [name for name in usual.split() if formula_of(function(name)) != "usual"] == []
    for name in ("gpt_oss", "granite_swa"):
        assert formula_of(function(name)) == "sinks", name
    for name in ("t5", "mimo_v2_flash", "vjepa2"):
        assert formula_of(function(name)) is None, name
    assert formula_of(eager_of_a_user) is None


def eager_of_a_user(module: Any, query: Any, key: Any, value: Any, attention_mask: Any) -> None: ...
