# SPDX-License-Identifier: Apache-2.0
"""Whether a group of ranks that a model communicates with has others that share its sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

from .nested import tensors_in

ADVICE = "communicate outside of the blocks, or in a torch.autograd.Function, which gets whole tensors"
DIFFERS = "gives ranks that share a sharded sequence different results"
_UNEQUAL = ("reduce", "gather", "scatter", "alltoall")  # names without underscores


def ranks(group: Any) -> list[int]:
    """Return a group's ranks; none of a group that torch.distributed does not know."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return []


def ranks_of(mesh: Any) -> list[int]:
    """Return the ranks of a mesh of any number of dims."""
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


def is_apart(sequence: Any, members: Iterable[int]) -> bool:
    """Whether this rank alone, of the ranks of a sequence's group, is among the members of another group."""
    return len({*members} & {*ranks(sequence)}) == 1


def check_same_tokens(view: Any, name: str, group: Any, device: torch.device | str) -> None:
    """Raise on all ranks of a group of other ranks where these hold other tokens. Collective at first.

    A view compares once for each group: ranks keep their places in a sequence. device: one that the group
    serves.
    """
    if group.group_name in view.same_tokens:
        return
    own = torch.tensor([view.parts.rank, view.parts.world], device=device)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(rows, own, group)
    places = [tuple(row.tolist()) for row in rows]
    if any(place != places[0] for place in places):
        told = ", ".join(
            f"rank {rank} part {i} of {n}" for rank, (i, n) in zip(ranks(group), places, strict=True)
        )
        raise view.error(
            name,
            f"is over ranks with other tokens: {told}",
            "let these ranks have one place in their sequence groups, as in a mesh of ascending ranks",
        )
    view.same_tokens.add(group.group_name)


def is_collective_operator(name: str) -> bool:
    """Whether an operator is a functional collective of torch.distributed."""
    return name.startswith("_c10d_functional")


def waited(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a functional collective that returns when it has written, not before."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        for x in tensors_in(args, kwargs, out):
            torch.ops._c10d_functional.wait_tensor(x.detach())
        return out

    return run


def check_results(view: Any, name: str, given: Sequence[Any]) -> None:
    """Refuse a function of parts that gives ranks of the same sequence different results.

    name: of an operator, or of a Function of torch.distributed.nn. given: its arguments, one of which is a
    group, or a group's name.
    """
    if name.rpartition(".")[2].replace("_", "").lower().startswith(_UNEQUAL):
        for group in filter(None, map(_group, given)):
            if not is_apart(view.parts.group, ranks(group)):
                raise view.error(name, DIFFERS, ADVICE)


def _group(value: Any) -> Any:
    """Return the group that a value is, or names; None of other values."""
    if isinstance(value, str):
        with contextlib.suppress(RuntimeError):
            return _resolve_process_group(value)  # type: ignore[arg-type]
    return value if isinstance(value, ProcessGroup) else None
