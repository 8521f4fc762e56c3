# SPDX-License-Identifier: Apache-2.0
"""What torch.compile makes of a model or a block, for arguments that are these parts."""

from __future__ import annotations

import itertools
import types
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.schemas import OutputType
from torch.compiler import is_dynamo_compiling

from ..errors import MismatchError, SparError
from ..ops.gather import all_gather
from .functions import function_of
from .generators import CODE
from .graph_inputs import GraphInputs
from .hollow import is_hollow, local_of
from .hollow_arguments import HollowArguments, KeptElsewhere
from .leaves import Refused
from .memory import memory_of
from .nested import changed
from .part import mark
from .tracing import Traced, compiling
from .view import View, without_view

_numbers = itertools.count()  # of the copies of functions
_OF_INPUTS = (OutputType.alias_of_input, OutputType.is_input)


class Disagreed(Exception):
    """Another rank could not compile a model or a block."""


class CompiledCode:
    """The code of blocks of one class, or of a model, for arguments that are these parts.

    Dynamo keeps several graphs of it, by its guards.

    Attributes:
        graphs: how many were made.
        is_refused: whether it makes none any more, of a model.
    """

    def __init__(self, kind: Any) -> None:
        self.kind, self.view = kind, kind.view
        self.graphs = 0
        self.is_refused = False
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
        except SparError:  # the ranks do not run the same code
            raise
        except Exception as error:
            if self._runs:
                raise
            # Before the call: where it fails on one rank alone, that rank has refused what its peers have.
            self.kind.refuse(module, self, _reason_of(error), for_all=self._differs(error))
            return own(*args, **kwargs)
        out = changed(local_of, out)
        try:
            if hollow.release():
                self.kind.refuse(module, self, "it keeps an argument")
        except KeptElsewhere:
            self.kind.refuse(module, self, "it keeps an argument")
            raise self.view.error(
                type(module).__name__, "keeps an argument where spar cannot find it", "do not compile it"
            ) from None
        return out

    def _agreed(self) -> bool:
        """Return whether all ranks have compiled the new graph. Collective."""
        try:
            agreed = _agree(self.view, True)
        except MismatchError as error:
            # A rank that failed comes here again; one that made no graph does not.
            self._is_new = "calls differ" not in str(error)
            raise
        self._is_new = False
        return agreed

    def _differs(self, error: Exception) -> bool:
        """Return whether ranks have code that others lack, after this rank could make none. Collective."""
        if isinstance(error, Disagreed):
            return True
        self._is_new = False
        with without_view():
            return _agree(self.view, False)

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
            raise Refused(f"these would run whole, and did not in the first forward: {', '.join(new)}")
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
            if self._is_new and not self._agreed():
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
    memories = Counter(map(memory_of, local))
    if any(memories[memory_of(local[i])] > 1 for i in written):
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
