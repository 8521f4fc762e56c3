# SPDX-License-Identifier: Apache-2.0
"""Kernels of diffusers' dispatcher that are no torch functions, in models that a view shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Ranks
from helpers.diffusion import (
    HEADS,
    MODELS,
    OTHERS,
    PRELOAD as PRELOAD,
    Group,
    compare,
    flux,
    flux_inputs,
    ltx,
    ltx_inputs,
    parallelize,
    trained,
    unparallelize,
    wan,
    wan_inputs,
)
from helpers.processes import finish, start
from torch import Tensor, nn

import spar
from spar.integrations._diffusers.kernels import kernels_of_parts
from spar.parallel_state import init_parallel_state

pytestmark = pytest.mark.one_transport

Shapes = list[tuple[list[int], list[int]]]


@contextlib.contextmanager
def unseen(model: nn.Module) -> Iterator[Shapes]:
    """Let a model attend by a kernel that no mode sees; yield the shapes of what it receives."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    shapes: Shapes = []

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
    ) -> Any:
        with torch._C.DisableTorchFunction():
            shapes.append((list(query.shape), list(key.shape)))
            mask = attn_mask
            if mask is not None and mask.dim() == 2:
                mask = mask[:, None, None]
            if window is not None:
                at = torch.arange(query.size(1))[:, None] - torch.arange(key.size(1))
                mask = at.abs() <= window
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale).transpose(1, 2)
            return (out, out.sum(-1)) if return_lse else out

    registry, member = _AttentionBackendRegistry, AttentionBackendName.XFORMERS
    tables, replaced = (registry._backends, registry._supported_arg_names), []
    for table, value in zip(tables, (attend, set(attend.__annotations__)), strict=True):
        replaced.append(table[member])
        table[member] = value
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            module.processor._attention_backend = "xformers"
    try:
        yield shapes
        assert registry._backends[member] is attend  # restored after each forward
    finally:
        for table, value in zip(tables, replaced, strict=True):
            table[member] = value


def attended(group: Group, model: nn.Module, inputs: Any, method: str | None = None) -> tuple[Shapes, Any]:
    """Compare with one process; return what the kernel received in one forward, and the report."""
    with unseen(model) as shapes:
        expected = trained(model, inputs)
        report = parallelize(model, group, method=method)
        shapes.clear()
        found = trained(model, inputs, group)
        received = shapes.copy()
        compare(found, expected, model)
        unparallelize(model)
    return received, report


class Wrapper(nn.Module):
    """A model that is not of diffusers, and has one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wan()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def check_wrapped(rank: int, world: int, group: Group) -> None:
    received, report = attended(group, Wrapper(), wan_inputs())
    assert [keys[1] for _, keys in received] == [25, 7] * 2, received
    assert rank > 0 or report.share < 1 / world + 0.15, report


def test_models_that_contain_one_of_diffusers(ranks: Ranks) -> None:
    ranks(2, check_wrapped)


def check_shapes(rank: int, world: int, group: Group) -> None:
    image, joint = spar.cal_split_sizes(25, world)[rank], spar.cal_split_sizes(7, world)[rank]
    own = spar.cal_split_sizes(HEADS, world)[rank]
    received, report = attended(group, wan(), wan_inputs())
    for queries, keys in received[::2]:  # attention to itself: the whole sequence of this rank's heads
        assert queries == keys == [2, 25, own, 12]
    for queries, keys in received[1::2]:  # to the text, of which each rank has the whole
        assert (queries, keys) == ([2, image, HEADS, 12], [2, 7, HEADS, 12])
    assert rank > 0 or report.share < 1 / world + 0.15, report
    assert not any(each.in_block for each in report.functions), report
    received, _ = attended(group, flux(), flux_inputs())  # a joint sequence, of two lengths
    assert received == [([2, 32, own, 12], [2, 32, own, 12])] * 2
    received, _ = attended(group, wan(), wan_inputs(), "gather")
    assert received[0] == ([2, image, HEADS, 12], [2, 25, HEADS, 12])
    received, _ = attended(group, flux(), flux_inputs(), "gather")
    assert {n for queries, _ in received for n in queries[1:2]} <= {image, joint, image + joint}
    for method in ("ulysses", "gather"):  # ranks without tokens of the text
        attended(group, flux(), flux_inputs(text=1), method)
    received, _ = attended(group, wan(), wan_inputs(), "ring")  # a kernel returns no log-sum-exp
    assert received[0][0] == [2, 25, own, 12]


@pytest.mark.parametrize("world", [2, 3])
def test_kernels_receive_whole_sequences_of_some_heads(ranks: Ranks, world: int) -> None:
    ranks(world, check_shapes)


def check_gathered(rank: int, world: int, group: Group) -> None:
    """With fewer heads than ranks, keys are gathered."""
    image = spar.cal_split_sizes(25, world)[rank]
    received, _ = attended(group, wan(), wan_inputs())
    assert received[0] == ([2, image, HEADS, 12], [2, 25, HEADS, 12])
    mask = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(1)) > 0.3
    with_rows = flux_inputs() | {"joint_attention_kwargs": {"attention_mask": mask}}
    received, report = attended(group, flux(), with_rows)  # no rank has all queries
    assert received == [([2, 32, HEADS, 12], [2, 32, HEADS, 12])] * 2
    assert rank > 0 or [each.function for each in report.functions if each.in_block] == ["xformers"]


def test_kernels_with_fewer_heads_than_ranks(ranks: Ranks) -> None:
    ranks(4, check_gathered)


def check_masks(rank: int, world: int, group: Group) -> None:
    own = spar.cal_split_sizes(HEADS, world)[rank]
    draw = torch.Generator().manual_seed(1)
    rows, heads = torch.rand(1, 1, 32, 32, generator=draw) > 0.3, torch.rand(2, 3, 32, 32, generator=draw)
    keys = torch.rand(2, 32, generator=draw) > 0.3
    keys[:, 0] = True
    for mask in (rows, heads, keys, keys[:, None, None], heads[:, :, :1]):
        inputs = flux_inputs() | {"joint_attention_kwargs": {"attention_mask": mask}}
        received, report = attended(group, flux(), inputs)
        assert received == [([2, 32, own, 12], [2, 32, own, 12])] * 2, mask.shape
        assert not any(each.in_block for each in report.functions), report
    attended(group, flux(), flux_inputs() | {"joint_attention_kwargs": {"attention_mask": keys}}, "gather")
    received, report = attended(group, ltx(), ltx_inputs())  # of the text's keys, for each head
    assert received and not any(each.in_block for each in report.functions), report
    make, inputs = OTHERS["hunyuan_video"]
    attended(group, make(), inputs())
    make, inputs = MODELS["qwen_image"]
    attended(group, make(), inputs())


@pytest.mark.parametrize("world", [2, 3])
def test_masks_of_kernels(ranks: Ranks, world: int) -> None:
    ranks(world, check_masks)


class OptionsAttention(nn.Module):
    """Attends with options that processors of diffusers do not pass, but its dispatcher takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.qkv = nn.Linear(8, 3 * HEADS * 4)
        self.processor = self

    def forward(self, x: Tensor) -> Tensor:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 12)).chunk(3, -1)
        options = dict(self.options)
        named = {"is_causal": options.pop("is_causal", False), "attention_kwargs": options}
        out = dispatch_attention_fn(q, k, v, **named, backend="xformers")
        out = out[0] * out[1][..., None] if isinstance(out, tuple) else out
        return x + out.flatten(2)[..., :8]


class Attending(nn.Module):
    def __init__(self, dim: int = 1, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dim, self.attention = dim, nn.ModuleList([OptionsAttention(**options) for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for block in self.attention:
            x = block(x)
        return (x,)


def check_options(rank: int, world: int, group: Group) -> None:
    own = spar.cal_split_sizes(HEADS, world)[rank]
    inputs = {"x": torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(4))}
    for options in ({"is_causal": True}, {"window": 3}):  # which need all queries, in order
        for method in (None, "gather"):
            received, report = attended(group, Attending(**options), inputs, method)
            assert received[0] == ([2, 11, own, 4], [2, 11, own, 4])
            assert not any(each.in_block for each in report.functions), report
    received, report = attended(group, Attending(return_lse=True), inputs)  # more than an output: whole
    assert received[0] == ([2, 11, HEADS, 4], [2, 11, HEADS, 4])
    assert rank > 0 or "xformers" in [each.function for each in report.functions], report
    tall = {"x": torch.randn(11, 2, 8, generator=torch.Generator().manual_seed(4))}  # sharded in its samples
    attended(group, Attending(), tall)
    with unseen(model := Attending(return_lse=True)):
        parallelize(model, group, strict=True)
        with pytest.raises(RuntimeError, match=r"xformers at .* is no torch function, and would run whole"):
            model(**inputs)


@pytest.mark.parametrize("world", [2, 3])
def test_options_of_kernels(ranks: Ranks, world: int) -> None:
    ranks(world, check_options)


def check_flex(rank: int, world: int, group: Group) -> None:
    """flex_attention is a torch function, but compiles itself, which a mode does not let it do."""
    model = wan()
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "flex"
    with torch.no_grad():
        expected = model(**wan_inputs()).sample
        report = parallelize(model, group)
        torch.testing.assert_close(model(**wan_inputs()).sample, expected, rtol=1e-5, atol=1e-5)
    assert not any(each.in_block for each in report.functions), report


def test_flex_attention(ranks: Ranks) -> None:
    ranks(2, check_flex)


def check_checkpoints(rank: int, world: int, group: Group) -> None:
    """A recompute, outside of the model's forward, attends as the forward did."""
    own = spar.cal_split_sizes(HEADS, world)[rank]
    model = flux()
    model.enable_gradient_checkpointing()
    received, _ = attended(group, model, flux_inputs())
    assert received == [([2, 32, own, 12], [2, 32, own, 12])] * 4


def test_kernels_in_checkpoints(ranks: Ranks) -> None:
    ranks(2, check_checkpoints)


def check_hybrid(rank: int, folder: Path) -> None:
    """Sequences lie over ring x ulysses; a kernel without a log-sum-exp takes no part in a ring."""
    group = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2).get_group("cp")
    received, report = attended(group, wan(num_attention_heads=4), wan_inputs(), "hybrid")
    assert received[0] == ([2, 25, 1, 12], [2, 25, 1, 12])
    assert not any(each.in_block for each in report.functions), report
    received, _ = attended(group, wan(), wan_inputs(), "hybrid")  # fewer heads than ranks
    assert received[0][1] == [2, 25, HEADS, 12]
    attended(group, flux(), flux_inputs(), "hybrid")


def test_kernels_over_hybrid_layouts(tmp_path: Path) -> None:
    assert finish(start(check_hybrid, 4, tmp_path), 200) == [0] * 4


def test_another_version_of_the_dispatcher_is_left_alone() -> None:
    """It may be imported beside a model that is not of diffusers."""
    with kernels_of_parts(SimpleNamespace()):
        pass
