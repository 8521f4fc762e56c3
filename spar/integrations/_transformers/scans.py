# SPDX-License-Identifier: Apache-2.0
"""Functions of transformers' layers without attention, over a sharded sequence.

Each is called as run(own, tokens, ...) with the arguments of the function of transformers 5.23 that it
stands for, `own`: convolutions, gated delta rules, the scans of Mamba 1 and 2, and lightning attention.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._exchange.autocast import no_autocast
from ...ops.by_state import Recurrence
from .tokens import Tokens


def _convolution(
    own: Callable[..., Any],
    tokens: Tokens,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Any:
    """Convolve [B, C, S_local] with [C, W]: each run of tokens with the W - 1 tokens before it."""

    def of_runs(x: Tensor) -> Any:  # the fourth parameter of causal_conv1d's function is not the activation
        return own(x, weight, bias, activation=activation, **others)

    # These need no result for their gradient; others, such as tanh, do.
    keeps_result = activation not in (None, "silu", "swish")
    return tokens.convolve(of_runs, x, weight.size(-1) - 1, keeps_result)


def _delta_rule(
    own: Callable[..., Any],
    tokens: Tokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run a gated delta rule by heads, those of values, or by state; keys may have fewer heads."""
    _check_no_state(initial_state is not None or output_final_state)
    tensors = [value, query, key, g, beta]
    state = value.size(0), value.size(2), key.size(3), value.size(3)

    def whole(v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Any:
        return own(q, k, v, g=g, beta=beta, **others)[0]

    def continued(v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        return own(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **others)

    if tokens.passes_states(tensors, state[1] * state[2] * sum(state[2:])):
        return tokens.by_state(Recurrence(continued, state, values=0), tensors), None
    return tokens.by_heads(whole, tensors), None


def _chunk_scan(
    own: Callable[..., Any],
    tokens: Tokens,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """Run Mamba 2's scan by heads, or by state; B and C have groups of heads."""
    _check_no_state(initial_states is not None or return_final_states)
    if others.get("z") is not None:
        raise ValueError(f"mamba2_chunk_scan: z is of shape {list(others['z'].shape)}; expected None: a gate")

    def whole(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor | None, bias: Tensor | None
    ) -> Any:
        return own(x, dt, A, B, C, D=D, dt_bias=bias, **others).to(x.dtype)  # mamba_ssm's; torch's is float32

    tensors = [x, dt, B, C]
    batch, _, heads, width = x.shape
    if not tokens.passes_states(tensors, heads * width * (1 + B.size(3))):
        return tokens.by_heads(whole, tensors, [A, D, dt_bias])

    # The kernel gets the time steps of which the decays are made, so that both round alike.
    softplus, limit = others.pop("dt_softplus", False), others.get("dt_limit")
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if softplus else dt
    dt = dt if limit is None else dt.clamp(*limit)

    def alone(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, _: Tensor, state: Tensor) -> Any:
        y, final = own(x, dt, A, B, C, D=D, dt_bias=None, return_final_states=True, **others)
        return y.to(x.dtype), final

    def decay(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, exponents: Tensor) -> Tensor:
        factor: Tensor = exponents.sum(1).exp()
        return factor[..., None, None]

    def correct(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, exponents: Tensor, state: Tensor
    ) -> Tensor:  # [B, T, G, N] by [B, H, P, N]
        C = C.to(state.dtype).transpose(1, 2)
        with no_autocast(C.device.type):
            added: Tensor = C[:, :, None] @ state.unflatten(1, (C.size(1), -1)).transpose(3, 4)
        return added.flatten(1, 2).transpose(1, 2) * exponents.cumsum(1).exp()[..., None]

    state = batch, heads, width, B.size(3)
    recurrence = Recurrence(alone, state, decay, decay=True, correct=correct)
    return tokens.by_state(recurrence, [x, dt, B, C, dt * A])


def _selective_scan(
    own: Callable[..., Any],
    tokens: Tokens,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    return_last_state: bool = False,
    **others: Any,
) -> Any:
    """Run Mamba 1's scan by channels, [B, C, S_local]. All channels share B and C [B, N, S_local]."""
    _check_no_state(return_last_state)

    def whole(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor | None, bias: Tensor | None
    ) -> Any:
        B, C = (state[:, 0].transpose(1, 2) for state in (B, C))
        return own(x, dt, A, B, C, D=D, delta_bias=bias, **others).to(x.dtype)

    states = [state.transpose(1, 2)[:, None] for state in (B, C)]  # one head for all channels
    y = tokens.by_heads(whole, [x, dt, *states], [A, D, delta_bias], seq_dim=2, head_dim=1)
    return y if z is None else y * torch.nn.functional.silu(z)  # of own tokens: the gate is not exchanged


def _not_fused(own: Callable[..., Any], tokens: Tokens, *args: Any, **kwargs: Any) -> None:
    """Return None, upon which the layer calls the convolution and the scan themselves."""


def lightning(
    own: Callable[..., Any],
    tokens: Tokens,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run MiniMax's lightning attention by heads, or by state.

    It is no function but a layer's forward, own, which runs here for a stand-in of the layer that has the
    decays of some heads, and neither projections nor norm: these are of own tokens.
    """
    _check_no_state(past_key_values is not None)
    batch, count = hidden_states.shape[:2]
    mixed = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
    queries, keys, values = mixed.view(batch, count, -1, 3 * layer.head_dim).chunk(3, -1)

    decays = [layer.slope_rate, layer.query_decay, layer.key_decay, layer.diagonal_decay[0]]

    def run(v: Tensor, q: Tensor, k: Tensor, slope: Tensor, *decays: Tensor) -> tuple[Tensor, Tensor]:
        stand_in = types.SimpleNamespace(
            **dict.fromkeys(("qkv_proj", "act_fn", "norm", "out_proj"), lambda x: x),
            output_gate=lambda x: x.new_tensor(torch.inf),  # of which the sigmoid is 1
            num_attention_heads=q.size(2),
            head_dim=layer.head_dim,
            block_size=layer.block_size,
            slope_rate=slope,
            query_decay=decays[0],
            key_decay=decays[1],
            diagonal_decay=decays[2][None],
        )
        y, final = own(stand_in, torch.cat([q, k, v], -1).flatten(2), None, None)
        return y.view(v.shape), final

    def whole(*tensors: Tensor) -> Tensor:
        return run(*tensors)[0]

    def alone(v: Tensor, q: Tensor, k: Tensor, state: Tensor) -> Any:
        return run(v, q, k, *decays)

    # In a model of 16 bits they have 16 bits, in which the exponents of many tokens would round.
    slopes = layer.slope_rate.to(torch.promote_types(layer.slope_rate.dtype, torch.float32))

    def decay(v: Tensor, q: Tensor, k: Tensor) -> Tensor:
        factor: Tensor = (-v.size(1) * slopes).exp()
        return factor[None]

    def correct(v: Tensor, q: Tensor, k: Tensor, state: Tensor) -> Tensor:
        ages = torch.arange(1, 1 + q.size(1), device=q.device)
        factors: Tensor = (-slopes * ages[:, None]).exp()
        with no_autocast(q.device.type):
            added = q.transpose(1, 2).to(state.dtype) @ state
        return (factors * added).transpose(1, 2)

    tensors = [values, queries, keys]
    if tokens.passes_states(tensors, values.size(2) * layer.head_dim * (1 + layer.head_dim)):
        state = batch, values.size(2), layer.head_dim, layer.head_dim
        y = tokens.by_state(Recurrence(alone, state, decay, decay=True, correct=correct), tensors)
    else:
        y = tokens.by_heads(whole, tensors, decays)
    gate = torch.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(gate * layer.norm(y.flatten(2))), None


def _check_no_state(has_state: bool) -> None:
    if has_state:
        raise ValueError(
            "a layer keeps its state for the next call, or continues one; expected none over a sharded "
            "sequence. Pass no past_key_values or cache_params, and use_cache=False as shard does"
        )


class _Function(NamedTuple):
    """A function of transformers.

    Attributes:
        run: computes it over a sharded sequence: run(own, tokens, ...), own being transformers'.
        parameters: names of its parameters that are passed to it.
    """

    run: Callable[..., Any]
    parameters: tuple[str, ...]


_DELTA = _Function(_delta_rule, ("g", "beta", "initial_state", "output_final_state"))
CONVOLUTIONS = {"causal_conv1d_fn": _Function(_convolution, ("weight", "bias", "activation"))}
SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": _Function(_chunk_scan, ("D", "dt_bias", "initial_states", "return_final_states")),
    "mamba_selective_scan": _Function(_selective_scan, ("D", "z", "delta_bias", "return_last_state")),
}
BY_HEADS_ALONE = {"mamba_selective_scan"}  # it returns its last state, but begins with zeros
_FUSED = {
    "mamba2_split_conv1d_scan_combined": _Function(_not_fused, ()),
    "mamba_inner_fn": _Function(_not_fused, ()),
}
SERVED = CONVOLUTIONS | SCANS | _FUSED
# MiniMax's layer: the names that its forward has in it
LIGHTNING = {"qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "head_dim", "block_size"} | {
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
}
ALLOWED = {  # they see one token each, or serve generation, which has a cache
    "apply_mask_to_padding_states",
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
}
