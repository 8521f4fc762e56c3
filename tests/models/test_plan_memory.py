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


def make(kind: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
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


@pytest.mark.parametrize(("kind", "vocabulary"), [("llama", 8000), ("qwen3", 300)])
def test_activations_are_within_15_percent_of_a_step(
    kind: str, vocabulary: int, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2, check_peaks, tmp_path, kind, vocabulary)
    peaks = json.loads((tmp_path / "0").read_text())
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": kind, "vocab_size": vocabulary}))
    given = ["--json", "--ranks", "2", "--tokens", str(TOKENS), "--model", str(tmp_path)]
    assert main(["plan", *given]) == 0
    for use, found in zip(json.loads(capsys.readouterr().out)["memory"][:2], peaks, strict=True):
        planned = use["embeddings"] + use["kept"] + max(use["layer"], use["logits"])
        assert planned == pytest.approx(found, rel=0.15), (use, found)


@pytest.mark.parametrize("kind", TYPES)
def test_parameters_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = make(kind, hidden_size=1024, intermediate_size=3000, num_attention_heads=32, head_dim=64)
    model.config.save_pretrained(tmp_path)
    expected = sum(p.numel() for p in model.parameters())
    assert read_model(str(tmp_path)).parameters == pytest.approx(expected, rel=1e-3)


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
