# SPDX-License-Identifier: Apache-2.0
"""Trace a graph of whole shapes under the view, for code that computes on this rank's parts.

Dynamo has recorded the torch functions of a block, on hollow tensors, or of a model. AOTAutograd traces
`Traced`, which runs these functions on local tensors by the view's rules: the code is of local operators and
exchanges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.autograd.grad_mode import _enter_inference_mode
from torch.nn.parallel import DistributedDataParallel

from .._attention.spans import Spans
from .aliases import Given
from .blocks import parts_of_arguments
from .functions import function_of, is_operator
from .groups import is_collective_operator
from .leaves import Refused, begin_block, begins_blocks, end_block, in_view_of, traces
from .nested import tensors_in
from .part import has_part, mark, shard_of, whole_shape
from .patches import intercepted
from .rules.attention import reach_of
from .spans_mask import mask_of
from .view import View, without_view
from .whole import run_whole

_DDP: Any = DistributedDataParallel


class MaskShape(NamedTuple):
    """A mask of spans among the inputs of a graph, which gets the spans' ends in its place."""

    spans: Spans
    shape: torch.Size
    device: torch.device


class Traced(nn.Module):
    """The graph of a block or a model, run under the view.

    Attributes:
        shards: what each input is; None if it is whole.
        masks: those inputs that are masks of spans.
        leaves: what functions that stand for others in the graph look up.
        results: what each result of the newest run is.
        copies: pairs of a result and one of the inputs and results, which would share memory if nothing was
            sharded, by their numbers.
        runs: how often it was run.
        ran_whole: the names of functions that ran whole.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        view: View,
        shards: Sequence[Any],
        masks: dict[int, MaskShape],
        leaves: Any,
    ) -> None:
        super().__init__()
        self.graph, self.view, self.shards, self.masks, self.leaves = graph, view, shards, masks, leaves
        self.results: list[Any] = []
        self.copies: list[tuple[int, int]] = []
        self.runs = 0
        self.ran_whole: frozenset[str] = frozenset()

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        self.runs += 1
        given = list(inputs)
        for i, mask in self.masks.items():
            given[i] = mask_of(_TracedSpans(given[i], mask.spans), mask.shape, mask.device)
        for x, shard in zip(given, self.shards, strict=True):
            if shard is not None:
                mark(x, shard.part)
        view = TracingView(self.view, self.leaves, given)
        with intercepted(view), view, torch.fx.traceback.preserve_node_meta():
            run = _Run(self.graph, view)
            out = run.run(*given)
        if run.blocks:
            raise Refused("a block begins in its graph, and does not end: its forward was replaced")
        out = [view.check_stale("compiled code", x) if isinstance(x, Tensor) else x for x in out]
        if view._given.changed(view._aliases):
            raise Refused("a block changes an argument of the model in place")
        self.copies = [
            (i, j)
            for i, x in enumerate(out)
            for j, y in enumerate((*given, *out))
            if isinstance(x, Tensor) and isinstance(y, Tensor) and view._aliases.would_share(x, y)
        ]
        self.results = [shard_of(x) for x in out]
        self.ran_whole = frozenset(each.function for each in view.report.functions)
        return tuple(out)


class TracingView(View):
    """The view of one trace: its plans and aliases are of traced tensors, and end with it.

    Attributes:
        leaves: what functions that stand for others in a graph look up.
    """

    def __init__(self, view: View, leaves: Any, inputs: Any) -> None:
        super().__init__(view.parts, False, view.library)
        self.blocks, self.leaves, self._given = 1, leaves, Given(inputs)


class _Run(torch.fx.Interpreter):
    """Runs a graph of torch functions in a view."""

    def __init__(self, graph: torch.fx.GraphModule, view: TracingView) -> None:
        super().__init__(graph)
        self.view = view
        self.blocks: list[tuple[Any, dict[torch.fx.Node, Any]]] = []  # those that have begun: what was whole

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a function, and compare what it returns with what one process has, by its shape and dtype."""
        if n.target is begin_block:
            return self._begin_block(n)
        if n.target is end_block:
            return self._end_block(n)
        out = super().run_node(n)
        if n.op == "placeholder":
            return out
        for expected, x in zip(tensors_in(n.meta.get("example_value")), tensors_in(out), strict=False):
            if list(expected.shape) != whole_shape(x) or expected.dtype != x.dtype:
                raise Refused(
                    f"{n.target} returns {x.dtype} of shape {whole_shape(x)}, where one process has "
                    f"{expected.dtype} of shape {list(expected.shape)}"
                )
        return out

    def _begin_block(self, n: torch.fx.Node) -> None:
        """Let a block's arguments be parts in it, as the hook in front of it does."""
        _, arguments = self.fetch_args_kwargs_from_env(n)
        wholes = {}
        with without_view():
            parts = parts_of_arguments(self.view.parts, [*arguments.items()])
            for node in n.all_input_nodes:
                x = self.env[node]
                if id(x) in parts:
                    wholes[node] = x
                    self.env[node] = self.view.shard(x, parts[id(x)])
        self.blocks.append((n.args[0], wholes))

    def _end_block(self, n: torch.fx.Node) -> None:
        """Let the whole tensors be whole again; a block whose forward was called alone did not begin."""
        if self.blocks and self.blocks[-1][0] == n.args[0]:
            for node, x in self.blocks.pop()[1].items():
                if node in self.env:  # it is read again
                    self.env[node] = x

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _plain(args), _plain(kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        in_view = in_view_of(target)
        if in_view is not None:
            return in_view(self.view, *args, **kwargs)
        if is_operator(target) and is_collective_operator(function_of(target).name):
            raise Refused("it communicates itself")
        if target is _enter_inference_mode:  # of which an error would leave torch in it
            raise Refused("it enters inference mode")
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        graphs = [inner for x in args if isinstance(x, nn.Module) for inner in x.modules()]
        if any(isinstance(inner, torch.fx.GraphModule) and begins_blocks(inner) for inner in graphs):
            raise Refused(f"a block begins in the operator {target.name()}")
        if target.name() == "autograd_function_apply":  # its backward need not be linear, of wholes too
            run = functools.partial(target, *args[:2], **kwargs)
            with without_view():
                return run_whole(self.view.parts, self.view._aliases, target.name(), run, args[2:], {})
        if not (has_part(args, kwargs) or target.name() == "register_hook"):
            with without_view():
                return target(*args, **kwargs)
        raise Refused(f"the operator {target.name()} of parts")


class _TracedSpans(Spans):
    """Spans without values, of a trace; what a plan decides by the values it reads of those of the call."""

    def __init__(self, ends: Tensor, real: Spans) -> None:
        self.ends, self.keys, self._made = ends, real.keys, {}
        self._real = real

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        if not (isinstance(key, tuple) and key[0] == "reach"):
            raise Refused("a mask whose values decide what is exchanged")
        with torch.utils._python_dispatch._disable_current_modes():
            return reach_of(self._real, key[1])


class compiling:
    """torch.compile as by default, in a view, which turns it off; and without torch's fast attention.

    Nor does Dynamo know that it is in a forward of DDP, for which it would cut a graph where buckets end: a
    part would appear whole behind the cut.

    has_blocks: whether the code is a model's.
    """

    def __init__(self, has_blocks: bool) -> None:
        self._now = True, has_blocks

    def __enter__(self) -> None:
        self._stance = torch.compiler.set_stance("default")
        self._is_fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._ddp, _DDP._active_ddp_module = _DDP._active_ddp_module, None
        self._before = traces.is_active, traces.has_blocks
        traces.is_active, traces.has_blocks = self._now

    def __exit__(self, *_: object) -> None:
        traces.is_active, traces.has_blocks = self._before
        _DDP._active_ddp_module = self._ddp
        torch.backends.mha.set_fastpath_enabled(self._is_fast)
        self._stance.__exit__(None, None, None)


def _plain(value: Any) -> Any:
    """Return lists, dicts and tuples in place of those of torch.fx, which cannot be changed."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return tuple([_plain(entry) for entry in value]) if type(value) is tuple else value
