# SPDX-License-Identifier: Apache-2.0
"""A sharded model, or its blocks, that run as torch.compile's code, where the user asked for that.

torch.compile cannot trace a view, and need not: it traces the model's or the block's own code, of whole
shapes (parts among the arguments are hollow tensors), and `tracing` makes code for this rank's parts of the
graph. A model that cannot be one graph is compiled block by block, and a block that cannot be compiled runs
eagerly, each for a reason that the report has: so do all ranks, which agree on each new graph. The model's
first forward is eager, and fills the report.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from .._exchange.observers import _dispatch_modes
from .backends import Backend, backend_in, compiled_by
from .compiled_code import CompiledCode
from .leaves import Refused, allow_in_graph, begins_blocks
from .module_leaves import Numbers, Same
from .nested import tensors_in
from .part import Shard, shard_of
from .spans_mask import SpansMask
from .view import View

# Of a module, and where it has how they are called.
_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
_MOST_ALIKE = 4  # blocks that are tried in vain, beside others that are compiled
_MOST_LENGTHS, _MOST_GRAPHS = 2, 4  # of a model, for which torch.compile takes minutes
_KNOWN = frozenset({"_spar_shard", "_spar_even"})  # attributes of parts, which hollow tensors need not have


class Compiled:
    """What torch.compile made of a sharded model and its blocks.

    Attributes:
        leaves: by modules that graphs have as one node, what stands in place of their forwards.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.leaves: dict[nn.Module, Any] = {}
        self.numbers = Numbers()
        self.kinds: dict[Any, _Kind] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        made = Compiled(copy.deepcopy(self.view, memo))
        made.leaves = copy.deepcopy(self.leaves, memo)
        return made

    def run(self, block: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a block's own forward in the view: compiled if the user asked for it, and if it can be."""
        view = self.view
        backend = None if view._aliases.any_stale else view.backend_of(block)
        if backend is None:
            return own(*args, **kwargs)
        kind = self._kind(_Kind, backend, block, own)
        tensors = tensors_in(args, kwargs)
        shards = tuple([shard_of(x) or isinstance(x, SpansMask) for x in tensors])
        if not any(isinstance(shard, Shard) for shard in shards):
            return own(*args, **kwargs)
        return self._run(kind, block, own, args, kwargs, tensors, shards)

    def run_model(
        self, model: nn.Module, backend: Backend | None, own: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a model's own forward in the view: as one graph, if a backend is given and if it can be."""
        if backend is None:
            return own(*args, **kwargs)
        kind = self._kind(_ModelKind, backend, model, own)
        tensors = tensors_in(args, kwargs)
        shapes = tuple([shard_of(x) or (isinstance(x, SpansMask), x.shape) for x in tensors])
        modes = model.training, torch.is_grad_enabled()
        return self._run(kind, model, own, args, kwargs, tensors, ((self.view.parts, shapes), modes))

    def _kind(self, make: type[_Kind], backend: Backend, module: nn.Module, own: Any) -> _Kind:
        key = make, backend, type(vars(module)["_modules"].get("_orig_mod", module)), _code(own)
        kind = self.kinds.get(key)
        if kind is None:
            allow_in_graph()
            kind = self.kinds[key] = make(self.view, backend, self.numbers)
        return kind

    def _run(
        self,
        kind: _Kind,
        module: nn.Module,
        own: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        given: Any,
    ) -> Any:
        """given: what the tensors among the arguments are."""
        if kind.reason or module in kind.reasons:
            return own(*args, **kwargs)
        if _is_watched():
            kind.note(module, "a mode, a transform or a global hook is to see its functions")
            return own(*args, **kwargs)
        if names := {name for x in tensors if shard_of(x) for name in vars(x)} - _KNOWN:
            kind.refuse(module, None, f"an argument has the attribute {min(names)}")
            return own(*args, **kwargs)
        entry = kind.entry(module, tensors, (given, *_replaced_code(module)))
        if entry is None:
            return own(*args, **kwargs)
        for inner in module.modules() if self.leaves else ():
            forward = self.leaves.get(inner)
            if forward is not None:
                forward.number = self.numbers.number(inner, forward)
        return entry.call(module, own, args, kwargs, {id(x) for x in tensors})


def backend_of(asked: Backend | None, block: nn.Module) -> Backend | None:
    """Return by which backend a block is compiled; asked: the model's."""
    made = vars(block).get("_compiled_call_impl")
    wrapping = vars(block).get("dynamo_ctx")  # of what torch.compile(block) returned
    if wrapping is not None:
        return backend_in(wrapping.callback)
    return asked if made is None else compiled_by(made)


def _is_watched() -> bool:
    """Whether a mode in the view, a transform or a hook of all modules is to see the functions of a block."""
    newest = _get_function_stack_at(_len_torch_function_stack() - 1)
    is_seen = not isinstance(newest, View) or bool(_dispatch_modes()) or maybe_current_level() is not None
    is_seen = is_seen or forward_ad._current_level >= 0
    return is_seen or torch.nn.modules.module._has_any_global_hook()


def _replaced_code(module: nn.Module) -> list[Any]:
    """Return what users put into inner modules, each with its place: torch's guards may miss it.

    These are hooks, and forwards in the place of a class's own.
    """
    found: list[Any] = []
    modules = [*module._modules.values()]
    for place, inner in enumerate(modules):  # it grows
        if inner is None:
            continue
        own = inner.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            forward = own.get("forward")
            found += (place, None if hasattr(type(forward), "is_like_others") else Same(forward))
            for name, flags in _HOOKS.items():
                found += [
                    (Same(hook), *[key in own[flag] for flag in flags]) for key, hook in own[name].items()
                ]
        modules += own["_modules"].values()
    return found


def _code(own: Any) -> Any:
    """Return what blocks of one class share."""
    function = getattr(own, "__func__", own)
    return getattr(function, "__code__", function)


class _Kind:
    """Blocks of one class, for one backend.

    Attributes:
        reason: why none of them is compiled any more; empty if some are.
        reasons: of blocks, why they are not.
        has_blocks: whether it is of a model.
    """

    has_blocks = False

    def __init__(self, view: View, backend: Backend, numbers: Numbers) -> None:
        self.view, self.backend, self.numbers = view, backend, numbers
        self.reason, self.reasons = "", dict[nn.Module, str]()
        self._entries: dict[Any, CompiledCode] = {}  # by what the arguments are

    @property
    def graphs(self) -> int:
        return sum(entry.graphs for entry in self._entries.values())

    def entry(self, module: nn.Module, tensors: list[Tensor], key: Any) -> CompiledCode | None:
        """Return the code for such arguments; None if there is too much, or can be none.

        key: of what the arguments are, and of what else torch's guards may miss.
        """
        found = self._entries.get(key)
        if found is None:
            if any(min(shard.part.sizes) < 2 for shard in map(shard_of, tensors) if shard is not None):
                # Of one token, strides do not tell in which order the dims lie on other ranks.
                self.note(module, "a rank has less than two tokens of an argument")
                return None
            most = torch._dynamo.config.recompile_limit
            if len(self._entries) >= most:
                self.note(module, f"its arguments are of more than {most} lengths or layouts")
                return None
            found = self._entries[key] = CompiledCode(self)
        return found

    def note(self, module: nn.Module, reason: str) -> None:
        """Report why a call is not of compiled code."""
        self.view.report.add_eager(module, reason)

    def refuse(self, module: nn.Module, entry: Any, reason: str, *, for_all: bool = False) -> None:
        """Let a block run eagerly from now on; all, where several could not be compiled for one reason."""
        self.reasons[module] = reason
        self.note(module, reason)
        alike = sum(other == reason for other in self.reasons.values())
        if for_all or alike >= (_MOST_ALIKE if self.graphs else 2):
            self.reason = reason

    def check(self, graph: torch.fx.GraphModule) -> None:
        """Refuse a graph of which no code is to be made."""


class _ModelKind(_Kind):
    """A model, for one backend: what is not one graph is compiled block by block."""

    has_blocks = True

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self._lengths: set[Any] = set()

    def entry(self, module: nn.Module, tensors: list[Tensor], key: Any) -> CompiledCode | None:
        """Return the code for arguments of these shapes and layouts, and for modes; None if there is none."""
        found = self._entries.get(key)
        if found is None:
            lengths = key[0][0]
            if lengths not in self._lengths and len(self._lengths) >= _MOST_LENGTHS:
                self.note(module, f"its arguments are of more than {_MOST_LENGTHS} lengths or layouts")
                return None
            self._lengths.add(lengths)
            found = self._entries[key] = CompiledCode(self)
        return None if found.is_refused else found

    def note(self, module: nn.Module, reason: str) -> None:
        self.view.report.add_by_block(reason)

    def refuse(self, module: nn.Module, entry: Any, reason: str, *, for_all: bool = False) -> None:
        """Let the model go by block for such arguments; for all, where ranks differ."""
        self.note(module, reason)
        if entry is not None:
            entry.is_refused = True
        if for_all:
            self.reason = reason

    def check(self, graph: torch.fx.GraphModule) -> None:
        if self.graphs >= _MOST_GRAPHS:
            raise Refused(f"it is {_MOST_GRAPHS} graphs already")
        if not begins_blocks(graph):
            raise Refused("no block begins in its graph")
