# SPDX-License-Identifier: Apache-2.0
"""The names that `parallelize` and `unparallelize` had before."""

from __future__ import annotations

from typing import Any

import torch

from .._deprecated import warn_deprecated
from .._model.report import Report
from ..topology.resolve import Group
from ._parallelize import parallelize, unparallelize

REMOVAL = "0.4.0"


def shard_model(model: torch.nn.Module, group: Group = None, **options: Any) -> Report:
    """Deprecated: `parallelize`, with the same arguments."""
    warn_deprecated("shard_model", "spar.parallelize(model, group)", REMOVAL)
    return parallelize(model, group, **options)


def unshard_model(model: torch.nn.Module) -> None:
    """Deprecated: `unparallelize`."""
    warn_deprecated("unshard_model", "spar.unparallelize(model)", REMOVAL)
    unparallelize(model)


def enable(model: torch.nn.Module, group: Group = None, **options: Any) -> Report:
    """Deprecated: `parallelize`, with the same arguments."""
    warn_deprecated("diffusers.enable", "spar.parallelize(model, group)", REMOVAL)
    return parallelize(model, group, **options)


def disable(model: torch.nn.Module) -> None:
    """Deprecated: `unparallelize`."""
    warn_deprecated("diffusers.disable", "spar.unparallelize(model)", REMOVAL)
    unparallelize(model)
