# SPDX-License-Identifier: Apache-2.0
"""transformers' generate of models under spar.parallelize: each rank holds its part of the cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.multimodal import TEXT, made
from torch import Tensor, nn

import spar
from spar._model.part import part_of

PRELOAD = ["transformers.models.llama.modeling_llama", "transformers.generation.utils"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
PROMPT, NEW = 21, 20
SMALL = TEXT | {"initializer_range": 0.5}  # so that tokens are not always the same


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def gemma3() -> Any:
    """Windows that end inside of the prompt."""
    config = SMALL | {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 3}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config))


def t5() -> Any:
    config = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**config, decoder_start_token_id=0))


MAKERS: list[Callable[[], Any]] = [llama, gemma3, t5]


def pair(make: Callable[[], Any], group: Group, layout: str = "even") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make().double().eval()
    whole = copy.deepcopy(model)
    spar.parallelize(model, group, layout=layout)
    return model, whole


def prompt() -> dict[str, Tensor]:
    """Two rows, one of them padded on the left."""
    ids = torch.randint(2, 64, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def check_generate(rank: int, world: int, group: Group) -> None:
    for make, layout in (*[(make, "even") for make in MAKERS], (llama, "zigzag")):
        model, whole = pair(make, group, layout)
        for sample in (False, True):
            found = []
            for each in (model, whole):
                torch.manual_seed(3)
                options = {"max_new_tokens": NEW, "do_sample": sample, "pad_token_id": 0}
                found.append(each.generate(**prompt(), **options))
            assert torch.equal(*found), (make.__name__, sample)


def test_generate_returns_the_tokens_of_one_process(ranks: Ranks) -> None:
    ranks(3, check_generate)


def check_changed_caches(rank: int, world: int, group: Group) -> None:
    """Beam search reorders the cache between forwards; looking tokens up in the prompt cuts it."""
    beams, lookup = {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}
    for make, options in ((llama, beams), (gemma3, beams), (t5, beams), (llama, lookup)):
        model, whole = pair(make, group)
        given = prompt() if options is beams else {"input_ids": prompt()["input_ids"][1:]}
        found = [
            each.generate(**given, max_new_tokens=9, pad_token_id=0, **options) for each in (model, whole)
        ]
        assert torch.equal(*found), (make.__name__, options)


def test_generation_that_changes_caches(ranks: Ranks) -> None:
    ranks(2, check_changed_caches)


def check_copied_cache(rank: int, world: int, group: Group) -> None:
    """Several continuations of one prompt, each from a copy of its cache."""
    model, _ = pair(llama, group)
    cache: Any = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(), past_key_values=cache, use_cache=True)
    copied = copy.deepcopy(cache)
    copied.reorder_cache(torch.tensor([1, 1]))
    for was, now in zip(cache.layers, copied.layers, strict=True):
        assert part_of(now.keys) is part_of(was.keys) is not None
        assert torch.equal(now.keys, was.keys[[1, 1]]) and not torch.equal(now.keys, was.keys)


def test_copied_cache_is_changed_alone(ranks: Ranks) -> None:
    ranks(2, check_copied_cache)


def check_cache(rank: int, world: int, group: Group) -> None:
    model, _ = pair(llama, group)
    cache: Any = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        assert part_of(layer.keys) is not None and part_of(layer.values) is not None
        assert layer.keys.size(2) in (PROMPT // world, PROMPT // world + 1)


def test_each_rank_holds_its_part_of_the_cache(ranks: Ranks) -> None:
    ranks(3, check_cache)


def check_image(rank: int, world: int, group: Group) -> None:
    model, batch = made("qwen3_vl")
    batch = {name: value for name, value in batch.items() if name not in ("labels", "use_cache")}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    whole: nn.Module = copy.deepcopy(model)
    spar.parallelize(model, group)
    found = [each.generate(**batch, max_new_tokens=8, pad_token_id=0) for each in (model, whole)]  # type: ignore[operator]
    assert torch.equal(*found)


def test_generate_of_images(ranks: Ranks) -> None:
    ranks(2, check_image)
