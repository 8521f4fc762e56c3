# SPDX-License-Identifier: Apache-2.0
"""`spar plan`: what it recommends, prints and refuses; test_plan_figures.py has what it computes."""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launched import launch

from spar._attention import attention as attention_module
from spar._commands.arguments import main
from spar._commands.plan import measure
from spar._commands.plan.decoders import TYPES
from spar._commands.plan.layer import Layer, drawn_documents
from spar._commands.plan.report import text_of
from spar._commands.plan.run import plan
from spar._commands.plan.ways import Way, evaluate, recommended
from spar._control.speeds import Speeds, read

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
WIDTH, BATCH = 8, 2  # as `inputs` has them
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
    fits = set()
    for given[4] in ("64", "65536"):  # the first has fewer logits than a tile
        assert main([*given, "--device-memory", "0.5"]) == 0
        fits |= {*re.findall("tokens that fit.* ([0-9,]+)\n", capsys.readouterr().out)}
    assert len(fits) == 1
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
