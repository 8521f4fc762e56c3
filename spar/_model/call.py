# SPDX-License-Identifier: Apache-2.0
"""A call of a torch function as its rule sees it, and the plan that the rule makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .functions import function_of
from .nested import changed, tensors_in
from .part import Part, Parts, Shard, is_uneven, part_of, whole_shape


class Plan(NamedTuple):
    """How a function runs on parts. It depends on parts and whole shapes alone, which all ranks know.

    It serves later calls with other floats, too.

    Attributes:
        part: of the result; of each result if it is a tuple; None if it is whole.
        moves: what is first made of tensors among the arguments, by their order: a part of a whole tensor, or
            None, the whole of a part.
        replaced: other values of arguments, by position or name.
        becomes: what the first argument, which the function writes, becomes in place if it is a whole tensor
            that this forward made.
        run: what is called in the function's place.
        work: multiply-adds on this rank, and in the whole.
    """

    part: Part | tuple[Part | None, ...] | None = None
    moves: tuple[tuple[int, Part | None], ...] = ()
    replaced: tuple[tuple[int | str, Any], ...] = ()
    becomes: Part | None = None
    run: Any = None
    work: tuple[int, int] = (0, 0)


class Step:
    """A plan, and what its results are: found where it first runs, as equal calls have equal shapes."""

    __slots__ = ("copies", "makes", "may_copy", "plan", "result", "run", "writes")

    def __init__(self, plan: Plan | None, func: Any) -> None:
        self.plan = plan
        self.run = (plan and plan.run) or func
        self.result: Shard | list[Shard | None] | None = None  # of one result, or of several
        self.copies = False  # whether results would share memory if nothing was sharded, and do not
        self.may_copy = False  # whether a result may share memory, and would not if nothing was sharded
        self.makes = False  # whether its result is a new whole tensor of no other's elements
        self.writes = False  # whether it changes its first argument

    def find_result(self, name: str, out: Any) -> Shard | list[Shard | None] | None:
        """Return what the results are by those of the first run."""
        part = self.plan and self.plan.part
        if part is None:
            return None
        if isinstance(part, Part) and isinstance(out, Tensor):
            return _shard_of(name, part, out)
        parts = part if isinstance(part, tuple) else (part,) * len(out)
        return [None if p is None else _shard_of(name, p, x) for x, p in zip(out, parts, strict=True)]


def _shard_of(name: str, part: Part, x: Tensor) -> Shard:
    if part.dim >= x.dim() or x.size(part.dim) != part.local:
        raise RuntimeError(
            f"{name}: the rule says {part}, {part.local} of which are on this rank, for a result of shape "
            f"{list(x.shape)} there; this is a fault of spar, please report it"
        )
    return part.shard(x.shape)


class FunctionCall:
    """A torch function with its arguments, some of which are parts."""

    def __init__(self, parts: Parts, name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.parts, self.name, self.function = parts, name, function
        self.args, self.kwargs = args, kwargs
        self.tensors = tensors_in(args, kwargs)
        known = function_of(function)
        self.is_inplace, self._places = known.is_inplace, known.places

    def get(self, position: int, *names: str, default: Any = None) -> Any:
        """Return an argument by the first of its names that the function has, or else by its position."""
        places = self._places
        position = next((places[name] for name in names if name in places), position)
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def sizes(self, position: int, *names: str) -> list[int]:
        """Return sizes that are passed as one argument or as all the rest."""
        rest = self.args[position:] or (self.get(position, *names, default=()),)
        return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else list(rest)

    @property
    def input(self) -> Any:
        return self.get(0, "input", "self", "query", "tensor")

    @property
    def part(self) -> Part | None:
        """The part of the first argument."""
        return part_of(self.input)

    @property
    def has_later_part(self) -> bool:
        """Whether a tensor behind the first argument is a part."""
        return any(part_of(x) is not None for x in self.tensors[1:])

    @property
    def has_uneven(self) -> bool:
        """Whether an argument is a part of an `Uneven` sequence."""
        return any(map(is_uneven, self.tensors))

    def dims(self, x: Tensor, dim: Any) -> list[int]:
        """Return dims, from 0, of one or several that may count from the last."""
        return [d % max(x.dim(), 1) for d in (dim if isinstance(dim, (list, tuple)) else (dim,))]


def are_ints(values: Sequence[Any]) -> bool:
    """Whether sizes or bounds are ints: a tensor's value is none that a plan may depend on."""
    return all(isinstance(value, int) for value in values)


Rule = Callable[[FunctionCall], Plan | None]
RULES: dict[str, Rule] = {}
SERVE_UNEVEN: set[Rule] = set()  # rules for uneven parts, too


def rule(names: str, *, uneven: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for functions of these names: torch's, its methods, and get_x for the attribute x.

    get_is_* stands for all attributes of such a name, as one for each type of device.

    uneven: whether the rule serves uneven parts; for others these are first moved to even ones.

    A rule returns None for a call that it cannot run on parts; then it runs whole on each rank.
    """

    def register(function: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, name
            RULES[name] = function
        if uneven:
            SERVE_UNEVEN.add(function)
        return function

    return register


def part_rule(
    names: str, *, uneven: bool = False
) -> Callable[[Callable[[FunctionCall, Part], Plan | None]], Rule]:
    """Register a rule for calls whose first argument is a part, which it receives; others run whole."""

    def register(function: Callable[[FunctionCall, Part], Plan | None]) -> Rule:
        def of_first(call: FunctionCall) -> Plan | None:
            part = call.part
            return None if part is None else function(call, part)

        return rule(names, uneven=uneven)(of_first)

    return register


def rule_of(name: str) -> Rule | None:
    return RULES.get("get_is_*" if name.startswith("get_is_") else name)


def moves_to(
    call: FunctionCall, wanted: Sequence[tuple[Tensor, Part | None]]
) -> tuple[tuple[int, Part | None], ...]:
    """Return a plan's moves of tensors that are not yet the parts which they are to be."""
    parts = {id(x): part for x, part in wanted}
    return tuple(
        [
            (i, parts[id(x)])
            for i, x in enumerate(call.tensors)
            if id(x) in parts and part_of(x) is not parts[id(x)]
        ]
    )


def verify(call: FunctionCall, plan: Plan) -> None:
    """Compare the part that a plan promises with the function's whole shapes, found without elements."""
    try:
        # The caller's dispatch modes would count or save what runs here.
        with torch._C._DisableTorchDispatch():
            meta = changed(_without_elements, (call.args, call.kwargs))
            expected = tensors_in(call.function(*meta[0], **meta[1]))
    except Exception:  # a function that does not run without elements
        return
    each = plan.part if isinstance(plan.part, tuple) else (plan.part,) * len(expected)
    for part, x in zip(each, expected, strict=True):
        if part is not None and (part.dim >= x.dim() or x.size(part.dim) != part.whole):
            raise RuntimeError(
                f"{call.name}: the rule says {part} for a result of shape {list(x.shape)}; this is a fault "
                "of spar, please report it"
            )


def _without_elements(x: Tensor) -> Tensor:
    return torch.empty(whole_shape(x), dtype=x.dtype, device="meta")
