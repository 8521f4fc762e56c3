# SPDX-License-Identifier: Apache-2.0
"""Stock models over a sharded sequence; each module imports its library inside its functions."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import diffusers as diffusers, trainer as trainer, transformers as transformers


def __getattr__(name: str) -> object:
    """Import a module at its first use; other parts of spar import this package before the caller does."""
    if name in ("diffusers", "trainer", "transformers"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
