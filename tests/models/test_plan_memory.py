# SPDX-License-Identifier: Apache-2.0
"""`spar plan --model`: its parameters are those of transformers, its activations those of a step."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers.llms import PRELOAD as PRELOAD, recipe, seeded
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spar
from spar._commands.arguments import main
from spar._commands.plan.config import TYPES, read_model

pytestmark = pytest.mark.one_transport
Group = dist.ProcessGroup
TOKENS = 512
SIZES = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
    "pad_token_id": 0,
    # of experts, and of latent attention
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "shared_expert_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that ops made and that live."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.now, self.peak = known, 0, 0
        self.embedded = 0  # tokens of an embedding

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            self.embedded = outputs.size(1)
        for x in tree_leaves(outputs):
            if isinstance(x, torch.Tensor):
                self.watch(x.untyped_storage())
        return outputs

    def watch(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.known:
            self.known.add(place)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, place, size)

    def gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def config_of(kind: str, **changes: Any) -> Any:
    """Return a small config of a type, with those of the sizes that it has."""
    known = transformers.AutoConfig.for_model(kind).to_dict()
    sizes = {key: value for key, value in (SIZES | changes).items() if key in known}
    if "qk_rope_head_dim" in sizes:  # its head_dim is that of rotary embeddings
        sizes |= {"head_dim": 8, "num_key_value_heads": sizes["num_attention_heads"]}
    return transformers.AutoConfig.for_model(kind, **sizes)


def make(kind: str, **changes: Any) -> Any:
    config = config_of(kind, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def check_peaks(rank: int, world: int, group: Group, folder: Path, kind: str, vocabulary: int) -> None:
    """Save what a step of this rank allocates at most beside parameters and gradients, in two ways."""
    ids = torch.arange(TOKENS)[None] % 300
    peaks = []
    for checkpoints in (False, True):
        model = seeded(lambda: make(kind, vocab_size=vocabulary))
        if checkpoints:
            model.gradient_checkpointing_enable()
        spar.parallelize(model, group, outputs="parts")
        model(input_ids=ids, labels=ids).loss.backward()
        known = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        with Live({x.untyped_storage().data_ptr() for x in known}) as live:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(live.peak)
    (folder / f"{rank}").write_text(json.dumps(peaks))


@pytest.mark.parametrize(
    ("kind", "vocabulary"),
    [("llama", 8000), ("qwen3", 300), ("gemma3_text", 300), ("qwen3_moe", 300), ("deepseek_v3", 300)],
)
def test_activations_are_within_15_percent_of_a_step(
    kind: str, vocabulary: int, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2, check_peaks, tmp_path, kind, vocabulary)
    peaks = json.loads((tmp_path / "0").read_text())
    config_of(kind, vocab_size=vocabulary).save_pretrained(tmp_path)
    given = ["--json", "--ranks", "2", "--tokens", str(TOKENS), "--model", str(tmp_path)]
    assert main(["plan", *given]) == 0
    for use, found in zip(json.loads(capsys.readouterr().out)["memory"][:2], peaks, strict=True):
        planned = use["embeddings"] + use["kept"] + max(use["layer"], use["logits"])
        assert planned == pytest.approx(found, rel=0.15), (use, found)


@pytest.mark.parametrize("kind", TYPES)
def test_parameters_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "num_attention_heads": 32, "head_dim": 64, "vocab_size": 3000}
    config = config_of(kind, **sizes, intermediate_size=3000, moe_intermediate_size=512)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        config = transformers.AutoConfig.for_model(kind.removesuffix("_text"), text_config=config.to_dict())
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config)
    config.save_pretrained(tmp_path)
    expected = sum(p.numel() for name, p in model.named_parameters() if ".visual." not in name)
    found = read_model(str(tmp_path))
    assert found.parameters == pytest.approx(expected, rel=0.01)
    assert found.is_part == (auto is transformers.AutoModelForImageTextToText)
    default = transformers.AutoConfig.for_model(kind).to_dict().get("tie_word_embeddings")
    assert found.is_part or TYPES[kind].defaults.get("tie_word_embeddings", False) == default


def test_text_models_whose_config_leaves_out_sizes(tmp_path: Path) -> None:
    """Configs of Gemma 3 do, and those of Qwen2.5-VL of an earlier release have no text_config."""
    few = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **few}}))
    default, found = transformers.Gemma3TextConfig(), read_model(str(path))
    names = "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"
    sizes = found.vocabulary, found.heads, found.key_heads, found.width, found.tied
    assert sizes == tuple(getattr(default, name) for name in names)
    whole = {"model_type": "qwen2_5_vl", "vocab_size": 300, "num_attention_heads": 4, "vision_config": {}}
    path.write_text(json.dumps(whole | few))
    assert read_model(str(path)).is_part and read_model(str(path)).width == 16


def check_recipe(rank: int, world: int, group: Group) -> None:
    """A step of the page's class under FSDP2 has the loss and the gradients of one process."""
    ids = torch.arange(37)[None] * 5 % 300
    labels = ids.clone()
    labels[:, 9:15] = -100
    one = seeded(lambda: make("llama").float())
    expected = one(input_ids=ids, labels=labels).loss
    expected.backward()
    names: dict[str, Any] = {"spar": spar, "torch": torch}
    exec(recipe("does-it-fit.md", "token_logprobs"), names)
    model = names["SFT"](seeded(lambda: make("llama").float()), group)
    mesh = dist.init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    loss = model(ids, labels)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, atol=1e-5, rtol=1e-4)


def check_embeddings(rank: int, world: int, group: Group) -> None:
    """With ids as parts no rank has the whole embedding."""
    model, ids = seeded(lambda: make("llama")), torch.arange(TOKENS)[None] % 300
    spar.parallelize(model, group, inputs=["input_ids", "labels"], outputs="parts")
    own = spar.SequenceLayout.even(TOKENS, group).shard(ids, 1)
    with Live(set()) as live:
        model(input_ids=own, labels=own)
    assert live.embedded == TOKENS // world


def test_no_embedding_is_whole_if_ids_are_parts(ranks: Ranks) -> None:
    ranks(2, check_embeddings)


def test_recipe_without_logits_is_one_process(ranks: Ranks) -> None:
    ranks(2, check_recipe)
