# SPDX-License-Identifier: Apache-2.0
"""Shard any model: its blocks receive parts, and its forward returns whole tensors."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._C import call_key
from .._control.mismatch import add_advice
from .._exchange.arguments import ranks_of
from .._group.group import MOST_EXCHANGES, Call
from .._group.registry import place_of
from ..errors import MismatchError, SparError
from ..topology.groups_by_name import ParallelState
from ..topology.resolve import Group, process_group
from ..topology.topology import current
from .agreement import Agreement
from .caches import follow
from .experts import are_experts, run_experts
from .generators import CODE
from .images import has_convolutions, shard_rows
from .outside import again, enter_inputs, intercepted
from .part import Part, Parts, part_of, tensors_in, whole_shape
from .places import explain, forget_parameters, number_parameters
from .report import Report, warn_caller
from .view import Around, View, current_view, without_view

_STATE = "_spar_view"  # the attribute of a model that is sharded
_STREAMS = ("hidden_states", "x", "src", "tgt", "input")  # the names of what blocks pass on
_MOST_KNOWN = 1000  # calls of a block
_METHODS = (None, "ulysses", "gather", "ring", "hybrid")


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
    on each rank has its part of the tokens, of any number, by `cal_split_sizes`; the model's code still sees
    whole shapes. Each torch function runs on parts, with an exchange where it mixes tokens, or whole on each
    rank, which the report names. Compute the same loss on all ranks, and average gradients of parameters over
    them, as DDP and FSDP2 do: they are then those of one process. Does not communicate.

    Args:
        model: it is changed in place, until `unshard_model`. Not a wrapper such as DDP.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current topology's
            sequence group (WORLD if there is none).
        blocks: names of modules, with wildcards, such as "layers.*"; each shards the sequence that it
            receives, if it is whole. "": the model, such as one of convolutions, of whose images
            `[N, C, H, W]` or videos `[N, C, T, H, W]` each rank has rows. None: the elements of each
            outermost ModuleList or Sequential that has attention in it; of each ModuleList if none has.
        method: of attention: "ulysses", "gather" or "ring"; None chooses for each. "hybrid": sequences lie
            over the ring and ulysses groups of the current parallel state, whose cp group is `group`.
        strict: whether a function inside blocks that would run whole raises.

    Returns:
        The report of the first forward, empty until then.

    Raises:
        ValueError: the model is sharded already or wrapped, or has no such blocks.
        TypeError: model is no module.
    """
    return sharded(model, group, "shard_model", blocks=blocks, method=method, strict=strict)


def unshard_model(model: torch.nn.Module) -> None:
    """Undo `shard_model`: no hook or attribute is left.

    Raises:
        ValueError: the model is not sharded, or its forward was replaced since.
    """
    unsharded(model, "unshard_model")


def sharded(
    model: torch.nn.Module,
    group: Group,
    where: str,
    *,
    blocks: Sequence[str] | None = None,
    method: str | None = None,
    strict: bool = False,
    around: Around = contextlib.nullcontext,
    report: Report | None = None,
) -> Report:
    """Shard a model as `shard_model` does.

    where: the caller, for messages. around: what is entered around each run of its code on parts. report: of
    another model, to which this one's is added.
    """
    check_module(model, where)
    if is_sharded(model):
        raise ValueError(f"{where}: the model is sharded already; undo that first")
    if method not in _METHODS:
        raise ValueError(
            f'{where}: method is {method!r}; expected "ulysses", "gather", "ring", "hybrid" or None'
        )
    found = _blocks(model, blocks, where)
    real = process_group(group, where)
    place = place_of(real)
    state = _state_of(real, where) if method == "hybrid" else None
    parts = Parts(real, place.world, place.rank, None if state else method, state)
    view = View(parts, strict, around)
    view.report = view.report if report is None else report
    vars(model)[_STATE] = _Sharded(model, view, found)
    return view.report


def unsharded(model: torch.nn.Module, where: str) -> None:
    state = vars(model).get(_STATE) if isinstance(model, torch.nn.Module) else None
    if state is None:
        raise ValueError(f"{where}: the model is not sharded; expected one that was")
    state.remove(where)
    del vars(model)[_STATE]


def is_sharded(model: torch.nn.Module) -> bool:
    return _STATE in vars(model)


def states_of(model: torch.nn.Module) -> list[_Sharded]:
    """Return what `shard_model` changed in a model and its modules."""
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


# ---- blocks ----


def _blocks(model: torch.nn.Module, patterns: Sequence[str] | None, where: str) -> dict[str, torch.nn.Module]:
    if patterns is None:
        listed = _listed(model, "")
        attending = {name: block for name, block in listed.items() if _attends(block)}
        if not listed:
            ways = ['blocks=["layers.*"], the modules before which its sequence is to be sharded']
            rows = 'blocks=[""], by which rows of the images or videos that the model receives are sharded'
            ways.insert(not has_convolutions(model), rows)
            raise ValueError(
                f"{where}: {type(model).__name__} has no ModuleList of blocks; pass to spar.shard_model "
                + ", or ".join(ways)
            )
        return attending or listed
    modules = dict(model.named_modules())
    found: dict[str, torch.nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        depth = pattern.count(".")
        names = [n for n in modules if n.count(".") == depth and fnmatch.fnmatchcase(n, pattern)]
        names = [n for n in names if n or not pattern]
        if not names:
            known = ", ".join([name for name in modules if name][:8])
            raise ValueError(f"{where}: blocks has {pattern!r}; expected names of modules, such as {known}")
        found |= {name: modules[name] for name in names}
    return found


def _listed(module: torch.nn.Module, path: str) -> dict[str, torch.nn.Module]:
    """Return the elements of the outermost lists of modules."""
    found: dict[str, torch.nn.Module] = {}
    for name, child in module.named_children():
        at = f"{path}{name}"
        if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            found |= {f"{at}.{key}": block for key, block in child.named_children()}
        else:
            found |= _listed(child, f"{at}.")
    return found


def _attends(block: torch.nn.Module) -> bool:
    return any("att" in type(inner).__name__.lower() for inner in block.modules())


# ---- what is changed in a model ----


class _Sharded:
    """What `shard_model` changed in a model; it is copied with the model."""

    def __init__(self, model: torch.nn.Module, view: View, blocks: dict[str, torch.nn.Module]) -> None:
        self.model, self.view = model, view
        self.agreement = Agreement(view.parts.group, model)
        self.is_whole = False  # whether forwards run as in one process, for a comparison
        inner = {name: block for name, block in blocks.items() if block is not model}
        self.shards = _Shards(self, model) if len(inner) < len(blocks) else None  # if the model is a block
        self.hooks = [
            block.register_forward_pre_hook(_Shards(self, block), with_kwargs=True)
            for block in inner.values()
        ]
        self.forwards: list[tuple[torch.nn.Module, Any, Any]] = []  # modules, what they had, what they have
        for name, module in inner.items():
            self._replace(module, functools.partial(_BlockForward, name))
        for module in model.modules():
            if are_experts(module):
                self._replace(module, _ExpertsForward)
        self._replace(model, _ModelForward)

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
    """A module's forward in place of its own."""

    def __init__(self, sharded: _Sharded, module: torch.nn.Module, own: Any) -> None:
        self.sharded, self.module, self.own = sharded, module, own


class _BlockForward(_Forward):
    def __init__(self, name: str, *rest: Any) -> None:
        super().__init__(*rest)
        self.name, self.number = name, zlib.crc32(name.encode())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a block; in the view too if backward runs it again, for a checkpoint."""
        sharded, view = self.sharded, self.sharded.view
        view.blocks += 1
        try:
            if sharded.is_running:
                view._fold(CODE, self.number)
                return self.own(*args, **kwargs)
            if not any(part_of(x) is not None for x in tensors_in(args, kwargs)):
                self._note_outside(view)
                return self.own(*args, **kwargs)
            with again(view):
                return self.own(*args, **kwargs)
        finally:
            view.blocks -= 1

    def _note_outside(self, view: View) -> None:
        """Say once that a block runs whole on each rank: the sharded model's forward did not call it."""
        is_meant = view.parts.world == 1 or self.sharded.is_whole or is_dynamo_compiling()
        if is_meant or (view.has_run_outside and not view.strict):
            return
        view.has_run_outside = True
        problem = "runs outside of the sharded model's forward, and so whole on each rank"
        advice = (
            "call the sharded model itself, not a module of it; if its forward was replaced since "
            "shard_model, unshard_model(model) before and shard_model after that"
        )
        if view.strict:
            raise view.error(f"block {self.name}", problem, f"{advice}, or pass strict=False")
        if not view.parts.rank:
            warn_caller(f"block {self.name} {problem}; {advice}")


class _ExpertsForward(_Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.sharded.is_running:
            return self.own(*args, **kwargs)
        return run_experts(self.sharded.view, self.module, self.own, args, kwargs)


class _ModelForward(_Forward):
    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.names = tuple(inspect.signature(self.own).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's forward over the ranks, never compiled: torch.compile cannot trace the view."""
        run = _run_disabled() if "torch._dynamo" in sys.modules else _ModelForward._run
        return run(self, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        sharded, view = self.sharded, self.sharded.view
        if view.parts.world == 1 or sharded.is_running or sharded.is_whole:
            return self.own(*args, **kwargs)
        with Call(ranks_of(view.parts.group, ""), "a sharded model's forward", MOST_EXCHANGES) as call:
            try:
                view.parts.device = _device_of(sharded.model)
                args, kwargs = enter_inputs(view, sharded.model, args, kwargs)
                if view.recording:
                    number_parameters(sharded.model)
                sharded.agreement.begin(dict(zip(self.names, args, strict=False)) | kwargs, view.parts.device)
                with intercepted(view), view.forward(args, kwargs):
                    output = view.output(self._in_view(args, kwargs))
                sharded.agreement.end(view.word)
                follow(view, *kwargs.values(), output)
            except BaseException as error:
                call.device = view.parts.device.type
                if isinstance(error, MismatchError):
                    with contextlib.suppress(SparError):  # the group may be broken
                        sharded.agreement.end(0)  # other inputs are the reason, if they differ
                    add_advice(error)
                    explain(error, _BlockForward)
                raise
        self._warn()
        return output

    def _in_view(self, args: Any, kwargs: Any) -> Any:
        """Call the model's own forward, with its inputs sharded if the model is a block."""
        shards, view, model = self.sharded.shards, self.sharded.view, self.sharded.model
        if shards is None:
            return self.own(*args, **kwargs)
        with without_view():
            found = shard_rows(view, model, args, kwargs)
        args, kwargs = found or shards(model, args, kwargs)
        view.blocks += 1
        try:
            return self.own(*args, **kwargs)
        finally:
            view.blocks -= 1

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined] # it calls what is disabled in depth

    def _warn(self) -> None:
        """Name once what runs whole in blocks."""
        view = self.sharded.view
        report, kind = view.report, type(self.sharded.model).__name__
        if report.warned or view.parts.rank:
            return
        report.warned = True
        if report.share > 0.9 or any(each.in_block for each in report.functions):
            warnings.warn(f"sharded {kind}: {report}", stacklevel=3)


@functools.cache
def _run_disabled() -> Any:
    """Return what runs a model's forward and is never compiled."""
    return torch._dynamo.disable(_ModelForward._run)


class _Shards:
    """The hook in front of a block: shards the sequence that it receives, and all that is as long."""

    def __init__(self, sharded: _Sharded, block: torch.nn.Module) -> None:
        self.sharded = sharded
        self.names = tuple(inspect.signature(block.forward).parameters)
        self.known: dict[Any, tuple[Part | None, ...]] = {}  # by the arguments: what is made of them

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.sharded.is_running:
            return None
        with without_view():
            return self._shard(args, kwargs)

    def _shard(self, args: Any, kwargs: Any) -> Any:
        """Which tensor is the sequence is a matter of speed alone: whatever is sharded, results are right."""
        key = call_key(self.names, args, kwargs)
        parts = None if key is None else self.known.get(key)
        if parts is None:
            parts = self._parts(args, kwargs)
            if key is not None:
                if len(self.known) >= _MOST_KNOWN:
                    self.known.clear()
                self.known[key] = parts
        places = iter(parts)

        def sharded(x: Any) -> Any:
            if type(x) is tuple:
                return tuple([sharded(entry) for entry in x])
            part = next(places, None) if isinstance(x, Tensor) else None
            return x if part is None else self.sharded.view.shard(x, part)

        return tuple([sharded(x) for x in args]), {name: sharded(x) for name, x in kwargs.items()}

    def _parts(self, args: Any, kwargs: Any) -> tuple[Part | None, ...]:
        """Return the part that is made of each tensor, in order; none if all stay."""
        named = [*zip(self.names, args, strict=False), *kwargs.items()]
        tensors = [(name, x) for name, x in named if isinstance(x, Tensor)]
        # Such as cosines and sines, [B, S, D] or [S, D]; [S, S] would be a mask.
        inner = [x for _, value in named if type(value) is tuple for x in value if isinstance(x, Tensor)]
        inner = [x for x in inner if x.dim() > 1 and x.size(-1) != x.size(-2)]
        parts: dict[int, Part] = {}
        view = self.sharded.view
        total = next((x.size(-1) for name, x in tensors if name == "position_ids" and x.dim() > 0), -1)
        for main in _streams([(name, x) for name, x in tensors if x.is_floating_point()], total):
            part = part_of(main)
            if part is None:
                dim = _dim_of_tokens(main, total)
                if main.size(dim) < view.parts.world:
                    continue
                part = parts[id(main)] = view.parts.part(dim, (main.size(dim),))
            if part.is_plain:
                for x in [x for _, x in tensors if x.dim() > 2] + inner:
                    is_whole = part_of(x) is None
                    if is_whole and x.dim() > max(part.dim, 1) and x.size(part.dim) == part.whole:
                        parts.setdefault(id(x), part)
        wanted = [parts.get(id(x)) for x in _given(args, kwargs)]
        return tuple(wanted) if any(part is not None for part in wanted) else ()


def _given(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Return the tensors among a block's arguments, and in tuples of them."""
    for x in (*args, *kwargs.values()):
        if type(x) is tuple:
            yield from _given(x, {})
        elif isinstance(x, Tensor):
            yield x


def _streams(tensors: list[tuple[str, Tensor]], total: int) -> list[Tensor]:
    """Return the sequences among a block's arguments: by their names, else the first and the longest.

    total: the number of positions, where they are an argument; with it, one tensor may hold several streams,
    as hyper-connections have: [B, S, streams, D], or [streams, B, S, D].
    """
    named = [x for name, x in tensors if name in _STREAMS and (x.dim() in (2, 3) or _is_stack(x, total))]
    if named:
        return named
    some = [x for _, x in tensors if x.dim() == 3] or [x for _, x in tensors if x.dim() == 2]
    some = [x for x in some if min(whole_shape(x)[:-1]) > 1] or some
    return [*some[:1], max(some, key=lambda x: max(whole_shape(x)[:-1]))] if some else []


def _is_stack(x: Tensor, total: int) -> bool:
    return x.dim() == 4 and total in whole_shape(x)[1:3]


def _dim_of_tokens(x: Tensor, total: int) -> int:
    if _is_stack(x, total):
        return 1 if x.size(1) == total else 2
    return 1 if x.dim() == 3 and x.size(1) >= x.size(0) else 0


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
