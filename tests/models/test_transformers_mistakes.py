# SPDX-License-Identifier: Apache-2.0
"""The usual mistakes of sequence parallelism with transformers: each is right now, or an error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers import llms
from helpers.llms import check_exact, even, maker, packed, sharding, whole, zigzag

import spar
from spar import SequenceLayout
from spar.integrations.transformers import register, shard

PRELOAD = llms.PRELOAD
POOL = (2, 3, 4)
Group = dist.ProcessGroup


# ---- right now ----


def check_heads(rank: int, world: int, group: Group, heads: int, key_heads: int) -> None:
    sizes = {"hidden_size": 4 * heads, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    make = maker("llama", **sizes)
    for layout in (even, zigzag):
        check_exact(make, whole(), group, method="ulysses", layout=layout)


def test_rank_without_key_heads_of_its_own(pool: Ranks) -> None:
    pool(4, check_heads, 8, 2)


def test_key_heads_follow_their_query_heads(pool: Ranks) -> None:
    pool(3, check_heads, 12, 4)


def check_positions(rank: int, world: int, group: Group) -> None:
    """No position_ids in the batch: a rank's own begin where its shard does."""
    batch = whole()
    assert "position_ids" not in batch
    part = sharding(group)(maker("llama")(), batch)
    assert part["position_ids"].tolist() == [part["layout"].index().tolist()]
    check_exact(maker("llama"), batch, group, layout=zigzag)


def test_positions_are_those_of_the_whole_sequence(pool: Ranks) -> None:
    pool(2, check_positions)


def check_labels(rank: int, world: int, group: Group) -> None:
    """The label of a shard's last token is the first token of another rank."""
    batch = whole()
    part = sharding(group)(maker("llama")(), batch)
    ends = part["layout"].index()[-1]
    following = batch["labels"][:, ends + 1] if ends + 1 < 37 else torch.tensor([-100, -100])
    assert part["shift_labels"][:, -1].equal(following)
    given = {"input_ids": batch["input_ids"], "shift_labels": torch.roll(batch["labels"], -1, 1)}
    given["shift_labels"][:, -1] = -100
    assert sharding(group)(maker("llama")(), given)["shift_labels"].equal(part["shift_labels"])


def test_labels_are_shifted_before_they_are_sharded(pool: Ranks) -> None:
    pool(2, check_labels)


def check_mean(rank: int, world: int, group: Group) -> None:
    """All labels of rank 0 are ignored: a mean of the ranks' means would be far off."""
    batch = whole()
    batch["labels"][:, :19] = -100
    check_exact(maker("llama"), batch, group)
    batch["labels"][:] = -100
    model = maker("llama")()
    loss = model(**sharding(group)(model, batch)).loss
    loss.backward()
    assert float(loss) == 0


def test_loss_is_the_mean_over_all_tokens(pool: Ranks) -> None:
    pool(2, check_mean)


def check_gradient_of_gathered_keys(rank: int, world: int, group: Group) -> None:
    check_exact(maker("llama"), whole(), group, method="gather", layout=even)


def test_gathered_keys_have_all_gradients(pool: Ranks) -> None:
    pool(3, check_gradient_of_gathered_keys)


def check_window(rank: int, world: int, group: Group) -> None:
    """Mistral's window, in documents longer and shorter than it; and its mask is not forgotten."""
    for batch in (whole(), packed(5, 20, 12), packed(9, 4, 8, 9, 7)):
        check_exact(maker("mistral"), batch, group)
    model = maker("mistral")()
    part = sharding(group)(model, packed(9, 4, 8, 9, 7))
    assert part["attention_mask"] is None and part["layout"].kind == "packed"
    with pytest.raises(ValueError, match="sliding_window is 9 and there is no mask"):
        model(**sharding(group)(model, whole()) | {"attention_mask": None})


def test_sliding_windows(pool: Ranks) -> None:
    pool(2, check_window)


# ---- errors ----


def check_own_mask(rank: int, world: int, group: Group) -> None:
    """A 2-D mask that did not go through shard."""
    model, batch = maker("llama")(), whole()
    part = sharding(group)(model, batch)
    own = torch.ones_like(part["input_ids"])
    with pytest.raises(TypeError, match="multiple values for keyword argument 'attention_mask'"):
        model(**part, attention_mask=own)
    with pytest.raises(ValueError, match=r"attention_mask is of shape \[2, 1[89]\], and shard did not build"):
        model(**part | {"attention_mask": own})
    with pytest.raises(
        ValueError, match=r"batch\['attention_mask'\] is of shape \[2, 18\]; expected \[2, 37\]"
    ):
        shard(model, batch | {"attention_mask": torch.ones(2, 18)}, group=group, token_group=group)


def test_own_mask_is_an_error(pool: Ranks) -> None:
    pool(2, check_own_mask)


def check_other_samples(rank: int, world: int, group: Group) -> None:
    model, batch = maker("llama")(), whole()
    register()
    model.set_attn_implementation("spar")
    batch["input_ids"] = batch["input_ids"].roll(int(rank == 1))
    with pytest.raises(spar.MismatchError, match=r"batch\['input_ids'\] of ranks \[1\] differs") as caught:
        shard(model, batch, group=group, token_group=group)
    assert caught.value.ranks == (1,) and caught.value.rank == rank
    with pytest.raises(spar.MismatchError, match="layout, method, scan or whole of ranks"):
        shard(model, whole(), group=group, token_group=group, method=["ring", "gather"][rank])
    check_exact(maker("llama"), whole(), group)  # the group stays usable


def test_ranks_with_other_samples_are_an_error(pool: Ranks) -> None:
    pool(2, check_other_samples)


def check_forgotten_group(rank: int, world: int, group: Group) -> None:
    """dp 2 x cp 2, and no group: None is WORLD, whose ranks have other samples."""
    model = maker("llama")()
    register()
    model.set_attn_implementation("spar")
    batch = {name: x.roll(rank // 2, 1) for name, x in whole().items()}
    with pytest.raises(spar.MismatchError, match=r"ranks \[2, 3\] differs .* Pass the right `group`"):
        shard(model, batch)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.raises(ValueError, match="token_group is None, and group has 2 of 4 ranks"):
        shard(model, batch, group=halves[rank // 2])


def test_forgotten_group_is_an_error(pool: Ranks) -> None:
    pool(4, check_forgotten_group)


def check_dropout(rank: int, world: int, group: Group) -> None:
    functional = {"attention_dropout": 0.0, "residual_dropout": 0.1}  # without a module for it
    register()
    for model in (maker("SeedOss", **functional)(), maker("llama", attention_dropout=0.1)()):
        model.set_attn_implementation("spar")
        torch.manual_seed(0)
        with pytest.raises(spar.MismatchError, match=r"the same random numbers.*spar\.rank_seed"):
            shard(model, whole(), group=group, token_group=group)
    with spar.rank_seed(0, group):
        part = shard(model, whole(), group=group, token_group=group)
        loss = model(**part).loss
    loss.backward()
    model.eval()
    torch.manual_seed(0)
    shard(model, whole(), group=group, token_group=group)


def test_equal_seeds_with_dropout_are_an_error(pool: Ranks) -> None:
    pool(2, check_dropout)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotary embedding": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 32,
        },
        "beyond 32 positions, and there are 37, it depends on the highest position",
    ),
    "not causal": ("Llama", {"is_causal": False}, "its attention is not causal"),
}


def check_refused(rank: int, world: int, group: Group, name: str) -> None:
    kind, config, message = REFUSED[name]
    model = maker(kind, **config)()
    with pytest.raises(ValueError, match=message):
        model(**sharding(group)(model, whole()))


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_sharded(pool: Ranks, name: str) -> None:
    pool(2, check_refused, name)


def check_caches(rank: int, world: int, group: Group) -> None:
    model, batch = maker("llama", use_cache=True)(), whole()
    part = sharding(group)(model, batch)
    assert part["use_cache"] is False and model(**part).past_key_values is None
    cache = transformers.DynamicCache(config=model.config)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'past_key_values'"):
        model(**part, past_key_values=cache)
    with pytest.raises(ValueError, match="there is a KV cache"):
        for _ in range(2):
            model(**part | {"past_key_values": cache})
    with pytest.raises(ValueError, match=r"For generate, .*set_attn_implementation\(\"sdpa\"\)"):
        model.generate(batch["input_ids"], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"expected the whole batch. Call set_attn_implementation"):
        model.generate(**part, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"layout is None.* docs/transformers.md, Trainer"):
        model(**batch)
    model.set_attn_implementation("sdpa")
    assert model.generate(batch["input_ids"], max_new_tokens=1).shape == (2, 38)


def test_caches_and_generate_are_refused(pool: Ranks) -> None:
    pool(2, check_caches)


def check_arguments(rank: int, world: int, group: Group) -> None:
    model, batch, ids = maker("llama")(), whole(), whole()["input_ids"]
    with pytest.raises(ValueError, match=r"uses the attention 'sdpa'; call .*register\(\)"):
        shard(model, batch, group=group, token_group=group)
    register()
    register()
    with pytest.raises(ValueError, match="name is 'sdpa', an attention of transformers"):
        register("sdpa")
    with pytest.raises(ValueError, match='attn_implementation="of spar"` is not supported'):
        type(model)._from_config(model.config, attn_implementation="of spar")
    register("of spar")
    type(model)._from_config(model.config, attn_implementation="of spar")
    model.set_attn_implementation("spar")
    ones, restart = torch.ones_like(ids), llms.restarts(20, 17)[None]
    lengths = torch.tensor([0, 10, 37], dtype=torch.int32)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ({"pixels": ids}, {}, r"batch\['pixels'\] is a Tensor; expected none"),
        ({"logits_to_keep": 1}, {}, r"batch\['logits_to_keep'\] is a int"),
        ({"input_ids": None}, {}, r"expected input_ids \[B, S\] or inputs_embeds"),
        ({"labels": ids[:, 1:]}, {}, r"batch\['labels'\] is of shape \[2, 36\]; expected \[2, 37\]"),
        ({"position_ids": ids[:, 1:]}, {}, r"batch\['position_ids'\] is of shape \[2, 36\]"),
        (
            {"position_ids": torch.zeros_like(ids)},
            {},
            r"batch\['position_ids'\] is all zeros in sample 0: 37 documents of one token; expected",
        ),
        (
            {"position_ids": torch.stack([llms.restarts(37), torch.zeros_like(ids[0])])},
            {},
            "all zeros in sample 1",
        ),
        ({"attention_mask": ones, "position_ids": restart}, {}, "all ones, and position_ids restart"),
        ({"cu_seq_lens_q": lengths, "attention_mask": ones}, {}, "passed, and cu_seq_lens_q too"),
        ({"cu_seq_lens_q": lengths[:2]}, {}, "the sum of the documents' lengths is 10; expected 37"),
        ({"cu_seq_lens_q": lengths, "position_ids": restart}, {}, r"is \[20, 17\]; expected \[10, 27\]"),
        ({}, {"layout": SequenceLayout.even(36, group)}, "expected a layout of 37 tokens"),
        ({}, {"layout": SequenceLayout("local", (37, 0), group)}, "without a token on rank 1"),
        (
            {"position_ids": torch.stack([restart[0], llms.restarts(37)])},
            {"layout": SequenceLayout.packed([20, 17], group)},
            r"documents of position_ids is None; expected \[20, 17\]",
        ),
    ]
    for entries, arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            shard(model, batch | entries, group=group, token_group=group, **arguments)
    ends = torch.arange(38, dtype=torch.int32)  # documents of one token that the batch names are meant
    one_token = {"position_ids": torch.zeros_like(ids), "cu_seq_lens_q": ends}
    assert shard(model, batch | one_token, group=group, token_group=group)["layout"].total == 37
    with pytest.raises(TypeError, match=r"expected a transformers\.PreTrainedModel"):
        shard(torch.nn.Linear(2, 2), batch, group=group)
    with pytest.raises(TypeError, match="batch is a Tensor; expected a dict"):
        shard(model, ids, group=group)
    with pytest.raises(TypeError, match="layout is 'even'; expected a SequenceLayout"):
        shard(model, batch, "even", group=group, token_group=group)  # type: ignore[arg-type]
    check_exact(maker("llama"), batch, group)  # the group stays usable


def test_arguments_are_checked(pool: Ranks) -> None:
    pool(2, check_arguments)


def check_failure_of_one(rank: int, world: int, group: Group) -> None:
    """A rank whose batch is refused: its peers raise its text, in the sequence group and in the other."""
    model, batch = maker("llama")(), whole()
    register()
    model.set_attn_implementation("spar")
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    cp, dp = pairs[rank // 2], pairs[2 + rank % 2]
    if rank == 0:
        batch["pixels"] = torch.ones(1)
    with pytest.raises((ValueError, spar.MismatchError), match=re.escape("batch['pixels']")):
        shard(model, batch, group=cp, token_group=dp)
    batch.pop("pixels", None)
    count = shard(model, batch, group=cp, token_group=dp)["num_items_in_batch"]
    assert int(count) == 2 * int((batch["labels"][:, 1:] != -100).sum())
    assert int(shard(model, batch, group=cp, token_group=group)["num_items_in_batch"]) == int(count)


def test_failure_of_one_rank_reaches_all(pool: Ranks) -> None:
    pool(4, check_failure_of_one)
