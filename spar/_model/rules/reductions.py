# SPDX-License-Identifier: Apache-2.0
"""Functions along dims: other dims than the tokens, or sums over tokens, which are summed over ranks."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ..call import FunctionCall, Plan, rule
from ..part import Part, whole_shape
from ..sums import sum_over_ranks
from .moments import corrected, moments, root, softmax
from .pointwise import pointwise

_NO_DIM = object()
# Functions by the position of dim among the arguments, and its default.
_BY_DIM: dict[tuple[int, Any], str] = {
    (1, _NO_DIM): "softmax log_softmax softmin cumsum cumprod",
    (1, None): """
    mean sum nansum amax amin max min argmax argmin any all prod var std var_mean std_mean logsumexp
    count_nonzero median nanmean aminmax
    """,
    (1, -1): "glu sort argsort",
    (2, None): "norm linalg_norm linalg_vector_norm",
    (2, -1): "topk fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft",
    (2, (-2, -1)): "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2",
    (2, 1): "normalize",
}
_ALONG = {name: place for place, names in _BY_DIM.items() for name in names.split()}
_SAME_SIZE = "softmax log_softmax softmin cumsum cumprod glu sort argsort topk normalize"
_KEEP_SIZE = frozenset([*_SAME_SIZE.split(), *(name for name in _ALONG if name.startswith("fft_"))])
_SUMS = frozenset({"sum", "mean"})
_VARIANCES = frozenset({"var", "std", "var_mean", "std_mean"})


@rule(" ".join(_ALONG))
def along(call: FunctionCall) -> Plan | None:
    x, part = call.input, call.part
    if call.name in ("max", "min") and len(call.tensors) == 2:
        return pointwise(call)
    if part is None or len(call.tensors) != 1:
        return None
    at, default = _ALONG[call.name]
    dim = call.get(at, "dim", "axis", default=default)
    every = dim is None or dim == () or dim == []
    if dim is _NO_DIM or isinstance(dim, bool) or (every and call.name not in _SUMS | _VARIANCES):
        return None
    dims = list(range(x.dim())) if every else call.dims(x, dim)
    if part.dim in dims:
        return _merged(call, part, dims)
    if call.name in _KEEP_SIZE or call.get(
        3 if call.name in _VARIANCES else at + 1, "keepdim", default=False
    ):
        return Plan(part)
    return Plan(part.at(part.dim - sum(d < part.dim for d in dims)))


def _merged(call: FunctionCall, part: Part, dims: list[int]) -> Plan | None:
    """Reduce each rank's tokens, and merge what the ranks find."""
    if call.name in _SUMS:
        return _summed(call, dims)
    if call.name in _VARIANCES:
        return _varied(call, part, dims)
    if call.name not in ("softmax", "log_softmax"):
        return None
    is_log = call.name == "log_softmax"

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kinds = [value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        return softmax(part, x.to(kinds[0]) if kinds else x, is_log)

    return Plan(part, run=run)


def _varied(call: FunctionCall, part: Part, dims: list[int]) -> Plan:
    """Merge the ranks' means and variances."""
    keep, name, function = bool(call.get(3, "keepdim", default=False)), call.name, call.function
    shape = whole_shape(call.input)
    count = prod([shape[d] for d in dims])

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_complex():
            return function(part.parts.gather(x), *args, **kwargs)
        correction = kwargs.get("correction", args[1] if len(args) > 1 else kwargs.get("unbiased"))
        mean, var = moments(part, x, dims, keep)
        var = corrected(var, count, 1 if correction is None else correction).to(x.dtype)
        out = root(var) if name.startswith("std") else var
        return (out, mean.to(x.dtype)) if name.endswith("mean") else out

    return Plan(run=run)


def _summed(call: FunctionCall, dims: list[int]) -> Plan:
    """Sum each rank's tokens, and then the ranks' sums; a mean divides by the whole count."""
    keep, dtype = bool(call.get(2, "keepdim", default=False)), call.kwargs.get("dtype")
    shape, parts = whole_shape(call.input), call.parts
    count = prod([shape[d] for d in dims]) if call.name == "mean" else None

    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        kind = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else None)
        sums_in = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind  # as torch's kernels
        total = sum_over_ranks(parts, x.sum(dims, keepdim=keep, dtype=sums_in))
        return (total if count is None else total / count).to(kind or total.dtype)

    return Plan(run=run)
