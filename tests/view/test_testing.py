# SPDX-License-Identifier: Apache-2.0
"""spar.testing.compare: it finds each usual mistake, and nothing in a right model."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.processes import finish, start
from torch import Tensor, nn

import spar
from spar import SequenceLayout
from spar.testing import Entry, Report, compare

pytestmark = pytest.mark.one_transport

Group = dist.ProcessGroup
PAGE = Path(__file__).parents[2] / "docs" / "gradients.md"
TOKENS, VOCABULARY = 13, 7


class Model(nn.Module):
    """Causal attention; `how` names a mistake, or how the sharded model returns its loss and logits."""

    how = ""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=dtype)
        self.qkv = nn.Linear(6, 18, dtype=dtype)
        self.head = nn.Linear(6, VOCABULARY, dtype=dtype)

    def forward(self, ids: Tensor, labels: Tensor, layout: SequenceLayout | None = None) -> Any:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        at = torch.arange(ids.size(1))
        if layout is not None:
            at = at if self.how == "positions" else layout.positions()
            split = self.how == "gather"
            k, v = layout.gather([k, v], 1, None) if split else layout.gather([k, v], 1, backward="sum")
        mask = at[:, None] >= torch.arange(k.size(1))
        logits = self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = int((labels != -100).sum())
        if layout is None:
            return {"loss": losses / count, "logits": logits}
        if self.how == "mean of means":
            return losses / count / layout.group.size(), logits
        if self.how == "sum":
            return losses / (2 * layout.total), logits
        averaged_by = layout.group if self.how == "averaged" else None
        loss = spar.mean_loss(losses, count, layout.group, averaged_by=averaged_by)
        if self.how == "whole logits":
            logits = layout.gather(logits, 1, None)
        return loss if self.how == "no logits" else (loss, logits)


def whole() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def sharding(group: Group, how: str = "", kind: str = "zigzag") -> Callable[[Any, Any], Any]:
    def shard(model: Any, batch: dict[str, Tensor]) -> Any:
        model.how = how
        layout = getattr(SequenceLayout, kind)(TOKENS, group)
        return {"layout": layout} | {name: layout.shard(x, 1) for name, x in batch.items()}

    return shard


def run(rank: int, world: int, group: Group, how: str, kind: str = "zigzag", **options: Any) -> Report:
    state = torch.get_rng_state()
    report = compare(Model, whole(), sharding(group, how, kind), group, show=False, **options)
    assert torch.get_rng_state().equal(state)
    return report


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("how", ["", "sum", "whole logits", "no logits"])
def test_right_model_differs_by_rounding(ranks: Ranks, world: int, how: str) -> None:
    report, *others = ranks(world, run, how)
    assert all(other == report for other in others) and report.ranks == world
    names = [entry.name for entry in report.entries]
    assert names[:2] == ["loss", "embedding.weight.grad" if how == "no logits" else "logits"]
    assert names[-5:] == [f"{name}.grad" for name, _ in Model().named_parameters()]
    assert report.worst.max_rel_error < 1e-13 and report.first is None
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-13) and 1 < report.loss < 4


@pytest.mark.parametrize(
    ("how", "right", "wrong"),
    [
        ("gather", ["loss", "logits", "head.weight.grad"], ["qkv.weight.grad", "embedding.weight.grad"]),
        ("positions", [], ["loss", "logits", "head.weight.grad"]),
        ("mean of means", ["logits"], ["loss", "head.weight.grad", "qkv.weight.grad"]),
    ],
)
def test_mistake_is_found(ranks: Ranks, how: str, right: list[str], wrong: list[str]) -> None:
    (report, _) = ranks(2, run, how)
    found = {entry.name: entry for entry in report.entries}
    assert all(found[name].max_rel_error < 1e-13 for name in right), report
    assert all(found[name].max_rel_error > 1e-3 for name in wrong), report
    assert report.worst.max_rel_error == max(entry.max_rel_error for entry in report.entries)
    first = {
        "gather": ("gradient", "scaled_dot_product_attention"),
        "positions": ("value", "scaled_dot_product_attention"),
        "mean of means": ("gradient", "flatten"),
    }
    assert report.first is not None and (report.first.kind, report.first.function) == first[how], report
    assert Path(report.first.file).name == "test_testing.py" and str(report).endswith(
        f"first: {report.first}"
    )


def check_factor(rank: int, world: int, group: Group) -> None:
    """An encoder before the shard: with grad_scale=None its gradients are summed once for each rank."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()

        def forward(self, x: Tensor, layout: Any = None, scale: Any = None) -> Tensor:
            x = self.before(x)
            if layout is not None:
                x = layout.shard(x, 1, scale)
            return self.after(x).square().sum()

    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    layout = SequenceLayout.even(5, group)
    for scale, factor in ((None, float(world)), ("down", None)):
        report = compare(
            Encoder,
            {"x": x},
            lambda model, batch: batch | {"layout": layout, "scale": scale},  # noqa: B023
            group,
            show=False,
        )
        factors = {entry.name: entry.factor for entry in report.entries}
        assert factors["after.weight.grad"] is None
        assert factors["before.weight.grad"] == (None if factor is None else pytest.approx(factor))
        assert (f"   {world} times the reference: see grad_scale" in str(report)) == (factor is not None)


def test_a_gradient_off_by_the_number_of_ranks_is_named(ranks: Ranks) -> None:
    ranks(3, check_factor)


def check_reductions(rank: int, world: int, group: Group) -> None:
    mean = run(rank, world, group, "", reduce="mean")
    assert mean.worst.name.endswith(".grad") and mean.worst.max_rel_error == pytest.approx(2 / 3)
    assert mean.entries[0].max_rel_error < 1e-13
    assert run(rank, world, group, "", reduce=None).worst.max_rel_error > 0.1
    assert run(rank, world, group, "", "even").worst.max_rel_error < 1e-13

    def without_layout(kind: str) -> Callable[[Any, Any], Any]:
        def shard(model: nn.Module, batch: Any) -> tuple[Any, ...]:
            part = sharding(group, "", kind)(model, batch)
            model.forward = lambda ids, labels: Model.forward(model, ids, labels, part["layout"])  # type: ignore
            return part["ids"], part["labels"]

        return shard

    assert compare(Model, whole(), without_layout("even"), group, show=False).worst.max_rel_error < 1e-13
    wrong = compare(Model, whole(), without_layout("zigzag"), group, show=False)
    assert wrong.worst.name == "logits" and wrong.worst.max_rel_error > 0.1
    layout = SequenceLayout.zigzag(TOKENS, group)
    by_layout = compare(Model, whole(), without_layout("zigzag"), group, layout=layout, show=False)
    assert by_layout.worst.max_rel_error < 1e-13


def test_reductions_and_layouts_of_logits(ranks: Ranks) -> None:
    ranks(3, check_reductions)


def check_errors(rank: int, world: int, group: Group) -> None:
    def other_batch() -> Report:
        return compare(Model, whole() | {"labels": whole()["labels"].roll(rank)}, sharding(group), group)

    with pytest.raises(
        ValueError, match=r"the loss of one process is \[.*\] on the group's ranks; expected one"
    ):
        other_batch()

    def short(model: Any, batch: Any) -> Any:
        part = sharding(group)(model, batch)
        if rank == 1:
            model.head = nn.Linear(6, VOCABULARY + 1, dtype=torch.float64)
        return part

    expected = (
        (ValueError, r"rank 1 of 2: the logits' shape is \[2, 6, 8\]; expected \[2, 6, 7\]")
        if rank
        else (spar.MismatchError, "the logits' shape")
    )
    with pytest.raises(expected[0], match=expected[1]):
        compare(Model, whole(), short, group)

    def failing(model: Any, batch: Any) -> Any:
        if rank == 1:
            raise KeyError("sharding")
        return sharding(group)(model, batch)

    with pytest.raises(KeyError if rank else spar.MismatchError, match="sharding"):
        compare(Model, whole(), failing, group)

    def renamed(model: Any, batch: Any) -> Any:
        model.more = nn.Linear(2, 2)
        return sharding(group)(model, batch)

    with pytest.raises(
        ValueError, match=r"parameters of only one of the models is \['more.bias', 'more.weight'\]"
    ):
        compare(Model, whole(), renamed, group)
    with pytest.raises(ValueError, match=r"reduce is 'average'; expected \"sum\", \"mean\" or None"):
        compare(Model, whole(), sharding(group), group, reduce="average")
    with pytest.raises(TypeError, match=r"the model's loss is a tensor of shape \[2, 3\]; expected a 0-dim"):
        compare(lambda: nn.Linear(3, 3), torch.ones(2, 3), lambda model, batch: batch, group)
    assert run(rank, world, group, "").worst.max_rel_error < 1e-13  # the group stays usable


def test_errors_reach_every_rank(ranks: Ranks) -> None:
    ranks(2, check_errors)


def test_report_reads_as_a_table() -> None:
    entries = (
        Entry("loss", 0.0, 0.0, 1.5),
        Entry("a.weight.grad", 1e-3, math.nan, 2.0),
        Entry("b.grad", 2.0, 4.0, 0.5),
    )
    report = Report(2, 1.25, 1.5, entries)
    assert report.worst is entries[1]
    assert str(report).splitlines() == [
        "loss of 2 ranks: 1.25; of one process: 1.5",
        "                max abs error   max rel error  reference norm",
        "loss                0.000e+00       0.000e+00       1.500e+00",
        "a.weight.grad       1.000e-03             nan       2.000e+00",
        "b.grad              2.000e+00       4.000e+00       5.000e-01",
        "worst: a.weight.grad, nan",
    ]


# ---- in new processes ----


def run_example(rank: int, folder: Path) -> None:
    (code,) = [
        part.split("```")[0] for part in PAGE.read_text().split("```python\n") if "import compare" in part
    ]
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    report = names["report"]
    assert report.ranks == 2 and [entry.name for entry in report.entries][:2] == ["loss", "logits"]
    assert printed.getvalue() == (f"{report}\n" if rank == 0 else "")
    dist.barrier()


def test_example_runs_and_rank_0_prints(tmp_path: Path) -> None:
    assert finish(start(run_example, 2, tmp_path, set_up=False), 100) == [0, 0]


def check_fsdp2(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    world = dist.group.WORLD
    assert world is not None

    def sharded(how: str) -> Callable[[Any, Any], Any]:
        def shard(model: Any, batch: Any) -> Any:
            part = sharding(world, how)(model, batch)
            fully_shard(model, mesh=mesh)
            return part

        return shard

    report = compare(Model, whole(), sharded("averaged"), mesh, reduce=None, show=False)
    assert report.worst.max_rel_error < 1e-13, str(report)
    report = compare(Model, whole(), sharded(""), mesh, reduce=None, show=False)
    assert report.worst.max_rel_error == pytest.approx(0.5), str(report)
    dist.barrier()


def test_fsdp2_gradients_are_gathered_and_need_averaged_by(tmp_path: Path) -> None:
    assert finish(start(check_fsdp2, 2, tmp_path, set_up=False), 100) == [0, 0]
