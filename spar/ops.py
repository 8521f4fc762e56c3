"""The operations, and their gradients.

Every operation is linear: one exchange (or, for a split, one selection) with a factor. Its derivative is the
inverse operation with the factor that `grad_scale` asks for; the derivative of that is the operation itself
again. So a penalty on a gradient, which is differentiated twice, needs the same reduction of parameter
gradients as the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .communicator import Place
from .errors import SparError
from .fallback import ITEMS
from .groups import by_handle, place_of, process_group
from .sizes import share

if TYPE_CHECKING:
    from .groups import Group

_Args = tuple[int, ...]
_Scale = tuple[float, bool]  # the factor, and whether it divides
_ONE: _Scale = (1.0, False)
_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transforms = torch._C._are_functorch_transforms_active
_profiled = torch._C._autograd._profiler_enabled
_SCALABLE = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    )
)
# what torch can copy between strides; other dtypes (int1, float4_e2m1fn_x2, ...) go as plain items
_COPYABLE = _SCALABLE | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


# ---- what the C core calls an op: its output's shape, and the op that undoes it ----


def _all_to_all_shape(shape: list[int], args: _Args, world: int, rank: int) -> None:
    scatter, gather, gather_size = args
    shape[scatter] = share(shape[scatter], world, rank)
    shape[gather] = gather_size


def _gather_shape(shape: list[int], args: _Args, world: int, rank: int) -> None:
    dim, *sizes = args
    shape[dim] = sum(sizes) if sizes else shape[dim] * world


def _split_shape(shape: list[int], args: _Args, world: int, rank: int) -> None:
    dim, *sizes = args
    shape[dim] = sizes[rank] if sizes else share(shape[dim], world, rank)


class _Op(NamedTuple):
    """shape changes an input's extents into the output's.

    inverse(an input's extents, args, world) gives the op that undoes it, and its args.
    """

    shape: Callable[[list[int], _Args, int, int], None]
    inverse: Callable[[_Args, _Args, int], tuple[str, _Args]]


_OPS = {
    "all_to_all": _Op(
        _all_to_all_shape,
        lambda shape, args, world: ("all_to_all", (args[1], args[0], shape[args[0]])),
    ),
    "gather": _Op(
        _gather_shape,
        lambda shape, args, world: ("split", args if len(args) == 1 + world else args[:1]),
    ),
    "split": _Op(
        _split_shape,
        lambda shape, args, world: ("gather", args if len(args) > 1 else (args[0], shape[args[0]])),
    ),
}


# ---- the dispatcher op ----

_library = torch.library.Library("spar", "DEF")
_library.define(
    "exchange(Tensor input, int group, str op, SymInt[] args, float factor, bool divide, bool records)"
    " -> Tensor"
)


def _exchange(
    input_: torch.Tensor, group: int, op: str, args: _Args, factor: float, divide: bool, records: bool
) -> torch.Tensor:
    if input_.is_conj() or input_.is_neg():
        input_ = input_.resolve_conj().resolve_neg()
    return by_handle(group).exchange(op, input_, tuple(args), factor, divide, records)


def _exchange_shape(
    input_: torch.Tensor, group: int, op: str, args: _Args, factor: float, divide: bool, records: bool
) -> torch.Tensor:
    shape, place = list(input_.shape), by_handle(group).place
    _OPS[op].shape(shape, tuple(args), place.world, place.rank)
    return input_.new_empty(shape)


_library.impl("exchange", _exchange, "CompositeExplicitAutograd")
torch.library.register_fake("spar::exchange", _exchange_shape, lib=_library)


def _is_listened_to(tensor: torch.Tensor) -> bool:
    """Whether somebody sees the ops that a plain tensor goes through: then an exchange is one of them.

    Otherwise it is called straight: the dispatcher costs as much as a small exchange.
    """
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or _dispatch_modes() > 0
        or _functorch_transforms()
        or _profiled()
    )


def _select(input_: torch.Tensor, place: Place, args: _Args) -> torch.Tensor:
    """A split: this rank's part, as a view."""
    dim, *sizes = args
    total = input_.size(dim)
    if sizes:
        start, length = sum(sizes[: place.rank]), sizes[place.rank]
    else:
        start = place.rank * (total // place.world) + min(place.rank, total % place.world)
        length = share(total, place.world, place.rank)
    return input_.narrow(dim, start, length)


def _scaled(part: torch.Tensor, scale: _Scale) -> torch.Tensor:
    """part times or divided by the factor: a view where that is 1 and the part contiguous as it lies."""
    factor, divide = scale
    if factor != 1.0:
        return part / factor if divide else part * factor
    if part.dtype in _COPYABLE or part.is_contiguous():
        return part.contiguous()
    return part.view(ITEMS[part.dtype.itemsize]).contiguous().view(part.dtype)


def _run(
    input_: torch.Tensor, place: Place, op: str, args: _Args, scale: _Scale, records: bool
) -> torch.Tensor:
    if place.world == 1:
        return _scaled(input_.view_as(input_), scale)
    if op == "split":
        return _scaled(_select(input_, place, args), scale)
    run = torch.ops.spar.exchange if _is_listened_to(input_) else _exchange
    out: torch.Tensor = run(input_, place.handle, op, args, *scale, records)
    return out


class _Exchange(torch.autograd.Function):
    """y = scale * op(x); the gradient of x is grad_scale * inverse op (gradient of y)."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        place: Place,
        op: str,
        args: _Args,
        scale: _Scale,
        grad_scale: _Scale,
    ) -> torch.Tensor:
        ctx.call = place, op, input_.shape, args, scale, grad_scale
        if not torch.compiler.is_compiling():
            ctx.keep = by_handle(place.handle).group  # one that nobody else holds must live until backward
        return _run(input_, place, op, args, scale, True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        place, op, shape, args, scale, grad_scale = ctx.call
        op, args = _OPS[op].inverse(shape, args, place.world)
        if torch.is_grad_enabled() and grad.requires_grad:
            back = _recorded(grad, place, op, args, grad_scale, scale)
        else:
            back = _run(grad, place, op, args, grad_scale, False)
        return back, None, None, None, None, None


# Function.apply without its look at functorch's wrappers, which takes as long as the rest of it
_apply_plain: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Exchange).apply


def _recorded(input_: torch.Tensor, *args: Any) -> torch.Tensor:
    if _is_listened_to(input_):
        return cast(torch.Tensor, _Exchange.apply(input_, *args))  # type: ignore[no-untyped-call]
    return _apply_plain(input_, *args)


# ---- arguments ----


class _Call:
    """A public operation's arguments, checked: each error names the value, the rank and what was expected."""

    __slots__ = ("input", "name", "ndim", "place", "rank", "world")

    def __init__(self, name: str, input_: torch.Tensor, group: Group) -> None:
        self.name = name
        if not isinstance(input_, torch.Tensor):
            raise TypeError(f"{name}: input_ is a {type(input_).__name__}; expected a tensor")
        self.input = input_
        self.place = place_of(process_group(group))
        _, self.world, self.rank = self.place
        if input_.layout is not _STRIDED:
            raise self.type_error("input_", f"a tensor of layout {input_.layout}", "a strided tensor")
        if input_.is_quantized:  # its scale and zero point are no part of its bytes
            raise self.type_error("input_", f"a quantized tensor of {input_.dtype}", "its int_repr()")
        self.ndim = input_.dim()
        if self.ndim == 0:
            raise self.error("input_", "a tensor without dims", "at least one dim")

    def error(self, what: str, value: object, expected: str) -> ValueError:
        return ValueError(self._told(what, value, expected))

    def type_error(self, what: str, value: object, expected: str) -> TypeError:
        return TypeError(self._told(what, value, expected))

    def _told(self, what: str, value: object, expected: str) -> str:
        """The text of an error, which the other ranks are told too."""
        text = f"{self.name} on rank {self.rank} of {self.world}: {what} is {value}; expected {expected}"
        if not torch.compiler.is_compiling():
            with contextlib.suppress(SparError):  # a broken group must not hide what is wrong here
                by_handle(self.place.handle).fail(self.name, text)
        return text

    def dim(self, what: str, dim: int) -> int:
        ndim = self.ndim
        if not isinstance(dim, int) or dim is True or dim is False:
            raise self.type_error(what, repr(dim), "a whole number")
        if not -ndim <= dim < ndim:
            shape = list(self.input.shape)
            raise self.error(what, dim, f"{-ndim} to {ndim - 1} for an input of shape {shape}")
        return dim % ndim

    def sizes(self, what: str, sizes: list[int] | None) -> _Args:
        if sizes is None:
            return ()
        if not isinstance(sizes, list):
            raise self.error(what, repr(sizes), "a list of one size for each rank, or None")
        if len(sizes) != self.world:
            raise self.error(what, sizes, f"{self.world} sizes, one for each rank")
        for size in sizes:
            if not isinstance(size, (int, torch.SymInt)) or size < 0:
                raise self.error(what, sizes, "whole numbers of at least 0")
        return tuple(sizes)

    def grad_scale(self, grad_scale: str | float | None) -> _Scale:
        if grad_scale is None:
            return _ONE
        if isinstance(grad_scale, str):
            if grad_scale not in ("up", "down"):
                raise self.error("grad_scale", repr(grad_scale), '"up", "down", None or a float')
            return float(self.world), grad_scale == "down"
        if isinstance(grad_scale, (int, float)) and not isinstance(grad_scale, bool):
            return float(grad_scale), False
        raise self.type_error("grad_scale", repr(grad_scale), '"up", "down", None or a float')

    def apply(self, op: str, args: _Args, grad_scale: _Scale) -> torch.Tensor:
        """Runs it, and records it where a gradient will be asked for."""
        input_, records = self.input, self.input.requires_grad and torch.is_grad_enabled()
        if records and grad_scale[0] != 1.0 and input_.dtype not in _SCALABLE:
            raise self.type_error(
                "input_",
                f"a tensor of {input_.dtype} whose gradient is to be scaled",
                "a floating or complex dtype of at least 16 bits, or grad_scale=None",
            )
        if self.world == 1 and not (records and grad_scale[0] != 1.0):
            return input_
        if not records:
            return _run(input_, self.place, op, args, _ONE, False)
        return _recorded(input_, self.place, op, args, _ONE, grad_scale)


# ---- the public operations ----


def all_to_all(
    input_: torch.Tensor,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
) -> torch.Tensor:
    """Scatters one dim over the group and gathers another. Source: seed 003, `all_to_all`.

    y on rank r = concat over p of x_p.split(sizes, scatter_dim)[r] along gather_dim, where the scatter dim is
    shared by the size rule (`cal_split_sizes`). The gradient is the same operation with the dims exchanged.

    Args:
        input_: any strided tensor of at least two dims, of any dtype; read through its strides.
        process_group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None for WORLD.
        scatter_dim: the dim to scatter; each rank holds all of it, and keeps its share.
        gather_dim: the dim to gather; each rank holds its own part of it.
        gather_size: total extent of the gather dim, of which each rank must hold the size rule's share. By
            default every rank is taken to hold as much as this one.

    Returns:
        A new contiguous tensor; in a group of one `input_` itself.

    Raises:
        ValueError: equal dims, a dim out of range, a gather_size of which this rank holds another share.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = _Call("all_to_all", input_, process_group)
    scatter = call.dim("scatter_dim", scatter_dim)
    gather = call.dim("gather_dim", gather_dim)
    if scatter == gather:
        raise call.error(
            "scatter_dim",
            f"{scatter_dim} and gather_dim is {gather_dim}",
            f"two different dims of an input with {input_.dim()}",
        )
    local = input_.size(gather)
    if gather_size is None:
        gather_size = local * call.world
    elif not isinstance(gather_size, (int, torch.SymInt)) or isinstance(gather_size, bool):
        raise call.type_error("gather_size", repr(gather_size), "a whole number or None")
    elif gather_size < 0 or share(gather_size, call.world, call.rank) != local:
        raise call.error(
            "gather_size",
            gather_size,
            f"a total of which this rank's share is the {local} that its input has in dim {gather}",
        )
    return call.apply("all_to_all", (scatter, gather, gather_size), _ONE)


def split_forward_gather_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    split_sizes: list[int] | None = None,
    grad_scale: str | float | None = "down",
) -> torch.Tensor:
    """Keeps this rank's part of a tensor that all ranks hold; gradients are gathered. Source: seed 003.

    y on rank r = x.split(sizes, dim)[r]. Forward communicates nothing.

    Args:
        input_: any strided tensor, the same on all ranks.
        process_group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None for WORLD.
        dim: the dim to split.
        split_sizes: one size for each rank that sum to the dim's extent; by default the size rule's.
        grad_scale: the gathered gradient is multiplied ("up") or divided ("down") by the group's size, left
            as it is (None), or multiplied by a float.

    Returns:
        A view of `input_` where the part is contiguous as it lies, else a contiguous copy; in a group of one
        `input_` itself.

    Raises:
        ValueError: a dim out of range, sizes that are no list or do not sum to the extent, an unknown
            grad_scale.
        TypeError: a gradient is recorded that its dtype cannot scale.
    """
    call = _Call("split_forward_gather_backward", input_, process_group)
    dim = call.dim("dim", dim)
    sizes = call.sizes("split_sizes", split_sizes)
    if sizes and sum(sizes) != input_.size(dim):
        raise call.error(
            "split_sizes", list(sizes), f"sizes that sum to {input_.size(dim)}, the extent of dim {dim}"
        )
    return call.apply("split", (dim, *sizes), call.grad_scale(grad_scale))


def gather_forward_split_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    gather_sizes: list[int] | None = None,
    grad_scale: str | float | None = "up",
) -> torch.Tensor:
    """Concatenates all ranks' parts on every rank; each keeps its part of the gradient. Source: seed 003.

    y = concat over p of x_p along dim. Backward communicates nothing: it is right where every rank holds the
    same gradient of y, as when all compute the same loss from it.

    Args:
        input_: this rank's part, any strided tensor.
        process_group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None for WORLD.
        dim: the dim to concatenate.
        gather_sizes: one size for each rank; by default every rank is taken to hold as much as this one.
        grad_scale: this rank's part of the gradient is multiplied ("up") or divided ("down") by the group's
            size, left as it is (None), or multiplied by a float.

    Returns:
        A new contiguous tensor; in a group of one `input_` itself.

    Raises:
        ValueError: a dim out of range, sizes that are no list or not this rank's, another grad_scale.
        TypeError: a gradient is recorded that its dtype cannot scale.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = _Call("gather_forward_split_backward", input_, process_group)
    dim = call.dim("dim", dim)
    sizes = call.sizes("gather_sizes", gather_sizes)
    if sizes and sizes[call.rank] != input_.size(dim):
        raise call.error(
            "gather_sizes",
            list(sizes),
            f"{input_.size(dim)} for this rank, the extent of its input's dim {dim}",
        )
    return call.apply("gather", (dim, *sizes), call.grad_scale(grad_scale))
