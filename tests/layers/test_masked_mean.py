# SPDX-License-Identifier: Apache-2.0
"""masked_mean, against loops over samples and groups in one process; also under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from helpers.processes import finish, start
from test_gradients import WRAPPERS
from torch import Tensor, nn

import spar

Group = dist.ProcessGroup
LENGTHS = (5, 1, 9, 0, 4)  # of packed documents
TOKENS = sum(LENGTHS)
LAYOUTS: dict[str, Callable[[Group], spar.SequenceLayout]] = {
    "even": lambda group: spar.SequenceLayout.even(TOKENS, group),
    "zigzag": lambda group: spar.SequenceLayout.zigzag(TOKENS, group),
    "packed": lambda group: spar.SequenceLayout.packed(LENGTHS, group),
}


def batch(seed: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Return values `[B, S]` and a mask: of documents' first or last tokens alone, and of none of one."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, TOKENS, generator=random, dtype=torch.float64)
    mask = torch.randint(2, (rows, TOKENS), generator=random, dtype=torch.bool)
    mask[0, :5], mask[0, 0], mask[0, 6:15], mask[0, 14] = False, True, False, True
    mask[1, 6:15] = False  # a packed sample without tokens
    return values, mask


def units(name: str, by: str, groups: Sequence[int], rows: int = 2) -> Tensor:
    """Return the unit of each token whose mean counts once."""
    lengths = LENGTHS if name == "packed" else (TOKENS,)
    count = rows * len(lengths)
    of_sample = {"token": [0] * count, "sample": list(range(count)), "group": list(groups)[:count]}[by]
    return torch.tensor(of_sample).repeat_interleave(torch.tensor(lengths * rows)).view(rows, TOKENS)


def plain(values: Tensor, mask: Tensor, unit: Tensor) -> Tensor:
    """Return the mean of the units' means over the mask."""
    weights = mask.double()
    means = [
        (values * weights)[unit == u].sum() / weights[unit == u].sum()
        for u in unit.unique()
        if weights[unit == u].sum() > 0
    ]
    return torch.stack(means).mean() if means else values.sum() * 0


GROUPS = (7, -3, 7, 7, 2**40, -3, 7, 5, 5, 5)


def check_values(rank: int, world: int, group: Group) -> None:
    values, mask = batch()
    for name, make in LAYOUTS.items():
        layout = make(group)
        own = layout.index()
        for by in ("token", "sample", "group"):
            for weights in (mask, mask.int(), mask * torch.rand(2, TOKENS, generator=torch.Generator())):
                leaf = values.clone().requires_grad_()
                expected = plain(leaf, weights, units(name, by, GROUPS))
                (gradient,) = torch.autograd.grad(expected, leaf)
                options: dict[str, Any] = {"by": by}
                if by == "group":
                    count = 10 if name == "packed" else 2
                    listed = GROUPS[:count]
                    options["groups"] = torch.tensor(listed) if weights is mask else listed
                part = values[:, own].masked_fill(~mask[:, own], torch.nan).requires_grad_()
                found = spar.masked_mean(part, weights[:, own], layout, **options)
                (grad,) = torch.autograd.grad(found, part)
                torch.testing.assert_close(found, expected, msg=f"{name}, by {by}")
                torch.testing.assert_close(grad, gradient[:, own], msg=f"{name}, by {by}")
                averaged = spar.masked_mean(part, weights[:, own], layout, averaged_by=group, **options)
                (grad,) = torch.autograd.grad(averaged, part)
                torch.testing.assert_close(grad, gradient[:, own] * world)
        if name == "packed":  # one sample of far greater weights than the others
            great = torch.where(units(name, "sample", GROUPS) == 0, 1e18, 1e-3).double() * mask
            found = spar.masked_mean(values[:, own], great[:, own], layout, by="sample")
            torch.testing.assert_close(found, plain(values, great, units(name, "sample", GROUPS)))
        none = spar.masked_mean(values[:, own], torch.zeros_like(mask)[:, own], layout, by="sample")
        share = spar.masked_mean((values > 0)[:, own], mask[:, own], layout)
        assert none.item() == 0 and share.dtype == torch.float32
        assert share.item() == (values[mask] > 0).double().mean().float().item()
        half = spar.masked_mean(values[:, own].bfloat16(), mask[:, own], layout)
        assert half.item() == values.bfloat16()[mask].double().mean().float().item()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_values_and_gradients(pool: Ranks, world: int) -> None:
    pool.transport = TRANSPORTS[0]
    pool(world, check_values)


def check_total(rank: int, world: int, group: Group) -> None:
    """The values of the micro-batches of a step sum to that of the step."""
    layout = spar.SequenceLayout.packed(LENGTHS, group)
    own = layout.index()
    batches = [batch(seed) for seed in (0, 1)]
    values, mask = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for by in ("token", "sample"):
        unit = units("packed", by, (), 4)
        expected = plain(values, mask, unit)
        total = float(mask.sum()) if by == "token" else len(unit[mask].unique())
        for given in (total, torch.tensor(total)):
            parts = [
                spar.masked_mean(x[:, own], m[:, own], layout, by=by, total=given)  # type: ignore[arg-type]
                for x, m in batches
            ]
            torch.testing.assert_close(sum(parts), expected)


@pytest.mark.one_transport
def test_total_of_several_micro_batches(ranks: Ranks) -> None:
    ranks(2, check_total)


# ---- data parallel ----


def check_data_parallel(rank: int, folder: Path) -> None:
    """Two sequence groups of 2: their samples differ in number, and groups of samples have some of both."""
    cps, copy, world = [dist.new_group(pair) for pair in ([0, 1], [2, 3])], rank // 2, dist.group.WORLD
    rows, groups = (2, 3), [GROUPS[:10], (*GROUPS[3:8], *range(50, 60))]
    data = [batch(seed, rows[seed]) for seed in (0, 1)]
    layout = spar.SequenceLayout.packed(LENGTHS, cps[copy])
    own = layout.index()
    x, mask = (torch.cat(parts) for parts in zip(*data, strict=True))
    for by in ("token", "sample", "group"):
        unit = units("packed", by, (*groups[0], *groups[1]), 5)
        weight = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        expected = plain((x[..., None] @ weight)[..., 0].sin(), mask, unit)
        (gradient,) = torch.autograd.grad(expected, weight)
        for wrap in WRAPPERS:
            model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
            nn.init.ones_(model.weight)
            wrapped, found = wrap(model)
            part, own_mask = data[copy][0][:, own], data[copy][1][:, own]
            loss = spar.masked_mean(
                wrapped(part[..., None])[..., 0].sin(),
                own_mask,
                layout,
                by=by,  # type: ignore[arg-type]
                groups=groups[copy] if by == "group" else None,
                group=world,
                averaged_by=None if wrap is WRAPPERS[2] else world,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(loss, expected, msg=f"{wrap.__name__}, by {by}")
            torch.testing.assert_close(found()[0], gradient, msg=f"{wrap.__name__}, by {by}")
    with pytest.raises(ValueError, match=r"group is a group without some ranks of layout\.group"):
        spar.masked_mean(x[:2, own], mask[:2, own], spar.SequenceLayout.even(TOKENS, world), group=cps[copy])
    dist.barrier()


def test_ddp_fsdp2_and_sums_over_dp_and_cp(tmp_path: Path) -> None:
    assert finish(start(check_data_parallel, 4, tmp_path, set_up=False), 200) == [0] * 4


# ---- errors ----

ONES = torch.ones(2, 10)  # even shards of 20 tokens on two ranks
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "values": (
        {"values": torch.ones(2, 19)},
        ValueError,
        r"masked_mean on rank 1 of 2: values is of shape \[2, 19\]; expected 10 in dim 1, rank 1's shard in",
    ),
    "dims": ({"values": torch.ones(2, 10, 1)}, ValueError, r"of shape \[2, 10, 1\]; expected \[B, S/P\]"),
    "mask": ({"mask": torch.ones(2, 9)}, ValueError, r"mask is of shape \[2, 9\] on cpu; expected \[2, 10\]"),
    "list": ({"mask": [1]}, TypeError, "mask is a list; expected a tensor"),
    "labels": ({"mask": ONES - 101}, ValueError, "mask is -100.0; expected weights of at least 0.*labels !="),
    "not finite": ({"mask": ONES / 0}, ValueError, "mask is inf; expected weights of at least 0, and finite"),
    "complex": ({"values": ONES * 1j}, TypeError, "values is a tensor of torch.complex64"),
    "by": ({"by": "samples"}, ValueError, "by is 'samples'; expected \"token\", \"sample\" or \"group\""),
    "no groups": ({"by": "group"}, ValueError, "groups is None; expected given with by=\"group\""),
    "groups": ({"groups": [0, 0]}, ValueError, "groups is given; expected given with by=\"group\", only"),
    "too few": ({"by": "group", "groups": [0]}, ValueError, r"groups is of shape \[1\]; expected \[2\]"),
    "names": ({"by": "group", "groups": ["a", "b"]}, TypeError, r"groups\[0\] is 'a'; expected an int"),
    "floats": ({"by": "group", "groups": torch.ones(2)}, TypeError, "groups is a tensor of torch.float32"),
    "total by group": ({"by": "group", "groups": [0, 1], "total": 2}, ValueError, "total is 2; expected"),
    "negative": ({"total": -1}, ValueError, "total is -1; expected at least 0"),
}  # fmt: skip


def check_wrong(rank: int, world: int, group: Group) -> None:
    layout = spar.SequenceLayout.even(20, group)
    for case, (wrong, error, text) in WRONG.items():
        arguments: dict[str, Any] = {"values": ONES, "mask": ONES, "layout": layout}
        if rank == 1:
            with pytest.raises(error, match=text):
                spar.masked_mean(**arguments | wrong)
        else:
            with pytest.raises(spar.MismatchError, match="rank 1"):
                spar.masked_mean(**arguments)
        assert spar.masked_mean(**arguments).item() == 1, case
    for differing, text in (
        ({"total": 3 + rank}, "in total: 3 on rank 0; 4 on rank 1"),
        ({"by": ("token", "sample")[rank]}, "by token"),
        ({"by": "group", "groups": [0, rank]}, "hash of groups"),
        ({"averaged_by": (None, group)[rank]}, "averaged by 2 ranks"),
    ):
        with pytest.raises(spar.MismatchError, match=text):
            spar.masked_mean(ONES, ONES, layout, **differing)  # type: ignore[arg-type]
        assert spar.masked_mean(ONES, ONES, layout).item() == 1
    packed = spar.SequenceLayout.packed
    pairs = [
        (spar.SequenceLayout.even(20, group), spar.SequenceLayout.zigzag(20, group)),
        (packed([12, 8], group), packed([8, 12], group)),
        (packed([1] * 20, group), packed([1] * 18 + [2], group)),
    ]
    for pair in pairs:
        for by in ("token", "sample", "group"):
            own = pair[rank]
            size = own.sizes[rank]
            options = {"groups": range(2 * len(own.lengths))} if by == "group" else {}
            with pytest.raises(spar.MismatchError, match=r"calls differ(.|\n)* layout (even|packed):"):
                spar.masked_mean(torch.ones(2, size), torch.ones(2, size), own, by=by, **options)  # type: ignore[arg-type]
            assert spar.masked_mean(ONES, ONES, layout).item() == 1
    with pytest.raises(spar.MismatchError, match="in rows: 2 on rank 0; 3 on rank 1"):
        spar.masked_mean(torch.ones(2 + rank, 10), torch.ones(2 + rank, 10), layout)
    total = 2 * ONES.numel()
    assert spar.masked_mean(ONES, ONES, layout, total=(total, float(total))[rank]).item() == 1


def check_other_layouts(rank: int, folder: Path) -> None:
    """Two sequence groups of 2 have layouts of their own; one of them has two."""
    cps, copy, world = [dist.new_group(pair) for pair in ([0, 1], [2, 3])], rank // 2, dist.group.WORLD
    lengths = ([12, 8], [30, 2, 4])[copy]
    own = spar.SequenceLayout.packed(lengths, cps[copy])
    other = spar.SequenceLayout.packed(lengths[::-1], cps[copy])
    for by in ("token", "sample"):
        for faulty in (1, 2):
            layout = other if rank == faulty else own
            x = torch.ones(1, layout.sizes[rank % 2])
            text = "in layout: " if copy == faulty // 2 else f"rank {faulty}"
            with pytest.raises(spar.MismatchError, match=text):
                spar.masked_mean(x, x, layout, by=by, group=world)  # type: ignore[arg-type]
            x = torch.ones(1, own.sizes[rank % 2])
            assert spar.masked_mean(x, x, own, by=by, group=world).item() == 1  # type: ignore[arg-type]
            with pytest.raises((ValueError, spar.MismatchError)):
                spar.masked_mean(x, x[:, 1:] if rank == faulty else x, own, group=world)
            assert spar.masked_mean(x, x, own, group=world).item() == 1
    dist.barrier()


def test_layouts_that_differ_in_one_of_several_sequence_groups(tmp_path: Path) -> None:
    assert finish(start(check_other_layouts, 4, tmp_path, set_up=False), 200) == [0] * 4


@pytest.mark.one_transport
def test_errors_are_reported_to_peers(ranks: Ranks) -> None:
    ranks(2, check_wrong)
