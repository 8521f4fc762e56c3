# SPDX-License-Identifier: Apache-2.0
"""`swift sft` with sequence groups beside `swift sft` without, in as many processes as there are groups."""

from __future__ import annotations

from conftest import Launch
from helpers import trainers

CASES = "padded", "packed", "padding_free"


def test_swift_trains_as_data_parallel_ranks(launch: Launch) -> None:
    expected = launch("swift", 2, *(f"{case},0" for case in CASES))[0]
    for each in launch("swift", 4, *(f"{case},2" for case in CASES)):
        for one, other in zip(each, expected, strict=True):
            assert one.pop("share") < 0.6
            other.pop("share", None)
            trainers.check_same(one, other, 1e-5)
