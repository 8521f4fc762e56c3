# SPDX-License-Identifier: Apache-2.0
"""Recurrences by state, as one process: scan="state" of `shard`, and the rule that chooses it."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.hybrid_models import (
    DOCUMENTS,
    FEW,
    ONE_OF_EACH,
    OTHERS,
    POOL as POOL,
    PRELOAD as PRELOAD,
    TYPES,
    WITHOUT_DOCUMENTS,
    check_documents,
    check_exact,
    check_float64,
    maker,
    padded,
    sent,
)
from helpers.llms import compared, even, seeded, whole, zigzag
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import spar
from spar import SequenceLayout
from spar.integrations._transformers.tokens import Tokens
from spar.integrations.transformers import shard
from spar.parallel_state import destroy_parallel_state, init_parallel_state

pytestmark = pytest.mark.long

Group = dist.ProcessGroup
CONVOLUTIONS = {"lfm2", "lfm2_moe", "lfm3"}
MAMBA1 = {"jamba", "mamba", "falcon_mamba", "zamba"}
BY_STATE = [name for name in TYPES if name not in CONVOLUTIONS | MAMBA1]


def check_type(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name)
    check_exact(make, whole(), group, layout=even, scan="state")
    check_exact(make, padded(), group, layout=zigzag, scan="state")
    if name not in WITHOUT_DOCUMENTS:
        assert check_documents(make, DOCUMENTS, group, scan="state").kind == "packed"
        check_documents(make, OTHERS, group, layout=zigzag, scan="state")


@pytest.mark.parametrize("name", BY_STATE)
def test_types_by_state(pool: Ranks, name: str) -> None:
    pool(3, check_type, name)


# each kind of recurrence on some of these numbers of ranks, and each number with some kinds
OTHER_WORLDS = [(1, "qwen3_next"), (1, "minimax"), (2, "kimi_linear"), (2, "bamba")]
OTHER_WORLDS += [(4, "qwen3_next"), (4, "bamba"), (4, "minimax")]


@pytest.mark.parametrize(("world", "name"), OTHER_WORLDS)
def test_types_by_state_on_other_numbers_of_ranks(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_type, name)


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "bamba", "zamba2", "minimax", "mamba2"]
)
def test_by_state_in_float64(pool: Ranks, name: str) -> None:
    pool(3, check_float64, name, "state")


def check_short(rank: int, world: int, group: Group, name: str) -> None:
    """Shards of one or two tokens, and documents that lie on one rank."""
    for total, layout in product((world, 2 * world + 1), (even, zigzag)):
        if total >= 2 * world or layout is even:
            batch = whole(2, total)
            batch["labels"] = batch["input_ids"]
            check_exact(maker(name), batch, group, layout=layout, scan="state")
    for documents in (((1, 1, 7),), ((1, 8), (8, 1)), ((3, 3, 3),)):
        check_documents(maker(name), documents, group, layout=even, scan="state")


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "minimax"])
def test_short_shards_by_state(pool: Ranks, name: str) -> None:
    pool(3, check_short, name)


def check_hybrid_layout(rank: int, world: int, group: Group) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    try:
        layout = SequenceLayout.hybrid(37, state)
        for name in ("qwen3_5_text", "bamba"):
            check_exact(maker(name), padded(), layout.group, layout=layout, scan="state")
    finally:
        destroy_parallel_state()


def test_ring_by_ulysses_by_state(pool: Ranks) -> None:
    pool(4, check_hybrid_layout)


# ---- with what else a model may use ----


def check_checkpointing(rank: int, world: int, group: Group, name: str, reentrant: bool) -> None:
    def make() -> Any:
        model = maker(name)()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    check_exact(make, padded(), group, layout=zigzag, scan="state")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "minimax"])
def test_gradient_checkpointing_by_state(pool: Ranks, name: str, reentrant: bool) -> None:
    pool(3, check_checkpointing, name, reentrant)


def check_lora(rank: int, world: int, group: Group) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        targets = ["q_proj", "in_proj_qkv", "out_proj"]
        return get_peft_model(
            maker("qwen3_5_text")(), LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
        )

    check_exact(adapted, whole(), group, layout=zigzag, scan="state")


def test_lora_by_state(pool: Ranks) -> None:
    pool(2, check_lora)


def check_few_parameters(rank: int, world: int, group: Group, name: str, trained: str) -> None:
    """Only parameters of the recurrence learn, so that the first layer's tokens have no gradient."""

    def make() -> Any:
        model = maker(name)()
        for path, p in model.named_parameters():
            p.requires_grad_(path.endswith(trained))
        return model

    check_exact(make, whole(), group, layout=even, scan="state")


@pytest.mark.parametrize("trained", ["A_log", "dt_bias"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba"])
def test_only_decays_learn_by_state(pool: Ranks, name: str, trained: str) -> None:
    pool(3, check_few_parameters, name, trained)


def check_bfloat16(rank: int, world: int, group: Group, name: str) -> None:
    def make() -> Any:
        return maker(name)().bfloat16()

    report = compared(make, whole(), group, scan="state")
    for entry in report.entries:
        assert entry.max_rel_error < 0.1, f"{entry}\n{report}"


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "mamba2"])
def test_bfloat16_by_state(pool: Ranks, name: str) -> None:
    pool(3, check_bfloat16, name)


def check_autocast(rank: int, world: int, group: Group, name: str) -> None:
    """States are exchanged and folded in float32."""
    losses = []
    for scan in ("heads", "state"):
        model = seeded(maker(name), "spar")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**shard(model, whole(), group=group, token_group=group, scan=scan)).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        losses.append(float(loss.detach()))
    assert abs(losses[1] - losses[0]) < 0.02 * abs(losses[0])


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "minimax"])
def test_autocast_by_state(pool: Ranks, name: str) -> None:
    pool(2, check_autocast, name)


def check_fsdp2(rank: int, world: int, group: Group, name: str) -> None:
    """dp 2 x cp 2, with checkpointing: gradients are averaged."""
    mesh, dp, cp = llms.meshes()
    make, batch = maker(name), whole(llms.ROWS)
    expected = llms.gradients_of_one_process(make, batch, attention="eager")
    for wrap in ("fsdp", "ddp"):
        model = seeded(make, "spar")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if wrap == "fsdp":
            for layer in model.base_model.layers:
                fully_shard(layer, mesh=mesh._flatten("world"))
            fully_shard(model, mesh=mesh["world"])
        else:
            model = DistributedDataParallel(model)
        part = shard(model, llms.rows(batch, dp), group=cp, token_group=dp, scan="state")
        (model(**part).loss * world).backward()
        llms.check_gradients(model, expected, 3e-5)


@pytest.mark.parametrize("name", ["bamba"])
def test_fsdp2_and_ddp_by_state(pool: Ranks, name: str) -> None:
    pool(4, check_fsdp2, name)


def check_compiled(rank: int, world: int, group: Group, name: str) -> None:
    """Rank 0 compiles, so that only one process does, for one length: those of scans make symbols slow."""
    model = seeded(maker(name, **ONE_OF_EACH[name]), "spar")
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
    batch = whole(1, 29)
    part = shard(forward, batch, group=group, token_group=group, method="ulysses", scan="state")
    found = []
    for run in (model, forward):
        model.zero_grad()
        loss = run(**part).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert rank > 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", ["bamba", "qwen3_5_text"])
def test_compiled_models_by_state(pool: Ranks, name: str) -> None:
    pool(2, check_compiled, name, timeout=280)


# ---- the rule ----


def check_rule(rank: int, world: int, group: Group) -> None:
    def chosen(
        scan: str | None, total: int, heads: int = 4, documents: Any = None, layout: Any = even
    ) -> bool:
        x = torch.zeros(1, 1, heads, 8)
        tokens = Tokens(layout(total, group), documents, scan)
        return tokens.passes_states([x, x, torch.zeros(1, 1, heads)], heads * 8 * 16)

    # A token has heads * (3 * 8 + 1) numbers, a state heads * 128. Each of P - 1 states goes to P - 1 ranks,
    # and of S tokens (P - 1) / P to another one.
    most = 2 * 128 * (world - 1) * world // 25
    assert not chosen("bytes", most) and chosen("bytes", most + 1)
    assert not chosen("bytes", 2 * most, layout=zigzag) and chosen("bytes", 3 * most, layout=zigzag)
    # Documents that begin on each rank's first token need no states.
    assert chosen("bytes", 3 * world, documents=((3,) * world,))
    for total in (world, 100 * most):
        assert not chosen(None, total) and chosen(None, total, heads=world - 1)
        assert chosen("bytes", total, heads=world - 1)
        assert chosen("state", total) and not chosen("heads", total, heads=1)


def test_rule(pool: Ranks) -> None:
    pool(3, check_rule)


def check_default(rank: int, world: int, group: Group) -> None:
    """What travels: states where heads are fewer than ranks, or bytes count and are fewer."""

    def moved(name: str, **given: Any) -> int:
        model = seeded(maker(name, **FEW[name]) if given.pop("few", False) else maker(name), "spar")
        part = shard(model, whole(), group=group, token_group=group, layout=even(37, group), **given)
        before = sent()[0]
        model(**part)
        return sent()[0] - before

    for name in FEW:
        heads, state = (moved(name, scan=scan) for scan in ("heads", "state"))
        assert moved(name) == heads != state
        assert moved(name, scan="bytes") in (heads, state)
        assert moved(name, few=True) == moved(name, few=True, scan="state")


def test_default_scan(pool: Ranks) -> None:
    pool(4, check_default)


def check_several_hosts(rank: int, world: int, group: Group) -> None:
    """Between hosts bytes count, which shard finds out where nothing else was exchanged before."""
    from spar.integrations._transformers import sharding as module

    model = seeded(maker("qwen3_5_text"), "spar")
    given = {"group": group, "token_group": group, "check": False}
    batch = {"input_ids": whole()["input_ids"]}
    assert "scan" not in shard(model, batch, **given)
    with pytest.MonkeyPatch.context() as patch:
        init, hosts = module.init, tuple((peer,) for peer in range(world))
        patch.setattr(module, "init", lambda *args: dataclasses.replace(init(*args), hosts=hosts))
        assert shard(model, batch, **given)["scan"] == "bytes"
        assert shard(model, batch, scan="heads", **given)["scan"] == "heads"
        llama = seeded(llms.maker("llama"), "spar")
        assert "scan" not in shard(llama, batch, **given)


def test_several_hosts(pool: Ranks) -> None:
    pool(2, check_several_hosts)


# ---- mistakes ----


def check_mistakes(rank: int, world: int, group: Group) -> None:
    model = seeded(maker("bamba"), "spar")
    given = {"group": group, "token_group": group}
    with pytest.raises(ValueError, match="scan is 'states'; expected 'heads', 'state', 'bytes' or None"):
        shard(model, whole(), scan="states", **given)
    for name in MAMBA1:
        text = (
            "scan is 'state', and .* is a layer of Mamba 1, whose scan continues no state; expected 'heads'"
        )
        with pytest.raises(ValueError, match=text):
            shard(seeded(maker(name), "spar"), whole(), scan="state", **given)
    with pytest.raises(spar.MismatchError, match=r"layout, method, scan or whole of ranks \[1\] differs"):
        shard(model, whole(), scan=["heads", "state"][rank], **given)
    with pytest.raises((ValueError, spar.MismatchError), match="scan is 'none'"):
        shard(model, whole(), scan=["heads", "none"][rank], **given)
    part = shard(model, whole(), scan=["heads", "state"][rank], check=False, **given)
    with pytest.raises(spar.MismatchError):
        model(**part)
    check_exact(maker("bamba"), whole(), group, scan="state")  # the group stays usable


def test_mistakes_with_scan(pool: Ranks) -> None:
    pool(2, check_mistakes)
