"""One exchange as torch sees it: a dispatcher op, an autograd Function, and a fast path around both.

Every operation is linear: one exchange (or, for a split, one selection) and a factor. Its derivative is the
inverse operation with the factor of `grad_scale`; the derivative of that is the operation again. So a penalty
on a gradient, which is differentiated twice, needs the same reduction of parameter gradients as the loss.
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
# dtypes that torch can copy between strides; others (int1, float4_e2m1fn_x2, ...) are copied as plain items
_COPYABLE = SCALABLE | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transforms = torch._C._are_functorch_transforms_active
_profiled = torch._C._autograd._profiler_enabled

# ---- the dispatcher op ----

_library = torch.library.Library("spar", "DEF")
# world and rank are arguments: ranks share inductor's graph cache, and their shapes may differ
_library.define(
    "exchange(Tensor input, int group, int world, int rank, str op, SymInt[] args, float factor, bool divide,"
    " bool records, int[] then) -> Tensor",
    # or a tracer would run it on a constant input while tracing: ranks that trace at other times would hang
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
        if input_.is_meta:  # shape inference exchanges nothing, but counts as a call, as on the peers
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
    """Return this rank's number of calls in each group; 0 under torch.compile, where no call fails."""
    if torch.compiler.is_compiling():
        return (0,) * len(places)
    return tuple([calls_on(place[0]) for place in places])


def report_failure(
    waiting: Iterable[tuple[Place, int]], op: str, device: str | None, error: BaseException
) -> None:
    """Report to the peers of each group that this rank will not make its next exchange, unless they know.

    waiting: the groups, each with its number of calls once this operation has made its exchanges there. After
        that the peers wait for none.
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
    """Multiply or divide by the factor; return a view if the factor is 1 and the part is contiguous."""
    if factor != 1.0:
        return part / factor if divide else part * factor
    if part.dtype in _COPYABLE or part.is_contiguous():
        return part.contiguous()
    return part.view(ITEMS[part.dtype.itemsize]).contiguous().view(part.dtype)


def _copy_part(input_: torch.Tensor, place: Place, operation: Operation) -> torch.Tensor:
    """Copy what an op without communication selects, and scale it, in one pass."""
    handle, world, rank = place
    op, args, factor, divide, _ = operation
    if not input_.is_cpu:
        index = packed_index(args, world, rank).to(input_.device)
        return _scaled(input_.index_select(args[0], index), factor, divide)
    tensor = (input_.element_size(), input_.shape, input_.stride(), args)
    kind = SCALE_TYPES.get(input_.dtype, 0)
    capsule = None
    if lends(handle):  # reused memory: the page faults of a new tensor take longer than the copy
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
    """Run one exchange or one selection; torch.profiler shows it as `spar::all_to_all`, say.

    traced: the result of `_is_traced`, if the caller has it.
    then: handles of groups whose next exchange depends on this one: a failure is reported to them, too.
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
    """Run it in dispatched ops."""
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
    """Run one exchange after another; the last one applies the whole factor."""
    if len(steps) > 1:
        for i, (place, op, args) in enumerate(steps[:-1]):
            then = tuple(place.handle for place, op, _ in steps[i + 1 :] if not OPS[op].local)
            input_ = run(input_, place, Operation(op, args, *ONE, records), None, then)
        traced = None
    place, op, args = steps[-1]
    return run(input_, place, Operation(op, args, *scale, records), traced)


# An operation as autograd sees it: its steps, scale and grad_scale, whether it is traced, its name.
# They are one argument, since torch spends time on each, in forward and backward.
Recorded = tuple[tuple[Step, ...], Scale, Scale, bool, str]


class SparExchange(torch.autograd.Function):
    """Compute y = scale * op(x) in one or more steps; x's gradient is grad_scale * inverse(y's gradient)."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, call: Recorded) -> torch.Tensor:
        steps, scale, _, traced, _ = call
        # keep the groups alive until backward
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
        before = calls_before(tuple([step[0] for step in inverse]))
        try:
            if torch.is_grad_enabled() and grad.requires_grad:
                return recorded(grad, inverse, grad_scale, scale, name), None
            return run_steps(grad, inverse, grad_scale, False), None
        except BaseException as error:
            counted = zip(inverse, before, strict=True)
            waiting = [(place, count + 1) for (place, op, _), count in counted if not OPS[op].local]
            report_failure(waiting, inverse[0][1], grad.device.type, error)
            name_operation(error, f"backward of {name}")
            raise


# Function.apply without its check for functorch's wrappers, which takes as long as the rest of it
_apply_plain: Callable[..., torch.Tensor] = super(torch.autograd.Function, SparExchange).apply


def recorded(
    input_: torch.Tensor, steps: tuple[Step, ...], scale: Scale, grad_scale: Scale, name: str
) -> torch.Tensor:
    """Run the steps and record the gradient; an error in backward shows the operation's name."""
    if _is_traced(input_):
        return cast(torch.Tensor, SparExchange.apply(input_, (steps, scale, grad_scale, True, name)))  # type: ignore[no-untyped-call]
    return _apply_plain(input_, (steps, scale, grad_scale, False, name))
