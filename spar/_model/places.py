# SPDX-License-Identifier: Apache-2.0
"""Which code a forward ran: ranks that took other paths while shapes match would train silently.

The view hashes its calls and blocks (csrc/python/mode_type.c). Ranks compare the hash in each exchange, as a
word beside the call's signature (csrc/plan/place.h).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from .._control.mismatch import NUMPY, RANDOM, TORCH
from .._control.state import Place
from .._exchange.arguments import ranks_of
from .._exchange.observers import _dispatch_modes, _functorch_transforms
from .._group.group import Group, is_faking
from .._transports.cuda import is_capturing
from ..errors import MismatchError
from ..ops.gather import all_gather
from .call import rule_of
from .part import Parts
from .report import name_of_file
from .rules.metadata import count, is_contiguous, same_for_parts, shape, stride

_ATTRIBUTE = "_spar_place"  # of a parameter: which one of the model it is
# What reads a whole tensor, as for a log on one rank, and changes nothing; of a part it makes an exchange.
_READING = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__repr__",
        "__format__",
        "__str__",
        "__contains__",
    ]
)


def forward_on(place: Place | Parts) -> str:
    """Return how messages call a forward on a rank."""
    return f"a sharded model's forward on rank {place.rank} of {place.world}"


def code_of(func: Any) -> int:
    """Return what a call of a function adds to the hash of the code, the same in each process; 0: nothing."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):
        return 0
    if name in _READING or rule_of(name) in (same_for_parts, shape, count, stride, is_contiguous):
        return 0
    return zlib.crc32(name.encode()) + 1


def number_parameters(model: torch.nn.Module) -> None:
    """Let parameters that a function gets be told apart: layers of one shape run the same functions."""
    for number, p in enumerate(model.parameters(), 1):
        if type(p) is torch.nn.Parameter:
            setattr(p, _ATTRIBUTE, number)


def forget_parameters(model: torch.nn.Module) -> None:
    for p in model.parameters():
        vars(p).pop(_ATTRIBUTE, None)


def compared_groups(parts: Parts) -> list[Group]:
    """Return the groups whose exchanges in a view compare its word."""
    state = parts.state
    groups = [parts.group, *([state.get_group("ring"), state.get_group("ulysses")] if state else [])]
    found = [ranks_of(group, "") for group in groups if group is not None]
    return [group for group in found if isinstance(group, Group)]


def may_compare(group: Group | Place, device: torch.device) -> TypeGuard[Group]:
    """Whether ranks can compare something now, by an exchange that no trace sees."""
    if not isinstance(group, Group) or not group.compares or device.type == "meta":
        return False
    return not (is_faking() or _functorch_transforms() or is_capturing(device))


@contextlib.contextmanager
def comparing() -> Iterator[None]:
    """Make an exchange that neither autograd nor another mode sees."""
    modes = _disable_current_modes() if _dispatch_modes() else contextlib.nullcontext()
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), modes:
        yield


def compared_in(parts: Parts, gather: Callable[[], Any]) -> Any:
    """Return gather(); if it exchanges nothing, make an exchange, in which the ranks compare their words."""
    group = ranks_of(parts.group, "")
    if not may_compare(group, parts.device):
        return gather()
    before = group.count()
    value = gather()
    if group.count() == before:
        with comparing():
            all_gather(torch.zeros(1, dtype=torch.uint8, device=parts.device), parts.group)
    return value


def explain(error: MismatchError, block_type: Any) -> None:
    """Append to the text of an error in a view where this rank is, and what the ranks are to do."""
    trace, block, place = error.__traceback__, "", "its end"
    while trace is not None:
        at: Any = trace.tb_frame.f_locals.get("self")
        if isinstance(at, block_type):
            block = f", in block {at.name}"
        named = name_of_file(trace.tb_frame.f_code.co_filename)
        place = f"{named}:{trace.tb_lineno}" if named else place
        trace = trace.tb_next
    text = str(error)
    if "calls differ" not in text:  # a rank failed
        return
    advice = "the ranks ran different layers, functions or hooks, or have other shapes: run the same on all"
    if any(f" in {name}: " in text for name in (TORCH, RANDOM, NUMPY)):
        advice = (
            "the ranks' generators differ: seed them alike on all ranks, and give what draws on one rank "
            "alone, such as a data loader, a generator of its own"
        )
    error.args = (f"{text}\nIn a sharded model's forward, at {place}{block} on this rank, {advice}",)
