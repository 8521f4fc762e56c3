# SPDX-License-Identifier: Apache-2.0
"""What a run of a model computes: a sketch of each tensor that a torch function reads or returns, and where.

A mode sees the functions that the model calls. In a view it is entered inside, so that it sees the calls of
the model's code and not those of their rules. It changes no module, and adds no operation to the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import typing_extensions
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from .._model.dtensors import is_distributed
from .._model.functions import name_of
from .._model.nested import tensors_in
from .._model.view import current_view, without_view
from .entries import MAKER, Entry, Key, Local, Spot, local_of_view
from .sketches import largest, sketch

_SPAR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
# Between a model's code and torch's functions these only pass calls on.
_PASSING = (
    *(_TORCH, contextlib.__file__, functools.__file__, typing_extensions.__file__, "<"),
    os.path.join(_SPAR, "_doctor", ""),
    os.path.join(_SPAR, "_model", "model.py"),
    os.path.join(_SPAR, "_model", "patches.py"),
)
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py", "functional.py")
_CALL_OF_MODULE = torch.nn.Module._call_impl.__code__
_NOT_TRACED = {
    "size",
    "dim",
    "numel",
    "stride",
    "element_size",
    "register_hook",
    "requires_grad_",
    "backward",
}
_SKIPPED = ("is_", "_c10d_functional")  # the results of the latter may not have arrived
_FEW = 4  # numbers by which ranks compare what each has computed whole
# A result up to this share of what a function reads may be what rounding left.
_CANCELLED = 1e-3
_MOST_NODES = 1000  # a graph has between two calls that were seen


_END = Spot("the step", "", 0, None, "", 0)


class Trace(TorchFunctionMode):
    """Records a run. That in one process is the second of two, and gets the trace of the sharded one."""

    def __init__(
        self, model: torch.nn.Module, sharded: Trace | None = None, local: Local = local_of_view
    ) -> None:
        super().__init__()
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.of_parameters = {id(p): name for name, p in model.named_parameters()}
        self.sharded, self.local = sharded, local
        self.has_dtensors = any(is_distributed(p) for p in model.parameters())
        # Then ranks of a tensor parallelism have pieces of tensors, in the sharded run alone.
        self.has_pieces = sharded is not None and sharded.has_dtensors and not self.has_dtensors
        self.entries: dict[Key, Entry] = {}
        # by the names of parameters
        self.readers: dict[str, list[Spot]] = {}
        self.gradients: dict[str, Tensor] = {}
        self.newest: Spot | None = None  # call; None once backward began
        self._known = WeakTensorKeyDictionary()
        self._makers: dict[Any, Entry] = {}  # by nodes of autograd's graph
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._hooks: list[Any] = []
        self._leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # with the gradients that they had
        self._top: object = self  # the mode that records, of this one and those inside of views
        self._quiet = False

    # ---- a run ----

    def run(self, step: Callable[[], Any], views: Sequence[Any]) -> None:
        """Call step and backward from what it returns; views: what `parallelize` made of models."""
        try:
            with contextlib.ExitStack() as stack:
                for each in views:
                    stack.enter_context(self._inside(each))
                with self:
                    output = step()
            self._record(_END, "returns", output)
            outputs, gradients = _ends(output)
            self.newest = None
            if outputs:
                torch.autograd.backward(outputs, gradients)
                self._read_gradients()
        finally:
            for hook in self._hooks:
                hook.remove()
            for leaf, gradient in self._leaves.values():
                leaf.grad = gradient
            self._makers.clear()

    def _read_gradients(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                local: Any = getattr(gradient, "_local_tensor", gradient)  # a DTensor has one
                self.gradients[name] = sketch(local.detach())

    def _takes(self, model: torch.nn.Module, own: Any, given: Any) -> None:
        """Record what a sharded model's forward receives."""
        code = getattr(inspect.unwrap(own), "__code__", None)
        place = ("", 0) if code is None else (code.co_filename, code.co_firstlineno)
        spot = self._counted("forward", *place, self.names.get(id(model)), type(model).__name__)
        self._record(spot, "takes", given)

    @contextlib.contextmanager
    def _inside(self, sharded: Any) -> Iterator[None]:
        """Let a mode be entered in the view of a sharded model."""
        forward = sharded.forwards[-1][2]
        own = forward.own

        def traced(*args: Any, **kwargs: Any) -> Any:
            self._takes(sharded.model, own, (args, kwargs))
            if current_view() is None or self._top is not self:
                return own(*args, **kwargs)
            with _Inner(self) as self._top:
                try:
                    return own(*args, **kwargs)
                finally:
                    self._top = self

        traced.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        forward.own = traced
        try:
            yield
        finally:
            forward.own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(self, func, args, kwargs or {})

    def call(self, mode: object, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        spot = self._spot(func) if mode is self._top and not self._quiet else None
        self.newest = spot or self.newest
        if spot is None:
            return func(*args, **kwargs)
        floor = self._reads(spot, args, kwargs, "reads", torch.is_grad_enabled())
        out = func(*args, **kwargs)
        if spot.function.startswith(("empty", "new_empty")) and isinstance(out, Tensor):
            with self._aside():
                out.zero_()  # what memory held before differs between the runs
        # An assignment or a collective changes an argument, and returns nothing.
        if out is None:
            self._reads(spot, args, kwargs, "leaves", False)
        self._record(spot, "returns", out, floor)
        return out

    def _spot(self, func: Any) -> Spot | None:
        """Return where a function is called; None if it is not recorded."""
        name = name_of(func)
        if getattr(func, "__name__", "") in ("__get__", "__set__") or name in _NOT_TRACED:
            return None
        if name.startswith(_SKIPPED) or maybe_current_level() is not None:
            return None
        place, module = None, None
        frame: Any = sys._getframe(3)
        while frame is not None and (place is None or module is None):
            code = frame.f_code
            if place is module is None and _is_of_this_rank(func, code):
                return None
            if place is None and not code.co_filename.startswith(_PASSING):
                if code.co_filename.startswith(_SPAR):
                    return None
                place = code.co_filename, frame.f_lineno
            if module is None and code is _CALL_OF_MODULE:
                module = frame.f_locals["self"]
            frame = frame.f_back
        path = self.names.get(id(module)) if module is not None else None
        kind = "" if path is None else type(module).__name__
        return self._counted(name, *(place or ("", 0)), path, kind)

    def _counted(self, *called: Any) -> Spot:
        self._counts[called] += 1
        spot: Any = Spot
        made: Spot = spot(*called, self._counts[called] - 1)
        return made

    # ---- what a call reads and returns ----

    def _reads(self, spot: Spot, args: Any, kwargs: dict[str, Any], verb: str, in_graph: bool) -> float:
        """Record arguments; return up to which number results may be what rounding left."""
        scales = []
        with self._aside():
            for i, x in enumerate(tensors_in(args, kwargs)):
                name = self.of_parameters.get(id(x))
                if name is not None and in_graph:
                    self.readers.setdefault(name, []).append(spot)
                if isinstance(x, Parameter) or not _is_plain(x):
                    continue
                known: Entry | None = self._known.get(x)
                entry = self._add(Key(spot, verb, i), x, known.floor if known is not None else 0.0)
                if known is not None:
                    known.readers += [spot] * in_graph
                    if known.value is None and not entry.tolerance:
                        entry.value = None
                if entry.value is not None and entry.tolerance:
                    scales.append(largest(entry.value))
                is_new = known is None or not known.is_followed or known.version != entry.version
                if x.requires_grad and in_graph and is_new:
                    self._follow_unknown(x, entry, spot)
        return _CANCELLED * min([scale for scale in scales if scale], default=0.0)

    def _record(self, spot: Spot, verb: str, value: Any, floor: float = 0.0) -> None:
        with self._aside():
            for i, x in enumerate(tensors_in(value)):
                if isinstance(x, Parameter) or not _is_plain(x):
                    continue
                entry = self._add(Key(spot, verb, i), x, floor)
                entry.is_input = verb == "takes"
                # Rounding may decide a comparison, whose result has no tolerance.
                if floor and not entry.tolerance:
                    entry.value = None
                self._known[x] = entry
                # In a view an output is a copy, and no loss depends on it.
                if x.requires_grad and spot != _END:
                    self._follow(x, entry)
                    if self.sharded is not None and x.grad_fn is not None:
                        self._makers[x.grad_fn] = entry

    def _add(self, key: Key, x: Tensor, floor: float) -> Entry:
        entry = self.entries[key] = Entry(x, floor)
        x = x.detach()
        if self.sharded is None:
            entry.value = sketch(x)
            return entry
        entry.few = sketch(x, _FEW)
        same = self.sharded.entries.get(key)
        if same is not None:
            entry.part, entry.shape = same.part, same.shape
            local = self.local(x, same.part, same.shape)
            entry.is_part = local is not None and local is not x
            if local is not None:
                entry.value = sketch(local)
            elif self.local is local_of_view and not self.has_pieces:
                entry.value = x.new_zeros(0).double().cpu()
        return entry

    def _follow(self, x: Tensor, entry: Entry) -> None:
        """Record a tensor's gradient."""

        def hook(gradient: Tensor) -> None:
            if not _is_plain(gradient):
                return
            with self._aside():
                whole = gradient.detach()
                local = whole
                if self.sharded is not None:
                    found = self.local(whole, entry.part, entry.shape)
                    if found is None:
                        return
                    local = found
                numbers = sketch(local)
                entry.gradient = numbers if entry.gradient is None else entry.gradient + numbers

        entry.is_followed = True
        leaf = x if x._base is None else x._base  # a model gets views of its inputs
        if leaf.is_leaf:
            self._leaves.setdefault(id(leaf), (leaf, leaf.grad))
        self._hooks.append(x.register_hook(hook))

    def _follow_unknown(self, x: Tensor, entry: Entry, reader: Spot) -> None:
        """Record the gradient of what no recorded call returned, but such as a custom Function."""
        entry.readers.append(reader)
        self._known[x] = entry
        self._follow(x, entry)
        if self.sharded is None or x.grad_fn is None:
            return
        entry.maker = _name_of_node(x.grad_fn)
        maker = Spot(entry.maker, *_place_of_node(x.grad_fn), reader.module, reader.kind, MAKER)
        nodes, seen = [x.grad_fn], set[Any]()
        while nodes and len(seen) < _MOST_NODES:
            node = nodes.pop()
            for before, _ in node.next_functions:
                if before is None or before in seen:
                    continue
                seen.add(before)
                known = self._makers.get(before)
                if known is not None:
                    known.readers.append(maker)
                elif hasattr(before, "variable"):
                    name = self.of_parameters.get(id(before.variable))
                    if name is not None:
                        self.readers.setdefault(name, []).append(maker)
                else:
                    nodes.append(before)
        self._makers[x.grad_fn] = entry

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Compute without being seen by views, autograd, this mode or others, such as checkpoints'."""
        before, self._quiet = self._quiet, True
        left: Any = without_view() if current_view() is not None else contextlib.nullcontext()
        try:
            with left, torch.no_grad(), _disable_current_modes():
                yield
        finally:
            self._quiet = before


class _Inner(TorchFunctionMode):
    """What is entered inside of a view, and records for a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.trace.call(self, func, args, kwargs or {})


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor's elements can be read: no subclass, such as a mask of spans, and no fake tensor."""
    is_known = type(x) is Tensor or isinstance(x, torch.nn.Buffer | Parameter)
    return is_known and x.layout == torch.strided and x.device.type != "meta" and not x.is_quantized


def _is_of_this_rank(func: Any, code: CodeType) -> bool:
    """Whether code of torch.distributed calls a function for this rank alone: FSDP, or a pickled object's."""
    if not code.co_filename.startswith(_DISTRIBUTED):
        return False
    is_collective = str(getattr(func, "__module__", "")).startswith("torch.distributed")
    is_shown = is_collective and os.path.basename(code.co_filename) in _COLLECTIVES
    return not is_shown or "_object" in code.co_name


def _name_of_node(node: Any) -> str:
    kind = getattr(type(node), "_forward_cls", None)
    name: str = node.name().removesuffix("Backward") if kind is None else kind.__name__
    return name


def _place_of_node(node: Any) -> tuple[str, int]:
    """Return where a custom Function has its backward."""
    kind = getattr(type(node), "_forward_cls", None)
    code = getattr(getattr(kind, "backward", None), "__code__", None)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


def _ends(output: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return from what backward begins: the loss, or all outputs with gradients drawn from one seed."""
    if isinstance(output, dict):
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "loss", output)
    outputs = [x for x in tensors_in(output) if x.requires_grad and _is_plain(x)]
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad:
        outputs = [loss]
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.ones_like(x)
        if x.dim() == 0
        else torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x)
        for x in outputs
    ]
    return outputs, gradients
