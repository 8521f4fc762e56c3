# SPDX-License-Identifier: Apache-2.0
"""Small language models of transformers, their batches, and the comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spar
from spar.testing import compare

Group = dist.ProcessGroup
PRELOAD = ["transformers.models.llama.modeling_llama", "spar.testing", "spar.integrations.transformers"]
PRELOAD += ["torch._dynamo.backends.debugging", "torch._inductor.pattern_matcher", "torch._inductor.debug"]
VOCABULARY, TOLERANCE, ROWS = 53, 1e-5, 4
DOCS = Path(__file__).parents[2] / "docs"
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "use_cache": False,  # with a cache, transformers does not see that position_ids restart
    "initializer_range": 0.3,  # weights of usual size, so that mistakes show in the loss
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the class's name without ForCausalLM, and its config
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "windows in some layers": ("Qwen3", MIXED | {"use_sliding_window": True}),
}

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def maker(name: str, **changes: Any) -> Callable[[], Any]:
    """Return a function that builds a model, which compare seeds. The name is a class's, or its kind."""
    kind, config = MODELS.get(name, (name, {}))
    changes = SMALL | config | changes

    def make() -> Any:
        model = getattr(transformers, kind if hasattr(transformers, kind) else f"{kind}ForCausalLM")
        known = model.config_class
        settable = {k: v for k, v in changes.items() if not isinstance(getattr(known, k, None), property)}
        return model(known(**settable))

    return make


def whole(size: int = 2, total: int = 37) -> dict[str, Tensor]:
    """Return a batch with ignored labels, so that ranks have different numbers of labels."""
    ids = torch.randint(1, VOCABULARY, (size, total), generator=torch.Generator().manual_seed(total))
    labels = ids.clone()
    labels[:, total // 2 : total // 2 + total // 3] = -100
    return {"input_ids": ids, "labels": labels}


def left_padded() -> dict[str, Tensor]:
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :11] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch | {"attention_mask": mask, "input_ids": batch["input_ids"] * mask}


def restarts(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def packed(*lengths: int) -> dict[str, Tensor]:
    """Return one sample of several documents, as DataCollatorWithFlattening does."""
    batch = whole(1, sum(lengths))
    positions = restarts(*lengths)[None]
    batch["labels"] = batch["labels"].masked_fill(positions == 0, -100)
    return batch | {"position_ids": positions}


def packed_rows() -> dict[str, Tensor]:
    """Return two samples with documents of different lengths."""
    return whole() | {"position_ids": torch.stack([restarts(5, 20, 12), restarts(14, 23)])}


def check_exact(
    make: Callable[[], Any],
    batch: dict[str, Tensor],
    group: Group,
    tolerance: float = TOLERANCE,
    has_logits: bool = True,
    **options: Any,
) -> None:
    """Compare the loss, equal on all ranks, the logits, and the averaged gradients with one process."""

    def parallelized(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        spar.parallelize(model, group, **options)
        return batch

    report = compare(make, batch, parallelized, group, reduce="mean", show=False)
    for entry in report.entries:  # the gradient of a bias of keys is 0, but for rounding
        zero = entry.reference_norm < 1e-6 and entry.max_abs_error < 1e-6
        assert zero or entry.max_rel_error < tolerance, f"{entry}, {options}\n{report}"
    assert (report.entries[1].name == "logits") == has_logits and report.reference_loss > 1


def adapted(name: str = "llama") -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(maker(name)(), LoraConfig(r=4, init_lora_weights=False))


# ---- training beside one process ----


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def gradients_of_one_process(make: Callable[[], Any], *batches: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the mean over the labels of all batches."""
    model = seeded(make)
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        model(**batch, num_items_in_batch=count).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def check_gradients(model: nn.Module, expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient is not None, name
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert error < tolerance, (name, error)


def rows(batch: dict[str, Tensor], dp: DeviceMesh) -> dict[str, Tensor]:
    """Return the samples of a data-parallel rank."""
    mine = slice(dp.get_local_rank(), None, dp.size())
    return {name: x[mine] for name, x in batch.items()}


def meshes() -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return mesh, mesh["dp"], mesh["cp"]


def recipe(page: str, mark: str) -> str:
    """Return the page's block of Python that has the mark."""
    blocks = [part.split("```")[0] for part in (DOCS / page).read_text().split("```python\n")[1:]]
    (code,) = [block for block in blocks if mark in block]
    return code
