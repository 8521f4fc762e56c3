# SPDX-License-Identifier: Apache-2.0
"""Call a function of one (batch, head, query, key) for many of them, as torch's flex_attention does.

It is called under torch.vmap with scalars, so that what it computes of a pair, such as a reduction over
features of a token, is of that pair alone. vmap evaluates all pairs in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Of int64 tensors without dims: batch, head, query, key.
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Which of the indices each vmap maps, from the innermost on.
_Levels = Sequence[tuple[int | None, int | None, int | None, int | None]]
ALL: _Levels = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)
# A key for each batch, head and query.
EACH: _Levels = (None, None, 0, 0), (None, 0, None, 0), (0, None, None, 0)
_IS_OF: dict[str, Callable[[torch.dtype], bool]] = {
    "bool": lambda dtype: dtype == torch.bool,
    "floating": lambda dtype: dtype.is_floating_point,
}


class _Indexing(TorchFunctionMode):
    """Index by tensors without dims as by others: torch would convert them to ints, which vmap refuses."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            has_tensors = any(isinstance(i, Tensor) for i in index)
            if has_tensors and all(type(i) is int or isinstance(i, Tensor) for i in index):
                places = [i if isinstance(i, Tensor) else torch.tensor(i, device=x.device) for i in index]
                return torch.ops.aten.index(x, places)
        return func(*args, **(kwargs or {}))


def of_pairs(
    name: str, function: Function, kind: str, indices: Sequence[Tensor], levels: _Levels = ALL
) -> Tensor:
    """Return what a function says of pairs: [B, H, S, T], or [B, H, S] for the levels of EACH.

    Args:
        name: of the function, for messages.
        kind: of its result's dtype, "bool" or "floating".
        indices: [B], [H], [S] and [T], or of EACH [B, H, S]; none is empty.

    Raises:
        TypeError, ValueError: it does not return a scalar of this kind, or vmap cannot batch it.
    """

    def checked(*pair: Tensor) -> Tensor:
        value: object = function(*pair)
        if not isinstance(value, Tensor) or not _IS_OF[kind](value.dtype):
            found = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"{name} returned {found}; expected a {kind} tensor")
        if value.dim():
            raise ValueError(
                f"{name} returned a tensor of shape {list(value.shape)} for one batch, head, query and key; "
                "expected a scalar, of shape []"
            )
        return value

    mapped: Callable[..., Tensor] = checked
    for level in levels:
        mapped = torch.vmap(mapped, in_dims=level)
    try:
        with _Indexing():
            return mapped(*indices)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{name} failed under torch.vmap, which calls it for one batch, head, query and key as "
            "flex_attention does; expected operators of tensors alone, torch.where instead of `if`, no "
            f".item(), nothing in place. torch: {str(error).splitlines()[0]}"
        ) from error


def without_repeats(x: Tensor) -> Tensor:
    """Return a contiguous tensor of which dims that only repeat their first entry have size 1.

    vmap expands what does not depend on an index, and may put its dims in any order of memory.
    """
    for dim in range(x.dim()):
        x = x.narrow(dim, 0, 1) if x.stride(dim) == 0 else x
    return x.contiguous()
