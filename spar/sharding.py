"""Sharding and gathering in a model's forward, by the current topology. Source: seed 000.

None of these takes a group: they go by the current topology's sequence group, and without one return their
input. A shard's gradient is gathered and divided by the group's size, a gather's is this rank's part times
the size, so a shard and its gather leave a gradient as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Integral

import torch

from ._runtime.call import Call
from ._runtime.checks import check_bool, check_str, check_type
from ._runtime.exchange import ONE
from ._runtime.member import ALONE, Place
from ._runtime.registry import by_handle, place_of
from ._runtime.tracing import constant
from .errors import SparError
from .topology.topology import sequence_group, warn_if_unsharded

__all__ = ["ShardingValidator", "get_sharding_validator", "sp_gather", "sp_shard", "sp_shard_with_padding"]


def sequence_place(name: str) -> Place:
    """This rank's place in the current topology's sequence group; `name` is the operation that asks."""
    group = sequence_group()
    return _alone(name) if group is None else place_of(group)


@constant
def _alone(name: str) -> Place:
    warn_if_unsharded(name)
    return ALONE


def held_by_each(name: str, place: Place, size: int) -> list[int]:
    """What each rank holds of something, where no rule tells it: one exchange of a number."""
    held: list[int] = Call(name, torch.tensor([size]), place).apply("gather", (0,), ONE).tolist()
    return held


def shard_with_padding(call: Call, dim: int, pad_value: float) -> tuple[torch.Tensor, int]:
    """This rank's part of the input padded at its end, and the padding; only own parts are copied."""
    total, scale = call.input.size(dim), call.grad_scale("down")
    padding = -total % call.world
    if padding == 0:
        return call.apply("split", (dim,), scale), 0
    each = (total + padding) // call.world
    sizes = [min(max(total - rank * each, 0), each) for rank in range(call.world)]
    try:  # on ranks that need none, too
        pad = call.input.new_full((1,) * call.input.dim(), pad_value)
    except (RuntimeError, OverflowError):
        raise call.error("pad_value", f"{pad_value!r:.100}", f"a value of {call.input.dtype}") from None
    part = call.apply("split", (dim, *sizes), scale)
    shape = list(part.shape)
    shape[dim] = each - sizes[call.rank]
    if shape[dim]:
        part = torch.cat([part, pad.expand(shape)], dim)
    return part, padding


def sp_shard(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    """Keeps this rank's part of a tensor that all sequence ranks hold. Source: seed 000, `sp_shard`.

    y on rank r = part r of P along dim. Forward communicates nothing; backward gathers, and divides by P.

    Args:
        tensor: any strided tensor, the same on all ranks.
        dim: the dim to split.
        validate: whether its extent must be a multiple of P. Otherwise it is shared by the size rule
            (`spar.cal_split_sizes`), and a rank may get nothing.

    Returns:
        A view of `tensor` where the part is contiguous as it lies, else a contiguous copy; alone `tensor`.

    Raises:
        ValueError: a dim out of range; with validate an extent that is no multiple of P.
        TypeError: a gradient is recorded that its dtype cannot scale.
    """
    call = Call("sp_shard", tensor, sequence_place("sp_shard"), "tensor", exchanges=0)
    dim = call.dim("dim", dim)
    check_bool(call.where, "validate", validate)
    if validate and tensor.size(dim) % call.world:
        raise call.error(
            "tensor",
            f"of shape {list(tensor.shape)} with {tensor.size(dim)} in dim {dim}",
            f"a multiple of the {call.world} ranks, or validate=False, or sp_shard_with_padding",
        )
    return call.apply("split", (dim,), call.grad_scale("down"))


def sp_gather(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    """Concatenates the parts of all sequence ranks. Source: seed 000, `sp_gather`.

    y = concat over p of tensor_p along dim. Backward keeps this rank's part of the gradient, times P; it
    communicates nothing, and is right where every rank holds the same gradient of y.

    Args:
        tensor: this rank's part, any strided tensor.
        dim: the dim to concatenate.
        validate: whether the ranks first tell each other how much they hold, in an exchange of a number each,
            so that uneven parts gather rightly. Otherwise all must hold as much as this one. Under
            torch.compile it breaks the graph: pass False for fullgraph=True.

    Returns:
        A new contiguous tensor; alone `tensor` itself.

    Raises:
        ValueError: a dim out of range.
        TypeError: a gradient is recorded that its dtype cannot scale.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = Call("sp_gather", tensor, sequence_place("sp_gather"), "tensor", exchanges=1 + (validate is True))
    try:
        dim = call.dim("dim", dim)
        check_bool(call.where, "validate", validate)
        sizes: list[int] = []
        if validate and call.world > 1 and not tensor.is_meta:
            sizes = held_by_each("sp_gather", call.place, tensor.size(dim))
        return call.apply("gather", (dim, *sizes), call.grad_scale("up"))
    except BaseException as error:
        call.fail(error)
        raise


def sp_shard_with_padding(tensor: torch.Tensor, dim: int, pad_value: float = 0.0) -> tuple[torch.Tensor, int]:
    """`sp_shard` of a tensor that is first padded to a multiple of P. Source: seed 000.

    All ranks get as much. The padding lies at the end: after a gather,
    `y.narrow(dim, 0, y.size(dim) - padding)` is without it.

    Args:
        tensor: any strided tensor, the same on all ranks.
        dim: the dim to pad and split.
        pad_value: what the padding holds; it has no gradient.

    Returns:
        This rank's part, and how much was added to the whole: 0 to P - 1.

    Raises:
        ValueError: a dim out of range, a pad_value that the dtype has not.
        TypeError: a pad_value that is no number; a gradient is recorded that its dtype cannot scale.
    """
    name = "sp_shard_with_padding"
    call = Call(name, tensor, sequence_place(name), "tensor", exchanges=0)
    dim = call.dim("dim", dim)
    check_type(call.where, "pad_value", pad_value, (int, float, Integral), "a number")  # numpy's ints, too
    return shard_with_padding(call, dim, pad_value)


_VALIDATOR = "ShardingValidator"
_Cut = tuple[int, Place]  # the dim, counted from the front, and in which group


@dataclass
class ShardingValidator:
    """Tells whether shards and gathers belong together, by the names they are given. Source: seed 000.

        validator = ShardingValidator()
        with validator.track():
            hidden_states = validator.shard(hidden_states, "hidden_states", dim=1)
            output = validator.gather(model(hidden_states), "hidden_states", dim=1)
        validator.validate()

    Outside of `track()` it only shards and gathers. A shard of a name that awaits its gather, and a gather of
    a name that was not sharded, are warnings at once.
    """

    _sharded: set[str] = field(default_factory=set)
    _gathered: set[str] = field(default_factory=set)
    _enabled: bool = False
    _cuts: dict[str, _Cut] = field(default_factory=dict)  # of the last shard of each name
    _open: set[str] = field(default_factory=set)  # sharded, not yet gathered
    _differences: list[str] = field(default_factory=list)

    def reset(self) -> None:
        """Forgets what was tracked."""
        for found in (self._sharded, self._gathered, self._cuts, self._open, self._differences):
            found.clear()

    @contextmanager
    def track(self) -> Iterator[ShardingValidator]:
        """Tracks one forward pass; what was tracked before is forgotten."""
        self.reset()
        self._enabled = True
        try:
            yield self
        finally:
            self._enabled = False

    def shard(
        self, tensor: torch.Tensor, name: str, dim: int, validate_divisible: bool = True
    ) -> torch.Tensor:
        """`sp_shard`, noted under `name`; validate_divisible is its `validate`."""
        check_str("ShardingValidator.shard", "name", name)
        check_bool("ShardingValidator.shard", "validate_divisible", validate_divisible)
        part = sp_shard(tensor, dim, validate_divisible)
        if self._enabled:
            if name in self._open:
                warnings.warn(f"spar: {name!r} is sharded again before it was gathered", stacklevel=2)
            self._sharded.add(name)
            self._open.add(name)
            self._cuts[name] = (dim % tensor.dim(), sequence_place(_VALIDATOR))
        return part

    def gather(self, tensor: torch.Tensor, name: str, dim: int) -> torch.Tensor:
        """`sp_gather`, noted under the `name` that its shard has."""
        check_str("ShardingValidator.gather", "name", name)
        whole = sp_gather(tensor, dim)
        if self._enabled:
            self._gathered.add(name)
            self._open.discard(name)
            cut, own = self._cuts.get(name), (dim % tensor.dim(), sequence_place(_VALIDATOR))
            if cut is None:
                warnings.warn(f"spar: {name!r} is gathered, but was not sharded", stacklevel=2)
            elif cut != own:
                self._differences.append(
                    f"{name!r} was sharded along {_told(cut)}, but gathered along {_told(own)}"
                )
        return whole

    def validate(self) -> None:
        """Tells what is wrong with the tracked forward pass.

        Raises:
            ValueError: a shard without a gather, a gather along another dim or in another group than its
                shard; names them all.
        """
        wrong = list(self._differences)
        if missing := sorted(self._open):
            wrong.insert(0, f"sharded, but never gathered: {', '.join(map(repr, missing))}")
        if wrong:
            place = sequence_place(_VALIDATOR)
            raise ValueError(
                f"ShardingValidator on rank {place.rank} of {place.world}: {'; '.join(wrong)}; "
                "expected for each shard a gather along its dim, in its group"
            )


def _told(cut: _Cut) -> str:
    dim, place = cut
    if place == ALONE:
        return f"dim {dim} without a group"
    name = "that is gone"
    with suppress(SparError):
        name = repr(by_handle(place.handle).name)
    return f"dim {dim} of group {name} ({place.world} ranks)"


_validator = ShardingValidator()


def get_sharding_validator() -> ShardingValidator:
    """This process's validator. Source: seed 000, `get_sharding_validator`."""
    return _validator
