# SPDX-License-Identifier: Apache-2.0
"""The blocks of a model, and what is sharded in front of each."""

from __future__ import annotations

import fnmatch
import inspect
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._C import call_key
from .images import has_convolutions
from .leaves import begin_block, has_blocks
from .part import Part, Parts, part_of, whole_shape
from .view import View, current_view, without_view

_STREAMS = ("hidden_states", "x", "src", "tgt", "input")  # the names of what blocks pass on
_MOST_KNOWN = 1000  # calls of a block


def find_blocks(
    model: torch.nn.Module, patterns: Sequence[str] | None, where: str
) -> dict[str, torch.nn.Module]:
    if patterns is None:
        lists = _lists(model, "")
        attending = [_like_attending(blocks) for blocks in lists]
        if not lists:
            ways = ['blocks=["layers.*"], the modules before which its sequence is to be sharded']
            rows = 'blocks=[""], by which rows of the images or videos that the model receives are sharded'
            ways.insert(not has_convolutions(model), rows)
            raise ValueError(
                f"{where}: {type(model).__name__} has no ModuleList of blocks; pass to spar.parallelize "
                + ", or ".join(ways)
            )
        chosen = attending if any(attending) else lists
        return {name: block for blocks in chosen for name, block in blocks.items()}
    modules = dict(model.named_modules())
    found: dict[str, torch.nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        depth = pattern.count(".")
        names = [n for n in modules if n.count(".") == depth and fnmatch.fnmatchcase(n, pattern)]
        names = [n for n in names if n or not pattern]
        if not names:
            known = ", ".join([name for name in modules if name][:8])
            raise ValueError(f"{where}: blocks has {pattern!r}; expected names of modules, such as {known}")
        found |= {name: modules[name] for name in names}
    return found


def _lists(module: torch.nn.Module, path: str) -> list[dict[str, torch.nn.Module]]:
    """Return the elements of each outermost list of modules, by their names."""
    found = []
    for name, child in module.named_children():
        at = f"{path}{name}"
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            found.append({f"{at}.{key}": block for key, block in child.named_children()})
        else:
            found += _lists(child, f"{at}.")
    return [blocks for blocks in found if blocks]


def _like_attending(blocks: dict[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the elements of a list that have attention, and those that receive the same as one of these.

    Such are layers of recurrences among layers of attention.
    """
    received = {_first_parameter(block) for block in blocks.values() if _attends(block)}
    return {name: block for name, block in blocks.items() if _first_parameter(block) in received}


def _first_parameter(block: torch.nn.Module) -> str:
    return next(iter(inspect.signature(block.forward).parameters), "")


def _attends(block: torch.nn.Module) -> bool:
    return any("att" in type(inner).__name__.lower() for inner in block.modules())


def number_of(name: str) -> int:
    """Return a number of a block that is the same on all ranks."""
    return zlib.crc32(name.encode())


# ---- in front of a block ----


class Shards:
    """The hook in front of a block: shards the sequence that it receives, and all that is as long."""

    def __init__(self, view: View, block: torch.nn.Module, number: int) -> None:
        self.view, self.number = view, number
        self.names = tuple(inspect.signature(block.forward).parameters)
        self.parts = view.parts
        self.known: dict[Any, tuple[Part | None, ...]] = {}  # by the arguments: what is made of them

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            if has_blocks():
                named = [(name, _in_node(x)) for name, x in self._named(args, kwargs)]
                begin_block(self.number, **{name: x for name, x in named if x is not None})
            return None
        if current_view() is not self.view:
            return None
        with without_view():
            return self._shard(args, kwargs)

    def _shard(self, args: Any, kwargs: Any) -> Any:
        """Which tensor is the sequence is a matter of speed alone: whatever is sharded, results are right."""
        if self.parts is not self.view.parts:
            self.parts = self.view.parts
            self.known.clear()
        key = call_key(self.names, args, kwargs)
        parts = None if key is None else self.known.get(key)
        if parts is None:
            parts = self._parts(args, kwargs)
            if key is not None:
                if len(self.known) >= _MOST_KNOWN:
                    self.known.clear()
                self.known[key] = parts
        places = iter(parts)
        made: dict[int, Tensor] = {}  # a block may compare two arguments by identity
        own = tuple([self._entry(x, places, made) for x in args])
        return own, {name: self._entry(x, places, made) for name, x in kwargs.items()}

    def _entry(self, x: Any, places: Iterator[Part | None], made: dict[int, Tensor]) -> Any:
        """Return what a block receives for x. A closure that calls itself would keep `made`."""
        if type(x) is tuple:
            return tuple([self._entry(entry, places, made) for entry in x])
        part = next(places, None) if isinstance(x, Tensor) else None
        if part is None:
            return x
        if id(x) not in made:
            made[id(x)] = self.view.shard(x, part)
        return made[id(x)]

    def _parts(self, args: Any, kwargs: Any) -> tuple[Part | None, ...]:
        """Return the part that is made of each tensor, in order; none if all stay."""
        parts = parts_of_arguments(self.view.parts, self._named(args, kwargs))
        wanted = [parts.get(id(x)) for x in _given(args, kwargs)]
        return tuple(wanted) if any(part is not None for part in wanted) else ()

    def _named(self, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        return [*zip(self.names, args, strict=False), *kwargs.items()]


def parts_of_arguments(made: Parts, named: list[tuple[str, Any]]) -> dict[int, Part]:
    """Return the parts that are made of a block's arguments, by the tensors' identities."""
    tensors = [(name, x) for name, x in named if isinstance(x, Tensor)]
    # Such as cosines and sines, [B, S, D] or [S, D]; [S, S] would be a mask.
    inner = [x for _, value in named if type(value) is tuple for x in value if isinstance(x, Tensor)]
    inner = [x for x in inner if x.dim() > 1 and x.size(-1) != x.size(-2)]
    parts: dict[int, Part] = {}
    total = next((x.size(-1) for name, x in tensors if name == "position_ids" and x.dim() > 0), -1)
    for main in _streams([(name, x) for name, x in tensors if x.is_floating_point()], total):
        part = part_of(main)
        if part is None:
            dim = _dim_of_tokens(main, total)
            if main.size(dim) < made.world:
                continue
            part = parts[id(main)] = made.part(dim, (main.size(dim),))
        if part.is_plain:
            for x in [x for _, x in tensors if x.dim() > 2] + inner:
                is_whole = part_of(x) is None
                if is_whole and x.dim() > max(part.dim, 1) and x.size(part.dim) == part.whole:
                    parts.setdefault(id(x), part)
        if part.dim == 0:
            for x, of_graph in _of_graph([x for _, x in tensors], part):
                parts.setdefault(id(x), of_graph)
    return parts


def _of_graph(tensors: list[Tensor], nodes: Part) -> Iterator[tuple[Tensor, Part]]:
    """Return what else a layer of a graph network receives of each node or edge; edges: ints [2, E]."""
    made = nodes.parts
    pairs = [x for x in tensors if x.dim() == 2 and x.size(0) == 2 and x.dtype in (torch.int64, torch.int32)]
    edges = [made.part(0, (x.size(1),)) for x in pairs if part_of(x) is None and x.size(1) >= made.world]
    for x in tensors if pairs else ():
        if x.is_floating_point() and x.dim() and part_of(x) is None:
            yield from [(x, part) for part in (nodes, *edges) if part.is_plain and part.whole == x.size(0)]


def _in_node(value: Any) -> Any:
    """Return what a node of a graph has of a block's argument: a tensor, or those of a tuple; else None."""
    if type(value) is tuple:
        return tuple([x for x in value if isinstance(x, Tensor)]) or None
    return value if isinstance(value, Tensor) else None


def _given(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Return the tensors among a block's arguments, and in tuples of them."""
    for x in (*args, *kwargs.values()):
        if type(x) is tuple:
            yield from _given(x, {})
        elif isinstance(x, Tensor):
            yield x


def _streams(tensors: list[tuple[str, Tensor]], total: int) -> list[Tensor]:
    """Return the sequences among a block's arguments: by their names, else the first and the longest.

    total: the number of positions, where they are an argument; with it, one tensor may hold several streams,
    as hyper-connections have: [B, S, streams, D], or [streams, B, S, D].
    """
    named = [x for name, x in tensors if name in _STREAMS and (x.dim() in (2, 3) or _is_stack(x, total))]
    if named:
        return named
    some = [x for _, x in tensors if x.dim() == 3] or [x for _, x in tensors if x.dim() == 2]
    some = [x for x in some if min(whole_shape(x)[:-1]) > 1] or some
    return [*some[:1], max(some, key=lambda x: max(whole_shape(x)[:-1]))] if some else []


def _is_stack(x: Tensor, total: int) -> bool:
    return x.dim() == 4 and total in whole_shape(x)[1:3]


def _dim_of_tokens(x: Tensor, total: int) -> int:
    if _is_stack(x, total):
        return 1 if x.size(1) == total else 2
    return 1 if x.dim() == 3 and x.size(1) >= x.size(0) else 0
