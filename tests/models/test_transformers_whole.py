# SPDX-License-Identifier: Apache-2.0
"""Modules that run on the whole sequence on each rank, as one process: `shard(..., whole=)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.float64 import in_float64
from helpers.llms import even, left_padded, packed, packed_rows, seeded, whole, zigzag
from helpers.whole_models import TYPES, check_exact, maker
from torch import nn
from torch.distributed.fsdp import fully_shard

import spar
from spar import SequenceLayout
from spar.integrations._transformers.whole_state import state
from spar.integrations.transformers import shard, total_loss
from spar.parallel_state import destroy_parallel_state, init_parallel_state

pytestmark = pytest.mark.long

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp"]
POOL = (2, 3, 4)
Changes = dict[str, int]
ONE = {"num_hidden_layers": 1}
Group = dist.ProcessGroup

# ---- each type ----


def check_type(rank: int, world: int, group: Group, name: str) -> None:
    check_exact(name, whole(), group, layout=even)
    check_exact(name, left_padded(), group, layout=zigzag)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_types_are_exact(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_type, name)


def check_float64(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name)
    with in_float64(type(make())):
        for batch, layout in ((whole(), even), (left_padded(), zigzag)):
            check_exact(name, batch, group, in_double(make), layout=layout, tolerance=1e-9)


def in_double(make: Callable[[], Any]) -> Callable[[], Any]:
    def double() -> Any:
        model = make().to(torch.float64)
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # torch has no grouped products in float64
        return model

    return double


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("sinks", "eager")])
def test_gradients_in_float64(pool: Ranks, name: str) -> None:
    pool(3, check_float64, name)


# ---- layouts and documents ----


def check_hybrid_layout(rank: int, world: int, group: Group) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    try:
        layout = SequenceLayout.hybrid(37, state)
        for name in ("recurrent_gemma", "deepseek_v32", "layers"):
            check_exact(name, left_padded(), layout.group, layout=layout)
    finally:
        destroy_parallel_state()


def test_ring_by_ulysses(pool: Ranks) -> None:
    pool(4, check_hybrid_layout)


def check_documents(rank: int, world: int, group: Group, name: str) -> None:
    """Packed documents: the module receives whole rows, and the masks of one process."""
    check_exact(name, packed(5, 1, 18, 2, 11), group)  # a packed layout: shard passes no mask
    for layout in (even, zigzag):
        check_exact(name, packed_rows(), group, layout=layout)


@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv", "zaya", "deepseek_v32", "nemotron", "layers"])
def test_documents(pool: Ranks, name: str) -> None:
    pool(3, check_documents, name)


def check_masks(rank: int, world: int, group: Group) -> None:
    """Masks of the user: a 4-D tensor, and spans."""
    spans = spar.Spans.causal(37) & spar.Spans.window(37, 11, 0)
    for name in ("layers", "deepseek_v32", "nemotron"):
        batch = whole() | {"attention_mask": spans.dense().expand(2, 1, 37, 37)}
        check_exact(name, batch, group, layout=zigzag)
    model = seeded(maker("layers"), "spar")
    spans &= spar.Spans.window(37, 7, 0)  # within the model's window
    found = []
    for mask in (spans, spans.dense().expand(2, 1, 37, 37)):
        batch, pattern = whole() | {"attention_mask": mask}, ["model.layers.1"]
        part = shard(model, batch, group=group, token_group=group, whole=pattern)
        found.append(model(**part).logits)
    torch.testing.assert_close(*found)
    patterns = TYPES["recurrent_gemma"][2]
    with pytest.raises(
        ValueError, match=r"has spar\.Spans, which modules of whole=.* may not honour; expected"
    ):
        model = seeded(maker("recurrent_gemma"), "spar")
        shard(model, whole() | {"attention_mask": spans}, group=group, token_group=group, whole=patterns)


def test_masks_of_the_user(pool: Ranks) -> None:
    pool(2, check_masks)


def check_methods(rank: int, world: int, group: Group) -> None:
    for method in ("gather", "ring", "ulysses"):
        for patterns in (["model.layers.1.self_attn"], ["model.layers.0"]):
            check_exact("layers", left_padded(), group, layout=zigzag, method=method, whole=patterns)


def test_beside_other_attention_layers(pool: Ranks) -> None:
    pool(3, check_methods)


def check_alike_sizes(rank: int, world: int, group: Group) -> None:
    """8 own tokens, as there are heads, and ranks with other numbers of them."""
    for name in ("zaya", "deepseek_v32", "rwkv", "layers"):
        make = maker(name)
        with in_float64(type(make())):  # gradients of few tokens are as small as rounding in float32
            for total in (16, 15, 3, 2):
                check_exact(name, whole(2, total), group, in_double(make), layout=even, tolerance=1e-9)


def test_sizes_that_are_equal_by_chance(pool: Ranks) -> None:
    pool(2, check_alike_sizes)


def check_one_rank(rank: int, world: int, group: Group) -> None:
    for name in ("zaya", "rwkv", "deepseek_v32", "layers"):
        check_exact(name, left_padded(), group, layout=even)
        check_exact(name, packed(5, 1, 18, 2, 11), group)


def test_one_rank(pool: Ranks) -> None:
    pool(1, check_one_rank)


# ---- with what else a model may use ----


def check_checkpointing(rank: int, world: int, group: Group, name: str, reentrant: bool) -> None:
    def make() -> Any:
        model = maker(name)()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    check_exact(name, left_padded(), group, make, layout=zigzag)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["rwkv", "xlstm", "deepseek_v32", "layers", "all", "mamba"])
def test_gradient_checkpointing(pool: Ranks, name: str, reentrant: bool) -> None:
    pool(2, check_checkpointing, name, reentrant)


def check_two_layouts(rank: int, world: int, group: Group, name: str, reentrant: bool) -> None:
    """Two batches run forward before the backward of both: each one has its own layout there."""
    make, batches = maker(name), (whole(2, 36), whole(2, 20))
    expected = llms.gradients_of_one_process(make, *batches, attention=CHECKPOINTED[name])
    model = seeded(make, CHECKPOINTED[name] if name == "rwkv" else "spar")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses = []
    for batch, layout in zip(batches, (even, zigzag), strict=True):
        layout = layout(batch["input_ids"].size(1), group)
        batch = batch | {"num_items_in_batch": count}
        losses.append(model(**shard(model, batch, layout, token_group=group, whole=TYPES[name][2])).loss)
    sum(losses).backward()
    for p in model.parameters():
        p.grad = spar.all_gather(p.grad[None], group).sum(0)
    llms.check_gradients(model, expected)
    assert state.layout is None and state.entered is None


CHECKPOINTED = {"rwkv": "eager", "nemotron": "sdpa"}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_layouts_of_layers_that_run_again(pool: Ranks, name: str, reentrant: bool) -> None:
    pool(2, check_two_layouts, name, reentrant)


def check_other_checkpointing(rank: int, world: int, group: Group) -> None:
    """Checkpoints around modules: the layout is among their arguments, or its absence is an error."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    for reentrant in (wrappers.CheckpointImpl.REENTRANT, wrappers.CheckpointImpl.NO_REENTRANT):
        for name in ("deepseek_v32", "rwkv"):
            expected = llms.gradients_of_one_process(maker(name), whole(), attention="eager")
            model = seeded(maker(name), "spar" if name == "deepseek_v32" else "eager")
            layers = model.model.layers if name == "deepseek_v32" else model.rwkv.blocks
            for index, layer in enumerate(layers):
                layers[index] = wrappers.checkpoint_wrapper(layer, checkpoint_impl=reentrant)
            groups = {"group": group, "token_group": group}
            loss = model(**shard(model, whole(), **groups, whole=TYPES[name][2])).loss
            if name == "rwkv":
                with pytest.raises(ValueError, match=r"runs again in backward, and the layout .* not known"):
                    loss.backward()
                continue
            loss.backward()
            for p in model.parameters():
                p.grad = None if p.grad is None else spar.all_gather(p.grad[None], group).sum(0)
            names = {key.replace("_checkpoint_wrapped_module.", ""): p for key, p in model.named_parameters()}
            for key, gradient in expected.items():
                if gradient is None:  # of an indexer
                    continue
                error = (names[key].grad - gradient).abs().max()
                assert error < llms.TOLERANCE * gradient.abs().max(), key


def test_checkpoints_of_torch(pool: Ranks) -> None:
    pool(2, check_other_checkpointing)


def check_lora(rank: int, world: int, group: Group, name: str) -> None:
    from peft import LoraConfig, get_peft_model

    targets = {"zaya": ["q_proj", "v_proj_delayed", "o_proj"], "rwkv": ["key", "value"]}[name]

    def adapted() -> Any:
        settings = LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
        return get_peft_model(maker(name)(), settings)

    check_exact(name, left_padded(), group, adapted, layout=zigzag)


@pytest.mark.parametrize("name", ["zaya", "rwkv"])
def test_lora(pool: Ranks, name: str) -> None:
    pool(2, check_lora, name)


def check_ddp(rank: int, world: int, group: Group, name: str) -> None:
    """dp 2 x cp 2: gradients are averaged."""
    _, dp, cp = llms.meshes()
    make, batch = maker(name), whole(llms.ROWS)
    expected = llms.gradients_of_one_process(make, batch, attention="eager")
    model = seeded(make, "eager" if name == "rwkv" else "spar")
    wrapped = nn.parallel.DistributedDataParallel(model)
    part = shard(wrapped, llms.rows(batch, dp), group=cp, token_group=dp, whole=TYPES[name][2])
    loss = wrapped(**part).loss
    (loss * world).backward()
    llms.check_gradients(wrapped, expected)
    assert total_loss(loss, group=cp, token_group=dp) > 1


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_ddp(pool: Ranks, name: str) -> None:
    pool(4, check_ddp, name)


def check_fsdp2(rank: int, world: int, group: Group, name: str, inner: bool) -> None:
    """dp 2 x cp 2, with checkpointing; the modules themselves are sharded, or the layers around them."""
    mesh, dp, cp = llms.meshes()
    make, batch = maker(name), whole(llms.ROWS)
    expected = llms.gradients_of_one_process(make, batch, attention="eager")
    model = seeded(make, "eager" if name == "rwkv" else "spar")
    model.gradient_checkpointing_enable()
    for layer in model.rwkv.blocks if name == "rwkv" else model.model.layers:
        if inner:
            block = layer.attention if name == "rwkv" else layer.temporal_block
            fully_shard(block, mesh=mesh._flatten("world"))
        fully_shard(layer, mesh=mesh._flatten("world"))
    fully_shard(model, mesh=mesh["world"])
    for _ in range(2):
        model.zero_grad()
        part = shard(model, llms.rows(batch, dp), group=cp, token_group=dp, whole=TYPES[name][2])
        (model(**part).loss * world).backward()
        llms.check_gradients(model, expected)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_fsdp2(pool: Ranks, name: str, inner: bool) -> None:
    pool(4, check_fsdp2, name, inner)


def check_bfloat16(rank: int, world: int, group: Group, name: str) -> None:
    check_exact(name, left_padded(), group, lambda: maker(name)().bfloat16(), tolerance=0.1)


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma", "layers"])
def test_bfloat16(pool: Ranks, name: str) -> None:
    pool(3, check_bfloat16, name)


def check_compiled(
    rank: int, world: int, group: Group, name: str, patterns: list[str], changes: Changes, fullgraph: bool
) -> None:
    """Rank 0 compiles, so that only one process does; a second layer would be traced as the first."""
    model = seeded(maker(name, **changes), "spar")
    torch._dynamo.reset()
    forward = torch.compile(model, backend="aot_eager", fullgraph=fullgraph) if rank == 0 else model
    for total in (29, 37):
        groups = {"group": group, "token_group": group}
        part = shard(forward, whole(1, total), **groups, whole=patterns, method="ulysses")
        found = []
        for run in (model, forward):
            model.zero_grad()
            loss = run(**part).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert rank > 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize(
    ("name", "patterns", "changes", "fullgraph"),
    [
        ("nemotron", TYPES["nemotron"][2], ONE, True),
        ("all", ["model.layers.1"], {}, True),
        ("deepseek_v32", TYPES["deepseek_v32"][2], ONE | {"first_k_dense_replace": 0}, False),
    ],
)
def test_compiled_models(
    pool: Ranks, name: str, patterns: list[str], changes: Changes, fullgraph: bool
) -> None:
    pool(2, check_compiled, name, patterns, changes, fullgraph, timeout=280)


# ---- what moves ----


def check_bytes(rank: int, world: int, group: Group) -> None:
    """The formulas of docs/hybrid.md, for a module that receives hidden states alone."""
    total, model = 12 * world, seeded(maker("rwkv"), "eager")
    patterns = TYPES["rwkv"][2]  # two modules in each of two layers
    part = shard(model, whole(1, total), group=group, token_group=group, whole=patterns)
    part.pop("labels")
    before = sent()
    hidden = model(**part).logits
    forward = sent() - before
    hidden.square().sum().backward()
    items = (world - 1) * total * 32 // world * 4  # float32
    assert (forward, sent() - before - forward) == (4 * items, 4 * items)


def sent() -> int:
    return sum(n for name, n in spar.memory_stats().items() if name.startswith("sent."))


@pytest.mark.parametrize("world", [2, 3])
def test_bytes(pool: Ranks, world: int) -> None:
    pool(world, check_bytes)
