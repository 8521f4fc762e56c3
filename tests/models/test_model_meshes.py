# SPDX-License-Identifier: Apache-2.0
"""transformers' tensor and expert parallelism beside spar.parallelize, whose ranks FSDP2 averages over."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.llms import SMALL
from helpers.meshes import full, mean
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed import DistributedConfig

import spar

pytestmark = pytest.mark.one_transport

POOL = (4, 8)  # The test of 8 ranks stands last: WORLD then has 8.
PRELOAD = [
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.gpt_oss.modeling_gpt_oss",
]
EXPERTS = {"num_experts_per_tok": 2, "vocab_size": 56, "head_dim": 8}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"vocab_size": 56}),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "gpt_oss": ("GptOss", EXPERTS | {"num_local_experts": 4, "sliding_window": 9}),  # sinks are divided
}


def saved(kind: str, folder: Path) -> Any:
    """Return a model, which rank 0 saves for all."""
    name, changes = TYPES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def loaded(model: Any, folder: Path, mesh: DeviceMesh, **sizes: Any) -> tuple[Any, spar.Report]:
    """Load a model divided, with the sequence over cp."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    divided = type(model).from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    return divided, spar.parallelize(divided, mesh["cp"])


def tokens(length: int, rows: int = 4) -> Tensor:
    return torch.randint(1, 53, (rows, length), generator=torch.Generator().manual_seed(length))


def check(model: Any, divided: Any, mesh: DeviceMesh, length: int, rows: int = 4) -> None:
    """Compare the loss and the gradients, which FSDP2 has averaged over dp and cp."""
    ids = tokens(length, rows)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    if "dp" in (mesh.mesh_dim_names or ()):
        ids = ids.chunk(2)[mesh["dp"].get_local_rank()]
    loss = divided(input_ids=ids, labels=ids).loss
    loss.backward()
    found = mean(full(loss), [dist.group.WORLD])
    assert abs(found - expected) < 1e-5 * expected, (found, expected)
    for (name, p), other in zip(divided.named_parameters(), model.parameters(), strict=True):
        gradient, expected = full(p.grad), other.grad
        assert (gradient - expected).norm() < 2e-5 * expected.norm() + 1e-6, name
    for each in (model, divided):
        each.zero_grad()


def check_tensor_parallel(rank: int, world: int, _: Any, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for kind in ("llama", "gpt_oss"):
        model = saved(kind, folder / kind)
        divided, report = loaded(model, folder / kind, mesh, fsdp_size=2, tp_size=2)
        for each in (model, divided):
            each.train()
        check(model, divided, mesh, 29)
        assert report.share < 0.53 and not report.functions, str(report)
        if kind == "llama":
            for each in (model, divided):
                each.gradient_checkpointing_enable()
            check(model, divided, mesh, 13)


def test_tensor_parallel_models_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, check_tensor_parallel, tmp_path)


# ranks of experts: those of tensor parallelism; half of the sequence's; all of them
EP = [
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    {"fsdp_size": 4, "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
]


def check_expert_parallel(rank: int, world: int, _: Any, folder: Path) -> None:
    model = saved("qwen3_moe", folder)
    for sizes in EP:
        shape = (sizes["fsdp_size"], sizes.get("tp_size", 1))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp"))
        divided, report = loaded(model, folder, mesh, **sizes)
        for each in (model, divided):
            each.train()
        check(model, divided, mesh, 29)
        assert report.share < (29 // shape[0] + 1.1) / 29 and not report.functions, str(report)
        check(model, divided, mesh, 3, 1)  # whole on each rank of 4: fewer tokens than ranks
    for each in (model, divided):
        each.eval()
    prompt = tokens(9, 2)
    found, expected = (each.generate(prompt, max_new_tokens=4, do_sample=False) for each in (divided, model))
    assert found.equal(expected)


def test_experts_over_ranks_of_the_sequence_and_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, check_expert_parallel, tmp_path)


def check_refused(rank: int, world: int, _: Any, folder: Path) -> None:
    """Ranks of tensor parallelism share rows, which those of a sequence do not."""
    model = saved("qwen3_moe", folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    plan = {"model.embed_tokens": "replicate"}  # no layer but the experts is divided
    for sizes in ({"ep_size": 2}, {"ep_size": 4}):
        divided, _ = loaded(model, folder, mesh, fsdp_size=2, tp_size=2, tp_plan=plan, **sizes)
        with pytest.raises(RuntimeError, match=r"over ranks that (share a sequence|have other tokens)"):
            divided(input_ids=tokens(12))


def test_ranks_of_a_sequence_as_those_of_tensor_parallelism_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, check_refused, tmp_path)


def check_three_dims(rank: int, world: int, _: Any, folder: Path) -> None:
    """FSDP2 averages over dp x cp, of one dim or of replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    model = saved("llama", folder)
    for sizes in ({"fsdp_size": 4}, {"dp_replicate_size": 2, "fsdp_size": 2}):
        divided, _ = loaded(model, folder, mesh, tp_size=2, **sizes)
        check(model, divided, mesh, 29)


def test_three_dims(ranks: Ranks, tmp_path: Path) -> None:
    ranks(8, check_three_dims, tmp_path)
