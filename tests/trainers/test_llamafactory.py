# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's v1 over sequence groups, beside its trainer in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

REFUSED = [
    "integrations.llamafactory: cp_size is 2, and this is one process; ",
    "integrations.llamafactory: OPTForCausalLM passes no position_ids to its masks, and packed samples ",
]
OF_ALL = "padded", "dynamic", "dynamic packed"
UNKNOWN = "Method __call__ of plugin spar is not registered."


def test_training_beside_one_process(launch: Any) -> None:
    """Four ranks share each sequence, or two, with data-parallel groups: runs/llamafactory.py says when."""
    ((expected, _),), ranks = launch("llamafactory", "1", "4")
    for found, (*refused, own, restored, unknown) in ranks:
        assert len(refused) == len(REFUSED)
        assert all(map(str.startswith, refused, REFUSED)), refused
        assert (own, restored, unknown) == (True, True, UNKNOWN)
        assert found.keys() == expected.keys()
        for case in found:
            compare(found[case], expected[case], 4 if case in OF_ALL else 2)


def compare(found: Any, expected: Any, size: int) -> None:
    """Compare a rank with one process. size: the number of ranks that share a sequence."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    # The trainer adds the square of the norm of all ranks over a sequence group.
    norms = [norm / size**0.5 for norm in found["norms"]]
    assert norms == pytest.approx(expected["norms"], rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-4)
