# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and failures of spar.attention, and data parallel training around it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.whole_attention import whole_attention
from test_faults import finish, start
from torch import Tensor, nn

import spar
from spar import SequenceLayout
from spar._attention.kernels import KERNELS
from spar.parallel_state import init_parallel_state

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
WORLD, TOTAL = 3, 12


def z(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def call(
    group: Group, q: Any = None, k: Any = None, v: Any = None, layout: Any = None, **options: Any
) -> Tensor:
    even = SequenceLayout.even(TOTAL, group)
    layout = {None: even, "and 3": (even, 3)}.get(layout, layout)
    q, k, v = (z(2, 4, 6, 8) if x is None else x for x in (q, k, v))
    return spar.attention(q, k, v, layout, **options)


Case = tuple[dict[str, Any], type[Exception], str]
CASES: dict[str, Case] = {
    "no tensor": ({"k": [1]}, TypeError, "k is a list; expected a tensor"),
    "dtype": (
        {"v": z(2, 4, 6, 8, dtype=torch.float64)},
        TypeError,
        "v is of torch.float64 on cpu; expected torch.float32",
    ),
    "three dims": ({"q": z(4, 6, 8)}, ValueError, "q is of shape [4, 6, 8]; expected four dims"),
    "heads": (
        {"k": z(2, 4, 4, 8), "v": z(2, 4, 4, 8)},
        ValueError,
        "k is of 4 heads; expected a number that divides the 6 heads of q",
    ),
    "heads of v": (
        {"k": z(2, 4, 3, 8)},
        ValueError,
        "v is of shape [2, 4, 6, 8]; expected [2, 4, 3] and a width",
    ),
    "width": (
        {"k": z(2, 4, 6, 4), "v": z(2, 4, 6, 4)},
        ValueError,
        "k is of shape [2, 4, 6, 4]; expected the batch and width of q",
    ),
    "whole sequence": (
        {"q": z(2, 12, 6, 8)},
        ValueError,
        "q is of 12 tokens; expected 4, rank 2's shard in SequenceLayout.even(12, 3 ranks). Is it the whole",
    ),
    "heads before tokens": (
        {"q": z(2, 6, 4, 8), "k": z(2, 2, 4, 8), "v": z(2, 2, 4, 8)},
        ValueError,
        "q is of 6 tokens; expected 4, rank 2's shard in SequenceLayout.even(12, 3 ranks). Are the tokens in "
        "dim 2, as in [B, H, S, D]? Pass seq_dim=2, head_dim=1",
    ),
    "equal dims": (
        {"seq_dim": 2},
        ValueError,
        "seq_dim is 2 and head_dim is 2; expected two different dims before the last",
    ),
    "local mask": (
        {"mask": z(2, 1, 4, 4)},
        ValueError,
        "mask is of shape [2, 1, 4, 4]; expected [.., 12, 12] over the whole sequence, or a key mask [2, 12]",
    ),
    "mask of ints": (
        {"mask": z(2, 12, dtype=torch.int64)},
        TypeError,
        "mask is a tensor of torch.int64; expected a bool or floating dtype; pass mask.bool() if",
    ),
    "no mask": ({"mask": 1}, TypeError, "mask is 1; expected a tensor [.., 12, 12]"),
    "method": (
        {"method": "flash"},
        ValueError,
        'method is \'flash\'; expected "ulysses", "gather", "ring" or None',
    ),
    "dropout": ({"dropout_p": 1.5}, ValueError, "dropout_p is 1.5; expected at least 0 and below 1"),
    "dropout in a ring": (
        {"dropout_p": 0.5, "method": "ring"},
        ValueError,
        "dropout_p is passed; expected none with a ring",
    ),
    "own kernel in a ring": (
        {"attend": whole_attention, "method": "ring"},
        ValueError,
        "attend is a function; expected a kernel's name with a ring",
    ),
    "own kernel and scale": (
        {"attend": whole_attention, "scale": 2.0},
        ValueError,
        "scale is passed, and attend too",
    ),
    "own kernel's shape": (
        {"attend": lambda q, k, v: q[:1]},
        ValueError,
        "the result of attend is of shape [1, 12, 2, 8]; expected a tensor of shape [2, 12, 2, 8]",
    ),
    "layout of k and v": (
        {"layout": "and 3"},
        TypeError,
        "attention: layout is (SequenceLayout.even(12, 3 ranks), 3); expected a SequenceLayout, or those",
    ),
    "window of -1": (
        {"window": (-1, 0)},
        ValueError,
        "window is (-1, 0); expected ints of at least 0 in (left, right): how many keys before and behind",
    ),
    "window of a bool": ({"window": (True, 0)}, TypeError, "window is (True, 0); expected (left, right)"),
    "window of an int": ({"window": 512}, TypeError, "window is 512; expected (left, right)"),
    "window of three": ({"window": (1, 2, 3)}, TypeError, "window is (1, 2, 3); expected (left, right)"),
    "window of a float": ({"window": (1.5, 0)}, TypeError, "window is (1.5, 0); expected (left, right)"),
    "window of a string": ({"window": "10"}, TypeError, "window is '10'; expected (left, right)"),
    "window of a tensor": (
        {"window": torch.tensor([3, 0])},
        TypeError,
        "window is tensor([3, 0]); expected (left, right)",
    ),
    "number of sinks": (
        {"sinks": z(5)},
        ValueError,
        "sinks is of shape [5]; expected a floating tensor [6] on cpu, a score for each head of q",
    ),
    "dims of sinks": ({"sinks": z(1, 6)}, ValueError, "sinks is of shape [1, 6]; expected a floating tensor"),
    "dtype of sinks": (
        {"sinks": z(6, dtype=torch.int64)},
        TypeError,
        "sinks is of torch.int64 on cpu; expected a floating tensor [6] on cpu",
    ),
    "device of sinks": (
        {"sinks": z(6, device="meta")},
        TypeError,
        "sinks is of torch.float32 on meta; expected a floating tensor [6] on cpu",
    ),
    "no sinks": ({"sinks": [0.0] * 6}, TypeError, "sinks is a list; expected a floating tensor [6] on cpu"),
    "softcap of 0": ({"softcap": 0}, ValueError, "softcap is 0; expected a positive number, or None"),
    "negative softcap": ({"softcap": -5.0}, ValueError, "softcap is -5.0; expected a positive number"),
    "infinite softcap": ({"softcap": float("inf")}, ValueError, "softcap is inf; expected a positive number"),
    "softcap of nan": ({"softcap": float("nan")}, ValueError, "softcap is nan; expected a positive number"),
    "softcap of a bool": ({"softcap": True}, TypeError, "softcap is True; expected a positive number"),
    "softcap of a string": ({"softcap": "30"}, TypeError, "softcap is '30'; expected a positive number"),
    "no bias": ({"bias": z(12, 12)}, TypeError, "expected a function of index tensors, or None"),
    "bias of ints": (
        {"bias": lambda b, h, q, k: q - k},
        TypeError,
        "bias returned a tensor of torch.int64; expected a floating tensor",
    ),
    "bias of a number": (
        {"bias": lambda b, h, q, k: 1.0},
        TypeError,
        "bias returned a float; expected a floating tensor",
    ),
    "shape of a bias": (
        {"bias": lambda b, h, q, k: z(5, 7)},
        ValueError,
        "bias returned a tensor of shape [5, 7]; expected [2, 2, 12, 12], or one that broadcasts to it",
    ),
    "dims of a bias": (
        {"bias": lambda b, h, q, k: z(1, 1, 1, 1, 1)},
        ValueError,
        "bias returned a tensor of shape [1, 1, 1, 1, 1]; expected [2, 2, 12, 12]",
    ),
    "learned bias": (
        {"bias": lambda b, h, q, k: z(12, requires_grad=True)},
        ValueError,
        "bias returned a tensor that requires a gradient, as a learned bias (T5's) does",
    ),
    "a bias that raises": ({"bias": lambda b, h, q, k: 1 / 0}, ZeroDivisionError, "division by zero"),
    "size of spans": (
        {"mask": spar.Spans.causal(13)},
        ValueError,
        "mask is Spans of [1, 1, 13, 13]; expected Spans of [2 or 1, 6 or 1, 12, 12]",
    ),
    "batch of spans": (
        {"mask": spar.Spans.documents(torch.arange(36).view(3, 12) // torch.tensor([[1], [2], [3]]))},
        ValueError,
        "mask is Spans of [3, 1, 12, 12]; expected Spans of [2 or 1, 6 or 1, 12, 12]",
    ),
    "heads of spans": (
        {"mask": spar.Spans.of(lambda b, h, q, k: k <= q - h, (1, 4, 12, 12))},
        ValueError,
        "mask is Spans of [1, 4, 12, 12]; expected Spans of [2 or 1, 6 or 1, 12, 12]",
    ),
    "own kernel and spans": (
        {"attend": whole_attention, "mask": spar.Spans.causal(12)},
        ValueError,
        "mask is passed, and attend too; expected attend to apply it itself",
    ),
    **{
        f"own kernel and {name}": (
            {"attend": whole_attention, name: value},
            ValueError,
            f"{name} is passed, and attend too; expected attend to apply it itself",
        )
        for name, value in {
            "window": (3, 0),
            "sinks": z(6),
            "softcap": 5.0,
            "bias": lambda b, h, q, k: 0.1 * (k - q),
            "mask": z(12, 12),
            "dropout_p": 0.1,
        }.items()
    },
    **{
        f"dropout and {name}": (
            {"dropout_p": 0.25, name: value},
            ValueError,
            f"dropout_p is 0.25, and {name} is passed; expected 0 with it",
        )
        for name, value in {"sinks": z(6), "softcap": 5.0, "bias": lambda b, h, q, k: 0.1 * k}.items()
    },
    "a kernel without a cap": (
        {"attend": "flash", "softcap": 5.0},
        ValueError,
        "attend is 'flash'; expected a kernel that can compute this; flash cannot, as it cannot cap scores",
    ),
    "a kernel of GPUs": (
        {"attend": "flash_attn", "window": (3, 0)},
        ValueError,
        "attend is 'flash_attn'; expected a kernel that can compute this; flash_attn cannot, as it does",
    ),
    "own kernel raises": ({"attend": lambda q, k, v: 1 / 0}, ZeroDivisionError, "division by zero"),
}


def check_error(rank: int, world: int, group: Group, name: str) -> None:
    """The last rank passes the wrong argument."""
    options, kind, text = CASES[name]
    last = rank == world - 1
    right: dict[str, Any] = {"method": "ring"} if options.get("method") == "ring" else {}
    if "attend" in options and not right:
        right = {"attend": whole_attention}
    if callable(options.get("bias")) and "dropout_p" not in options and not right:
        # It is called after the exchange: the peers wait in the next one.
        right = {"bias": lambda b, h, q, k: 0.1 * (k - q)}
    with pytest.raises(kind if last else spar.MismatchError) as caught:
        call(group, **(options if last else right))
    assert text in str(caught.value), caught.value
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1, 2], "the group is usable"


@pytest.mark.parametrize("name", CASES)
def test_error_is_reported_to_the_peers(ranks: Ranks, name: str) -> None:
    ranks(WORLD, check_error, name)


def fail_at_two_levels(rank: int, folder: Path, where: str) -> None:
    """Rank 1 of ring x ulysses fails: every rank that waits for it raises at once, in both of its groups.

    If it fails in a block, its ring has its keys, and completes forward; backward waits for it.
    """
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    layout = SequenceLayout.hybrid(8, state)
    spar.attention(*[z(1, 2, 2, 8)] * 3, layout)
    begin = time.monotonic()
    options: dict[str, Any] = {"mask": z(3, 3)} if rank == 1 and where == "arguments" else {}
    inputs: list[Any] = [z(1, 2, 2, 8, requires_grad=True) for _ in range(3)]
    if rank == 1 and where == "no tensor":
        inputs[0] = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and where == "a block":
            patch.setattr(KERNELS["cpu"]["flash"], "forward", lambda *arguments: 1 / 0)
        errors = (TypeError, ValueError, ZeroDivisionError, spar.MismatchError)
        with pytest.raises(errors):
            y = spar.attention(*inputs, layout, **options)
            assert where == "a block" and rank in (0, 2)
            y.sum().backward()  # type: ignore[no-untyped-call]
    assert time.monotonic() - begin < 10
    dist.barrier()  # the exchange that rank 1 left in flight ends first
    y = spar.attention(*[torch.ones(1, 2, 2, 8)] * 3, layout)
    assert torch.equal(y, torch.ones(1, 2, 2, 8)), "both groups are in step"


@pytest.mark.parametrize("where", ["arguments", "no tensor", "a block"])
def test_failure_reaches_the_ranks_of_both_groups(tmp_path: Path, where: str) -> None:
    ranks = start(fail_at_two_levels, 4, tmp_path, where, SPAR_TIMEOUT="20")
    assert finish(ranks, 60) == [0] * 4


def check_failing_block(rank: int, world: int, group: Group) -> None:
    """Rank 1 fails in each block of a ring in turn: ranks that wait raise, and the group stays in step.

    After the last exchange of forward, ranks raise in their next call. After that of backward they wait for
    nothing.
    """
    layout, kernel = SequenceLayout.even(TOTAL, group), KERNELS["cpu"]["flash"]
    for where, block in itertools.product(("forward", "backward"), range(world)):
        blocks = itertools.count()
        right = getattr(kernel, where)

        def fails(*arguments: Any) -> Any:
            return 1 / 0 if next(blocks) == block else right(*arguments)  # noqa: B023

        inputs = [z(1, TOTAL // world, 2, 8, requires_grad=True) for _ in range(3)]
        waits = where == "forward" or block < world - 1
        peers = pytest.raises(spar.MismatchError, match="division") if waits else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(kernel, where, fails)
            with pytest.raises(ZeroDivisionError) if rank == 1 else peers:
                spar.attention(*inputs, layout, method="ring").sum().backward()  # type: ignore[no-untyped-call]
        assert spar.all_gather(torch.tensor([rank]), group).tolist() == list(range(world)), (where, block)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rank_that_fails_in_a_block(ranks: Ranks, world: int) -> None:
    ranks(world, check_failing_block)


def check_names_attention(rank: int, world: int, group: Group) -> None:
    """Exchanges inside of attention: errors name what the user called."""
    even = SequenceLayout.even(TOTAL, group)
    x = z(2, 4, 6, 8, requires_grad=rank == 1)
    for method in ("ulysses", "gather", "ring"):
        with pytest.raises(spar.MismatchError, match=r"(?s)^attention on rank.*gradient") as caught:
            spar.attention(x, x, x, even, method=method)
        assert caught.value.op == "attention"


def test_errors_inside_attention_name_it(ranks: Ranks) -> None:
    ranks(WORLD, check_names_attention)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": True}, "causal"),
    "scale": ({"scale": 0.5}, "scale 0.5"),
    "mask": ({"mask": z(TOTAL, TOTAL)}, "mask of torch.float32"),
    "kind of mask": ({"mask": z(TOTAL, TOTAL) == 0}, "mask of torch.bool"),
    "dropout_p": ({"dropout_p": 0.25}, "dropout_p 0.25"),
}


def check_settings(rank: int, world: int, group: Group, method: str) -> None:
    """One rank's settings differ: every rank raises, the first time and repeated, and shows them."""
    for name, (options, text) in SETTINGS.items():
        if name == "dropout_p" and method == "ring":
            continue
        own = options if rank == world - 1 else {"mask": z(TOTAL, TOTAL)} if name == "kind of mask" else {}
        for _ in range(2):
            with pytest.raises(spar.MismatchError, match=text):
                call(group, method=method, **own)
        call(group, method=method, **options)


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_settings_that_differ_are_a_mismatch(ranks: Ranks, method: str) -> None:
    ranks(WORLD, check_settings, method)


def check_layouts_that_differ(rank: int, world: int, group: Group, method: str) -> None:
    """Ranks hold equally many tokens by layouts that differ."""
    pairs = [
        (SequenceLayout.even(TOTAL, group), SequenceLayout.zigzag(TOTAL, group)),
        (SequenceLayout.packed([8, 4], group), SequenceLayout.packed([4, 8], group)),
    ]
    for pair in pairs:
        x = z(2, pair[0].sizes[rank], 6, 8)
        assert pair[0].sizes == pair[1].sizes
        with pytest.raises(spar.MismatchError):
            call(group, x, x, x, pair[rank == 1], method=method)


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_layouts_of_equal_sizes_are_a_mismatch(ranks: Ranks, method: str) -> None:
    ranks(2, check_layouts_that_differ, method)


def compare_masks(rank: int, folder: Path) -> None:
    """With SPAR_CHECK=1 the values of masks are compared, also where NumPy is not installed."""
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", None)
        for shape in ((TOTAL, TOTAL), (2, TOTAL)):
            with pytest.raises(spar.MismatchError, match="hash of the mask"):
                call(group, *[z(2, 6, 6, 8)] * 3, mask=torch.full(shape, float(rank)))
            call(group, *[z(2, 6, 6, 8)] * 3, mask=torch.ones(shape))


def test_values_of_masks_are_compared_on_request(tmp_path: Path) -> None:
    assert finish(start(compare_masks, 2, tmp_path, SPAR_CHECK="1"), 60) == [0] * 2


def check_names_of_torch(rank: int, world: int, group: Group) -> None:
    layout, x = SequenceLayout.even(TOTAL, group), z(2, 4, 6, 8)
    wrong = {
        "is_causal": (True, "is_causal is not an argument; pass causal"),
        "attn_mask": (None, "attn_mask is not an argument; pass mask"),
        "enable_gqa": (True, "enable_gqa is not an argument; pass nothing, as k and v may have fewer heads"),
        "group": (group, "group is not an argument; pass layout, which has the group"),
    }
    for name, (value, text) in wrong.items():
        with pytest.raises(TypeError, match=f"^attention: {text}"):
            spar.attention(x, x, x, layout, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="query is not an argument; pass q"):
        spar.attention(query=x, key=x, value=x, layout=layout)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        spar.attention(x, x, x, layout, windows=3)  # type: ignore[call-arg]
    assert list(inspect.signature(spar.attention).parameters)[:5] == ["q", "k", "v", "layout", "causal"]


def test_keywords_of_torch_name_those_of_spar(ranks: Ranks) -> None:
    ranks(1, check_names_of_torch)


def check_nobody_waits(rank: int, world: int, group: Group) -> None:
    """Whole keys are not exchanged: one rank's error is its own, and the next exchange is in step."""
    layout = SequenceLayout.even(TOTAL, group)
    heads = 4 if rank == 1 else 6  # does not divide the heads of q
    k = z(2, 5, heads, 8)
    with pytest.raises(ValueError, match="k is of 4 heads") if rank == 1 else contextlib.nullcontext():
        spar.attention(z(2, 4, 6, 8), k, k, (layout, None))
    assert spar.all_gather(torch.tensor([rank]), group).tolist() == [0, 1, 2]


def test_error_that_nobody_waits_for(ranks: Ranks) -> None:
    ranks(WORLD, check_nobody_waits)


def check_local_errors(rank: int, world: int, group: Group) -> None:
    """Errors that depend on nothing of one rank alone."""
    even, packed = SequenceLayout.even(TOTAL, group), SequenceLayout.packed([TOTAL], group)
    same = z(TOTAL, 4, 6, 8)
    for options, text in (
        ({"layout": 12}, "attention: layout is 12; expected a SequenceLayout, or those of q and of k and v"),
        ({"layout": (even, packed)}, "expected one packed layout for q, k and v"),
        ({"mask": z(12, 12, requires_grad=True), "method": "ring"}, "mask is a tensor that requires a grad"),
        ({"layout": (even, SequenceLayout.zigzag(TOTAL, group)), "method": "ring"}, "two layouts"),
        (
            {"layout": (even, SequenceLayout.even(TOTAL, dist.group.WORLD))},
            "of two groups; expected layouts of one group",
        ),
        ({"k": z(2, 9, 6, 8), "v": z(2, 9, 6, 8)}, "k is of 9 tokens; expected 4, rank"),  # a KV cache, say
        ({"q": same, "k": same, "v": same, "mask": z(12, 12)}, "it may be a key mask or [12, 12]"),
        (
            {"layout": (even, None), "k": z(2, 5, 6, 8), "v": z(2, 5, 6, 8), "method": "ulysses"},
            "have no layout",
        ),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(group, **options)  # type: ignore[arg-type]
        assert text in str(caught.value), caught.value


def test_errors_of_all_ranks(ranks: Ranks) -> None:
    ranks(WORLD, check_local_errors)


def die_in_the_ring(rank: int, folder: Path) -> None:
    group = dist.group.WORLD
    layout = SequenceLayout.even(TOTAL, group)
    q = z(2, 4, 6, 8, requires_grad=True)
    y = spar.attention(q, z(2, 4, 6, 8), z(2, 4, 6, 8), layout, method="ring")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((spar.PeerLostError, spar.GroupBrokenError), match=r"rank 1|broken"):
        y.sum().backward()  # type: ignore[no-untyped-call]
    os._exit(0)


def test_rank_that_dies_before_its_backward(tmp_path: Path) -> None:
    assert finish(start(die_in_the_ring, WORLD, tmp_path), 60) == [0, -signal.SIGKILL, 0]


# ---- data parallel wrappers ----


class Model(nn.Module):
    """Two layers of causal attention over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 48) for _ in range(2))

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(2, (8, 6)).split([4, 2, 2], 2)
            x = x + attend(q, k, v, causal=True).flatten(2)
        return F.cross_entropy(x[..., :11].flatten(0, 1), tokens.flatten(), reduction="sum")


def check_wrapped(rank: int, folder: Path, method: str) -> None:
    """dp x cp, 2 x 2: parameter gradients are averaged over all four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = init_device_mesh("cpu", (4,))
    torch.set_default_dtype(torch.float64)
    batch = torch.randint(11, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    alone = Model()
    sum(alone(tokens, whole_attention) for tokens in batch).backward()
    layout = SequenceLayout.zigzag(13, mesh["cp"].get_group())
    tokens = batch[mesh["dp"].get_local_rank()][:, layout.index()]
    for wrap in ("ddp", "fsdp2", "fsdp2 by layer"):
        model: Any = Model()
        if wrap == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.layers if wrap == "fsdp2 by layer" else ():
                fully_shard(layer, mesh=flat)
            fully_shard(model, mesh=flat)

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            return spar.attention(q, k, v, layout, causal=causal, method=method)

        (model(tokens, attend) * 4).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            assert torch.allclose(grad, other.grad, atol=1e-10), (wrap, method)
    dist.barrier()


@pytest.mark.parametrize("method", ["ulysses", "gather", "ring"])
def test_wrappers_of_data_parallel_training(tmp_path: Path, method: str) -> None:
    assert finish(start(check_wrapped, 4, tmp_path, method, set_up=False), 150) == [0] * 4
