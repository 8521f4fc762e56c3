# SPDX-License-Identifier: Apache-2.0
"""A sharded model, or its blocks, that run as torch.compile's code, where the user asked for that.

torch.compile cannot trace a view, and need not: it traces the model's or the block's own code, of whole
shapes (parts among the arguments are hollow tensors), and `tracing` makes code for this rank's parts of the
graph. A model that cannot be one graph is compiled block by block, and a block that cannot be compiled runs
eagerly, each for a reason that the report has: so do all ranks, which agree on each new graph. The model's
first forward is eager, and fills the report.
"""

from __future__ import annotations

import copy
import itertools
import types
import zlib
from collections.abc import Callable
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
from .functions import function_of
from .generators import CODE
from .graph_inputs import GraphInputs
from .hollow import is_hollow, local_of
from .hollow_arguments import HollowArguments, KeptElsewhere
from .leaves import Refused, allow_in_graph, begins_blocks
from .module_leaves import Numbers, Same
from .nested import changed, tensors_in
from .part import Shard, mark, shard_of
from .spans_mask import SpansMask
from .tracing import Traced, compiling
from .view import View, without_view

_numbers = itertools.count()  # of the copies of functions
# Of a module, and where it has how they are called.
_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
_OF_INPUTS = (OutputType.alias_of_input, OutputType.is_input)
_MOST_ALIKE = 4  # blocks that are tried in vain, beside others that are compiled
_MOST_SHAPES, _MOST_GRAPHS = 2, 4  # of a model, for which torch.compile takes minutes
_KNOWN = frozenset({"_spar_shard", "_spar_even"})  # attributes of parts, which hollow tensors need not have


class Disagreed(Exception):
    """Another rank could not compile a model or a block."""


class Compiled:
    """What torch.compile made of a sharded model and its blocks.

    Attributes:
        leaves: by modules that graphs have as one node, what stands in place of their forwards.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.leaves: dict[nn.Module, Any] = {}
        self.numbers = Numbers()
        self.kinds: dict[Any, _Kind] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        made = Compiled(copy.deepcopy(self.view, memo))
        made.leaves = copy.deepcopy(self.leaves, memo)
        return made

    def run(self, block: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a block's own forward in the view: compiled if the user asked for it, and if it can be."""
        view = self.view
        backend = None if view._aliases.any_stale else view.backend_of(block)
        if backend is None:
            return own(*args, **kwargs)
        kind = self._kind(_Kind, backend, block, own)
        tensors = tensors_in(args, kwargs)
        shards = tuple([shard_of(x) or isinstance(x, SpansMask) for x in tensors])
        if not any(isinstance(shard, Shard) for shard in shards):
            return own(*args, **kwargs)
        return self._run(kind, block, own, args, kwargs, tensors, shards)

    def run_model(
        self, model: nn.Module, backend: Backend | None, own: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a model's own forward in the view: as one graph, if a backend is given and if it can be."""
        if backend is None:
            return own(*args, **kwargs)
        kind = self._kind(_ModelKind, backend, model, own)
        tensors = tensors_in(args, kwargs)
        shapes = tuple([shard_of(x) or (isinstance(x, SpansMask), x.shape) for x in tensors])
        return self._run(kind, model, own, args, kwargs, tensors, (self.view.parts, shapes))

    def _kind(self, make: type[_Kind], backend: Backend, module: nn.Module, own: Any) -> _Kind:
        key = make, backend, type(vars(module)["_modules"].get("_orig_mod", module)), _code(own)
        kind = self.kinds.get(key)
        if kind is None:
            allow_in_graph()
            kind = self.kinds[key] = make(self.view, backend, self.numbers)
        return kind

    def _run(
        self,
        kind: _Kind,
        module: nn.Module,
        own: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        given: Any,
    ) -> Any:
        """given: what the tensors among the arguments are."""
        if kind.reason or module in kind.reasons:
            return own(*args, **kwargs)
        if _is_watched():
            kind.note(module, "a mode, a transform or a global hook is to see its functions")
            return own(*args, **kwargs)
        if names := {name for x in tensors if shard_of(x) for name in vars(x)} - _KNOWN:
            kind.refuse(module, f"an argument has the attribute {min(names)}")
            return own(*args, **kwargs)
        entry = kind.entry(module, tensors, (given, *_replaced_code(module)))
        if entry is None:
            return own(*args, **kwargs)
        for inner in module.modules() if self.leaves else ():
            forward = self.leaves.get(inner)
            if forward is not None:
                forward.number = self.numbers.number(inner, forward)
        return entry.call(module, own, args, kwargs, {id(x) for x in tensors})


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


def _replaced_code(module: nn.Module) -> list[Any]:
    """Return what users put into inner modules, each with its place: torch's guards may miss it.

    These are hooks, and forwards in the place of a class's own.
    """
    found: list[Any] = []
    modules = [*module._modules.values()]
    for place, inner in enumerate(modules):  # it grows
        if inner is None:
            continue
        own = inner.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            forward = own.get("forward")
            found += (place, None if hasattr(type(forward), "is_like_others") else Same(forward))
            for name, flags in _HOOKS.items():
                found += [
                    (Same(hook), *[key in own[flag] for flag in flags]) for key, hook in own[name].items()
                ]
        modules += own["_modules"].values()
    return found


def _code(own: Any) -> Any:
    """Return what blocks of one class share."""
    function = getattr(own, "__func__", own)
    return getattr(function, "__code__", function)


class _Kind:
    """Blocks of one class, for one backend.

    Attributes:
        reason: why none of them is compiled any more; empty if some are.
        reasons: of blocks, why they are not.
        has_blocks: whether it is of a model.
    """

    has_blocks = False

    def __init__(self, view: View, backend: Backend, numbers: Numbers) -> None:
        self.view, self.backend, self.numbers = view, backend, numbers
        self.reason, self.reasons = "", dict[nn.Module, str]()
        self._entries: dict[Any, _Entry] = {}  # by what the arguments are

    @property
    def graphs(self) -> int:
        return sum(entry.graphs for entry in self._entries.values())

    def entry(self, module: nn.Module, tensors: list[Tensor], key: Any) -> _Entry | None:
        """Return the code for such arguments; None if there is too much, or can be none.

        key: of what the arguments are, and of what else torch's guards may miss.
        """
        found = self._entries.get(key)
        if found is None:
            if any(min(shard.part.sizes) < 2 for shard in map(shard_of, tensors) if shard is not None):
                # Of one token, strides do not tell in which order the dims lie on other ranks.
                self.note(module, "a rank has less than two tokens of an argument")
                return None
            if len(self._entries) >= self.most:
                self.note(module, f"its arguments are of more than {self.most} lengths or layouts")
                return None
            found = self._entries[key] = _Entry(self)
        return found

    @property
    def most(self) -> int:
        """The number of lengths and layouts for which code is made."""
        found: int = torch._dynamo.config.recompile_limit
        return found

    def note(self, module: nn.Module, reason: str) -> None:
        """Report why a call is not of compiled code."""
        self.view.report.add_eager(module, reason)

    def refuse(self, module: nn.Module, reason: str, *, for_all: bool = False) -> None:
        """Let a block run eagerly from now on; all, where several could not be compiled for one reason."""
        self.reasons[module] = reason
        self.note(module, reason)
        alike = sum(other == reason for other in self.reasons.values())
        if for_all or alike >= (_MOST_ALIKE if self.graphs else 2):
            self.reason = reason

    def check(self, graph: torch.fx.GraphModule) -> None:
        """Refuse a graph of which no code is to be made."""


class _ModelKind(_Kind):
    """A model, for one backend: what is not one graph is compiled block by block."""

    has_blocks = True
    most = _MOST_SHAPES

    def note(self, module: nn.Module, reason: str) -> None:
        self.view.report.add_by_block(reason)

    def check(self, graph: torch.fx.GraphModule) -> None:
        if self.graphs >= _MOST_GRAPHS:
            raise Refused(f"it is {_MOST_GRAPHS} graphs already")
        if not begins_blocks(graph):
            raise Refused("no block begins in its graph")


class _Entry:
    """The code of blocks of one class, or of a model, for arguments that are these parts.

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

    def call(
        self, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any, given: set[int]
    ) -> Any:
        """given: the tensors among the arguments, by identity."""
        self._given = given
        hollow = HollowArguments()
        self._runs = False
        try:
            with without_view():
                try:
                    with compiling(self.kind.has_blocks):
                        out = self._compiled(own, hollow.take(args), hollow.take(kwargs))
                finally:
                    hollow.restore()
        except Exception as error:
            if self._runs:
                raise
            self._fail(module, error)
            return own(*args, **kwargs)
        out = changed(local_of, out)
        try:
            if hollow.release():
                self.kind.refuse(module, "it keeps an argument")
        except KeptElsewhere:
            self.kind.refuse(module, "it keeps an argument")
            raise self.view.error(
                type(module).__name__, "keeps an argument where spar cannot find it", "do not compile it"
            ) from None
        return out

    def _fail(self, module: nn.Module, error: Exception) -> None:
        """Let it run without this code; and all of its kind, where another rank has code for it."""
        differs = isinstance(error, Disagreed)
        if not differs:
            self._is_new = False
            with without_view():
                differs = _agree(self.view, False)
        self.kind.refuse(module, _reason_of(error), for_all=differs)

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
        self.kind.check(graph)
        inputs = GraphInputs(graph, examples)
        self._inputs = inputs.identities
        view = self.view
        traced = Traced(graph, view, inputs.shards, inputs.masks, self.kind.numbers)
        code = self.kind.backend.make(traced, inputs.fakes)
        is_of_model = self.kind.has_blocks
        known = {each.function for each in view.report.functions if is_of_model or each.in_block}
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
        code_number = _number_of(graph)

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
            view._fold(CODE, code_number)
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


def _number_of(graph: torch.fx.GraphModule) -> int:
    """Return a number of a graph's functions, by which ranks see that others run another graph."""
    targets = [node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    names = [x if isinstance(x, str) else function_of(x).name for x in targets]
    return zlib.crc32(" ".join(names).encode())


def _agree(view: View, is_compiled: bool) -> bool:
    """Return whether all ranks have compiled it; to one that has not, whether any has. Collective."""
    flag = torch.tensor([is_compiled], device=view.parts.device)
    found = all_gather(flag, view.parts.group).tolist()
    return all(found) if is_compiled else any(found)


def _run(own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call an own forward: what Dynamo traces. Whoever else ran it would read hollow tensors."""
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


def _reason_of(error: BaseException) -> str:
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "a size or a seed is known from values alone, as that of attention with dropout"
    first = str(error).strip().partition("\n")[0][:300]
    if first.startswith(f"{Refused.__name__}: "):  # Dynamo says so of what `refuse` raised
        return first.partition(": ")[2]
    return first if isinstance(error, (Refused, Disagreed)) else f"{type(error).__name__}: {first}"
