# SPDX-License-Identifier: Apache-2.0
"""Masks that the caller gives to `shard`: every layer honours them, or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import hybrid_models, llms
from helpers.llms import MIXED, check_exact, maker, recipe, seeded, sharding, whole, zigzag

import spar
from spar import Spans
from spar.integrations._transformers import given_masks

PRELOAD = llms.PRELOAD
POOL = (2, 3)
Group = dist.ProcessGroup
TOTAL = 37
CAUSAL = Spans.causal(TOTAL)


def tree() -> Spans:
    """Two branches of 15 and 12 tokens behind 10 that both attend to."""
    branch = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 15, 12]))
    return CAUSAL & (Spans.documents(branch) | Spans.prefix(TOTAL, 10))


def masked(mask: Any) -> dict[str, Any]:
    return whole() | {"attention_mask": mask}


def refused(group: Group, model: Any, mask: Any, message: str, layout: Any = None, **entries: Any) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        sharding(group, layout=layout)(model, masked(mask) | entries)
    assert f"rank {dist.get_rank(group)} of {group.size()}: batch['attention_mask']" in str(caught.value)


# ---- layers without attention ----


def check_states(rank: int, world: int, group: Group) -> None:
    """A state or a convolution would continue one branch in the next one."""
    message = "state spaces or convolutions, which pass .* expected spans of plain documents"
    for name in ("bamba", "qwen3_5_text", "lfm2", "jamba", "falcon_h1"):
        model = hybrid_models.built(hybrid_models.maker(name))
        for mask in (tree(), tree().dense(), CAUSAL & Spans.window(TOTAL, 5, 0), Spans.window(TOTAL, 3, 3)):
            refused(group, model, mask, message)
    refused(group, model, {"full_attention": tree(), "linear_attention": tree()}, message)
    model = hybrid_models.built(hybrid_models.maker("mamba"))
    with pytest.raises(ValueError, match=r"is Spans.*; expected \[B, S\], or none: the model has no"):
        sharding(group)(model, masked(tree()))


def test_branches_beside_states_and_convolutions_are_refused(pool: Ranks) -> None:
    pool(2, check_states)


def check_documents(rank: int, world: int, group: Group, name: str) -> None:
    """Layers without attention keep the documents of a mask apart, as those of position_ids."""
    make = hybrid_models.maker(name, **hybrid_models.ONE_OF_EACH[name])
    for documents in (hybrid_models.DOCUMENTS, hybrid_models.OTHERS):
        lengths = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in documents]
        spans = CAUSAL & Spans.documents(torch.stack(lengths))
        for layout in (None, zigzag):
            hybrid_models.check_documents(make, documents, group, mask=spans, layout=layout)
    hybrid_models.check_documents(make, documents, group, mask=spans.dense())
    mixer = {"bamba": "mamba", "qwen3_5_text": "linear_attn", "lfm2": "conv"}[name]
    with pytest.raises(ValueError, match=r"expected one document: modules of whole="):
        sharding(group, whole=[f"*.{mixer}"])(hybrid_models.built(make), masked(spans))
    packed = spar.SequenceLayout.packed(hybrid_models.DOCUMENTS[0], group)
    refused(group, hybrid_models.built(make), CAUSAL, r"is of documents of .* as the layout", layout=packed)


@pytest.mark.parametrize("name", ["bamba", "qwen3_5_text", "lfm2"])
def test_documents_of_masks_beside_states_and_convolutions(pool: Ranks, name: str) -> None:
    pool(3, check_documents, name)


# ---- windows ----


def check_windows(rank: int, world: int, group: Group) -> None:
    chunks = {"attention_chunk_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4}
    for name, config, window in (
        ("Mistral", {"sliding_window": 9}, "'sliding_attention': spans & spar.Spans.window(37, 8, 0)"),
        ("Gemma3", MIXED, "{'full_attention': spans, 'sliding_attention': spans & "),
        ("Llama4", chunks, "'chunked_attention': spans & spar.Spans.chunks(37, 16)"),
    ):
        model = maker(name, **config)()
        for mask in (tree(), CAUSAL):
            refused(group, model, mask, "queries attend to keys outside of config")
            with pytest.raises(ValueError) as caught:
                sharding(group)(model, masked(mask))
            assert window in str(caught.value), caught.value
    refused(
        group, maker("Gemma3", **MIXED)(), {"full_attention": tree(), "sliding_attention": None}, "is None"
    )


def test_one_mask_for_layers_with_windows_is_refused(pool: Ranks) -> None:
    pool(2, check_windows)


def check_by_kind(rank: int, world: int, group: Group) -> None:
    """A dict by kind of layer is exact, also where position_ids restart, as those of a tree do."""
    depth = torch.cat([torch.arange(25), torch.arange(10, 22)])
    by_depth = tree() & Spans.of(lambda b, h, q, k: depth[q] - depth[k] < 9, (1, 1, TOTAL, TOTAL))
    kinds = {"full_attention": tree(), "sliding_attention": by_depth}
    dense = {kind: spans.dense().expand(2, 1, -1, -1) for kind, spans in kinds.items()}
    positions = {"position_ids": depth.expand(2, -1)}
    for method in ("ulysses", "gather"):
        check_exact(maker("Gemma3", **MIXED), masked(dense) | positions, group, method=method)
    chunks = {"layer_types": ["chunked_attention", "full_attention"]}
    configs = {"Gemma3": MIXED, "Mistral": {}, "Llama4": llms.OTHERS["Llama4"] | chunks}
    for name, masks, alike in (
        ("Gemma3", kinds, dense),
        ("Mistral", {"sliding_attention": by_depth}, by_depth.dense()),
        ("Llama4", {"chunked_attention": by_depth, "full_attention": tree()}, None),
    ):
        model = seeded(maker(name, **configs[name]), "spar")
        logits = [
            model(**sharding(group)(model, masked(mask) | positions)).logits
            for mask in (masks, alike)
            if mask is not None
        ]
        torch.testing.assert_close(logits[0], logits[-1])
    # Within the window, one mask is honoured by all layers.
    short = CAUSAL & Spans.window(TOTAL, 8, 0)
    check_exact(maker("Mistral", sliding_window=9), masked(short.dense()), group)
    sharding(group)(maker("Mistral", sliding_window=9)(), masked(short))
    sharding(group)(maker("Mistral", sliding_window=25)(), masked(tree()) | positions)


def test_masks_by_kind_of_layer(pool: Ranks) -> None:
    pool(2, check_by_kind)


def check_recipe(rank: int, world: int, group: Group) -> None:
    """The tree of docs/transformers.md: each branch has the logits of its sample alone."""
    names: dict[str, Any] = {"spar": spar, "torch": torch}
    names["ids"] = torch.randint(1, 53, (1, 2000), generator=torch.Generator().manual_seed(0))
    exec(recipe("transformers.md", "tree & window"), names)
    config = MIXED | {"sliding_window": 512, "max_position_embeddings": 2048}
    model = seeded(maker("Gemma3", **config), "sdpa").eval()
    ids, places = names["ids"], torch.arange(2000)
    with torch.no_grad():
        branches = [places[:1600], torch.cat([places[:1000], places[1600:]])]
        alone = torch.cat([model(ids[:, branch]).logits[:, 1000:] for branch in branches], 1)
        model.set_attn_implementation("spar")
        part = spar.integrations.transformers.shard(model, names["batch"], group=group)
        found = part["layout"].gather(model(**part).logits, 1)[:, 1000:]
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)


def test_recipe_of_a_tree(pool: Ranks) -> None:
    pool(2, check_recipe)


# ---- dicts, and kinds that nobody knows ----


def check_dicts(rank: int, world: int, group: Group) -> None:
    model, kinds = maker("Gemma3", **MIXED)(), {"full_attention": tree(), "sliding_attention": tree()}
    restarts = {"position_ids": llms.restarts(10, 27)[None]}
    refused(group, model, {"full_attention": tree()}, r"for \['full_attention'\]; expected one for each of")
    refused(group, model, {"full_attention": tree()}, "expected one for each of", **restarts)
    refused(group, model, kinds | {"conv": None}, "'conv'")
    short = kinds | {"full_attention": Spans.causal(36)}
    refused(group, model, short, r"\['full_attention'\] is of shape \[1, 1, 36, 36\]; expected \[2, 37\]")
    refused(group, model, {"full_attention": 3}, r"\['full_attention'\] is a int; expected")
    refused(
        group,
        maker("Mistral")(),
        {"full_attention": tree()},
        r"expected one for each of \['sliding_attention'\]",
    )
    other = {"full_attention": tree() if rank else CAUSAL, "sliding_attention": tree()}
    with pytest.raises(spar.MismatchError, match=r"batch\['attention_mask'\] of ranks \[1\] differs"):
        sharding(group)(model, masked(other))
    experts = llms.EXPERTS | {"output_router_logits": True}
    refused(group, maker("Qwen3Moe", **experts)(), {"full_attention": tree()}, "output_router_logits is True")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(given_masks, "_ATTENDING", frozenset())
        refused(group, maker("llama")(), tree(), "whether layers of full_attention honour it is not known")


def test_dicts_of_masks_are_checked(pool: Ranks) -> None:
    pool(2, check_dicts)
