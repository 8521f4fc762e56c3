# SPDX-License-Identifier: Apache-2.0
"""What type checkers must infer for users' code: `make lint` checks this file, and nothing runs it."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import spar


def layouts(layout: spar.SequenceLayout, x: torch.Tensor, several: list[torch.Tensor]) -> None:
    assert_type(layout.shard(x, 1), torch.Tensor)
    assert_type(layout.shard(several, 1, grad_scale="down"), list[torch.Tensor])
    assert_type(layout.shard((x, x), 1, None), list[torch.Tensor])
    assert_type(layout.gather(x, 1, "up"), torch.Tensor)
    assert_type(layout.gather(several, 1), list[torch.Tensor])
    assert_type(layout.gather(x, 1, backward="sum"), torch.Tensor)
    assert_type(layout.gather(several, 1, backward="sum"), list[torch.Tensor])
    assert_type(layout.reduce_scatter(x, 1), torch.Tensor)
    q, k, v = layout.shard(several, 1, grad_scale=None)
    assert_type(spar.attention(q, k, v, layout, causal=True), torch.Tensor)


def exchanges(x: torch.Tensor, several: list[torch.Tensor]) -> None:
    assert_type(spar.all_to_all(x, None), torch.Tensor)
    assert_type(spar.all_to_all(several, None), list[torch.Tensor])
    assert_type(spar.all_gather(x), torch.Tensor)
    assert_type(spar.all_gather(several), list[torch.Tensor])
    assert_type(spar.reduce_scatter(x), torch.Tensor)
    assert_type(spar.mean_loss(x.sum(), 3), torch.Tensor)
    assert_type(spar.split_forward_gather_backward(x, None, 1), torch.Tensor)
    assert_type(spar.gather_forward_split_backward(x, None, 1), torch.Tensor)


def logprobs(layout: spar.SequenceLayout, x: torch.Tensor, labels: torch.Tensor) -> None:
    local = spar.token_logprobs((x, x), labels, layout)
    assert_type(local, tuple[torch.Tensor, torch.Tensor])
    whole, _ = spar.token_logprobs(x, labels, layout, gather="sequence", grad_scale="up")
    assert_type(whole, torch.Tensor)
    samples, _ = spar.token_logprobs(x, labels, layout, gather="samples")
    assert_type(samples, list[torch.Tensor])
    assert_type(spar.masked_mean(x, labels, layout, by="sample", total=4), torch.Tensor)
    assert_type(spar.data.PackedSamples(labels, rows=2).shard(labels, shift=1), torch.Tensor)
    tree = spar.data.PrefixTree([[1, 2], [1, 3]], layout="balanced").trees[0]
    assert_type(tree.expand(x), torch.Tensor)
    assert_type(tree.spans(left=4), spar.Spans)
