# SPDX-License-Identifier: Apache-2.0
"""What treats each row or element alone under spar.parallelize: experts of transformers, by each kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.compiled_blocks import compile_each_block
from helpers.llms import SMALL
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import spar

PRELOAD = ["transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.gpt_oss.modeling_gpt_oss"]

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "gpt_oss": (  # biases, and matrices that are transposed
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    ),
}
# Its router has functions without a rule: what it chose of each row is whole.
WHOLE_CHOICES = (
    "Glm4Moe",
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    | {"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0},
)
TYPES["glm4_moe"] = WHOLE_CHOICES
KERNELS = ("eager", "batched_mm", "grouped_mm")


def pair(name: str, kernel: str, group: Group, **options: Any) -> tuple[Any, Any, spar.Report]:
    kind, changes = TYPES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.set_experts_implementation(kernel)
    whole = copy.deepcopy(model)
    return model, whole, spar.parallelize(model, group, **options)


def step(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_equal(model: Any, whole: Any, ids: Tensor, group: Group, what: str) -> None:
    loss, gradients = step(model, ids)
    expected, of_one = step(whole, ids)
    assert abs(loss - expected) < 1e-5 * abs(expected), (what, loss, expected)
    assert gradients.keys() == of_one.keys(), what
    for name, gradient in gradients.items():
        dist.all_reduce(gradient, group=group)
        error = (gradient / dist.get_world_size(group) - of_one[name]).norm()
        assert error < 2e-5 * of_one[name].norm() + 1e-7, (what, name, error)


def tokens(length: int, rows: int = 2) -> Tensor:
    return torch.randint(1, 53, (rows, length), generator=torch.Generator().manual_seed(length))


def check_kernels(rank: int, world: int, group: Group, name: str) -> None:
    for kernel in KERNELS:
        model, whole, report = pair(name, kernel, group)
        check_equal(model, whole, tokens(29), group, f"{name} by {kernel}")
        most = (29 // world + 2) / 29
        assert report.share < most, (kernel, str(report))
        experts = {"sort", "_grouped_mm", "grouped_mm", "bmm", "one_hot", "__getitem__", "index_add_"}
        assert not [each for each in report.functions if each.function in experts], str(report)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("world", [2, 3])
def test_each_kernel_computes_a_ranks_rows(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_kernels, name)


def check_uses(rank: int, world: int, group: Group) -> None:
    """Fewer tokens than ranks, so that some have no rows; recomputation; a copy of the model."""
    model, whole, _ = pair("qwen3_moe", "grouped_mm", group)
    for length in (2, 4):
        check_equal(model, whole, tokens(length, rows=1), group, f"{length} tokens")
        model.zero_grad()
        whole.zero_grad()
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.train()
        each.gradient_checkpointing_enable()
        whole.zero_grad()
        check_equal(each, whole, tokens(13), group, "recomputed")
    forward = type(model.model.layers[0].mlp.experts).forward
    spar.unparallelize(model)
    assert model.model.layers[0].mlp.experts.forward.__func__ is forward


def check_divided(rank: int, world: int, group: Group) -> None:
    """Experts over the ranks of the sequence would add up rows of different tokens."""
    mesh = init_device_mesh("cpu", (world,))
    model, _, _ = pair("qwen3_moe", "eager", group)
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
    with pytest.raises(RuntimeError, match=r"experts at .* are divided over ranks that have other tokens"):
        step(model, tokens(29))


def test_experts_over_ranks_of_the_sequence_are_refused(pool: Ranks) -> None:
    pool(2, check_divided)


def check_gelu(rank: int, world: int, group: Group) -> None:
    """Bloom's autograd Function computes each element alone."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=53)
    model = transformers.BloomForCausalLM(config)
    whole = copy.deepcopy(model)
    report = spar.parallelize(model, group, strict=True)
    check_equal(model, whole, tokens(29), group, "bloom")
    assert report.share < (29 // world + 2) / 29 and not report.functions, str(report)


def test_functions_of_single_elements(pool: Ranks) -> None:
    pool(2, check_gelu)


def test_uses_of_experts(pool: Ranks) -> None:
    pool(3, check_uses)


def check_compiled(rank: int, world: int, group: Group, name: str) -> None:
    """Layers share a graph; one whose experts differ otherwise than by weights has its own."""
    for differs in (False, True):
        torch._dynamo.reset()
        kind, changes = TYPES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**(SMALL | changes | {"num_hidden_layers": 3}))
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        model.set_experts_implementation("batched_mm")
        if differs:
            model.model.layers[1].mlp.experts.act_fn = nn.ReLU()
        whole = copy.deepcopy(model)
        report = spar.parallelize(model, group)
        compile_each_block(model)
        for length in (29, 29) if differs else (29, 29, 23):
            for each in (model, whole):
                each.zero_grad()
            check_equal(model, whole, tokens(length), group, f"{name}, compiled")
        assert not report.eager, report.eager
        kinds = vars(model)["_spar_view"].compiled.kinds.values()
        assert sum(kind.graphs for kind in kinds) == 2  # of two lengths, or two kinds of experts


@pytest.mark.compiler
def test_compiled_layers_share_a_graph_of_their_experts(ranks: Ranks) -> None:
    ranks(2, check_compiled, "qwen3_moe")
