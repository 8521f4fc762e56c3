# SPDX-License-Identifier: Apache-2.0
"""A model's own communication by torch.distributed: what unsharded processes would send and receive.

All functions of torch.distributed end in methods of a ProcessGroup, which the first view replaces. A
reduction over ranks that hold the same part of a tensor acts on the parts. Others send gathered tensors, and
each rank keeps its part of what it receives. A method that is not known does not accept parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from .groups import ADVICE, DIFFERS, check_same_tokens, is_apart, ranks
from .nested import changed, tensors_in
from .part import has_part, is_uneven, part_of, whole_shape
from .stand_ins import in_views, standing_for
from .view import View, without_view

# What these are given is sent, and overwritten.
_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})
# What these are given first, or by a name of output, is overwritten; the rest is sent.
_OUT_OF_PLACE_NAMES = """
allgather allgather_coalesced allgather_into_tensor_coalesced _allgather_base all_gather_single
all_gather_single_coalesced gather scatter reduce_scatter reduce_scatter_tensor_coalesced _reduce_scatter_base
reduce_scatter_single reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single
"""
_OUT_OF_PLACE = frozenset(_OUT_OF_PLACE_NAMES.split())
_SENT, _RECEIVED = frozenset({"send"}), frozenset({"recv", "recv_anysource"})
_KNOWN = _IN_PLACE | _OUT_OF_PLACE | _SENT | _RECEIVED
# All ranks of the group have the same results.
_EQUAL = ("allreduce", "broadcast", "allgather", "_allgather", "all_gather")
# Each element of a result is made of those at the same place on the ranks.
_BY_ELEMENT = frozenset({"allreduce", "allreduce_coalesced", "reduce"})


@functools.cache
def install() -> None:
    """Replace the methods for good: a forward would take 0.3 ms for that. Without a view, torch's run."""
    for owner, name, method in _methods():
        setattr(owner, name, method)
    c10d._object_to_tensor = _pickling(c10d._object_to_tensor)


@functools.cache
def _methods() -> list[tuple[Any, str, Any]]:
    """Return replacements of all methods that take tensors, by their signatures."""
    known: dict[Any, frozenset[str]] = {ProcessGroup: _KNOWN, Backend: frozenset()}
    return [
        (owner, name, standing_for(own, functools.partial(_method, name, name in known[owner])))
        for owner in known
        for name, own in vars(owner).items()
        if "torch.Tensor" in (getattr(own, "__doc__", None) or "")
    ]


def _method(
    name: str, is_known: bool, view: View, own: Callable[..., Any], group: Any, *args: Any, **kwargs: Any
) -> Any:
    if is_known:
        with without_view():
            return _communicate(view, group, name, own, args, kwargs)
    if has_part(args, kwargs):
        raise view.error(f"{type(group).__name__}.{name}", "gets a sharded tensor", ADVICE)
    return own(group, *args, **kwargs)


def _communicate(view: View, group: Any, name: str, own: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a method on this rank's parts, or on whole tensors of which it keeps its parts."""
    given = tensors_in(args, kwargs)
    sent, written = _directions(name, given, args, kwargs)
    for x in sent:
        view.check_stale(name, x)
    view.note_written(written)
    if not has_part(given):
        return own(group, *args, **kwargs)
    is_apart = _is_apart(view, group, name, args, kwargs)
    if not (is_apart or name.startswith(_EQUAL)):
        raise view.error(name, DIFFERS, ADVICE)
    is_coalesced = group in c10d._world.pg_coalesce_state
    if is_apart and _acts_on_parts(name, given):
        if not is_coalesced:
            check_same_tokens(view, name, group, given[0].device)
        stand_ins = {id(x): x.detach().contiguous() for x in given if not x.is_contiguous()}
    else:
        view._note_whole(name, "sends whole tensors")
        stand_ins = _wholes(view, given, sent)
    if stand_ins and is_coalesced:
        raise view.error(name, "gets a sharded tensor, and is coalesced with others", ADVICE)
    args, kwargs = changed(lambda x: stand_ins.get(id(x), x), (args, kwargs))
    work = own(group, *args, **kwargs)
    received = [(x, stand_ins[id(x)]) for x in written if id(x) in stand_ins]
    if work is None or not received:
        _keep(received)
        return work
    return _Received(work, received)


def _directions(
    name: str, given: list[Tensor], args: Any, kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a method sends, and those that it overwrites."""
    if name in _IN_PLACE:
        return given, given
    if name not in _OUT_OF_PLACE:
        return (given, []) if name in _SENT else ([], given)
    written = tensors_in(*args[:1], *[value for key, value in kwargs.items() if key.startswith("output")])
    return [x for x in given if not any(x is y for y in written)], written


def _is_apart(view: View, group: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a method is of other ranks than those that share a sequence with this one."""
    members = ranks(group)
    if name in ("send", "recv") and members:
        peer = args[1] if len(args) > 1 else next(kwargs[n] for n in ("dstRank", "srcRank") if n in kwargs)
        return members[peer] not in ranks(view.parts.group)
    return is_apart(view.parts.group, members)


def _acts_on_parts(name: str, given: list[Tensor]) -> bool:
    """Whether ranks that hold the same parts can call a method on them."""
    if name in _BY_ELEMENT:
        return True
    first = part_of(given[0]), whole_shape(given[0])
    return name == "allgather" and all((part_of(x), whole_shape(x)) == first for x in given)


def _wholes(view: View, given: list[Tensor], sent: list[Tensor]) -> dict[int, Tensor]:
    """Return the whole tensors of parts, by the parts' ids: without values for those that are not sent."""
    with torch.no_grad():
        return {
            id(x): view.gather(x).contiguous() if any(x is y for y in sent) else x.new_empty(whole_shape(x))
            for x in given
            if part_of(x) is not None
        }


def _keep(received: list[tuple[Tensor, Tensor]]) -> None:
    """Overwrite tensors by what was received in their place, unknown to autograd, as torch's methods do."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for x, found in received:
            part = part_of(x)
            x.data.copy_(found if part is None or found.shape == x.shape else part.parts.shard(found, part))
            if is_uneven(x):  # what a view keeps beside it is outdated
                torch.autograd.graph.increment_version(x)


class _Received(Work):
    """The handle of a method that receives in other tensors than those it was given."""

    def __init__(self, work: Any, received: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.work, self.received = work, received

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = self.work.wait(*args, **kwargs)
        self._finish()
        return done

    def synchronize(self) -> None:
        self.work.synchronize()
        self._finish()

    def block_current_stream(self) -> None:
        self.work.block_current_stream()
        self._finish()

    def is_completed(self) -> bool:
        done: bool = self.work.is_completed()
        if done:
            self.synchronize()
        return done

    def get_future(self) -> Any:
        self.wait()
        return self.work.get_future()

    def result(self) -> list[Tensor]:
        self.wait()
        return [x for x, _ in self.received]

    def is_success(self) -> bool:
        return bool(self.work.is_success())

    def exception(self) -> Any:
        return self.work.exception()

    def source_rank(self) -> int:
        return int(self.work.source_rank())

    def _source_rank(self) -> int:
        return int(self.work._source_rank())

    def _finish(self) -> None:
        received, self.received = self.received, []
        _keep(received)


@in_views
def _pickling(
    view: View, own: Callable[..., Any], obj: Any, device: Any, group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Pickle an object that is sent; called by those ranks alone that send."""
    if has_part(obj):
        if not is_apart(view.parts.group, ranks(group)):
            raise view.error("pickling", "sends a sharded tensor to ranks that share it", ADVICE)
        with without_view():
            obj = view.gather(obj)
    return own(obj, device, group, *args, **kwargs)
