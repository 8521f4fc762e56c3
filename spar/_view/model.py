# SPDX-License-Identifier: Apache-2.0
"""Shard any model: its blocks receive parts, and its forward returns whole tensors."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from .._exchange.arguments import ranks_of
from .._group.group import Call
from .._group.registry import place_of
from ..topology.resolve import Group, process_group
from .outside import intercepted
from .part import Part, Parts, part_of, tensors_in
from .report import Report
from .view import View

_STATE = "_spar_view"
_MOST_EXCHANGES = 2**62  # the peers may wait for any later exchange of a rank that fails
_STREAMS = ("hidden_states", "x", "src", "tgt", "input")  # the names of what blocks pass on


def shard_model(
    model: torch.nn.Module,
    group: Group = None,
    *,
    blocks: Sequence[str] | None = None,
    method: str | None = None,
    strict: bool = False,
) -> Report:
    """Shard the sequence of any torch model over the ranks of a group, in each later forward.

    Every rank calls the model with the same whole inputs and receives the whole output. From its first block
    on each rank has its part of the tokens, of any number; the model's code still sees whole shapes. Each
    torch function runs on parts, with exchanges where it mixes tokens, or whole on each rank, which the
    report names. Compute the same loss on all ranks, and average the gradients of parameters over them, as
    DDP and FSDP2 do: they are then those of one process. Does not communicate.

    Args:
        model: it is changed in place, until `unshard_model`. Not a wrapper such as DDP's.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current topology's
            sequence group (WORLD if there is none).
        blocks: names of the modules before which the sequence is sharded, with wildcards: "layers.*". None:
            the elements of each outermost ModuleList that has attention in it.
        method: of attention: "ulysses", "gather" or "ring"; None chooses for each.
        strict: whether a function inside blocks that would run whole is an error.

    Returns:
        The report of the first forward, empty until then.

    Raises:
        ValueError: the model is sharded already, is compiled, or has no such blocks.
        TypeError: model is no module.
    """
    where = "shard_model"
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{where}: model is {model!r:.200}; expected a torch.nn.Module")
    for inner in ("module", "_orig_mod"):  # where DDP and torch.compile keep the model
        if isinstance(getattr(model, inner, None), torch.nn.Module):
            raise ValueError(
                f"{where}: model is a {type(model).__name__}; expected what it wraps: model.{inner}"
            )
    if _STATE in vars(model):
        raise ValueError(f"{where}: the model is sharded already; call unshard_model(model) first")
    if method not in (None, "ulysses", "gather", "ring"):
        raise ValueError(f'{where}: method is {method!r}; expected "ulysses", "gather", "ring" or None')
    found = _blocks(model, blocks)
    real = process_group(group, where)
    place = place_of(real)
    parts = Parts(real, place.world, place.rank, method)
    sharded = vars(model)[_STATE] = _Sharded(model, View(parts, strict), found)
    return sharded.view.report


def unshard_model(model: torch.nn.Module) -> None:
    """Undo `shard_model`: no hook or attribute is left.

    Raises:
        ValueError: the model is not sharded, or its forward was replaced since.
    """
    state = vars(model).get(_STATE) if isinstance(model, torch.nn.Module) else None
    if state is None:
        raise ValueError("unshard_model: the model is not sharded; expected one that shard_model changed")
    state.remove()
    del vars(model)[_STATE]


def _blocks(model: torch.nn.Module, patterns: Sequence[str] | None) -> dict[str, torch.nn.Module]:
    if patterns is None:
        found = dict(_lists_with_attention(model, ""))
        if not found:
            raise ValueError(
                f"shard_model: {type(model).__name__} has no ModuleList of blocks with attention; "
                'pass blocks=["layers.*"], the modules before which its sequence is to be sharded'
            )
        return found
    modules = dict(model.named_modules())
    found = {}
    for pattern in patterns:
        matches = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(
                f"shard_model: blocks has {pattern!r}; expected the name of a module, such as "
                f"{', '.join([name for name in modules if name][:5])}"
            )
        found |= {name: modules[name] for name in matches if name.count(".") == pattern.count(".")}
    return found


def _lists_with_attention(module: torch.nn.Module, path: str) -> list[tuple[str, torch.nn.Module]]:
    found = []
    for name, child in module.named_children():
        at = f"{path}{name}"
        if not isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            found += _lists_with_attention(child, f"{at}.")
            continue
        found += [
            (f"{at}.{key}", block)
            for key, block in child.named_children()
            if any("att" in type(inner).__name__.lower() for inner in block.modules())
        ]
    return found


class _Sharded:
    """What `shard_model` changed in a model; copied with it."""

    def __init__(self, model: torch.nn.Module, view: View, blocks: dict[str, torch.nn.Module]) -> None:
        self.model, self.view, self.blocks = model, view, blocks
        self.hooks = [
            block.register_forward_pre_hook(_Shards(self), with_kwargs=True) for block in blocks.values()
        ]
        self.forwards: list[tuple[torch.nn.Module, Any, Any]] = []  # modules, what they had, what they have
        for module in blocks.values():
            self._replace(module, _BlockForward)
        self._replace(model, _ModelForward)

    def _replace(self, module: torch.nn.Module, kind: Any) -> None:
        before = vars(module).get("forward")
        now = kind(self, module.forward)
        functools.update_wrapper(now, module.forward)
        module.forward = now
        self.forwards.append((module, before, now))

    def remove(self) -> None:
        for module, _, now in self.forwards:
            if vars(module).get("forward") is not now:
                raise ValueError(
                    f"unshard_model: the forward of {type(module).__name__} was replaced since; expected "
                    "shard_model's; undo what replaced it first"
                )
        for hook in self.hooks:
            hook.remove()
        for module, before, _ in self.forwards:
            if before is None:
                del module.forward
            else:
                module.forward = before

    @property
    def active(self) -> bool:
        return _get_current_function_mode() is self.view


class _Forward:
    """A module's forward in place of its own."""

    def __init__(self, sharded: _Sharded, own: Any) -> None:
        self.sharded, self.own = sharded, own


class _BlockForward(_Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a block; in the view too if backward runs it again, for a checkpoint."""
        view = self.sharded.view
        view.blocks += 1
        try:
            if self.sharded.active:
                return self.own(*args, **kwargs)
            if not any(part_of(x) is not None for x in tensors_in(args, kwargs)):
                return self.own(*args, **kwargs)  # called alone, with whole tensors
            with intercepted(), view:
                return self.own(*args, **kwargs)
        finally:
            view.blocks -= 1


class _ModelForward(_Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        view = self.sharded.view
        if torch.compiler.is_compiling():
            raise RuntimeError("a model of shard_model cannot be compiled; compile functions that it calls")
        if view.parts.world == 1 or self.sharded.active:
            return self.own(*args, **kwargs)
        with Call(ranks_of(view.parts.group, ""), "a sharded model's forward", _MOST_EXCHANGES) as call:
            try:
                view.parts.device = _device_of(self.sharded.model)
                with intercepted(), view.forward():
                    output = self.own(*args, **kwargs)
                output = view.gather(output)
            except BaseException:
                call.device = view.parts.device.type
                raise
        self._warn()
        return output

    def _warn(self) -> None:
        """Name once what runs whole in blocks."""
        report = self.sharded.view.report
        if report.warned or self.sharded.view.parts.rank:
            return
        report.warned = True
        if report.share > 0.9 or any(each.in_block for each in report.functions):
            warnings.warn(f"shard_model({type(self.sharded.model).__name__}): {report}", stacklevel=3)


class _Shards:
    """The hook in front of a block: shards the sequence that it receives, and all that is as long."""

    def __init__(self, sharded: _Sharded) -> None:
        self.sharded = sharded

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.sharded.active:
            return None
        with _pop_mode_temporarily():
            return self._shard(module, args, kwargs)

    def _shard(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Which tensor is the sequence is a matter of speed alone: whatever is sharded, results are right."""
        forward = getattr(module.forward, "own", module.forward)
        named = [*zip(inspect.signature(forward).parameters, args, strict=False), *kwargs.items()]
        main = _main([(name, x) for name, x in named if isinstance(x, Tensor) and x.is_floating_point()])
        view = self.sharded.view
        if main is None:
            return None
        part = part_of(main)
        if part is None:
            dim = 1 if main.dim() == 3 and main.size(1) >= main.size(0) else 0
            if main.size(dim) < view.parts.world:
                return None
            part = view.parts.part(dim, (main.size(dim),))
        if not part.is_plain:
            return None

        def sharded(x: Any, part: Part = part) -> Any:
            if not isinstance(x, Tensor) or part_of(x) is not None:
                return x
            fits = x is main or (x.dim() > max(part.dim, 2) and x.size(part.dim) == part.whole)
            return view.shard(x, part) if fits else x

        return tuple([sharded(x) for x in args]), {name: sharded(x) for name, x in kwargs.items()}


def _main(tensors: list[tuple[str, Tensor]]) -> Tensor | None:
    """Return the sequence among a block's arguments: of its usual names, else the longest."""
    named = [x for name, x in tensors if name in _STREAMS and x.dim() in (2, 3)]
    some = named or [x for _, x in tensors if x.dim() == 3] or [x for _, x in tensors if x.dim() == 2]
    sharded = next((x for x in some if part_of(x) is not None), None)
    return sharded if sharded is not None else max(some, key=lambda x: max(x.shape[:-1]), default=None)


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
