# SPDX-License-Identifier: Apache-2.0
"""Deprecated: `spar.parallelize` takes models of diffusers, too."""

from ._former_names import disable, enable

__all__ = ["disable", "enable"]
