"""One exchange as torch sees it: a dispatcher op, an autograd Function, and a fast path around both.

Every operation is linear: one exchange of tensors (or, for a split, one selection) and a factor. Its
derivative is the inverse exchange with the factor of `grad_scale`; the derivative of that is the operation
again. So a penalty on a gradient, which is differentiated twice, needs the same reduction of parameter
gradients as the loss. In forward mode the tangents go through the operation itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling  # half of is_compiling's time

from .. import _C
from .._group.agreement import failure_text, is_reported
from .._group.member import Place
from .._group.registry import by_handle, calls_on, lends
from .._transports.channel import Operation
from .._transports.dtypes import ITEM_TYPES, ITEMS, PLAIN_TYPES, SCALE_TYPES, apply_scale, plain
from ..errors import SparError
from .layouts import PACKED, ZIGZAG, Args, is_local, out_shape, packed_index, select, swapped

Scale = tuple[float, bool]  # the factor, and whether it divides
ONE: Scale = (1.0, False)
UNRECORDED, RECORDED, SUMMED, GATHERED = "", "recorded", "summed", "gathered"  # what backward will do
SCALABLE = frozenset({*SCALE_TYPES, torch.complex32})
# dtypes that torch can copy between strides and add; others (int1, float4_e2m1fn_x2, ...) move as plain items
ARITHMETIC = SCALABLE | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_PLAIN = frozenset(PLAIN_TYPES)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transforms = torch._C._are_functorch_transforms_active
_fake_mode = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)

# ---- the dispatcher op ----

library = torch.library.Library("spar", "DEF")
# world and rank are arguments: ranks share inductor's graph cache, and their shapes may differ
_SCHEMA = (
    "(Tensor[] inputs, int group, int world, int rank, str op, SymInt[] args, float factor,"
    " bool divide, str gradient, str note, int[] then{}) -> Tensor[]"
)
# or a tracer would run it on a constant input while tracing: ranks that trace at other times would hang
_TAGS = (torch.Tag.nondeterministic_seeded,)
# The last output is the number of the call, on the CPU. As `after` it keeps the order of a graph's exchanges
# (`_chained_exchange`); as `forward` it is that of the call whose gradient this one moves.
library.define("exchange" + _SCHEMA.format(", Tensor? after=None, Tensor? forward=None"), tags=_TAGS)
Tensors = Sequence[torch.Tensor]
Number = int | torch.Tensor  # of a call: a tensor in a graph, which does not know it


def define(schema: str, function: Any) -> None:
    """Define an op that every tracer but Dynamo replaces by what the function does."""
    library.define(schema, tags=_TAGS)
    # functorch, too, must see the autograd Function in it, instead of an op on its tensors
    for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(schema[: schema.index("(")], function, key)


def flattened(args: Sequence[Args]) -> list[int]:
    """Return the dispatcher op's args: for each tensor the count of its numbers, then those."""
    flat: list[int] = []
    for numbers in args:
        flat += (len(numbers), *numbers)
    return flat


def unflattened(flat: Sequence[int]) -> tuple[Args, ...]:
    args, at = [], 0
    while at < len(flat):
        end = at + 1 + flat[at]
        args.append(tuple(flat[at + 1 : end]))
        at = end
    return tuple(args)


def _exchange(
    inputs: Tensors,
    group: int,
    world: int,
    rank: int,
    op: str,
    args: Sequence[int],
    factor: float,
    divide: bool,
    gradient: str,
    note: str,
    then: Sequence[int],
    after: torch.Tensor | None = None,
    forward: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    place = Place(group, world, rank)
    operation = Operation(op, unflattened(args), factor, divide, gradient, note=note)
    if is_local(operation.args[0]):
        outputs = [_copy_part(x, place, a, operation) for x, a in zip(inputs, operation.args, strict=True)]
    else:
        number = 0 if forward is None else int(forward)
        outputs = run_eager(inputs, place, operation, tuple(then), number)
    return [*outputs, torch.tensor(calls_on(group), device="cpu")]


def run_eager(
    inputs: Tensors, place: Place, operation: Operation, then: tuple[int, ...] = (), forward: int = 0
) -> list[torch.Tensor]:
    """forward: as in `Channel.exchange`."""
    try:
        if inputs[0].is_meta:  # shape inference exchanges nothing, but counts as a call, as on the peers
            by_handle(place[0]).calls += 1
            return _empty_outputs(inputs, place, operation.args)
        return by_handle(place[0]).exchange(operation, inputs, forward=forward)
    except BaseException as error:
        for handle in then:
            why = f"the exchange before it failed: {failure_text(error)}"
            with contextlib.suppress(SparError):
                by_handle(handle).fail(operation.op, inputs[0].device.type, error, why)
        raise


def calls_before(places: tuple[Place, ...]) -> tuple[int, ...]:
    """Return this rank's number of calls in each group; 0 under torch.compile, where no call fails."""
    if is_dynamo_compiling():
        return (0,) * len(places)
    if len(places) == 1:
        return (calls_on(places[0][0]),)
    return tuple([calls_on(place[0]) for place in places])


def report_failure(
    waiting: Iterable[tuple[Place, int]], op: str, device: str | None, error: BaseException
) -> None:
    """Report to the peers of each group that this rank will not make its next exchange, unless they know.

    waiting: the groups, each with its number of calls once this operation has made its exchanges there. After
        that the peers wait for none.
    """
    if torch.compiler.is_compiling() or is_reported(error) or device == "meta" or _fake_mode() is not None:
        return
    for place, end in waiting:
        if place.world > 1 and calls_on(place.handle) < end:
            with contextlib.suppress(SparError):  # a broken group must not hide what is wrong here
                by_handle(place.handle).fail(op, device, error)


def _empty_outputs(inputs: Tensors, place: Place, args: tuple[Args, ...]) -> list[torch.Tensor]:
    _, world, rank = place
    return [x.new_empty(out_shape(x.shape, a, world, rank)) for x, a in zip(inputs, args, strict=True)]


def _fake_exchange(
    inputs: Tensors, group: int, world: int, rank: int, op: str, args: Sequence[int], *_: object
) -> list[torch.Tensor]:
    outputs = _empty_outputs(inputs, Place(group, world, rank), unflattened(args))
    return [*outputs, torch.empty((), dtype=torch.int64, device="cpu")]


library.impl("exchange", _exchange, "CompositeExplicitAutograd")
torch.library.register_fake("spar::exchange", _fake_exchange, lib=library)
# tracers then chain the exchanges of a graph by tokens: none is dropped, moved or repeated on one rank alone
_register_effectful_op(torch.ops.spar.exchange.default, _EffectType.ORDERED)


def is_any_traced(tensors: Tensors) -> bool:
    """Whether a tracer or a mode must see an exchange as a dispatched op.

    Otherwise it is called directly: the dispatcher costs as much as a small exchange.
    """
    return (
        is_dynamo_compiling()  # other tracers have a mode
        or not _PLAIN.issuperset(map(type, tensors))
        or _dispatch_modes() > 0
        or _functorch_transforms()
    )


def is_watched() -> bool:
    """`is_any_traced` of plain tensors outside of torch.compile."""
    return _dispatch_modes() > 0 or _functorch_transforms()


def must_record(inputs: Tensors) -> bool:
    """Whether autograd records what is computed from the inputs, or they have tangents."""
    for x in inputs:
        if x.requires_grad:
            return torch.is_grad_enabled() or have_tangents(inputs)
    return forward_ad._current_level >= 0 and have_tangents(inputs)


def is_transformed() -> bool:
    """Whether a transform of functorch is active, outside of torch.compile."""
    return not is_dynamo_compiling() and _functorch_transforms()


def have_tangents(inputs: Tensors) -> bool:
    """Whether forward mode computes a derivative of the inputs.

    Each may have one under a transform of functorch, which shows the tangents of the innermost level alone.
    """
    if forward_ad._current_level < 0:
        return False
    any_may = is_transformed()
    return any(
        (x.is_floating_point() or x.is_complex())
        and (any_may or forward_ad.unpack_dual(x).tangent is not None)
        for x in inputs
    )


def _scaled(part: torch.Tensor, factor: float, divide: bool) -> torch.Tensor:
    """Multiply or divide by the factor; return a view if the factor is 1 and the part is contiguous."""
    if factor != 1.0:
        return part / factor if divide else part * factor
    if part.dtype in ARITHMETIC or part.is_contiguous():
        return part.contiguous()
    return part.view(ITEMS[part.dtype.itemsize]).contiguous().view(part.dtype)


def _copy_part(input_: torch.Tensor, place: Place, args: Args, operation: Operation) -> torch.Tensor:
    """Copy what an exchange without communication selects, and scale it, in one pass."""
    handle, world, rank = place
    factor, divide = operation.factor, operation.divide
    (input_,) = plain((input_,))
    item = ITEM_TYPES[input_.dtype]
    if not input_.is_cpu:
        layout = args[2:]
        index = packed_index(layout, world, rank).to(input_.device)
        return _scaled(input_.index_select(layout[0], index), factor, divide)
    kind, inputs, layouts = item.scale, (input_,), (args,)
    output = None
    if lends(handle):  # reused memory: the page faults of a new tensor take longer than the copy
        request = operation.op, world, rank, item.size, inputs, layouts
        output = _C.select(*request, kind, divide, factor)
    if output is None:
        plan, addresses = _C.plan_of(operation.op, world, rank, 0, item.size, inputs, layouts)
        output = torch.empty(plan.out_shapes[0], dtype=input_.dtype, device="cpu")
        plan.copy_own(addresses, (output.data_ptr(),), kind, divide, factor)
    elif output.dtype != input_.dtype:
        output = output.view(input_.dtype)
    if kind == 0:
        apply_scale(output, factor, divide)
    return output


def run(
    inputs: Tensors,
    place: Place,
    operation: Operation,
    traced: bool | None = None,
    then: tuple[int, ...] = (),
    forward: Number = 0,
) -> Tensors:
    """Run one exchange or one selection.

    traced: the result of `is_any_traced`, if the caller has it.
    then: handles of groups whose next exchange depends on this one: a failure is reported to them, too.
    forward: as in `Channel.exchange`, for a traced exchange the tensor of `number_of_newest`.
    """
    if place[1] == 1:
        return [_scaled(x.view_as(x), operation.factor, operation.divide) for x in inputs]
    if traced is None:
        traced = is_any_traced(inputs)
    if traced:
        return _run_traced(inputs, place, operation, then, forward)
    args = operation.args
    if args[0][1] != -1:  # not local
        return run_eager(inputs, place, operation, then, cast(int, forward))
    if len(inputs) == 1:
        return (_select(inputs[0], place, args[0], operation),)
    return [_select(x, place, a, operation) for x, a in zip(inputs, args, strict=True)]


def _select(input_: torch.Tensor, place: Place, args: Args, operation: Operation) -> torch.Tensor:
    """Select this rank's shard of a whole tensor, as a view if it is contiguous and unscaled."""
    _, _, factor, divide, *_ = operation
    if args[3] == PACKED or (input_.is_cpu and (args[3] == ZIGZAG or factor != 1.0)):
        return _copy_part(input_, place, args, operation)
    part = select(input_, args[2:], place[1], place[2])
    assert part is not None
    if factor == 1.0 and part.is_contiguous():
        return part
    return _copy_part(input_, place, args, operation) if input_.is_cpu else _scaled(part, factor, divide)


def _run_traced(
    inputs: Tensors, place: Place, operation: Operation, then: tuple[int, ...], forward: Number
) -> Tensors:
    """Run it in dispatched ops."""
    op, args, factor, divide, gradient, _, note = operation
    if is_local(args[0]):
        parts = [select(x, a[2:], place.world, place.rank) for x, a in zip(inputs, args, strict=True)]
        if all(part is not None for part in parts):
            return [_scaled(cast(torch.Tensor, part), factor, divide) for part in parts]
    arguments = (inputs, *place, op, flattened(args), factor, divide, gradient, note, then)
    if is_dynamo_compiling():  # the tracer behind it chains the exchanges of its graph
        chained: list[torch.Tensor] = torch.ops.spar.chained_exchange(*arguments)
        return chained
    return _chained_exchange(*arguments, forward=forward if isinstance(forward, torch.Tensor) else None)


def _tracer() -> Any:
    """Return the mode in which AOTAutograd traces; None outside of it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def number_of_newest(steps: tuple[Step, ...]) -> tuple[torch.Tensor, ...]:
    """Return the number of the call of an only exchange that a tracer has just seen; none for several."""
    tracer = None if is_dynamo_compiling() else _tracer()
    if tracer is None or len(steps) != 1 or steps[0][0].world == 1 or is_local(steps[0][1][0]):
        return ()
    return (tracer._spar_exchange[1],)


def _chained_exchange(*arguments: Any, forward: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Call the op with an output of the exchange before it in the same graph.

    Its effect keeps an exchange in a graph, but inductor takes effects out of their order (torch 2.13, 2.14).
    The order of inputs and outputs it keeps.
    """
    tracer = _tracer()
    # torch begins another dict where it traces backward, which must not keep an output of forward
    tokens = getattr(tracer, "_tokens", None)
    of, after = getattr(tracer, "_spar_exchange", (None, None))
    outputs: list[torch.Tensor] = torch.ops.spar.exchange(
        *arguments, after if of is tokens else None, forward
    )
    last = outputs.pop()
    if tracer is not None:
        tracer._spar_exchange = tokens, last
    return outputs


define("chained_exchange" + _SCHEMA.format(""), _chained_exchange)


Step = tuple[Place, tuple[Args, ...]]  # one exchange: where, and the layouts of each tensor
# Operation, of a tuple with all its fields, without the call in Python that takes twice as long
_operation: Callable[[tuple[Any, ...]], Operation] = functools.partial(tuple.__new__, Operation)


def run_steps(
    inputs: Tensors,
    name: str,
    steps: tuple[Step, ...],
    scale: Scale,
    gradient: str,
    traced: bool | None = None,
    note: str = "",
    forwards: tuple[Number, ...] = (),
) -> Tensors:
    """Run one exchange after another; the last one applies the whole factor.

    note: of each operation. forwards: for each step, as in `Channel.exchange`.
    """
    forward = forwards[-1] if forwards else 0
    if len(steps) > 1:
        for i, (place, args) in enumerate(steps[:-1]):
            then = tuple(place.handle for place, args in steps[i + 1 :] if not is_local(args[0]))
            operation = Operation(name, args, *ONE, gradient, note=note)
            inputs = run(inputs, place, operation, None, then, forwards[i] if forwards else 0)
        traced = None
    place, args = steps[-1]
    if traced is None:
        traced = is_any_traced(inputs)
    if traced:
        return run(inputs, place, Operation(name, args, *scale, gradient, note=note), True, (), forward)
    operation = _operation((name, args, *scale, gradient, False, note))
    if place[1] > 1 and args[0][1] != -1:  # not local
        return run_eager(inputs, place, operation, forward=cast(int, forward))
    return run(inputs, place, operation, False)


# The gradient of an operation: its name, steps, places, and the exchange if it is one alone.
Back = tuple[str, tuple[Step, ...], tuple[Place, ...], Operation | None]
# An operation as autograd sees it: its name, steps, scale and grad_scale, whether it is traced, what its
# gradient is (None: not known), and its note. They are one argument: torch spends time on each, in forward
# and backward.
Recorded = tuple[str, tuple[Step, ...], Scale, Scale, bool | None, Back | None, str]


def _turned(name: str, steps: tuple[Step, ...], grad_scale: Scale) -> Back:
    if not name.startswith("backward of "):
        name = f"backward of {name}"
    inverse: tuple[Step, ...] = ()
    for place, args in steps:
        inverse = ((place, tuple([swapped(a) for a in args])), *inverse)
    only = Operation(name, inverse[0][1], *grad_scale, UNRECORDED) if len(inverse) == 1 else None
    return name, inverse, tuple([place for place, _ in inverse]), only


_LONG = 256  # numbers of a layout


def are_long(args: tuple[Args, ...]) -> bool:
    """Whether a comparison of these layouts would take longer than what a kept gradient saves."""
    return max(map(len, args)) > _LONG


@functools.lru_cache(64)
def _untraced(name: str, steps: tuple[Step, ...], scale: Scale, grad_scale: Scale, note: str) -> Recorded:
    """Return what autograd records; a step of training repeats the calls of the one before."""
    return name, steps, scale, grad_scale, False, _turned(name, steps, grad_scale), note


def calls_of(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Return the number of the call that the exchange of each step has just made; 0: it made none."""
    if is_dynamo_compiling():
        return ()
    if len(steps) == 1:  # without a list, which takes as long as the look-up
        ((place, args),) = steps
        return () if args[0][1] == -1 else (calls_on(place[0]),)
    return tuple([0 if args[0][1] == -1 else calls_on(place[0]) for place, args in steps])


class SparExchange(torch.autograd.Function):
    """Compute y = scale * op(x) in one or more steps; x's gradient is grad_scale * inverse(y's gradient)."""

    @staticmethod
    def forward(ctx: Any, call: Recorded, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        name, steps, scale, _, traced, _, note = call
        ctx.call = call  # not the group: a loss that outlives destroy_process_group would keep its threads
        outputs = tuple(run_steps(inputs, name, steps, scale, RECORDED, traced, note))
        ctx.forwards = number_of_newest(steps) if traced else calls_of(steps)[::-1]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, steps, scale, grad_scale, _, back, _ = ctx.call
        if back is None or is_dynamo_compiling():
            back = _turned(name, steps, grad_scale)
        name, inverse, places, only = back
        before = calls_before(places)
        try:
            if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and must_record(grads):
                return None, *recorded(grads, name, inverse, grad_scale, scale)
            if only is not None:
                forward = ctx.forwards[0] if ctx.forwards else 0
                return None, *run(grads, places[0], only, forward=forward)
            return None, *run_steps(grads, name, inverse, grad_scale, UNRECORDED, forwards=ctx.forwards)
        except BaseException as error:
            _report(inverse, before, name, grads, error)
            raise


def tangent_name(name: str) -> str:
    return name if name.startswith("tangent of ") else f"tangent of {name}"


def _report(
    steps: tuple[Step, ...], before: tuple[int, ...], name: str, inputs: Tensors, error: BaseException
) -> None:
    """Report a failure in a derivative to the peers that wait for its exchanges."""
    counted = zip(steps, before, strict=True)
    waiting = [(place, count + 1) for (place, args), count in counted if not is_local(args[0])]
    report_failure(waiting, name, inputs[0].device.type, error)


class SparTransformed(SparExchange):
    """The same with a derivative in forward mode, and for functorch's transforms.

    These need the context apart from forward, which takes longer. torch.compile traces no class with a jvp.
    """

    @staticmethod
    def forward(call: Recorded, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return SparExchange.forward(SimpleNamespace(), call, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.call, ctx.forwards = inputs[0], ()

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        name, steps, scale, grad_scale, *_ = ctx.call
        name = tangent_name(name)
        before = calls_before(tuple([place for place, _ in steps]))
        try:
            return recorded(tangents, name, steps, scale, grad_scale)
        except BaseException as error:
            _report(steps, before, name, tangents, error)
            raise


# Function.apply without its check for functorch's wrappers, which takes as long as the rest of it
_apply_plain: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, SparExchange).apply


def recorded(
    inputs: Tensors,
    name: str,
    steps: tuple[Step, ...],
    scale: Scale,
    grad_scale: Scale,
    traced: bool | None = None,
    note: str = "",
) -> tuple[torch.Tensor, ...]:
    """Run the steps and record the gradient; an error in backward shows the operation's name."""
    if traced is None:
        traced = is_any_traced(inputs)
    if forward_ad._current_level >= 0 or (traced and is_transformed()):
        call: Recorded = (name, steps, scale, grad_scale, None, None, note)
        return cast(tuple[torch.Tensor, ...], SparTransformed.apply(call, *inputs))  # type: ignore[no-untyped-call]
    if traced:
        call = (name, steps, scale, grad_scale, True, None, note)
        return cast(tuple[torch.Tensor, ...], SparExchange.apply(call, *inputs))  # type: ignore[no-untyped-call]
    for _, args in steps:
        if are_long(args):
            return _apply_plain((name, steps, scale, grad_scale, False, None, note), *inputs)
    return _apply_plain(_untraced(name, steps, scale, grad_scale, note), *inputs)


def recorder(
    name: str, steps: tuple[Step, ...], grad_scale: Scale, note: str
) -> Callable[[Tensors], Tensors]:
    """Return what runs and records the steps for plain tensors that no tracer must see."""
    call: Recorded = name, steps, ONE, grad_scale, False, _turned(name, steps, grad_scale), note
    return lambda inputs: _apply_plain(call, *inputs)
