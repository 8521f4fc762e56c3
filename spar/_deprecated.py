# SPDX-License-Identifier: Apache-2.0
"""Warn of names, arguments and settings that an earlier release had."""

from __future__ import annotations

import inspect
import os
import warnings

from torch.compiler import is_dynamo_compiling

# Variable: the release from which it has no effect, why, and the release that no longer warns of it.
_REMOVED_VARIABLES = {
    "SPAR_AFFINITY": ("0.2.0", "no call changes a thread's affinity", "0.3.0"),
}


def outside_level() -> int:
    """Return the `stacklevel` by which its caller's warning names the first line outside of spar."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "spar":
        frame, level = frame.f_back, level + 1
    return level


def warn_deprecated(old: str, new: str, removal: str) -> None:
    """Warn the caller outside of spar that a name or an argument of it has another one now.

    In compiled code there is no warning, which would break the graph.
    """
    if is_dynamo_compiling():
        return
    warnings.warn(
        f"{old} is deprecated and will be removed in spar {removal}; use {new}",
        DeprecationWarning,
        stacklevel=outside_level(),
    )


def warn_of_removed_variables() -> None:
    """Warn of environment variables that are set, but have no effect any more."""
    for variable, (since, why, removal) in _REMOVED_VARIABLES.items():
        if os.environ.get(variable):
            warnings.warn(
                f"{variable} is set, but has had no effect since spar {since}: {why}. Unset it; "
                f"from spar {removal} on spar ignores it without a warning",
                DeprecationWarning,
                stacklevel=outside_level(),
            )
