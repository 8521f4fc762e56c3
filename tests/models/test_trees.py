# SPDX-License-Identifier: Apache-2.0
"""Stock models over prefix trees, sharded: losses and gradients of the separate samples in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks, ranks_of_world
from helpers import hybrid_models
from helpers.llms import EXPERTS, MIXED, check_gradients, maker, meshes, recipe, seeded
from helpers.view_masks import pair
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface
from transformers.models.mamba import modeling_mamba

import spar
from spar.data import PrefixTree
from spar.integrations._transformers.tokens import Tokens

PRELOAD = [
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "llama",
        "mistral",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3",
        "gpt_oss",
        "llama4",
        "mixtral",
        "jamba",
    )
]
pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    yield from ranks_of_world(4)


LIMIT = 2e-6  # models compute rotary positions and norms in float32
# Two prompts: one with samples that part again inside of responses, or end where others go on.
PROMPT = [*range(1, 20)]
SAMPLES = [
    [*PROMPT, 30, 31, 32, 33, 34, 35],
    [*PROMPT, 30, 31, 40, 41],
    [*PROMPT, 30, 31],
    [*PROMPT, 50, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
    [2, 4, 6, 8, 10, 12],
    [2, 4, 6, 9, 10],
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {}),
    "window in some layers": ("windows in some layers", {}),
    "eager": ("qwen3", {"attn_implementation": "eager"}),
    "experts": ("qwen3 moe", {}),
    "softcap": ("Gemma2", MIXED | {"query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3", MIXED | {"query_pre_attn_scalar": 8}),
    "sinks": ("GptOss", MIXED | EXPERTS | {"num_local_experts": 4}),
    "chunks": ("Llama4", {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 4}),
}


def given() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return ids, which tokens count, and old log-probabilities, of each sample."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.tensor(each) for each in SAMPLES]
    masks = [torch.rand(len(each), generator=generator) < 0.7 for each in SAMPLES]
    old = [torch.randn(len(each), generator=generator, dtype=torch.float64) - 4 for each in SAMPLES]
    return ids, masks, old


def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) + 0.1 * logprobs.square()


ADVANTAGES = torch.linspace(-1, 1, len(SAMPLES), dtype=torch.float64)


def separate(model: Any, by: str) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all samples' next tokens, each sample run alone, and the loss."""
    every, losses = [], []
    for ids, mask, old, advantage in zip(*given(), ADVANTAGES, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits.double()
        found = logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        every.append(found)
        losses.append(loss_of(found, old[1:], advantage) * mask[1:])
    counts = torch.stack([mask[1:].sum() for mask in given()[1]])
    sums = torch.stack([each.sum() for each in losses])
    if by == "token":
        return torch.cat(every), sums.sum() / counts.sum()
    if by == "sample":
        return torch.cat(every), (sums / counts)[counts > 0].mean()
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    means = [sums[groups == i].sum() / counts[groups == i].sum() for i in (0, 1)]
    return torch.cat(every), torch.stack(means).mean()


def over_a_tree(
    model: Any,
    group: Group,
    by: Any,
    layout: str,
    has_edges: bool,
    own: slice = slice(None),
    world: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the same of a model over a group, of the samples that it has; world: all groups' ranks."""
    ids, masks, old = (each[own] for each in given())
    samples = PrefixTree(ids, group, layout=layout)
    tree = samples.trees[0]
    logits = model(**tree.batch(), use_cache=False).logits.double()
    if has_edges:
        edges = samples.edges(masks)
        logprobs, _ = spar.token_logprobs(edges.of(logits), edges.labels, edges.layout)
        logprobs = edges.expand(logprobs)
    else:
        logprobs, _ = spar.token_logprobs(logits, tree.shard_labels(), tree.layout)
        logprobs = tree.expand(logprobs)
    losses = loss_of(logprobs, samples.shard(old, shift=1), samples.shard(ADVANTAGES[own]))
    mask = samples.shard(masks, shift=1)
    groups = [0, 0, 0, 0, 1, 1] if by == "group" else None
    every = world or group
    loss = spar.masked_mean(losses, mask, tree.samples, by=by, groups=groups, group=every, averaged_by=every)
    whole = samples.unpack(logprobs.detach(), shift=1)
    return torch.cat([each[1:] for each in whole]), loss


def check(rank: int, world: int, group: Group, name: str, options: dict[str, Any]) -> None:
    kind, config = MODELS[name]
    check_model(group, maker(kind, **config), **options)


def check_model(
    group: Group,
    make: Any,
    by: str = "token",
    layout: str = "even",
    edges: bool = False,
    limit: float = LIMIT,
    **options: Any,
) -> None:
    model, one = pair(make, group, outputs="parts", **options)
    name = type(model).__name__
    for each in (model, one):
        if hasattr(each, "set_experts_implementation"):
            each.set_experts_implementation("eager")  # grouped products have no float64
    logprobs, loss = over_a_tree(model, group, by, layout, edges)
    expected, expected_loss = separate(one, by)
    if edges:
        counted = torch.cat([mask[1:] for mask in given()[1]])
        logprobs, expected = logprobs.where(counted, 0), expected.where(counted, 0)
    assert (logprobs - expected).abs().max() < limit * expected.abs().max(), name
    assert abs(loss - expected_loss) < limit * abs(expected_loss), (name, loss, expected_loss)
    loss.backward()
    expected_loss.backward()
    check_same_gradients(model, one, group, limit)


def check_same_gradients(model: Any, one: Any, group: Group, limit: float) -> None:
    most = max(p.grad.abs().max() for p in one.parameters() if p.grad is not None)
    for (where, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad, group=group)
        known = torch.zeros_like(q) if q.grad is None else q.grad
        assert (grad / group.size() - known).abs().max() < limit * most, (type(model).__name__, where)


@pytest.mark.parametrize("name", MODELS)
def test_models(pool: Ranks, name: str) -> None:
    pool(3, check, name, {})


@pytest.mark.parametrize(
    "options",
    [
        {"by": "sample", "method": "gather", "layout": "balanced"},
        {"by": "group", "method": "ring", "layout": "zigzag"},
        {"by": "sample", "method": "ring", "layout": "balanced", "edges": True},
        {"by": "token", "method": "ulysses", "layout": "balanced", "edges": True},
    ],
    ids=str,
)
def test_methods_and_layouts(pool: Ranks, options: dict[str, Any]) -> None:
    for name in ("llama", "window in some layers", "sinks"):
        pool(3, check, name, options)


def test_one_rank(pool: Ranks) -> None:
    for name in ("llama", "window", "chunks"):
        pool(1, check, name, {"by": "sample"})


def check_page(rank: int, world: int, group: Group) -> None:
    """The block of docs/trees.md."""
    ids, masks, _ = given()
    model, one = (seeded(maker("llama")).double() for _ in range(2))
    names = {"spar": spar, "model": model, "cp": group, "input_ids": ids, "rewards": ADVANTAGES}
    exec(recipe("trees.md", "PrefixTree"), names | {"completion_mask": masks})
    means = []
    for sample, mask, advantage in zip(ids, masks, ADVANTAGES, strict=True):
        logits = one(input_ids=sample[None], use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, sample[1:, None])[:, 0]
        means.append(-advantage * (logprobs * mask[1:]).sum() / mask[1:].sum())
    torch.stack(means).mean().backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        dist.all_reduce(p.grad, group=group)
        assert (p.grad / world - q.grad).abs().max() < LIMIT * q.grad.abs().max()


def test_the_pages_lines(pool: Ranks) -> None:
    pool(2, check_page)


# ---- training ----


def check_training(rank: int, world: int, group: Group) -> None:
    """Let data-parallel groups have other trees, with DDP or FSDP2 and checkpoints, or compiled."""
    mesh, dp, cp = meshes()
    whole = dist.group.WORLD
    own = slice(0, 4) if dp.get_local_rank() == 0 else slice(4, 6)
    one = seeded(lambda: maker("windows in some layers")().double())
    _, expected = separate(one, "sample")
    expected.backward()
    known = {name: p.grad for name, p in one.named_parameters()}
    for kind in ("ddp", "fsdp", "compiled"):
        model = seeded(lambda: maker("windows in some layers")().double())
        if kind == "fsdp":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh._flatten("all"))
            fully_shard(model, mesh=mesh["all"])
        model.gradient_checkpointing_enable({"use_reentrant": False})
        spar.parallelize(model, cp, outputs="parts")
        if kind == "compiled":
            model.gradient_checkpointing_disable()
            model.compile(backend="aot_eager")
        wrapped = model if kind == "fsdp" else DistributedDataParallel(model)
        _, loss = over_a_tree(wrapped, cp.get_group(), "sample", "balanced", False, own, whole)
        assert abs(loss - expected) < LIMIT * abs(expected)
        loss.backward()
        check_gradients(wrapped, known, LIMIT)


def test_training(four: Ranks) -> None:
    four(4, check_training)


# ---- layers without attention ----

ALONG = [
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "bamba", "falcon_h1"),
    *("granitemoehybrid", "nemotron_h", "zamba2", "mamba2", "lfm2", "lfm2_moe", "lfm3", "minimax"),
    *("jamba", "zamba", "mamba", "falcon_mamba"),
]
REFUSED = {  # type: the error
    "rwkv": "RWKV's attention runs along a sequence from its first token on",
    "recurrent_gemma": "which some layers of the RecurrentGemmaForCausalLM ignore",
}


def check_along(rank: int, world: int, group: Group, name: str, by_state: bool) -> None:
    """By heads or by state, whatever the sizes of states and tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokens, "passes_states", lambda *_: by_state)
        # Gates are in float32: `hybrid_models`.
        check_model(group, hybrid_models.maker(name), "sample", "balanced", limit=2e-5)


@pytest.mark.parametrize("name", ALONG)
def test_layers_without_attention(pool: Ranks, name: str) -> None:
    pool(3, check_along, name, False)


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "bamba", "minimax"])
def test_states_are_passed_between_ranks(pool: Ranks, name: str) -> None:
    pool(2, check_along, name, True)


def check_refused(rank: int, world: int, group: Group) -> None:
    batch = PrefixTree(SAMPLES, group).trees[0].batch()
    for name, error in REFUSED.items():
        model, _ = pair(hybrid_models.maker(name), group, torch.float32)
        with pytest.raises(ValueError, match=error):
            model(**batch, use_cache=False)
    model, one = pair(hybrid_models.maker("mamba"), group, torch.float32)
    with pytest.raises(ValueError, match=r"Mamba 1's scan with a cache .* expected use_cache=False"):
        model(**batch, use_cache=True)
    with pytest.raises(ValueError, match="the model's code reads its mask as a tensor"):
        one(**batch, use_cache=False)
    with pytest.MonkeyPatch.context() as patch:
        own = modeling_mamba.mamba_selective_scan
        patch.setattr(modeling_mamba, "mamba_selective_scan", lambda *args, **options: own(*args, **options))
        with pytest.raises(ValueError, match="all layers of the MambaForCausalLM ignore"):
            model(**batch, use_cache=False)
    model, _ = pair(maker("llama"), group)
    with pytest.raises(ValueError, match="labels are given with the mask of a prefix tree"):
        model(**batch, labels=batch["input_ids"], use_cache=False)
    with pytest.raises(ValueError, match="must be 2D"):
        model.generate(**batch, max_new_tokens=2)
    with pytest.raises(ValueError, match="position_ids are not given with the mask of a prefix tree"):
        model(batch["input_ids"], batch["attention_mask"], use_cache=False)
    few = PrefixTree([[1]], group).trees[0]
    with pytest.raises(ValueError, match="the prefix tree has 1 tokens; expected at least 2, one for each"):
        model(**few.batch(), use_cache=False)
    other = PrefixTree([each[: len(each) - (rank and i == 0)] for i, each in enumerate(SAMPLES)], group)
    with pytest.raises((ValueError, spar.MismatchError)):
        model(**other.trees[0].batch(), use_cache=False)
    model(**batch, use_cache=False)  # the group stays usable


def test_what_cannot_be_right_is_refused(pool: Ranks) -> None:
    pool(2, check_refused)


ALIBI = "the model's ALiBi counts places"
OWN = "reads the mask of a prefix tree in code of its own"
BY_PLACES: dict[str, tuple[str, dict[str, Any]]] = {  # models that would be wrong, and the error
    "BertForMaskedLM": ("lets tokens attend to later ones", {}),
    "GPTNeo": (OWN, {"num_heads": 4, "num_layers": 2, "attention_types": [[["local"], 2]], "window_size": 4}),
    "Mpt": (OWN, {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "Bloom": (ALIBI, {"n_head": 4, "n_layer": 2}),
    "Falcon": (ALIBI, {"alibi": True}),
    "Bart": (
        "no module of the BartForCausalLM takes any",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
    ),
}


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
    return out.transpose(1, 2).contiguous(), None


def check_by_places(rank: int, world: int, group: Group) -> None:
    batch = PrefixTree(SAMPLES, group).trees[0].batch()
    for name, (error, config) in BY_PLACES.items():
        model, _ = pair(maker(name, **config), group)
        with pytest.raises(ValueError, match=error):
            model(**batch, use_cache=False)
    # transformers makes no mask for an attention of the user's; the other layers run along the tree
    AttentionInterface.register("of a test", attend)
    model, _ = pair(hybrid_models.maker("bamba"), group)
    model.config._attn_implementation = "of a test"
    with pytest.raises(ValueError, match="did not get the mask of the prefix tree"):
        model(**batch, use_cache=False)


def test_models_that_count_places_are_refused(pool: Ranks) -> None:
    pool(2, check_by_places)


# ---- losses of routers ----

ROUTERS: dict[str, Any] = {
    "Qwen3-MoE": maker("qwen3 moe"),
    "Mixtral": maker("Mixtral", num_local_experts=4),
    "gpt-oss": maker(MODELS["sinks"][0], **MODELS["sinks"][1]),
    "Jamba": hybrid_models.maker("jamba"),
}


def check_routers(rank: int, world: int, group: Group, name: str, layout: str, checkpoints: bool) -> None:
    """One process has the padded samples, and their mask of padding."""
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
        for each in (given()[0], [torch.ones_like(x) for x in given()[0]])
    )
    tree = PrefixTree(SAMPLES, group, layout=layout).trees[0]
    model, one = pair(ROUTERS[name], group, outputs="parts")
    for each in (model, one):
        each.set_experts_implementation("eager")  # grouped products have no float64
        if checkpoints:
            each.train().gradient_checkpointing_enable({"use_reentrant": False})
    asked = {"use_cache": False, "output_router_logits": True}
    loss = model(**tree.batch(), **asked).aux_loss
    expected = one(input_ids=ids, attention_mask=mask, **asked).aux_loss
    assert abs(loss - expected) < LIMIT * expected
    loss.backward()
    expected.backward()
    check_same_gradients(model, one, group, LIMIT)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("world, layout, checkpoints", [(2, "even", False), (3, "balanced", True)])
def test_losses_of_routers(pool: Ranks, world: int, layout: str, checkpoints: bool, name: str) -> None:
    pool(world, check_routers, name, layout, checkpoints)


def check_uncounted(rank: int, world: int, group: Group) -> None:
    tree = PrefixTree(SAMPLES, group).trees[0]
    model, _ = pair(maker("qwen3 moe"), group, torch.float32)
    batch = tree.batch() | {"attention_mask": tree.spans() & spar.Spans.causal(tree.layout.total)}
    with pytest.raises(ValueError, match="does not say how often a token counts; expected the mask of"):
        model(**batch, use_cache=False, output_router_logits=True)


def test_router_loss_of_tokens_without_counts_is_refused(pool: Ranks) -> None:
    pool(2, check_uncounted)


# ---- memory ----


def check_memory(rank: int, world: int, group: Group) -> None:
    models = [pair(make, group)[0] for make in (maker("llama"), hybrid_models.maker("bamba"))]
    trees = []
    for i in range(9):
        tree = PrefixTree([[*each, i] for each in SAMPLES], group).trees[0]
        trees.append(weakref.ref(tree))
        for model in models:
            model(**tree.batch(), use_cache=False)
    del tree
    gc.collect()
    assert sum(each() is not None for each in trees) <= 5


def test_trees_of_earlier_steps_are_freed(pool: Ranks) -> None:
    pool(2, check_memory)
