# SPDX-License-Identifier: Apache-2.0
"""`spar plan`: its bytes are those that ranks count, its choice is spar.attention's, its work a mask's."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.launched import launch
from helpers.processes import finish, start
from helpers.traffic import sent
from helpers.whole_attention import inputs

import spar
from spar import SequenceLayout
from spar._attention import attention as attention_module
from spar._attention.blocks import blocks_of
from spar._attention.grid_methods import SHAPES
from spar._attention.travel import shifts_by_runs
from spar._commands.arguments import main
from spar._commands.plan import measure, ways as ways_module
from spar._commands.plan.decoders import TYPES
from spar._commands.plan.exchanges import Traffic, exchanged
from spar._commands.plan.layer import HYBRID, OF_DOCUMENTS, Layer, drawn_documents, placed
from spar._commands.plan.report import text_of
from spar._commands.plan.run import plan
from spar._commands.plan.ways import Way, evaluate, planned_ranks, recommended, ways_of, work_of
from spar._control.speeds import Speeds, read
from spar._exchange.layouts import shards
from spar.parallel_state import init_parallel_state
from spar.sequence_layout import numbers_of

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
WIDTH, BATCH = 8, 2  # as `inputs` has them
LENGTHS = (1, 30, 5, 1, 28)
BASE = Layer(
    heads=4,
    key_heads=2,
    width=WIDTH,
    value_width=WIDTH,
    tokens=65,
    ranks=2,
    layers=3,
    dtype=torch.float32,
    batch=BATCH,
    hidden=32,
    ring=1,
    ulysses=1,
    window=None,
    documents=(),
    causal=True,
)


@pytest.fixture(autouse=True)
def no_speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def layers(ranks: int) -> Iterator[Layer]:
    base = replace(BASE, ranks=ranks, ring=2 if ranks == 4 else 1, ulysses=2 if ranks == 4 else 1)
    yield base
    yield replace(base, causal=False, heads=6, key_heads=3)
    yield replace(base, heads=3, key_heads=1, dtype=torch.bfloat16)  # fewer than 4 ranks
    yield replace(base, window=7)
    yield replace(base, window=9, causal=False)
    yield replace(base, documents=LENGTHS)
    yield replace(base, documents=LENGTHS, window=4)
    yield replace(base, tokens=3)  # a rank without tokens


def real_traffic(layer: Layer, method: str | None, layout: SequenceLayout) -> tuple[int, int]:
    """Return the bytes that this rank sends in forward and in backward of a real attention."""
    whole = inputs(layer.tokens, layer.heads, layer.key_heads, layer.dtype, WIDTH)
    q, k, v, upper = [x[:, layout.index()].requires_grad_() for x in whole]
    ids = torch.arange(len(layer.documents)).repeat_interleave(torch.tensor(layer.documents).long())
    masked = layer.documents and layout.kind not in OF_DOCUMENTS
    window = None if layer.window is None else (layer.window - 1, 0 if layer.causal else layer.window - 1)
    before = sent()
    y = spar.attention(
        q,
        k,
        v,
        layout,
        causal=layer.causal,
        mask=spar.Spans.documents(ids) if masked else None,
        window=window,
        method=method,
    )
    forward = sent() - before
    torch.autograd.grad(y, (q, k, v), upper)
    return forward, sent() - before - forward


def made(layer: Layer, kind: str, group: Group) -> SequenceLayout:
    of_what: Any = layer.documents if kind in OF_DOCUMENTS else layer.tokens
    layout: SequenceLayout = getattr(SequenceLayout, kind)(of_what, group)
    return layout


def check_bytes(rank: int, world: int, group: Group) -> None:
    """On 2 ranks every second way of each layer, on 4 the others, each compared on two of them."""
    for i, layer in enumerate(layers(world)):
        for j, (method, kind) in enumerate(ways_of(layer)):
            if kind == HYBRID or (i + j + world // 2) % 2:
                continue
            if method in SHAPES and kind not in ("zigzag", "balanced"):
                continue
            layout = made(layer, kind, group)
            found = real_traffic(layer, method, layout)
            if world == 4 and (rank + (i + j) // 2) % 2:
                continue  # planning takes longer than the attention
            plan = exchanged(layer, method, kind, rank)
            assert found == (plan.forward, plan.backward), (layer, method, kind, plan, found)


def test_planned_bytes_are_those_which_ranks_count(ranks: Ranks) -> None:
    ranks(4, check_bytes)


def check_hybrid(rank: int, folder: Path) -> None:
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    cp = state.get_group("cp")
    assert cp is not None
    for layer in layers(4):
        layout = SequenceLayout.hybrid(layer.tokens, state)
        plan = exchanged(layer, HYBRID, HYBRID, cp.rank())
        found = real_traffic(layer, None, layout)
        assert found == (plan.forward, plan.backward), (layer, plan, found)
        assert placed(layer, HYBRID, cp.rank()).layout.sizes == layout.sizes


def test_planned_bytes_of_hybrid_layouts(tmp_path: Path) -> None:
    assert finish(start(check_hybrid, 4, tmp_path), 100) == [0] * 4


def check_choice(rank: int, world: int, group: Group) -> None:
    """Note which method spar.attention decides on where the caller names none.

    `check_bytes` compares the traffic of all ways: planning it here, too, would take most of the time.
    """
    used: list[str] = []

    def noting(name: str, method: Any) -> Any:
        def decide(problem: Any) -> Any:
            used.append(name)
            return method.decide(problem)

        return method._replace(decide=decide)

    methods = attention_module._METHODS
    originals = dict(methods)
    methods.update({name: noting(name, method) for name, method in originals.items()})
    try:
        for layer in layers(world):
            for kind in layer.kinds:
                real_traffic(layer, None, made(layer, kind, group))
                real = used.pop()
                with mock.patch.object(ways_module, "exchanged", return_value=Traffic(0, 0, 0)):
                    ways = [evaluate(layer, method, kind) for method in originals]
                assert [way.method for way in ways if way.default] == [real], (layer, kind)
                used.clear()
    finally:
        methods.update(originals)


@pytest.mark.parametrize("world", [2, 4])
def test_default_is_what_attention_chooses(ranks: Ranks, world: int) -> None:
    ranks(world, check_choice)


# ---- what a rank holds and computes ----


@pytest.mark.parametrize("world", [2, 3, 4])
def test_held_bytes(world: int) -> None:
    layer = replace(BASE, ranks=world, causal=False)
    token = 2 * BATCH * 2 * WIDTH * 4  # bytes of K and V
    for kind, rank in itertools.product(layer.kinds, range(world)):
        sizes = placed(layer, kind, rank).layout.sizes
        assert exchanged(layer, "gather", kind, rank).held == 65 * token
        # Of 4 query heads and 2 key heads a rank of 2 or more needs one key head; of 3 rank 0 needs one, too.
        assert exchanged(layer, "ulysses", kind, rank).held == 65 * token // 2
        others = [sizes[(rank - step) % world] for step in range(1, world)]
        two = max([sum(others[i : i + 2]) for i in range(max(len(others) - 1, 1))])
        assert exchanged(layer, "ring", kind, rank).held == two * token


def allowed(layer: Layer) -> torch.Tensor:
    """Return which keys each query attends to: booleans [S, S]."""
    place = torch.arange(layer.tokens)
    behind = place[:, None] - place
    result = behind >= 0 if layer.causal else torch.ones_like(behind, dtype=torch.bool)
    if layer.window is not None:
        result = result & (behind.abs() < layer.window)
    if layer.documents:
        ids = torch.arange(len(layer.documents)).repeat_interleave(torch.tensor(layer.documents))
        result = result & (ids[:, None] == ids)
    return result


@pytest.mark.parametrize("world", [2, 3, 4])
def test_work_is_that_of_a_mask(world: int) -> None:
    for layer in layers(world):
        pairs = allowed(layer).sum(1)
        for kind in layer.kinds:
            at = [placed(layer, kind, rank) for rank in range(world)]
            expected = [layer.heads * int(pairs[one.layout.index()].sum()) for one in at]
            assert work_of(layer, "gather", at[0].layout) == expected
            assert work_of(layer, "ring", at[0].layout) == expected
            by_heads = [n * int(pairs.sum()) for n in spar.cal_split_sizes(layer.heads, world)]
            assert work_of(layer, "ulysses", at[0].layout) == by_heads
            for method in SHAPES:
                assert sum(work_of(layer, method, at[0].layout)) == layer.heads * int(pairs.sum())
        if layer.ring > 1:
            at_hybrid = placed(layer, HYBRID, 0)
            work = work_of(layer, HYBRID, at_hybrid.layout)
            assert len(work) == world and sum(work) == layer.heads * int(pairs.sum())


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_work_is_that_of_the_blocks_of_a_ring(world: int, causal: bool) -> None:
    for kind in ("even", "zigzag", "packed", "balanced"):
        layer = replace(BASE, ranks=world, documents=LENGTHS, causal=causal)
        layout = placed(layer, kind, 0).layout
        if not layout.is_packed:
            layer = replace(layer, documents=())
        numbers = numbers_of(layout, 0)
        found = []
        for rank in range(world):
            held = shifts_by_runs(numbers, world, rank, causal, layout.is_packed).held
            steps = [blocks_of(held[0], keys, causal, layout.is_packed, True) for keys in held]
            blocks = [block for step in steps for block in step]
            found.append(sum(b.keys * (b.keys + 1) // 2 if b.causal else b.queries * b.keys for b in blocks))
        assert work_of(layer, "ring", layout) == [layer.heads * pairs for pairs in found]
        assert len(shards(numbers, world)) == world


@pytest.mark.parametrize("method", SHAPES)
def test_work_of_rows_and_columns_is_even(method: str) -> None:
    documents = drawn_documents(6400, 900)
    # Pairs of documents that lie on few ranks are met by few.
    balanced = 1.25 if method == "2d" else 1.06
    for kind, most in (("even", 1.07), ("zigzag", 1.01), ("balanced", balanced)):
        layer = replace(BASE, heads=8, tokens=6400, ranks=16, documents=documents * (kind in OF_DOCUMENTS))
        work = work_of(layer, method, placed(layer, kind, 0).layout)
        assert max(work) * 16 <= most * sum(work), (kind, max(work) * 16 / sum(work))


@pytest.mark.parametrize("kind", ["even", "zigzag"])
def test_figures_of_a_way(kind: str) -> None:
    """Bytes are of one rank, which sends the most in a step; other columns of the rank with the most."""
    layer = replace(BASE, ranks=4, tokens=66)
    of_ranks = [exchanged(layer, "ring", kind, rank) for rank in range(4)]
    way = evaluate(layer, "ring", kind)
    assert (way.forward, way.backward) == (of_ranks[way.rank].forward, of_ranks[way.rank].backward)
    assert way.step == 3 * (way.forward + way.backward)
    assert way.step == 3 * max(one.forward + one.backward for one in of_ranks)
    assert way.held == max(one.held for one in of_ranks) == of_ranks[way.held_rank].held
    assert (way.tokens, way.tokens_rank, way.activations) == (17, 0, 3 * BATCH * 17 * 32 * 4)
    assert (way.work_rank, way.work > 1.5) == ((3, True) if kind == "even" else (way.work_rank, False))
    assert evaluate(replace(layer, batch=6), "ring", kind).step == 3 * way.step


def test_plans_of_many_ranks_are_those_of_some() -> None:
    assert planned_ranks(16) == list(range(16))
    for world in (17, 64, 1000):
        few = planned_ranks(world)
        assert few[0] == 0 and few[-1] == world - 1 and len(set(few)) == 8


# ---- what is recommended ----


def way(method: str, step: int, work: float, held: int = 0) -> Way:
    return Way(method, "even", step=step, waited=step, work=work, held=held)


def test_recommended_sends_the_fewest_bytes_of_the_even_ways() -> None:
    ways = [way("a", 1, 1.9), way("b", 5, 1.0), way("c", 4, 1.04), way("d", 3, 1.06)]
    best, why = recommended([*ways, Way("e", "even", refused="no")])
    assert best.method == "c"
    assert why.startswith("Of the 2 ways whose busiest rank computes at most 1.05 times the mean, it sends")
    best, why = recommended([way("a", 4, 1.0, held=2), way("b", 4, 1.0, held=1)])
    assert best.method == "b" and why.endswith("none sends fewer bytes: 0 KB in a step.")
    best, why = recommended([way("a", 4, 1.0), replace(way("b", 3, 1.0), waited=5)])
    assert best.method == "a" and why.endswith("of the ranks that send the most in forward and in backward.")
    assert recommended(ways[:1]) == (
        ways[0],
        "It is the only way whose busiest rank computes at most 1.95 times the mean.",
    )


def test_plan_recommends_by_time() -> None:
    layer = replace(BASE, ranks=4, heads=4, key_heads=1)
    # Moving bytes takes all of the time, or computing.
    for speeds, is_ulysses in ((Speeds(1e15, 1e-9, 1e3), False), (Speeds(1e3, 1e-9, 1e15), True)):
        text = text_of(layer, plan(layer, speeds))
        assert "  time" in text and "It takes the least time by the measured speeds" in text
        assert ("method=" not in text) == is_ulysses, text


def test_heads_that_the_ranks_do_not_divide() -> None:
    few = evaluate(replace(BASE, ranks=4, heads=3, key_heads=1), "ulysses", "even")
    assert few.notes == (
        "ulysses: 1 of 4 ranks have none of 3 heads, and compute nothing",
        "ulysses: 1 key heads become 3, as several ranks need the same",
    )
    assert few.work == pytest.approx(4 / 3) and not few.default
    uneven = evaluate(replace(BASE, ranks=3, heads=4, key_heads=4), "ulysses", "even")
    assert uneven.notes == ("ulysses: each of 3 ranks has 1 or 2 of 4 heads",) and uneven.work == 1.5


def test_refused_ways_have_the_reason_of_attention() -> None:
    layer = replace(BASE, heads=4, key_heads=3)
    refused = evaluate(layer, "ring", "zigzag")
    assert refused.refused == "k is of 3 heads; expected a number that divides the 4 heads of q"
    text = text_of(layer, [way("gather", 8, 1.0), refused])
    assert "ring over zigzag is not possible: k is of 3 heads; expected" in text
    assert (
        'recommended: spar.attention(q, k, v, spar.SequenceLayout.even(65), causal=True, method="gat' in text
    )


def test_drawn_documents_fill_the_tokens() -> None:
    lengths = drawn_documents(100_000, 500)
    assert sum(lengths) == 100_000 and lengths == drawn_documents(100_000, 500)
    assert 400 < 100_000 / len(lengths) < 600 and min(lengths) >= 1


# ---- the command ----


def test_plan_prints_json_without_a_process_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--ranks", "4", "--documents", "300,40,60"]) == 0
    assert not dist.is_initialized()
    facts = json.loads(capsys.readouterr().out)
    assert facts["layer"]["tokens"] == 400 and facts["layer"]["dtype"] == "bfloat16"
    assert (facts["layer"]["ring"], facts["layer"]["ulysses"]) == (2, 2)
    assert facts["layer"]["hidden"] == 32 * 128 and facts["planned_ranks"] == [0, 1, 2, 3]
    kinds = {(way["method"], way["layout"]) for way in facts["ways"]}
    singles = set(itertools.product(attention_module.METHODS, ("even", "zigzag", "packed", "balanced")))
    assert kinds == singles | {("hybrid", "hybrid")}
    assert facts["recommended"]["layout"] in {kind for _, kind in kinds}


def test_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "4", "--tokens", "4000", "--heads", "2", "--width", "64", "--window", "100"]
    assert main(["plan", *arguments]) == 0 and not dist.is_initialized()
    text = capsys.readouterr().out
    assert text.startswith(
        "2 heads, 2 key heads, width 64, bfloat16, causal, window of 100 keys\n4,000 tokens"
    )
    assert "hybrid: 2 ring ranks x 2 ulysses ranks" in text and "gather *        even" in text
    assert "ulysses: 2 of 4 ranks have none of 2 heads, and compute nothing" in text
    call = "spar.attention(q, k, v, spar.SequenceLayout.even(4000), causal=True, window=(99, 0))"
    assert f"recommended: {call}\n" in text


def test_recommended_call_names_what_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "2", "--tokens", "4000", "--window", "100", "--no-causal", "--ulysses", "2"]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert 'SequenceLayout.even(4000), window=(99, 99), method="gather")' in text and "hybrid" not in text


def test_memory_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 32000, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ["plan", "--ranks", "2", "--tokens", "4096", "--model", str(tmp_path), "--shards", "4"]
    assert main([*given, "--device-memory", "0.5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 heads, 2 key heads, width 16, bfloat16") and "FSDP2 over 4 ranks" in text
    assert 'recommended: spar.parallelize(model, group, layout="zigzag", method="gather")\n' in text
    assert main([*given, "--json"]) == 0
    plain, checkpoints, tiles = json.loads(capsys.readouterr().out)["memory"]
    parameters = 2 * (3 * 64 * 160 + 2 * 6 * 16 * 64) + 2 * 32000 * 64
    assert plain["state"] == 4 * parameters and checkpoints["logits"] == 12 * 2048 * 32000
    assert plain["peak"] > checkpoints["peak"] > tiles["peak"]
    assert main(["plan", "--ranks", "1", "--tokens", "2048", *given[5:], "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["memory"]
    assert alone[1]["kept"] == checkpoints["kept"]
    # In each layer gather holds all keys and values besides its own, and ulysses outputs once more.
    assert plain["kept"] - alone[0]["kept"] == 2 * (4096 * 64 - 2048 * 64) * 2
    (longest,) = re.findall("tokens that fit +[0-9,]+ +([0-9,]+) ", text)
    tokens = longest.replace(",", "")
    for more, fits in ((0, "yes"), (2048, "no")):
        given[4] = str(int(tokens) + more)
        assert main([*given, "--device-memory", "0.5"]) == 0
        assert re.search(rf"fits in .* +\w+ +{fits} +yes", capsys.readouterr().out)
    assert main([*given, "--heads", "4"]) == 2
    assert "--heads is passed with --model" in capsys.readouterr().err
    assert main(["plan", "--tokens", "8", "--model", str(tmp_path)]) == 2
    assert "--ranks is not passed" in capsys.readouterr().err
    for name, value in (("model_type", "gpt2"), ("model_type", ["llama"]), ("vocab_size", "many")):
        (tmp_path / "other.json").write_text(json.dumps(config | {name: value}))
        assert main([*given[:-3], str(tmp_path / "other.json")]) == 2
        assert f"{value!r}; expected" in capsys.readouterr().err


def test_page_lists_the_types_of_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "does-it-fit.md").read_text()
    listed = set(re.findall("[a-z0-9_]+", page.split("| decoders | types |")[1].split("- What")[0]))
    assert [kind for kind in TYPES if not {kind, kind.removesuffix("_text")} & listed] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "2", "--tokens", "8", "--model", __file__], "cannot be read: Expecting value"),
        (["--ranks", "2", "--tokens", "8", "--model", "x", "--shards", "0"], "--shards is 0; expected at"),
        (
            ["--ranks", "2", "--tokens", "8", "--model", "x", "--device-memory", "0"],
            "--device-memory is 0; expected GB",
        ),
        (["--ranks", "2", "--tokens", "8", "--shards", "2"], "--shards is passed without --model"),
        ([], "--ranks is not passed; expected how many ranks share the sequence"),
        (["--measure"], "--measure on one rank; expected several, started by torchrun"),
        (["--ranks", "0", "--tokens", "8"], "--ranks is 0; expected 1 to 1024"),
        (["--ranks", "2"], "neither --tokens nor the lengths of --documents are passed"),
        (["--ranks", "2", "--tokens", "-1"], "--tokens is -1; expected 1 to 67108864"),
        (
            ["--ranks", "2", "--tokens", "8", "--key-heads", "5"],
            "k is of 5 heads; expected a number that div",
        ),
        (["--ranks", "2", "--tokens", "8", "--window", "0"], "--window is 0; expected 1 to 2147483647"),
        (
            ["--ranks", "8", "--tokens", "8", "--ring", "3"],
            "--ring is 3; expected a number that divides the 8",
        ),
        (
            ["--ranks", "8", "--tokens", "8", "--ring", "2", "--ulysses", "2"],
            "is 2 x 2; expected a product of 8",
        ),
        (["--ranks", "2", "--tokens", "8", "--width", "0"], "--width is 0; expected at least 1"),
        (
            ["--ranks", "2", "--tokens", "8", "--heads", str(2**50)],
            "--width is 1152921504606846976; expected",
        ),
        (["--ranks", "2", "--documents", "5,0"], "--documents is '5,0'; expected lengths from 1 on"),
        (
            ["--ranks", "2", "--documents", "mean=5,6"],
            "--documents is 'mean=5,6'; expected lengths from 1 on",
        ),
        (["--ranks", "2", "--documents", "mean=5"], "--tokens is not passed; expected how many to fill"),
        (["--ranks", "2", "--documents", "5,3", "--tokens", "9"], "--tokens is 9; expected 8, the sum of"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert text in capsys.readouterr().err


def measure_two_ranks(folder: Path) -> None:
    measure.TURNS, measure.MANY, measure.TOKENS = 1, 1 << 20, {"cpu": 64}
    os.environ["XDG_CACHE_HOME"] = str(folder / os.environ["RANK"])
    assert main(["plan", "--measure"]) == 0


def test_measured_speeds_are_kept_once_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(measure_two_ranks, 2, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "0"))
    near, far = read("cpu")
    assert near is not None and far is None and not (tmp_path / "1").exists()
    assert near.latency < 1 < near.bandwidth and near.work > 1e6
