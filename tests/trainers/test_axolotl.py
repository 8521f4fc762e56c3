# SPDX-License-Identifier: Apache-2.0
"""axolotl with sequence groups beside axolotl without, in one process: `axolotl train` of a configuration."""

from __future__ import annotations

from conftest import Launch
from helpers import trainers


def test_axolotl_trains_as_one_process(launch: Launch) -> None:
    """4 ranks: one sequence group of 4, and 2 groups of 2, which accumulate half as many batches."""
    (expected,) = launch("axolotl", 1, "padded,0,4", "packed,0,4", "LoRA,0,4")
    found = launch("axolotl", 4, "padded,4,4", "packed,2,2", "LoRA,2,2")
    for each in found:
        for one, other in zip(each, expected, strict=True):
            assert one.pop("share") < 0.8
            other.pop("share", None)
            trainers.check_same(one, other, 1e-4)
