# SPDX-License-Identifier: Apache-2.0
"""flex_attention in a view: on whole sequences of this rank's heads, or whole.

It compiles itself, which the view must not see.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.by_heads import by_heads
from ..ops.heads import heads_of_ranks
from .moving import moved
from .nested import changed
from .part import Part, has_part, mark, part_of, whole_numel
from .rules.products import shared
from .stand_ins import computing, in_views
from .view import View, without_view


@in_views
def flex_attention(
    view: View,
    own: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Attend over parts."""
    with without_view():
        score_mod, block_mask = _whole_function(view, score_mod), _whole_mask(view, block_mask)
    tensors = query, key, value
    part = _of_heads(tensors, score_mod, kwargs) if not rest else None
    if part is not None:
        heads, work = query.size(1), shared(2 * whole_numel(query) * part.whole, part)
        with computing(
            view, "flex_attention", (), work
        ):  # ranks slice masks otherwise: the view sees what all ranks run
            call = functools.partial(own, block_mask=_mask_of_heads(part, heads, block_mask), **kwargs)
            one = part.parts.part(part.dim, (part.whole,))  # joint sequences, too, are one for a mask
            own_tokens = [moved(x, one) for x in tensors]
            out = by_heads(call, own_tokens, part.parts.layout(one.lengths), seq_dim=2, head_dim=1)
            return moved(mark(out, one), part)
    if has_part(tensors):
        given = *tensors, score_mod, block_mask, *rest
        return view.outside("flex_attention", own, given, kwargs, is_torch=True)
    with without_view():
        return own(*tensors, score_mod, block_mask, *rest, **kwargs)


@in_views
def create_block_mask(view: View, own: Callable[..., Any], mask_mod: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a mask of a function that may refer to parts."""
    with without_view():
        mask_mod = _whole_function(view, mask_mod)
    return own(mask_mod, *args, **kwargs)


@in_views
def from_kv_blocks(view: View, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a mask of lists of blocks that may be parts."""
    with without_view():
        args, kwargs = changed(view.gather, (args, kwargs))
    return own(*args, **kwargs)


def _of_heads(tensors: tuple[Tensor, ...], score_mod: Any, options: Any) -> Part | None:
    """Return the part of sequences that can be exchanged for heads; None if all need be whole."""
    parts = {part and part.plain for part in map(part_of, tensors)}
    part = parts.pop()
    if part is None or parts or part.dim != 2 or score_mod is not None:
        return None
    if options.get("return_lse") or options.get("return_aux"):
        return None
    heads = tensors[0].size(1)
    return None if any(heads % x.size(1) for x in tensors) else part


def _mask_of_heads(part: Part, heads: int, mask: Any) -> Any:
    """Return the BlockMask of the heads that `by_heads` gives this rank."""
    counts = heads_of_ranks(heads, heads, part.parts.world).queries
    first, count = sum(counts[: part.parts.rank]), counts[part.parts.rank]
    if mask is None or mask.shape[1] == 1 or not count:
        return mask
    own = mask[:, first : first + count]
    own.mask_mod = lambda b, h, i, j: mask.mask_mod(b, h + first, i, j)
    return own


def _whole_mask(view: View, mask: Any) -> Any:
    """Return a BlockMask of whole tensors."""
    if mask is None:
        return None
    parts = {name: x for name, x in vars(mask).items() if part_of(x) is not None}
    function = _whole_function(view, mask.mask_mod)
    if not parts and function is mask.mask_mod:
        return mask
    mask = copy.copy(mask)
    for name, x in parts.items():
        setattr(mask, name, view.gather(x))
    mask.mask_mod = function
    return mask


def _whole_function(view: View, function: Any) -> Any:
    """Return a function that refers to whole tensors instead of parts."""
    cells = getattr(function, "__closure__", None) or ()
    if all(part_of(cell.cell_contents) is None for cell in cells):
        return function
    closure = tuple([types.CellType(view.gather(cell.cell_contents)) for cell in cells])
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
