# SPDX-License-Identifier: Apache-2.0
"""Modules that run on tiles of a rank's tokens, so that what they compute inside is never whole.

Which modules do is found where each first runs: all that they compute of one tile, they compute of its tokens
alone, and autograd would save more of it than of the module's results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from .._exchange.observers import have_tangents
from .._transports.dtypes import PLAIN_TYPES
from .dtensors import is_distributed
from .generators import draws_since, restored, states
from .later import Later
from .library import Library, RunModule
from .memory import memory_of
from .nested import tensors_in
from .part import Part, part_of, whole_numel
from .tile_parts import NotByToken
from .tiled_call import TiledCall, check_reads, inputs_of, is_plain, named_parameters
from .view import View, without_view

_LEAST_SAVED = 0.5  # of the bytes of the results
_SAVES_NOTHING = ""  # the reason of modules that would save too little


def check_tile(tile: Any, where: str) -> None:
    """Check the tokens of a tile; None: there are no tiles."""
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
        raise ValueError(f"{where}: tile is {tile!r:.200}; expected the tokens of a tile, an int from 1")


def runs_of(
    model: nn.Module, blocks: Collection[nn.Module], library: Library, tile: int | None
) -> Iterator[tuple[nn.Module, RunModule]]:
    """Return modules of a model, and what runs each on parts in place of its forward.

    Tiles may have all but blocks, and what contains one. A module without state, such as an activation, saves
    little, and models may share it.
    """
    outer = {*blocks, model}
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        run = library.run_of(module)
        has_forward = type(module).forward is not nn.Module.forward
        if tile is not None and has_forward and _has_state(module) and outer.isdisjoint(module.modules()):
            run = TiledModule(run, tile, module not in inside)
        if run is not None:
            yield module, run


def _has_state(module: nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


class _Verdict(NamedTuple):
    """What is known of a module.

    reason: why it does not run on tiles; None if it does.
    grows: whether it computes each token alone, and returns more than it is given, as a head does.
    """

    reason: str | None
    grows: bool = False


class TiledModule:
    """Runs a module on tiles in place of its forward: a `RunModule`.

    inner: what runs it on parts; None if it runs as any code.
    size: the tokens of a tile.
    may_be_head: whether it is outside of blocks: a loss may compute what it returns.
    """

    def __init__(self, inner: RunModule | None, size: int, may_be_head: bool) -> None:
        self.inner, self.size, self.may_be_head = inner, size, may_be_head
        self.verdicts: dict[bool, _Verdict] = {}  # in training, and in evaluation

    def __call__(self, view: View, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inner is None:
                return own(*args, **kwargs)
            return self.inner(view, module, own, args, kwargs)

        if view.parts.is_tile or not self._may_tile(view, module, args, kwargs):
            return run(*args, **kwargs)
        for x in (inputs := inputs_of(args, kwargs)):
            view.check_stale("tiles", x)

        def on_tiles() -> Any:
            if self.verdicts[module.training].reason is None:
                place, generators = view._place, states(view.parts.device)
                try:
                    with without_view():
                        out = call.forward(inputs)
                except NotByToken as error:
                    view._place = place
                    self._decide(view, module, _Verdict(str(error)))
                else:
                    if draws_since(generators, view.parts.device):
                        raise _draws_error(view, module)
                    return out
            return run(*args, **kwargs)

        with without_view():
            call = TiledCall(view, run, module, args, kwargs, self.size)
            if module.training not in self.verdicts:
                self._decide(view, module, _verdict(call, inputs))
            if self.verdicts[module.training].grows and self._is_head(view, module):
                out = Later(call, on_tiles, inputs).begin()
                if out is not None:
                    return out
        return on_tiles()

    def _decide(self, view: View, module: nn.Module, verdict: _Verdict) -> None:
        self.verdicts[module.training] = verdict
        reason = verdict.reason
        if reason is None or (reason != _SAVES_NOTHING and any(module.children())):
            view.report.add_tiled(type(module).__name__, module, reason or "")

    def _may_tile(self, view: View, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether this call is one for tiles, unless what a first run shows says otherwise."""
        known = self.verdicts.get(module.training)
        if known is None and torch.is_inference_mode_enabled():  # nothing is saved
            return False
        if known is not None and known.reason is not None and not known.grows:
            return False
        inputs = inputs_of(args, kwargs)
        parts = [part for x in inputs if (part := part_of(x)) is not None]
        if not parts or not all(_is_like(part, parts[0]) for part in parts):
            return False
        first = parts[0]
        if first.parts is not view.parts or not is_plain((*args, *kwargs.values()), may_change=False):
            return False
        if first.held <= self.size and max(first.sizes) <= self.size:
            return False
        if maybe_current_level() is not None or any(type(x) not in PLAIN_TYPES for x in inputs):
            return False
        weights = [*module.parameters()]
        if forward_ad._current_level >= 0 and have_tangents([*inputs, *weights]):
            return False
        return not any(map(is_distributed, weights)) and not _has_hooks(module)

    def _is_head(self, view: View, module: nn.Module) -> bool:
        """Whether a loss may compute what a module returns: its hooks would see that it is not there."""
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        return self.may_be_head and view.may_wait and torch.is_grad_enabled() and not has_hooks


def _draws_error(view: View, module: nn.Module) -> RuntimeError:
    return view.error(
        type(module).__name__,
        "ran by tiles, and draws random numbers, which it did not in its first run",
        "backward would draw others: draw from the first run on, or parallelize the model without tile",
    )


def _has_hooks(module: nn.Module) -> bool:
    """Whether modules inside of a module have hooks, which would see tiles."""
    inner = [each for each in module.modules() if each is not module]
    return any(
        x._forward_hooks or x._forward_pre_hooks or x._backward_hooks or x._backward_pre_hooks for x in inner
    )


def _is_like(part: Part, first: Part) -> bool:
    return part.lengths == first.lengths and not part.is_padded and not part.is_uneven


def _verdict(call: TiledCall, inputs: list[Tensor]) -> _Verdict:
    """Find by its run on the first tile whether a module is to run on tiles."""
    start, size = next(call.ranges())
    view, place, is_recording = call.view, call.view._place, call.view.recording
    own = [
        x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
        for x in call.tile(inputs, start, size)
    ]
    weights = [x.detach().requires_grad_(x.requires_grad) for x in named_parameters(call.module)]
    saved = _Saved(own, weights)
    view.recording, generators = False, states(view.parts.device)
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.add, lambda x: x)
    try:
        device, module = view.parts.device, call.module
        with restored(device), _attributes_kept(module), call.with_weights(weights):
            with torch.enable_grad(), hooks:
                results = tensors_in(call.run_tile(own, call.parts_of(size), None))
            check_reads(results, [*own, *weights])
            if draws_since(generators, view.parts.device):
                return _Verdict("draws random numbers")
    except NotByToken as error:
        return _Verdict(str(error))
    except Exception as error:  # as in code that reads a part otherwise than by an argument
        return _Verdict(str(error).split("\n")[0])
    finally:
        view.recording, view._place = is_recording, place
    of_results = sum(x.numel() * x.itemsize for x in results)
    saves = saved.bytes_without(results) > _LEAST_SAVED * of_results
    return _Verdict(None if saves else _SAVES_NOTHING, _whole_bytes(results) > _whole_bytes(own))


def _whole_bytes(tensors: list[Tensor]) -> int:
    return sum(whole_numel(x) * x.itemsize for x in tensors)


class _Saved:
    """What autograd saves of a tile beside its arguments and weights, and casts of weights."""

    def __init__(self, inputs: list[Tensor], weights: list[Tensor]) -> None:
        self.known = {memory_of(x) for x in (*inputs, *weights)}
        self.shapes = {tuple(sorted(x.shape)) for x in weights}
        self.found: dict[int, int] = {}  # bytes by memory

    def add(self, x: Tensor) -> Tensor:
        if tuple(sorted(x.shape)) not in self.shapes:
            self.found[memory_of(x)] = x.numel() * x.itemsize
        return x

    def bytes_without(self, results: list[Tensor]) -> int:
        known = self.known.union(map(memory_of, results))
        return sum(count for memory, count in self.found.items() if memory not in known)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Raise if code changes attributes of modules, which a run on one tile is not to do; restore them.

    Those that are lists, dicts and sets have to keep their entries, too.
    """
    before: list[tuple[str, Any, Any]] = []
    for inner in module.modules():
        held = [(name, x) for name, x in vars(inner).items() if isinstance(x, (dict, list, set))]
        before += [(name, x, copy(x)) for name, x in (*held, ("", vars(inner)))]
    yield
    changed: set[str] = set()
    for name, now, then in before:
        found, expected = _entries(now), _entries(then)
        keys = {key for key in found.keys() | expected.keys() if found.get(key) is not expected.get(key)}
        if keys:
            now.clear()
            now.extend(then) if isinstance(now, list) else now.update(then)
            changed |= {name} if name else keys
    if changed:
        raise NotByToken(f"changes its attribute {min(changed)}")


def _entries(x: Any) -> dict[Any, Any]:
    return x if isinstance(x, dict) else dict(enumerate(x)) if isinstance(x, list) else dict.fromkeys(x)
