# SPDX-License-Identifier: Apache-2.0
"""Stock models over a sharded sequence; each module imports its library inside its functions."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time spar.__getattr__ imports them
    from . import diffusers as diffusers, transformers as transformers
