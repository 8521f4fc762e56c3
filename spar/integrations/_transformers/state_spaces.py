# SPDX-License-Identifier: Apache-2.0
"""The scans of state spaces on a rank's tokens, Mamba 1's and Mamba 2's: as those of `scans`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._exchange.autocast import no_autocast
from ..._model.view import View
from ...ops.by_heads import by_heads
from ...ops.by_state import by_state
from ...ops.unused import depending_on
from .tokens import ALONE, Tokens, has_documents, tokens_of


def chunk_scan(
    view: View,
    own: Callable[..., Any],
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
    tensors = [x, dt, B, C]
    tokens = tokens_of(view, 1, tensors, A, D, dt_bias, others)
    if tokens is None or initial_states is not None or others.get("z") is not None:
        return NotImplemented
    batch, _, heads, width = x.shape
    state = batch, heads, width, B.size(3)
    has_states = tokens.passes_states(tensors, heads * width * (1 + B.size(3)))
    if (has_states or tokens.tree) and (return_final_states or has_documents(others)):
        tokens.refuse_tree("Mamba 2's scan with a cache or documents", ALONE)
        return NotImplemented
    states: list[Tensor] = []

    def whole(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor | None, bias: Tensor | None
    ) -> Any:
        y = own(x, dt, A, B, C, D=D, dt_bias=bias, return_final_states=return_final_states, **others)
        if return_final_states:
            y, final = y
            states.append(tokens.all_heads(final, heads))
        return y.to(x.dtype)  # mamba_ssm's; torch's is float32

    def continued(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, *rest: Any) -> Any:
        D, bias, state = rest
        given = {"dt_bias": bias, "initial_states": state, "return_final_states": True}
        y, final = own(x, dt, A, B, C, D=D, **given, **others)
        return y.to(x.dtype), final

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Any:
        if has_states:
            return _chunk_scan_by_state(tokens, own, [x, dt, A, B, C], D, dt_bias, state, others)
        given: dict[str, Any] = {"parameters": [A, D, dt_bias]}
        if tokens.tree is not None:
            return by_heads(continued, [x, dt, B, C], tokens.layout, **given, tree=tokens.tree, state=state)
        return by_heads(whole, [x, dt, B, C], tokens.layout, **given)

    y = tokens.run("mamba2_chunk_scan", 2 * prod(state), run, *tensors)
    return (y, states[0]) if states else y


def _chunk_scan_by_state(
    tokens: Tokens,
    own: Callable[..., Any],
    tensors: Sequence[Tensor],
    D: Tensor | None,
    dt_bias: Tensor | None,
    state: tuple[int, ...],
    others: dict[str, Any],
) -> Tensor:
    x, dt, A, B, C = tensors
    if D is not None and D.requires_grad and not x.requires_grad:
        x = depending_on(x, [D])  # a rank without tokens does not call the kernel
    # The kernel gets the time steps of which the decays are made, so that both round alike.
    others = {**others}
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

    tensors = [x, dt, B, C, dt * A]
    given: dict[str, Any] = {"decay": True, "correct": correct, "tree": tokens.tree}
    return by_state(alone, tensors, tokens.layout, state, decay, **given)


def selective_scan(
    view: View,
    own: Callable[..., Any],
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
    """Run Mamba 1's scan by channels, [B, C, S_local], or along a tree by state.

    All channels share B and C [B, N, S_local].
    """
    tokens = tokens_of(view, 2, [x, dt, B, C, *([] if z is None else [z])], A, D, delta_bias, others)
    if tokens is None:
        return NotImplemented
    if return_last_state:
        tokens.refuse_tree("Mamba 1's scan with a cache", ALONE)
    channels = x.size(1)
    if tokens.tree is None and channels < tokens.world:
        return NotImplemented
    finals: list[Tensor] = []

    def whole(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor | None, bias: Tensor | None
    ) -> Any:
        B, C = (state[:, 0].transpose(1, 2) for state in (B, C))
        y = own(x, dt, A, B, C, D=D, delta_bias=bias, return_last_state=return_last_state, **others)
        if return_last_state:
            y, final = y
            finals.append(tokens.all_heads(final, channels))
        return y.to(x.dtype)

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None) -> Tensor:
        if tokens.tree is not None:  # Its kernel takes no state: along a tree states are passed.
            y = _selective_scan_by_state(tokens, own, [x, dt, B, C], A, D, delta_bias, others)
        else:
            states = [state.transpose(1, 2)[:, None] for state in (B, C)]  # one head for all channels
            given: dict[str, Any] = {"parameters": [A, D, delta_bias], "seq_dim": 2, "head_dim": 1}
            y = by_heads(whole, [x, dt, *states], tokens.layout, **given)
        # Of own tokens: the gate is not exchanged.
        return y if z is None else y * torch.nn.functional.silu(z)

    y = tokens.run("mamba_selective_scan", 2 * x.size(0) * A.numel(), run, x, dt, B, C, z)
    return (y, finals[0]) if finals else y


def _selective_scan_by_state(
    tokens: Tokens,
    own: Callable[..., Any],
    tensors: Sequence[Tensor],
    A: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    others: dict[str, Any],
) -> Tensor:
    """Run Mamba 1's scan, whose kernel takes no state, and does not pass on the gradient of one."""
    x, dt, B, C = tensors
    if not x.requires_grad:
        x = depending_on(x, [A, D, delta_bias])  # a rank without tokens does not call the kernel
    steps = dt.to(torch.promote_types(dt.dtype, torch.float32))
    steps = steps if delta_bias is None else steps + delta_bias[:, None]
    steps = torch.nn.functional.softplus(steps) if others.get("delta_softplus") else steps

    def decays(steps: Tensor) -> Tensor:  # [B, C, T] to [B, C, T, N]
        return (A[:, None] * steps[..., None]).exp()

    def alone(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, steps: Tensor, _: Tensor) -> Any:
        y = own(x, dt, A, B, C, D=D, delta_bias=delta_bias, **others)
        left = steps.sum(2, keepdim=True) - steps.cumsum(2)
        with no_autocast(x.device.type):
            state = torch.einsum("bctn,bct,bnt->bcn", decays(left), steps * x, B.to(steps.dtype))
        return y.to(x.dtype), state[..., None]

    def decay(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, steps: Tensor) -> Tensor:
        return decays(steps.sum(2, keepdim=True)).transpose(2, 3)

    def correct(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, steps: Tensor, state: Tensor) -> Tensor:
        with no_autocast(x.device.type):
            return torch.einsum(
                "bctn,bcn,bnt->bct", decays(steps.cumsum(2)), state[..., 0], C.to(state.dtype)
            )

    state = x.size(0), *A.shape, 1
    given: dict[str, Any] = {"decay": True, "correct": correct, "seq_dim": 2, "tree": tokens.tree}
    return by_state(alone, [x, dt, B, C, steps], tokens.layout, state, decay, **given)
