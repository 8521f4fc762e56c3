# SPDX-License-Identifier: Apache-2.0
"""Documents and windows on GPUs by one call of torch's flash attention, over CPU kernels of its ops."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import flash_attn_standin, flash_varlen_standin
from helpers.flash_varlen_standin import CALLS
from helpers.whole_attention import METHODS, error_of, expected_of, inputs
from torch import Tensor

import spar
from spar import SequenceLayout, Spans
from spar._attention.blocks import Block
from spar._attention.kernel_blocks import in_parts
from spar._attention.kernels import kernel_for, reason_against, takes_parts
from spar._attention.kernels.aten import FlashCuda
from spar._attention.kernels.kernel import Needs
from spar._attention.parts import Parts

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
FEW, MANY = (7, 0, 25, 1, 14), (3, 1, 0, 2, 5) * 8 + (1, 17, 2)


def layouts_of(lengths: Sequence[int], group: Group) -> dict[str, SequenceLayout]:
    total = sum(lengths)
    return {
        "packed": SequenceLayout.packed(lengths, group),
        "balanced": SequenceLayout.balanced(lengths, group),
        "even": SequenceLayout.even(total, group).with_documents(lengths),
        "zigzag": SequenceLayout.zigzag(total, group).with_documents(lengths),
    }


def launches() -> list[int]:
    """Return the number of parts of each launch of the kernel in forward; backward has as many."""
    forward, backward = ([call.parts for call in CALLS if call.op == op] for op in ("forward", "backward"))
    assert sorted(forward) == sorted(backward)
    # A block of one part without a window is computed by the other op.
    return forward + [1] * flash_attn_standin.CALLS.count("aten forward")


def check_documents(rank: int, world: int, group: Group) -> None:
    for lengths, causal, key_heads in itertools.product((FEW, MANY), (False, True), (4, 2)):
        whole = inputs(sum(lengths), 4, key_heads, torch.float64)
        expected = expected_of(whole, causal=causal, documents=lengths)
        for (name, layout), method in itertools.product(layouts_of(lengths, group).items(), METHODS):
            attend = partial(spar.attention, layout=layout, causal=causal, method=method)
            for kernel, kind, limit in ((None, torch.float16, 0.02), ("flash", torch.bfloat16, 0.15)):
                with flash_varlen_standin.installed():
                    call = partial(attend, kernel=kernel)
                    found = error_of(call, [x.to(kind) for x in whole], expected, layout.index())
                    forward = launches()
                case = lengths, causal, key_heads, name, method, kernel, forward
                assert found < limit, (found, *case)
                check_calls(method, name, causal, world, forward, case)


def check_calls(
    method: str, layout: str, causal: bool, world: int, parts: Sequence[int], case: Sequence[Any]
) -> None:
    """Check the numbers of parts of a rank's calls in forward."""
    if method == "ulysses":
        # Of two samples.
        assert list(parts) == [2 * len([length for length in case[0] if length])], case
    elif method == "gather":
        # Of the rank's own keys, and of those gathered besides, for each run of a document; in a packed
        # layout of all keys.
        runs = 2 if causal and layout in ("balanced", "zigzag") else 1
        assert 1 <= len(parts) <= runs + (layout != "packed"), case
    else:
        # Of each rank's keys. Of two runs of a document the second one has more, unless they travel whole.
        most = world if layout in ("packed", "even") or not causal else 2 * world - 1
        assert 1 <= len(parts) <= most, case


def test_documents_are_parts_of_one_call(ranks: Ranks) -> None:
    ranks(3, check_documents, timeout=240)


WINDOWS = ((5, 0), (0, 3), (4, 2), (None, 7), (20, None))


def check_windows(rank: int, world: int, group: Group) -> None:
    total = sum(FEW)
    whole = inputs(total, 4, 2, torch.float64)
    place = torch.arange(total)
    ids = torch.arange(len(FEW)).repeat_interleave(torch.tensor(FEW))
    layouts = {
        **layouts_of(FEW, group),
        "one even": SequenceLayout.even(total, group),
        "one zigzag": SequenceLayout.zigzag(total, group),
    }
    for (left, right), causal, is_packed in itertools.product(WINDOWS, (False, True), (False, True)):
        ahead = place - place[:, None]
        allowed = (ahead >= -(total if left is None else left)) & (
            ahead <= (total if right is None else right)
        )
        allowed &= ahead <= 0 if causal else True
        allowed &= ids[:, None] == ids if is_packed else True
        expected = expected_of(whole, mask=allowed[None, None])
        for (name, layout), method in itertools.product(layouts.items(), METHODS):
            if layout.is_packed != is_packed:
                continue
            attend = partial(
                spar.attention, layout=layout, causal=causal, window=(left, right), method=method
            )
            with flash_varlen_standin.installed():
                found = error_of(attend, [x.half() for x in whole], expected, layout.index())
                forward = launches()
            case = (left, right), causal, name, method, forward
            assert found < 0.02 and forward, (found, *case)
            if method == "ulysses":
                assert len(forward) == 1, case
            if causal and method == "gather":
                # Two runs may need the same keys.
                assert len(forward) <= (1 if name in ("even", "one even") else 2), case


@pytest.mark.parametrize("world", [1, 3])
def test_windows_are_those_of_the_kernel(ranks: Ranks, world: int) -> None:
    ranks(world, check_windows, timeout=240)


def check_spans(rank: int, world: int, group: Group) -> None:
    """Spans of documents, sinks beside, and a log-sum-exp with a gradient."""
    layout = SequenceLayout.even(60, group)
    ids = torch.arange(60) // 9
    spans = Spans.causal(60) & Spans.documents(ids)
    allowed = spans.dense()
    whole = inputs(60, 4, 2, torch.float64)
    expected = expected_of(whole, mask=allowed)
    own = layout.index()
    for method in METHODS:
        with flash_varlen_standin.installed():
            attend = partial(spar.attention, layout=layout, mask=spans, method=method)
            assert error_of(attend, [x.half() for x in whole], expected, own) < 0.02
            assert CALLS, method
            attend = partial(attend, return_lse=True)
            *leaves, upper = [x[:, own].half() for x in whole]
            packed = SequenceLayout.even(60, group).with_documents([9] * 6 + [6])
            for options in ({"mask": spans, "layout": layout}, {"layout": packed, "causal": True}):
                found = []
                for chosen in (None, "blockwise"):
                    tensors = [x.clone().requires_grad_() for x in leaves]
                    keywords = {"method": method, "kernel": chosen, "sinks": torch.zeros(4), **options}
                    out, lse = spar.attention(*tensors, return_lse=True, **keywords)
                    found.append(
                        (out, lse, *torch.autograd.grad((out, lse), tensors, (upper, 0.1 * lse.detach())))
                    )
                for one, other in zip(*found, strict=True):
                    assert (one - other).abs().max() < 0.02, (method, options)


@pytest.mark.parametrize("world", [1, 2])
def test_spans_and_log_sum_exps(ranks: Ranks, world: int) -> None:
    ranks(world, check_spans)


# ---- what goes the former way ----


def check_refused(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.packed(FEW, group)
    x = torch.randn(1, layout.index().numel(), 2, 16)

    def calls(x: Tensor, version: str = "2.13.0", **keywords: Any) -> int:
        with flash_varlen_standin.installed(), mock.patch.object(torch, "__version__", version):
            for method in METHODS:
                if not (method == "ring" and "dropout_p" in keywords):
                    spar.attention(x, x, x, layout, method=method, causal=True, **keywords)
            return len(CALLS)

    short = x.half()
    assert calls(short) and calls(short, window=(3, 0)) and calls(x.bfloat16())
    assert not calls(x) and not calls(x.double()) and not calls(x, window=(3, 0))
    assert not calls(short[..., :12]) and not calls(short[..., :4])
    assert not calls(short.repeat(1, 1, 1, 17))
    assert not calls(short, softcap=2.0) and not calls(short, softcap=2.0, window=(3, 0))
    assert not calls(short, dropout_p=0.1) and not calls(short, kernel="blockwise")
    assert not calls(short, bias=lambda b, h, q, k: 0.0 * (q - k))
    assert not calls(short, mask=torch.ones(sum(FEW), sum(FEW), dtype=torch.bool))
    # Of other shapes: what was decided of these is remembered.
    other = torch.cat([short, short], 2)
    assert not calls(other, "2.6.0") and not calls(other, "2.6.0", window=(3, 0))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not calls(short)
    wide = short.repeat(1, 1, 1, 16)
    assert calls(wide) and not calls(wide, return_lse=True)


@pytest.mark.parametrize("world", [1, 2])
def test_what_the_kernel_refuses_goes_another_way(ranks: Ranks, world: int) -> None:
    ranks(world, check_refused)


def test_reasons() -> None:
    x = torch.zeros(1, 1, 1, 256, dtype=torch.half)
    assert not takes_parts(None, x, x, Needs())
    with flash_varlen_standin.installed():
        assert takes_parts(None, x, x, Needs()) and takes_parts("flash", x, x, Needs())
        assert not takes_parts("blockwise", x, x, Needs()) and not takes_parts(None, x, x, Needs(wider=True))
        assert reason_against("blockwise", x, x, Needs(parts=True)) == "it takes one document at a time"
        assert isinstance(kernel_for(None, x, x, Needs(window=True, parts=True)), FlashCuda)
        for width, capability, can in (
            (224, (8, 6), 0),
            (256, (8, 6), 1),
            (224, (9, 0), 1),
            (200, (12, 0), 0),
        ):
            with mock.patch("torch.cuda.get_device_capability", lambda device, found=capability: found):
                why = reason_against("flash", x[..., :width], x[..., :width], Needs())
            assert bool(why) != bool(can) and (can or f"backward for a width of {width} on" in why)
        with mock.patch("torch.compiler.is_compiling", lambda: True):
            assert "compiled" in reason_against("flash", x, x, Needs(window=True))
        with mock.patch.object(torch.version, "hip", "6.2"):
            assert "ROCm" in reason_against("flash", x, x, Needs(parts=True))


# ---- what is remembered ----


def check_remembered(rank: int, world: int, group: Group) -> None:
    """The parts are found once, also in inference mode, whose tensors autograd cannot save."""
    layout = SequenceLayout.packed(FEW, group)
    x = torch.randn(1, layout.index().numel(), 3, 16).half()
    for method, window in itertools.product(METHODS, (None, (6, 0))):
        with (
            flash_varlen_standin.installed(),
            mock.patch("spar._attention.kernel_blocks.Parts", wraps=Parts) as made,
        ):
            with torch.inference_mode():
                spar.attention(x, x, x, layout, method=method, causal=True, window=window)
            first = made.call_count
            for _ in range(2):
                leaf = x.clone().requires_grad_()
                spar.attention(
                    leaf, leaf, leaf, layout, method=method, causal=True, window=window
                ).square().sum().backward()
            assert first, (method, window)
            assert made.call_count == first, (method, window)


def test_parts_are_found_once(ranks: Ranks) -> None:
    ranks(2, check_remembered)


def test_parts_have_the_pairs_of_their_blocks() -> None:
    blocks = [
        Block(0, 3, 0, 3, True, 0, 0),
        Block(5, 4, 6, 2, False, 5, 6),  # its two keys are just before those of the next one
        Block(5, 4, 8, 4, True, 5, 8),
        Block(9, 1, 12, 1, True, 9, 12),
        Block(11, 2, 0, 3, False, 11, 0),
        Block(13, 4, 14, 9, False, 13, 14, window=(2, 0)),
    ]
    wanted = torch.zeros(20, 25, dtype=torch.int32)
    for block in blocks:
        wanted[block.query :][: block.queries, block.key :][:, : block.keys] += pairs(block)
    found, joined = torch.zeros_like(wanted), in_parts(blocks)
    for block in joined:
        parts = block.parts or Parts([(block.queries, block.keys)])
        for (first, end), (key, last) in zip(
            *map(itertools.pairwise, (parts.queries, parts.keys)), strict=True
        ):
            part = block._replace(queries=end - first, keys=last - key, parts=None)
            found[block.query + first :][: end - first, block.key + key :][:, : last - key] += pairs(part)
    assert torch.equal(found, wanted)
    assert [block.window for block in joined] == [(-1, 0), None, (2, 0)]
    assert joined[0].parts is not None and joined[0].parts.has_empty
    assert joined[0].parts.queries == (0, 3, 5, 5, 9, 10) and joined[0].parts.keys == (0, 3, 3, 6, 12, 13)


def pairs(block: Block) -> Tensor:
    left, right = block.window or (-1, 0 if block.causal else -1)
    ahead = torch.arange(-block.keys, 0) - torch.arange(-block.queries, 0)[:, None]
    found = ahead >= -left if left >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    return (found & (ahead <= right) if right >= 0 else found).to(torch.int32)
