# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engine over sequence groups, beside the same engine in one process."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

LENGTHS = [11, 9, 14, 9]  # of the samples in runs/verl.py
SIZES = {"sft": 4, "grpo": 2, "value": 2, "lora": 4, "fsdp1": 2}  # ranks that share a sequence
REFUSALS = [
    "ulysses_sequence_parallel_size is 3",
    "use_fused_kernels is True",
    "use_liger is True",
    "qat.enable is True",
    "the model has a vision_config",
    "GptOssForCausalLM passes no position_ids to its masks, and packed samples would attend to each other",
    "use_remove_padding is False",
    "distillation_use_topk is True",
]


def test_engine_beside_one_process(launch: Any) -> None:
    (expected,), found = launch("verl", "1", "4")
    # The label of a sample's last token is the next sample's first in a micro-batch, and no loss has it.
    has_label = torch.ones(sum(LENGTHS), dtype=torch.bool)
    has_label[torch.tensor(list(accumulate(LENGTHS))) - 1] = False
    for case, size in SIZES.items():
        compare([rank[case] for rank in found], size, expected[case], has_label)
    messages = [f"integrations.verl: {refusal}; " for refusal in REFUSALS]
    for rank in found:
        assert len(rank["refusals"]) == len(messages)
        assert all(map(str.startswith, rank["refusals"], messages)), rank["refusals"]


def compare(found: list[Any], size: int, expected: Any, has_label: torch.Tensor) -> None:
    """Compare what all ranks have with one process. size: the number of ranks that share a sequence."""
    assert [rank["rank"] for rank in found] == [rank // size for rank in range(len(found))]
    assert [rank["is_source"] for rank in found] == [rank % size == 0 for rank in range(len(found))]
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(expected["norms"] if rank["is_source"] else [], rel=1e-5)
        assert rank["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-4)
    for name, values in expected["outputs"].items():
        for place in range(size):  # in the sequence group
            whole = torch.cat([rank["outputs"][name] for rank in found[place::size]])
            torch.testing.assert_close(whole[has_label], values[has_label], rtol=1e-5, atol=1e-5)
