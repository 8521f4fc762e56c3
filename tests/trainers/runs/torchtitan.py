# SPDX-License-Identifier: Apache-2.0
"""Steps of torchtitan's Llama 3 over cp x fsdp x tp; each rank returns its results, by case.

A case is `cp2-fsdp2-tp1` and words behind it: `typed` for the backend spmd_types, `checkpoint` for activation
checkpointing, `compile`, `even` for that layout, `sdpa` for that attention, without documents.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers import missing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

# Kernels of triton, and what loads data and saves checkpoints.
missing.replace("torch_checkpointing", "torch.utils.tensorboard", "torchdata", "datasets")
missing.replace("torchtitan.distributed.minimal_async_ep.kernels")
import torchdata.stateful_dataloader as data  # noqa: E402

data.StatefulDataLoader = type("StatefulDataLoader", (), {})  # torchtitan derives from it and a protocol
import torchtitan.tools.utils as tools  # noqa: E402

tools.device_type = "cpu"  # else cuda, which modules below import by its name
import torchtitan.components.validate as validate  # noqa: E402
import torchtitan.models.common.attention as attention  # noqa: E402
import torchtitan.models.llama3 as llama3  # noqa: E402
import torchtitan.models.llama3.parallelize as llama3_parallelize  # noqa: E402
import torchtitan.trainer as titan  # noqa: E402
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

import spar  # noqa: E402
import spar.integrations.torchtitan as plug  # noqa: E402

attention._compiled_create_block_mask = create_block_mask  # compiling it takes minutes on a CPU


def dense(
    self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, **options: Any
) -> Tensor:
    """Compute flex attention in one process: on a CPU torch's has no gradients."""
    b, _, s, t = attention_masks.shape
    mask = create_mask(attention_masks.mask_mod, b, 1, s, t, device="cpu")
    heads = [x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)]
    return scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


attention.FlexAttention.forward = dense


def config_of(words: list[str]) -> Any:
    """Return a config of 2 layers with 6 heads of 8, and 2 key heads."""
    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    rope = type(config.layers[0].attention.rope)(dim=8, max_seq_len=256, theta=500000, scaling="llama")
    shape = {"dim": 48, "n_heads": 6, "n_kv_heads": 2, "hidden_dim": 64, "n_layers": 2}
    config.layers = llama3._build_llama3_layers(**shape, rope=rope, attn_backend="flex")
    if "sdpa" in words:
        for layer in config.layers:
            layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    config.dim, config.vocab_size = 48, 64
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = 64, 48
    config.norm.normalized_shape = 48
    config.lm_head.in_features, config.lm_head.out_features = 48, 64
    return config


def made(config: Any) -> Any:
    """Make a model of which attention matters: torchtitan's first weights are small."""
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=p.size(-1) ** -0.5)
    return model


def batch(words: list[str], samples: int) -> tuple[dict[str, Tensor], Tensor]:
    length = 27  # neither 2 nor 4 divide it
    ids = torch.randint(64, (samples, length + 1), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[:, ::5] = -100
    positions = torch.arange(length).repeat(samples, 1)
    if "sdpa" not in words:  # documents, which begin elsewhere in each sample
        for i in range(samples):
            positions[i, 9 + i :] -= 9 + i
    return {"input": ids[:, :-1], "positions": positions}, labels


def step(model: Any, words: list[str], inputs: Any, labels: Tensor, dims: Any, config: Any) -> Tensor:
    """Run a step as Trainer does, and return its loss over all ranks."""
    balancer = None if "even" in words else "headtail"
    backend = "spmd_types" if "typed" in words else "partial_dtensor"
    parallelism = SimpleNamespace(
        context_parallel_load_balancer=balancer, context_parallel_ptrr_mask_key=None, spmd_backend=backend
    )
    trainer = SimpleNamespace(
        model_config=config,
        model_parts=[model],
        parallel_dims=dims,
        device=torch.device("cpu"),
        config=SimpleNamespace(parallelism=parallelism),
        ntokens_seen=0,
    )
    count = (labels != -100).sum()
    if dims.dp_shard > 1:
        dist.all_reduce(count, group=dims.get_mesh("batch").get_group())
    tokens, labels, extra = titan.Trainer.post_dataloading_process(trainer, inputs, labels)
    with utils.get_spmd_context(parallel_dims=dims)():
        logits = model(tokens, **extra)
        loss = cross_entropy_loss(logits, labels, global_vocab_size=config.vocab_size) / count
        loss.backward()
    return loss.detach()


def run(folder: Path, case: str) -> dict[str, float]:
    sizes, words = {}, []
    for word in case.split("-"):
        if word[-1].isdigit():
            sizes[word[:-1]] = int(word[-1])
        else:
            words.append(word)
    backend = "spmd_types" if "typed" in words else "partial_dtensor"
    world = dist.get_world_size()
    config = config_of(words)
    expected = made(config)
    inputs, labels = batch(words, sizes["fsdp"])
    one = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1, spmd_backend="partial_dtensor"
    )
    utils.set_spmd_backend("partial_dtensor")
    loss = step(expected, [], dict(inputs), labels, one, config)

    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=sizes["fsdp"],
        cp=sizes["cp"],
        tp=sizes["tp"],
        pp=1,
        ep=1,
        world_size=world,
        spmd_backend=backend,
    )
    utils.set_spmd_backend(backend)
    set_llama3_sharding_config(config, enable_sp=sizes["tp"] > 1)
    model = made(config)
    if backend == "spmd_types":  # of torch 2.13 FSDP cannot read its types
        llama3_parallelize.validate_config(dims, model)
        model.parallelize(dims)
    else:
        llama3.parallelize_llama(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(spmd_backend=backend),
            compile_config=CompileConfig(
                enable="compile" in words, components=["model"], backend="aot_eager"
            ),
            ac_config=FullAC.Config() if "checkpoint" in words else None,
            dump_folder=str(folder),
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    own = dims.get_mesh("batch").get_local_rank() if sizes["fsdp"] > 1 else 0
    found = step(
        model, words, {n: x[own : own + 1] for n, x in inputs.items()}, labels[own : own + 1], dims, config
    )
    dist.all_reduce(found)
    errors = {"loss": abs(float(found / sizes["tp"] - loss))}
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = p.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
        errors[name] = float((gradient - q.grad).abs().max() / q.grad.abs().max())
    return errors


def transformed() -> float:
    """Return how far attention with a transformed output, as of sinks, differs from one process."""
    group = dist.group.WORLD
    layout = spar.SequenceLayout.zigzag(27, group)
    shape = 1, 27, 3, 8
    q, k, v = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    module = attention.FlexAttention(attention.FlexAttention.Config())
    llama3_parallelize.apply_cp_to_forward([module], None)

    def transform(out: Tensor, lse: Tensor) -> Tensor:
        return out * torch.sigmoid(lse)[..., None]

    mask = torch.ones(27, 27, dtype=torch.bool).tril()
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5).masked_fill(~mask, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), v)
    expected = layout.shard(transform(out, scores.logsumexp(3).transpose(1, 2)), 1)
    masks = plug.SequenceMask(layout, spar.Spans.causal(27))
    parts = layout.shard([q, k, v], 1)
    return float(
        (module.forward(*parts, attention_masks=masks, out_transform=transform) - expected).abs().max()
    )


def refusals() -> dict[str, str]:
    """Return what mistakes raise."""
    module = attention.FlexAttention(attention.FlexAttention.Config())
    llama3_parallelize.apply_cp_to_forward([module], None)
    x, mesh = torch.ones(1, 3, 1, 8), init_device_mesh("cpu", (dist.get_world_size(),))
    layout = spar.SequenceLayout.even(12, mesh)
    full = SimpleNamespace(spmd_backend="full_dtensor", cp_enabled=True)

    def prepare(length: int, balancer: str | None = None, masks: Any = None) -> None:
        ids = torch.ones(1, length, dtype=torch.int64)
        extra = {"positions": ids, "attention_masks": masks}
        titan.prepare_context_parallel_input(ids, ids, extra, mesh, torch.device("cpu"), balancer)

    made = {
        "again": plug.install,
        "balancer": lambda: prepare(12, "ptrr"),
        "length": lambda: prepare(3),
        "mask": lambda: prepare(12, masks=torch.ones(1)),
        "no mask": lambda: module.forward(x, x, x, attention_masks=plug.SequenceMask(layout, None)),
        "kind": lambda: llama3_parallelize.apply_cp_to_forward([torch.nn.Linear(1, 1)], mesh),
        "inputs": lambda: module.forward(x, x, x, attention_masks=None),
        "score_mod": lambda: module.forward(
            x, x, x, attention_masks=plug.SequenceMask(layout, spar.Spans.causal(12)), score_mod=3
        ),
        "backend": lambda: llama3_parallelize.validate_config(full, module),
    }
    found = {}
    for name, make in made.items():
        try:
            make()
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def replaced() -> list[Any]:
    """Return the functions that `install` replaces, where torchtitan's modules have them."""
    return [
        titan.prepare_context_parallel_input,
        validate.prepare_context_parallel_input,
        llama3_parallelize.apply_cp_to_forward,
        llama3_parallelize.validate_config,
    ]


def main(folder: Path, *cases: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    theirs = replaced()
    try:
        plug.install("ulises")
    except ValueError as error:
        results: dict[str, Any] = {"method": str(error)}
    plug.install()
    results["replaced"] = [x is y for x, y in zip(replaced(), theirs, strict=True)]
    results |= {case: run(folder, case) for case in cases}
    results |= {"refusals": refusals(), "transformed": transformed()}
    plug.uninstall()
    results["restored"] = [x is y for x, y in zip(replaced(), theirs, strict=True)]
    return results
