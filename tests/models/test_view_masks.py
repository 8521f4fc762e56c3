# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers under spar.shard_model: spans, with the results of one process, and no S x S."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.llms import left_padded, maker, packed, packed_rows, whole
from helpers.multimodal import made
from torch import Tensor, nn
from transformers import masking_utils

import spar
from spar._attention.spans import Spans
from spar._view import mask_makers
from spar._view.eager import has_usual_formula
from spar._view.rules import attention as rules
from spar.integrations._transformers.masks import Wanted, leaves_intervals

PRELOAD = ["transformers.models.mistral.modeling_mistral", "transformers.models.gemma3.modeling_gemma3"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
LIMIT = 1e-6  # in float64: a model computes its rotary positions, norms and loss in float32
TOTAL = 37
WINDOWS = {"sliding_window": 9}


def right_padded() -> dict[str, Tensor]:
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -13:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def holes() -> dict[str, Tensor]:
    """Padding in the middle of rows, as of tool calls that were cut out."""
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 5:9] = mask[0, 20] = mask[1, 30:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": whole,
    "left": left_padded,
    "right": right_padded,
    "holes": holes,
    "packed": lambda: packed(5, 20, 12),
    "packed rows": packed_rows,
}
TEXTS: dict[str, dict[str, Any]] = {
    "mistral": WINDOWS,
    "qwen3": {},
    "Gemma3": WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    "Llama4": {"attention_chunk_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4},
    "DeepseekV3": {"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 12}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 8, "first_k_dense_replace": 2},
}


class Seen:
    """What spar.attention got as masks, and by which method."""

    def __init__(self) -> None:
        self.masks: list[Any] = []
        self.methods: set[str | None] = set()


@contextmanager
def small(least: int = 0) -> Iterator[Seen]:
    """Make spans of masks from so many bytes on."""
    seen, own = Seen(), spar.attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        seen.masks.append(kwargs["mask"])
        seen.methods.add(kwargs.get("method"))
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "attention", attention)
        patch.setattr(mask_makers, "LEAST_BYTES", least)
        yield seen


def pair(
    make: Callable[[], Any], group: Group, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    one = copy.deepcopy(model)
    spar.shard_model(model, group, **options)
    return model, one


def check_step(
    model: nn.Module,
    one: nn.Module,
    batch: dict[str, Any],
    group: Group,
    what: Any,
    limit: float = LIMIT,
) -> None:
    """Compare the loss, the logits and all gradients with those of one process."""
    for each in (model, one):
        each.zero_grad()
    out, expected = model(**batch), one(**batch)
    out.loss.backward()
    expected.loss.backward()
    assert abs(out.loss - expected.loss) <= limit * expected.loss, what
    assert (out.logits - expected.logits).abs().max() <= limit * expected.logits.abs().max(), what
    for (name, parameter), own in zip(model.named_parameters(), one.parameters(), strict=True):
        if own.grad is None:
            continue
        found = torch.zeros_like(own) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(found, group=group)
        error = (found / group.size() - own.grad).abs().max()
        assert error <= limit * own.grad.abs().max().clamp(min=1e-6), (what, name, error)


def check_texts(rank: int, world: int, group: Group, name: str) -> None:
    model, one = pair(maker(name, **TEXTS[name]), group)
    for kind, make in BATCHES.items():
        with small() as seen:
            check_step(model, one, make(), group, (name, kind))
        masked = [mask for mask in seen.masks if mask is not None]
        assert masked or (kind == "plain" and name in ("qwen3", "DeepseekV3")), kind  # causal without a mask
        assert all(isinstance(mask, Spans) for mask in masked), (name, kind, seen.masks)
        kinds = len(set(getattr(model.config, "layer_types", None) or ["one"]))
        assert len({id(mask) for mask in masked}) <= kinds, "layers do not share their spans"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", TEXTS)
def test_masks_are_spans_and_results_exact(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_texts, name)


def check_checkpoints(rank: int, world: int, group: Group) -> None:
    for reentrant in (False, True):
        model, one = pair(maker("mistral", **WINDOWS), group)
        for each in (model, one):
            each.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        for kind in ("left", "packed rows", "left"):
            with small() as seen:
                check_step(model, one, BATCHES[kind](), group, (reentrant, kind))
            assert len(seen.masks) == 4 and all(isinstance(mask, Spans) for mask in seen.masks)


def test_checkpoints_of_both_kinds_recompute_with_the_same_spans(pool: Ranks) -> None:
    pool(2, check_checkpoints)


def check_methods(rank: int, world: int, group: Group) -> None:
    for method in ("ulysses", "gather", "ring"):
        model, one = pair(maker("mistral", **WINDOWS), group, method=method)
        for kind in ("plain", "left", "packed rows"):
            with small() as seen:
                check_step(model, one, BATCHES[kind](), group, (method, kind))
            assert seen.methods == {method} and all(isinstance(mask, Spans) for mask in seen.masks)


def test_each_method_takes_spans(pool: Ranks) -> None:
    pool(3, check_methods)


def check_choice(rank: int, world: int, group: Group) -> None:
    """A window needs few keys of others; of causal rows the last rank would have most of the work."""
    model, _ = pair(maker("mistral", **WINDOWS), group)
    padded, _ = pair(maker("qwen3"), group)
    with small() as seen:
        model(**whole())
        assert seen.methods == {"gather"}
        seen.methods.clear()
        padded(**left_padded())
        assert seen.methods == {None}


def test_windows_gather_few_keys(pool: Ranks) -> None:
    pool(2, check_choice)


def check_images(rank: int, world: int, group: Group) -> None:
    """Image blocks that see both ways, and a prefix that does."""
    for name in ("gemma3", "paligemma"):
        model, batch = made(name)
        one = copy.deepcopy(model)
        spar.shard_model(model, group)
        with small() as seen:
            check_step(model, one, batch, group, name)
        masked = [mask for mask in seen.masks if mask is not None]
        assert masked and all(isinstance(mask, Spans) for mask in masked), name


def bidirectional() -> Any:
    """Gemma 3 as an encoder: its model's own functions are evaluated for all pairs."""
    return maker("Gemma3", **TEXTS["Gemma3"], use_bidirectional_attention=True)()


def encoder() -> Any:
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return transformers.BertForMaskedLM(transformers.BertConfig(**config, vocab_size=53))


def check_both_ways(rank: int, world: int, group: Group) -> None:
    for make in (bidirectional, encoder):
        model, one = pair(make, group)
        for kind in ("left", "holes"):
            with small() as seen:
                check_step(model, one, BATCHES[kind](), group, (make.__name__, kind))
            masked = [mask for mask in seen.masks if mask is not None]
            assert masked and all(isinstance(mask, Spans) for mask in masked), make.__name__


def test_images_and_encoders_are_exact(pool: Ranks) -> None:
    pool(2, check_images)
    pool(3, check_both_ways)


def check_eager(rank: int, world: int, group: Group) -> None:
    """Attention that adds floats to its scores has S x S scores itself: its masks stay as they are."""
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
    model, one = pair(maker("GptOss", **config), group)
    for each in (model, one):
        each.set_experts_implementation("eager")  # grouped products have no float64
    for kind in ("plain", "left"):
        with small() as seen:
            check_step(model, one, BATCHES[kind](), group, kind)
        assert not seen.masks


def test_sinks_with_windows_are_exact(pool: Ranks) -> None:
    pool(2, check_eager)


EAGER_LIMIT = 2e-5  # in float32, in which eager attention computes its softmax whatever the weights are
EAGER: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOWS,
    "Gemma3": TEXTS["Gemma3"],
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 8},
    "GPTNeoX": {},
    "DeepseekV3": TEXTS["DeepseekV3"],
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
    for kind, make in BATCHES.items():
        batch = make()
        if kind == "left":
            batch["labels"] = whole()["labels"]
        with small() as seen:
            check_step(model, one, batch, group, (name, kind), EAGER_LIMIT)
        assert len(seen.masks) == 2 and all(isinstance(mask, Spans) for mask in seen.masks), (name, kind)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_of_the_usual_formula_has_spans(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_usual, name)


def check_unusual(rank: int, world: int, group: Group) -> None:
    """Where somebody reads the weights, or the formula is another, the model's own code runs."""
    batch = left_padded()
    softcap = {"attn_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"]}
    bias = {"position_biased_input": False}
    makers = [eager("Gemma2", **WINDOWS, **softcap), eager("llama")]
    for make in (
        *makers,
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL_BERT, **bias)),
    ):
        model, one = pair(make, group, torch.float32)
        if one.config.model_type == "bert":
            for each in (model, one):
                each.set_attn_implementation("eager")
        options = {} if one.config.model_type == "gemma2" else {"output_attentions": True}
        with small() as seen:
            found, expected = model(**batch, **options), one(**batch, **options)
            check_step(model, one, batch | options, group, one.config.model_type, EAGER_LIMIT)
        assert not seen.masks
        for x, y in zip(found.attentions or (), expected.attentions or (), strict=True):
            torch.testing.assert_close(x, y)
        assert options == {} or len(found.attentions) == 2
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
    assert [name for name in usual.split() if not has_usual_formula(function(name))] == []
    for name in ("gpt_oss", "t5", "mimo_v2_flash", "granite_swa", "vjepa2"):
        assert not has_usual_formula(function(name)), name
    assert not has_usual_formula(eager_of_a_user)


def eager_of_a_user(module: Any, query: Any, key: Any, value: Any, attention_mask: Any) -> None: ...


def check_prefill(rank: int, world: int, group: Group) -> None:
    model, one = pair(maker("mistral", **WINDOWS, use_cache=True), group)
    batch = {name: x for name, x in left_padded().items() if name != "labels"}
    with small() as seen:
        found, expected = [
            each.generate(**batch, max_new_tokens=12, do_sample=False) for each in (model, one)
        ]
    assert torch.equal(found, expected)
    assert isinstance(seen.masks[0], Spans)


def test_the_prefill_of_generate_has_spans(pool: Ranks) -> None:
    pool(2, check_prefill)


class Changed(nn.Module):
    """An attention module that also reads and changes its mask, as those of some models do."""

    def __init__(self, own: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.own, self.change = own, change

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return self.own(*args, attention_mask=self.change(attention_mask), **kwargs)


def floats(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


def without_a_key(mask: Tensor) -> Tensor:
    """Change the mask in place through a view of a slice."""
    sliced = mask[:, :, :, : mask.size(-1)]
    sliced[:, :, 2:, 1] = False
    return mask


def check_changed(rank: int, world: int, group: Group) -> None:
    for change in (floats, without_a_key):

        def make(change: Callable[[Tensor], Tensor] = change) -> Any:
            model = maker("mistral", **WINDOWS)()
            for layer in model.model.layers:
                layer.self_attn = Changed(layer.self_attn, change)
            return model

        model, one = pair(make, group)
        with small() as seen:
            check_step(model, one, packed_rows(), group, change.__name__)
        assert seen.masks and all(type(mask) is Tensor for mask in seen.masks), change.__name__


def test_a_mask_that_a_model_changes_is_its_own(pool: Ranks) -> None:
    pool(2, check_changed)


# ---- transformers' functions ----


def _chunks() -> Any:
    return masking_utils.chunked_causal_mask_function(8, torch.tensor([0, 5]))


def _ids(*rows: list[int]) -> Tensor:
    return torch.tensor([[number for number in row for _ in range(4)] for row in rows])


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "all": lambda: masking_utils.bidirectional_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(5),
    "window of both sides": lambda: masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": _chunks,
    "documents": lambda: masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 9 + [1] * 15, [0] * 19 + [1] * 5])),
        masking_utils.remap_positions_for_packed_sequence(
            masking_utils.sliding_window_causal_mask_function(3),
            torch.tensor([[*range(9), *range(15)], [*range(1, 20), *range(5)]]),
        ),
    ),
    "blocks": lambda: masking_utils.and_masks(
        masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.blockwise_overlay(_ids([-1, 0, 0, -1, 1, -1], [0, -1, -1, 1, 1, 2])),
        ),
        masking_utils.sliding_window_overlay(6),
    ),
    "blocks apart": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(_ids([0, -1, 0, -1, 1, 0], [0, 1, 2, 0, 1, 2])),
    ),
    "a user's": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda b, h, q, k: (q - k) % 3 == 0
    ),
}
OF_INTERVALS = {*FUNCTIONS} - {"a user's"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_spans_of_transformers_functions_are_its_masks(name: str) -> None:
    function, total = FUNCTIONS[name](), 24
    assert leaves_intervals(function) == (name in OF_INTERVALS)
    valid = torch.ones(2, total, dtype=torch.bool)
    valid[0, :3] = valid[1, 7:9] = valid[1, 20:] = False
    for padding in (None, valid):
        device = torch.device("cpu")
        wanted = Wanted(function, (2, 1, total, total), leaves_intervals(function), padding, device)
        expected = masking_utils.sdpa_mask(
            2, total, total, mask_function=function, attention_mask=padding, allow_is_causal_skip=False
        )
        assert torch.equal(wanted.spans(None).dense().expand_as(expected), expected)


def test_only_the_stock_interface_is_replaced() -> None:
    interface = masking_utils.AttentionMaskInterface
    own = masking_utils.sdpa_mask
    with mask_makers.making_spans(masking_utils):
        assert interface()["sdpa"] is not own
        with mask_makers.making_spans(masking_utils):  # the user's, such as this one, stays
            pass
        assert interface()["sdpa"] is not own
        dense = interface()["sdpa"](batch_size=1, q_length=5, kv_length=5, allow_is_causal_skip=False)
        assert type(dense) is Tensor  # outside of a view
    assert interface()["sdpa"] is own

    class Old:
        @staticmethod
        def sdpa_mask(batch_size: int, cache_position: Tensor, kv_length: int) -> None: ...

        AttentionMaskInterface = interface

    with mask_makers.making_spans(Old):
        assert interface()["sdpa"] is own


# ---- memory ----

LONG = 4096


def long_rows() -> dict[str, Tensor]:
    ids = torch.randint(1, 53, (1, LONG), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, -100:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def allocated(model: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return the largest tensor that a step allocates, and the peak, in bytes."""
    with torch.profiler.profile(profile_memory=True) as profile:
        model(**batch).loss.backward()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    sizes = [size for _, size in changes]
    return max(sizes), max(accumulate(sizes))


def check_memory(rank: int, world: int, group: Group) -> None:
    changes = {"sliding_window": 128, "hidden_size": 16, "max_position_embeddings": LONG}
    few = {"num_attention_heads": 2, "num_key_value_heads": 1}
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = maker("mistral", **changes, **few)()
        model.set_attn_implementation(attention)
        spar.shard_model(model, group)
        largest, peak = allocated(model, long_rows())
        assert largest < LONG * LONG / 8, largest
        assert peak < LONG * LONG, peak
        with small(1 << 62):
            dense, _ = allocated(model, long_rows())
        assert dense >= LONG * LONG, "the measure does not see masks"


def test_no_rank_has_a_tensor_of_all_pairs(pool: Ranks) -> None:
    pool(2, check_memory)
