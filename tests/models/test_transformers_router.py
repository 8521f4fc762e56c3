# SPDX-License-Identifier: Apache-2.0
"""Load-balancing losses of experts: the sum over the ranks is the loss of one process, and its gradients."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.llms import (
    ROWS,
    check_exact,
    check_gradients,
    even,
    gradients_of_one_process,
    maker,
    meshes,
    packed,
    packed_rows,
    rows,
    seeded,
    sharding,
    whole,
    zigzag,
)
from helpers.whole_attention import METHODS
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import spar
from spar.integrations.transformers import shard, total_loss

PRELOAD = llms.PRELOAD
POOL = (2, 3, 4)
Group = dist.ProcessGroup
ROUNDING = 3e-5
# A large part of the loss, so that mistakes in it show.
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", LOSS | {"num_local_experts": 4}),
    "qwen3 moe": ("Qwen3Moe", LOSS | llms.EXPERTS),
    "windows": ("Qwen3Moe", LOSS | llms.EXPERTS | {"sliding_window": 9, "use_sliding_window": True}),
    "gpt-oss": ("GptOss", LOSS | llms.MIXED | {"num_local_experts": 4}),
}


def padded(size: int = 2) -> dict[str, Tensor]:
    """Return a batch of which most of the first rank's tokens, or of the last one's, are padding."""
    batch = whole(size)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 14:] = 0
    mask[1:, 3:17] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def check_model(rank: int, world: int, group: Group, name: str) -> None:
    kind, config = MODELS[name]
    make = maker(kind, **config)
    batches = [whole(), padded()] + ([] if kind == "GptOss" else [packed_rows()])
    for place, (method, batch) in enumerate(product(METHODS, batches)):
        layout = (even, zigzag)[(place + world) % 2]  # the other one on another number of ranks
        check_exact(make, batch, group, ROUNDING, method=method, layout=layout)
    if kind != "GptOss":
        check_exact(make, packed(5, 20, 4, 12), group, ROUNDING)


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("name", MODELS)
def test_router_losses_are_exact(pool: Ranks, name: str, world: int) -> None:
    pool(world, check_model, name)


def check_parts(rank: int, world: int, group: Group) -> None:
    """A rank's loss is its part of the sum: neither that of all tokens, nor that of its own."""
    make = maker("Mixtral", **MODELS["mixtral"][1])
    for batch in (whole(), padded()):
        outputs = seeded(make, "sdpa")(**batch)
        model = seeded(make, "spar")
        part = shard(model, batch, group=group, token_group=group)
        routed = model(**part)
        parts = spar.all_gather(routed.aux_loss.detach()[None], group)
        torch.testing.assert_close(parts.sum(), outputs.aux_loss.detach())
        mask = batch.get("attention_mask")
        local = None if mask is None else part["layout"].shard(mask, 1)
        function = sys.modules[type(model).__module__].load_balancing_loss_func
        own = function(routed.router_logits, 4, 2, local).detach()
        mean = spar.all_gather(own[None], group).mean()
        assert abs(float(mean - outputs.aux_loss.detach())) > 1e-3, "the mean of the ranks' losses"


def test_parts_sum_to_the_loss(pool: Ranks) -> None:
    pool(2, check_parts)


def check_checkpointing(rank: int, world: int, group: Group) -> None:
    for name, reentrant in product(("mixtral", "gpt-oss"), (False, True)):
        kind, config = MODELS[name]

        def checkpointed(kind: str = kind, config: Any = config, reentrant: bool = reentrant) -> Any:
            model = maker(kind, **config)()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            return model

        check_exact(checkpointed, padded(), group, ROUNDING, method="ring", layout=zigzag)


def test_gradient_checkpointing(pool: Ranks) -> None:
    pool(2, check_checkpointing)


def check_ddp(rank: int, world: int, group: Group) -> None:
    """dp 2 x cp 2: one loss over the tokens of all samples, whichever token group has counted them."""
    _, dp, cp = meshes()
    kind, config = MODELS["qwen3 moe"]
    make, batch = maker(kind, **config), padded(ROWS)
    expected = gradients_of_one_process(make, batch)
    alone = seeded(make, "sdpa")(**batch)
    halves = [seeded(make, "sdpa")(**rows(batch, dp)).aux_loss.detach()]
    halves = list(spar.all_gather(torch.stack(halves), dp.get_group()))
    assert abs(float(sum(halves) / 2 - alone.aux_loss.detach())) > 1e-3, "the mean of the samples' losses"
    for tokens in (dp, group):
        model = DistributedDataParallel(seeded(make, "spar"))
        part = shard(model, rows(batch, dp), group=cp, token_group=tokens)
        loss = model(**part).loss
        (loss * world).backward()
        check_gradients(model, expected, ROUNDING)
        torch.testing.assert_close(total_loss(loss, group=cp, token_group=tokens), alone.loss.detach())
    # Labels that the caller has counted: the tokens are counted all the same.
    count = (batch["labels"][:, 1:] != -100).sum()
    given = rows(batch, dp) | {"num_items_in_batch": count}
    loss = model(**shard(model, given, group=cp, token_group=dp)).loss
    torch.testing.assert_close(total_loss(loss, group=cp, token_group=dp), alone.loss.detach())
    with pytest.raises(ValueError, match="token_group is None, and group has 2 of 4 ranks"):
        shard(model, given, group=cp)


def test_ddp_sums_one_loss_over_all_samples(pool: Ranks) -> None:
    pool(4, check_ddp)


def check_others(rank: int, world: int, group: Group) -> None:
    """Other losses are refused, and masks of pairs. Elsewhere the function is that of transformers."""
    kind, config = MODELS["mixtral"]
    model, batch = seeded(maker(kind, **config), "spar"), whole()
    pairs = torch.ones(37, 37, dtype=torch.bool).tril()[None, None]
    with pytest.raises(
        ValueError, match=r"of shape \[1, 1, 37, 37\], and config.output_router_logits is True"
    ):
        shard(model, batch | {"attention_mask": pairs}, group=group, token_group=group)
    module = sys.modules[type(model).__module__]
    logits, mask = (torch.randn(6, 4), torch.randn(6, 4)), torch.tensor([[1, 1, 0], [0, 1, 1]])
    own = module.load_balancing_loss_func
    for given in (None, mask):
        assert own(logits, 4, 2, given).equal(own.of_transformers(logits, 4, 2, given))
    assert own(None, 4, 2) == 0
    model.set_attn_implementation("sdpa")
    assert model(**padded()).loss.equal(seeded(maker(kind, **config), "sdpa")(**padded()).loss)
    module.load_balancing_loss_func = lambda logits, *_: logits[0].square().mean()
    try:
        with pytest.raises(ValueError, match="adds a loss that is not the usual one of load balancing"):
            sharding(group)(model, batch)
    finally:
        module.load_balancing_loss_func = own


def test_other_router_losses_are_refused(pool: Ranks) -> None:
    pool(2, check_others)


def check_compiled(rank: int, world: int, group: Group) -> None:
    """Rank 0 compiles the whole model, with the exchange of its router loss."""
    kind, config = MODELS["mixtral"]
    model = seeded(maker(kind, **config), "spar")
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
    for total in (24, 29, 37):
        part = shard(forward, whole(1, total), group=group, token_group=group, method="ulysses")
        found = []
        for run in (model, forward):
            model.zero_grad()
            loss = run(**part).loss
            loss.backward()
            found.append([loss.detach(), model.lm_head.weight.grad, model.model.embed_tokens.weight.grad])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_router_losses_compile(pool: Ranks) -> None:
    pool(2, check_compiled, timeout=280)
