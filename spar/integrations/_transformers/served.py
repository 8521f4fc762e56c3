# SPDX-License-Identifier: Apache-2.0
"""Functions of transformers 5.23 that have another in their place while a view runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .given_masks import biases_by_places, router_loss, without_padding
from .scans import convolution, delta_rule, linear_unit, not_fused, rwkv
from .state_spaces import chunk_scan, selective_scan


class Function(NamedTuple):
    """A function of transformers.

    Attributes:
        run: computes it on parts: run(view, own, ...), own being transformers'.
        parameters: names of its parameters that are passed to it.
        like: of which argument its result has the shape and the dtype; None: it has none.
        state: the option by which it also returns a state.
        returns_state: whether it returns a state in any case, which is None without the option.
        is_method: whether it is a method of the layer's class, which a graph does not have as a node.
        reads_mask: whether it reads the caller's mask: then it is replaced also where no view runs, and a
            graph has its code.
    """

    run: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    like: int | None = None
    state: str = ""
    returns_state: bool = False
    is_method: bool = False
    reads_mask: bool = False


_DELTA = Function(
    delta_rule, ("g", "beta", "initial_state", "output_final_state"), 2, "output_final_state", True
)
SERVED = {
    "causal_conv1d_fn": Function(convolution, ("weight", "bias", "activation"), 0),
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Function(
        chunk_scan, ("D", "dt_bias", "initial_states", "return_final_states"), 0, "return_final_states"
    ),
    "mamba_selective_scan": Function(
        selective_scan, ("D", "z", "delta_bias", "return_last_state"), 0, "return_last_state"
    ),
    "rwkv_linear_attention": Function(rwkv, ("key", "value", "state"), 2, "return_state", True),
    "_rnn_scan": Function(
        linear_unit, ("hidden_states", "recurrent_gate", "reset", "recurrent_states"), is_method=True
    ),
    "mamba2_split_conv1d_scan_combined": Function(not_fused),
    "mamba_inner_fn": Function(not_fused),
    "load_balancing_loss_func": Function(router_loss, ("gate_logits", "attention_mask"), reads_mask=True),
    "apply_mask_to_padding_states": Function(
        without_padding, ("hidden_states", "attention_mask"), reads_mask=True
    ),
    "build_alibi_tensor": Function(biases_by_places, ("attention_mask",), reads_mask=True),
}
