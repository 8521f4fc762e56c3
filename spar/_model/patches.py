# SPDX-License-Identifier: Apache-2.0
"""Code that is no torch function, and so not seen by a mode: it gets whole tensors.

Custom autograd Functions, whose backward would compute from a part, TorchScript, and flex_attention.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
import torch.utils.dlpack
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta, _SingleLevelFunction

from .._C import handle_torch_function
from .._exchange.arguments import ranks_of
from .._group.group import MOST_EXCHANGES, Call
from . import collectives, subclasses, threads
from .bodies import redirected
from .flex import create_block_mask, flex_attention, from_kv_blocks
from .gradients import average_inputs
from .groups import check_results
from .nested import changed, tensors_in
from .part import Part, Parts, has_part, mark, part_of
from .planning import AS_WHOLE
from .stand_ins import NoParts, computing, in_views, replaced, standing_for
from .view import View, current_view, without_view
from .waiting import computed

# They compute each element from that of their input, as their code shows.
_BY_ELEMENT = frozenset({"transformers.models.bloom.modeling_bloom.GeLUFunction"})
# They compute each row of their results, all [N], alone; the numbers are of the arguments that have N rows.
_BY_ROW = {"trl.kernels.chunked_logprob.ChunkedLogProbFunction": (0, 3)}
# Before torch 2.15 `Function.apply`, to which code may have bound references, is in Python, and calls that of
# its base, in C.
_OWN_APPLY: Any = torch._C._FunctionBase.__dict__["apply"]
_IN_PYTHON = torch.autograd.Function.__dict__["apply"] is not _OWN_APPLY
_APPLY_CODE = torch.autograd.Function.__dict__["apply"].__func__.__code__ if _IN_PYTHON else None
_APPLYING: Any = _SingleLevelFunction if _IN_PYTHON else torch.autograd.Function
# Each checkpoint without reentry calls it. From torch 2.15 on it gets the function's arguments as a tuple and
# a dict.
_NAME = "_checkpoint_without_reentrant_generator"
_RECOMPUTED = getattr(checkpoints, f"{_NAME}_impl", None) or getattr(checkpoints, _NAME)
_BY_CLASS = "call the apply of the class, as in F.apply(x)"
_calls = threading.local()  # is_own: whether torch's `apply` is called by `_call`
# Functions in C that no mode sees.
_UNSEEN: Any = (
    (Tensor, "as_subclass", ""),
    (torch.utils.dlpack, "to_dlpack", AS_WHOLE),
    (torch, "to_dlpack", AS_WHOLE),
    (torch._C._nested, "nested_tensor", "call torch.nested.as_nested_tensor"),  # type: ignore[attr-defined]
)

_lock = threading.Lock()
_entered = 0  # views, in all threads
_restore = contextlib.ExitStack()


@contextlib.contextmanager
def intercepted(view: View) -> Iterator[None]:
    """Let views see calls of autograd Functions and of TorchScript; the first enters what is around them."""
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            try:
                _install(view)
            except BaseException:
                _entered = 0
                _restore.close()
                raise
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if _entered == 0:
                _restore.close()


def _install(view: View) -> None:
    _replace(_APPLYING, "apply", classmethod(_apply))
    _replace(FunctionMeta, "__getattribute__", _attribute)
    own = torch.nn.Parameter.__dict__["__new__"].__func__
    _replace(torch.nn.Parameter, "__new__", staticmethod(_parameter(own)))
    collectives.install()
    _replace(Tensor, "_make_subclass", staticmethod(_make_subclass(Tensor._make_subclass)))
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None:
        _replace(tensors.DTensor, "to_local", _to_local(tensors.DTensor.to_local))
    for owner, name, value in threads.replacements():
        _replace(owner, name, value)
    _restore.enter_context(redirected(_RECOMPUTED, _recomputed))
    for module in (torch.nn.functional, torch.functional, torch._tensor):
        _replace(module, "handle_torch_function", handle_torch_function)
    for owner in (torch, torch.random):
        _replace(owner, "seed", _seed)
    for owner, name, advice in _UNSEEN:
        _replace(owner, name, standing_for(getattr(owner, name), functools.partial(_unseen, name, advice)))
    for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod):
        _replace(kind, "__call__", standing_for(kind.__call__, _scripted))
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None:
        _restore.enter_context(redirected(flex.flex_attention, flex_attention))
        _restore.enter_context(redirected(flex.create_block_mask, create_block_mask))
        of_blocks = flex.BlockMask.from_kv_blocks.__func__
        _restore.enter_context(redirected(of_blocks, from_kv_blocks))
    _restore.enter_context(view.library.around())
    # Dynamo cannot trace a view: compiled modules run as they are.
    if "torch._dynamo" in sys.modules:
        _restore.enter_context(torch.compiler.set_stance("force_eager"))


def enter_inputs(view: View, model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a model's arguments, such that backward averages the gradients of inputs; check them."""
    subclasses.check_inputs(view, args, kwargs)
    if maybe_current_level() is not None:
        held = [*tensors_in(args, kwargs), *model.parameters(), *model.buffers()]
        if any(map(is_functorch_wrapped_tensor, held)):
            raise view.error(
                type(model).__name__,
                "is sharded, and in a transform of torch.func",
                "use torch.autograd.forward_ad for a jvp, and torch.autograd.grad for gradients",
            )
    return average_inputs(view.parts, args, kwargs)


def _replace(owner: Any, name: str, value: Any) -> None:
    _restore.enter_context(replaced((owner, name, value)))


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for `apply` of all Functions."""
    view, call = current_view(), functools.partial(_call, cls)
    if view is None or not issubclass(cls, torch.autograd.Function):
        return call(*args, **kwargs)
    if view.has_later:
        args, kwargs = computed((args, kwargs))
    if cls is checkpoints.CheckpointFunction:
        return _reentrant(view, call, *args)
    if subclasses.keeps_parts(cls):
        with without_view():
            return subclasses.converted(view, cls, call, args)
    if cls.__module__ == "torch.distributed.nn.functional" and has_part(args, kwargs):
        check_results(view, cls.__name__, args)
    name, part = f"{cls.__module__}.{cls.__qualname__}", part_of(args[0]) if args else None
    if name in _BY_ELEMENT and part is not None:
        with without_view():
            return mark(call(*args, **kwargs), part)
    rows = _BY_ROW.get(name, ()) if part is not None and part.dim == 0 and part.is_everywhere else ()
    if part is not None and rows and all(part_of(args[i]) in (None, part) for i in rows):
        return _by_row(view, call, part, args, rows)

    def guarded(*wholes: Any, **named: Any) -> Any:
        problem = "has a sharded tensor otherwise than by an argument"
        with NoParts(view, cls.__name__, problem, "pass it to apply as a tensor"):
            return call(*wholes, **named)

    return view.outside(cls.__name__, guarded, args, kwargs)


def _by_row(
    view: View, call: Callable[..., Any], part: Part, args: tuple[Any, ...], of_rows: tuple[int, ...]
) -> Any:
    """Call a Function with this rank's rows, and with weights [V, D] that it multiplies each by."""
    weights = sum(x.numel() for x in tensors_in(args[1:]) if x.dim() == 2)
    work = part.local * weights, part.whole * weights
    with computing(view, "a function of rows", tensors_in(args), work):
        local = [*args]
        for i in of_rows:
            local[i] = args[i] if part_of(args[i]) is part else view.parts.shard(args[i], part)
        return changed(lambda x: mark(x, part), call(*local))


def _call(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's own `apply`."""
    before, _calls.is_own = getattr(_calls, "is_own", False), True
    try:
        return _OWN_APPLY.__get__(None, cls)(*args, **kwargs)
    finally:
        _calls.is_own = before


def _attribute(cls: Any, name: str) -> Any:
    """Return an attribute of a Function: for an `apply` in C, which was bound before the view, our `forward`.

    From torch 2.15 on there is no other way to see its calls.
    """
    found = type.__getattribute__(cls, name)
    if name not in ("forward", "setup_context"):
        return found
    if getattr(_calls, "is_own", False):
        _calls.is_own = name != "forward"  # torch looks it up last
        return found
    is_python = sys._getframe(1).f_code is _APPLY_CODE  # it will call `_apply`
    is_in_view = current_view() is not None and maybe_current_level() is None
    if is_python or not is_in_view or not issubclass(cls, torch.autograd.Function):
        return found
    base = _SingleLevelFunction.setup_context  # with it, `forward` gets a context
    return functools.partial(_forward, cls, found) if name == "forward" else base


def _forward(cls: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `apply` in the forward of another one, whose results keep the graph that they have."""
    view, ctx = current_view(), args[0] if args else None
    if view is None or not isinstance(ctx, cls._backward_cls):  # The caller is not `apply`.
        return own(*args, **kwargs)
    if forward_ad._current_level >= 0:  # torch has turned it off here
        raise view.error(
            cls.__name__, "has an apply that was bound before the forward, and forward-mode AD", _BY_CLASS
        )
    with torch.set_grad_enabled(bool(ctx.next_functions)):
        out = _apply(cls, *args[1:], **kwargs)
        out = changed(lambda x: x.view_as(x) if x.requires_grad else x, out)
    ctx.mark_non_differentiable(*tensors_in(out))
    return out


def _seed() -> int:
    """Stand for `torch.seed`, whose numbers differ between processes: it takes the generator's next one."""
    with without_view() if current_view() is not None else contextlib.nullcontext():
        number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    torch.manual_seed(number)  # also for what runs whole, outside of the view
    return number


def _unseen(name: str, advice: str, view: View, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not has_part(args, kwargs):
        return own(*args, **kwargs)
    args, kwargs = computed((args, kwargs))
    if name == "as_subclass":
        return mark(own(*args, **kwargs), part_of(args[0]))
    raise view.error(name, "reads the memory of sharded tensors", advice)


def _scripted(view: View, own: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
    if not has_part(args, kwargs):
        return own(script, *args, **kwargs)
    args, kwargs = computed((args, kwargs))
    return view.outside(getattr(script, "name", "TorchScript"), functools.partial(own, script), args, kwargs)


@in_views
def _parameter(
    view: View, own: Callable[..., Any], cls: Any, data: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if part_of(data) is not None:
        raise view.error(
            "nn.Parameter", "would be of this rank's part", "use the activation itself, or its clone()"
        )
    return own(cls, data, *args, **kwargs)


_make_subclass, _to_local = in_views(subclasses.make_subclass), in_views(subclasses.to_local)


@functools.lru_cache(maxsize=256)
def _recomputed(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        view = current_view()
        if view is None:
            yield from own(function, *args, **kwargs)
            return
        args, kwargs = computed((args, kwargs))
        # A checkpoint in another saves its arguments, by their local shapes, which lose their parts.
        parts = [part_of(x) for x in tensors_in(args, kwargs)]

        def run(*again: Any, **named: Any) -> Any:
            each = iter(parts)
            again, named = changed(lambda x: mark(x, next(each)), (again, named))
            return function(*again, **named)

        steps = own(_in(view, run), *args, **kwargs)
        with without_view():
            next(steps)
        yield
        with without_view():
            next(steps, None)

    return checkpoint


def _reentrant(view: View, apply: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Run a reentrant checkpoint, which detaches its arguments in backward: they keep their parts."""
    parts = [part_of(x) for x in tensors_in(args)]
    of_outputs: list[Any] = []

    def run(*again: Any) -> Any:
        each = iter(parts)
        out = computed(function(*changed(lambda x: mark(x, next(each)), again)))
        of_outputs[:] = [part_of(x) for x in tensors_in(out)]
        return out

    out = apply(_in(view, run), *args)
    for x, part in zip(tensors_in(out), of_outputs, strict=True):
        mark(x, part)
    return out


@contextlib.contextmanager
def reentered(view: View, parts: Parts) -> Iterator[None]:
    """Enter a view in backward, which runs a part of a forward again; report to the peers if that fails.

    parts: those of that forward.
    """
    group = ranks_of(parts.group, "")
    with Call(group, "a sharded model's recomputation", MOST_EXCHANGES, parts.device.type) as call:
        before, view.parts = view.parts, parts
        try:
            with intercepted(view), view:
                yield
        except BaseException as error:
            if type(error).__module__ == checkpoints.__name__:  # what is left of the forward is not needed
                call.exchanges = 0
            raise
        finally:
            view.parts = before


def _in(view: View, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that backward may call again, outside of the view: as in this forward."""
    forward, parts = (view.backend_of, view.has_later), view.parts

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if current_view() is view:
            return function(*args, **kwargs)
        before = view.backend_of, view.has_later
        view.backend_of, view.has_later = forward
        try:
            with reentered(view, parts):
                return function(*args, **kwargs)
        finally:
            view.backend_of, view.has_later = before

    return run


def refuse_pickles(_: Any) -> Any:
    raise TypeError(
        "cannot pickle a sharded model, or a cache that it made: they belong to this process's group; save "
        "model.state_dict(), or call spar.unparallelize(model) first"
    )


copyreg.pickle(View, refuse_pickles)
