# SPDX-License-Identifier: Apache-2.0
"""The names of diffusers that the integration uses, in one place, because diffusers documents few of them."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any, NamedTuple

TESTED = "0.42.1"

_DISPATCH = "diffusers.models.attention_dispatch"
_CACHE = "diffusers.models.cache_utils"
_PROCESSOR = "diffusers.models.attention_processor"
_PARALLEL = "diffusers.models._modeling_parallel"
# module -> what it must have. `backend` of a processor is its attribute _attention_backend.
REQUIRED = {
    "diffusers": ("__version__", "ModelMixin._cp_plan", "ModelMixin._parallel_config"),
    _DISPATCH: (
        "dispatch_attention_fn",
        "AttentionBackendName",
        "_AttentionBackendRegistry.register",
        "_AttentionBackendRegistry.get_active_backend",
        "_AttentionBackendRegistry._backends",
        "_AttentionBackendRegistry._constraints",
        "_AttentionBackendRegistry._supported_arg_names",
    ),
    _CACHE: ("CacheMixin.is_cache_enabled", "CacheMixin._reset_stateful_cache"),
    _PROCESSOR: ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
    _PARALLEL: (
        "ContextParallelInput.__dataclass_fields__",
        "ContextParallelOutput.__dataclass_fields__",
    ),
}
_FIELDS = {
    "ContextParallelInput": ("split_dim", "expected_dims", "split_output"),
    "ContextParallelOutput": ("gather_dim", "expected_dims"),
}
BACKEND = "_attention_backend"  # only processors that call diffusers' dispatcher have it


class Names(NamedTuple):
    """What the integration uses of the installed diffusers."""

    dispatch: Any  # dispatch_attention_fn
    backend_name: Any  # AttentionBackendName
    registry: Any  # _AttentionBackendRegistry
    joint_processors: tuple[type, ...]  # call SDPA themselves, for each query's own sequence
    input: Any  # ContextParallelInput
    output: Any  # ContextParallelOutput


def load() -> Names:
    """Import diffusers, and check that it has every name.

    Raises:
        ImportError: diffusers is not installed, or this version lacks a name.
    """
    members: dict[str, Any] = {}
    for module, names in REQUIRED.items():
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if module == "diffusers":
                raise ImportError(
                    f"spar.integrations.diffusers needs diffusers; pip install diffusers=={TESTED}"
                ) from error
            raise _lacks(module, members) from error
        for name in names:
            try:
                members[name] = attrgetter(name)(loaded)
            except AttributeError as error:
                raise _lacks(f"{module}.{name}", members) from error
    for kind, fields in _FIELDS.items():
        for field in fields:
            if field not in members[f"{kind}.__dataclass_fields__"]:
                raise _lacks(f"{_PARALLEL}.{kind}.{field}", members)
    parallel = importlib.import_module(_PARALLEL)
    return Names(
        members["dispatch_attention_fn"],
        members["AttentionBackendName"],
        importlib.import_module(_DISPATCH)._AttentionBackendRegistry,
        (members["JointAttnProcessor2_0"], members["FusedJointAttnProcessor2_0"]),
        parallel.ContextParallelInput,
        parallel.ContextParallelOutput,
    )


def _lacks(name: str, members: dict[str, Any]) -> ImportError:
    return ImportError(
        f"spar.integrations.diffusers needs {name}, which diffusers {members.get('__version__', '')} lacks; "
        f"it is tested with diffusers {TESTED}"
    )
