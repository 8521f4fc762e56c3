# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's v1 over sequence groups, beside its trainer in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

REFUSED = "integrations.llamafactory: cp_size is 2, and this is one process; "
UNKNOWN = "Method __call__ of plugin spar is not registered."


def test_training_beside_one_process(launch: Any) -> None:
    expected = launch("llamafactory", 1, "1")[0]["cases"]
    for ranks in 2, 4:
        for rank in launch("llamafactory", ranks, "2"):
            refused, *others = rank["checks"]
            assert refused.startswith(REFUSED)
            assert others == [True, True, UNKNOWN]
            for case, found in rank["cases"].items():
                if not case.startswith("dynamic") or ranks == 2:  # other ranks fill other batches
                    compare(found, expected[case])


def compare(found: Any, expected: Any) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    # The trainer adds the square of the norm of all ranks over a sequence group.
    norms = [norm / 2**0.5 for norm in found["norms"]]
    assert norms == pytest.approx(expected["norms"], rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-4)
