# SPDX-License-Identifier: Apache-2.0
"""Windows, chunks, blocks, padding, sinks and softcap: as one process, and without S x S masks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ranks
from helpers import llms
from helpers.llms import (
    ROWS,
    check_exact,
    check_gradients,
    compared,
    even,
    gradients_of_one_process,
    left_padded,
    maker,
    meshes,
    packed,
    packed_rows,
    rows,
    seeded,
    sharding,
    whole,
    zigzag,
)
from helpers.whole_attention import METHODS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import masking_utils

import spar
from spar._attention import mask_functions
from spar.integrations._transformers.masks import WHOLE
from spar.integrations.transformers import register, shard

pytestmark = pytest.mark.long

PRELOAD = [*llms.PRELOAD, "torch.distributed.fsdp"]
POOL = (2, 3, 4)
WORLDS = (2, 3)
Group = dist.ProcessGroup


# ---- models ----

MIXED = llms.MIXED
ROUNDING = 3e-5  # of eager attention in float32: the gradient of a bias of keys is almost 0
MIMO: dict[str, Any] = {"v_head_dim": 6, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("Mistral", {"sliding_window": 9}),
    "windows in some layers": ("Gemma3", MIXED),
    "chunks in some layers": (
        "Llama4",
        llms.OTHERS["Llama4"] | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
    "softcap": ("Gemma2", MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "another softcap": ("VaultGemma", MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "sinks": ("GptOss", MIXED | {"num_local_experts": 4}),
    "sinks in some layers": ("MiMoV2Flash", MIXED | MIMO | llms.ROUTED | {"moe_intermediate_size": 16}),
    "sinks and windows": ("GraniteMoeSWA", MIXED),
}


def with_sinks(make: Callable[[], Any]) -> Callable[[], Any]:
    """Draw the sinks: models begin with zeros, or with numbers that change nothing."""

    def made() -> Any:
        model = make()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(parameter)
        return model

    return made


def padded() -> dict[str, Tensor]:
    """Return a batch with padding behind the first sample, and in the middle of the second."""
    batch = whole()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 30:] = 0
    mask[1, 4:9] = 0
    mask[1, 20:22] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def check_left_padded(make: Callable[[], Any], group: Group) -> None:
    """Compare what padding does not change: eager attention has a mean of values where there are no keys."""
    batch = left_padded()
    batch["labels"][0, 11] = -100  # padding predicts it
    report = compared(make, batch, group)
    for entry in report.entries:
        assert entry.name == "logits" or entry.max_rel_error < ROUNDING, f"{entry}\n{report}"


def check_model(rank: int, world: int, group: Group, name: str) -> None:
    kind, config = MODELS[name]
    make = with_sinks(maker(kind, **config))
    batches, documents = [whole(), padded()], packed(5, 20, 4, 12)
    if kind != "GptOss":
        batches.append(packed_rows())
    for place, (method, batch) in enumerate(product(METHODS, batches)):
        layout = (even, zigzag)[(place + world) % 2]  # the other one on another number of ranks
        check_exact(make, batch, group, ROUNDING, method=method, layout=layout)
    check_left_padded(make, group)
    if kind == "GptOss":
        with pytest.raises(ValueError, match=r"GptOss.* passes no position_ids to its masks"):
            sharding(group)(make(), documents)
        return
    for method in METHODS:
        check_exact(make, documents, group, ROUNDING, method=method)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_masks_are_exact(pool: Ranks, name: str, world: int) -> None:
    pool(world, check_model, name)


def check_features(rank: int, world: int, group: Group) -> None:
    """Without its window, its softcap or its sinks a model has another loss: the checks above can fail."""
    for name, change in (
        ("windows", {"sliding_window": None}),
        ("chunks in some layers", {"layer_types": ["full_attention"] * 2}),
        ("softcap", {"attn_logit_softcapping": None}),
    ):
        kind, config = MODELS[name]
        losses = [
            float(seeded(maker(kind, **config | other), "eager")(**whole()).loss.detach())
            for other in ({}, change)
        ]
        assert abs(losses[0] - losses[1]) > 1e-3, (name, losses)
    model = seeded(with_sinks(maker("GptOss", **MODELS["sinks"][1])), "eager")
    before = float(model(**whole()).loss.detach())
    for layer in model.model.layers:
        nn.init.constant_(layer.self_attn.sinks, -100.0)
    assert abs(before - float(model(**whole()).loss.detach())) > 1e-3


def test_features_change_the_loss(pool: Ranks) -> None:
    pool(2, check_features)


# ---- training ----


def check_checkpointing(rank: int, world: int, group: Group, reentrant: bool) -> None:
    for name in ("windows", "softcap", "sinks"):
        kind, config = MODELS[name]

        def checkpointed(kind: str = kind, config: dict[str, Any] = config) -> Any:
            model = with_sinks(maker(kind, **config))()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            return model

        for method in METHODS:
            check_exact(checkpointed, padded(), group, ROUNDING, method=method, layout=zigzag)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(pool: Ranks, reentrant: bool) -> None:
    pool(2, check_checkpointing, reentrant)


def check_compiled(rank: int, world: int, group: Group, name: str, method: str) -> None:
    """Each length has other documents, or other padding."""
    kind, config = MODELS[name]
    layers = len(config.get("layer_types", [name]))  # one of each kind: another would be traced as the first
    model = seeded(with_sinks(maker(kind, **config, num_hidden_layers=layers)), "spar")
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for total in (24, 29, 29, 37):
        batch = whole(2, total)
        if kind == "GptOss":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, total - 5 :] = 0
        else:
            cuts = (total // 3, total // 2)
            positions = [torch.cat([torch.arange(cut), torch.arange(total - cut)]) for cut in cuts]
            batch["position_ids"] = torch.stack(positions)
        part = shard(forward, batch, zigzag(total, group), group=group, token_group=group, method=method)
        found = []
        for run in (model, forward):
            model.zero_grad()
            loss = run(**part).loss
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([loss.detach(), *[g.clone() for g in gradients]])
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs in (1, 2), graphs


@pytest.mark.parametrize(
    ("name", "method"),
    [("windows", "ring"), ("softcap", "ulysses"), ("sinks and windows", "gather")],
)
def test_compiled_models_make_two_graphs(pool: Ranks, name: str, method: str) -> None:
    pool(2, check_compiled, name, method, timeout=280)


def check_wrapped(rank: int, world: int, group: Group) -> None:
    """DDP, and FSDP2 with checkpointing, of dp 2 x cp 2; samples of a rank have documents of their own."""
    mesh, dp, cp = meshes()
    documents = torch.stack([llms.restarts(i + 3, 20, 14 - i) for i in range(ROWS)])
    for name, entries in (("windows", {"position_ids": documents}), ("softcap", {}), ("sinks", {})):
        kind, config = MODELS[name]
        make, batch = with_sinks(maker(kind, **config)), whole(ROWS) | entries
        expected = gradients_of_one_process(make, batch, attention="eager")
        for over in (None, mesh._flatten("world")):
            model: Any = seeded(make, "spar")
            if over is None:
                model = DistributedDataParallel(model)
            else:
                model.gradient_checkpointing_enable()
                for layer in (*model.model.layers, model):
                    fully_shard(layer, mesh=over)
            part = shard(model, rows(batch, dp), group=cp, token_group=dp)
            (model(**part).loss * world).backward()
            check_gradients(model, expected, ROUNDING)


def test_ddp_and_fsdp2(pool: Ranks) -> None:
    pool(4, check_wrapped)


# ---- masks of transformers ----


def both_masks(config: Any, create: Callable[..., Any], **given: Any) -> tuple[Any, Tensor | None]:
    """Return what transformers asks of spar, and the booleans that it makes for sdpa."""
    register()
    found = []
    for name in (WHOLE, "sdpa"):
        config._attn_implementation_internal = name
        embeds = torch.empty(2, TOTAL, 0)
        found.append(create(config=config, inputs_embeds=embeds, past_key_values=None, **given))
    return found[0], found[1]


TOTAL = 37
KEYS = padded()["attention_mask"]
LEFT = left_padded()["attention_mask"]
DOCUMENTS = packed_rows()["position_ids"]
RUNS = torch.tensor([[-1] * 5 + [0] * 7 + [-1] * 3 + [1] * 9 + [2] * 13, [0] * 20 + [-1] * 17])
REPEATED = torch.tensor([[-1] * 5 + [0] * 7 + [-1] * 3 + [0] * 9 + [1] * 13, [-1] * 37])


def prefix(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query < 9) & (key < 9)


def one_by_one(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Read a table with an index at a time, as a function of a user's may."""
    assert query.dim() == 0 and key.dim() == 0
    return torch.stack([RUNS[batch, query], RUNS[batch, key]]).eq(1).all()


CREATED: dict[str, tuple[str, dict[str, Any]]] = {
    "padding": ("create_causal_mask", {"attention_mask": KEYS}),
    "left padding": ("create_causal_mask", {"attention_mask": LEFT}),
    "documents": ("create_causal_mask", {"position_ids": DOCUMENTS}),
    "blocks": ("create_causal_mask", {"block_sequence_ids": RUNS}),
    "blocks and padding": ("create_causal_mask", {"block_sequence_ids": RUNS, "attention_mask": KEYS}),
    "blocks of one number": ("create_causal_mask", {"block_sequence_ids": REPEATED}),
    "or": ("create_causal_mask", {"or_mask_function": prefix}),
    "and": ("create_causal_mask", {"and_mask_function": one_by_one, "attention_mask": KEYS}),
    "window": ("create_sliding_window_causal_mask", {}),
    "window, padding": ("create_sliding_window_causal_mask", {"attention_mask": KEYS}),
    "window, documents": ("create_sliding_window_causal_mask", {"position_ids": DOCUMENTS}),
    "window, or": ("create_sliding_window_causal_mask", {"or_mask_function": prefix}),
    "window, blocks": ("create_sliding_window_causal_mask", {"block_sequence_ids": RUNS}),
    "chunks": ("create_chunked_causal_mask", {}),
    "chunks, left padding": ("create_chunked_causal_mask", {"attention_mask": LEFT}),
    "chunks, documents": ("create_chunked_causal_mask", {"position_ids": DOCUMENTS}),
}


@pytest.mark.parametrize("name", CREATED)
def test_spans_are_transformers_booleans(name: str) -> None:
    function, given = CREATED[name]
    config = transformers.MistralConfig(sliding_window=9)
    config.attention_chunk_size = 16
    wanted, booleans = both_masks(
        config, getattr(masking_utils, function), **{"attention_mask": None, **given}
    )
    assert booleans is not None
    spans = wanted.spans(None)
    assert spans.dense().expand_as(booleans).equal(booleans)
    assert spans.ends.nbytes <= 2 * 8 * TOTAL * (3 if "attention_mask" in given or name == "or" else 2)


def test_plain_causal_masks_are_none() -> None:
    config = transformers.MistralConfig(sliding_window=TOTAL)
    for function in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        for mask in (None, torch.ones(2, TOTAL, dtype=torch.int64)):
            assert both_masks(config, function, attention_mask=mask)[0] is None


def test_functions_of_transformers_are_called_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each pair: about 2 log2 S calls of S elements."""
    monkeypatch.setattr(mask_functions, "_PAIRS", 1)
    calls = []

    def counted(function: Any) -> Any:
        def called(*indices: Tensor) -> Any:
            calls.append(1)
            return function(*indices)

        return called

    config = transformers.MistralConfig(sliding_window=512)
    register()
    config._attn_implementation_internal = WHOLE
    wanted = masking_utils.create_sliding_window_causal_mask(
        config=config, inputs_embeds=torch.empty(1, 4096, 0), attention_mask=None, past_key_values=None
    )
    spans = wanted._replace(function=counted(wanted.function)).spans(None)
    assert len(calls) < 30
    assert spans.ends[0, 0, 4095].tolist() == [4096 - 512, 4096]


# ---- functions of users, and what shard returns ----


class PrefixLlama(transformers.LlamaForCausalLM):
    """A user's model, in which the first tokens see each other: its masks need all pairs."""

    config_class = transformers.LlamaConfig

    @staticmethod
    def create_masks_for_generate(**given: Any) -> Any:
        return masking_utils.create_causal_mask(**given, or_mask_function=prefix)


class ImageGemma(transformers.Gemma3ForCausalLM):
    """The text model of Gemma 3 with the masks of the whole one: images see themselves."""

    create_masks_for_generate = staticmethod(
        transformers.Gemma3ForConditionalGeneration.create_masks_for_generate
    )


def check_own_functions(rank: int, world: int, group: Group) -> None:
    types = (RUNS >= 0).long()
    for kind, entries in ((PrefixLlama, {}), (ImageGemma, {"token_type_ids": types})):
        name = kind.__name__
        setattr(transformers, name, kind)
        make, batch = maker(name, **MIXED if kind is ImageGemma else {}), whole()
        config = make().config
        _, masks = both_masks(
            config, kind.create_masks_for_generate, attention_mask=None, position_ids=None, **entries
        )
        alone = seeded(make, "sdpa")
        loss = alone(**batch, attention_mask=masks).loss
        assert abs(float(loss.detach() - alone(**batch).loss.detach())) > 1e-3
        loss.backward()
        expected = {name: p.grad for name, p in alone.named_parameters()}
        for layout in (even, zigzag):
            model = seeded(make, "spar")
            part = sharding(group, layout=layout)(model, batch | entries)
            part.pop("token_type_ids", None)
            model(**part).loss.backward()
            for p in model.parameters():
                p.grad = spar.all_gather(p.grad[None], group).sum(0)
            check_gradients(model, expected)


@pytest.mark.parametrize("world", WORLDS)
def test_functions_of_users_are_exact(pool: Ranks, world: int) -> None:
    pool(world, check_own_functions)


def check_own_spans(rank: int, world: int, group: Group) -> None:
    """Spans of the caller's are the tensor of the same booleans."""
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 20, 12]))
    spans = spar.Spans.causal(TOTAL) & spar.Spans.documents(documents)
    kinds = {"full_attention": spans, "sliding_attention": spans & spar.Spans.window(TOTAL, 6, 0)}
    dense = {kind: mask.dense() for kind, mask in kinds.items()}
    for name, config, *masks in (
        ("llama", {}, spans, spans.dense()),
        ("Gemma3", MIXED, kinds, dense),
        ("GptOss", MODELS["sinks"][1], kinds, dense),
    ):
        found = []
        for mask in masks:
            model = seeded(maker(name, **config), "spar")
            loss = model(**sharding(group)(model, whole() | {"attention_mask": mask})).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        torch.testing.assert_close(found[0], found[1])
        plain = model(**sharding(group)(model, whole())).loss
        assert abs(float(plain.detach() - loss.detach())) > 1e-3
    wrong = spar.Spans.causal(TOTAL - rank)
    with pytest.raises(spar.MismatchError, match=r"batch\['attention_mask'\] of ranks \[1\] differs"):
        sharding(group)(model, whole() | {"attention_mask": wrong})
    with pytest.raises(ValueError, match=r"is of shape \[1, 1, 36, 36\]; expected \[2, 37\]"):
        sharding(group)(model, whole() | {"attention_mask": spar.Spans.causal(36)})


def test_spans_of_the_caller(pool: Ranks) -> None:
    pool(2, check_own_spans)


def bytes_of(part: Any) -> int:
    """Return the bytes of all tensors in what shard returned, but for a rank's own tokens."""
    if isinstance(part, dict):
        return sum(bytes_of(x) for x in part.values())
    if isinstance(part, spar.Spans):
        return part.ends.nbytes + bytes_of(part._made)
    return part.nbytes if isinstance(part, Tensor) else 0


def check_memory(rank: int, world: int, group: Group) -> None:
    """Booleans of 65,536 x 65,536 take 4 GiB for each sample and kind of layers."""
    total = 65536
    ids = torch.ones(2, total, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[0, :1000] = 0
    positions = torch.stack([llms.restarts(40000, total - 40000), llms.restarts(100, total - 100)])
    sizes = {"sliding_window": 4096, "max_position_embeddings": total}
    for name, config in (("Mistral", {}), ("Gemma3", {"layer_types": MIXED["layer_types"]})):
        model = maker(name, **config | sizes)()
        for entries in ({}, {"attention_mask": mask}, {"position_ids": positions}):
            part = sharding(group)(model, {"input_ids": ids, "labels": ids} | entries)
            assert part["attention_mask"] is not None and bytes_of(part) < 8e6, (name, bytes_of(part))


def test_memory_of_long_masks(pool: Ranks) -> None:
    pool(2, check_memory)


def check_windows(rank: int, world: int, group: Group) -> None:
    for size in (0, -1, 2.5, True):
        model = maker("Mistral")()
        model.config.__dict__["sliding_window"] = size  # configs check types, and some classes do not
        with pytest.raises(
            ValueError, match=rf"config\.sliding_window is {size}; expected an int of at least 1"
        ):
            sharding(group)(model, whole())


def test_windows_without_a_key_are_refused(pool: Ranks) -> None:
    pool(2, check_windows)
