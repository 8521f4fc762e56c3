# SPDX-License-Identifier: Apache-2.0
"""Stock models and trainers over a sharded sequence.

Each module imports its library inside its functions; but `axolotl`, `swift` and `verl`, at once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        axolotl as axolotl,
        diffusers as diffusers,
        lightning as lightning,
        llamafactory as llamafactory,
        swift as swift,
        torchtitan as torchtitan,
        trainer as trainer,
        transformers as transformers,
        verl as verl,
    )

_MODULES = (
    "axolotl",
    "diffusers",
    "lightning",
    "llamafactory",
    "swift",
    "torchtitan",
    "trainer",
    "transformers",
    "verl",
)


def __getattr__(name: str) -> object:
    """Import a module at its first use; other parts of spar import this package before the caller does."""
    if name in _MODULES:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
