# SPDX-License-Identifier: Apache-2.0
"""axolotl with sequence groups beside axolotl without, in one process: `axolotl train` of a configuration."""

from __future__ import annotations

from conftest import Launch
from helpers import trainers

# Of the configurations that the script has, of which the last is right.
PROBLEMS = [
    "sequence_parallel_size is None",
    "sequence_parallel_size is '2'",
    "context_parallel_size is 2",
    "lora_mlp_kernel is True",
    "attn_implementation is 'flash_attention_2'",
    "attn_implementation is None",
    "OPTForCausalLM passes no position_ids to its masks, and packed samples would attend to each other",
    "",
]


def test_axolotl_trains_as_one_process(launch: Launch) -> None:
    """4 ranks: one sequence group of 4, and 2 groups of 2, which accumulate half as many batches."""
    one, found = launch("axolotl", "1 padded,0,4 packed,0,4 LoRA,0,4", "4 padded,4,4 packed,2,2 LoRA,2,2")
    expected, refused = one[0]
    for each, _ in found:
        for one, other in zip(each, expected, strict=True):
            assert one.pop("share") < 0.8
            other.pop("share", None)
            trainers.check_same(one, other, 1e-4)
    for message, problem in zip(refused, PROBLEMS, strict=True):
        assert message.startswith(f"integrations.axolotl: {problem}; " if problem else ""), message
        assert bool(message) == bool(problem), message
