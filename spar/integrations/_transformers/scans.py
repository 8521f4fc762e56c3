# SPDX-License-Identifier: Apache-2.0
"""Functions of transformers' layers without attention, on a rank's tokens.

They are convolutions and recurrences. Each is called as run(view, own, ...) with the arguments of the
function of transformers 5.23 that it stands for, `own`. It returns NotImplemented where `own` is to run as it
is: for arguments that are not parts of one sequence, or a state.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._exchange.autocast import no_autocast
from ..._model.part import has_part, part_of, whole_shape
from ..._model.view import View, without_view
from ...ops.by_heads import by_heads
from ...ops.by_state import by_state
from .tokens import ALONE, has_documents, tokens_of


def convolution(
    view: View,
    own: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Any:
    """Convolve [B, C, S_local] with [C, W]: each run of tokens with the W - 1 tokens before it."""
    tokens = tokens_of(view, 2, [x], weight, bias, others)
    if tokens is None:
        return NotImplemented
    if has_documents(others):
        tokens.refuse_tree("a convolution with documents", ALONE)
        return NotImplemented

    def of_runs(x: Tensor) -> Any:  # the fourth parameter of causal_conv1d's function is not the activation
        return own(x, weight, bias, activation=activation, **others)

    def run(x: Tensor) -> Tensor:
        # These need no result for their gradient; others, such as tanh, do.
        keeps_result = activation not in (None, "silu", "swish")
        return tokens.convolve(of_runs, x, weight.size(-1) - 1, keeps_result)

    return tokens.run("causal_conv1d", x.size(0) * weight.numel(), run, x)


def delta_rule(
    view: View,
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **others: Any,
) -> Any:
    """Run a gated delta rule by heads, those of values, or by state; keys may have fewer heads."""
    tensors = [value, query, key, g, beta]
    tokens = tokens_of(view, 1, tensors, others)
    if tokens is None or initial_state is not None:
        return NotImplemented
    state = value.size(0), value.size(2), key.size(3), value.size(3)
    has_states = tokens.passes_states(tensors, state[1] * state[2] * sum(state[2:]))
    if (has_states or tokens.tree) and (output_final_state or has_documents(others)):
        tokens.refuse_tree("a gated delta rule with a cache or documents", ALONE)
        return NotImplemented
    states: list[Tensor] = []

    def whole(v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Any:
        y, final = own(q, k, v, g=g, beta=beta, output_final_state=output_final_state, **others)
        if final is not None:
            states.append(tokens.all_heads(final, state[1]))
        return y

    def continued(v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        return own(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **others)

    def run(*tensors: Tensor) -> Any:
        if has_states:
            return by_state(continued, tensors, tokens.layout, state, values=0, tree=tokens.tree)
        if tokens.tree is not None:
            return by_heads(continued, tensors, tokens.layout, tree=tokens.tree, state=state)
        return by_heads(whole, tensors, tokens.layout)

    y = tokens.run("gated_delta_rule", 3 * prod(state), run, *tensors)
    return y, states[0] if states else None


def rwkv(
    view: View,
    own: Callable[..., Any],
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> Any:
    """Run RWKV's attention by channels, [B, S_local, C]."""
    tokens = tokens_of(view, 1, [key, value], time_decay, time_first)
    if tokens is None:
        return NotImplemented
    tokens.refuse_tree("RWKV's attention")
    if state is not None or return_state or key.size(2) < tokens.world:
        return NotImplemented

    def whole(k: Tensor, v: Tensor, decay: Tensor, first: Tensor) -> Tensor:
        y: Tensor = own(decay, first, k, v)[0]
        return y

    def run(k: Tensor, v: Tensor) -> Any:
        return by_heads(whole, [k, v], tokens.layout, parameters=[time_decay, time_first])

    return tokens.run("rwkv_linear_attention", 4 * key.size(0) * key.size(2), run, key, value), None


def linear_unit(
    view: View,
    own: Callable[..., Any],
    layer: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
) -> Any:
    """Run RecurrentGemma's recurrence by channels, [B, S_local, C]; the layer keeps its state, [B, C]."""
    part, channels = part_of(hidden_states), hidden_states.size(2)
    if part is not None and part_of(reset) is None and reset.size(1) == part.whole:
        with without_view():  # It is made of whole position_ids.
            reset = view.shard(reset, part)
    tensors = [hidden_states, recurrent_gate, reset]
    tokens = tokens_of(view, 1, tensors, recurrent_states)
    if tokens is None:
        return NotImplemented
    tokens.refuse_tree("RecurrentGemma's recurrence")
    if channels < tokens.world:
        return NotImplemented
    finals: list[Tensor] = []

    def whole(x: Tensor, gate: Tensor, reset: Tensor, state: Tensor | None) -> Tensor:
        y: Tensor
        y, final = own(layer, x, gate, reset, None if state is None else state.t())
        finals.append(tokens.all_heads(final, channels))
        return y

    def run(*tensors: Tensor) -> Any:
        x, gate, reset = tensors
        state = None if recurrent_states is None else recurrent_states.t()
        tensors = x, gate, reset.expand(len(x), -1, -1)
        return by_heads(whole, tensors, tokens.layout, parameters=[state])

    items = 2 * hidden_states.size(0) * channels
    y = tokens.run("linear recurrent unit", items, run, *tensors)
    return y, finals[0]


def not_fused(view: View, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return None, upon which the layer calls the convolution and the scan themselves."""
    return None if has_part(args, kwargs) else NotImplemented


def lightning(
    view: View,
    own: Callable[..., Any],
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> Any:
    """Run MiniMax's lightning attention by heads, or by state.

    It is no function but a layer's forward, own, which runs here for a stand-in of the layer that has the
    decays of some heads, and neither projections nor norm: these are of own tokens, in the view.
    """
    tokens = tokens_of(view, 1, [hidden_states])
    if tokens is None:
        return NotImplemented
    if past_key_values is not None:
        tokens.refuse_tree("lightning attention with a cache", ALONE)
        return NotImplemented
    batch, total = whole_shape(hidden_states)[:2]
    mixed = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None and tokens.tree is None:
        mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
    queries, keys, values = mixed.view(batch, total, -1, 3 * layer.head_dim).chunk(3, -1)
    tensors = [values, queries, keys]
    decays = [layer.slope_rate, layer.query_decay, layer.key_decay, layer.diagonal_decay[0]]

    def run_own(v: Tensor, q: Tensor, k: Tensor, slope: Tensor, *decays: Tensor) -> tuple[Tensor, Tensor]:
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
        return run_own(*tensors)[0]

    def alone(v: Tensor, q: Tensor, k: Tensor, state: Tensor) -> Any:
        return run_own(v, q, k, *decays)

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

    state = batch, values.size(2), layer.head_dim, layer.head_dim
    # Its kernel takes no state: along a tree states are passed.
    has_states = tokens.tree is not None or tokens.passes_states(
        tensors, state[1] * layer.head_dim * (1 + layer.head_dim)
    )

    def run(*tensors: Tensor) -> Any:
        if has_states:
            given: dict[str, Any] = {"decay": True, "correct": correct, "tree": tokens.tree}
            return by_state(alone, tensors, tokens.layout, state, decay, **given)
        return by_heads(whole, tensors, tokens.layout, parameters=decays)

    y = tokens.run("lightning attention", 2 * prod(state), run, *tensors)
    gate = torch.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(gate * layer.norm(y.flatten(2))), None


# MiniMax's layer: the names that its forward has in it
LIGHTNING_NAMES = {"qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "head_dim", "block_size"} | {
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
}
