# SPDX-License-Identifier: Apache-2.0
"""Layers without attention: what they send, mistakes, and what is as before in the same process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers import llms
from helpers.hybrid_models import (
    FOUR,
    INDEXED,
    POOL as POOL,
    PRELOAD as PRELOAD,
    built,
    check_exact,
    maker,
    sent,
)
from helpers.llms import compared, seeded, sharding, whole
from torch import Tensor

import spar
from spar import SequenceLayout
from spar.integrations._transformers.tokens import Tokens
from spar.integrations.transformers import shard

Group = dist.ProcessGroup

# ---- what moves ----


# The functions of causal_conv1d, flash-linear-attention and mamba_ssm, by their parameters: transformers
# passes positional arguments on to them as they are.


def conv1d_of_package(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    assert seq_idx is None and activation == "silu"
    return x


def delta_rule_of_package(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None
) -> tuple[Tensor, None]:
    assert g.dtype == torch.float32 and beta.dtype == v.dtype and scale is None
    return v, None


def chunk_scan_of_package(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    assert z is None and D is not None and A.shape == D.shape == x.shape[2:3]
    return x


def selective_scan_of_package(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
) -> Tensor:
    assert z is None and A.size(0) == u.size(1) and B.shape == C.shape == (1, A.size(1), u.size(2))
    return u


def check_bytes(rank: int, world: int, group: Group) -> None:
    """The formulas of docs/hybrid.md, for each of P ranks with T tokens in an even layout."""
    from spar.integrations._transformers import scans

    T, P, tokens = 12, world, Tokens(SequenceLayout.even(12 * world, group))
    H, HK, K, V, G, N, C, W = 4, 2, 8, 6, 2, 5, 8, 4

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def check(exchanges: int, expected: float, run: Any, own: Any, *args: Tensor, **named: Any) -> None:
        before = sent()
        run(own, tokens, *args, **named)
        found, calls = (after - n for after, n in zip(sent(), before, strict=True))
        assert (found, calls) == (expected, exchanges), (run, found, expected, calls)

    shared, channels, states = (P - 1) / P, zeros(1, C, T), zeros(1, N, T)
    halo = (rank < P - 1) * (W - 1) * C * 2
    check(1, halo, scans._convolution, conv1d_of_package, channels, zeros(C, W), activation="silu")
    keys, gates = zeros(1, T, HK, K), zeros(1, T, H, dtype=torch.float32)
    delta = keys, keys, zeros(1, T, H, V), gates, zeros(1, T, H)
    moved = T * shared * ((2 * HK * K + 2 * H * V) * 2 + H * 4 + H * 2)
    check(2, moved, scans._delta_rule, delta_rule_of_package, *delta)
    scan = zeros(1, T, H, K), zeros(1, T, H), zeros(H), zeros(1, T, G, N), zeros(1, T, G, N)
    moved = T * shared * (2 * H * K + 2 * G * N + H) * 2
    check(2, moved, scans._chunk_scan, chunk_scan_of_package, *scan, D=zeros(H), chunk_size=8)
    selective = channels, channels, zeros(C, N, dtype=torch.float32), states, states
    moved = T * shared * 3 * C * 2 + T * (P - 1) * 2 * N * 2
    check(2, moved, scans._selective_scan, selective_scan_of_package, *selective, z=channels)


def test_bytes_and_calls_of_kernels(pool: Ranks) -> None:
    pool(2, check_bytes)


# ---- mistakes ----


def check_alone(rank: int, world: int, group: Group, name: str) -> None:
    """Without its functions for a layout, a model of shards is wrong, and the comparison shows it."""
    from spar.integrations._transformers import scans

    def alone(own: Callable[..., Any], tokens: Tokens, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    scope = vars(sys.modules[type(maker(name)()).__module__])
    with pytest.MonkeyPatch.context() as patch:
        for key, entry in scans.SERVED.items():
            patch.setitem(scans.SERVED, key, entry._replace(run=alone))
        for key in scans.SERVED.keys() & scope.keys():  # as before a first call of shard
            patch.setitem(scope, key, getattr(scope[key], "of_transformers", scope[key]))
        report = compared(maker(name), whole(), group)
    assert report.worst.max_rel_error > 0.05, str(report)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba", "lfm2"])
def test_shards_alone_are_wrong(pool: Ranks, name: str) -> None:
    pool(2, check_alone, name)


def check_refused(rank: int, world: int, group: Group) -> None:
    calls = "calls none of the functions that spar computes over a sharded sequence"
    heads = {"num_attention_heads": 4}
    for kind, config, message in (
        ("RecurrentGemma", {"num_hidden_layers": 3}, f"layer 0 is one of linear_attention, .* {calls}"),
        ("Zaya", FOUR | heads, f"layer 0 is one of hybrid, .* {calls}"),
        ("Inkling", {}, "it has layers of hybrid_sliding"),
        ("Qwen4Exp", INDEXED, "it has layers of indexed_attention"),
        ("Rwkv", {}, "it has a state that passes from token to token"),
        ("xLSTM", {}, "it has a state that passes from token to token"),
    ):
        model = llms.maker(kind, **config)()
        with pytest.raises(ValueError, match=rf"{kind}\w* cannot run over a sharded sequence: {message}"):
            sharding(group)(model, whole())


def test_other_layers_are_refused(pool: Ranks) -> None:
    pool(2, check_refused)


def check_arguments(rank: int, world: int, group: Group) -> None:
    model = seeded(maker("bamba"), "spar")
    mask = torch.ones(2, 1, 37, 37, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"is of shape \[2, 1, 37, 37\]; expected \[B, S\], or none"):
        shard(built(maker("mamba")), whole() | {"attention_mask": mask}, group=group, token_group=group)
    check_exact(maker("bamba"), whole() | {"attention_mask": mask}, group)
    part = shard(model, whole(), group=group, token_group=group)
    with pytest.raises(ValueError, match=r"^BambaMixer: layout is None; pass the batch through"):
        model(**{name: value for name, value in part.items() if name != "layout"})
    cached = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match=r"expected none over a sharded sequence. Pass no past_key_values"):
        model(**part | {"past_key_values": cached, "use_cache": True})


def test_arguments_that_do_not_fit(pool: Ranks) -> None:
    pool(2, check_arguments)


def check_after(rank: int, world: int, group: Group) -> None:
    """In the same process a model still runs whole sequences, generates, and is copied."""
    for name in ("bamba", "mamba"):
        alone, model = built(maker(name)).eval(), built(maker(name)).eval()
        if name == "bamba":  # Mamba has no attention
            spar.integrations.transformers.register()
            model.set_attn_implementation("spar")
        model(**shard(model, whole(), group=group, token_group=group))
        ids = whole(1, 12)["input_ids"]
        if name == "bamba":
            model.set_attn_implementation("sdpa")
        expected = alone.generate(ids, max_new_tokens=5, use_cache=True, do_sample=False)
        for other in (model, copy.deepcopy(model)):
            assert other.generate(ids, max_new_tokens=5, use_cache=True, do_sample=False).equal(expected)


def test_whole_sequences_afterwards(pool: Ranks) -> None:
    pool(2, check_after)


def check_versions(rank: int, world: int, group: Group) -> None:
    """Another version of transformers: a function is gone, has other parameters, or is new."""
    from transformers.models.lfm2 import modeling_lfm2 as lfm2
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    version = rf"in transformers {transformers.__version__}; expected the function of transformers 5.23"
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(mamba2, "mamba2_chunk_scan")
        with pytest.raises(ValueError, match=rf"mamba2_chunk_scan of .*mamba2 does not exist {version}"):
            sharding(group)(maker("mamba2")(), whole())
        patch.setattr(lfm2, "causal_conv1d_fn", lambda x, kernel, bias, activation=None, **_: x)
        with pytest.raises(
            ValueError, match=rf"causal_conv1d_fn of .*lfm2 has no parameter weight {version}"
        ):
            sharding(group)(maker("lfm2")(), whole())
        model = maker("mamba2")()
        patch.setattr(mamba2, "split", lambda x: x, raising=False)  # a name in the layer's forward
        unknown = r"backbone.layers.0.mixer calls split, which spar does not know"
        with pytest.raises(ValueError, match=unknown):
            sharding(group)(model, whole())


def test_other_versions_of_transformers(pool: Ranks) -> None:
    pool(2, check_versions)
