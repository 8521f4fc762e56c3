# SPDX-License-Identifier: Apache-2.0
"""Convolutions, linear attention and state spaces of transformers under spar.parallelize, as one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.compiled_blocks import graphs_of
from helpers.float64 import in_float64
from helpers.hybrid_models import (
    FEW,
    GATES,
    ONE_OF_EACH,
    POOL as POOL,
    PRELOAD as PRELOAD,
    ROUNDING,
    TYPES,
    maker,
    padded,
    sent,
)
from helpers.llms import whole
from helpers.view_masks import pair

import spar
from spar import SequenceLayout
from spar._model.part import Parts
from spar._model.view import View
from spar.integrations._transformers import mixers, tokens as tokens_module
from spar.integrations._transformers.tokens import Tokens

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
TOLERANCE = 1e-5
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def check_step(model: Any, one: Any, batch: dict[str, Any], group: Group, limit: float = TOLERANCE) -> None:
    """Compare the loss, the logits and all gradients with those of one process."""
    for each in (model, one):
        each.zero_grad()
    found, expected = model(**batch), one(**batch)
    found.loss.backward()
    expected.loss.backward()
    pairs = {"loss": (found.loss, expected.loss), "logits": (found.logits, expected.logits)}
    for (name, parameter), own in zip(model.named_parameters(), one.parameters(), strict=True):
        if own.grad is not None:
            gradient = torch.zeros_like(own) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(gradient, group=group)
            pairs[name] = gradient / group.size(), own.grad
    for name, (x, y) in pairs.items():
        most = limit * ROUNDING / TOLERANCE if f"{name}.grad".endswith(GATES) else limit
        assert (x - y).abs().max() <= most * y.abs().max().clamp(min=1e-6 / most), name


def check_type(rank: int, world: int, group: Group, name: str, layout: str, config: dict[str, Any]) -> None:
    model, one = pair(maker(name, **config), group, torch.float32, layout=layout)
    # By state sums run in another order: as far from one process as that in float32 is from float64.
    limit = 3 * TOLERANCE if config else TOLERANCE
    check_step(model.train(), one.train(), whole(), group, limit)
    check_step(model, one, padded(), group, limit)


@pytest.mark.parametrize(
    "name, layout", [*((name, "zigzag") for name in TYPES), *((name, "even") for name in ONE_OF_EACH)]
)
def test_types_are_exact(pool: Ranks, name: str, layout: str) -> None:
    pool(3, check_type, name, layout, {})


@pytest.mark.parametrize("name", FEW)
def test_fewer_heads_than_ranks(pool: Ranks, name: str) -> None:
    pool(4, check_type, name, "zigzag", FEW[name])


# ---- by heads or by state ----


def check_float64(rank: int, world: int, group: Group, name: str, config: dict[str, Any]) -> None:
    def make() -> Any:
        model = maker(name, **config)().to(torch.float64)
        for module in model.modules():
            if hasattr(module, "decay_factors"):  # MiniMax's, which are buffers
                factors = module.decay_factors(module.slope_rate)
                module.query_decay, module.key_decay, module.diagonal_decay = factors
        if hasattr(model.config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")  # torch has no grouped products in float64
        return model

    with in_float64(type(make())):
        model, one = pair(make, group, torch.float64, layout="zigzag")
        check_step(model, one, padded(), group, 1e-10)


@pytest.mark.parametrize(
    "name, config",
    [("qwen3_next", {}), ("minimax", {}), ("jamba", {}), *FEW.items(), ("minimax", FEW_HEADS)],
)
def test_gates_in_float64(pool: Ranks, name: str, config: dict[str, Any]) -> None:
    pool(4, check_float64, name, config)


def check_moved(rank: int, world: int, group: Group, name: str) -> None:
    """States travel where heads are fewer than ranks, and tokens elsewhere."""

    def moved(total: int, config: dict[str, Any]) -> int:
        model, _ = pair(maker(name, **config), group, torch.float32, outputs="parts")
        ids = whole(1, total)["input_ids"]
        with torch.no_grad():
            model(input_ids=ids)
            before = sent()[0]
            model(input_ids=ids)
        return sent()[0] - before

    few, many = [moved(total, FEW[name]) for total in (40, 120)], [moved(total, {}) for total in (40, 120)]
    assert many[1] - many[0] > 1.5 * (few[1] - few[0])  # of states no more for more tokens


@pytest.mark.parametrize("name", FEW)
def test_what_travels(pool: Ranks, name: str) -> None:
    pool(4, check_moved, name)


def check_rule(rank: int, world: int, group: Group) -> None:
    def chosen(is_far: bool, total: int, heads: int = 4, kind: str = "even") -> bool:
        view = View(Parts(group, world, rank, layout=kind))
        part = view.parts.part(1, (total,))
        tokens = Tokens(view, part, view.parts.layout(part.lengths), None)
        x = torch.zeros(1, 1, heads, 8)
        hosts = tuple((peer,) for peer in range(world)) if is_far else (tuple(range(world)),)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokens_module, "hosts_of", lambda *_: hosts)
            return tokens.passes_states([x, x, torch.zeros(1, 1, heads)], heads * 8 * 16)

    # A token has heads * (3 * 8 + 1) numbers, a state heads * 128. Each of P - 1 states goes to P - 1 ranks,
    # and of S tokens (P - 1) / P to another one.
    most = 2 * 128 * (world - 1) * world // 25
    assert not chosen(True, most) and chosen(True, most + 1)
    assert not chosen(True, 2 * most, kind="zigzag") and chosen(True, 3 * most, kind="zigzag")
    for total in (world, 100 * most):
        assert not chosen(False, total) and chosen(False, total, heads=world - 1)
        assert chosen(True, total, heads=world - 1)


def test_states_travel_between_hosts_if_they_are_smaller(pool: Ranks) -> None:
    pool(3, check_rule)


# ---- training and generation ----


def check_recomputed(rank: int, world: int, group: Group, name: str, reentrant: bool) -> None:
    for config in (ONE_OF_EACH[name], FEW.get(name)):
        if config is None:
            continue
        model, one = pair(maker(name, **config), group, torch.float32, layout="zigzag")
        for each in (model, one):
            each.gradient_checkpointing_enable({"use_reentrant": reentrant})
            each.train()
            if reentrant:
                each.enable_input_require_grads()
        check_step(model, one, padded(), group, 3 * TOLERANCE)


@pytest.mark.parametrize("name, reentrant", [*zip(ONE_OF_EACH, (False, True, False, True), strict=True)])
def test_gradient_checkpointing(pool: Ranks, name: str, reentrant: bool) -> None:
    pool(3, check_recomputed, name, reentrant)


def check_autocast(rank: int, world: int, group: Group, name: str, config: dict[str, Any]) -> None:
    model, one = pair(maker(name, **config), group, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(**whole()), one(**whole())
    exact = one(**whole())
    found.loss.backward()
    off = (found.logits.float() - exact.logits).abs().max()
    assert off <= 2 * (expected.logits.float() - exact.logits).abs().max()  # as far as one process


@pytest.mark.parametrize("name, config", [*((name, {}) for name in ONE_OF_EACH), *FEW.items()])
def test_autocast(pool: Ranks, name: str, config: dict[str, Any]) -> None:
    pool(4, check_autocast, name, config)


def check_compiled(rank: int, world: int, group: Group, name: str, config: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, one = pair(maker(name, **config), group, torch.float32, layout="zigzag")
    report = vars(model)["_spar_view"].view.report
    model.compile(backend="aot_eager")
    for seed in range(2):
        batch = whole()
        ids = batch["input_ids"]
        ids.copy_(ids.flip(1) if seed else ids)
        check_step(model.train(), one.train(), batch, group, 3 * TOLERANCE)
    assert graphs_of(model) and not report.eager, report
    assert not [each for each in report.functions if each.in_block], report


def test_scans_are_nodes_of_compiled_blocks(pool: Ranks) -> None:
    pool(2, check_compiled, "bamba", ONE_OF_EACH["bamba"])


def check_generation(rank: int, world: int, group: Group, name: str) -> None:
    model, one = pair(maker(name, use_cache=True), group, torch.float32)
    ids = whole(2, 21)["input_ids"]
    given = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **given), one.generate(ids, **given))


@pytest.mark.parametrize(
    "name", ["qwen3_next", "bamba", "mamba", "lfm2", "minimax", "recurrent_gemma", "rwkv"]
)
def test_generation_goes_on_from_whole_states(pool: Ranks, name: str) -> None:
    pool(2, check_generation, name)


# ---- the functions of transformers ----


def check_functions(rank: int, world: int, group: Group) -> None:
    from transformers.models.bamba import modeling_bamba as module

    own = module.mamba2_chunk_scan
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(module.mamba2_chunk_scan is own)

    model, _ = pair(maker("bamba"), group, torch.float32)
    for each in model.modules():
        each.register_forward_pre_hook(look)
    model(**whole())
    assert not all(seen) and module.mamba2_chunk_scan is own
    seen.clear()
    spar.unparallelize(model)
    model(**whole())
    assert all(seen)


def test_functions_are_replaced_while_a_view_runs(pool: Ranks) -> None:
    pool(2, check_functions)


def check_other_parameters(rank: int, world: int, group: Group) -> None:
    """A function of another version runs as any code."""
    from transformers.models.mamba2 import modeling_mamba2 as module

    own = module.mamba2_chunk_scan

    def scan(
        x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, skip: Any = None, **others: Any
    ) -> Any:
        return own(x, dt, A, B, C, chunk_size, D=others.pop("D", skip), **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixers, "_served", {})
        patch.setattr(module, "mamba2_chunk_scan", scan)
        model, one = pair(maker("mamba2"), group, torch.float32)
        assert (module, "mamba2_chunk_scan") not in mixers._served
        assert (module, "causal_conv1d_fn") in mixers._served
        check_step(model.train(), one.train(), whole(), group)


def test_functions_with_other_parameters_are_left_alone(pool: Ranks) -> None:
    pool(2, check_other_parameters)


class Reversed(set[Any]):
    """A set whose order is another one than that of sorted strings."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), reverse=True))


def check_order(rank: int, world: int, group: Group) -> None:
    """Processes iterate over sets of strings in other orders, as their hashes differ."""
    from transformers.models.lfm3 import modeling_lfm3 as module

    own = Reversed if rank else set

    def make() -> Any:
        model = maker("lfm3")()
        model.model.kinds = {*model.config.layer_types}
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "set", own, raising=False)
        model, one = pair(make, group, torch.float32)
        assert [*model.model.kinds] == sorted(one.model.kinds)
        check_step(model.train(), one.train(), padded(), group)
        assert module.set is own
        spar.unparallelize(model)
        assert type(model.model.kinds) is set
    model, _ = pair(make, group, torch.float32)
    model(**whole())
    assert "set" not in vars(module)


def test_masks_are_made_in_one_order(pool: Ranks) -> None:
    pool(3, check_order)


def check_lightning(rank: int, world: int, group: Group) -> None:
    """A forward in place of the class's is called, and states that somebody reads are there."""
    calls = []

    def make() -> Any:
        model = maker("minimax")()
        layer = model.model.layers[0].self_attn
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return own(*args, **kwargs)

        layer.forward = forward
        return model

    model, one = pair(make, group, torch.float32)
    model(**whole())
    assert calls
    model, one = pair(maker("minimax"), group, torch.float32)
    found, expected = [each(**whole(), output_attentions=True).attentions for each in (model, one)]
    for x, y in zip(found, expected, strict=True):
        assert (x - y).abs().max() <= TOLERANCE * y.abs().max()


def test_lightning_attention_that_others_replace_or_read(pool: Ranks) -> None:
    pool(2, check_lightning)


def check_only_d(rank: int, world: int, group: Group) -> None:
    """By state, where a rank has no tokens, and its peers' results need a gradient of D alone."""

    def lay_out(batch: dict[str, Any]) -> SequenceLayout:
        total = batch["input_ids"].size(1)
        return SequenceLayout.of_runs([[(0, total)], *([[]] * (world - 1))], group)

    model, one = pair(maker("bamba", **FEW["bamba"]), group, torch.float32, layout=lay_out)
    for each in (model, one):
        for name, p in each.named_parameters():
            p.requires_grad = name.endswith(".D")
    check_step(model.train(), one.train(), whole(), group, 3 * TOLERANCE)


def test_only_d_learns(pool: Ranks) -> None:
    pool(4, check_only_d)
