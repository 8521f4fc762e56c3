# SPDX-License-Identifier: Apache-2.0
"""The names that models of transformers had before spar.parallelize: they warn, and do the same."""

from __future__ import annotations

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

from spar import SequenceLayout
from spar.integrations.transformers import register, shard, total_loss

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


def parallel(name: str) -> Any:
    torch.manual_seed(0)
    model = maker(name)()
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
            part = shard(model, batch, layout, group=group, method=method)
        out = model(**part)
        out.loss.backward()
        with pytest.warns(DeprecationWarning, match="total_loss"):
            total = total_loss(out.loss, group=group)
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
