# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of torchtitan by spar's attention, with its models and configs as they are."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .._attention.attention import METHODS, attention
from .._attention.spans import Spans
from ..sequence_layout import SequenceLayout
from ._refusals import check_version

__all__ = ["install", "uninstall"]

WHERE = "integrations.torchtitan"
# Functions of theirs that are not documented are replaced: this version was tested.
VERSION = 0, 3
_LAYOUTS = {"headtail": SequenceLayout.zigzag, None: SequenceLayout.even}  # by torchtitan's load balancers
_replaced: list[tuple[str, Any, Any]] = []  # by `install`: a function's name, theirs, and what replaces it


def install(method: str | None = None) -> None:
    """Let torchtitan compute attention over its cp mesh by `spar.attention`.

    Call it on all ranks before the trainer is made, such as in the module of your configs. It replaces the
    functions by which torchtitan shards inputs and attention for context parallelism, in all modules that
    imported them, until `uninstall`. Lengths and heads of any number; documents and windows by the masks of
    flex attention.

    Args:
        method: of `spar.attention`; None chooses as it does.

    Raises:
        ImportError: the version of torchtitan is not one with which this was tested.
        RuntimeError: it is installed already.
        ValueError: there is no such method.
    """
    check_version(WHERE, "torchtitan", VERSION, VERSION)
    if method not in (None, *METHODS):
        names = ", ".join([f'"{name}"' for name in METHODS])
        raise ValueError(f"{WHERE}: method is {method!r}; expected {names} or None")
    if _replaced:
        raise RuntimeError(f"{WHERE}.install: it is installed; call uninstall() first")
    from torchtitan.distributed import context_parallel, full_dtensor

    attend = functools.partial(_attend_by_spar, method)

    def apply_cp_to_forward(attention_modules: Sequence[torch.nn.Module], cp_mesh: Any) -> None:
        attend(attention_modules)

    def validate_config(parallel_dims: Any, model: torch.nn.Module) -> None:
        """In place of what only refuses kinds of attention, and is called before modules are parallelized."""
        if parallel_dims.spmd_backend == "full_dtensor" and parallel_dims.cp_enabled:
            raise ValueError(
                f'{WHERE}: spmd_backend is "full_dtensor"; expected "spmd_types" or "partial_dtensor"'
            )
        if parallel_dims.cp_enabled:
            attend([each for name, each in model.named_modules() if name.endswith("inner_attention")])

    for module, ours in (
        (context_parallel, apply_cp_to_forward),
        (context_parallel, prepare_context_parallel_input),
        (full_dtensor, validate_config),
    ):
        name = ours.__name__
        _replaced.append((name, getattr(module, name), ours))
        _replace(*_replaced[-1])


def uninstall() -> None:
    """Undo `install`: models that are parallelized from now on are torchtitan's."""
    while _replaced:
        name, theirs, ours = _replaced.pop()
        _replace(name, ours, theirs)


def _replace(name: str, before: Any, after: Any) -> None:
    """Replace a function in all modules that imported it by its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is before:
            setattr(module, name, after)


# ---- inputs ----


class SequenceMask(NamedTuple):
    """What stands in the place of a mask: how the sequence lies on the ranks, and what attends to what."""

    layout: SequenceLayout
    spans: Spans | None


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: Any,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keep this rank's tokens of inputs, labels and positions, `[B, S]`, of any length S.

    Masks become those of the whole sequence, as intervals, which the ranks compute together.
    """
    if load_balancer_type not in _LAYOUTS:
        raise ValueError(
            f"{WHERE}: context_parallel_load_balancer is {load_balancer_type!r}; expected "
            '"headtail" or None. By method="ulysses" the work is equal in any layout'
        )
    layout = _LAYOUTS[load_balancer_type](inputs.size(1), cp_mesh)
    if not min(layout.sizes):
        raise ValueError(
            f"{WHERE}: inputs have {inputs.size(1)} tokens; expected one or more on each of "
            f"{cp_mesh.size()} ranks"
        )
    positions: Tensor = extra_kwargs["positions"]
    masks: Any = extra_kwargs.get("attention_masks")

    def mask_of(mask: Any) -> SequenceMask:
        if mask is None:
            return SequenceMask(layout, None)
        if not isinstance(mask, BlockMask):
            kind = type(mask).__name__
            raise ValueError(f"{WHERE}: a mask is a {kind}; expected a BlockMask, of flex attention")
        spans = Spans.of(mask.mask_mod, mask.shape, group=layout.group, device=device)
        return SequenceMask(layout, spans)

    is_named = isinstance(masks, Mapping)
    found: Any = {name: mask_of(mask) for name, mask in masks.items()} if is_named else mask_of(masks)
    extra_kwargs["attention_masks"] = found
    inputs, labels, extra_kwargs["positions"] = [layout.shard(x, 1) for x in (inputs, labels, positions)]
    return inputs, labels, extra_kwargs


# ---- attention ----


def _attend_by_spar(method: str | None, modules: Sequence[torch.nn.Module]) -> None:
    """Replace the forward of inner attentions; their keys and values stay sharded over the cp mesh."""

    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    def forward(needs_mask: bool) -> Callable[..., Tensor]:
        return lambda q, k, v, **options: _inner_attention(method, needs_mask, q, k, v, **options)

    for module in modules:
        is_flex = isinstance(module, FlexAttention)
        if not is_flex and not isinstance(module, ScaledDotProductAttention):
            expected = "FlexAttention or ScaledDotProductAttention"
            raise ValueError(f"{WHERE}: an attention is a {type(module).__name__}; expected {expected}")
        module.forward = forward(is_flex)
        sharding: Any = module._sharding_config
        if sharding is not None:
            own = sharding.in_src_shardings
            gradients = dataclasses.replace(sharding.local_map, in_grad_placements=tuple(own.values()))
            module._sharding_config = dataclasses.replace(sharding, in_dst_shardings=own, local_map=gradients)


def _inner_attention(
    method: str | None,
    needs_mask: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
    score_mod: Any = None,
    out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what an inner attention computes, of this rank's tokens `[B, S_local, H, D]`."""
    if not isinstance(attention_masks, SequenceMask) or (needs_mask and attention_masks.spans is None):
        raise ValueError(
            f"{WHERE}: attention_masks is {attention_masks!r:.200}; expected a mask that "
            "prepare_context_parallel_input returned after install()"
        )
    if score_mod is not None:
        raise ValueError(f"{WHERE}: score_mod is {score_mod!r:.200}; expected None")
    layout, spans = attention_masks
    attend: Any = functools.partial(attention, q, k, v, layout, method=method, scale=scale)
    attend = functools.partial(attend, causal=is_causal and spans is None, mask=spans, seq_dim=1, head_dim=2)
    out: Tensor = attend() if out_transform is None else out_transform(*attend(return_lse=True))
    return out
