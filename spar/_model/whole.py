# SPDX-License-Identifier: Apache-2.0
"""Run a function on the whole of each part that it gets, and carry what it writes back to the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .aliases import Aliases
from .gradients import WholeGradients
from .memory import memory_of, version_of
from .moving import as_part
from .nested import changed, tensors_in
from .part import Parts, part_of, whole_shape
from .report import place_of_caller


@dataclass(frozen=True, eq=False)
class _Argument:
    """A tensor of the caller, and what the function gets for it: the whole, if it is a part.

    version, node: of `given`, before: its changes in place, None if torch does not count them, and `grad_fn`.
    """

    own: Tensor
    given: Tensor
    version: int | None
    node: Any

    @property
    def is_part(self) -> bool:
        return self.own is not self.given

    @property
    def is_recorded(self) -> bool:
        """Whether backward knows of the change."""
        return self.given.grad_fn is not self.node

    def part_now(self) -> Tensor:
        """Return this rank's part of what the function got, as it left it."""
        part = part_of(self.own)
        assert part is not None
        return as_part(self.given, part)


def run_whole(
    parts: Parts,
    aliases: Aliases,
    name: str,
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    *,
    writes: Sequence[Tensor] = (),
    is_torch: bool = False,
    copied: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Call a function with whole tensors; each rank keeps its part of those that the function writes.

    Call it outside of the view, with arguments that are not stale. Writes are recorded for backward as the
    function recorded them. A result that is an argument is the caller's own; one that shares memory with an
    argument is a copy for `aliases`.

    Args:
        writes: arguments that the function writes, as its schema says; others are found by their versions.
        is_torch: whether it is a function of torch: its backward is linear in the gradient, and torch counts
            what it writes. Others get whole gradients, and each part gets what its copy holds afterwards.
        copied: returns what the function gets for a part, or the part itself; by default its whole.

    Raises:
        RuntimeError: the function changes the shape of an argument; or one of two that share memory, but for
            functions of torch, which read arguments before they write one: those may not change both.
    """
    gradients = WholeGradients(parts)
    gather = copied or (parts.gather if is_torch else gradients.gather)
    arguments: dict[int, _Argument] = {}
    for x in tensors_in(args, kwargs):
        if id(x) not in arguments:
            given = x if part_of(x) is None else _gathered(gather, x)
            arguments[id(x)] = _Argument(x, given, version_of(given), given.grad_fn)
    args, kwargs = changed(lambda x: arguments[id(x)].given, (args, kwargs))
    out = func(*args, **kwargs)

    known = {id(x) for x in writes}
    written = [a for a in arguments.values() if version_of(a.given) != a.version or id(a.own) in known]
    of_parts = [a for a in arguments.values() if a.is_part]
    _check(parts, name, written, written if is_torch else arguments.values())
    if not is_torch:
        gradients.average([*tensors_in(out), *[a.given for a in written if a.is_recorded]])
        _keep_uncounted([a for a in of_parts if a not in written])
    for argument in written:
        aliases.write(argument.own)
        if argument.is_part:
            with torch.set_grad_enabled(torch.is_grad_enabled() and argument.is_recorded):
                argument.own.copy_(argument.part_now())
    return _own_results(aliases, out, of_parts)


def _gathered(gather: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the whole of a part, as a tensor of which torch counts the changes in place."""
    if not x.is_inference():
        return gather(x)
    with torch.inference_mode(False), torch.no_grad():
        return gather(x)


def _check(parts: Parts, name: str, written: Sequence[_Argument], arguments: Iterable[_Argument]) -> None:
    """Raise if a shape has changed, or an argument that the function may have read by another one."""

    def where() -> str:
        return f"{name} at {place_of_caller()} on rank {parts.rank} of {parts.world}"

    for one in written:
        if whole_shape(one.given) != whole_shape(one.own):
            raise RuntimeError(
                f"{where()} changes the shape of a sharded tensor in place, from {whole_shape(one.own)} to "
                f"{whole_shape(one.given)}; return another tensor"
            )
        for other in arguments:
            if other is not one and (one.is_part or other.is_part) and _overlap(one.own, other.own):
                raise RuntimeError(
                    f"{where()} changes one of two tensors that share memory, of shapes "
                    f"{whole_shape(one.own)} and {whole_shape(other.own)}; pass a clone of the other"
                )


def _keep_uncounted(arguments: Sequence[_Argument]) -> None:
    """Let parts have what their copies hold: kernels, and code that writes to `x.data`, count nothing."""
    memories = Counter(memory_of(a.own) for a in arguments)
    kept = []
    for argument in arguments:
        own, now = argument.own.data, argument.part_now().detach()
        if 0 not in own.stride() or own.numel() < 2:  # what is expanded cannot be written
            kept.append((own, now, now != own if memories[memory_of(own)] > 1 else None))
    for own, now, mask in kept:
        own.copy_(now if mask is None else torch.where(mask, now, own))


def _own_results(aliases: Aliases, out: Any, arguments: Sequence[_Argument]) -> Any:
    """Return results with the caller's own tensors for what the function got for them."""
    own = {id(a.given): a.own for a in arguments}
    memories = {memory_of(a.given): a.own for a in arguments}
    for x in tensors_in(out):
        if id(x) not in own and torch._C._has_storage(x) and memory_of(x) in memories:
            aliases.add_copies([x], memories[memory_of(x)])
    return changed(lambda x: own.get(id(x), x), out)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have items in common."""
    if not (torch._C._has_storage(a) and torch._C._has_storage(b)) or memory_of(a) != memory_of(b):
        return False
    return bool(torch.isin(_places(a), _places(b)).any())


def _places(x: Tensor) -> Tensor:
    """Return where in its memory a tensor's items lie, in bytes."""
    at = torch.tensor(x.storage_offset(), device="cpu")
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = at[..., None] + torch.arange(size, device="cpu") * stride
    return at.flatten() * x.element_size()
