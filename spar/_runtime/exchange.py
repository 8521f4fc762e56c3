"""One exchange as torch sees it: a dispatcher op, an autograd Function, and the shortest way around both.

Every operation is linear: one exchange (or, for a split, one selection) with a factor. Its derivative is the
inverse operation with the factor that `grad_scale` asks for; the derivative of that is the operation itself
again. So a penalty on a gradient, which is differentiated twice, needs the same reduction of parameter
gradients as the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from .. import _C
from ..errors import SparError
from .agreement import failure_text, is_reported
from .channel import Operation
from .hints import name_operation
from .items import ITEMS, SCALE_TYPES, apply_scale
from .member import Place
from .registry import by_handle, calls_on, lends
from .tracing import OPS, Args, packed_index

Scale = tuple[float, bool]  # the factor, and whether it divides
ONE: Scale = (1.0, False)
SCALABLE = frozenset({*SCALE_TYPES, torch.complex32})
# what torch can copy between strides; other dtypes (int1, float4_e2m1fn_x2, ...) go as plain items
_COPYABLE = SCALABLE | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transforms = torch._C._are_functorch_transforms_active
_profiled = torch._C._autograd._profiler_enabled

# ---- the dispatcher op ----

_library = torch.library.Library("spar", "DEF")
# world and rank are part of the call: ranks share inductor's cache of graphs, and may hold other shapes
_library.define(
    "exchange(Tensor input, int group, int world, int rank, str op, SymInt[] args, float factor, bool divide,"
    " bool records, int[] then) -> Tensor",
    # else a tracer runs it at once where the input is a constant: ranks that trace at other times would hang
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _exchange(
    input_: torch.Tensor, group: int, world: int, rank: int, op: str, args: Args, *rest: Any
) -> torch.Tensor:
    *operation, then = rest
    return _run_eager(input_, Place(group, world, rank), Operation(op, tuple(args), *operation), tuple(then))


def _run_eager(
    input_: torch.Tensor, place: Place, operation: Operation, then: tuple[int, ...] = ()
) -> torch.Tensor:
    try:
        if OPS[operation.op].local:
            if input_.is_conj() or input_.is_neg():
                input_ = input_.resolve_conj().resolve_neg()
            return _copy_part(input_, place, operation)
        if input_.is_meta:  # shape inference: nothing to exchange, but counted as the peers' calls are
            by_handle(place[0]).calls += 1
            return _exchange_shape(input_, *place, operation.op, operation.args)
        return by_handle(place[0]).exchange(operation, input_)
    except BaseException as error:
        for handle in then:
            why = f"the exchange before it failed: {failure_text(error)}"
            with contextlib.suppress(SparError):
                by_handle(handle).fail(operation.op, input_.device.type, error, why)
        raise


def calls_before(places: tuple[Place, ...]) -> tuple[int, ...]:
    """How many calls this rank has made in each group; 0 under torch.compile, where none fails."""
    if torch.compiler.is_compiling():
        return (0,) * len(places)
    return tuple([calls_on(place[0]) for place in places])


def report_failure(
    waiting: Iterable[tuple[Place, int]], op: str, device: str | None, error: BaseException
) -> None:
    """Report to the peers of each group that this rank does not come to its next exchange, unless they know.

    waiting: the groups, each with its count of calls when this operation has made its exchanges there, after
        which peers wait for none.
    """
    if torch.compiler.is_compiling() or is_reported(error) or device == "meta":
        return
    for place, end in waiting:
        if place.world > 1 and calls_on(place.handle) < end:
            with contextlib.suppress(SparError):  # a broken group must not hide what is wrong here
                by_handle(place.handle).fail(op, device, error)


def _exchange_shape(
    input_: torch.Tensor, group: int, world: int, rank: int, op: str, args: Args, *_: object
) -> torch.Tensor:
    shape = list(input_.shape)
    OPS[op].shape(shape, tuple(args), world, rank)
    return input_.new_empty(shape)


_library.impl("exchange", _exchange, "CompositeExplicitAutograd")
torch.library.register_fake("spar::exchange", _exchange_shape, lib=_library)


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tracer, a mode or the profiler must see an exchange as a dispatched op.

    Otherwise it is called directly: the dispatcher costs as much as a small exchange.
    """
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or _dispatch_modes() > 0
        or _functorch_transforms()
        or _profiled()
    )


def _scaled(part: torch.Tensor, factor: float, divide: bool) -> torch.Tensor:
    """part times or divided by the factor: a view where that is 1 and the part contiguous as it lies."""
    if factor != 1.0:
        return part / factor if divide else part * factor
    if part.dtype in _COPYABLE or part.is_contiguous():
        return part.contiguous()
    return part.view(ITEMS[part.dtype.itemsize]).contiguous().view(part.dtype)


def _copy_part(input_: torch.Tensor, place: Place, operation: Operation) -> torch.Tensor:
    """What an op that communicates nothing selects, scaled: one copy."""
    handle, world, rank = place
    op, args, factor, divide, _ = operation
    if not input_.is_cpu:
        index = packed_index(args, world, rank).to(input_.device)
        return _scaled(input_.index_select(args[0], index), factor, divide)
    tensor = (input_.element_size(), input_.shape, input_.stride(), args)
    kind = SCALE_TYPES.get(input_.dtype, 0)
    capsule = None
    if lends(handle):  # memory that was in use before: a new tensor's first touch takes longer than the copy
        capsule = _C.select(op, world, rank, tensor, input_.data_ptr(), kind, divide, factor)
    if capsule is not None:
        output = torch._C._from_dlpack(capsule)
        if output.dtype != input_.dtype:
            output = output.view(input_.dtype)
    else:
        plan = _C.plan(op, world, rank, 0, (tensor,))
        output = torch.empty(plan.out_shapes[0], dtype=input_.dtype)
        plan.copy_own((input_.data_ptr(),), (output.data_ptr(),), kind, divide, factor)
    if kind == 0:
        apply_scale(output, factor, divide)
    return output


def run(
    input_: torch.Tensor,
    place: Place,
    operation: Operation,
    traced: bool | None = None,
    then: tuple[int, ...] = (),
) -> torch.Tensor:
    """One exchange, or one selection; torch.profiler shows it by its op's name, as `spar::all_to_all`.

    traced: what `_is_traced` returned, if the caller asked.
    then: handles of groups whose next exchange follows from this one: they learn of its failure.
    """
    op, args, factor, divide, _ = operation
    if place[1] == 1:
        return _scaled(input_.view_as(input_), factor, divide)
    if traced or (traced is None and _is_traced(input_)):
        if torch.compiler.is_compiling() or not _profiled():
            return _run_traced(input_, place, operation, then)
        with torch.profiler.record_function(f"spar::{op}"):
            return _run_traced(input_, place, operation, then)
    select = OPS[op].select
    if select is not None:
        if not input_.is_cpu:
            return _scaled(select(input_, args, place.world, place.rank), factor, divide)
        if op == "split" and factor == 1.0:
            part = select(input_, args, place.world, place.rank)
            if part.is_contiguous():
                return part
    return _run_eager(input_, place, operation, then)


def _run_traced(
    input_: torch.Tensor, place: Place, operation: Operation, then: tuple[int, ...]
) -> torch.Tensor:
    """In ops that others see."""
    op, args, factor, divide, _ = operation
    select = OPS[op].select
    if select is not None:
        return _scaled(select(input_, args, place.world, place.rank), factor, divide)
    out: torch.Tensor = torch.ops.spar.exchange(input_, *place, *operation, then)
    return out


Step = tuple[Place, str, Args]  # one exchange: where, which, how


def run_steps(
    input_: torch.Tensor, steps: tuple[Step, ...], scale: Scale, records: bool, traced: bool | None = None
) -> torch.Tensor:
    """One exchange after another, the whole factor in the last."""
    before = calls_before(tuple(step[0] for step in steps))
    try:
        for i in range(len(steps) - 1):
            place, op, args = steps[i]
            then = tuple(place.handle for place, op, _ in steps[i + 1 :] if not OPS[op].local)
            input_ = run(input_, place, Operation(op, args, *ONE, records), None, then)
            traced = None
        place, op, args = steps[-1]
        return run(input_, place, Operation(op, args, *scale, records), traced)
    except BaseException as error:
        counted = zip(steps, before, strict=True)
        waiting = [(place, count + 1) for (place, op, _), count in counted if not OPS[op].local]
        report_failure(waiting, steps[0][1], input_.device.type, error)
        raise


# An operation as autograd sees it: its steps, scale and grad_scale, whether it is traced, its name.
# One argument, since torch spends time on each, forward and backward.
Recorded = tuple[tuple[Step, ...], Scale, Scale, bool, str]


class SparExchange(torch.autograd.Function):
    """y = scale * op(x), op in one or more steps; the gradient of x is grad_scale * inverse(that of y)."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, call: Recorded) -> torch.Tensor:
        steps, scale, _, traced, _ = call
        # groups that nobody else holds must live until backward
        groups: tuple[object, ...] = ()
        if not (traced and torch.compiler.is_compiling()):
            for place, _, _ in steps:
                groups += (by_handle(place[0]).group,)
        ctx.call = call, input_.shape, groups
        return run_steps(input_, steps, scale, True, traced)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        (steps, scale, grad_scale, _, name), shape, _ = ctx.call
        inverse: tuple[Step, ...] = ()
        for place, op, args in steps:
            inverse = ((place, *OPS[op].inverse(shape, args, place.world)), *inverse)
            if len(steps) > 1:
                extents = list(shape)
                OPS[op].shape(extents, args, place.world, place.rank)
                shape = tuple(extents)
        try:
            if torch.is_grad_enabled() and grad.requires_grad:
                return recorded(grad, inverse, grad_scale, scale, name), None
            return run_steps(grad, inverse, grad_scale, False), None
        except SparError as error:
            name_operation(error, f"backward of {name}")
            raise


# Function.apply without its look at functorch's wrappers, which takes as long as the rest of it
_apply_plain: Callable[..., torch.Tensor] = super(torch.autograd.Function, SparExchange).apply


def recorded(
    input_: torch.Tensor, steps: tuple[Step, ...], scale: Scale, grad_scale: Scale, name: str
) -> torch.Tensor:
    """`run_steps`, with a gradient; an error in backward shows the operation's name."""
    if _is_traced(input_):
        return cast(torch.Tensor, SparExchange.apply(input_, (steps, scale, grad_scale, True, name)))  # type: ignore[no-untyped-call]
    return _apply_plain(input_, (steps, scale, grad_scale, False, name))
