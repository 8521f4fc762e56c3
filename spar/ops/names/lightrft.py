# SPDX-License-Identifier: Apache-2.0
"""Move data in and out of sequence parallelism: samples, and padded slices of a sequence. From LightRFT."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch

from ..._checks import check_int
from ..._control.state import Place
from ..._exchange.arguments import Arguments
from ..._exchange.exchange import ONE
from ..._exchange.layouts import WHOLE, by_sizes, even
from ...topology.resolve import Group
from ...topology.topology import sequence_group
from .vllm_omni import gather_sizes, sequence_place, shard_with_padding

__all__ = ["SPDataProcessor", "gather_forward_split_backward_and_unpad", "sp_slice_and_pad_input"]

_NAME = "SPDataProcessor.preprocess"
_MAX_EXCHANGES = 100  # an upper bound: two, plus one per device type
_SINGLE = (str, bytes, int, float, complex, type(None))  # not per sample: must be equal on all ranks
_Signature = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's device type, dtype and shape


class SPDataProcessor:
    """Gathers samples so that all ranks of a sequence group process the same data. From LightRFT.

        with SPDataProcessor() as processor:
            samples = processor.preprocess(samples)  # the samples of all ranks
            results = processor.postprocess(work(samples))  # this rank's share

    Uses the sequence group that is current at construction. Without one, data is returned unchanged.

    Attributes:
        sp_group: the sequence group, or None.
        sp_size: the size of the group, or 1.
        sp_rank: this rank in the group, or 0.
    """

    def __init__(self) -> None:
        self.sp_group = sequence_group()
        self._place = sequence_place("SPDataProcessor")
        self.sp_size, self.sp_rank = self._place.world, self._place.rank

    def __enter__(self) -> SPDataProcessor:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the processor holds no resources."""

    def preprocess(self, data: Any) -> Any:
        """Concatenate the data of all ranks, in rank order, on every rank. Collective.

        - Lists and tuples are concatenated, and tensors along dim 0.
        - Dicts, nested ones too, are merged value by value.
        - Numbers, strings, None and scalar tensors are not per sample: they must be equal on all ranks.

        Samples may be any picklable objects. Their tensors keep dtype, shape and device type, and lose their
        gradient history.

        Raises:
            ValueError: keys or values differ between ranks, or cannot be concatenated. All ranks raise.
            TypeError: this rank's data cannot be pickled, or has a value of another type (all ranks raise).
        """
        if self.sp_size == 1:
            return data
        return _merge(_gather_data(data, self._place), "data")

    def postprocess(self, data: Any) -> Any:
        """Slice out this rank's equal share: its own samples, if all ranks passed the same number.

        Slices everything with a length, and each value of a dict; returns the rest unchanged. Does not
        communicate.

        Raises:
            AssertionError: a length is not a multiple of sp_size.
        """
        return data if self.sp_size == 1 else _share(data, self._place, "data")


# ---- gathering: tensors are exchanged directly, everything else pickled ----


class _Pickler(pickle.Pickler):
    """Replaces tensors by indices into `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        is_plain = type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided
        if not is_plain or obj.is_quantized or obj.is_meta:
            return None
        self.tensors.append(obj.detach().resolve_conj().resolve_neg())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Replaces indices by the tensors again."""

    def __init__(self, pickled: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.tensors[pid]
        return tensor


def _gather_data(data: Any, place: Place) -> list[Any]:
    """Return each rank's data. Two exchanges for the pickles, and one per device type for the tensors."""
    with Arguments(_NAME, torch.empty(0, device="cpu"), place, exchanges=_MAX_EXCHANGES) as call:
        rows = _exchange(data, place, call)
    return [
        _Unpickler(pickled, [next(tensors[signature[0]]) for signature in signatures]).load()
        for tensors, signatures, pickled in rows
    ]


def _exchange(
    data: Any, place: Place, call: Arguments
) -> list[tuple[dict[str, Iterator[torch.Tensor]], list[_Signature], bytes]]:
    """Return for each rank: its tensors by device type, their signatures, and the pickle of the rest."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(data)
    except Exception as error:
        expected = f"picklable data, but pickle raised: {error}"
        raise call.type_error("data", f"a {type(data).__name__}", expected) from error
    own_signatures: list[_Signature] = [(t.device.type, t.dtype, tuple(t.shape)) for t in pickler.tensors]
    local = torch.frombuffer(bytearray(pickle.dumps((own_signatures, file.getvalue()))), dtype=torch.uint8)
    sizes = gather_sizes(_NAME, place, local.numel())
    headers = [
        pickle.loads(ctypes.string_at(part.data_ptr(), part.numel())) for part in _gather(local, sizes, place)
    ]
    tensors: list[dict[str, Iterator[torch.Tensor]]] = [{} for _ in headers]
    for device in sorted({signature[0] for signatures, _ in headers for signature in signatures}):
        flat = [t.reshape(-1).view(torch.uint8) for t in pickler.tensors if t.device.type == device]
        local = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        on_device = [[s for s in signatures if s[0] == device] for signatures, _ in headers]
        parts = _gather(local, [sum(map(_num_bytes, signatures)) for signatures in on_device], place)
        for rank, signatures in enumerate(on_device):
            tensors[rank][device] = _unflatten(parts[rank], signatures)
    return [(by_device, *header) for by_device, header in zip(tensors, headers, strict=True)]


def _gather(local: torch.Tensor, sizes: list[int], place: Place) -> list[torch.Tensor]:
    with Arguments(_NAME, local, place) as call:
        whole = call.apply(by_sizes(0, sizes), WHOLE, ONE)
    return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _num_bytes(signature: _Signature) -> int:
    return signature[1].itemsize * torch.Size(signature[2]).numel()


def _unflatten(flat: torch.Tensor, signatures: list[_Signature]) -> Iterator[torch.Tensor]:
    """Yield the tensors in own memory, so that one kept tensor does not keep all of them alive."""
    for signature, part in zip(signatures, flat.split([*map(_num_bytes, signatures)]), strict=True):
        yield part.clone().view(signature[1]).view(signature[2])


def _merge(parts: list[Any], path: str) -> Any:
    """Merge the data of all ranks. Every rank has all parts, so either all ranks raise or none."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        described = [
            f"{list(p.shape)} of {p.dtype} on {p.device.type}" if isinstance(p, torch.Tensor) else _kind(p)
            for p in parts
        ]
        for rank, part in enumerate(parts):
            matches = isinstance(part, torch.Tensor) and part.dim() and part.shape[1:] == first.shape[1:]
            if not (matches and part.dtype == first.dtype and part.device.type == first.device.type):
                raise _mismatch(
                    path, described, rank, "tensors that differ in dim 0 only, or lists of tensors"
                )
        return torch.cat(parts)
    for rank, part in enumerate(parts):
        if _kind(part) != _kind(first):
            raise _mismatch(path, [_kind(p) for p in parts], rank, "the same type on all ranks")
    if isinstance(first, Mapping):
        for rank, part in enumerate(parts):
            if part.keys() != first.keys():
                raise _mismatch(path, [f"a dict of {list(p)}" for p in parts], rank, "the same keys")
        return {key: _merge([part[key] for part in parts], f"{path}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)([sample for part in parts for sample in part])
    if not isinstance(first, (*_SINGLE, torch.Tensor)):
        raise TypeError(
            f"{_NAME}: {path} is a {type(first).__name__}; "
            "expected tensors, lists, tuples, dicts of these, numbers, strings or None"
        )
    for rank, part in enumerate(parts):
        equal = torch.equal(part, first) if isinstance(first, torch.Tensor) else part == first
        if not equal:
            raise _mismatch(path, [repr(p) for p in parts], rank, "the same value, or a batch of samples")
    return first


def _kind(data: Any) -> str:
    for kind in (Mapping, list, tuple):
        if isinstance(data, kind):
            return f"a {kind.__name__.lower()}"
    return f"a {type(data).__name__}"


def _mismatch(path: str, described: list[str], rank: int, expected: str) -> ValueError:
    return ValueError(
        f"{_NAME}: {path} is {described[0][:200]} on rank 0 and {described[rank][:200]} on rank {rank}; "
        f"expected {expected}"
    )


def _share(data: Any, place: Place, path: str) -> Any:
    if isinstance(data, Mapping):
        return {key: _share(value, place, f"{path}[{key!r}]") for key, value in data.items()}
    if isinstance(data, _SINGLE) or (isinstance(data, torch.Tensor) and not data.dim()):
        return data
    size, remainder = divmod(len(data), place.world)
    if remainder:
        raise AssertionError(
            f"SPDataProcessor.postprocess on rank {place.rank} of {place.world}: {path} has {len(data)} "
            f"samples; expected a multiple of {place.world}, the number of ranks"
        )
    return data[place.rank * size : (place.rank + 1) * size]


# ---- padded slices ----


def sp_slice_and_pad_input(
    input_ids: torch.Tensor, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Pad a sequence to a multiple of the P sequence ranks and keep this rank's slice. From LightRFT.

    Uses the current topology's sequence group and does not communicate. Pads input_ids with 0 and slices it.
    Pads position_ids with 0, 1, 2, ... and keeps it whole for attention over the whole sequence.

    Args:
        input_ids: `[B, S]`, the same on all ranks.
        position_ids: `[1, S]`, or None.

    Returns:
        This rank's slice `[B, ceil(S/P)]`, the padded position_ids, and the padding, 0 to P - 1.

    Raises:
        ValueError: input_ids does not have 2 dims, or position_ids has another shape.
        TypeError: input_ids is not a tensor, or position_ids is neither a tensor nor None.
    """
    name = "sp_slice_and_pad_input"
    with Arguments(name, input_ids, sequence_place(name), "input_ids", exchanges=0) as call:
        if call.ndim != 2:
            raise call.error("input_ids", f"of shape {list(input_ids.shape)}", "[bsz, seqlen]")
        if position_ids is not None:
            if not isinstance(position_ids, torch.Tensor):
                raise call.type_error("position_ids", f"a {type(position_ids).__name__}", "a tensor or None")
            if tuple(position_ids.shape) != (1, input_ids.size(1)):
                shape = list(position_ids.shape)
                raise call.error("position_ids", f"of shape {shape}", f"[1, {input_ids.size(1)}]")
        part, padding = shard_with_padding(call, 1, 0)
        if padding and position_ids is not None:
            extra = torch.arange(padding, dtype=position_ids.dtype, device=position_ids.device)
            position_ids = torch.cat([position_ids, extra[None]], 1)
        return part, position_ids, padding


def gather_forward_split_backward_and_unpad(
    input_: torch.Tensor, group: Group, dim: int, padding_size: int = 0, unpad_dim: int | None = None
) -> torch.Tensor:
    """Concatenate the parts of all ranks along dim and remove padding from the end. From LightRFT.

    y = concat over p of x_p along dim, without the last padding_size elements of unpad_dim. Backward keeps
    this rank's part of the gradient, unscaled and 0 for the padding. It does not communicate.

    Args:
        input_: this rank's part, any strided tensor. All ranks must have the same size along `dim`.
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group name, or None.
        dim: the dim to concatenate.
        padding_size: the size to remove, as returned by `sp_slice_and_pad_input`.
        unpad_dim: the dim to remove it from; required if padding_size is not 0.

    Returns:
        A new contiguous tensor, or a view of one if padding is removed. In a group of one rank and without
        padding, `input_` itself.

    Raises:
        ValueError: a dim is out of range, or padding_size is below 0 or above the size of unpad_dim.
        TypeError: padding_size is not an int, or it is not 0 and unpad_dim is None.
        MismatchError: calls differ between ranks. Every rank raises, and nothing is exchanged.
    """
    with Arguments("gather_forward_split_backward_and_unpad", input_, group) as call:
        dim = call.dim("dim", dim)
        padding_size = check_int(call.where, "padding_size", padding_size)
        shards = even(dim, input_.size(dim) * call.world)
        if padding_size == 0:
            return call.apply(shards, WHOLE, ONE)
        if unpad_dim is None:
            raise call.type_error("unpad_dim", f"None and padding_size is {padding_size}", "the padded dim")
        unpad_dim = call.dim("unpad_dim", unpad_dim)
        unpadded = input_.size(unpad_dim) * (call.world if unpad_dim == dim else 1) - padding_size
        if padding_size < 0 or unpadded < 0:
            raise call.error(
                "padding_size", padding_size, f"0 to {unpadded + padding_size}, the size of unpad_dim"
            )
        return call.apply(shards, WHOLE, ONE).narrow(unpad_dim, 0, unpadded)
