"""Data in and out of sequence parallelism: whose samples, slices with padding, and back. Source: seed 001."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch

from ._runtime.call import Call
from ._runtime.checks import check_int
from ._runtime.exchange import ONE
from ._runtime.member import Place
from .sharding import held_by_each, sequence_place, shard_with_padding
from .topology.resolve import Group
from .topology.topology import sequence_group

__all__ = ["SPDataProcessor", "gather_forward_split_backward_and_unpad", "sp_slice_and_pad_input"]

_NAME = "SPDataProcessor.preprocess"
_MOST_EXCHANGES = 100  # two, and one for each device type
_SINGLE = (str, bytes, int, float, complex, type(None))  # belongs to no sample: equal on all ranks
_Kind = tuple[str, torch.dtype, tuple[int, ...]]  # a tensor's device type, dtype and shape


class SPDataProcessor:
    """Lets all ranks of a sequence group work on the same samples. Source: seed 001, `SPDataProcessor`.

        with SPDataProcessor() as processor:
            samples = processor.preprocess(samples)  # those of all ranks
            results = processor.postprocess(work(samples))  # this rank's own again

    Goes by the sequence group at the time it is made; without one data stays as it is.

    Attributes:
        sp_group: the group, or None.
        sp_size: its ranks.
        sp_rank: this one's place.
    """

    def __init__(self) -> None:
        self.sp_group = sequence_group()
        self._place = sequence_place("SPDataProcessor")
        self.sp_size, self.sp_rank = self._place.world, self._place.rank

    def __enter__(self) -> SPDataProcessor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def preprocess(self, data: Any) -> Any:
        """The data of all ranks, on every rank, in rank order. Collective.

        Lists and tuples of samples are concatenated, tensors along dim 0; in dicts, nested ones too, so is
        each value. What belongs to no sample (numbers, strings, None, tensors without dims) stays itself, and
        must be equal on all ranks. Samples may be anything that pickle takes; tensors in them are moved as
        they are, to the same type of device, and carry no gradient.

        Raises:
            ValueError: ranks have other keys, or values that cannot be concatenated or are not equal; on all
                ranks.
            TypeError: data that pickle cannot take; a value of another kind, on all ranks.
        """
        if self.sp_size == 1:
            return data
        return _merged(_of_all_ranks(data, self._place), "data")

    def postprocess(self, data: Any) -> Any:
        """This rank's equal share of the data of all ranks: its own samples, where all brought as many.

        Slices what `preprocess` concatenates: whatever has a length, and each value of a dict. The rest stays
        itself. Communicates nothing.

        Raises:
            AssertionError: a length that is no multiple of sp_size.
        """
        return data if self.sp_size == 1 else _share(data, self._place, "data")


# ---- the data of all ranks: pickled, but for the tensors, which travel as they are ----


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and keeps them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided
        if not plain or obj.is_quantized or obj.is_meta:
            return None
        self.tensors.append(obj.detach().resolve_conj().resolve_neg())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts them in again."""

    def __init__(self, packed: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(packed))
        self.tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.tensors[pid]
        return tensor


def _of_all_ranks(data: Any, place: Place) -> list[Any]:
    """Two exchanges for what is pickled, and one for the tensors of each device type."""
    call = Call(_NAME, torch.empty(0), place, exchanges=_MOST_EXCHANGES)
    try:
        rows = _exchanged(data, call)
    except BaseException as error:
        call.fail(error)
        raise
    return [
        _Unpickler(rest, [next(of_rank[kind[0]]) for kind in kinds]).load() for of_rank, kinds, rest in rows
    ]


def _exchanged(data: Any, call: Call) -> list[tuple[dict[str, Iterator[torch.Tensor]], list[_Kind], bytes]]:
    """Of each rank: its tensors by device type, what they are, and the rest, pickled."""
    file, place = io.BytesIO(), call.place
    pickler = _Pickler(file)
    try:
        pickler.dump(data)
    except Exception as error:
        raise call.type_error("data", f"a {type(data).__name__}", f"what pickle takes ({error})") from error
    kinds: list[_Kind] = [(t.device.type, t.dtype, tuple(t.shape)) for t in pickler.tensors]
    packed = pickle.dumps((kinds, file.getvalue()))
    own = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    sizes = held_by_each(_NAME, place, own.numel())
    parts = [
        pickle.loads(ctypes.string_at(part.data_ptr(), part.numel())) for part in _gather(own, sizes, place)
    ]
    tensors: list[dict[str, Iterator[torch.Tensor]]] = [{} for _ in parts]
    for device in sorted({kind[0] for kinds, _ in parts for kind in kinds}):
        flat = [t.reshape(-1).view(torch.uint8) for t in pickler.tensors if t.device.type == device]
        own = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        wanted = [[kind for kind in kinds if kind[0] == device] for kinds, _ in parts]
        held = _gather(own, [sum(map(_bytes, of_rank)) for of_rank in wanted], place)
        for rank, of_rank in enumerate(wanted):
            tensors[rank][device] = _cut(held[rank], of_rank)
    return [(of_rank, kinds, rest) for of_rank, (kinds, rest) in zip(tensors, parts, strict=True)]


def _gather(own: torch.Tensor, sizes: list[int], place: Place) -> list[torch.Tensor]:
    whole = Call(_NAME, own, place).apply("gather", (0, *sizes), ONE)
    return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _bytes(kind: _Kind) -> int:
    return kind[1].itemsize * torch.Size(kind[2]).numel()


def _cut(flat: torch.Tensor, kinds: list[_Kind]) -> Iterator[torch.Tensor]:
    """Tensors with memory of their own: one that is kept shall not keep them all."""
    for kind, part in zip(kinds, flat.split([_bytes(kind) for kind in kinds]), strict=True):
        yield part.clone().view(kind[1]).view(kind[2])


def _merged(parts: list[Any], where: str) -> Any:
    """One piece of data from those of all ranks, which each rank has: so all raise, or none."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        kinds = [
            f"{list(p.shape)} of {p.dtype} on {p.device.type}" if isinstance(p, torch.Tensor) else _kind(p)
            for p in parts
        ]
        for rank, part in enumerate(parts):
            like = isinstance(part, torch.Tensor) and part.dim() and part.shape[1:] == first.shape[1:]
            if not (like and part.dtype == first.dtype and part.device.type == first.device.type):
                raise _unlike(where, kinds, rank, "tensors alike in all but dim 0, or lists")
        return torch.cat(parts)
    for rank, part in enumerate(parts):
        if _kind(part) != _kind(first):
            raise _unlike(where, [_kind(p) for p in parts], rank, "the same kind of data on all ranks")
    if isinstance(first, Mapping):
        for rank, part in enumerate(parts):
            if part.keys() != first.keys():
                raise _unlike(where, [f"a dict of {list(p)}" for p in parts], rank, "the same keys")
        return {key: _merged([part[key] for part in parts], f"{where}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)([sample for part in parts for sample in part])
    if not isinstance(first, (*_SINGLE, torch.Tensor)):
        raise TypeError(
            f"{_NAME}: {where} is a {type(first).__name__}; "
            "expected tensors, lists, tuples, dicts of these, numbers, strings or None"
        )
    for rank, part in enumerate(parts):
        same = torch.equal(part, first) if isinstance(first, torch.Tensor) else part == first
        if not same:
            raise _unlike(where, [repr(p) for p in parts], rank, "the same, or a batch of samples")
    return first


def _kind(data: Any) -> str:
    for kind in (Mapping, list, tuple):
        if isinstance(data, kind):
            return f"a {kind.__name__.lower()}"
    return f"a {type(data).__name__}"


def _unlike(where: str, texts: list[str], rank: int, expected: str) -> ValueError:
    return ValueError(
        f"{_NAME}: {where} is {texts[0][:200]} on rank 0 and {texts[rank][:200]} on rank {rank}; "
        f"expected {expected}"
    )


def _share(data: Any, place: Place, where: str) -> Any:
    if isinstance(data, Mapping):
        return {key: _share(value, place, f"{where}[{key!r}]") for key, value in data.items()}
    if isinstance(data, _SINGLE) or (isinstance(data, torch.Tensor) and not data.dim()):
        return data
    each, rest = divmod(len(data), place.world)
    if rest:
        raise AssertionError(
            f"SPDataProcessor.postprocess on rank {place.rank} of {place.world}: {where} has {len(data)} "
            f"samples; expected a multiple of {place.world}"
        )
    return data[place.rank * each : (place.rank + 1) * each]


# ---- slices with padding, and back ----


def sp_slice_and_pad_input(
    input_ids: torch.Tensor, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Pads a sequence to a multiple of the P sequence ranks and keeps this rank's part. Source: seed 001.

    Goes by the current topology, and communicates nothing. input_ids is padded with 0 and sliced;
    position_ids is padded with 0, 1, 2, ... and stays whole, as attention over the whole sequence needs it.

    Args:
        input_ids: [bsz, seqlen], the same on all ranks.
        position_ids: [1, seqlen], or None.

    Returns:
        This rank's [bsz, ceil(seqlen / P)], the padded position_ids, and the padding: 0 to P - 1.

    Raises:
        ValueError: input_ids with other than 2 dims, position_ids of another shape.
        TypeError: position_ids that are no tensor.
    """
    name = "sp_slice_and_pad_input"
    call = Call(name, input_ids, sequence_place(name), "input_ids", exchanges=0)
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
        more = torch.arange(padding, dtype=position_ids.dtype, device=position_ids.device)
        position_ids = torch.cat([position_ids, more[None]], 1)
    return part, position_ids, padding


def gather_forward_split_backward_and_unpad(
    input_: torch.Tensor, group: Group, dim: int, padding_size: int = 0, unpad_dim: int | None = None
) -> torch.Tensor:
    """Concatenates all ranks' parts and takes padding off the end. Source: seed 001.

    y = concat over p of x_p along dim, without its last padding_size in unpad_dim. Backward keeps this rank's
    part of the gradient, unscaled (0 for the padding); it communicates nothing.

    Args:
        input_: this rank's part, any strided tensor; all ranks hold as much.
        group: a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, or None.
        dim: the dim to concatenate.
        padding_size: how much to take off, as `sp_slice_and_pad_input` tells it.
        unpad_dim: from which dim; needed where padding_size is not 0.

    Returns:
        A new contiguous tensor, or a view of one without its padding; in a group of one without padding
        `input_` itself.

    Raises:
        ValueError: a dim out of range, a padding_size below 0 or above what unpad_dim has.
        TypeError: a padding_size that is not an int, or not 0 and no unpad_dim.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = Call("gather_forward_split_backward_and_unpad", input_, group)
    try:
        dim = call.dim("dim", dim)
        padding_size = check_int(call.where, "padding_size", padding_size)
        if padding_size == 0:
            return call.apply("gather", (dim,), ONE)
        if unpad_dim is None:
            raise call.type_error(
                "unpad_dim", f"None and padding_size is {padding_size}", "the dim with padding"
            )
        unpad_dim = call.dim("unpad_dim", unpad_dim)
        kept = input_.size(unpad_dim) * (call.world if unpad_dim == dim else 1) - padding_size
        if padding_size < 0 or kept < 0:
            raise call.error(
                "padding_size", padding_size, f"0 to {kept + padding_size}, the extent of unpad_dim"
            )
        whole = call.apply("gather", (dim,), ONE)
    except BaseException as error:
        call.fail(error)
        raise
    return whole.narrow(unpad_dim, 0, kept)
