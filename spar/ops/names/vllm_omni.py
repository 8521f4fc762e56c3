# SPDX-License-Identifier: Apache-2.0
"""Shard and gather tensors over the current topology's sequence group. From vLLM-Omni.

Without a sequence group the functions return their input. The backward of a shard gathers the gradient and
divides it by P, the group's size. The backward of a gather keeps this rank's part, times P. So a shard and
its gather together leave the gradient unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Integral

import torch

from ..._checks import check_bool, check_str, check_type
from ..._control.state import ALONE, Place
from ..._exchange.arguments import Arguments
from ..._exchange.exchange import ONE
from ..._exchange.layouts import WHOLE, by_sizes, even
from ..._group.registry import group_at, place_of
from ..._tracing import constant
from ...errors import SparError
from ...topology.topology import sequence_group, warn_if_unsharded

__all__ = ["ShardingValidator", "get_sharding_validator", "sp_gather", "sp_shard", "sp_shard_with_padding"]


def sequence_place(name: str) -> Place:
    """Return this rank's Place in the current topology's sequence group. `name` is the calling operation."""
    group = sequence_group()
    return _alone(name) if group is None else place_of(group)


@constant
def _alone(name: str) -> Place:
    warn_if_unsharded(name)
    return ALONE


def gather_sizes(name: str, place: Place, size: int) -> list[int]:
    """Gather one int from each rank: its local size."""
    with Arguments(name, torch.tensor([size], device="cpu"), place) as call:
        sizes: list[int] = call.apply(even(0, place.world), WHOLE, ONE).tolist()
        return sizes


def shard_with_padding(call: Arguments, dim: int, pad_value: float) -> tuple[torch.Tensor, int]:
    """Pad the input at its end and return this rank's part, and the padding. Copies only this rank's part."""
    total, scale = call.input.size(dim), call.grad_scale("down")
    padding = -total % call.world
    if padding == 0:
        return call.apply(WHOLE, even(dim, total), scale), 0
    padded_size = (total + padding) // call.world
    sizes = [min(max(total - rank * padded_size, 0), padded_size) for rank in range(call.world)]
    try:  # on ranks without padding too, so that all ranks raise
        pad = call.input.new_full((1,) * call.input.dim(), pad_value)
    except (RuntimeError, OverflowError):
        raise call.error("pad_value", f"{pad_value!r:.100}", f"a value of {call.input.dtype}") from None
    part = call.apply(WHOLE, by_sizes(dim, sizes), scale)
    shape = list(part.shape)
    shape[dim] = padded_size - sizes[call.rank]
    if shape[dim]:
        part = torch.cat([part, pad.expand(shape)], dim)
    return part, padding


def sp_shard(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    """Split a tensor along dim and keep this rank's part. Same as vLLM-Omni's `sp_shard`.

    y on rank r = part r of P along dim. Forward does not communicate. Backward gathers and divides by P.

    Args:
        tensor: any strided tensor, the same on all ranks.
        dim: the dim to split.
        validate: require the size of `dim` to be a multiple of P. If False, sizes follow
            `spar.cal_split_sizes`, and a rank's part may be empty.

    Returns:
        `[.., S/P, ..]`, a view of `tensor` if the part is contiguous in it, else a contiguous copy. Without a
        group, `tensor` itself.

    Raises:
        ValueError: `dim` is out of range, or with `validate` its size is not a multiple of P.
        TypeError: a gradient is required, but the dtype cannot be scaled.
    """
    with Arguments("sp_shard", tensor, sequence_place("sp_shard"), "tensor", exchanges=0) as call:
        dim = call.dim("dim", dim)
        check_bool(call.where, "validate", validate)
        if validate and tensor.size(dim) % call.world:
            raise call.error(
                "tensor",
                f"of shape {list(tensor.shape)} with size {tensor.size(dim)} in dim {dim}",
                f"a multiple of {call.world}, the ranks; pass validate=False or use sp_shard_with_padding",
            )
        return call.apply(WHOLE, even(dim, tensor.size(dim)), call.grad_scale("down"))


def sp_gather(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    """Concatenate the parts of all sequence ranks along dim. Same as vLLM-Omni's `sp_gather`.

    y = concat over p of tensor_p along dim. Backward keeps this rank's part of the gradient, times P. It does
    not communicate, and is correct if every rank has the same gradient of y.

    Args:
        tensor: this rank's part, any strided tensor.
        dim: the dim to concatenate.
        validate: first exchange the local sizes, so that uneven parts gather correctly. If False, all ranks
            must have the same size along `dim`. Reading the sizes breaks torch.compile's graph, unless
            fullgraph=True and torch captures scalars there, as torch 2.13 does.

    Returns:
        A new contiguous tensor `[.., S, ..]`. Without a group, `tensor` itself.

    Raises:
        ValueError: `dim` is out of range.
        TypeError: a gradient is required, but the dtype cannot be scaled.
        MismatchError: calls differ between ranks. Every rank raises, and nothing is exchanged.
    """
    place = sequence_place("sp_gather")
    with Arguments("sp_gather", tensor, place, "tensor", exchanges=1 + (validate is True)) as call:
        dim = call.dim("dim", dim)
        check_bool(call.where, "validate", validate)
        sizes: list[int] = []
        if validate and call.world > 1 and not tensor.is_meta:
            sizes = gather_sizes("sp_gather", place, tensor.size(dim))
        shards = by_sizes(dim, sizes) if sizes else even(dim, tensor.size(dim) * call.world)
        return call.apply(shards, WHOLE, call.grad_scale("up"))


def sp_shard_with_padding(tensor: torch.Tensor, dim: int, pad_value: float = 0.0) -> tuple[torch.Tensor, int]:
    """Pad a tensor along dim to a multiple of P and keep this rank's part. From vLLM-Omni.

    All parts have the same size. The padding is at the end: after a gather, remove it with
    `y.narrow(dim, 0, y.size(dim) - padding)`.

    Args:
        tensor: any strided tensor, the same on all ranks.
        dim: the dim to pad and split.
        pad_value: the value of the padding, which has no gradient.

    Returns:
        This rank's part `[.., (S + padding)/P, ..]`, and the padding of the whole tensor, 0 to P - 1.

    Raises:
        ValueError: `dim` is out of range, or the dtype cannot represent `pad_value`.
        TypeError: `pad_value` is not a number, or a gradient is required, but the dtype cannot be scaled.
    """
    name = "sp_shard_with_padding"
    with Arguments(name, tensor, sequence_place(name), "tensor", exchanges=0) as call:
        dim = call.dim("dim", dim)
        check_type(
            call.where, "pad_value", pad_value, (int, float, Integral), "a number"
        )  # includes numpy ints
        return shard_with_padding(call, dim, pad_value)


_VALIDATOR = "ShardingValidator"
_Split = tuple[int, Place]  # the non-negative dim, and this rank's place in the group


@dataclass
class ShardingValidator:
    """Checks that every shard in a forward pass is gathered, matching them by name. From vLLM-Omni.

        validator = ShardingValidator()
        with validator.track():
            hidden_states = validator.shard(hidden_states, "hidden_states", dim=1)
            output = validator.gather(model(hidden_states), "hidden_states", dim=1)
        validator.validate()

    Outside `track()` it only shards and gathers. It warns at once if a name is sharded again before its
    gather, or gathered without a shard.
    """

    _enabled: bool = False
    _splits: dict[str, _Split] = field(default_factory=dict)  # the last shard of each name
    _open: set[str] = field(default_factory=set)  # sharded and not yet gathered
    _mismatches: list[str] = field(default_factory=list)

    def reset(self) -> None:
        """Clear everything that was tracked."""
        for records in (self._splits, self._open, self._mismatches):
            records.clear()

    @contextmanager
    def track(self) -> Iterator[ShardingValidator]:
        """Track one forward pass, after a reset."""
        self.reset()
        self._enabled = True
        try:
            yield self
        finally:
            self._enabled = False

    def shard(
        self, tensor: torch.Tensor, name: str, dim: int, validate_divisible: bool = True
    ) -> torch.Tensor:
        """Call `sp_shard` and record it under `name`. `validate_divisible` is its `validate`."""
        check_str("ShardingValidator.shard", "name", name)
        check_bool("ShardingValidator.shard", "validate_divisible", validate_divisible)
        part = sp_shard(tensor, dim, validate_divisible)
        if self._enabled:
            if name in self._open:
                warnings.warn(f"spar: {name!r} is sharded again before its gather", stacklevel=2)
            self._open.add(name)
            self._splits[name] = (dim % tensor.dim(), sequence_place(_VALIDATOR))
        return part

    def gather(self, tensor: torch.Tensor, name: str, dim: int) -> torch.Tensor:
        """Call `sp_gather` and record it under `name`, the name of its shard."""
        check_str("ShardingValidator.gather", "name", name)
        whole = sp_gather(tensor, dim)
        if self._enabled:
            self._open.discard(name)
            split, gathered = self._splits.get(name), (dim % tensor.dim(), sequence_place(_VALIDATOR))
            if split is None:
                warnings.warn(f"spar: {name!r} is gathered, but was not sharded", stacklevel=2)
            elif split != gathered:
                self._mismatches.append(
                    f"{name!r} was sharded along {_describe(split)}, but gathered along {_describe(gathered)}"
                )
        return whole

    def validate(self) -> None:
        """Check the tracked forward pass.

        Raises:
            ValueError: a shard has no gather, or a gather uses another dim or group than its shard. The error
                lists all of them.
        """
        problems = list(self._mismatches)
        if missing := sorted(self._open):
            problems.insert(0, f"sharded, but never gathered: {', '.join(map(repr, missing))}")
        if problems:
            place = sequence_place(_VALIDATOR)
            raise ValueError(
                f"ShardingValidator on rank {place.rank} of {place.world}: {'; '.join(problems)}; "
                "expected a gather of each shard along the same dim, in the same group"
            )


def _describe(split: _Split) -> str:
    dim, place = split
    if place == ALONE:
        return f"dim {dim} without a group"
    name = "(destroyed)"
    with suppress(SparError):
        name = repr(group_at(place.handle).name)
    return f"dim {dim} of group {name} ({place.world} ranks)"


_validator = ShardingValidator()


def get_sharding_validator() -> ShardingValidator:
    """Return the validator of this process. From vLLM-Omni."""
    return _validator
