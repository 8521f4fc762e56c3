# SPDX-License-Identifier: Apache-2.0
"""The load-balancing loss of experts over the tokens of all ranks.

It is E sum_e (T_e / N) (P_e / N): N tokens chose expert e T_e times, and its probabilities sum to P_e.
With T and N of all ranks and the P of its own tokens, each rank has its part of a sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.gather import all_gather
from .sources import names_of

_NAME = "load_balancing_loss_func"  # the global of a model's module


class Router(NamedTuple):
    """What a router loss needs of the whole batch.

    Attributes:
        groups: over each of these groups the ranks' counts are summed, one after the other.
        valid: float [B * S_local], 0 for padding; None: there is none.
        tokens: float32, the number of tokens of all ranks that are not padding.
    """

    groups: tuple[Any, ...]
    valid: Tensor | None
    tokens: Tensor


class Routed:
    """A mask for attention_forward, with what the router loss needs: models pass their mask to it.

    To transformers it looks like a prepared mask of four dims.
    """

    ndim = 4

    def __init__(self, mask: Any, shape: tuple[int, int, int, int], router: Router) -> None:
        self.mask = mask
        self.shape = shape
        self.router = router


def has_router_loss(model: Any) -> bool:
    """Whether a model's forward adds a load-balancing loss, if it returns router logits."""
    return _NAME in names_of(type(model).forward)


def has_other_router_loss(model: Any) -> bool:
    """Whether a model's forward may add a loss of router logits that `router_loss` does not compute."""
    if has_router_loss(model):
        own = _globals(model).get(_NAME)
        return own is None or not _is_known(getattr(own, "of_transformers", own))
    return "output_router_logits" in names_of(type(model).forward)


def sum_router_loss(model: Any) -> None:
    """Let the load-balancing loss of a model's module be that of all ranks, for masks of `shard`."""
    scope = _globals(model)
    own = scope[_NAME]
    if hasattr(own, "of_transformers"):
        return

    @functools.wraps(own)
    def load_balancing_loss_func(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        masks = attention_mask.values() if isinstance(attention_mask, dict) else (attention_mask,)
        mask = next((mask for mask in masks if isinstance(mask, Routed)), None)
        if mask is None or not isinstance(gate_logits, tuple):
            return own(gate_logits, num_experts, top_k, attention_mask)
        return router_loss(gate_logits, num_experts, top_k, mask.router)

    load_balancing_loss_func.of_transformers = own  # type: ignore[attr-defined]
    scope[_NAME] = load_balancing_loss_func


def router_loss(gate_logits: tuple[Tensor, ...], experts: int, top_k: int, router: Router) -> Tensor:
    """Return this rank's part of the loss; its gradient is its part of one process's, too."""
    device = gate_logits[0].device
    counts, probabilities = torch.zeros(2, experts, device=device).unbind()
    ones = torch.ones(gate_logits[0].size(0), device=device)
    valid = ones if router.valid is None else router.valid.to(device)
    for logits in gate_logits:
        weights = torch.nn.functional.softmax(logits.to(device), dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1)[1]
        counts = counts.scatter_add(0, chosen.reshape(-1), valid.repeat_interleave(top_k))
        probabilities = probabilities + (weights.float() * valid[:, None]).sum(0)
    counts = counts.detach()
    for group in router.groups:
        counts = all_gather(counts[None], group).sum(0)
    rows = router.tokens.to(device) * len(gate_logits)
    return (counts / rows * (probabilities / rows)).sum() * experts


def _globals(model: Any) -> dict[str, Any]:
    """Return the globals in which a model's forward finds its functions."""
    scope: dict[str, Any] = getattr(inspect.unwrap(type(model).forward), "__globals__", {})
    return scope


@functools.cache
def _is_known(own: Callable[..., Any]) -> bool:
    """Whether a function of a model's module computes what `router_loss` sums, of a few numbers."""
    draw = torch.Generator("cpu").manual_seed(0)
    logits = tuple(torch.randn(6, 5, generator=draw, device="cpu") for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]], device="cpu")
    try:
        for given, valid in ((None, None), (mask, mask.reshape(-1).float())):
            tokens = torch.tensor(6.0 if valid is None else float(valid.sum()), device="cpu")
            ours = router_loss(logits, 5, 2, Router((), valid, tokens))
            if not torch.allclose(own(logits, 5, 2, given), ours):
                return False
    except Exception:  # it has other arguments
        return False
    return True
