# SPDX-License-Identifier: Apache-2.0
"""Logits that are computed where they are used: by a loss, on tiles of tokens, so that they are never whole.

A module behind the blocks, and functions of what it returns, first run without tokens: that has the shapes of
the whole. A cross entropy then runs all of them on each tile. Any other function first has them computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .aliases import Aliases
from .functions import Function
from .memory import version_of
from .nested import changed, tensors_in
from .part import Parts, mark, part_of
from .planning import planned
from .tile_parts import NotByToken, TileParts
from .tiled_call import Autocast, TiledCall, inputs_of
from .tiled_sum import TiledSum
from .view import View, current_view, without_view
from .waiting import LATER, computed, later_of

_LOSSES = frozenset({"cross_entropy", "nll_loss"})
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})  # attributes of modules, which keep no results


class LaterParts(TileParts):
    """The parts of tensors that are computed later, which have no tokens until then."""

    is_later = True

    def __init__(self, base: Parts, lengths: tuple[int, ...]) -> None:
        super().__init__(base, lengths, 0)
        self.base = base

    def gather(self, x: Tensor) -> Tensor:
        later = later_of(x)
        return x if later is None else self.base.gather(later.compute())


class Later:
    """What a module, or a function of its result, will return.

    call: of the module, whose forward it postpones. run: computes the module's result in the view, at once.
    inputs: the tensors among the arguments of `call`.
    before, function, read: if it is a function's result, of what, and which other tensors it reads.
    """

    def __init__(
        self,
        call: TiledCall,
        run: Callable[[], Any],
        inputs: list[Tensor],
        before: Later | None = None,
        function: Callable[[Tensor], Any] | None = None,
        read: Sequence[Tensor] = (),
    ) -> None:
        self.call, self.run, self.inputs = call, run, inputs
        self.before, self.function = before, function
        self.is_used: list[bool] = before.is_used if before else []  # by a loss
        # What began alike, by its id, in an order in which all ranks compute it.
        self.family: WeakValueDictionary[int, Later] = before.family if before else WeakValueDictionary()
        self.family[id(self)] = self
        self.value: Tensor | None = None
        self.read = read
        self.state = self._state()

    def begin(self) -> Tensor | None:
        """Return what stands for the result; None where there is no such. Call it outside of the view."""
        call = self.call
        tile = LaterParts(call.base, call.lengths)
        try:
            with torch.enable_grad():
                out = call.run_tile(call.tile(self.inputs, 0, 0), tile, call.view._place)
        except Exception:  # it does not run without tokens
            return None
        return self._standing(out) if isinstance(out, Tensor) and out.requires_grad else None

    def _standing(self, empty: Tensor) -> Tensor:
        setattr(empty, LATER, self)
        self.call.view.has_later = True
        return empty

    def compute(self) -> Tensor:
        """Compute all of this rank's tokens, in the view, with a graph wherever that is."""
        if self.value is None:
            view = self.call.view
            if current_view() is not view:
                with view:
                    return self.compute()
            self._check_unchanged()
            before, view.may_wait = view.may_wait, False
            try:
                with torch.inference_mode(False), torch.enable_grad(), self.call.autocast:
                    if self.before is None or self.function is None:
                        self.value = self.run()
                    else:
                        self.value = self.function(self.before.compute())
            finally:
                view.may_wait = before
        return cast(Tensor, self.value)

    def _state(self) -> dict[Tensor, tuple[int | None, bool]]:
        """Return what is read to compute this, and what shows a change of each."""
        module = self.call.module
        read = self.read if self.before else [*self.inputs, *module.parameters(), *module.buffers()]
        return {x: (version_of(x), x.requires_grad) for x in read}

    def _check_unchanged(self) -> None:
        if self._state() != self.state:
            raise self.call.view.error(
                type(self.call.module).__name__,
                "is computed where its result is read, and what it reads was changed, replaced or frozen",
                "change a clone, or parallelize the model without tile",
            )

    def _functions(self) -> list[Callable[[Tensor], Any]]:
        """Return those of the module's result whose result this is."""
        self._check_unchanged()
        if self.before is None or self.function is None:
            return []
        return [*self.before._functions(), self.function]

    def summed(self, loss: Callable[[Tensor, Tensor], Tensor], target: Tensor) -> Tensor:
        """Return the sum of this rank's losses, computed on tiles. loss: returns the sum of some tokens'."""
        call, functions = self.call, self._functions()

        def run(arguments: Any, target: Tensor) -> Tensor:
            out = call.run(*arguments[0], **arguments[1])
            for function in functions:
                out = function(out)
            with without_view(), autocast:
                return loss(out, target)

        arguments, autocast = call.with_inputs(self.inputs), Autocast(target.device.type)
        self.is_used.append(True)
        call.view.report.add_tiled(f"{type(call.module).__name__} and the loss", call.module, "")
        of_loss = TiledSum(call.view, run, call.module, (arguments, target), {}, call.size)
        place = call.view._place
        try:
            return of_loss.sum(inputs_of(arguments, target))
        except NotByToken:  # as of code that branches on the tokens
            call.view._place = place
            return loss(self.compute(), target)

    def called(self, x: Tensor, function: Function, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of x, which stands for the result, in the view, which was left for this call."""
        view, part = self.call.view, part_of(x)
        assert part is not None

        def with_in_place(y: Tensor) -> Any:
            return changed(lambda z: y if z is x else z, (args, kwargs))

        if function.written(args, kwargs):  # what else began like this is to share the change, or to lack it
            for each in [*self.family.values()]:
                each.compute()
        may_wait = self.value is None and torch.is_grad_enabled()
        if may_wait and function.name in _LOSSES and args and args[0] is x:
            twin = mark(x.view_as(x), self.call.base.part(part.dim, part.lengths, part.outer, part.inner))
            setattr(twin, LATER, self)
            twins = with_in_place(twin)
            plan = planned(view.parts, view.error, function.name, func, *twins)
            if plan is not None and plan.run is not None:  # it calls `summed`
                return view._call(None, True, func, *twins)
        others = [y for y in inputs_of(args, kwargs) if y is not x]
        if may_wait and not any(y.requires_grad or part_of(y) is not None for y in others):
            with contextlib.suppress(NotByToken):
                with view.on_tile(part.parts, Aliases(), view._place), torch.enable_grad():
                    out = func(*args, **kwargs)
                if out is x or not tensors_in(out):  # as of a cast to its own dtype; as a shape
                    return out
                of_out = part_of(out)
                if of_out is not None and of_out.parts is part.parts and out.requires_grad:
                    autocast = Autocast(x.device.type)

                    def again(y: Tensor) -> Any:
                        args, kwargs = with_in_place(y)
                        with autocast:
                            return func(*args, **kwargs)

                    after = Later(self.call, self.run, self.inputs, self, again, others)
                    return after._standing(out)
        with view:
            args, kwargs = computed((args, kwargs))
            return func(*args, **kwargs)


def finished(view: View, model: nn.Module, output: Any) -> Any:
    """Return a model's output with None in place of what only a loss has used; all else is computed.

    So is what modules keep as attributes, which may be read behind the forward.
    """

    def now(x: Tensor) -> Tensor | None:
        later = later_of(x)
        return x if later is None else later.value if later.is_used else later.compute()

    if not view.has_later:
        return output
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if not isinstance(value, Tensor | list | tuple | dict) or name in _OF_TORCH:
                continue
            if any(later_of(x) is not None for x in tensors_in(value)):
                setattr(module, name, computed(value))
    return changed(now, output)
