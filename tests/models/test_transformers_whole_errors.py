# SPDX-License-Identifier: Apache-2.0
"""`shard(..., whole=)`: patterns, what cannot be gathered, and what refusals say of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import Ranks
from helpers import llms
from helpers.llms import left_padded, packed, seeded, sharding, whole
from helpers.whole_models import TYPES, check_exact, maker
from torch import Tensor, nn

import spar
from spar import MismatchError
from spar.integrations._transformers.whole import modules_of
from spar.integrations._transformers.whole_state import Carrying
from spar.integrations.transformers import shard

PRELOAD = llms.PRELOAD
POOL = (2, 3)
Group = llms.Group
LAYER = ["model.layers.1"]


# ---- patterns ----


def test_outermost_modules_of_patterns() -> None:
    model = maker("layers")()
    for patterns, paths in (
        (LAYER, ["model.layers.1"]),
        (["model.layers.*.self_attn"], ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
        (["*.q_proj", "model.layers.1"], ["model.layers.0.self_attn.q_proj", "model.layers.1"]),
        (["model.layers.*"], ["model.layers.0", "model.layers.1"]),  # not the list of them
        (["*"], ["model", "lm_head"]),
        ([], []),
        (None, []),
    ):
        assert list(modules_of(model, patterns)) == paths


def test_patterns_that_match_nothing() -> None:
    model = maker("layers")()
    near = (
        r"has 'model.layers.\*.self_atn', which matches no module of Qwen3ForCausalLM; .*Did you mean 'model"
    )
    with pytest.raises(ValueError, match=near + r".layers.\*.self_attn'"):
        modules_of(model, ["model.layers.*.self_atn"])
    with pytest.raises(ValueError, match=r"model.layers is a ModuleList, which is not called; pass 'model"):
        modules_of(model, ["model.layers"])
    for wrong in ("model.layers.1", [1], 3):
        with pytest.raises(TypeError, match=r"expected a list of patterns of module paths"):
            modules_of(model, wrong)


def check_ranks_differ(rank: int, world: int, group: Group) -> None:
    model = maker("layers")()
    for patterns in (LAYER if rank == 1 else None, LAYER if rank == 0 else ["model.layers.0"]):
        with pytest.raises(MismatchError, match=r"layout, method, scan or whole of ranks \[.*\] differs"):
            sharding(group, whole=patterns)(model, whole())
    with pytest.raises(MismatchError if rank == 0 else ValueError, match="matches no module"):
        sharding(group, whole=["model.layers.7"] if rank == 1 else LAYER)(model, whole())
    part = sharding(group, whole=LAYER if rank == 0 else None, check=False)(model, whole())
    with pytest.raises(MismatchError, match="calls differ"):
        model(**part)


def test_ranks_with_other_patterns(pool: Ranks) -> None:
    pool(2, check_ranks_differ)


def check_never_called(rank: int, world: int, group: Group) -> None:
    """Weights that another function takes: such a module's forward does not run."""
    check_exact("mamba", whole(), group, whole=["backbone.layers.*.mixer.conv1d"])


def test_modules_that_are_not_called(pool: Ranks) -> None:
    pool(2, check_never_called)


# ---- afterwards ----


def left_behind(model: nn.Module) -> list[str]:
    hooks = [
        f"{path}: {hook}"
        for path, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if "whole" in getattr(getattr(hook, "func", hook), "__module__", "")
    ]
    checkpoints = [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()]
    return hooks + [str(x) for x in checkpoints if isinstance(x, Carrying)]


def check_replaced(rank: int, world: int, group: Group) -> None:
    model = seeded(maker("layers"), "spar")
    model.gradient_checkpointing_enable()
    expected = seeded(maker("layers"), "sdpa")(**whole()).logits
    counts = []
    for patterns in (LAYER, LAYER, ["model.layers.0.self_attn"], None):
        part = sharding(group, whole=patterns)(model, whole())
        logits = part["layout"].gather(model(**part).logits.detach(), 1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        counts.append(len(left_behind(model)))
    assert counts[0] == counts[1] == counts[2] > 0 == counts[3]


def test_next_call_replaces_modules(pool: Ranks) -> None:
    pool(2, check_replaced)


def check_after(rank: int, world: int, group: Group) -> None:
    """In the same process a model still runs whole sequences, generates, and is copied."""
    for name in ("layers", "deepseek_v32", "rwkv", "recurrent_gemma"):
        alone, model = maker_of_one(name), maker_of_one(name)
        with torch.no_grad():
            model(**sharding(group, whole=TYPES[name][2])(model, whole()))
        ids = whole(1, 12)["input_ids"]
        if name != "rwkv":
            model.set_attn_implementation("sdpa")
        settings: dict[str, Any] = {"max_new_tokens": 5, "use_cache": True, "do_sample": False}
        expected = alone.generate(ids, **settings)
        for other in (model, copy.deepcopy(model)):
            assert other.generate(ids, **settings).equal(expected)
        found = model.train()(**whole()).loss
        torch.testing.assert_close(found, alone.train()(**whole()).loss)


def maker_of_one(name: str) -> Any:
    return seeded(maker(name), "eager" if name == "rwkv" else "sdpa").eval()


def test_whole_sequences_afterwards(pool: Ranks) -> None:
    pool(2, check_after)


def check_copied(rank: int, world: int, group: Group) -> None:
    """A copy runs its own parameters, and is sharded itself."""
    model = seeded(maker("layers"), "spar")
    part = sharding(group, whole=LAYER)(model, whole())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert model(**part).logits.abs().max() > 0 and other(**part).logits.abs().max() == 0
    assert other.config._attn_implementation == model.config._attn_implementation == "spar"


def test_copies(pool: Ranks) -> None:
    pool(2, check_copied)


def check_failure(rank: int, world: int, group: Group) -> None:
    """After an error inside of a module the attention is as before."""
    model = seeded(maker("layers"), "spar")
    part = sharding(group, whole=LAYER)(model, whole())
    expected = model(**part).logits.detach()
    handle = model.model.layers[1].mlp.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(**part)
    handle.remove()
    assert model.config._attn_implementation == "spar"
    torch.testing.assert_close(model(**part).logits, expected)


def fails(module: nn.Module, args: Any) -> None:
    raise RuntimeError("on purpose")


def test_failures_inside(pool: Ranks) -> None:
    pool(2, check_failure)


# ---- arguments and outputs ----


class Mixed(nn.Module):
    """A module that mixes tokens, with other arguments and outputs around them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor, other: Any = None, **kwargs: Any) -> Any:
        y = self.linear(x).cumsum(1)
        return {"tokens": y, "total": y.sum(), "kept": y.detach().sum(), "none": None, "number": 3}


class Wrapped(nn.Module):
    """A norm that calls another module, and uses what the test says of its outputs."""

    def __init__(self, norm: nn.Module, size: int, given: Any, uses: str) -> None:
        super().__init__()
        self.norm, self.mixed, self.given, self.uses = norm, Mixed(size), given, uses

    def forward(self, x: Tensor) -> Tensor:
        given = self.given(x) if callable(self.given) else self.given
        result = self.mixed(self.norm(x), **given)
        return result["tokens"] + (result[self.uses] if self.uses else 0)


def wrapped(given: Any = None, uses: str = "") -> Any:
    model = seeded(maker("layers"), "sdpa")
    model.model.norm = Wrapped(model.model.norm, 32, given or {}, uses)
    return model


def check_arguments(rank: int, world: int, group: Group) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda x: {"other": x[:, :, :8].transpose(1, 2)}, r"other is of shape \[2, 8, 1.\], and it is not"),
        (lambda x: {"other": x[..., None].flatten(0, 1)}, r"other is of shape \[\d+, 32, 1\], and it is not"),
        (lambda x: {"position_ids": x[:, :3]}, r"position_ids is of shape \[2, 3, 32\]; expected \[..., S_l"),
        (lambda x: {"mask": x}, r"mask is of shape \[2, 1., 32\]; expected a mask of shard"),
        (
            {"attention_mask": torch.ones(2, 1, 12, 12)},
            r"attention_mask is of shape \[2, 1, 12, 12\]; expect",
        ),
        (
            {"other": transformers.DynamicCache()},
            r"other is a DynamicCache; expected tensors, masks of shard",
        ),
        (lambda x: {"other": (x, {"seq_len": 12})}, r"seq_len'\] is 12; expected none: it may be the number"),
        ({"seq_len": 12}, r"seq_len is 12; expected none: it may be the number of own tokens, or of all"),
    ]
    for given, message in wrong:
        model = wrapped(given)
        part = sharding(group, whole=["model.norm.mixed"])(model, whole())
        with pytest.raises((ValueError, MismatchError), match=rf"whole model.norm.mixed on rank .*{message}"):
            model(**part)
    model = wrapped(lambda x: {"other": x[:, :, 0]})
    part = sharding(group, whole=["model.norm.mixed"])(model, whole(2, 16))  # 8 own tokens, 8 heads
    with pytest.raises(
        ValueError, match=r"not clear .*: the model's config has 8, too; .* Name a module around"
    ):
        model(**part)


def test_arguments_that_are_not_clear(pool: Ranks) -> None:
    pool(2, check_arguments)


def check_one_rank_fails(rank: int, world: int, group: Group) -> None:
    model = wrapped({"other": {3}} if rank == 1 else {})
    part = sharding(group, whole=["model.norm.mixed"])(model, whole())
    with pytest.raises(MismatchError if rank != 1 else ValueError, match="other is a set"):
        model(**part)


def test_arguments_of_one_rank(pool: Ranks) -> None:
    pool(3, check_one_rank_fails)


def check_outputs(rank: int, world: int, group: Group) -> None:
    """Nested outputs: those of tokens are cut, others are values without a gradient."""
    for uses in ("kept", ""):
        check_exact("layers", left_padded(), group, lambda uses=uses: wrapped(uses=uses), whole=["*.mixed"])
    model = wrapped(uses="total")
    part = sharding(group, whole=["*.mixed"])(model, whole())
    loss = model(**part).loss
    with pytest.raises(ValueError, match=r"\['total'\] of shape \[\] has a gradient, and it is the same on"):
        loss.backward()


def test_outputs_without_tokens(pool: Ranks) -> None:
    pool(2, check_outputs)


def check_wrong_outputs(rank: int, world: int, group: Group) -> None:
    for output, message in (
        (lambda x: x[:, 1:], r"its output is of shape \[2, 36, 32\]; expected \[B, 37, ...\], all tokens"),
        (lambda x: (x, x.flatten(0, 1)), r"output\[1\] is of shape \[74, 32\], which has all tokens"),
        (lambda x: (x, transformers.DynamicCache()), r"output\[1\] is a DynamicCache; expected tensors"),
        (lambda x: (None, 3), r"its output is tuple; expected a tensor \[B, S, ...\] first"),
    ):
        model = seeded(maker("layers"), "spar")
        model.model.norm.forward = output
        part = sharding(group, whole=["model.norm"])(model, whole())
        with pytest.raises(ValueError, match=message):
            model(**part)


def test_outputs_that_are_not_clear(pool: Ranks) -> None:
    pool(2, check_wrong_outputs)


def check_weights(rank: int, world: int, group: Group) -> None:
    """Attention weights of eager: the rows of own queries."""
    model = seeded(maker("eager"), "spar")
    part = sharding(group, whole=["model.layers.*.self_attn"])(model, whole())
    found = model(**part, output_attentions=True).attentions
    expected = seeded(maker("eager"), "eager")(**whole(), output_attentions=True).attentions
    for mine, all_rows in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, part["layout"].shard(all_rows.detach(), 2), rtol=1e-4, atol=1e-6)


def test_attention_weights(pool: Ranks) -> None:
    pool(2, check_weights)


def check_router(rank: int, world: int, group: Group) -> None:
    config = {"output_router_logits": True, "router_aux_loss_coef": 1.0, **llms.EXPERTS}
    make = llms.maker("Qwen3Moe", **config)
    with pytest.raises(ValueError, match=r"whole has model.layers.1, with a Qwen3MoeTopKRouter in it"):
        sharding(group, whole=LAYER)(make(), whole())
    check_exact("layers", left_padded(), group, make, whole=["model.layers.1.self_attn"])


def test_router_logits(pool: Ranks) -> None:
    pool(2, check_router)


# ---- refusals ----


def check_refusals(rank: int, world: int, group: Group) -> None:
    """Without whole they name it; with some of the modules they name the others."""
    for name, patterns in (
        ("recurrent_gemma", ["model.layers.*.temporal_block"]),
        ("rwkv", ["rwkv.blocks.*.attention", "rwkv.blocks.*.feed_forward"]),
        ("xlstm", ["backbone.blocks.*.mlstm_layer"]),
        ("zaya", ["model.layers.*.self_attn"]),
        ("qwen4_exp", ["model.layers.*.self_attn"]),
        ("deepseek_v32", ["model.layers.*.self_attn"]),
        ("doge", ["model.layers.*.self_attn"]),
    ):
        model = maker(name)()
        with pytest.raises(
            ValueError, match=r"cannot run over a sharded sequence: .*slower, exact\)"
        ) as caught:
            sharding(group)(model, whole())
        assert f"Pass whole={patterns} to run it on the whole sequence on each rank" in str(caught.value)
        shard(model, whole(), group=group, token_group=group, whole=patterns)
    for name, patterns in (
        ("rwkv", ["rwkv.blocks.*.attention"]),
        ("xlstm", ["backbone.blocks.0"]),
        ("zaya", ["model.layers.*.mlp"]),
        ("zaya", ["model.layers.0.self_attn"]),
        ("deepseek_v32", ["model.layers.*.self_attn.indexer"]),
        ("with embeddings of n-grams", ["model.layers.*.self_attn"]),
        ("recurrent_gemma", ["model.layers.*.temporal_block.rg_lru"]),
    ):
        with pytest.raises(ValueError, match=r"cannot run over a sharded sequence: .*Pass whole="):
            sharding(group, whole=patterns)(maker(name)(), whole())


def test_refusals_name_the_way_out(pool: Ranks) -> None:
    pool(2, check_refusals)


def check_still_refused(rank: int, world: int, group: Group) -> None:
    """Models that build masks, or biases, for attention code of their own."""
    for name, config, pattern in (
        ("FalconForCausalLM", {"alibi": False}, "transformer.h.*.self_attention"),
        ("BloomForCausalLM", {}, "transformer.h.*.self_attention"),
    ):
        model = llms.maker(name, **config)()
        with pytest.raises(ValueError, match="attention code of their own") as caught:
            sharding(group, whole=[pattern])(model, {"input_ids": whole()["input_ids"]})
        assert "Pass whole" not in str(caught.value)


def test_models_that_stay_refused(pool: Ranks) -> None:
    pool(2, check_still_refused)


def check_alone(rank: int, world: int, group: Group) -> None:
    """A module that runs on its shard is wrong, and the comparison of the other tests shows it."""
    from spar.integrations._transformers import whole as hooks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "install", lambda model, modules: None)
        patch.setattr("spar.integrations._transformers.sharding.install", hooks.install)
        with pytest.raises(AssertionError, match=r"max_rel_error=[0-9.]+[,e]"):
            check_exact("rwkv", whole(), group, tolerance=0.05)


def test_shards_alone_are_wrong(pool: Ranks) -> None:
    pool(2, check_alone)


def check_recipe(rank: int, world: int, group: Group) -> None:
    model = seeded(maker("deepseek_v32"), "spar")
    names = {"spar": spar, "model": model, "batch": whole(), "cp": group, "dp": group}
    exec(llms.recipe("hybrid.md", "whole=["), names)
    assert model(**names["batch"]).loss > 0 and left_behind(model)


def test_recipe(pool: Ranks) -> None:
    pool(2, check_recipe)


def check_padding_of_documents(rank: int, world: int, group: Group) -> None:
    """Masks of padding stay as they are where documents are packed."""
    for name in ("zaya", "its projections alone"):
        check_exact(name, packed(5, 1, 18, 2, 11), group)
    assert spar.integrations.transformers.shard is shard


def test_documents_beside_convolutions(pool: Ranks) -> None:
    pool(3, check_padding_of_documents)
