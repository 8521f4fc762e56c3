# SPDX-License-Identifier: Apache-2.0
"""The kernels of blocks: each against one process, the choice among them, and what each refuses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import flash_attn_standin, flash_varlen_standin, flex_standin
from helpers.whole_attention import METHODS, error_of, expected_of, inputs
from torch.nn.attention import SDPBackend

import spar
from spar import SequenceLayout
from spar._attention.kernel_blocks import strip_blocks, strips_of
from spar._attention.kernels import KERNELS, aten, flash_attn, kernel_for, reason_against
from spar._attention.kernels.aten import CudnnCuda, FlashCpu, FlashCuda
from spar._attention.kernels.blockwise import Blockwise
from spar._attention.kernels.flash_attn import FlashAttn
from spar._attention.kernels.flex import Flex
from spar._attention.kernels.kernel import NO_WINDOW, BlockInputs, Needs, torch_version
from spar._exchange.layouts import Piece, packed, pieces

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
DOCUMENTS = [7, 0, 15, 1]
SHORT = {  # kernels for GPUs, of 16-bit tensors, and the calls of their stand-ins
    "flash_attn": {"forward", "backward"},
    "flash on a GPU": {
        *("forward", "backward", "aten forward", "aten backward"),
        *("varlen forward", "varlen backward"),
    },
    # Blocks of one key are flash attention's.
    "cudnn": {
        *("forward", "backward", "cudnn forward", "cudnn backward"),
        *("aten forward", "aten backward"),
    },
}


def on_gpu(capability: tuple[int, int]) -> Any:
    return mock.patch("torch.cuda.get_device_capability", lambda device: capability)


@contextmanager
def standins(**kernels: Any) -> Iterator[None]:
    """Let CPU tensors reach the kernels for GPUs; with more kernels by name."""
    flash_attn._interface.cache_clear()
    ops = {
        "_scaled_dot_product_flash_attention": flash_attn_standin.aten_forward,
        "_scaled_dot_product_flash_attention_backward": flash_attn_standin.aten_backward,
        "_scaled_dot_product_cudnn_attention": flash_attn_standin.cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": flash_attn_standin.cudnn_backward,
    }
    on_cpu = {**KERNELS["cpu"], "flash_attn": FlashAttn(), **kernels}
    # It is the last one, as on a GPU.
    on_cpu["flex"] = on_cpu.pop("flex")
    with (
        flash_attn_standin.installed(),
        flash_varlen_standin.registered(),
        mock.patch.dict(KERNELS, cpu=on_cpu),
        flex_standin.installed(),
        on_gpu((8, 0)),
        mock.patch("torch.backends.cuda.can_use_cudnn_attention", lambda call: True),
        mock.patch.multiple(torch.ops.aten, create=True, **ops),
    ):
        yield
    flash_attn._interface.cache_clear()


def check_named(rank: int, world: int, group: Group, name: str) -> None:
    layouts = {
        "zigzag": SequenceLayout.zigzag(23, group),
        "even": SequenceLayout.even(23, group),
        "packed": SequenceLayout.packed(DOCUMENTS, group),
    }
    short = name in SHORT
    kind, limit = (torch.bfloat16, 0.1) if short else (torch.float32, 2e-5)
    generator = torch.Generator().manual_seed(1)
    random = torch.rand(2, 4, layouts["even"].total, layouts["even"].total, generator=generator)
    masks = [None] if short else [None, random > 0.4, (3 * random[:1, :1]).to(kind)]
    for way, layout, causal, key_heads in itertools.product(METHODS, layouts, (False, True), (4, 1)):
        whole = inputs(23, 4, key_heads, torch.float64)
        documents = DOCUMENTS if layout == "packed" else None
        for mask in masks if layout == "packed" and key_heads == 1 else [None]:
            attend = partial(
                spar.attention,
                layout=layouts[layout],
                causal=causal,
                mask=mask,
                method=way,
                kernel=name.split()[0],
            )
            expected = expected_of(whole, causal=causal, mask=mask, documents=documents)
            found = error_of(attend, [x.to(kind) for x in whole], expected, layouts[layout].index())
            assert found < limit, (way, layout, causal, key_heads, found)


@pytest.mark.parametrize("name", ["flash", "blockwise", *SHORT, "flex"])
def test_named_kernel_matches_one_process(ranks: Ranks, name: str) -> None:
    ranks(2, check_with_standins, name)


def check_with_standins(rank: int, world: int, group: Group, name: str) -> None:
    kernels = {"flash on a GPU": {"flash": FlashCuda()}, "cudnn": {"cudnn": CudnnCuda()}}.get(name, {})
    with standins(**kernels):
        flash_attn_standin.CALLS.clear()
        check_named(rank, world, group, name)
        called = set(flash_attn_standin.CALLS)
    assert called == SHORT.get(name, set())


def test_first_kernel_that_can_compute_a_call() -> None:
    names = {id(kernel): name for name, kernel in KERNELS["cpu"].items()}

    def chosen(kind: torch.dtype, width: int = 8) -> str:
        q, v = torch.zeros(1, 1, 1, 8, dtype=kind), torch.zeros(1, 1, 1, width, dtype=kind)
        return names[id(kernel_for(None, q, v, Needs()))]

    assert chosen(torch.float32) == chosen(torch.bfloat16) == "flash"
    assert chosen(torch.float64) == chosen(torch.float32, 16) == "blockwise"
    other = torch.zeros(1, 1, 1, 8, device="meta")
    assert kernel_for(None, other, other, Needs()) is KERNELS["cpu"]["blockwise"]


def test_choice_on_a_gpu() -> None:
    names = {id(kernel): name for name, kernel in KERNELS["cuda"].items()}
    long = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16).expand(1, 2, 4096, 8)

    def chosen(x: torch.Tensor, torch_prefers: SDPBackend = SDPBackend.CUDNN_ATTENTION, **needs: bool) -> str:
        with (
            standins(),
            mock.patch.dict(KERNELS, cpu=KERNELS["cuda"]),
            mock.patch("torch._fused_sdp_choice", lambda *tensors, **options: torch_prefers.value),
            mock.patch.object(Blockwise, "suits", lambda self, q, v, needs: q.size(2) < 4096),
            mock.patch.object(Flex, "refuses", lambda self, q, v, needs: NO_WINDOW if needs.window else ""),
        ):
            return names[id(kernel_for(None, x, x, Needs(**needs)))]

    short = long[:, :, :64]
    assert chosen(long) == chosen(short) == "cudnn"
    # It would plan for the sizes of each document.
    assert chosen(long, varied=True) == chosen(long, SDPBackend.FLASH_ATTENTION) == "flash"
    assert chosen(long, window=True) == chosen(long, window=True, parts=True) == "flash"
    assert chosen(long, softcap=True) == chosen(long, softcap=True, window=True) == "flash_attn"
    assert chosen(short, mask=True) == "blockwise" and chosen(long, mask=True) == "flex"
    assert chosen(short.double()) == "blockwise"


def test_cudnn_leaves_a_single_query_or_key_to_flash() -> None:
    """torch refuses them of whole tensors; a shard may be one token."""
    for queries, keys, calls in ((1, 3, "aten"), (3, 1, "aten"), (3, 3, "cudnn")):
        q, k = (torch.randn(1, 2, size, 8, dtype=torch.bfloat16) for size in (queries, keys))
        block = BlockInputs(q, k, k, False, None, 0.3)
        with standins():
            flash_attn_standin.CALLS.clear()
            out, lse = CudnnCuda().forward(block)
            CudnnCuda().backward(block, out, out, lse)
            called = list(flash_attn_standin.CALLS)
        assert called == [f"{calls} forward", "forward", f"{calls} backward", "backward"]


def check_documents_by_ulysses(rank: int, world: int, group: Group) -> None:
    layout = SequenceLayout.packed(DOCUMENTS, group)
    attend = partial(spar.attention, layout=layout, causal=True, method="ulysses")
    at_once = {"varlen forward", "varlen backward"}
    for width, version, prefers, calls in (
        (8, "2.13.0", SDPBackend.CUDNN_ATTENTION, at_once),
        (8, "2.13.0", SDPBackend.FLASH_ATTENTION, at_once),
        # What was decided of other shapes is remembered.
        (16, "2.6.0", SDPBackend.CUDNN_ATTENTION, {"aten forward"}),
        (16, "2.6.0", SDPBackend.FLASH_ATTENTION, set()),
    ):
        whole = inputs(23, 4, 2, torch.float64, width)
        expected = expected_of(whole, causal=True, documents=DOCUMENTS)
        flash_attn_standin.CALLS.clear()
        with (
            standins(flash=FlashCuda()),
            mock.patch.object(torch, "__version__", version),
            mock.patch("torch._fused_sdp_choice", lambda *tensors, answer=prefers.value, **options: answer),
        ):
            found = error_of(attend, [x.bfloat16() for x in whole], expected, layout.index())
        assert found < 0.1
        assert set(flash_attn_standin.CALLS) - {"forward"} == calls


def test_no_plan_for_each_document(ranks: Ranks) -> None:
    ranks(2, check_documents_by_ulysses)


def test_reason_against_a_kernel() -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert "no gradients on a CPU" in reason_against("flex", q, q, Needs())
    assert reason_against("flash_attn", q, q, Needs()) == "it does not run on cpu"
    assert "accuracy of float32" in reason_against("flash", q.double(), q.double(), Needs())
    refuses, short = FlashAttn().refuses, q.bfloat16()
    flash_attn._interface.cache_clear()
    with on_gpu((8, 0)):
        assert "flash_attn cannot be imported: ModuleNotFoundError" in refuses(short, short, Needs())
    flash_attn._interface.cache_clear()
    with flash_attn_standin.installed("2.6.3"), on_gpu((8, 0)):
        assert refuses(short, short, Needs()) == "flash_attn is 2.6.3, and must be 2.7 or newer"
    with standins():
        assert refuses(short, short, Needs()) == "" and "float32" in refuses(q, q, Needs())
        assert refuses(short, short, Needs(mask=True)) == "it takes no mask"
        assert "widths" in refuses(short[..., :4], short[..., :4], Needs())
        widths = (128, 136, 192, 256)
        refused = [w for w in widths if CudnnCuda().refuses(*[short.expand(1, 1, w, 8).mT] * 2, Needs())]
        assert refused == [136, 192]
        # The package imports there, and raises in its kernel.
        for kernel in (FlashAttn(), FlashCuda(), CudnnCuda()):
            with on_gpu((7, 5)):
                why = kernel.refuses(short, short, Needs())
            assert why == "the GPU has capability (7, 5), and must have (8, 0), Ampere's, or more"
            with on_gpu((8, 0)):
                assert kernel.refuses(short, short, Needs()) == ""


def check_named_errors(rank: int, world: int, group: Group) -> None:
    layout, q = SequenceLayout.even(4, group), torch.zeros(1, 4 // world, 2, 8)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"kernel": "flsh"},
            "kernel is 'flsh'; expected a function, None or the name of a kernel: blockwise, ",
        ),
        (
            {"kernel": "flex"},
            "kernel is 'flex'; expected a kernel that can compute this; flex cannot, as torch",
        ),
        ({"kernel": "flash", "dropout_p": 0.5}, "dropout_p is 0.5; expected 0 with the kernel flash"),
        (
            {"kernel": "flash", "mask": torch.zeros(4, 4, requires_grad=True), "method": "ulysses"},
            "mask is a tensor that requires a gradient; expected one that does not",
        ),
    ]
    for options, text in cases:
        with pytest.raises(ValueError) as caught:
            spar.attention(q, q, q, layout, **options)
        assert text in str(caught.value), caught.value
    with pytest.raises(TypeError, match="kernel is 3; expected a function, a kernel's name or None"):
        spar.attention(q, q, q, layout, kernel=3)  # type: ignore[arg-type]


def test_errors_of_named_kernels(ranks: Ranks) -> None:
    ranks(2, check_named_errors)


def check_windows(rank: int, world: int, group: Group) -> None:
    """flash_attn computes windows in long strips, packed documents and a cap among them."""
    layouts = {
        "zigzag": SequenceLayout.zigzag(61, group),
        "even": SequenceLayout.even(61, group),
        "packed": SequenceLayout.packed([20, 0, 40, 1], group),
    }
    place, key = torch.arange(61)[:, None], torch.arange(61)
    document = torch.arange(3).repeat_interleave(torch.tensor([20, 40, 1]))
    cases = itertools.product(
        METHODS, layouts, (False, True), ((5, 0), (0, 3), (4, 2), (None, 7), (30, None))
    )
    for way, layout, causal, window in cases:
        left, right = (61 if side is None else side for side in window)
        allowed = (place - key <= left) & (key - place <= right)
        if causal:
            allowed &= key <= place
        if layout == "packed":
            allowed &= document[:, None] == document
        whole = inputs(61, 4, 1, torch.float64)
        expected = expected_of(whole, mask=allowed[None, None])
        attend = partial(spar.attention, layout=layouts[layout], causal=causal, window=window, method=way)
        for name in ("flash_attn", None):
            flash_attn_standin.CALLS.clear()
            with standins():
                attend = partial(attend, kernel=name)
                found = error_of(
                    attend, [x.to(torch.bfloat16) for x in whole], expected, layouts[layout].index()
                )
            assert found < 0.1, (way, layout, causal, window, name, found)
            if way == "ulysses" and not (causal and window[0] is None):
                assert "window" in flash_attn_standin.CALLS, (way, layout, causal, window)
    refused = "flash_attn cannot, as it takes no mask"
    mask = spar.Spans.padding(torch.arange(61) % 2)
    *parts, _ = [x[:, layouts["even"].index()].bfloat16() for x in whole]
    with standins(), pytest.raises(ValueError, match=refused):
        spar.attention(*parts, layouts["even"], mask=mask, kernel="flash_attn")


@pytest.mark.parametrize("world", [1, 3])
def test_windows_by_flash_attn(ranks: Ranks, world: int) -> None:
    ranks(world, check_windows)


def test_strips_are_the_spans() -> None:
    for spans in (
        spar.Spans.window(200, 5, 3),
        spar.Spans.causal(200) & spar.Spans.documents(torch.arange(200) // 37),
        spar.Spans.window(200, 40, 0) & spar.Spans.documents((torch.arange(200) + 1) // 50),
        spar.Spans.causal(200) & spar.Spans.chunks(200, 64),
        spar.Spans.causal(200) & spar.Spans.padding(torch.arange(200)[None] >= 33),
        spar.Spans.window(1, 0, 0),
    ):
        total = spans.keys
        covered = torch.zeros(total, total, dtype=torch.int32)
        found = strips_of(spans)
        assert found is not None
        for block in strip_blocks(spans, [Piece(0, total, 0)], [Piece(0, total, 0)]):
            q = torch.arange(block.queries)[:, None] + block.keys - block.queries
            k = torch.arange(block.keys)
            left, right = block.window or (total, 0 if block.causal else total)
            part = (q - k <= left) & (k - q <= right)
            assert part.any(1).all()
            covered[block.query :][: block.queries, block.key :][:, : block.keys] += part
        assert torch.equal(covered, spans.dense()[0, 0].to(torch.int32)), spans
    assert strips_of(spar.Spans.padding(torch.arange(400) // 50 % 2)) is None
    assert strips_of(spar.Spans.documents(torch.arange(4000) // 2)) is None


def test_strips_of_many_runs_take_time_of_their_number() -> None:
    """Of 400 packed documents: each strip with each run of queries and of keys would be 64 million."""
    total, documents = 32_000, 400
    spans = spar.Spans.window(total, 30, 0) & spar.Spans.documents(torch.arange(total) // 80)
    runs = pieces(packed(0, documents, [80] * documents), 4, 1)
    begin = time.process_time()
    blocks = strip_blocks(spans, runs, runs)
    took = time.process_time() - begin
    assert sum(block.queries for block in blocks) >= sum(run.size for run in runs)
    assert took < 1.0, "20 ms on an idle core"


@pytest.mark.parametrize(("version", "passed"), [("2.6.0+cpu", 4), ("2.12.1", 4), ("2.13.0", 2)])
def test_older_kernels_for_cpus_receive_a_key_head_for_each_query_head(version: str, passed: int) -> None:
    """That of torch 2.6 reads and writes outside of the tensors otherwise."""
    if passed == 2 and torch_version() < (2, 13):
        pytest.skip(f"torch {torch.__version__} cannot compute it")
    q, k, v = (torch.randn(1, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2))
    upper, seen = torch.randn(1, 4, 6, 8), []
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = torch.autograd.grad(whole, (q, k, v), upper)

    def spied(op: Callable[..., Any], first: int) -> Callable[..., Any]:
        def call(*tensors: Any, **settings: Any) -> Any:
            seen.append(tensors[first].size(1))
            return op(*tensors, **settings)

        return call

    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward")
    ops = {name: spied(forward, 1), f"{name}_backward": spied(backward, 2)}
    block = BlockInputs(q.detach(), k.detach(), v.detach(), False, None, 8**-0.5)
    aten._takes_fewer_key_heads.cache_clear()
    with mock.patch.object(torch, "__version__", version), mock.patch.multiple(torch.ops.aten, **ops):
        out, lse = FlashCpu().forward(block)
        gradients = FlashCpu().backward(block, upper, out, lse)
    aten._takes_fewer_key_heads.cache_clear()
    assert seen == [passed, passed]
    for found, wanted in zip((out, *gradients), (whole, *expected), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5)
