# SPDX-License-Identifier: Apache-2.0
"""Sharded transformers of diffusers with adapters, ControlNets, caches, masks, methods, copies, modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.diffusion import (
    HEADS,
    OTHERS,
    PRELOAD as PRELOAD,
    WIDTH,
    Group,
    check_exact,
    compare,
    drawn,
    flux,
    flux_control_net,
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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.one_transport
worlds = pytest.mark.parametrize("world", [2, 3])


def check_not_whole(report: Any) -> None:
    assert not any(each.in_block for each in report.functions), report


def check_added(rank: int, world: int, group: Group) -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    generator = torch.Generator().manual_seed(2)
    model = flux()
    attention = model.transformer_blocks[0].attn
    attention.set_processor(FluxIPAdapterAttnProcessor(HEADS * WIDTH, 8, num_tokens=(4,)))
    images = [torch.randn(2, 1, 4, 8, generator=generator)]
    inputs = flux_inputs() | {"joint_attention_kwargs": {"ip_hidden_states": images}}
    check_not_whole(check_exact(group, drawn(model), inputs))
    plain = flux()(**flux_inputs())[0]
    net = flux_control_net()
    condition = {"controlnet_cond": torch.randn(2, 25, 4, generator=generator), "conditioning_scale": 0.7}
    of_net = flux_inputs() | condition | {"return_dict": False}

    def controlled(model: nn.Module) -> list[Tensor]:
        model.zero_grad(), net.zero_grad()
        blocks, singles = net(**of_net)
        added = {"controlnet_block_samples": blocks, "controlnet_single_block_samples": singles}
        sample = model(**flux_inputs() | added)[0]
        assert (sample - plain).abs().max() > 0.1
        loss_of(sample).backward()
        return [sample.detach(), *blocks, *singles]

    def all_gradients(average: Group | None) -> list[Tensor]:
        return [gradient for part in (model, net) for gradient in gradients(part, average)]

    model = flux()
    expected = controlled(model), all_gradients(None)
    for shards in ((model,), (model, net)):  # the ControlNet whole, and sharded itself
        reports = [parallelize(each, group) for each in shards]
        found = controlled(model), all_gradients(group)
        for x, y in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        for each, report in zip(shards, reports, strict=True):
            check_not_whole(report)
            assert rank or report.share < 1 / world + 0.15
            unparallelize(each)


@worlds
def test_adapters_and_control_nets(ranks: Ranks, world: int) -> None:
    ranks(world, check_added)


# ---- caches of diffusers ----


def sampled(model: nn.Module, inputs: Any, shift: float = 0.05) -> list[Tensor]:
    """Return the outputs of some steps, whose inputs change little, of two passes of guidance each."""
    outputs = []
    with torch.no_grad():
        for step in range(5):
            for name in ("cond", "uncond"):
                text = inputs["encoder_hidden_states"] * (1 if name == "cond" else 0.5)
                noise = inputs["hidden_states"] * (1 + shift * step * (3 if step > 2 else 1))
                with model.cache_context(name):
                    changed = inputs | {"hidden_states": noise, "encoder_hidden_states": text}
                    outputs.append(model(**changed, return_dict=False)[0])
    return outputs


def caches() -> list[Any]:
    from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig

    broadcast = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(-1, 1001),
        cross_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: 500,
    )
    return [FirstBlockCacheConfig(threshold=0.1), broadcast]


def check_caches(rank: int, world: int, group: Group, name: str) -> None:
    make, inputs = (OTHERS | {"wan": (wan, wan_inputs)})[name]
    plain = sampled(make(), inputs())
    for config in caches():
        model = make()
        model.enable_cache(config)
        expected = sampled(model, inputs())
        skipped = [float((x - y).abs().max()) > 1e-4 for x, y in zip(plain, expected, strict=True)]
        assert any(skipped), config  # the cache had an effect
        model._reset_stateful_cache()
        parallelize(model, group)  # after enable_cache
        assert_near(sampled(model, inputs()), expected)
        unparallelize(model)  # with a cache that holds parts
        assert_near(sampled(model, inputs()), expected)
        parallelize(model, group)  # with one that holds whole tensors
        assert_near(sampled(model, inputs()), sampled_twice(make(), config, inputs()))
        model.disable_cache()
        assert_near(sampled(model, inputs()), plain)
        unparallelize(model)
        parallelize(model, group)
        model.enable_cache(config)  # after enable
        assert_near(sampled(model, inputs()), expected)
        if type(config).__name__ == "FirstBlockCacheConfig":  # which wraps blocks
            with pytest.raises(ValueError, match="was replaced since; undo what replaced it first"):
                unparallelize(model)
            model.disable_cache()
            unparallelize(model)
            assert_near(sampled(model, inputs()), plain)
        else:
            unparallelize(model)
            assert_near(sampled(model, inputs()), expected)


def sampled_twice(model: nn.Module, config: Any, inputs: Any) -> list[Tensor]:
    model.enable_cache(config)
    sampled(model, inputs)
    return sampled(model, inputs)


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_caches_decide_as_in_one_process(ranks: Ranks, name: str) -> None:
    ranks(3, check_caches, name)


# ---- masks and methods ----


def check_masks(rank: int, world: int, group: Group) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = torch.rand(2, 1, 32, 32, generator=draw) > 0.3
    added = torch.randn(1, HEADS, 32, 32, generator=draw)
    for mask in (rows, added, rows[:1, :, :1]):
        for method in (None, "ring"):
            inputs = flux_inputs() | {"joint_attention_kwargs": {"attention_mask": mask}}
            check_not_whole(check_exact(group, flux(), inputs, method=method))
    for name, (make, inputs_of) in (OTHERS | {"wan": (wan, wan_inputs)}).items():
        for method in ("ulysses", "gather", "ring"):
            report = check_exact(group, make(), inputs_of(), method=method)
            assert report is not None
            assert rank > 0 or report.share < 1 / world + 0.2, (name, report)
            check_not_whole(report)


@worlds
def test_masks_with_rows_and_methods(ranks: Ranks, world: int) -> None:
    ranks(world, check_masks)


# ---- models ----


def check_copies(rank: int, world: int, group: Group) -> None:
    model = wan()
    expected = trained(model, wan_inputs())
    parallelize(model, group)
    model(**wan_inputs())
    other = copy.deepcopy(model)
    unparallelize(model)
    compare(trained(other, wan_inputs(), group), expected, other)
    unparallelize(other)
    if rank == 0:  # nothing is left: a forward without the other ranks
        for each in (model, other, copy.deepcopy(model)):
            compare(trained(each, wan_inputs()), expected, each)


def test_copies_of_enabled_models(ranks: Ranks) -> None:
    ranks(2, check_copies)


def check_pipeline(rank: int, world: int, group: Group) -> None:
    """Models of a pipeline, such as Wan 2.2's two, over groups of their own, in one graph."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    high, low, other = wan(), wan(), sd3()
    with torch.no_grad():
        for parameter in low.parameters():
            parameter.mul_(0.9)

    def chained(average: bool) -> list[Tensor]:
        first = high(**wan_inputs()).sample
        second = low(**wan_inputs() | {"hidden_states": first}).sample
        third = other(**sd3_inputs()).sample
        (loss_of(second) + loss_of(third)).backward()
        found = [second.detach(), third.detach()]
        for model, group_of in ((high, group), (low, pairs[rank // 2]), (other, group)):
            found += gradients(model, group_of if average else None)
            model.zero_grad()
        return found

    expected = chained(False)
    parallelize(high, group)
    parallelize(low, pairs[rank // 2])
    parallelize(other, group)
    # gradients of `high` come through `low`, and are averaged over the ranks of `high`
    found = chained(True)
    assert_near(found[:2], expected[:2])
    for x, y in zip(found[2:], expected[2:], strict=True):
        error = float((x - y).abs().max()) / max(0.01, float(y.abs().max()))
        assert error < 1e-5, error
    assert_near(chained(True)[:2], expected[:2])


def test_several_models_over_several_groups(ranks: Ranks) -> None:
    ranks(3, check_pipeline)


class Counting(TorchFunctionMode):
    """A mode of the caller's, around or inside of the model's forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_mode(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with Counting():
            return own(*args, **kwargs)

    return forward


def check_modes(rank: int, world: int, group: Group) -> None:
    model = wan()
    with torch.inference_mode():
        inference = model(**wan_inputs()).sample
    with torch.autocast("cpu", torch.bfloat16):
        half = trained(model, wan_inputs())
    exact = trained(model, wan_inputs())
    parallelize(model, group)
    with torch.inference_mode():
        torch.testing.assert_close(model(**wan_inputs()).sample, inference, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        found = trained(model, wan_inputs(), group)
    torch.testing.assert_close(found[0], half[0], rtol=0.05, atol=0.05)
    for x, y in zip(found[1:], half[1:], strict=True):
        assert float((x - y).abs().max()) < 0.05 * max(0.01, float(y.abs().max()))
    with Counting(), torch.device("cpu"):
        compare(trained(model, wan_inputs(), group), exact, model)
    for block in model.blocks:  # the model's own code enters modes
        block.attn1.forward = in_mode(block.attn1.forward)
    compare(trained(model, wan_inputs(), group), exact, model)
    model.eval()
    compare(trained(model, wan_inputs(), group), exact, model)
    model.train()
    model.to(torch.float64)
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in wan_inputs().items()}
    found = trained(model, doubled, group)
    assert found[0].dtype == torch.float64
    compare([x.float() for x in found], exact, model)


@worlds
def test_modes_of_torch(ranks: Ranks, world: int) -> None:
    ranks(world, check_modes)


def check_blocks_in_modes(rank: int, world: int, group: Group) -> None:
    """A mode that the model enters around its blocks lies above the view."""
    model = wan()
    expected = trained(model, wan_inputs())
    parallelize(model, group)
    for block in model.blocks:
        own = block.forward
        block.forward = in_mode(own)
    compare(trained(model, wan_inputs(), group), expected, model)

    model = wan()

    class Blocks(nn.ModuleList):
        def __iter__(self) -> Any:
            with Counting():
                yield from super().__iter__()

    model.blocks = Blocks(model.blocks)
    report = parallelize(model, group)
    compare(trained(model, wan_inputs(), group), expected, model)
    assert rank > 0 or report.share < 1 / world + 0.15, report


def test_blocks_in_modes_of_the_caller(ranks: Ranks) -> None:
    ranks(2, check_blocks_in_modes)


def check_accumulation(rank: int, world: int, group: Group) -> None:
    def accumulated(model: nn.Module, average: Group | None) -> list[Tensor]:
        model.zero_grad()
        for size in ((5, 2, 10), (3, 2, 6)):  # gradients add up
            loss_of(model(**wan_inputs(size)).sample).backward()
        first, second = (model(**wan_inputs(size)).sample for size in ((5, 2, 10), (1, 2, 4)))
        (loss_of(first) + loss_of(second) * 2).backward(retain_graph=True)
        loss_of(first).backward()  # again through one forward of the graph
        return [second.detach(), *gradients(model, average)]

    model = wan()
    expected = accumulated(model, None)
    parallelize(model, group)
    compare(accumulated(model, group), expected, model)


@worlds
def test_gradients_of_several_forwards(ranks: Ranks, world: int) -> None:
    ranks(world, check_accumulation)
