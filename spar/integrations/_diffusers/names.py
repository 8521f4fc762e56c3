# SPDX-License-Identifier: Apache-2.0
"""The names of diffusers that the integration uses, in one place, because diffusers documents few of them."""

from __future__ import annotations

import importlib
from operator import attrgetter

TESTED = "0.42.1"

# module -> what it must have
REQUIRED = {
    "diffusers": ("__version__", "ModelMixin._parallel_config"),
    "diffusers.models.attention_dispatch": ("_AttentionBackendRegistry._backends",),
    "diffusers.models.cache_utils": ("CacheMixin.is_cache_enabled", "CacheMixin._reset_stateful_cache"),
}


def check_names(where: str) -> None:
    """Import diffusers, and check that it has every name.

    Raises:
        ImportError: this version lacks a name.
    """
    version = ""
    for module, names in REQUIRED.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise _lacks(where, module, version) from error
        for name in names:
            try:
                value = attrgetter(name)(loaded)
            except AttributeError as error:
                raise _lacks(where, f"{module}.{name}", version) from error
            if name == "__version__":
                version = value


def _lacks(where: str, name: str, version: str) -> ImportError:
    return ImportError(
        f"{where} needs {name}, which diffusers {version} lacks; it is tested with diffusers {TESTED}"
    )
