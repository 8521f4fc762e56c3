# SPDX-License-Identifier: Apache-2.0
"""Models of transformers under spar.parallelize in 16 bits: autocast, GradScaler and FSDP2's policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.llms import (
    ROWS,
    adapted,
    check_exact,
    check_gradients,
    left_padded,
    maker,
    meshes,
    rows,
    seeded,
    whole,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import spar

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp", "peft"]
POOL = (2, 4)
Group = dist.ProcessGroup
# A mistake is off by 0.1 and more.
TOLERANCES = {kind: 10 * torch.finfo(kind).eps for kind in (torch.bfloat16, torch.float16)}


def cast(make: Callable[[], Any], kind: torch.dtype) -> Callable[[], Any]:
    """Return what makes a model whose forward runs under autocast, as accelerate's does."""

    def under_autocast() -> Any:
        model = make()
        model.forward = torch.autocast("cpu", kind)(model.forward)
        return model

    return under_autocast


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {}, "ulysses"),
    ("Qwen2", {}, "gather"),
    ("qwen3", {}, "ring"),
    ("mistral", {}, "ring"),
    ("Gemma3", {"sliding_window": 9}, None),
]


def check_autocast(rank: int, world: int, group: Group) -> None:
    """Norms and rotary embeddings leave q and k in float32 beside a v of 16 bits."""
    kind = torch.bfloat16  # float16 with scaled gradients: check_scaler
    for name, config, method in CASES:
        make = cast(maker(name, **config), kind)
        check_exact(make, whole(), group, TOLERANCES[kind], method=method)
    added = torch.zeros(1, 1, 37, 37).masked_fill(~torch.ones(37, 37, dtype=torch.bool).tril(), -torch.inf)
    for batch in (left_padded(), whole() | {"attention_mask": added}):
        check_exact(cast(maker("llama"), kind), batch, group, TOLERANCES[kind])


def test_autocast(pool: Ranks) -> None:
    pool(2, check_autocast)


def check_recomputed(rank: int, world: int, group: Group) -> None:
    def checkpointed(reentrant: bool) -> Any:
        model = maker("qwen3")()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    for make in (lambda: checkpointed(False), lambda: checkpointed(True), adapted):
        check_exact(cast(make, torch.bfloat16), whole(), group, TOLERANCES[torch.bfloat16])


def test_autocast_with_checkpointing_and_lora(pool: Ranks) -> None:
    pool(2, check_recomputed)


def check_scaler(rank: int, world: int, group: Group) -> None:
    """DDP over dp 2 x cp 2: scaled gradients are those of one process, and an overflow skips every rank."""
    _, dp, cp = meshes()
    make, batch = cast(maker("llama"), torch.float16), whole(ROWS)
    alone = seeded(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(alone(**batch).loss).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    inner, mine = seeded(make), rows(batch, dp)
    spar.parallelize(inner, cp)
    model = DistributedDataParallel(inner)
    scaler.scale(model(**mine).loss).backward()  # both halves of the batch have as many labels
    check_gradients(model, expected, TOLERANCES[torch.float16])
    descent, before = torch.optim.SGD(model.parameters()), model.module.lm_head.weight.detach().clone()
    if rank == 1:
        model.module.lm_head.weight.register_hook(lambda grad: grad * torch.inf)
    descent.zero_grad()
    scaler.scale(model(**mine).loss).backward()
    scaler.step(descent)
    scaler.update()
    assert scaler.get_scale() == 2.0**7 and before.equal(model.module.lm_head.weight)


def test_grad_scaler(pool: Ranks) -> None:
    pool(4, check_scaler)


def check_mixed_precision(rank: int, world: int, group: Group) -> None:
    """FSDP2 casts the parameters itself, without autocast: dp 2 x cp 2 beside a mesh of one rank."""
    mesh, dp, cp = meshes()
    alone = DeviceMesh.from_group([dist.new_group([r]) for r in range(world)][rank], "cpu")
    kind, batch = torch.bfloat16, whole(ROWS)
    policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)

    def sharded(over: DeviceMesh, group: DeviceMesh | None = None) -> Any:
        model = seeded(maker("qwen3"))
        if group is not None:
            spar.parallelize(model, group)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=over, mp_policy=policy)
        return model

    reference = sharded(alone)
    reference(**batch).loss.backward()
    expected = {name: p.grad.full_tensor() for name, p in reference.named_parameters()}
    model = sharded(mesh._flatten("world"), cp)
    model(**rows(batch, dp)).loss.backward()
    check_gradients(model, expected, TOLERANCES[kind])


def test_fsdp2_mixed_precision(pool: Ranks) -> None:
    pool(4, check_mixed_precision)
