# SPDX-License-Identifier: Apache-2.0
"""Layers without attention: convolutions, linear attention and state spaces, as one process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import TRANSPORTS, Ranks
from helpers import llms
from helpers.float64 import in_float64
from helpers.llms import compared, even, left_padded, packed, restarts, seeded, sharding, whole, zigzag
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import spar
from spar import SequenceLayout
from spar.integrations._transformers.tokens import Tokens
from spar.integrations.transformers import shard, total_loss
from spar.parallel_state import destroy_parallel_state, init_parallel_state

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp"]
Group = dist.ProcessGroup
TOLERANCE = 1e-5
# Gradients of A_log and dt_bias are sums over all tokens that almost cancel. transformers computes the gates
# in float32; `test_gates_in_float64` compares them without this rounding.
Rows = tuple[tuple[int, ...], ...]
GATES, ROUNDING = ("A_log.grad", "dt_bias.grad"), 1e-4


# ---- models ----

FOUR = {"num_hidden_layers": 4}
EXPERTS = llms.EXPERTS | {"shared_expert_intermediate_size": 16, "num_local_experts": 4}
LATENT = llms.LATENT | {"q_lora_rank": None, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1}
LINEAR = FOUR | {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,  # fewer than of values, and than ranks
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
KDA = LINEAR | LATENT | EXPERTS | {"linear_num_heads": 5, "linear_head_dim": 8}
MAMBA2 = FOUR | {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
MAMBA = {"state_size": 6, "time_step_rank": 4}
CONVOLUTION = FOUR | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {  # type: its class's name without ForCausalLM, and config
    "qwen3_next": ("Qwen3Next", LINEAR | EXPERTS),
    "qwen3_5_text": ("Qwen3_5", LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5Moe", LINEAR | EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", LINEAR | {"linear_num_key_heads": 4, "initializer_range": 0.05}),
    "kimi_linear": ("KimiLinear", KDA),
    "bailing_hybrid": ("BailingHybrid", KDA),
    "bamba": ("Bamba", MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MAMBA2 | EXPERTS | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    ),
    "falcon_h1": ("FalconH1", MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 5,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "zamba2": (
        "Zamba2",
        FOUR
        | {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 6,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_expand": 2,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
    "lfm2": ("Lfm2", CONVOLUTION | {"block_multiple_of": 8}),
    "lfm2_moe": ("Lfm2Moe", CONVOLUTION | EXPERTS | {"num_dense_layers": 1}),
    "lfm3": (
        "Lfm3",
        CONVOLUTION
        | {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 9},
    ),
    "jamba": (
        "Jamba",
        FOUR
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 6, "mamba_dt_rank": 4},
    ),
    "minimax": (
        "MiniMax",
        LINEAR | EXPERTS | {"num_attention_heads": 5, "num_key_value_heads": 5, "block_size": 8},
    ),
    "mamba": ("Mamba", MAMBA),
    "falcon_mamba": ("FalconMamba", MAMBA),
    "zamba": (
        "Zamba",
        FOUR
        | {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64, "attention_head_dim": 8}
        | {"mamba_d_state": 6, "mamba_dt_rank": 4, "n_mamba_heads": 2, "num_key_value_heads": 8},
    ),
}
INDEXED = (
    LINEAR
    | EXPERTS
    | {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    }
)
# Their attention passes no position_ids to its masks, so that shard refuses packed documents.
WITHOUT_DOCUMENTS = {"granitemoehybrid"}


def maker(name: str, **changes: Any) -> Callable[[], Any]:
    """Return a function that builds a model of a type in which each head is another one."""
    kind, config = TYPES[name]

    def make() -> Any:
        model = getattr(transformers, f"{kind}ForCausalLM")
        made = model(model.config_class(**llms.SMALL | {"initializer_range": 0.1} | config | changes))
        for path, p in made.named_parameters():
            if p.numel() > 1 and p.unique().numel() == 1 and not path.endswith("norm.weight"):
                nn.init.normal_(p, std=0.2)  # as dt_bias and D, which begin with ones
        return made.train()

    return make


def padded() -> dict[str, Tensor]:
    """Return a batch with padding before the first sample; no token that is padding predicts one."""
    batch = left_padded()
    batch["labels"][0, 11] = -100
    return batch


def built(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def limit(name: str, scan: str | None = None) -> float:
    # By state sums run in another order: as far from one process as one process in float32 is from float64.
    return (ROUNDING if name.endswith(GATES) else TOLERANCE) * (3 if scan == "state" else 1)


def check_exact(make: Callable[[], Any], batch: dict[str, Any], group: Group, **arguments: Any) -> None:
    report = compared(make, batch, group, **arguments)
    for entry in report.entries:
        zero = entry.reference_norm < 1e-6 and entry.max_abs_error < 1e-6  # rounding of a gradient of 0
        most = limit(entry.name, arguments.get("scan"))
        assert zero or entry.max_rel_error < most, f"{entry}, {arguments}\n{report}"
    assert report.entries[1].name == "logits" and report.reference_loss > 1


def check_documents(make: Callable[[], Any], documents: Rows, group: Group, **given: Any) -> SequenceLayout:
    """Compare packed documents with runs of each document alone: one process does not separate them.

    documents: their lengths in each sample.
    """
    batch = whole(len(documents), sum(documents[0]))
    positions = torch.stack([restarts(*lengths) for lengths in documents])
    batch["labels"] = batch["labels"].masked_fill(positions == 0, -100)
    count = int((batch["labels"] != -100).sum())
    alone, model, expected, logits = built(make), built(make), 0.0, []
    for row, lengths in enumerate(documents):
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            of = slice(row, row + 1), slice(end - length, end)
            output = alone(
                input_ids=batch["input_ids"][of], labels=batch["labels"][of], num_items_in_batch=count
            )
            output.loss.backward()
            expected += float(output.loss.detach())
            logits.append(output.logits.detach())
    part = sharding(group, **given)(model, batch | {"position_ids": positions})
    output = model(**part)
    output.loss.backward()
    assert abs(float(total_loss(output.loss, group=group, token_group=group)) - expected) < 1e-5 * expected
    own = part["layout"].shard(torch.cat(logits, 1).view(*batch["labels"].shape, -1), 1)
    assert (output.logits - own).abs().max() < TOLERANCE * own.abs().max()
    for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
        gradient = torch.zeros_like(q) if q.grad is None else q.grad
        found, reference = spar.all_gather(gradient[None], group).sum(0), p.grad
        reference = torch.zeros_like(p) if reference is None else reference
        error = (found - reference).abs().max()
        most = limit(f"{name}.grad", given.get("scan"))
        assert error < max(1e-6, most * float(reference.abs().max())), (name, error)
    layout: SequenceLayout = part["layout"]
    return layout


# ---- each type ----


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks((2, 3, 4))
    pool.transport = TRANSPORTS[0]
    yield pool
    pool.stop()


DOCUMENTS = ((5, 1, 18, 2, 11),)  # some are shorter than a convolution, or than the ranks
OTHERS = ((5, 1, 18, 2, 11), (14, 23))


def check_type(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name)
    check_exact(make, whole(), group, layout=even)
    check_exact(make, padded(), group, layout=zigzag)
    if name not in WITHOUT_DOCUMENTS:
        assert check_documents(make, DOCUMENTS, group).kind == "packed"
        check_documents(make, OTHERS, group, layout=zigzag)
    else:
        with pytest.raises(ValueError, match="passes no position_ids to its masks"):
            sharding(group)(make(), packed(*DOCUMENTS[0]))


@pytest.mark.parametrize("name", TYPES)
def test_types_are_exact(pool: Ranks, name: str) -> None:
    pool(3, check_type, name)


# on 4 ranks qwen3_next and bamba are in test_fewer_heads_than_ranks
@pytest.mark.parametrize(
    ("world", "name"), [(2, "qwen3_next"), (2, "bamba"), (2, "lfm2"), (4, "mamba"), (4, "kimi_linear")]
)
def test_types_are_exact_on_other_numbers_of_ranks(pool: Ranks, world: int, name: str) -> None:
    pool(world, check_type, name)


FEW = {  # two heads, for more ranks
    "qwen3_next": {"linear_num_value_heads": 2, "linear_num_key_heads": 1},
    "bamba": {"mamba_n_heads": 2, "mamba_d_head": 32, "mamba_n_groups": 1},
}


def check_few_heads(rank: int, world: int, group: Group, name: str) -> None:
    check_exact(maker(name, **FEW[name]), whole(), group, layout=zigzag)
    check_documents(maker(name, **FEW[name]), DOCUMENTS, group)


@pytest.mark.parametrize("name", FEW)
def test_fewer_heads_than_ranks(pool: Ranks, name: str) -> None:
    pool(4, check_few_heads, name)


def check_hybrid_layout(rank: int, world: int, group: Group) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    try:
        layout = SequenceLayout.hybrid(37, state)
        for name in ("qwen3_next", "mamba"):
            check_exact(maker(name), padded(), layout.group, layout=layout)
    finally:
        destroy_parallel_state()


def test_ring_by_ulysses(pool: Ranks) -> None:
    pool(4, check_hybrid_layout)


def check_other_layouts(rank: int, world: int, group: Group, name: str) -> None:
    """Documents in a layout that does not know of them: the same in all samples, or others.

    Others in a zigzag layout are in check_type.
    """
    for documents, layout in ((DOCUMENTS * 2, even), (DOCUMENTS * 2, zigzag), (OTHERS[::-1], even)):
        check_documents(maker(name), documents, group, layout=layout)
    assert check_documents(maker(name), DOCUMENTS * 2, group).kind == "packed"


@pytest.mark.parametrize("name", ["bamba", "mamba", "lfm2", "minimax"])
def test_documents_in_other_layouts(pool: Ranks, name: str) -> None:
    pool(3, check_other_layouts, name)


def check_balanced(rank: int, world: int, group: Group, name: str) -> None:
    """Documents that mostly stay whole; states go from rank to rank in the others."""
    layout = SequenceLayout.balanced(DOCUMENTS[0], group)
    for scan in (None, "state"):
        check_documents(maker(name), DOCUMENTS, group, layout=layout, scan=scan)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_documents_in_a_balanced_layout(pool: Ranks, name: str) -> None:
    pool(3, check_balanced, name)


def check_one_rank(rank: int, world: int, group: Group, name: str) -> None:
    """Packed documents are apart on one rank, too."""
    check_documents(maker(name), DOCUMENTS, group)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba"])
def test_documents_on_one_rank(pool: Ranks, name: str) -> None:
    pool(1, check_one_rank, name)


# ---- in float64 ----


def check_float64(rank: int, world: int, group: Group, name: str, scan: str | None = None) -> None:
    def make() -> Any:
        model = maker(name)().to(torch.float64)
        for module in model.modules():
            if hasattr(module, "decay_factors"):  # MiniMax's, which are buffers
                factors = module.decay_factors(module.slope_rate)
                module.query_decay, module.key_decay, module.diagonal_decay = factors
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # torch has no grouped products in float64
        return model

    with in_float64(type(make())):
        report = compared(make, padded(), group, layout=zigzag, scan=scan)
    for entry in report.entries:
        assert entry.max_rel_error < 1e-10, f"{entry}\n{report}"


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "zamba2"])
def test_gates_in_float64(pool: Ranks, name: str) -> None:
    pool(3, check_float64, name)


# ---- with what else a model may use ----


def check_methods(rank: int, world: int, group: Group, name: str) -> None:
    for method in ("ulysses", "ring"):
        check_exact(maker(name), padded(), group, layout=zigzag, method=method)
        check_documents(maker(name), DOCUMENTS, group, method=method)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_attention_methods(pool: Ranks, name: str) -> None:
    pool(3, check_methods, name)


def check_router_loss(rank: int, world: int, group: Group, name: str) -> None:
    make = maker(name, output_router_logits=True, router_aux_loss_coef=1.0)
    for batch in (whole(), padded()):
        check_exact(make, batch, group)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
def test_router_losses(pool: Ranks, name: str) -> None:
    pool(2, check_router_loss, name)


def check_checkpointing(rank: int, world: int, group: Group, name: str, reentrant: bool) -> None:
    """Layers run again in backward: those of Mamba find the layout in their mask."""

    def make() -> Any:
        model = maker(name)()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    check_exact(make, padded(), group, layout=zigzag)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba", "jamba"])
def test_gradient_checkpointing(pool: Ranks, name: str, reentrant: bool) -> None:
    pool(2, check_checkpointing, name, reentrant)


def check_lora(rank: int, world: int, group: Group) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "in_proj", "out_proj"]  # of attention, and of Mamba

    def adapted() -> Any:
        settings = LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
        return get_peft_model(maker("bamba")(), settings)

    assert sum(p.requires_grad for p in adapted().parameters()) == 12
    check_exact(adapted, whole(), group, layout=zigzag)


def test_lora(pool: Ranks) -> None:
    pool(2, check_lora)


def check_bfloat16(rank: int, world: int, group: Group, name: str) -> None:
    """Gates stay float32 beside keys of 16 bits, and a rank without heads has the others' dtype."""

    def make() -> Any:
        return maker(name, **({"linear_num_value_heads": 2} if name == "qwen3_next" else {}))().bfloat16()

    report = compared(make, whole(), group, scan="heads")
    for entry in report.entries:
        assert entry.max_rel_error < 0.1, f"{entry}\n{report}"


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_bfloat16(pool: Ranks, name: str) -> None:
    pool(3, check_bfloat16, name)


ONE_OF_EACH: dict[str, dict[str, Any]] = {  # the changes of a type's config
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba": {"num_hidden_layers": 1},
}


def check_compiled(rank: int, world: int, group: Group, name: str) -> None:
    """Rank 0 compiles, so that only one process does: one layer of each kind, as a scan is unrolled."""
    model = seeded(maker(name, **ONE_OF_EACH[name]), "spar")
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if rank == 0 else model
    for total in (9, 12) if name == "lfm2" else (12,):  # those of scans make symbols slow
        part = shard(forward, whole(1, total), group=group, token_group=group, method="ulysses")
        found = []
        for run in (model, forward):
            model.zero_grad()
            loss = run(**part).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager)
    assert rank > 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_compiled_models(pool: Ranks, name: str) -> None:
    pool(2, check_compiled, name, timeout=280)


def check_fsdp2(rank: int, world: int, group: Group, name: str) -> None:
    """dp 2 x cp 2, with checkpointing: gradients are averaged."""
    mesh, dp, cp = llms.meshes()
    make, batch = maker(name), whole(llms.ROWS)
    expected = llms.gradients_of_one_process(make, batch, attention="eager")
    model = built(make)
    if name != "mamba":
        model.set_attn_implementation("spar")
    model.gradient_checkpointing_enable()
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh._flatten("world"))
    fully_shard(model, mesh=mesh["world"])
    part = shard(model, llms.rows(batch, dp), group=cp, token_group=dp)
    (model(**part).loss * world).backward()
    llms.check_gradients(model, expected)


@pytest.mark.parametrize("name", ["bamba", "mamba"])
def test_fsdp2(pool: Ranks, name: str) -> None:
    pool(4, check_fsdp2, name)


# ---- what moves ----


def sent() -> tuple[int, int]:
    """Return the bytes that this process sent, and its exchanges."""
    stats = spar.memory_stats()
    sums = [sum(n for name, n in stats.items() if name.startswith(kind)) for kind in ("sent.", "calls.")]
    return sums[0], sums[1]


# The functions of causal_conv1d, flash-linear-attention and mamba_ssm, by their parameters: transformers
# passes positional arguments on to them as they are.


def conv1d_of_package(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    assert seq_idx is None and activation == "silu"
    return x


def delta_rule_of_package(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None
) -> tuple[Tensor, None]:
    assert g.dtype == torch.float32 and beta.dtype == v.dtype and scale is None
    return v, None


def chunk_scan_of_package(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    assert z is None and D is not None and A.shape == D.shape == x.shape[2:3]
    return x


def selective_scan_of_package(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
) -> Tensor:
    assert z is None and A.size(0) == u.size(1) and B.shape == C.shape == (1, A.size(1), u.size(2))
    return u


def check_bytes(rank: int, world: int, group: Group) -> None:
    """The formulas of docs/hybrid.md, for each of P ranks with T tokens in an even layout."""
    from spar.integrations._transformers import scans

    T, P, tokens = 12, world, Tokens(SequenceLayout.even(12 * world, group))
    H, HK, K, V, G, N, C, W = 4, 2, 8, 6, 2, 5, 8, 4

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def check(exchanges: int, expected: float, run: Any, own: Any, *args: Tensor, **named: Any) -> None:
        before = sent()
        run(own, tokens, *args, **named)
        found, calls = (after - n for after, n in zip(sent(), before, strict=True))
        assert (found, calls) == (expected, exchanges), (run, found, expected, calls)

    shared, channels, states = (P - 1) / P, zeros(1, C, T), zeros(1, N, T)
    halo = (rank < P - 1) * (W - 1) * C * 2
    check(1, halo, scans._convolution, conv1d_of_package, channels, zeros(C, W), activation="silu")
    keys, gates = zeros(1, T, HK, K), zeros(1, T, H, dtype=torch.float32)
    delta = keys, keys, zeros(1, T, H, V), gates, zeros(1, T, H)
    moved = T * shared * ((2 * HK * K + 2 * H * V) * 2 + H * 4 + H * 2)
    check(2, moved, scans._delta_rule, delta_rule_of_package, *delta)
    scan = zeros(1, T, H, K), zeros(1, T, H), zeros(H), zeros(1, T, G, N), zeros(1, T, G, N)
    moved = T * shared * (2 * H * K + 2 * G * N + H) * 2
    check(2, moved, scans._chunk_scan, chunk_scan_of_package, *scan, D=zeros(H), chunk_size=8)
    selective = channels, channels, zeros(C, N, dtype=torch.float32), states, states
    moved = T * shared * 3 * C * 2 + T * (P - 1) * 2 * N * 2
    check(2, moved, scans._selective_scan, selective_scan_of_package, *selective, z=channels)


def test_bytes_and_calls_of_kernels(pool: Ranks) -> None:
    pool(2, check_bytes)


# ---- mistakes ----


def check_alone(rank: int, world: int, group: Group, name: str) -> None:
    """Without its functions for a layout, a model of shards is wrong, and the comparison shows it."""
    from spar.integrations._transformers import scans

    def alone(own: Callable[..., Any], tokens: Tokens, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    scope = vars(sys.modules[type(maker(name)()).__module__])
    with pytest.MonkeyPatch.context() as patch:
        for key, entry in scans.SERVED.items():
            patch.setitem(scans.SERVED, key, entry._replace(run=alone))
        for key in scans.SERVED.keys() & scope.keys():  # as before a first call of shard
            patch.setitem(scope, key, getattr(scope[key], "of_transformers", scope[key]))
        report = compared(maker(name), whole(), group)
    assert report.worst.max_rel_error > 0.05, str(report)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba", "lfm2"])
def test_shards_alone_are_wrong(pool: Ranks, name: str) -> None:
    pool(2, check_alone, name)


def check_refused(rank: int, world: int, group: Group) -> None:
    calls = "calls none of the functions that spar computes over a sharded sequence"
    heads = {"num_attention_heads": 4}
    for kind, config, message in (
        ("RecurrentGemma", {"num_hidden_layers": 3}, f"layer 0 is one of linear_attention, .* {calls}"),
        ("Zaya", FOUR | heads, f"layer 0 is one of hybrid, .* {calls}"),
        ("Inkling", {}, "it has layers of hybrid_sliding"),
        ("Qwen4Exp", INDEXED, "it has layers of indexed_attention"),
        ("Rwkv", {}, "it has a state that passes from token to token"),
        ("xLSTM", {}, "it has a state that passes from token to token"),
    ):
        model = llms.maker(kind, **config)()
        with pytest.raises(ValueError, match=rf"{kind}\w* cannot run over a sharded sequence: {message}"):
            sharding(group)(model, whole())


def test_other_layers_are_refused(pool: Ranks) -> None:
    pool(2, check_refused)


def check_arguments(rank: int, world: int, group: Group) -> None:
    model = seeded(maker("bamba"), "spar")
    mask = torch.ones(2, 1, 37, 37, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"is of shape \[2, 1, 37, 37\]; expected \[B, S\], or none"):
        shard(built(maker("mamba")), whole() | {"attention_mask": mask}, group=group, token_group=group)
    check_exact(maker("bamba"), whole() | {"attention_mask": mask}, group)
    part = shard(model, whole(), group=group, token_group=group)
    with pytest.raises(ValueError, match=r"^BambaMixer: layout is None; pass the batch through"):
        model(**{name: value for name, value in part.items() if name != "layout"})
    cached = transformers.DynamicCache(config=model.config)
    with pytest.raises(ValueError, match=r"expected none over a sharded sequence. Pass no past_key_values"):
        model(**part | {"past_key_values": cached, "use_cache": True})


def test_arguments_that_do_not_fit(pool: Ranks) -> None:
    pool(2, check_arguments)


def check_after(rank: int, world: int, group: Group) -> None:
    """In the same process a model still runs whole sequences, generates, and is copied."""
    for name in ("bamba", "mamba"):
        alone, model = built(maker(name)).eval(), built(maker(name)).eval()
        if name == "bamba":  # Mamba has no attention
            spar.integrations.transformers.register()
            model.set_attn_implementation("spar")
        model(**shard(model, whole(), group=group, token_group=group))
        ids = whole(1, 12)["input_ids"]
        if name == "bamba":
            model.set_attn_implementation("sdpa")
        expected = alone.generate(ids, max_new_tokens=5, use_cache=True, do_sample=False)
        for other in (model, copy.deepcopy(model)):
            assert other.generate(ids, max_new_tokens=5, use_cache=True, do_sample=False).equal(expected)


def test_whole_sequences_afterwards(pool: Ranks) -> None:
    pool(2, check_after)


def check_versions(rank: int, world: int, group: Group) -> None:
    """Another version of transformers: a function is gone, has other parameters, or is new."""
    from transformers.models.lfm2 import modeling_lfm2 as lfm2
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    version = rf"in transformers {transformers.__version__}; expected the function of transformers 5.23"
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(mamba2, "mamba2_chunk_scan")
        with pytest.raises(ValueError, match=rf"mamba2_chunk_scan of .*mamba2 does not exist {version}"):
            sharding(group)(maker("mamba2")(), whole())
        patch.setattr(lfm2, "causal_conv1d_fn", lambda x, kernel, bias, activation=None, **_: x)
        with pytest.raises(
            ValueError, match=rf"causal_conv1d_fn of .*lfm2 has no parameter weight {version}"
        ):
            sharding(group)(maker("lfm2")(), whole())
        model = maker("mamba2")()
        patch.setattr(mamba2, "split", lambda x: x, raising=False)  # a name in the layer's forward
        unknown = r"backbone.layers.0.mixer calls split, which spar does not know"
        with pytest.raises(ValueError, match=unknown):
            sharding(group)(model, whole())


def test_other_versions_of_transformers(pool: Ranks) -> None:
    pool(2, check_versions)
