# SPDX-License-Identifier: Apache-2.0
"""`swift sft` with sequence groups beside `swift sft` without, in as many processes as there are groups."""

from __future__ import annotations

from conftest import Launch
from helpers import trainers

REFUSED = (
    "integrations.swift: OPTForCausalLM passes no position_ids to its masks, and packed samples would attend "
    "to each other; expected padded batches, or a model whose masks find documents by position_ids"
)
CASES = "padded", "packed", "padding_free"


def test_swift_trains_as_data_parallel_ranks(launch: Launch) -> None:
    runs = (" ".join(f"{case},{size}" for case in CASES) for size in (0, 2))
    ranks, found = launch("swift", *(f"{count} {cases}" for count, cases in zip((2, 4), runs, strict=True)))
    for each, refused in found:
        for one, other in zip(each, ranks[0][0], strict=True):
            assert one.pop("share") < 0.6
            other.pop("share", None)
            trainers.check_same(one, other, 1e-5)
        assert refused == [REFUSED, REFUSED]
