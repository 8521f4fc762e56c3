# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers under spar.parallelize: spans, with the results of one process, and no S x S."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.llms import left_padded, maker, packed_rows, whole
from helpers.multimodal import made
from helpers.view_masks import BATCHES, TEXTS, WINDOWS, check_step, pair, small
from torch import Tensor, nn
from transformers import masking_utils

import spar
from spar._attention.spans import Spans
from spar.integrations._transformers import mask_makers
from spar.integrations._transformers.masks import MaskRequest, leaves_intervals

PRELOAD = ["transformers.models.mistral.modeling_mistral", "transformers.models.gemma3.modeling_gemma3"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


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
        spar.parallelize(model, group)
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
    """Eager attention, by which a query without keys has its sink alone."""
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
    model, one = pair(maker("GptOss", **config), group)
    for each in (model, one):
        each.set_experts_implementation("eager")  # grouped products have no float64
    for kind in ("plain", "left"):
        with small() as seen:
            check_step(model, one, BATCHES[kind](), group, kind)
        assert len(seen.masks) == 2 and all(isinstance(mask, Spans) for mask in seen.masks)


def test_sinks_with_windows_are_exact(pool: Ranks) -> None:
    pool(2, check_eager)


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
        wanted = MaskRequest(function, (2, 1, total, total), leaves_intervals(function), padding, device)
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
        spar.parallelize(model, group)
        largest, peak = allocated(model, long_rows())
        assert largest < LONG * LONG / 8, largest
        assert peak < LONG * LONG, peak
        with small(1 << 62):
            dense, _ = allocated(model, long_rows())
        assert dense >= LONG * LONG, "the measure does not see masks"


def test_no_rank_has_a_tensor_of_all_pairs(pool: Ranks) -> None:
    pool(2, check_memory)
