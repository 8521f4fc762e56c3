# SPDX-License-Identifier: Apache-2.0
"""Layers without attention: convolutions, linear attention and state spaces, as one process."""

from __future__ import annotations

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
    built,
    check_documents,
    check_exact,
    check_float64,
    maker,
    padded,
)
from helpers.llms import compared, even, packed, seeded, sharding, whole, zigzag
from torch.distributed.fsdp import fully_shard

from spar import SequenceLayout
from spar.integrations.transformers import shard
from spar.parallel_state import destroy_parallel_state, init_parallel_state

pytestmark = pytest.mark.long

Group = dist.ProcessGroup


# ---- each type ----


def check_type(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name)
    check_exact(make, whole(), group, layout=even)
    check_exact(make, padded(), group, layout=zigzag)
    if name not in WITHOUT_DOCUMENTS:
        assert check_documents(make, DOCUMENTS, group).kind == "packed"
        check_documents(make, OTHERS, group, layout=zigzag)
    else:
        with pytest.raises(ValueError, match="passes no position_ids to its masks"):
            sharding(group)(make(), packed(*DOCUMENTS[0]))


@pytest.mark.parametrize("name", TYPES)
def test_types_are_exact(pool: Ranks, name: str) -> None:
    pool(3, check_type, name)


# on 4 ranks qwen3_next and bamba are in test_fewer_heads_than_ranks
@pytest.mark.parametrize(
    ("world", "name"), [(2, "qwen3_next"), (2, "bamba"), (2, "lfm2"), (4, "mamba"), (4, "kimi_linear")]
)
def test_types_are_exact_on_other_numbers_of_ranks(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_type, name)


def check_few_heads(rank: int, world: int, group: Group, name: str) -> None:
    check_exact(maker(name, **FEW[name]), whole(), group, layout=zigzag)
    check_documents(maker(name, **FEW[name]), DOCUMENTS, group)


@pytest.mark.parametrize("name", FEW)
def test_fewer_heads_than_ranks(pool: Ranks, name: str) -> None:
    pool(4, check_few_heads, name)


def check_hybrid_layout(rank: int, world: int, group: Group) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    try:
        layout = SequenceLayout.hybrid(37, state)
        for name in ("qwen3_next", "mamba"):
            check_exact(maker(name), padded(), layout.group, layout=layout)
    finally:
        destroy_parallel_state()


def test_ring_by_ulysses(pool: Ranks) -> None:
    pool(4, check_hybrid_layout)


def check_other_layouts(rank: int, world: int, group: Group, name: str) -> None:
    """Documents in a layout that does not know of them: the same in all samples, or others.

    Others in a zigzag layout are in check_type.
    """
    for documents, layout in ((DOCUMENTS * 2, even), (DOCUMENTS * 2, zigzag), (OTHERS[::-1], even)):
        check_documents(maker(name), documents, group, layout=layout)
    assert check_documents(maker(name), DOCUMENTS * 2, group).kind == "packed"


@pytest.mark.parametrize("name", ["bamba", "mamba", "lfm2", "minimax"])
def test_documents_in_other_layouts(pool: Ranks, name: str) -> None:
    pool(3, check_other_layouts, name)


def check_balanced(rank: int, world: int, group: Group, name: str) -> None:
    """Documents that mostly stay whole; states go from rank to rank in the others."""
    layout = SequenceLayout.balanced(DOCUMENTS[0], group)
    for scan in (None, "state"):
        check_documents(maker(name), DOCUMENTS, group, layout=layout, scan=scan)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_documents_in_a_balanced_layout(pool: Ranks, name: str) -> None:
    pool(3, check_balanced, name)


def check_one_rank(rank: int, world: int, group: Group, name: str) -> None:
    """Packed documents are apart on one rank, too."""
    check_documents(maker(name), DOCUMENTS, group)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_documents_on_one_rank(pool: Ranks, name: str) -> None:
    pool(1, check_one_rank, name)


# ---- in float64 ----


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "zamba2"])
def test_gates_in_float64(pool: Ranks, name: str) -> None:
    pool(3, check_float64, name)


# ---- with what else a model may use ----


def check_methods(rank: int, world: int, group: Group, name: str) -> None:
    for method in ("ulysses", "ring"):
        check_exact(maker(name), padded(), group, layout=zigzag, method=method)
        check_documents(maker(name), DOCUMENTS, group, method=method)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_attention_methods(pool: Ranks, name: str) -> None:
    pool(3, check_methods, name)


def check_router_loss(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name, output_router_logits=True, router_aux_loss_coef=1.0)
    for batch in (whole(), padded()):
        check_exact(make, batch, group)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
def test_router_losses(pool: Ranks, name: str) -> None:
    pool(2, check_router_loss, name)


def check_checkpointing(rank: int, world: int, group: Group, name: str, reentrant: bool) -> None:
    """Layers run again in backward: those of Mamba find the layout in their mask."""

    def make() -> Any:
        model = maker(name)()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    check_exact(make, padded(), group, layout=zigzag)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba", "jamba"])
def test_gradient_checkpointing(pool: Ranks, name: str, reentrant: bool) -> None:
    pool(2, check_checkpointing, name, reentrant)


def check_lora(rank: int, world: int, group: Group) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "in_proj", "out_proj"]  # of attention, and of Mamba

    def adapted() -> Any:
        settings = LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
        return get_peft_model(maker("bamba")(), settings)

    assert sum(p.requires_grad for p in adapted().parameters()) == 12
    check_exact(adapted, whole(), group, layout=zigzag)


def test_lora(pool: Ranks) -> None:
    pool(2, check_lora)


def check_bfloat16(rank: int, world: int, group: Group, name: str) -> None:
    """Gates stay float32 beside keys of 16 bits, and a rank without heads has the others' dtype."""

    def make() -> Any:
        return maker(name, **({"linear_num_value_heads": 2} if name == "qwen3_next" else {}))().bfloat16()

    report = compared(make, whole(), group, scan="heads")
    for entry in report.entries:
        assert entry.max_rel_error < 0.1, f"{entry}\n{report}"


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_bfloat16(pool: Ranks, name: str) -> None:
    pool(3, check_bfloat16, name)


def check_compiled(rank: int, world: int, group: Group, name: str) -> None:
    """Rank 0 compiles, so that only one process does: one layer of each kind, as a scan is unrolled."""
    model = seeded(maker(name, **ONE_OF_EACH[name]), "spar")
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
    for total in (9, 12) if name == "lfm2" else (12,):  # those of scans make symbols slow
        part = shard(forward, whole(1, total), group=group, token_group=group, method="ulysses")
        found = []
        for run in (model, forward):
            model.zero_grad()
            loss = run(**part).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager)
    assert rank > 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_compiled_models(pool: Ranks, name: str) -> None:
    pool(2, check_compiled, name, timeout=280)


def check_fsdp2(rank: int, world: int, group: Group, name: str) -> None:
    """dp 2 x cp 2, with checkpointing: gradients are averaged."""
    mesh, dp, cp = llms.meshes()
    make, batch = maker(name), whole(llms.ROWS)
    expected = llms.gradients_of_one_process(make, batch, attention="eager")
    model = built(make)
    if name != "mamba":
        model.set_attn_implementation("spar")
    model.gradient_checkpointing_enable()
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh._flatten("world"))
    fully_shard(model, mesh=mesh["world"])
    part = shard(model, llms.rows(batch, dp), group=cp, token_group=dp)
    (model(**part).loss * world).backward()
    llms.check_gradients(model, expected)


@pytest.mark.parametrize("name", ["bamba", "mamba"])
def test_fsdp2(pool: Ranks, name: str) -> None:
    pool(4, check_fsdp2, name)
