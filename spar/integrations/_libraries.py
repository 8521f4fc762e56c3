# SPDX-License-Identifier: Apache-2.0
"""What is replaced in other libraries while a view runs, which would not see these functions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ._diffusers.kernels import kernels_of_parts
from ._transformers.eager import attending
from ._transformers.mask_makers import making_spans

# The modules to change, and what changes them until it is left.
_CHANGES = (
    ("transformers.masking_utils", making_spans),
    ("transformers.modeling_utils", attending),
    ("diffusers.models.attention_dispatch", kernels_of_parts),
)


@contextlib.contextmanager
def seen_by_views() -> Iterator[None]:
    """Let views see what the libraries that are imported compute."""
    with contextlib.ExitStack() as stack:
        for name, change in _CHANGES:
            module = sys.modules.get(name)
            if module is not None:
                stack.enter_context(change(module))
        yield
