# SPDX-License-Identifier: Apache-2.0
"""Sharded transformers of diffusers in use: checkpoints, DDP, backends, outputs, several models, undoing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.diffusion import (
    MODELS,
    PRELOAD as PRELOAD,
    Group,
    check_exact,
    compare,
    flux,
    flux_inputs,
    gradients,
    loss_of,
    parallelize,
    sd3,
    sd3_inputs,
    trained,
    unparallelize,
    wan,
    wan_inputs,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import spar

pytestmark = pytest.mark.one_transport


def check_checkpoints(rank: int, world: int, group: Group) -> None:
    reentrant = partial(checkpoint, use_reentrant=True)
    for name in ("wan", "flux", "sd3"):
        make, inputs = MODELS[name]
        for function in (None, lambda module, *args: reentrant(module, *args)):
            model = make()
            model.enable_gradient_checkpointing(function)
            check_exact(group, model, inputs())
    wrapped = wan()
    wrapped.blocks[0] = checkpoint_wrapper(wrapped.blocks[0])
    expected = trained(wrapped, wan_inputs())
    parallelize(wrapped, group)
    wrapped.blocks[1] = checkpoint_wrapper(wrapped.blocks[1])
    compare(trained(wrapped, wan_inputs(), group), expected, wrapped)


def test_gradient_checkpointing_is_exact(ranks: Ranks) -> None:
    ranks(2, check_checkpoints)


def check_recompute(rank: int, world: int, group: Group, compiled: bool) -> None:
    """Backward recomputes each forward over its own sequences, whatever ran since."""
    short = wan_inputs((3, 2, 6), text=4, batch=1)  # 9 tokens

    def run(model: nn.Module, average: Group | None) -> list[torch.Tensor]:
        model.zero_grad()
        first = loss_of(model(**wan_inputs())[0])
        second = loss_of(model(**short)[0])
        with torch.no_grad():
            model(**wan_inputs((1, 2, 4), batch=1))
        (first + 2 * second).backward()
        nested = model(**short)[0]
        again = model(**short | {"hidden_states": nested})[0]  # two steps of one sampler
        loss_of(again).backward()
        return [again.detach(), *gradients(model, average)]

    model = wan(num_layers=1 if compiled else 2)
    model.enable_gradient_checkpointing()
    expected = run(model, None)
    parallelize(model, group)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    if compiled:
        model.compile(backend="aot_eager")
        with torch.no_grad():
            model(**wan_inputs())  # nothing is compiled in the first forward
    compare(run(model, group), expected, model)
    assert (graphs["unique_graphs"] > before) == compiled


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_recompute_after_other_forwards(ranks: Ranks, compiled: bool) -> None:
    ranks(2 if compiled else 3, check_recompute, compiled)


def check_ddp(rank: int, world: int, group: Group) -> None:
    def steps(model: nn.Module, inner: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            output = model(**wan_inputs() | {"timestep": torch.tensor([step * 10, 500])}).sample
            loss_of(output).backward()
            optimizer.step()
        return [output.detach(), *(p.detach().clone() for p in inner.parameters())]

    plain, model = wan(), wan()
    expected = steps(plain, plain)
    parallelize(model, group)
    found = steps(nn.parallel.DistributedDataParallel(model, process_group=group), model)
    compare(found, expected, model)
    for parameter in model.parameters():  # the ranks stay equal
        first = parameter.detach().clone()
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        assert torch.equal(first, parameter)


def test_ddp_trains_as_one_process(ranks: Ranks) -> None:
    ranks(2, check_ddp)


def check_fsdp(rank: int, world: int, group: Group) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    for first in (True, False):
        model = wan()
        expected = trained(model, wan_inputs())
        if first:
            parallelize(model, mesh)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if not first:
            parallelize(model, mesh)
        output = model(**wan_inputs()).sample
        loss_of(output).backward()
        found = [output.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())]
        compare(found, expected, model)


def test_fsdp2_before_and_after_sharding(ranks: Ranks) -> None:
    ranks(2, check_fsdp)


def check_adapters(rank: int, world: int, group: Group) -> None:
    from peft import LoraConfig

    def add(model: nn.Module) -> None:
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    model, later = wan(), wan()
    add(model)
    expected = trained(model, wan_inputs())
    assert (
        sum(bool(gradient.any()) for gradient in expected[1:]) == 16
    )  # A and B of two layers of two attentions
    parallelize(model, group)
    parallelize(later, group)
    add(later)
    for adapted in (model, later):
        compare(trained(adapted, wan_inputs(), group), expected, adapted)


def test_adapters_added_before_and_after_sharding(ranks: Ranks) -> None:
    ranks(2, check_adapters)


class Training(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = sd3()

    def forward(self, **inputs: Any) -> torch.Tensor:
        return loss_of(self.model(**inputs).sample)


def check_report(rank: int, world: int, group: Group) -> None:
    def shard(training: nn.Module, batch: Any) -> Any:
        parallelize(training.model, group)
        return batch

    report = spar.testing.compare(Training, sd3_inputs(), shard, group, reduce="mean", show=False)
    assert report.worst.max_rel_error < 1e-5, report
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-6)


def test_comparison_with_one_process(ranks: Ranks) -> None:
    ranks(3, check_report)


def check_compiled_on_one_rank(rank: int, world: int, group: Group) -> None:
    """Blocks that one rank alone compiles run eagerly on all, with the reason in the report."""
    before, after = flux(), flux()
    expected = trained(before, flux_inputs())
    for compiling, model in enumerate((before, after)):
        blocks = (*model.transformer_blocks, *model.single_transformer_blocks) if rank == compiling else ()
        if model is before and rank == compiling:
            model.compile_repeated_blocks(backend="aot_eager")
        parallelize(model, group)
        if model is after:
            for block in blocks:
                block.compile(backend="aot_eager")
            model.enable_gradient_checkpointing()
        compare(trained(model, flux_inputs(), group), expected, model)
        if model is after:
            compiled = torch.compile(model, backend="aot_eager")
            with torch.no_grad():
                torch.testing.assert_close(compiled(**flux_inputs())[0], expected[0], rtol=1e-5, atol=1e-5)
        unparallelize(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compare(trained(before, flux_inputs()), expected, before)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    assert (graphs > 0) == (rank == 0), graphs  # compiled again


def test_blocks_that_one_rank_compiles_run_eagerly(ranks: Ranks) -> None:
    ranks(2, check_compiled_on_one_rank)


def check_input_gradients(rank: int, world: int, group: Group) -> None:
    """The mean of the ranks' gradients of an input is that of one process, as for parameters."""
    model, results = flux(), []
    for average in (False, True):
        inputs = flux_inputs()
        leaves = [inputs[name].requires_grad_() for name in ("hidden_states", "encoder_hidden_states")]
        leaves.append(inputs["pooled_projections"].requires_grad_())
        found = list(torch.autograd.grad(loss_of(model(**inputs)[0]), leaves))
        if average:
            found = [spar.all_gather(x[None], group).mean(0) for x in found]
        results.append(found)
        if not average:
            parallelize(model, group)
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_gradients_of_inputs(ranks: Ranks) -> None:
    ranks(3, check_input_gradients)


def check_backends(rank: int, world: int, group: Group) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    before = wan()
    before.set_attention_backend("_native_math")
    before.reset_attention_backend()
    for name, (make, inputs) in MODELS.items():
        if name in ("wan", "flux", "chrono_edit", "flux2"):  # without a mask
            model = make()
            for module in model.modules():
                if hasattr(module, "processor"):
                    module.processor._attention_backend = "_native_math"
            check_exact(group, model, inputs())
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    table, key = _AttentionBackendRegistry._backends, AttentionBackendName._NATIVE_MATH
    native = table[key]
    model, calls = wan(), list[int]()
    expected = trained(model, wan_inputs())
    parallelize(model, group)
    table[key] = lambda **arguments: calls.append(1) or native(**arguments)
    try:
        with attention_backend("_native_math"):  # the active backend at the time of the call
            compare(trained(model, wan_inputs(), group), expected, model)
    finally:
        table[key] = native
    assert len(calls) == 4  # two attentions of each block


def test_backend_of_the_model_is_the_kernel(ranks: Ranks) -> None:
    ranks(2, check_backends)


def check_outputs(rank: int, world: int, group: Group) -> None:
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    for name in ("wan", "sd3", "flux", "ltx"):
        make, inputs = MODELS[name]
        model = make()
        expected = model(**inputs())
        parallelize(model, group)
        found = model(**inputs())
        assert type(found) is type(expected) is Transformer2DModelOutput
        torch.testing.assert_close(found.sample, expected.sample, rtol=1e-5, atol=1e-5)
        alone = model(**inputs(), return_dict=False)
        assert type(alone) is tuple and len(alone) == 1
        torch.testing.assert_close(alone[0], expected.sample, rtol=1e-5, atol=1e-5)


def test_outputs_have_the_type_that_the_model_returns(ranks: Ranks) -> None:
    ranks(2, check_outputs)


def state_of(model: nn.Module) -> list[Any]:
    """Return all that is set on the modules and processors of a model."""
    found: list[Any] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found.append((name, key, dict(value) if isinstance(value, dict) else value))
        processor = getattr(module, "processor", None)
        found.append((name, processor, None if processor is None else dict(vars(processor))))
    return found


def check_undoing(rank: int, world: int, group: Group) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    registry = _AttentionBackendRegistry
    tables = registry._backends, registry._constraints, registry._supported_arg_names
    for name in ("wan", "flux", "sd3"):
        make, inputs = MODELS[name]
        model = make()
        if name == "flux":
            model.transformer_blocks[0].attn.processor._attention_backend = "_native_math"
        if name == "wan":  # as diffusers' hooks and accelerate's do
            model.forward = partial(type(model).forward, model)
        before, registered = state_of(model), [dict(table) for table in tables]
        expected = trained(model, inputs())
        for _ in range(2):
            parallelize(model, group)
            assert state_of(model) != before
            model(**inputs())
            unparallelize(model)
            assert state_of(model) == before
            assert [dict(table) for table in tables] == registered
        if rank == 0:  # a forward without the other ranks
            compare(trained(model, inputs()), expected, model)


def test_unparallelize_restores_the_model(ranks: Ranks) -> None:
    ranks(2, check_undoing)


def check_two_models(rank: int, world: int, group: Group) -> None:
    """Models of one process are sharded separately, over groups of their own."""
    high, low, alone = wan(), sd3(), wan()
    expected = [high(**wan_inputs()).sample, low(**sd3_inputs()).sample]
    parallelize(high, group)
    parallelize(low, group)
    assert not vars(alone).get("forward")
    for _ in range(2):
        torch.testing.assert_close(alone(**wan_inputs()).sample, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(high(**wan_inputs()).sample, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(low(**sd3_inputs()).sample, expected[1], rtol=1e-5, atol=1e-5)
        unparallelize(high)
        parallelize(high, group)


def test_two_models_of_one_process(ranks: Ranks) -> None:
    ranks(2, check_two_models)


def check_sampler(rank: int, world: int, group: Group) -> None:
    """A scheduler of diffusers, with classifier-free guidance as a batch of 2."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def sample(model: nn.Module) -> torch.Tensor:
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(3)
        inputs = wan_inputs(batch=2)
        latents = inputs["hidden_states"][:1]
        with torch.no_grad():
            for timestep in scheduler.timesteps:
                doubled = inputs | {
                    "hidden_states": latents.expand(2, *[-1] * 4),
                    "timestep": timestep.expand(2),
                }
                positive, negative = model(**doubled).sample.chunk(2)
                guided = negative + 3.0 * (positive - negative)
                latents = scheduler.step(guided, timestep, latents, return_dict=False)[0]
        return latents

    model = wan()
    expected = sample(model)
    parallelize(model, group)
    torch.testing.assert_close(sample(model), expected, rtol=1e-5, atol=1e-5)


def test_a_sampler_with_guidance(ranks: Ranks) -> None:
    ranks(2, check_sampler)
