# SPDX-License-Identifier: Apache-2.0
"""Types of transformers' registries by `spar.parallelize`: the most used, and those unlike others.

docs/models.md has all of them, from `make models-table`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.transformers_runs import TOLERANCE, WORLD, Outcome, compare
from helpers.transformers_table import PAGE, page, rows_of
from helpers.transformers_types import TASKS, types
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import spar

PRELOAD = ["helpers.transformers_runs"]
pytestmark = pytest.mark.one_transport

_CAUSAL = """
    bamba bigbird_pegasus bloom cohere2 deepseek_v3 falcon gemma2 gemma3_text gemma4_text gpt2 gpt_neo
    gpt_neox gpt_oss gptj llama llama4_text mamba mixtral mpt nemotron olmo_hybrid opt phi3 qwen3 qwen3_next
    roberta stablelm whisper xglm xlnet
"""
_SEQUENCE = "bart deberta-v2 gpt2 llama modernbert t5"
_TOKEN = "bert layoutlm qwen3"
_MASKED = "albert bert deberta-v2 esm fnet longformer modernbert xlm"
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


ONE_GRAPH = "gemma3_text qwen3_next"


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ONE_GRAPH.split())
def test_types_are_one_graph(ranks: Ranks, kind: str) -> None:
    for outcome in [Outcome(*each) for each in ranks(WORLD, compare, "causal", kind, "model")]:
        assert outcome.result == "right" and outcome.compiled == "one graph", outcome


def check_large_masks(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """Masks that would be large in a graph are spans, in a model that is compiled by block."""
    ids = torch.arange(2100).view(1, -1) % 50
    for kind, why in (
        (LlamaConfig, []),
        (MistralConfig, ["its masks are large, and are spans only outside of a graph"]),
    ):
        torch._dynamo.reset()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 50}
        # Without a cache transformers asks in each graph whether positions are those of packed documents.
        config = kind(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=kind is LlamaConfig)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            expected = model(ids).logits
            report = spar.parallelize(model, group)
            model.compile(backend="aot_eager")
            for _ in range(2):
                torch.testing.assert_close(model(ids).logits, expected)
        assert report.why_by_block == why, report


@pytest.mark.compiler
def test_a_model_with_large_masks_is_compiled_by_block(ranks: Ranks) -> None:
    ranks(2, check_large_masks)


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
