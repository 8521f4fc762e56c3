# SPDX-License-Identifier: Apache-2.0
"""Shard any model: its blocks receive parts, and its forward returns whole tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .._attention.attention import METHODS
from .._attention.choice import noting
from .._attention.spans import Spans
from .._control.mismatch import add_advice
from .._exchange.arguments import ranks_of
from .._group.group import MOST_EXCHANGES, Call
from .._group.registry import place_of
from .._tracing import constant
from ..errors import MismatchError, SparError
from ..topology.groups_by_name import ParallelState
from ..topology.resolve import Group, process_group
from ..topology.topology import current
from .agreement import Agreement, device_of
from .backends import Backend, backend_of_trace
from .batch_parts import BatchParts, LayoutOf, check_read
from .blocks import Shards, find_blocks, number_of
from .compiled import Compiled, backend_of
from .compiled_code import of_its_own
from .generators import CODE
from .images import shard_rows
from .inputs import GivenParts, compared
from .later import finished
from .leaves import end_block, has_blocks, is_traced
from .library import NO_LIBRARY, Library, RunModule
from .module_leaves import in_graph
from .nested import tensors_in
from .part import Parts, has_part, part_of
from .patches import enter_inputs, intercepted, reentered, refuse_pickles
from .places import explain, forget_parameters, number_parameters
from .report import Report, warn_caller
from .spans_mask import SpansRead
from .tiles import check_tile, runs_of
from .view import View, current_view, eagerly, without_view

_STATE = "_spar_view"  # the attribute of a model that is sharded
_METHODS = (None, *METHODS, "hybrid")


def sharded(
    model: torch.nn.Module,
    group: Group,
    where: str,
    *,
    blocks: Sequence[str] | None = None,
    method: str | None = None,
    layout: str | LayoutOf = "even",
    inputs: Sequence[str] = (),
    outputs: str = "whole",
    tile: int | None = None,
    strict: bool = False,
    library: Library = NO_LIBRARY,
    report: Report | None = None,
) -> Report:
    """Shard a model as `spar.parallelize` says.

    where: the caller, for messages. library: of `View`. report: another model's, to which this one adds.
    """
    check_module(model, where)
    if is_sharded(model):
        raise ValueError(f"{where}: the model is parallelized already; call unparallelize(model) first")
    for name, module in model.named_modules():
        if is_sharded(module) or isinstance(vars(module).get("forward"), _Forward):
            raise ValueError(
                f"{where}: the model's module {name} is parallelized already, itself or as a part of another "
                "model; call unparallelize on that first"
            )
    if method not in _METHODS:
        names = ", ".join([f'"{name}"' for name in _METHODS[1:]])
        raise ValueError(f"{where}: method is {method!r}; expected {names} or None")
    if layout not in ("even", "zigzag") and not callable(layout):
        expected = '"even", "zigzag" or a function from a batch to a SequenceLayout'
        raise ValueError(f"{where}: layout is {layout!r:.200}; expected {expected}")
    if outputs not in ("whole", "parts"):
        raise ValueError(f'{where}: outputs is {outputs!r:.200}; expected "whole" or "parts"')
    inputs = inputs if isinstance(inputs, str) else tuple(inputs)
    if isinstance(inputs, str) or not all(isinstance(name, str) for name in inputs):
        raise TypeError(f"{where}: inputs is {inputs!r:.200}; expected names of the forward's arguments")
    check_tile(tile, where)
    if method == "hybrid" and layout != "even":
        raise ValueError(f'{where}: method is "hybrid", whose layout is its own; expected no layout')
    found = find_blocks(model, blocks, where)
    real = process_group(group, where)
    place = place_of(real)
    state = _state_of(real, where) if method == "hybrid" else None
    kind = layout if isinstance(layout, str) else "even"
    parts = Parts(real, place.world, place.rank, None if state else method, state, kind)
    view = View(parts, strict, library, outputs == "parts")
    view.report = view.report if report is None else report
    layout_of = None if isinstance(layout, str) else layout
    vars(model)[_STATE] = _Sharded(model, view, found, layout_of, inputs, tile)
    return view.report


def unsharded(model: torch.nn.Module, where: str) -> None:
    state = vars(model).get(_STATE) if isinstance(model, torch.nn.Module) else None
    if state is None:
        raise ValueError(f"{where}: the model is not parallelized; expected one that was")
    state.remove(where)
    del vars(model)[_STATE]


def is_sharded(model: torch.nn.Module) -> bool:
    return _STATE in vars(model)


def states_of(model: torch.nn.Module) -> list[_Sharded]:
    """Return what `parallelize` changed in a model and its modules."""
    return [vars(module)[_STATE] for module in model.modules() if is_sharded(module)]


def check_module(model: Any, where: str) -> None:
    """Check that a model is a module itself, not what DDP or torch.compile made of one."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{where}: model is {model!r:.200}; expected a torch.nn.Module")
    for inner in ("module", "_orig_mod"):
        if isinstance(getattr(model, inner, None), torch.nn.Module):
            kind = type(model).__name__
            raise ValueError(f"{where}: model is a {kind}; expected what it wraps: model.{inner}")


def _state_of(group: Any, where: str) -> ParallelState:
    """Return the current parallel state, if the group is its cp group."""
    state = current().state
    if state is None or state.get_group("cp") is not group:
        raise ValueError(
            f"{where}: method is 'hybrid', and {'another' if state else 'no'} parallel state is current; "
            "expected one whose cp group is group: call init_parallel_state, and pass the group of cp"
        )
    return state


# ---- what is changed in a model ----


class _Sharded:
    """What `parallelize` changed in a model; it is copied with the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        view: View,
        blocks: dict[str, torch.nn.Module],
        layout_of: LayoutOf | None,
        inputs: Sequence[str],
        tile: int | None,
    ) -> None:
        self.model, self.view, self.inputs, self.tile = model, view, inputs, tile
        self.batches = BatchParts(view.parts, layout_of)
        self.agreement = Agreement(view.parts.group, model)
        self.compiled = Compiled(view)
        _disable_run()
        self.is_alone = view.parts.world == 1 and tile is None
        self.compiles = False  # in the newest forward
        self.is_whole = False  # whether forwards run as in one process, for a comparison
        inner = {name: block for name, block in blocks.items() if block is not model}
        # If the model itself is a block.
        self.shards = Shards(view, model, number_of("")) if len(inner) < len(blocks) else None
        self.hooks = [
            block.register_forward_pre_hook(Shards(view, block, number_of(name)), with_kwargs=True)
            for name, block in inner.items()
        ]
        self.forwards: list[tuple[torch.nn.Module, Any, Any]] = []  # modules, what they had, what they have
        for name, module in inner.items():
            self._replace(module, functools.partial(_BlockForward, name))
        for module, run in runs_of(model, blocks.values(), view.library, tile):
            self._replace(module, functools.partial(_LeafForward, run))
        self._replace(model, _model_forward())

    def _replace(self, module: torch.nn.Module, kind: Any) -> None:
        before, own = vars(module).get("forward"), module.forward
        now = functools.update_wrapper(kind(self, module, own), own)
        module.forward = now
        self.forwards.append((module, before, now))

    def remove(self, where: str) -> None:
        replaced = [vars(module).get("forward") is not now for module, _, now in self.forwards]
        for (module, _, now), is_replaced in zip(self.forwards, replaced, strict=True):
            if is_replaced and not _is_within(now.own, module.forward):
                raise ValueError(
                    f"{where}: the forward of a {type(module).__name__} was replaced since; undo what "
                    "replaced it first"
                )
        for hook in self.hooks:
            hook.remove()
        forget_parameters(self.model)
        for (module, before, _), is_replaced in zip(self.forwards, replaced, strict=True):
            if is_replaced:
                continue
            if before is None:
                del module.forward
            else:
                module.forward = before

    @property
    def is_running(self) -> bool:
        return current_view() is self.view


def _is_within(own: Any, forward: Any) -> bool:
    """Whether a forward is what `own` wraps: then what was put around it, and ours, is removed already."""
    while own is not None and own != forward:
        own = getattr(own, "__wrapped__", None)
    return own is not None


class _Forward:
    """A module's forward in place of its own.

    Attributes:
        is_like_others: that of another module may be in its place in a graph.
    """

    is_like_others = True

    def __init__(self, sharded: _Sharded, module: torch.nn.Module, own: Any) -> None:
        self.sharded, self.module, self.own = sharded, module, own


class _BlockForward(_Forward):
    def __init__(self, name: str, *rest: Any) -> None:
        super().__init__(*rest)
        self.name, self.number = name, number_of(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a block; in the view too if backward runs it again, for a checkpoint."""
        if is_dynamo_compiling():  # a block around it is compiled, or the model, sharded or not
            out = self.own(*args, **kwargs)
            if has_blocks():
                end_block(self.number)
            return out
        sharded, view = self.sharded, self.sharded.view
        view.blocks += 1
        try:
            if sharded.is_running:
                view._fold(CODE, self.number)
                return sharded.compiled.run(self.module, self.own, args, kwargs)
            found = [part for x in tensors_in(args, kwargs) if (part := part_of(x)) is not None]
            if not found:
                self._note_outside(view)
                return self.own(*args, **kwargs)
            with reentered(view, found[0].parts):
                return sharded.compiled.run(self.module, self.own, args, kwargs)
        finally:
            view.blocks -= 1

    def _note_outside(self, view: View) -> None:
        """Say once that a block runs whole on each rank: the sharded model's forward did not call it."""
        is_meant = view.parts.world == 1 or self.sharded.is_whole
        if is_meant or (view.has_run_outside and not view.strict):
            return
        view.has_run_outside = True
        problem = "runs outside of the sharded model's forward, and so whole on each rank"
        advice = (
            "call the parallelized model itself, not a module of it; if its forward was replaced since "
            "parallelize, unparallelize(model) before and parallelize after that"
        )
        if view.strict:
            raise view.error(f"block {self.name}", problem, f"{advice}, or pass strict=False")
        if not view.parts.rank:
            warn_caller(f"block {self.name} {problem}; {advice}")


class _LeafForward(_Forward):
    """Of a module that the library runs on parts, by what `Library.run_of` returns."""

    def __init__(self, run: RunModule, *rest: Any) -> None:
        super().__init__(*rest)
        self.run = run
        self.number = 0  # in graphs
        self.sharded.compiled.leaves[self.module] = self
        self.has_buffers = any(True for _ in self.module.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            if self.has_buffers or not is_traced():
                return self.own(*args, **kwargs)
            weights = [*self.module.parameters()]
            return in_graph(self.number, len(weights), *weights, *args, *kwargs.values())
        if not self.sharded.is_running:
            return self.own(*args, **kwargs)
        return self.run(self.sharded.view, self.module, self.own, args, kwargs)


class _ModelForward(_Forward):
    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        found = inspect.signature(self.own).parameters.items()
        self.names = tuple([name for name, parameter in found if parameter.kind in kinds])
        self.given = GivenParts(self.sharded.inputs, self.names)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModelForward:
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickles(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's forward over the ranks.

        The user's torch.compile does not trace it: where the model is compiled, the view does that.
        """
        sharded = self.sharded
        has_spans = any(isinstance(x, Spans) for x in (*args, *kwargs.values()))
        if sharded.is_whole or (sharded.is_alone and not has_spans):
            if sharded.inputs and not sharded.is_alone:
                parts = sharded.batches.of(self._named(args, kwargs))
                args, kwargs = self.given.gather(parts, args, kwargs)
            with sharded.view.library.around() if has_spans else contextlib.nullcontext():
                return self.own(*args, **kwargs)
        asked = _asked() if is_dynamo_compiling() else None
        run = _disabled_run[0] if _disabled_run else _ModelForward._run
        return run(self, asked, args, kwargs)

    def _run(self, asked: int | None, args: Any, kwargs: Any) -> Any:
        """asked: the backend by which the user compiles the model, as `_asked` numbers it."""
        sharded, view = self.sharded, self.sharded.view
        if sharded.is_running:
            return self.own(*args, **kwargs)
        outer = current_view()
        if outer is not None and has_part(args, kwargs):
            raise outer.error(
                type(sharded.model).__name__,
                "is parallelized inside of a parallelized model, and gets a sharded tensor",
                "call unparallelize on it: the outer model's sharding has it too",
            )
        if torch._C._current_graph_task_id() < 0:  # else a checkpoint runs a forward again, in one way
            sharded.compiles = not view.recording and sharded.tile is None
        backend = None if asked is None or not sharded.compiles else _backends[asked]
        if asked is not None and sharded.tile is not None:
            view.report.add_eager(sharded.model, "its modules run on tiles")
        if sharded.compiles:
            view.backend_of = functools.partial(backend_of, backend)
        with Call(ranks_of(view.parts.group, ""), "a sharded model's forward", MOST_EXCHANGES) as call:
            try:
                view.parts = sharded.batches.of(self._named(args, kwargs))
                if sharded.batches.has_many_masks():
                    view.forget()
                view.parts.device = device_of(sharded.model)
                args, kwargs = self.given.mark(view.parts, args, kwargs)
                args, kwargs = enter_inputs(view, sharded.model, args, kwargs)
                if view.recording:
                    number_parameters(sharded.model)
                sharded.agreement.begin(compared(self._named(args, kwargs)), view.parts.device)
                view.spans_read = SpansRead()
                note = functools.partial(view.report.add_attention, view.parts.method)
                with intercepted(view), view.forward(args, kwargs), noting(note if view.recording else None):
                    output = self._in_view(backend, args, kwargs)
                    check_read(view, sharded.model, self._named(args, kwargs))
                    output = view.output(finished(view, sharded.model, output))
                sharded.agreement.end(view.word)
                view.library.follow(view, *kwargs.values(), output)
            except BaseException as error:
                call.device = view.parts.device.type
                if isinstance(error, MismatchError):
                    with contextlib.suppress(SparError):  # the group may be broken
                        sharded.agreement.end(0)  # other inputs are the reason, if they differ
                    add_advice(error)
                    explain(error, _BlockForward)
                raise
            finally:
                view.backend_of = eagerly
        self._warn()
        return output

    def _named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by the names of the forward's parameters, or by their places."""
        named = {(self.names[i] if i < len(self.names) else f"args[{i}]"): x for i, x in enumerate(args)}
        return named | kwargs

    def _in_view(self, backend: Backend | None, args: Any, kwargs: Any) -> Any:
        """Call the model's own forward, with its inputs sharded if the model is a block.

        backend: by which the model is compiled, if it is.
        """
        shards, view, model = self.sharded.shards, self.sharded.view, self.sharded.model
        if shards is None:
            return self.sharded.compiled.run_model(model, backend, self.own, args, kwargs)
        with without_view():
            found = shard_rows(view, model, args, kwargs)
        args, kwargs = found or shards(model, args, kwargs)
        view.blocks += 1
        try:
            return self.sharded.compiled.run(model, self.own, args, kwargs)
        finally:
            view.blocks -= 1

    def _warn(self) -> None:
        """Name once what runs whole in blocks."""
        view = self.sharded.view
        report, kind = view.report, type(self.sharded.model).__name__
        if report.warned or view.parts.rank:
            return
        report.warned = True
        if report.share > 0.9 or any(each.in_block for each in report.functions):
            warnings.warn(f"sharded {kind}: {report}", stacklevel=3)


def _model_forward() -> type[_ModelForward]:
    """Return a class whose `__call__` has code of its own: Dynamo stops tracing code after some models."""
    call = of_its_own(_ModelForward.__call__)
    return type(_ModelForward.__name__, (_ModelForward,), {"__call__": call})


_backends: list[Backend] = []  # by which a model is compiled


@constant
def _asked() -> int:
    """Return the number of the backend by which a model is compiled, while Dynamo traces its call."""
    _disable_run()
    backend = backend_of_trace()
    if backend not in _backends:
        _backends.append(backend)
    return _backends.index(backend)


# What runs a model's forward, disabled in depth; empty until torch.compile is imported, which is slow.
_disabled_run: list[Any] = []


def _disable_run() -> None:
    if not _disabled_run and "torch._dynamo" in sys.modules:
        _disabled_run.append(torch._dynamo.disable(_ModelForward._run))


def replace_run(run: Callable[..., Any]) -> None:
    """Replace what runs the forwards of all parallelized models."""
    _ModelForward._run = run  # type: ignore[method-assign]
    _disabled_run.clear()
    _disable_run()
