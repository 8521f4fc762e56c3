# SPDX-License-Identifier: Apache-2.0
"""The argument grad_scale of layouts, which a caller must pass where a gradient is recorded."""

from __future__ import annotations

import enum

from .arguments import Arguments


class _NotGiven(enum.Enum):
    """The default of grad_scale: none serves sums and averages of gradients alike."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN = _NotGiven.NOT_GIVEN
GradScale = str | float | None | _NotGiven


def scale_error(call: Arguments, splits: bool) -> ValueError:
    """Return the error of a recorded gradient whose reduction the caller did not name."""
    if splits:
        cases = (
            '"down" if the input is computed from parameters, whose gradients are reduced over the ranks as '
            "all others; None if the input's own gradient is read on each rank, which is then whole; or "
            "pass x.detach() if it needs none"
        )
    else:
        cases = (
            '"up" if all ranks compute one loss from the output and gradients of parameters are averaged, as '
            "by DDP; None if they are summed; or call SequenceLayout.gather with "
            'backward="sum" instead if the ranks\' losses differ'
        )
    return ValueError(f"{call.where}: a gradient is recorded, and grad_scale is not given; expected {cases}")
