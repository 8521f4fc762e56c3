# SPDX-License-Identifier: Apache-2.0
"""The names that models of transformers had before spar.parallelize: they warn, and do the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.llms import (
    PRELOAD as PRELOAD,
    check_gradients,
    gradients_of_one_process,
    maker,
    meshes,
    rows,
    whole,
)
from torch.nn.parallel import DistributedDataParallel

import spar
from spar import SequenceLayout
from spar.integrations.transformers import register, shard, total_loss

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def parallel(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = maker(name, **changes)()
    with pytest.warns(DeprecationWarning, match=r"use spar\.parallelize\(model, group\)"):
        register()
    model.set_attn_implementation("spar")
    return model


def check_layouts(rank: int, world: int, group: Group) -> None:
    batch = whole()
    expected = gradients_of_one_process(maker("llama"), batch)
    model = parallel("llama")
    one = maker("llama")
    torch.manual_seed(0)
    reference = one()(**batch)
    logits = reference.logits.detach()
    for layout, method in ((None, None), (SequenceLayout.zigzag(37, group), "ring")):
        model.zero_grad()
        with pytest.warns(DeprecationWarning, match=r"transformers\.shard .* 0\.4\.0; use spar\.parallelize"):
            part = shard(model, batch, layout, group=group, method=method, token_group=group)
        out = model(**part)
        out.loss.backward()
        with pytest.warns(DeprecationWarning, match="total_loss"):
            total = total_loss(out.loss, group=group, token_group=group)
        assert abs(total - reference.loss) < 1e-5 * reference.loss
        own = part["layout"].shard(logits, 1)
        assert (out.logits - own).abs().max() < 1e-5 * logits.abs().max()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
        check_gradients(model, expected)


@pytest.mark.parametrize("world", [2, 3])
def test_shard_gives_each_rank_its_share(ranks: Ranks, world: int) -> None:
    ranks(world, check_layouts)


def check_data_parallel(rank: int, world: int, group: Group) -> None:
    batch = whole(4)
    _, dp, cp = meshes()
    expected = gradients_of_one_process(maker("llama"), batch)
    model = DistributedDataParallel(parallel("llama"))
    with pytest.warns(DeprecationWarning):
        loss = model(**shard(model, rows(batch, dp), group=cp, token_group=dp)).loss
        (loss * world).backward()
        total = total_loss(loss, group=cp, token_group=dp)
    torch.manual_seed(0)
    assert abs(total - maker("llama")()(**batch).loss) < 1e-5 * total
    check_gradients(model, expected)


def test_shares_are_of_all_data_parallel_ranks(ranks: Ranks) -> None:
    ranks(4, check_data_parallel)


def check_documents(rank: int, world: int, group: Group) -> None:
    """Documents of the layout, or of cu_seq_lens_q, are those of position_ids that restart."""
    batch = whole(2)
    positions = torch.cat([torch.arange(20), torch.arange(17)]).expand(2, -1)
    model, own = parallel("llama"), {"group": group}
    torch.manual_seed(0)
    expected = maker("llama")()(**batch, position_ids=positions).loss
    ends = torch.tensor([0, 20, 37], dtype=torch.int32)
    packed = SequenceLayout.packed([20, 17], group)
    ways: list[tuple[Any, dict[str, Any]]] = [
        (packed, {}),
        (None, {"cu_seq_lens_q": ends}),
        (None, {"position_ids": positions}),
    ]
    with pytest.warns(DeprecationWarning):
        for layout, more in ways:
            part = shard(model, batch | more, layout, token_group=group, **own)
            total = total_loss(model(**part).loss, token_group=group, **own)
            assert abs(total - expected) < 1e-5 * expected, more
            ones = {"attention_mask": torch.ones(2, 37, dtype=torch.int64)}
            with pytest.raises(ValueError, match="is all ones, and there are packed documents"):
                shard(model, batch | more | ones, layout, token_group=group, **own)


def test_documents_stay_apart(ranks: Ranks) -> None:
    ranks(2, check_documents)


def check_labels(rank: int, world: int, group: Group) -> None:
    """Data-parallel ranks with other numbers of labels, also none."""
    _, dp, cp = meshes()
    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    for name, changes in (("llama", {}), ("GPT2LMHeadModel", none)):
        for first in (30, 37):
            batch = whole(2)
            batch["labels"] = batch["input_ids"].clone()
            batch["labels"][0, :first] = -100
            torch.manual_seed(0)
            one = maker(name, **changes)()
            one(**batch).loss.backward()
            model = DistributedDataParallel(parallel(name, **changes), find_unused_parameters=False)
            with pytest.warns(DeprecationWarning):
                loss = model(**shard(model, rows(batch, dp), group=cp, token_group=dp)).loss
                (loss * world).backward()
                total = total_loss(loss, group=cp, token_group=dp)
            torch.manual_seed(0)
            assert abs(total - maker(name, **changes)()(**batch).loss) < 1e-5 * total, (name, first)
            check_gradients(model, {n: p.grad for n, p in one.named_parameters()})
    model = parallel("llama")
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="token_group is None"):
        shard(model, whole(), group=cp)


def test_labels_count_alike(ranks: Ranks) -> None:
    ranks(4, check_labels)


def check_use(rank: int, world: int, group: Group) -> None:
    """Copies, forwards of whole batches, and shift_labels alone."""
    batch = whole()
    torch.manual_seed(0)
    expected = maker("llama")()(**batch).loss
    model = parallel("llama")
    shifted = {"shift_labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    with pytest.warns(DeprecationWarning):
        for given in (batch, {"input_ids": batch["input_ids"]} | shifted):
            part = shard(model, given, SequenceLayout.zigzag(37, group), token_group=group)
            for each in (model, copy.deepcopy(model)):
                total = total_loss(each(**part).loss, group=group, token_group=group)
                assert abs(total - expected) < 1e-5 * expected
        nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
        loss = model(**shard(model, nothing, group=group, token_group=group)).loss
        loss.backward()
        assert float(loss) == 0 and not any(p.grad.abs().max() for p in model.parameters())
    assert abs(model(**batch).loss - expected) < 1e-5 * expected
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="an attention of transformers"):
        register("sdpa")


def test_models_that_shard_parallelized_in_use(ranks: Ranks) -> None:
    ranks(2, check_use)


def check_alone(rank: int, world: int, group: Group) -> None:
    """What one rank alone gets wrong is an error of all, at once, and the group is in step afterwards."""
    batch, model = whole(), parallel("llama")
    given = {"group": group, "token_group": group}
    ones = {"attention_mask": torch.ones(2, 37, dtype=torch.int64), "position_ids": torch.arange(37) % 20}
    wrong = batch | (ones if rank else {})
    with pytest.warns(DeprecationWarning):
        expected = ValueError if rank else spar.MismatchError
        with pytest.raises(expected, match=r"transformers\.shard"):
            shard(model, wrong, **given)
        model(**shard(model, batch, **given)).loss.backward()


def test_a_rank_that_fails_alone_is_reported(ranks: Ranks) -> None:
    ranks(2, check_alone)
