# SPDX-License-Identifier: Apache-2.0
"""The mode under which torch functions run on parts, and report whole shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from .._C import Mode, mark_results, replaced
from .._transports.dtypes import PLAIN_TYPES
from . import keys, subclasses  # noqa: F401 - keys tells the C code what to use
from .aliases import Aliases, Given
from .bodies import body_of, is_collective
from .call import Plan, Step, rule_of
from .functions import Function, function_of, hides_writes
from .generators import TORCH, draws_since, states, states_of
from .gradients import register_hook
from .groups import check_results, is_collective_operator, waited
from .library import NO_LIBRARY, Library
from .memory import MAKING, MAY_SHARE, are_copies, has_no_gaps, is_view
from .moving import even_of, moved_arguments, shard_in_place
from .nested import changed, tensors_in
from .part import Part, Parts, has_part, is_uneven, mark, part_of, whole_shape
from .places import code_of, compared_groups, compared_in
from .planning import AS_WHOLE, planned
from .report import Report, place_of_caller
from .spans_mask import SpansRead
from .waiting import later_of, waiting_in
from .whole import run_whole

_MOST_STEPS = 20_000
_GRADIENTS = frozenset({torch.autograd.grad, Tensor.backward})
# The backend of torch.compile for a block; None: it runs eagerly.
BackendOf = Callable[[torch.nn.Module], Any]


def eagerly(block: torch.nn.Module) -> None:
    """Say that a block is not compiled."""


class View(Mode, TorchFunctionMode):
    """While it is entered, a tensor that is a rank's part appears whole to the code that runs.

    Each torch function runs on parts by its rule, or whole on gathered arguments. `Mode` runs the calls that
    are known, in C (csrc/python/mode_type.c), and `_call` all others. Ranks agree on each exchange, since all
    decisions depend on parts and whole shapes.

    strict: whether a function inside blocks that has to run whole is an error.
    library: what it is told of the model's library.
    returns_parts: whether what a forward returns of a sequence is this rank's tokens.
    """

    def __init__(
        self,
        parts: Parts,
        strict: bool = False,
        library: Library = NO_LIBRARY,
        returns_parts: bool = False,
    ) -> None:
        super().__init__()
        self.parts, self.strict, self.library, self.returns_parts = parts, strict, library, returns_parts
        self.report = Report()
        self.blocks = 0  # how many of the model's blocks the code is in
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._aliases, self._given = Aliases(), Given(())
        self.same_tokens: set[str] = set()  # groups whose ranks are known to hold the same tokens
        self.has_run_outside = False  # whether a block ran, in no forward of the model
        self.recording = True  # in the first forward
        self.spans_read = SpansRead()
        self.backend_of: BackendOf = eagerly  # in this forward
        self.may_wait = True  # whether logits may be computed by the loss alone, and so be missing
        self.has_later = False  # whether a tensor of this forward is computed later

    # ---- what a model's hooks call ----

    @contextmanager
    def forward(self, *inputs: Any) -> Iterator[None]:
        """Enter the view for one forward of the model. inputs: the caller's tensors, which it may change."""
        groups = compared_groups(self.parts)
        self._begin()
        self.parts.indexes.clear()
        self._given = Given(inputs)
        self._states = states(self.parts.device)
        before = [group.view for group in groups]
        try:
            for group in groups:
                group.view = self
            with self:
                yield
            self.recording = False
        finally:
            for group, view in zip(groups, before, strict=True):
                group.view = view
            self._aliases, self._given, self.has_later = Aliases(), Given(()), False
            self.parts.indexes.clear()
            self._watch()

    @contextmanager
    def on_tile(self, parts: Parts, aliases: Aliases, place: bytes | None) -> Iterator[None]:
        """Enter the view, which was left, for code that runs on a tile.

        place: what the code is to have run for the other ranks, if it ran on a tile before.
        """
        before, self.parts, self._aliases = (self.parts, self._aliases), parts, aliases
        self.report.runs_again = place is not None
        self._watch()
        try:
            with self:
                yield
        finally:
            self.parts, self._aliases = before
            self.report.runs_again = False
            self._watch()
            if place is not None:
                self._place = place

    def shard(self, x: Tensor, part: Part) -> Tensor:
        """Return the part of a whole tensor, that blocks receive in its place."""
        self.check_stale("a block", x, as_part=True)
        out = self.parts.shard(x, part)
        if not out.is_contiguous():
            out = mark(out.clone(memory_format=torch.preserve_format), part)
        if type(x) in PLAIN_TYPES:  # others keep their memory among their attributes
            vars(out).update({name: value for name, value in vars(x).items() if name[:6] != "_spar_"})
        self._aliases.add_slice(out, x)
        self._given.add(x, out)
        return out

    def gather(self, value: Any) -> Any:
        """Return a nested value with whole tensors."""
        return changed(self.parts.gather, value)

    def output(self, value: Any) -> Any:
        """Return what the model returns, at a forward's end, where ranks compare all that it did."""
        with without_view():
            value = changed(lambda x: self.check_stale("the model's output", x), value)
            self._given.write_back(self.gather, self._aliases)
            for field, numbers in draws_since(self._states, self.parts.device):
                self._fold(field, numbers)
            return compared_in(self.parts, lambda: changed(self._returned, value))

    def _returned(self, x: Tensor) -> Tensor:
        part = part_of(x)
        if self.returns_parts and part is not None and part.dim == 1 and part.is_sequence:
            return mark(x.view_as(x), None)  # another tensor, as a cache may hold this one
        return self.parts.gather(x)

    # ---- the mode ----

    def _call(
        self, key: tuple[Any, ...] | None, sharded: bool, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of which `Mode` does not know what it does, or that needs more than to be run.

        key: of the call; None where no key can tell it from others. sharded: whether an argument is a part.
        """
        function, given = function_of(func), kwargs
        if sharded and self.has_later and (x := waiting_in(self.parts, args, kwargs)) is not None:
            return later_of(x).called(x, function, func, args, kwargs)
        key = None if self.parts.is_later else key  # or `Mode` would run it on what only stands for a result
        if kwargs:
            args, kwargs = function.bind(args, kwargs)
        was_bound = kwargs is not given
        if function.is_operator:
            return self._operator(function, func, args, kwargs)
        if is_collective(func):  # `collectives` receives its call of a group
            with self:
                return body_of(func)(*args, **kwargs)
        if function.writes or "out" in kwargs or self._aliases.any_stale:
            self._check_written(function, args, kwargs)
        if func in _GRADIENTS and self._aliases.any_slice:
            raise self.error(
                function.name,
                "would have gradients of this rank's tokens alone",
                "compute them outside of the model, and average them over the ranks",
            )
        if maybe_current_level() is not None and (sharded or subclasses.wraps_part(args, kwargs)):
            raise self.error(function.name, "is in a torch.func transform of a part", AS_WHOLE)
        for number in states_of(kwargs) if key is None else ():
            self._fold(TORCH, number)
        if func is Tensor.register_hook:
            return register_hook(self.parts, *args, **kwargs)
        if not sharded:
            if self.recording:
                self.report.count(function.name, args, kwargs, self.blocks > 0)
            if function.name in MAKING and "out" not in kwargs:
                return self._aliases.add_made(func(*args, **kwargs))
            if not (function.writes or func in _GRADIENTS):
                self._remember_plain(func)
            return func(*args, **kwargs)
        run = subclasses.run_of(self, function.name, func, args, kwargs)
        if run is not None:
            with self:
                return run()
        step = self._step(key, function, func, args, kwargs)
        plan = step.plan
        if plan is None:
            return self._whole(function, func, args, kwargs)
        if self.recording and plan.work[1]:
            self.report.add(plan.work, self.blocks > 0)
        base: Any = args[0] if args else None
        if plan.moves:
            args, kwargs = moved_arguments(self.parts, dict(plan.moves), args, kwargs)
        if plan.becomes is not None and self._aliases.is_made(base):
            self._aliases.add_slice(base, shard_in_place(base, plan.becomes))
            self.note_written([base])  # what shares the whole's memory lacks it
        args, kwargs = replaced(args, kwargs, plan.replaced)
        out = step.run(*args, **kwargs)
        if step.result is None:
            self._learn(key, step, function, was_bound, args, base, out)
        mark_results(out, step.result)
        return out if step.writes else self._finish(step, base, out)

    def _learn(
        self,
        key: tuple[Any, ...] | None,
        step: Step,
        function: Function,
        was_bound: bool,
        args: Any,
        base: Any,
        out: Any,
    ) -> None:
        """Find what a plan's results are where it first runs; let `Mode` run calls that need no more."""
        plan = cast(Plan, step.plan)
        step.result = step.find_result(function.name, out)
        step.copies = are_copies(function.name, args, base, out, bool(plan.moves))
        step.may_copy = not plan.moves and isinstance(base, Tensor) and function.name in MAY_SHARE
        step.writes = function.is_inplace
        step.makes = function.name in MAKING and plan.part is None
        if key is None or plan.moves or plan.becomes is not None or (step.writes and self.parts.is_tile):
            return
        rest = step if step.copies or step.may_copy or step.writes or step.makes else None
        if not was_bound:
            self._remember(key, step.run, plan.replaced, step.result, rest)
        elif rest is None:  # Otherwise the first argument is read by its position.
            self._remember(key, function.with_binding(step.run, plan.replaced), (), step.result, None)

    def _finish(self, step: Step, base: Any, out: Any) -> Any:
        """Return a call's results after what is to be done for them; base: its first argument."""
        if step.writes:
            if self._aliases.write(base):
                self._watch()
            return out
        if step.makes:
            return self._aliases.add_made(out)
        if step.copies:
            self._aliases.add_copies(tensors_in(out), base)
        return self._unshared(base, out) if step.may_copy else out

    def _unshared(self, base: Tensor, out: Tensor) -> Tensor:
        """Return a copy of a result that shares memory, where that of one process may not: changes raise."""
        part = part_of(base)
        if part is None:
            return out
        is_sure = base.size(part.dim) != 1 or part.whole == 1 or has_no_gaps(base, part.dim)
        if is_sure and not self._aliases.is_dense_copy(base):
            return out
        if out.untyped_storage()._cdata != base.untyped_storage()._cdata:
            return out
        copy = mark(out.clone(), part_of(out))
        self._aliases.add_copies([copy], base)
        return copy

    def _step(
        self,
        key: tuple[Any, ...] | None,
        function: Function,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Step:
        """Return what to do for a call, planned where equal ones were not met before."""
        step = None if key is None else self._steps.get(key)
        if step is None:
            step = Step(planned(self.parts, self.error, function.name, func, args, kwargs), func)
            if key is not None:
                if len(self._steps) > _MOST_STEPS:
                    self.forget()
                self._steps[key] = step
        return step

    def forget(self) -> None:
        """Drop what was planned for calls, whose parts may not come again."""
        self._steps.clear()
        self._forget()
        self.parts.forget()

    @property
    def recording(self) -> bool:
        """Whether the report counts work and what runs whole."""
        return self._recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._recording = value
        self._watch()

    def _watch(self) -> None:
        """Note whether each call has to be looked at."""
        self._is_watching = self._recording or self._aliases.any_stale

    _code_of = staticmethod(code_of)

    # ---- functions that run whole ----

    def _whole(self, function: Function, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, written = function.name, function.written(args, kwargs)
        self.parts.check_by_token(name)
        if any(map(is_uneven, tensors_in(args, kwargs))) and not any(map(is_uneven, written)):
            return self._on_copies(name, self._in_view(func), args, kwargs, copied=even_of)
        body = body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if not function.is_known and rule_of(name) is None:
            raise self.error(
                name, "gets a sharded tensor, and torch does not say which arguments it writes", AS_WHOLE
            )
        self._note_whole(name, "has no rule for these arguments")
        if self.recording:
            self.report.count(name, args, kwargs, self.blocks > 0)
        if kwargs.get("inplace"):
            raise self.error(name, "changes a sharded tensor in place, whole", "pass inplace=False")
        out = self._on_copies(name, func, args, kwargs, writes=written)
        if name in ("numpy", "__array__"):
            out.flags.writeable = False  # a change would not reach the part
        return out

    def _on_copies(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], **options: Any) -> Any:
        """Run a function of torch on copies of parts."""
        out = run_whole(self.parts, self._aliases, name, func, args, kwargs, is_torch=True, **options)
        if is_view(name, args) and isinstance(args[0], Tensor):
            self._aliases.add_copies(tensors_in(out), args[0])
        self._watch()
        return out

    def _note_whole(self, name: str, why: str) -> None:
        if self.strict and self.blocks:
            raise self.error(name, f"{why}, and would run whole", "pass strict=False")
        if self.recording:
            self.report.ran_whole(name, self.blocks > 0)

    def _in_view(self, func: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return run

    def _operator(self, function: Function, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator of another library whole."""
        name, writes = function.name, function.written(args, kwargs)
        if has_part(args, kwargs):
            if hides_writes(name):
                raise self.error(name, "does not say whether it changes a sharded tensor", AS_WHOLE)
            if is_collective_operator(name):
                check_results(self, name, [*args, *kwargs.values()])
                func = waited(func)
        return self._run_whole(name, "is of another library", func, args, kwargs, writes=writes)

    def outside(
        self, name: str, call: Any, args: Any, kwargs: dict[str, Any], *, is_torch: bool = False
    ) -> Any:
        """Run what is no torch function on whole tensors."""
        with without_view():
            return self._run_whole(name, "is no torch function", call, args, kwargs, is_torch=is_torch)

    def _run_whole(
        self, name: str, why: str, call: Any, args: Any, kwargs: dict[str, Any], **options: Any
    ) -> Any:
        given = tensors_in(args, kwargs)
        for x in given:
            self.check_stale(name, x)
        if has_part(given):
            self.parts.check_by_token(name)
            self._note_whole(name, why)
        out = run_whole(self.parts, self._aliases, name, call, args, kwargs, **options)
        self._watch()
        return out

    def _check_written(self, function: Function, args: Any, kwargs: dict[str, Any]) -> None:
        """Follow changes in place, of what others would share the memory of."""
        for x in tensors_in(args, kwargs) if self._aliases.any_stale else ():
            self.check_stale(function.name, x)
        self.note_written(function.written(args, kwargs))

    def note_written(self, tensors: list[Tensor]) -> None:
        """Note that tensors are changed in place."""
        for x in tensors:
            if self._aliases.write(x):
                self._watch()

    def check_stale(self, name: str, x: Tensor, as_part: bool = False) -> Tensor:
        if self._aliases.is_stale(x, as_part):
            raise self.error(
                name,
                f"reads a tensor of shape {whole_shape(x)} that was changed in place through another one: a "
                "rank's part, or a copy, which would be a view if nothing was sharded",
                "change a clone",
            )
        return x

    def error(self, name: str, problem: str, advice: str) -> RuntimeError:
        where = f"{place_of_caller()} on rank {self.parts.rank} of {self.parts.world}"
        return RuntimeError(f"{name} at {where} {problem}; {advice}")

    def __deepcopy__(self, memo: object) -> View:
        return View(self.parts, self.strict, self.library, self.returns_parts)


def current_view() -> View | None:
    """Return the innermost view of this thread; other modes may be entered in it."""
    for at in range(_len_torch_function_stack() - 1, -1, -1):
        mode = _get_function_stack_at(at)
        if isinstance(mode, View):
            return mode
    return None


class _Left:
    """What `without_view` returns: no generator, as each block of a model enters it."""

    def __enter__(self) -> None:
        self._modes: list[Any] = []
        try:
            while not self._modes or not isinstance(self._modes[-1], View):
                self._modes.append(_pop_mode())
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self._modes):
            _push_mode(mode)


def without_view() -> _Left:
    """Leave the innermost view, and the modes that were entered in it, in a `with` statement."""
    return _Left()
