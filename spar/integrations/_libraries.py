# SPDX-License-Identifier: Apache-2.0
"""What views are told of libraries of models, and what is replaced there while one runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from .._model.library import Library, RunModule
from ._chunks import MODULES, chunks_of_rows
from ._diffusers.kernels import kernels_of_parts
from ._transformers.caches import follow
from ._transformers.eager import attending
from ._transformers.experts import are_experts, run_experts
from ._transformers.mask_makers import making_spans
from ._transformers.mixers import is_lightning, run_lightning, serving
from ._transformers.orders import ordering

# The modules to change, and what changes them until it is left.
_CHANGES = (
    ("transformers.masking_utils", making_spans),
    ("transformers.modeling_utils", attending),
    ("transformers.modeling_utils", serving),
    ("transformers.modeling_utils", ordering),
    ("diffusers.models.attention_dispatch", kernels_of_parts),
    *((name, chunks_of_rows) for name in MODULES),
)


@contextlib.contextmanager
def _seen_by_views() -> Iterator[None]:
    """Let views see what the libraries that are imported compute."""
    with contextlib.ExitStack() as stack:
        for name, change in _CHANGES:
            module = sys.modules.get(name)
            if module is not None:
                stack.enter_context(change(module))
        yield


def _run_of(module: torch.nn.Module) -> RunModule | None:
    if are_experts(module):
        return run_experts
    return run_lightning if is_lightning(module) else None


LIBRARIES = Library(_seen_by_views, _run_of, follow)
