# SPDX-License-Identifier: Apache-2.0
"""Kernels of diffusers' dispatcher that a view does not see, as flash_attn: they are no torch functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..._attention.attention import attention
from ..._model.part import has_part, mark, part_of, whole_numel, whole_shape
from ..._model.rules.attention import drawing, method_of
from ..._model.rules.products import work
from ..._model.stand_ins import count
from ..._model.view import View, current_view, without_view
from ...sizes import share

# Backends that call torch's attention, which a view sees. "_native_npu" and "_native_xla" do not.
_OF_TORCH = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")
_FLEX = "flex"  # It calls flex_attention, which a view sees, too: to that is left what cannot go by heads.
# Options that mean the same for some of the queries and all keys. Others, such as a window, need all queries.
_OF_EACH_QUERY = ("dropout_p", "scale", "enable_gqa")
_RETURNED = ("return_lse", "return_attn_probs")  # options with which a kernel returns more than the output


@contextlib.contextmanager
def kernels_of_parts(dispatch: Any) -> Iterator[None]:
    """Let each backend but torch's own receive whole sequences of some heads in place of parts.

    dispatch: the module of diffusers that has the table of backends.
    """
    table = getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_backends", None)
    # Another version of diffusers, whose models `parallelize` refuses.
    if table is None:
        yield
        return
    own = dict(table)
    for member, kernel in own.items():
        if member.value not in _OF_TORCH:
            table[member] = _of_parts(str(member.value), kernel)
    try:
        yield
    finally:
        table.update({member: own[member] for member in own if member in table})


def _of_parts(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def run(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attend over [B, S, H, D], all or parts."""
        view = current_view()
        if view is None or not has_part(query, key, value, options):
            return kernel(query=query, key=key, value=value, **options)
        out = _attended(view, kernel, query, key, value, options)
        if out is not None:
            return out
        if name == _FLEX:
            return kernel(query=query, key=key, value=value, **options)
        count(view, work(2 * whole_numel(query) * whole_shape(key)[1], query, None))
        return view.outside(name, kernel, (), {"query": query, "key": key, "value": value, **options})

    return run


def _attended(
    view: View, kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Tensor | None:
    """Attend with this rank's queries, or to whole sequences of some heads; None if the kernel cannot."""
    part, keys = part_of(q), part_of(k)
    if part is None or part_of(v) is not keys:
        return None
    if any(p.dim != 1 or p is not p.plain for p in (part, keys) if p is not None):
        return None
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    weights = given.pop("attn_mask", None)
    if any(name in given for name in _RETURNED) or (
        weights is not None and not _has_heads(weights, q.size(2))
    ):
        return None
    rows = weights is not None and not (len(weights.shape) == 4 and weights.shape[2] == 1)
    by_heads = rows or any(name not in _OF_EACH_QUERY for name in given)
    if by_heads and (q.size(2) < view.parts.world or keys is None):
        return None
    heads = q.size(2)
    with without_view(), drawing(view.parts, options.get("dropout_p", 0.0)):
        whole = view.gather(options)
        layouts = view.parts.layout(part.lengths), None if keys is None else view.parts.layout(keys.lengths)
        method = "ulysses" if by_heads else method_of(part, keys)
        if method in (None, "ring"):  # None is a ring in part over a hybrid layout, and needs a log-sum-exp
            method = "ulysses" if heads >= view.parts.world and keys is not None else "gather"
        count(view, work(2 * q.numel() * whole_shape(k)[1], q, part))
        out = attention(
            q,
            k,
            v,
            layouts[0] if keys is part else layouts,
            method=method,
            seq_dim=1,
            head_dim=2,
            kernel=lambda q, k, v: kernel(query=q, key=k, value=v, **_of_heads(whole, view, q, heads)),
        )
    return mark(out, part)


def _has_heads(mask: Any, heads: int) -> bool:
    """Whether a mask, or a BlockMask of flex_attention, can be cut to some heads, and has no gradient."""
    shape = mask.shape
    if not isinstance(mask, Tensor):
        return bool(shape[1] == 1)
    return not mask.requires_grad and (len(shape) == 2 or (len(shape) == 4 and shape[1] in (1, heads)))


def _of_heads(options: dict[str, Any], view: View, q: Tensor, heads: int) -> dict[str, Any]:
    """Return the options for the heads of which q is: all, or this rank's share."""
    mask, own = options.get("attn_mask"), q.size(2)
    if not isinstance(mask, Tensor) or mask.dim() < 4 or mask.size(1) == 1 or own == heads:
        return options
    first = sum(share(heads, view.parts.world, rank) for rank in range(view.parts.rank))
    return {**options, "attn_mask": mask.narrow(1, first, own)}
