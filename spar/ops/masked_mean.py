# SPDX-License-Identifier: Apache-2.0
"""`masked_mean`: the mean of values over the tokens, the samples or groups of samples of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from .._checks import check_ints, check_type, digest
from .._exchange.arguments import Arguments
from .._exchange.exchange import ONE
from .._exchange.layouts import WHOLE, by_sizes, even
from .._exchange.observers import has_values, is_fake
from .._group.registry import place_of
from .._tracing import constant
from ..loss import WIDE, divided, number_of
from ..sequence_layout import SequenceLayout
from ..topology.resolve import Group, process_group
from .samples import check_shard, sample_of_token

_NAME = "masked_mean"


def masked_mean(
    values: torch.Tensor,
    mask: torch.Tensor,
    layout: SequenceLayout,
    *,
    by: Literal["token", "sample", "group"] = "token",
    groups: Sequence[int] | torch.Tensor | None = None,
    total: int | float | torch.Tensor | None = None,
    group: Group = None,
    averaged_by: Group = None,
) -> torch.Tensor:
    """Average values of a sharded sequence over the tokens of a mask, or over samples' or groups' means.

    A sample is a document of a packed layout, of each row; in other layouts it is a row. Samples may lie on
    any ranks. Call backward as on `mean_loss`, whose conventions hold: gradients of parameters are right once
    they are summed over the ranks, or averaged over `averaged_by`.

    Args:
        values: `[B, S/P]`, this rank's, of any real dtype: a loss of each token, a KL, or whether it was
            clipped. They are added in float64. Where the mask is 0 they may be infinite or NaN.
        mask: `[B, S/P]`, which tokens count: bool, ints, or weights of at least 0.
        layout: how the sequence lies on the ranks.
        by: "token": the sum over the tokens, divided by their number. "sample": the mean of the samples'
            means. "group": the mean of the means over the tokens of each group of samples. Samples and groups
            without tokens do not count.
        groups: by group: the group of each of this rank's samples, row by row. Samples with one number are
            one group, on whatever ranks of `group` they are.
        total: what to divide by instead of the number of tokens or samples of this call, such as that of all
            micro-batches of the step, on all ranks of `group`, where it must be equal. The values of the
            micro-batches then sum to that of the step. Not by group, whose samples may lie in others.
        group: all ranks that have samples, such as WORLD of dp x cp: a group as in `mean_loss`, with all
            ranks of the layout's. None: the layout's.
        averaged_by: the ranks over which DDP or FSDP averages gradients, as in `mean_loss`.

    Returns:
        A 0-dim tensor, equal on all ranks, of float64 if values are, else float32. It is 0 without tokens.

    Raises:
        ValueError: a shape does not fit, or arguments do not fit each other, or the mask is negative or not
            finite. On a GPU the mask's values are not checked.
        TypeError: values or mask is not a tensor of real numbers, or groups not of ints.
        MismatchError: calls differ between ranks, also in the layout within its group. Every rank raises.
    """
    check_type(_NAME, "layout", layout, SequenceLayout, "a SequenceLayout")
    ranks = layout.group if group is None else process_group(group, _NAME)
    first = _first_rank(layout.group, ranks)
    place = place_of(layout.group)
    alone = place_of(ranks).world == place.world
    with contextlib.ExitStack() as calls:
        # Entered first: its peers report to all ranks what fails before the call on these.
        beside = None
        if not alone and place.world > 1:
            beside = calls.enter_context(Arguments(_NAME, values, layout.group, "values"))
        call = calls.enter_context(Arguments(_NAME, values, ranks, "values", 3))
        _check_values(call, values, mask, layout, first)
        of_layout = _text_of(layout, values.size(0))
        if beside is not None:  # other sequence groups have other layouts
            beside.note, beside.input = of_layout.removeprefix(", "), values.new_zeros(1, dtype=torch.uint8)
            beside.apply(even(0, beside.world), WHOLE, ONE)
        if by not in ("token", "sample", "group"):
            raise call.error("by", repr(by), '"token", "sample" or "group"')
        if (groups is None) == (by == "group"):
            raise call.error("groups", "None" if groups is None else "given", 'given with by="group", only')
        if by == "group" and total is not None:
            what = 'None with by="group"; or pass weights for the step, values * weights, and by="token"'
            raise call.error("total", total, what)
        weights = mask.detach().to(WIDE)
        counted = torch.where(weights != 0, values.to(WIDE), 0)
        if by != "token":
            call.note = of_layout.removeprefix(", ") if alone else ""
            weights = _weights_by_unit(call, weights, layout, groups, ranks, first)
        number, call.note = None, f"by {by}{of_layout if alone else ''}"
        if total is not None:
            number = number_of(call, "total", total)
            # 8 and 8.0 are equal.
            given = total if isinstance(total, torch.Tensor) else f"{float(total):.17g}"
            call.note += f", total {given if number.is_cpu else ''}"
        call.input = (counted * weights).sum().reshape(1)
        mean = divided(call, call.input, weights.sum().reshape(1), averaged_by, number)
        return mean.to(WIDE if values.dtype == WIDE else torch.float32)


def _check_values(
    call: Arguments, values: torch.Tensor, mask: Any, layout: SequenceLayout, first: int
) -> None:
    """Check that the ranks of the call have the whole layout, and that values and mask fit it."""
    if first < 0:
        raise call.error("group", "a group without some ranks of layout.group", "one with all of them")
    if not isinstance(mask, torch.Tensor):
        raise call.type_error("mask", f"a {type(mask).__name__}", "a tensor")
    for name, x in (("values", values), ("mask", mask)):
        if x.is_complex():
            raise call.type_error(name, f"a tensor of {x.dtype}", "a tensor of real numbers")
    check_shard(call, "values", values, layout)
    if values.dim() != 2:
        raise call.error("values", f"of shape {list(values.shape)}", "[B, S/P]")
    if mask.shape != values.shape or mask.device != values.device:
        what = f"of shape {list(mask.shape)} on {mask.device}"
        raise call.error("mask", what, f"{list(values.shape)} on {values.device}, as values are")
    if has_values(mask):
        wrong = mask[~((mask >= 0) & (mask < torch.inf))]
        if wrong.numel():
            what = "weights of at least 0, and finite; of labels pass labels != ignore_index"
            raise call.error("mask", f"{wrong[0].item()}", what)


def _weights_by_unit(
    call: Arguments,
    weights: torch.Tensor,
    layout: SequenceLayout,
    groups: Any,
    ranks: dist.ProcessGroup,
    first: int,
) -> torch.Tensor:
    """Divide the weight of each token by the sum of its sample's, or its group's, on all ranks."""
    rows = weights.size(0)
    sample = sample_of_token(layout, rows, weights.device)
    count, alone = rows * len(layout.lengths), call.group.world == layout.group.size()
    if groups is None:
        units = torch.arange(count, device=weights.device)
        if not alone:  # numbers that no other sequence group has
            units += first << 32
    else:
        units = _units(call, groups, count).to(weights.device)
        if alone and units.is_cpu and not is_fake(units):
            call.note += f"{', ' if call.note else ''}hash of groups {digest(units):x}"
    sums = weights.new_zeros(count).index_add_(0, sample.flatten(), weights.flatten())
    sizes = [count] * call.world if alone else SequenceLayout.from_local(count, ranks).sizes
    call.input = torch.stack([units, sums.view(torch.int64)], 1)
    gathered = call.apply(by_sizes(0, sizes), WHOLE, ONE)
    known, sums = gathered[:, 0].contiguous(), gathered[:, 1].contiguous().view(WIDE)
    order = known.sort().values
    # At the first place of each unit. Differences of running sums would lose small weights beside great ones.
    totals = torch.zeros_like(sums).index_add_(0, torch.searchsorted(order, known), sums)
    of_unit = totals[torch.searchsorted(order, units)]
    shares: torch.Tensor = torch.where(weights == 0, 0, weights / of_unit[sample])
    return shares


def _units(call: Arguments, groups: Sequence[int] | torch.Tensor, count: int) -> torch.Tensor:
    """Return the group of each sample as a tensor."""
    if not isinstance(groups, torch.Tensor):
        groups = torch.tensor(
            check_ints(call.where, "groups", groups, -(2**63)), dtype=torch.int64, device="cpu"
        )
    if groups.is_floating_point() or groups.is_complex():
        raise call.type_error("groups", f"a tensor of {groups.dtype}", "a tensor of ints")
    if groups.shape != (count,):
        what = f"[{count}], a group for each sample of this call"
        raise call.error("groups", f"of shape {list(groups.shape)}", what)
    return groups.long()


_FEW = 16  # numbers of a layout that a message has


def _text_of(layout: SequenceLayout, rows: int) -> str:
    """Return what the ranks of a sequence group compare: the number of rows, and how a row lies on them.

    Nothing in compiled code, which would be compiled again for each length.
    """
    if torch.compiler.is_compiling():
        return ""
    numbers = layout.numbers if len(layout.numbers) <= _FEW else (f"{digest(layout.numbers):x}",)
    return f", rows {rows}, layout {layout.kind}:{':'.join(str(number) for number in numbers)}"


@constant
def _first_rank(part: dist.ProcessGroup, ranks: dist.ProcessGroup) -> int:
    """Return the first global rank of a group; -1 if another group does not have all of its ranks."""
    if part is ranks:
        return 0
    own = dist.get_process_group_ranks(part)
    return min(own) if set(own) <= set(dist.get_process_group_ranks(ranks)) else -1
