# SPDX-License-Identifier: Apache-2.0
"""Packed documents in hybrid models over a sharded sequence: kernels keep them apart, as in one process.

Public incidents are of states and convolutions that passed from one document into the next: verl#5552,
prime-rl#3000, prime-rl#3002, NeMo-RL#2529, lmms-engine#167, mcore-bridge#162. Kernels of GPUs stop them where
`cu_seq_lens_q` and `seq_idx` say. Here functions stand for these kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import llms
from helpers.llms import restarts, seeded, whole
from torch import Tensor

import spar
from spar.integrations._transformers import mixers

PRELOAD = llms.PRELOAD
POOL = (2, 3)
pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
RIGHT, WRONG = 1e-4, 1e-2  # gates are float32 in transformers, and their gradients almost cancel

LINEAR = {
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2 = {
    "layers_block_type": ["mamba", "attention", "mamba"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
}
MODELS = {
    "qwen3_5": llms.maker("Qwen3_5", **LINEAR),
    "fewer heads than ranks": llms.maker(
        "Qwen3_5", **LINEAR | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    ),
    "nemotron_h": llms.maker("NemotronH", **MAMBA2),
}


# ---- kernels that keep documents apart ----


class Kernel(torch.autograd.Function):
    """A function whose code nobody sees, as that of a GPU's kernel."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        return fn(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.fn(*leaves)
        return None, *torch.autograd.grad(y, leaves, grad)


def convolution(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def fn(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **given: Any) -> Any:
        lengths = given["seq_idx"][0].unique_consecutive(return_counts=True)[1].tolist()

        def run(x: Tensor, *weights: Tensor) -> Tensor:
            return torch.cat([own(part, *weights, activation=activation) for part in x.split(lengths, 2)], 2)

        return Kernel.apply(run, x, weight, *([] if bias is None else [bias]))  # type: ignore[no-untyped-call]

    return fn


def delta_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def fn(*tensors: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **given: Any) -> Any:
        normed = given["use_qk_l2norm_in_kernel"]

        def run(*tensors: Tensor) -> Tensor:
            documents = zip(*[x.split(cu_seqlens.diff().tolist(), 1) for x in tensors], strict=True)
            results = [
                own(*qkv, g=g, beta=beta, use_qk_l2norm_in_kernel=normed) for *qkv, g, beta in documents
            ]
            return torch.cat([y for y, _ in results], 1)

        return Kernel.apply(run, *tensors, g, beta), None  # type: ignore[no-untyped-call]

    return fn


def scan(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def fn(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any) -> Any:
        lengths = given.pop("seq_idx")[0].unique_consecutive(return_counts=True)[1].tolist()
        D, bias = given.pop("D"), given.pop("dt_bias")
        kept = {name: given[name] for name in ("chunk_size", "dt_softplus", "dt_limit")}

        def run(A: Tensor, D: Tensor, bias: Tensor, *tensors: Tensor) -> Tensor:
            documents = zip(*[x.split(lengths, 1) for x in tensors], strict=True)
            return torch.cat([own(x, dt, A, B, C, D=D, dt_bias=bias, **kept) for x, dt, B, C in documents], 1)

        return Kernel.apply(run, A, D, bias, x, dt, B, C)  # type: ignore[no-untyped-call]

    return fn


KERNELS: dict[str, Callable[[Any], Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": scan,
}


@contextmanager
def kernels(model: Any) -> Iterator[None]:
    """Let the model's module have these kernels, as where they are installed."""
    owner: Any = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in KERNELS.items():
            if hasattr(owner, name):
                patch.setattr(owner, name, kernel(getattr(owner, name)))
        # parallelize remembers functions of modules.
        patch.setattr(mixers, "_served", {})
        patch.setattr(mixers, "_own_of", {})
        yield


# ---- beside each document alone ----


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x - reference).abs().max() / reference.abs().max().clamp(min=1e-3))


def flattened(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return one row, as DataCollatorWithFlattening makes it of documents."""
    batch, positions = whole(1, sum(lengths)), restarts(*lengths)[None]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    documents = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    batch |= {"labels": batch["labels"].masked_fill(positions == 0, -100), "position_ids": positions}
    return batch | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": documents[None]}


def errors(model: Any, batch: dict[str, Tensor], alone: Any, logits: Tensor, group: Group) -> list[float]:
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    found = [relative(output.logits.detach(), logits)]
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(gradient, group=group)
        found.append(relative(gradient / group.size(), torch.zeros_like(q) if q.grad is None else q.grad))
    return found


def check(rank: int, world: int, group: Group, name: str, lengths: tuple[int, ...]) -> None:
    batch, alone, logits = flattened(lengths), seeded(MODELS[name]), []
    count = int((batch["labels"] != -100).sum())
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        one = {key: batch[key][:, end - length : end] for key in ("input_ids", "labels")}
        output = alone(**one, num_items_in_batch=count, use_cache=False)
        output.loss.backward()
        logits.append(output.logits.detach())
    expected = torch.cat(logits, 1)
    balanced = spar.SequenceLayout.balanced(lengths, group)
    layouts: list[Any] = ["even", "zigzag", lambda _: balanced]
    for layout in layouts:
        model = seeded(MODELS[name])
        with kernels(model):
            spar.parallelize(model, group, layout=layout)
            found = errors(model, batch, alone, expected, group)
            assert max(found) < RIGHT, (layout, found)
    # Without kernels transformers refuses such a row, and lets states pass in one that it cannot know.
    model = seeded(MODELS[name])
    spar.parallelize(model, group)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**batch, use_cache=False)
    unknown = {key: x for key, x in batch.items() if key in ("input_ids", "labels", "position_ids")}
    assert max(errors(model, unknown, alone, expected, group)) > WRONG


@pytest.mark.parametrize(
    ("world", "name", "lengths"),
    [
        (2, "qwen3_5", (37, 51, 40)),  # a document lies across the border of the ranks
        (3, "qwen3_5", (7, 4, 10, 1, 13)),  # no number that the ranks divide, and one token
        (3, "fewer heads than ranks", (9, 3, 20)),
        (3, "nemotron_h", (5, 1, 18, 2, 11)),
    ],
)
def test_kernels_keep_packed_documents_apart(
    pool: Ranks, world: int, name: str, lengths: tuple[int, ...]
) -> None:
    pool(world, check, name, lengths)
