# SPDX-License-Identifier: Apache-2.0
"""torchtitan's context parallelism by spar's attention beside one process: losses and gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CASES = [
    "cp4-fsdp1-tp1",
    "cp2-fsdp2-tp1",
    "cp2-fsdp2-tp1-sdpa-even",
    "cp2-fsdp2-tp1-compile",
    "cp2-fsdp1-tp2-checkpoint",
    "cp2-fsdp2-tp1-typed",
    "cp2-fsdp2-tp1-typed-sdpa",
]


@pytest.fixture(scope="module")
def results(launch: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    """Return what each of 4 ranks found, by case."""
    return launch("torchtitan", " ".join(["4", *CASES]))[0]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(results: list[dict[str, Any]], case: str) -> None:
    """27 tokens in documents, and 6 heads with 2 key heads, which the ranks do not divide."""
    for each in results:
        errors = each[case]
        assert len(errors) >= 15 and max(errors.values()) < 5e-6, max(errors.items(), key=lambda x: x[1])


def test_an_output_is_transformed_by_its_log_sum_exp(results: list[dict[str, Any]]) -> None:
    assert all(each["transformed"] < 1e-6 for each in results)


def test_install_replaces_what_modules_imported_and_uninstall_restores_it(
    results: list[dict[str, Any]],
) -> None:
    for each in results:
        assert each["replaced"] == [False] * 4 and each["restored"] == [True] * 4


def test_mistakes_are_errors_that_say_what_to_pass(results: list[dict[str, Any]]) -> None:
    expected = {
        "balancer": "context_parallel_load_balancer is 'ptrr'; expected \"headtail\" or None. By "
        'method="ulysses" the work is equal in any layout',
        "length": "inputs have 3 tokens; expected one or more on each of 4 ranks",
        "mask": "a mask is a Tensor; expected a BlockMask, of flex attention",
        "kind": "an attention is a Linear; expected FlexAttention or ScaledDotProductAttention",
        "no mask": "attention_masks is SequenceMask(layout=SequenceLayout.even(12, 4 ranks), spans=None); "
        "expected a mask that prepare_context_parallel_input returned after install()",
        "inputs": "attention_masks is None; expected a mask that prepare_context_parallel_input returned "
        "after install()",
        "score_mod": "score_mod is 3; expected None",
        "backend": 'spmd_backend is "full_dtensor"; expected "spmd_types" or "partial_dtensor"',
    }
    expected = {name: f"integrations.torchtitan: {text}" for name, text in expected.items()}
    expected["again"] = "integrations.torchtitan.install: it is installed; call uninstall() first"
    method = 'method is \'ulises\'; expected "ulysses", "gather", "ring", "2d", "ulysses_gather" or None'
    for each in results:
        assert each["refusals"] == expected
        assert each["method"] == f"integrations.torchtitan: {method}"
