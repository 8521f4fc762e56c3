# SPDX-License-Identifier: Apache-2.0
"""Blocks of a sharded model that run as torch.compile's code, where the user asked for that.

torch.compile cannot trace a view, and need not: it traces the block's own code on hollow tensors, of whole
shapes, and `tracing` makes code for this rank's parts of the graph. What cannot be compiled runs eagerly, for
a reason that the report has: so do all ranks, which agree on each new graph. The model's first forward is
eager, and fills the report.
"""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch._functorch._aot_autograd.schemas import OutputType
from torch.compiler import is_dynamo_compiling

from .._exchange.observers import _dispatch_modes
from ..ops.gather import all_gather
from .backends import Backend, backend_in, compiled_by
from .graph_inputs import GraphInputs
from .hollow import Hollows, is_hollow, local_of
from .leaves import allow_in_graph
from .module_leaves import Numbers, Same
from .nested import changed, sequence_of, tensors_in
from .part import Shard, mark, shard_of
from .spans_mask import SpansMask
from .tracing import Refused, Traced, compiling
from .view import View, without_view

_hollows = Hollows()
_numbers = itertools.count()  # of the copies of functions
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_INPUTS = (OutputType.alias_of_input, OutputType.is_input)
_MOST_ALIKE = 4  # blocks that are tried in vain, beside others that are compiled
_KNOWN = frozenset({"_spar_shard", "_spar_even"})  # attributes of parts, which hollow tensors need not have


class Disagreed(Exception):
    """Another rank could not compile a block."""


class CompiledBlocks:
    """What torch.compile made of a sharded model's blocks.

    Attributes:
        leaves: by modules that graphs have as one node, what stands in place of their forwards.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.leaves: dict[nn.Module, Any] = {}
        self.numbers = Numbers()
        self.kinds: dict[Any, _Kind] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledBlocks:
        made = CompiledBlocks(copy.deepcopy(self.view, memo))
        made.leaves = copy.deepcopy(self.leaves, memo)
        return made

    def run(self, block: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a block's own forward in the view: compiled if the user asked for it, and if it can be."""
        view = self.view
        backend = None if view._aliases.any_stale else view.backend_of(block)
        if backend is None:
            return own(*args, **kwargs)
        key = backend, type(vars(block)["_modules"].get("_orig_mod", block)), _code(own)
        kind = self.kinds.get(key)
        if kind is None:
            allow_in_graph()
            kind = self.kinds[key] = _Kind(view, backend, self.numbers)
        tensors = tensors_in(args, kwargs)
        shards = tuple([shard_of(x) or isinstance(x, SpansMask) for x in tensors])
        is_of_parts = any(isinstance(shard, Shard) for shard in shards)
        if kind.reason or block in kind.reasons or not is_of_parts:
            return own(*args, **kwargs)
        if _is_watched():
            view.report.add_eager(block, "a mode, a transform or a global hook is to see its functions")
            return own(*args, **kwargs)
        if names := {name for x in tensors if shard_of(x) for name in vars(x)} - _KNOWN:
            kind.refuse(block, f"an argument has the attribute {min(names)}")
            return own(*args, **kwargs)
        entry = kind.entry(block, shards, (shards, *_replaced_code(block)))
        if entry is None:
            return own(*args, **kwargs)
        for module in block.modules() if self.leaves else ():
            forward = self.leaves.get(module)
            if forward is not None:
                forward.number = self.numbers.number(module, forward)
        return entry.call(block, own, args, kwargs, {id(x) for x in tensors})


def backend_of(asked: Backend | None, block: nn.Module) -> Backend | None:
    """Return by which backend a block is compiled; asked: the model's."""
    made = vars(block).get("_compiled_call_impl")
    wrapping = vars(block).get("dynamo_ctx")  # of what torch.compile(block) returned
    if wrapping is not None:
        return backend_in(wrapping.callback)
    return asked if made is None else compiled_by(made)


def _is_watched() -> bool:
    """Whether a mode in the view, a transform or a hook of all modules is to see the functions of a block."""
    newest = _get_function_stack_at(_len_torch_function_stack() - 1)
    is_seen = not isinstance(newest, View) or bool(_dispatch_modes()) or maybe_current_level() is not None
    return is_seen or torch.nn.modules.module._has_any_global_hook()


def _replaced_code(module: nn.Module, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """Return what users put into inner modules of a block, with their places: torch's guards may miss it.

    These are hooks, and forwards in the place of a class's own.
    """
    for place, inner in enumerate(module._modules.values()):
        if inner is None:
            continue
        own = vars(inner)
        if any(own[name] for name in _HOOKS) or "forward" in own:
            hooks = [Same(hook) for name in _HOOKS for hook in own[name].values()]
            forward = own.get("forward")
            yield path, place, *hooks, None if hasattr(type(forward), "is_like_others") else Same(forward)
        yield from _replaced_code(inner, (*path, place))


def _code(own: Any) -> Any:
    """Return what blocks of one class share."""
    function = getattr(own, "__func__", own)
    return getattr(function, "__code__", function)


class _Kind:
    """Blocks of one class, for one backend.

    Attributes:
        reason: why none of them is compiled any more; empty if some are.
        reasons: of blocks, why they are not.
    """

    def __init__(self, view: View, backend: Backend, numbers: Numbers) -> None:
        self.view, self.backend, self.numbers = view, backend, numbers
        self.reason, self.reasons = "", dict[nn.Module, str]()
        self._entries: dict[Any, _Entry] = {}  # by what the arguments are

    @property
    def graphs(self) -> int:
        return sum(entry.graphs for entry in self._entries.values())

    def entry(self, block: nn.Module, shards: Any, key: Any) -> _Entry | None:
        """Return the code for arguments that are these parts; None if there is too much, or can be none.

        key: of these, and of what else torch's guards may miss.
        """
        found = self._entries.get(key)
        if found is None:
            if any(isinstance(shard, Shard) and min(shard.part.sizes) < 2 for shard in shards):
                # Of one token, strides do not tell in which order the dims lie on other ranks.
                self.view.report.add_eager(block, "a rank has less than two tokens of an argument")
                return None
            most: int = torch._dynamo.config.recompile_limit
            if len(self._entries) >= most:
                self.view.report.add_eager(block, f"its arguments are of more than {most} lengths or layouts")
                return None
            found = self._entries[key] = _Entry(self)
        return found

    def refuse(self, block: nn.Module, reason: str, *, for_all: bool = False) -> None:
        """Let a block run eagerly from now on; all, where several could not be compiled for one reason."""
        self.reasons[block] = reason
        self.view.report.add_eager(block, reason)
        alike = sum(other == reason for other in self.reasons.values())
        if for_all or alike >= (_MOST_ALIKE if self.graphs else 2):
            self.reason = reason


class _Entry:
    """The code of blocks of one class, for arguments that are these parts.

    Dynamo keeps several graphs of it, by its guards.

    Attributes:
        graphs: how many were made.
    """

    def __init__(self, kind: _Kind) -> None:
        self.kind, self.view = kind, kind.view
        self.graphs = 0
        self._is_new = False  # whether a graph was made, of which the ranks have not agreed yet
        self._runs = False  # whether compiled code runs, whose errors are the user's
        self._given: set[int] = set()  # the tensors among the arguments, by identity
        self._inputs: set[int] = set()  # those of the graph that is being made
        self._compiled: Any = torch.compile(
            of_its_own(_run),
            backend=self._make,
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": self._check_guards},
        )

    # ---- a call ----

    def call(self, block: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any, given: set[int]) -> Any:
        """given: the tensors among the arguments, by identity."""
        self._given = given
        used: dict[int, Tensor] = {}
        containers: list[Any] = []

        def hollow(x: Tensor) -> Tensor:
            if shard_of(x) is None and not isinstance(x, SpansMask):
                return x
            if x.is_neg() or (x.is_complex() and x.is_conj()):
                raise Refused("an argument is a conjugate view, or a negative one")
            if id(x) not in used:
                used[id(x)] = _hollows.take(x)
            return used[id(x)]

        self._runs = False
        try:
            with without_view():
                try:
                    with compiling():
                        out = self._compiled(own, *[_replaced(hollow, x, containers) for x in (args, kwargs)])
                finally:
                    for container in containers:
                        _replaced(local_of, container, [])
                    containers.clear()
        except Exception as error:
            if self._runs:
                raise
            self._fail(block, error)
            return own(*args, **kwargs)
        out = changed(local_of, out)
        self._release(block, used)
        return out

    def _fail(self, block: nn.Module, error: Exception) -> None:
        """Let a block run eagerly; and all others, where a rank has code for it and another has not."""
        differs = isinstance(error, Disagreed)
        if not differs:
            self._is_new = False
            with without_view():
                differs = _agree(self.view, False)
        self.kind.refuse(block, _reason_of(error), for_all=differs)

    def _release(self, block: nn.Module, used: dict[int, Tensor]) -> None:
        """Give hollow tensors back; where a block keeps one, as in an attribute, it gets the part instead."""
        for key in [*used]:
            if _references(used, key) > _ALONE:
                gc.collect()
            if _references(used, key) > _ALONE:
                _replace_everywhere(used[key], local_of(used[key]), used)
                self.kind.refuse(block, "it keeps an argument")
                if _references(used, key) > _ALONE:
                    raise self.view.error(
                        type(block).__name__,
                        "keeps an argument where spar cannot find it",
                        "do not compile it",
                    )
            else:
                _hollows.give_back(used.pop(key))

    # ---- a graph ----

    def _check_guards(self, guards: Any) -> list[bool]:
        """Say which guards count; refuse a graph that depends on a tensor which is no argument and no input.

        Such a tensor could be a part in a later call: no run would see that.
        """
        for guard in guards:
            x = guard.value
            if guard.guard_type != "TENSOR_MATCH" or not isinstance(x, Tensor):
                continue
            if not (isinstance(x, nn.Parameter) or is_hollow(x) or id(x) in self._inputs | self._given):
                raise Refused(f"it depends on the shape of {guard.name}, which is no argument")
        # The forward of a layer's experts is another object in each, whose attributes have their own guards.
        return [
            guard.guard_type != "CLOSURE_MATCH" or not hasattr(type(guard.value), "is_like_others")
            for guard in guards
        ]

    def _make(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Make code of a graph that Dynamo recorded: the backend that Dynamo calls."""
        inputs = GraphInputs(graph, examples)
        self._inputs = inputs.identities
        view = self.view
        traced = Traced(graph, view, inputs.shards, inputs.masks, self.kind.numbers)
        code = self.kind.backend.make(traced, inputs.fakes)
        known = {each.function for each in view.report.functions if each.in_block}
        # Dynamo may trace the functions of an autograd Function, which ran whole by its name.
        if all(map(_is_of_torch, known)) and (new := sorted(traced.ran_whole - known)):
            raise Refused(f"only compiled these would run whole: {', '.join(new)}")
        context: Any = torch._guards.TracingContext.get()
        metadata = context.fw_metadata
        written = [i for i, x in enumerate(metadata.input_info) if x.mutates_data or x.mutates_metadata]
        returned = [x.base_idx for x in metadata.output_info if x.output_type in _OF_INPUTS]
        self.graphs += 1
        self._is_new = True
        results, copies = traced.results, traced.copies

        def run(*given: Any) -> Any:
            local = inputs.local(given)
            if self._is_new:
                self._is_new = False
                if not _agree(view, True):
                    raise Disagreed("another rank could not compile it")
            if written or returned:
                before = [local[i] for i in (*written, *returned)]
                inputs.make_dense(local)
                if any(local[i] is not x for i, x in zip((*written, *returned), before, strict=True)):
                    raise Refused("it changes or returns an argument that has gaps in memory")
                _check_overlap(local, written)
            else:
                inputs.make_dense(local)
            self._runs = True
            out = code(*local)
            for i in written:
                view.note_written([local[i]])
            for x, shard in zip(out, results, strict=True):
                if shard is not None:
                    mark(x, shard.part)
            for i, j in copies:
                view._aliases.add_copies([out[i]], (*local, *out)[j])
            return out

        return run


def _agree(view: View, is_compiled: bool) -> bool:
    """Return whether all ranks have compiled a block; to one that has not, whether any has. Collective."""
    flag = torch.tensor([is_compiled], device=view.parts.device)
    found = all_gather(flag, view.parts.group).tolist()
    return all(found) if is_compiled else any(found)


def _run(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a block's own forward: what Dynamo traces. Whoever else ran it would read hollow tensors."""
    if not is_dynamo_compiling():
        raise Refused("torch.compile is turned off, or skipped it")
    return own(*args, **kwargs)


def _is_of_torch(name: str) -> bool:
    return any(hasattr(owner, name) for owner in (torch, Tensor, nn.functional))


def of_its_own(function: types.FunctionType | Any) -> Any:
    """Return a copy of a function with code of its own: Dynamo counts and finds graphs by the code."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__)


def _check_overlap(local: list[Any], written: list[int]) -> None:
    memories: dict[int, int] = {}
    for x in local:
        memory = x.untyped_storage()._cdata
        memories[memory] = memories.get(memory, 0) + 1
    if any(memories[local[i].untyped_storage()._cdata] > 1 for i in written):
        raise Refused("it changes one of two arguments that share memory")


# ---- what a block does with its arguments ----


def _replaced(function: Callable[[Tensor], Any], value: Any, containers: list[Any]) -> Any:
    """Return a nested value with function's result for each tensor, and list what was changed for that.

    Lists, dicts and dataclasses are changed in place, innermost first: others may refer to them.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        entries = [_replaced(function, entry, containers) for entry in value]
        is_same = all(now is entry for now, entry in zip(entries, value, strict=True))
        return value if is_same else sequence_of(value, entries)
    if isinstance(value, list):
        places: Any = range(len(value))
    elif isinstance(value, MutableMapping):
        places = [*value]
    elif is_dataclass(value) and not isinstance(value, type):
        for name in [field.name for field in fields(value) if hasattr(value, field.name)]:
            before = getattr(value, name)
            now = _replaced(function, before, containers)
            if now is not before:
                object.__setattr__(value, name, now)
        containers.append(value)
        return value
    else:
        return value
    for place in places:
        now = _replaced(function, value[place], containers)
        if now is not value[place]:
            value[place] = now
    containers.append(value)
    return value


def _references(used: dict[int, Any], key: int) -> int:
    return sys.getrefcount(used[key])


_ALONE = _references({0: object()}, 0)  # of what nobody else refers to


def _replace_everywhere(hollow: Tensor, x: Tensor, used: dict[int, Tensor]) -> None:
    """Put a part in the place of a hollow tensor in dicts but `used`, as of attributes, and in lists."""
    for holder in gc.get_referrers(hollow):
        if holder is used:
            continue
        if isinstance(holder, dict):
            for key in [key for key, value in holder.items() if value is hollow]:
                holder[key] = x
        elif isinstance(holder, list):
            holder[:] = [x if value is hollow else value for value in holder]


def _reason_of(error: BaseException) -> str:
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "a size or a seed is known from values alone, as that of attention with dropout"
    first = str(error).strip().partition("\n")[0][:300]
    return first if isinstance(error, (Refused, Disagreed)) else f"{type(error).__name__}: {first}"
