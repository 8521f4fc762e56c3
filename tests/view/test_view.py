# SPDX-License-Identifier: Apache-2.0
"""Torch functions on parts against whole tensors: values, and gradients averaged over the ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers import view_cases
from helpers.processes import finish, start
from helpers.view_cases import PAIRS, Inputs, compare, functions, viewed
from helpers.view_programs import program
from torch import Tensor

from spar import SequenceLayout
from spar._group.registry import place_of
from spar._model import view
from spar._model.part import Parts, mark, part_of
from spar._model.patches import intercepted
from spar._model.view import View
from spar.parallel_state import init_parallel_state

# Exchanges over each transport are tested by other modules.
pytestmark = [pytest.mark.one_transport, pytest.mark.long]

Group = dist.ProcessGroup
REFUSED = "changed in place through another one"  # the only refusal


def check_expressions(rank: int, world: int, group: Group) -> None:
    inputs, failures, refused = Inputs(3), [], set()
    for i, (name, function) in enumerate(functions().items()):
        pair = PAIRS[(i + 4 * world) % len(PAIRS)]  # the soak runs all
        try:
            problem = compare(group, function, pair, inputs)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise RuntimeError(f"{name} of {pair}") from error
            refused.add(name)
            continue
        if problem:
            failures.append(f"{name} of {pair}: {problem}")
    assert not failures, "\n".join(failures)
    assert refused <= {
        "x[:, 5:] += 1; out = x",
        "x[:, 5:] *= y[:, 5:]; out = x",
        "z = x.view(2, 12, 3, 2); z[..., 0] = 1; out = x",
        "z = x[:, 5:]; z.add_(1); out = x.clone(), z",
        "z = x[:, 3:]; z.mul_(2); out = x",
        "z = x.detach() * 1; a, c = z.split([3, 9], 1); c.add_(1); out = z * y",
        "z = x.detach() * 1; a, c = z.split([3, 9], 1); c[:, 1:4] = 0; out = z + c.sum()",
        "z = x.detach() * 1; a, c = z.split([3, 9], 1); z.mul_(2); out = c + 1",
        "z = y * 1; a, c = x.split([3, 9], 1); z[:, 3:].add_(c); out = z",
    }


def test_expressions_are_exact(ranks: Ranks) -> None:
    """On 3 ranks one has none of the 2 samples; test_view_plans.py has 2."""
    ranks(3, check_expressions)


def check_programs(rank: int, world: int, group: Group) -> None:
    for seed in range(20 * world, 20 * world + 20):
        pair = PAIRS[seed % len(PAIRS)]
        problem = compare(group, program(seed, 14), pair, Inputs(seed), 1e-8)
        assert problem is None, (seed, pair, problem)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_programs_are_exact(ranks: Ranks, world: int) -> None:
    ranks(world, check_programs)


def check_hybrid(rank: int, folder: Path) -> None:
    """Lay sequences over ring x ulysses: two runs on each rank, some of them empty."""
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    group = state.get_group("cp")
    check_layout(lambda: Parts(group, 4, rank, state=state), 0)


def check_layout(parts: Callable[[], Parts], first: int) -> None:
    """Run every third function, from this one on, and some programs."""
    for i, (name, function) in enumerate([*functions().items()][first::3]):
        pair = PAIRS[i % len(PAIRS)]
        made = parts()
        try:
            problem = compare(made.group, function, pair, Inputs(3), parts=made)
        except RuntimeError as error:
            problem = None if REFUSED in str(error) else repr(error)
        assert not problem, f"{name} of {pair}: {problem}"
    for seed in range(700 + 15 * first, 715 + 15 * first):
        pair = PAIRS[seed % len(PAIRS)]
        made = parts()
        problem = compare(made.group, program(seed, 14), pair, Inputs(seed), 1e-8, made)
        assert problem is None, (seed, pair, problem)


def check_layouts(rank: int, world: int, group: Group) -> None:
    check_layout(lambda: Parts(group, world, rank, layout="zigzag"), 1)
    # Of sequences of 12 tokens: short runs in any order, and a last rank without any.
    runs = [[(at, at + 1) for at in range(12) if at * 7 % 12 % (world - 1) == r] for r in range(world - 1)]
    given = SequenceLayout.of_runs([*runs, []], group)
    check_layout(lambda: Parts(group, world, rank, layout=given), 2)


def test_zigzag_and_given_layouts_are_exact(ranks: Ranks) -> None:
    ranks(3, check_layouts)


def test_hybrid_layouts_are_exact(tmp_path: Path) -> None:
    assert finish(start(check_hybrid, 4, tmp_path), 200) == [0] * 4


def check_order(rank: int, world: int, group: Group) -> None:
    """Numbers are drawn as in one process's memory, also where a rank has one item of a dim, and in gaps."""

    def of_some_features(x: Tensor, *_: Any) -> Tensor:
        z = x.detach() * 2
        z[..., 2:5].normal_()
        z.unflatten(-1, (3, 2))[..., 1].normal_()
        return z

    drawing: list[Callable[..., Any]] = [
        lambda x, *_: F.dropout(x.mT, 0.3),
        lambda x, *_: torch.randn_like(x.transpose(0, 2)),
        lambda x, *_: x.detach().mT.normal_(),
    ]
    for function in drawing:
        for pair in (("features", "features"), ("tokens", "tokens")):
            assert compare(group, function, pair, Inputs(3)) is None, pair
    assert compare(group, of_some_features, ("tokens", "whole"), Inputs(3)) is None


def test_numbers_are_drawn_as_in_memory(ranks: Ranks) -> None:
    ranks(4, check_order)


# ---- what is refused ----


def check_refusals(rank: int, world: int, group: Group) -> None:
    refused: dict[str, tuple[Callable[[View, Tensor], Any], str]] = {
        "memory": (
            lambda view, x: x.data_ptr(),
            "reads or replaces the memory.*in a torch.autograd.Function",
        ),
        "strides": (lambda view, x: x.as_strided((2, 2), (1, 1)), "reads or replaces the memory"),
        "shape": (lambda view, x: x.unsqueeze_(0), "reads or replaces the memory or the shape"),
        "data": (lambda view, x: setattr(x, "data", x * 2), "reads or replaces the memory"),
        "out": (lambda view, x: torch.add(x, 1, out=torch.empty(2, 12, 6)), "has out="),
        "copy": (lambda view, x: (x[:, 1:5].add_(1), x.sum()), REFUSED),
        "parameter": (lambda view, x: torch.nn.Parameter(x), "nn.Parameter at .* use the activation itself"),
        "unknown": (lambda view, x: x.storage_type(), "does not say which arguments it writes"),
    }
    for name, (function, message) in refused.items():
        with pytest.raises(RuntimeError, match=message) as caught:
            viewed(group, function)
        assert f"rank {rank} of {world}" in str(caught.value), name
        assert "test_view.py:" in str(caught.value), name


def test_what_cannot_be_right_is_refused(ranks: Ranks) -> None:
    ranks(2, check_refusals)


class OfWhole(torch.autograd.Function):
    """What is refused of parts: torch.func, and strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda sample: sample.cumsum(0))(x) + x.as_strided((2, 1, 6), (72, 6, 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result = grad.flip(1).cumsum(1).flip(1)
        result[:, :1] += grad.sum(1, keepdim=True)
        return result


def check_wrapped(rank: int, world: int, group: Group) -> None:
    def wrapped(x: Tensor, y: Tensor, *_: Any) -> Any:
        return OfWhole.apply(x) * y  # type: ignore[no-untyped-call]

    for pair in PAIRS:
        assert compare(group, wrapped, pair, Inputs(3)) is None, pair


def test_what_is_refused_runs_in_a_function(ranks: Ranks) -> None:
    ranks(3, check_wrapped)


def check_written(rank: int, world: int, group: Group) -> None:
    place = place_of(group)
    whole = Inputs(1).x
    for x in (whole, whole[:1]):  # sliced to a copy, and to a view
        view = View(Parts(group, place.world, place.rank))
        part = view.shard(x, view.parts.part(1, (12,)))
        with intercepted(view), view.forward():
            part.transpose(1, 2).add_(1)
            part.sum()
            with pytest.raises(RuntimeError, match=REFUSED):
                x.view(-1) + 1


def test_a_whole_tensor_is_stale_once_its_part_is_changed(ranks: Ranks) -> None:
    ranks(2, check_written)


def check_strict(rank: int, world: int, group: Group) -> None:
    def run(view: View, x: Tensor) -> None:
        view.blocks = 1
        assert (x @ x.mT).shape == (2, 12, 12)
        with pytest.raises(
            RuntimeError, match=r"cumsum at test_view.py:.*would run whole; pass strict=False"
        ):
            x.cumsum(1)
        with pytest.raises(RuntimeError, match=r"Double .*is no torch function"):
            view_cases.Double.apply(x)  # type: ignore[no-untyped-call]

    viewed(group, run, True)


def test_strict_refuses_functions_that_run_whole(ranks: Ranks) -> None:
    ranks(2, check_strict)


def check_apply_in_c(rank: int, world: int, group: Group) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.Function, "apply", torch._C._FunctionBase.__dict__["apply"])
        check_strict(rank, world, group)


def test_functions_whose_apply_is_in_c_are_seen(ranks: Ranks) -> None:
    """From torch 2.15 on it is."""
    ranks(2, check_apply_in_c)


def check_unused_generators(rank: int, world: int, group: Group) -> None:
    for dropout in (torch.nn.Dropout(0.0), torch.nn.Dropout(0.5).eval()):
        viewed(group, lambda view, x, dropout=dropout: dropout(x) + dropout(torch.ones(12, 6)))


def test_generators_may_differ_if_nothing_is_dropped(ranks: Ranks) -> None:
    ranks(2, check_unused_generators)


def check_other_group(rank: int, world: int, group: Group) -> None:
    place = place_of(group)
    other = Parts(group, place.world, place.rank)
    with pytest.raises(RuntimeError, match="has a part of another view or layout"):
        viewed(group, lambda view, x: mark(torch.ones(2, 6, 6), other.part(1, (12,))).sum(1).cumsum(1) + x)


def test_parts_of_another_group_are_refused(ranks: Ranks) -> None:
    ranks(2, check_other_group)


def check_plans(rank: int, world: int, group: Group) -> None:
    """Count the rules that are asked: once for each function, parts and shapes."""

    def run(view: View, x: Tensor) -> None:
        for scale in (0.1, 0.2, 0.3):
            y = (x * scale).view(2, 12, 3, 2).transpose(1, 2)
        assert part_of(y) is view.parts.part(2, (12,))
        assert len(view._steps) == 3

    viewed(group, run)


def test_plans_are_made_once(ranks: Ranks) -> None:
    ranks(2, check_plans)


def check_dropout(rank: int, world: int, group: Group) -> None:
    """Calls that drop nothing, and others, are known."""

    def run(view: View, x: Tensor) -> list[int]:
        view.recording = False
        counts = []
        for p, training in ((0.0, True), (0.5, False), (0.5, True)):
            torch.dropout(x, p, training)
            with mock.patch.object(View, "_call", autospec=True, side_effect=View._call) as asked:
                torch.dropout(x, p, training)
            counts.append(asked.call_count)
        return counts

    torch.manual_seed(1)
    assert viewed(group, run) == [0, 0, 0]


def test_dropout_that_drops_nothing_is_known(ranks: Ranks) -> None:
    ranks(2, check_dropout)


BY_TENSORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "slice": lambda x, n: x[:, :n].sum(1),
    "slice and index": lambda x, n: x[:, n:, 0].sum(1),
    "split": lambda x, n: x.split([n, x.size(1) - n], 1)[1].sum(1),
    "chunk": lambda x, n: x.chunk(n, 1)[0].sum(1),
    "narrow": lambda x, n: x.narrow(1, 0, n).sum(1),
    "unflatten": lambda x, n: x.unflatten(1, (n, -1))[:, 0].sum(1),
    "view": lambda x, n: x.view(x.size(0), n, -1, x.size(2))[:, 0].sum(1),
    "expand": lambda x, n: x[None].expand(n, -1, -1, -1).sum((0, 2)),
    "repeat": lambda x, n: x.repeat(1, n, 1).sum(1),
    "pad": lambda x, n: F.pad(x, (0, 0, n - 2, 0)).cumsum(1)[:, 3],
    "pad of rows": lambda x, n: F.pad(x.mT, (n - 1, 1)).cumsum(2)[:, :, 3],
    "convolution": lambda x, n: F.conv1d(x.mT, x.new_ones(6, 6, 3), padding=(n - 1,), stride=(n,)).sum(2),
    "upsampling": lambda x, n: F.interpolate(x.mT, size=(n * 6,)).cumsum(2)[:, :, 5],
    "pixels": lambda x, n: F.pixel_unshuffle(x.repeat(1, 1, 2)[:, None], n).sum((1, 3)).cumsum(1)[:, 1],
    "pool": lambda x, n: F.avg_pool1d(x.mT, (n,)).cumsum(2)[:, :, 1],
}


def check_sizes_that_are_tensors(rank: int, world: int, group: Group) -> None:
    """Sizes and bounds that models read from grids: equal calls have other values."""

    whole = Inputs(1).x

    def run(view: View, x: Tensor) -> None:
        for name, function in BY_TENSORS.items():
            for n in (4, 2, 4):
                size = torch.tensor(n)
                found = view.gather(function(x, size))
                assert (found - function(whole, size)).abs().max() < 1e-12, (name, n)

    viewed(group, run)


def test_sizes_that_are_tensors_are_read_in_each_call(ranks: Ranks) -> None:
    ranks(2, check_sizes_that_are_tensors)


def check_memory(rank: int, world: int, group: Group) -> None:
    """Run sequences of many lengths: what is remembered of them is bounded."""
    place = place_of(group)
    parts = Parts(group, place.world, place.rank)
    seen = View(parts)
    with mock.patch.object(view, "_MOST_STEPS", 50):
        for length in range(2, 200):
            x = seen.shard(torch.ones(1, length, 4), parts.part(1, (length,)))
            with intercepted(seen), seen.forward():
                (x.view(1, length, 2, 2).transpose(1, 2) * 2)[:, :, 1:].sum()
    gc.collect()
    assert len(seen._steps) <= 52
    assert len(parts._made) < 100 and len(parts._layouts) < 100 and len(parts.moves) < 60


def test_what_is_remembered_is_bounded(ranks: Ranks) -> None:
    ranks(2, check_memory)


def check_flex_attention(rank: int, world: int, group: Group) -> None:
    """Compare masks of all and of each head, captured tensors, fewer key heads, scores, joint sequences."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # as models import it

    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 12, 3, 16, generator=draw) for _ in range(3))
    near = torch.randn(12, generator=draw) > 0

    def attend(q: Tensor, k: Tensor, v: Tensor, near: Tensor) -> list[Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        n = q.shape[2]
        causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, "cpu")
        heads = create_block_mask(lambda b, h, i, j: (i - j).abs() <= 4 * h, None, 3, n, n, "cpu")
        of_part = create_block_mask(lambda b, h, i, j: near[i] | near[j] | (i == j), None, None, n, n, "cpu")
        found = [
            flex_attention(q, k, v, block_mask=causal),
            flex_attention(q, k, v, block_mask=of_part),
            flex_attention(q, k[:, :1], v[:, :1], block_mask=heads, enable_gqa=True, scale=0.5),
            flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * torch.where(near[j], 2.0, 1.0)),
            flex_attention(q, k, v, return_lse=True)[1],
        ]
        return [x.transpose(1, 2) for x in found]

    with torch.no_grad():
        expected = attend(q, k, v, near)
        for lengths in ((12,), (5, 7)):
            view = View(Parts(group, world, rank))
            shards = [view.shard(x, view.parts.part(1, lengths)) for x in (q, k, v)]
            shards.append(view.shard(near, view.parts.part(0, lengths)))
            with intercepted(view), view.forward():
                found = attend(*shards)
            for x, y in zip(view.gather(found), expected, strict=True):
                torch.testing.assert_close(x, y)
            whole = {each.function for each in view.report.functions}
            assert whole == {"flex_attention"}  # those with score_mod and return_lse


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.compiler)])  # torch traces it
def test_flex_attention_is_exact(ranks: Ranks, world: int) -> None:
    """Of 3 heads 4 ranks have none for one."""
    ranks(world, check_flex_attention)


class Causal(torch.nn.Module):
    """Convolutions as of state spaces: padded on both sides, and cut to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((4, 1), (2, 1), (3, 2))  # spans and dilations
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv1d(6, 6, span, groups=6, padding=(span - 1) * step, dilation=step)
            for span, step in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x.mT))[..., : x.size(1)].mT
        return x


def check_causal(rank: int, world: int, group: Group) -> None:
    """No convolution runs whole, also where ranks have fewer tokens than one reaches back."""
    for tokens in (37, 2 * world, world):
        torch.manual_seed(tokens)
        model = Causal().double()
        x = torch.randn(2, tokens, 6, dtype=torch.float64)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        parts = Parts(group, world, rank)
        view = View(parts, strict=True)
        view.blocks = 1  # where strict holds
        part = parts.shard(ours, parts.part(1, (tokens,)))
        with view:
            y = model(part)
        y = parts.gather(y)
        expected = model(theirs)
        assert torch.allclose(y, expected, rtol=0, atol=1e-12), tokens
        (gradient,) = torch.autograd.grad(y.square().sum(), ours)
        dist.all_reduce(gradient, group=group)
        (wanted,) = torch.autograd.grad(expected.square().sum(), theirs)
        assert torch.allclose(gradient / world, wanted, rtol=0, atol=1e-11), tokens


@pytest.mark.parametrize("world", [2, 3])
def test_causal_convolutions_run_on_tokens(ranks: Ranks, world: int) -> None:
    ranks(world, check_causal)
