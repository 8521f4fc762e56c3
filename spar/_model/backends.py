# SPDX-License-Identifier: Apache-2.0
"""The backend by which the user asked torch.compile to compile a model or a block."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .tracing import Traced

_BACKEND = "_spar_backend"  # the attribute of what torch.compile returned
# Attributes by which torch wraps a backend, in its versions.
_WRAPPED = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


class Backend:
    """What makes code of a graph: "inductor" with its options, or any other. Equal ones are one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and bool(self.function == other.function)

    def __hash__(self) -> int:
        return hash(type(self.function))

    def make(self, traced: Traced, fakes: Sequence[Any]) -> Callable[..., Any]:
        """Return code for local tensors. A backend that takes torch's functions gets those of AOTAutograd."""
        import torch._functorch.aot_autograd as aot

        graph: Any = _graph_of(traced)
        # The cache of AOTAutograd knows nothing of parts, and cse takes two draws of one shape for one.
        with torch._functorch.config.patch(enable_autograd_cache=False, cse=False):
            code: Callable[..., Any] = self.function(graph, [*fakes])
            if not traced.runs:
                compiler: Any = self._of_operators
                code = aot.aot_module_simplified(graph, [*fakes], fw_compiler=compiler, bw_compiler=compiler)
            return code

    def _of_operators(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph of AOTAutograd, which passes arguments as one list."""
        from torch._functorch._aot_autograd.utils import make_boxed_func

        code = self.function(graph, inputs)
        return code if getattr(code, "_boxed_call", False) else make_boxed_func(code)


def _graph_of(traced: Traced) -> torch.fx.GraphModule:
    """Return a graph that calls the trace and nothing else: backends expect a graph."""
    graph, own = torch.fx.Graph(), traced.graph.graph
    inputs = [graph.placeholder(node.name) for node in own.nodes if node.op == "placeholder"]
    out = graph.call_module("traced", tuple(inputs))
    results: Any = own.output_node().args[0]
    graph.output(tuple([graph.call_function(operator.getitem, (out, i)) for i in range(len(results))]))
    return torch.fx.GraphModule({"traced": traced}, graph)


def compiled_by(compiled: Any) -> Backend | None:
    """Return the backend of what torch.compile returned; None if that is nothing which is known."""
    if not hasattr(compiled, _BACKEND):
        cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
        callbacks = [x.callback for x in cells if callable(getattr(x, "callback", None))]
        setattr(compiled, _BACKEND, backend_in(callbacks[0]) if callbacks else None)
    found: Backend | None = getattr(compiled, _BACKEND)
    return found


def backend_in(callback: Any) -> Backend:
    """Return the backend that one of Dynamo's callbacks wraps."""
    found = True
    while found:
        found = False
        for name in _WRAPPED:
            inner = getattr(callback, name, None)
            if callable(inner):
                callback, found = inner, True
    return Backend(callback)


def backend_of_trace() -> Backend:
    """Return the backend of the trace that runs: call it as a constant of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    return backend_in(compiler)
