# SPDX-License-Identifier: Apache-2.0
"""The loop over chunks of rows of OpenFold, which ESMFold and Boltz have, too: a rank runs it on its rows."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from .._model.bodies import redirected
from .._model.functions import name_of
from .._model.generators import draws_since, states
from .._model.moving import as_part
from .._model.nested import changed, tensors_in
from .._model.part import Part, mark, part_of, whole_shape
from .._model.report import multiply_adds
from .._model.stand_ins import count
from .._model.view import current_view, without_view

# The modules that have it, by the name `chunk_layer`.
MODULES = (
    "boltz.model.layers.triangular_attention.utils",
    "openfold.utils.chunk_utils",
    "transformers.models.esm.openfold_utils.chunk_utils",
)
_PARAMETERS = ["layer", "inputs", "chunk_size", "no_batch_dims", "low_mem", "_out", "_add_into_out"]


@contextlib.contextmanager
def chunks_of_rows(module: Any) -> Iterator[None]:
    """Let a module's `chunk_layer` compute chunks of a rank's own rows; not if its parameters are others."""
    own = getattr(module, "chunk_layer", None)
    if not inspect.isfunction(own) or [*inspect.signature(own).parameters] != _PARAMETERS:
        yield
        return
    with redirected(own, _of_rows):
        yield


def _of_rows(own: Callable[..., Any]) -> Callable[..., Any]:
    def chunk_layer(
        layer: Any, inputs: Any, chunk_size: int, no_batch_dims: int, *rest: Any, **named: Any
    ) -> Any:
        """Compute a layer of each row, a chunk of them at a time; inputs `[..., rows, ...]` may broadcast."""
        view = None if is_dynamo_compiling() else current_view()
        part = None if view is None or rest or named.get("_out") is not None else _rows(inputs, no_batch_dims)
        if view is None or part is None:
            return own(layer, inputs, chunk_size, no_batch_dims, *rest, **named)
        for x in tensors_in(inputs):
            view.check_stale("chunk_layer", x)
        before = states(part.parts.device)
        with without_view(), _Counting() as counted:  # ranks with fewer rows run fewer chunks
            out = own(layer, changed(lambda x: _own(x, part), inputs), chunk_size, no_batch_dims, **named)
        if draws_since(before, part.parts.device):
            raise view.error("chunk_layer", "draws other numbers than one process", "pass chunk_size=None")
        count(view, (counted.work, counted.work // part.local * part.whole))
        return changed(lambda x: mark(x, part), out)

    return chunk_layer


def _rows(inputs: Any, dims: int) -> Part | None:
    """Return the part that an input is along one of its first dims, if each rank has rows; else None."""
    parts = [part for x in tensors_in(inputs) if (part := part_of(x)) is not None]
    return next((part for part in parts if part.dim < dims and part.is_plain and part.is_everywhere), None)


def _own(x: Tensor, part: Part) -> Tensor:
    """Return this rank's rows of an input as a plain tensor; all of one that broadcasts."""
    if whole_shape(x)[part.dim] == 1:
        return part.parts.gather(x)
    own = as_part(x, part)
    return mark(own.view_as(own), None)  # another tensor, as the caller's remains a part


class _Counting(TorchFunctionMode):
    """Counts multiply-adds."""

    work = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.work += multiply_adds(name_of(func), args, kwargs or {})
        return func(*args, **(kwargs or {}))
