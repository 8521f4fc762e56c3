# SPDX-License-Identifier: Apache-2.0
"""The cases of `spar check`, in the order in which they run."""

from __future__ import annotations

import spar

from .operations.attention import attention_cases
from .operations.exchanges import all_to_all_cases, collective_cases
from .operations.layouts import layout_cases
from .operations.losses import loss_cases
from .operations.sequence_group import sequence_group_cases
from .operations.splits import split_cases
from .trial import NO_GRADIENT, Case, Setting, Tensors, Trial

_NEED_RANKS = {"SequenceLayout.hybrid"}  # a parallel state of one rank has no groups


def cases(world: int) -> list[Case]:
    """Return the cases for a group of `world` ranks. The first one sets the group up."""
    found = [
        Case("init", "", _set_up),
        *all_to_all_cases(),
        *collective_cases(),
        *split_cases(),
        *layout_cases(),
        *sequence_group_cases(),
        *attention_cases(world),
        *loss_cases(),
    ]
    return found if world > 1 else [case for case in found if case.operation not in _NEED_RANKS]


def _set_up(s: Setting) -> Trial:
    def run() -> Tensors:
        spar.init(s.group, s.device)
        return []

    return Trial([[]] * s.world, run, lambda inputs: [[]] * s.world, NO_GRADIENT)
