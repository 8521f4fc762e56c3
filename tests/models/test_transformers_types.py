# SPDX-License-Identifier: Apache-2.0
"""Types of transformers' registries by `spar.parallelize`: the most used, and those unlike others.

docs/models.md has all of them, from `make models-table`.
"""

from __future__ import annotations

import pytest
from conftest import Ranks
from helpers.transformers_runs import TOLERANCE, WORLD, Outcome, compare
from helpers.transformers_table import PAGE, page, rows_of
from helpers.transformers_types import TASKS, types

PRELOAD = ["helpers.transformers_runs"]
pytestmark = pytest.mark.one_transport

_CAUSAL = """
    bamba bart bert bigbird_pegasus bloom codegen cohere2 deepseek_v3 falcon falcon_h1 gemma2 gemma3_text
    gemma4_text glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite llama llama4_text mamba mamba2
    mistral mixtral mpt nemotron olmo2 olmo_hybrid opt phi3 qwen2 qwen3 qwen3_next roberta rwkv smollm3
    stablelm whisper xglm xlnet
"""
_SEQUENCE = "bert bart deberta-v2 falcon gemma2 gpt2 llama mistral modernbert qwen2 qwen3 roberta t5"
_TOKEN = "bert deberta distilbert layoutlm llama modernbert qwen3 roberta"
_MASKED = "albert bert deberta-v2 electra esm fnet longformer modernbert roberta xlm"
_SEQ2SEQ = "bart led m2m_100 mt5 pegasus t5 umt5"
_MULTIMODAL = """
    aria florence2 gemma4 glm4v_moe idefics2 kimi_k25 lfm2_vl lighton_ocr llama4 llava_next minicpmv4_6
    phi4_multimodal qwen2_5_vl qwen3_omni_moe_thinker
"""
_SPEECH = "moonshine qwen3_asr speech_to_text voxtral"
LISTED = {"causal": _CAUSAL, "sequence": _SEQUENCE, "token": _TOKEN, "masked": _MASKED, "seq2seq": _SEQ2SEQ}
LISTED |= {"multimodal": _MULTIMODAL, "speech": _SPEECH}
CASES = [(task, kind) for task, kinds in LISTED.items() for kind in kinds.split()]


@pytest.mark.parametrize("task, kind", CASES)
def test_types_are_right(ranks: Ranks, task: str, kind: str) -> None:
    outcomes = [Outcome(*each) for each in ranks(WORLD, compare, task, kind)]
    for outcome in outcomes:
        assert outcome.result == "right" and outcome.error <= TOLERANCE, outcome
    assert outcomes[0].share < 0.9, outcomes[0]


def test_types_that_do_not_run_keep_their_rows() -> None:
    text, at = PAGE.read_text(), "| llama | right | 0.52 |  | yes |"
    rows = rows_of(text)
    assert page(rows, {}) == text
    run = {"causal": {"llama": Outcome("wrong", "loss 1e-02")}}
    expected = text.replace(at, "| llama | wrong: loss 1e-02 | - |  |  |", 1)
    assert page(rows, run).splitlines()[50:] == expected.splitlines()[50:] and at in text


def test_page_has_each_type_and_no_wrong_one() -> None:
    text = PAGE.read_text()
    for task, (title, _) in TASKS.items():
        section = text.split(f"## {title}\n")[1].split("\n## ")[0]
        rows = dict(
            line.strip("| ").split(" | ")[:2] for line in section.splitlines() if line.startswith("| ")
        )
        assert set(rows) - {"type", "---"} == set(types(task)), title
        assert not [kind for kind, result in rows.items() if result.startswith(("wrong", "crash"))], title
