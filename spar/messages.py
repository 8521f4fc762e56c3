"""What goes from rank to rank: tensors as bytes, nested dicts as leaves, and what is still under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class TensorMetadata(NamedTuple):
    """What a rank must know to receive a tensor."""

    device: str  # its type; the index is the receiver's own
    dtype: torch.dtype
    size: torch.Size


class Pending:
    """Something under way to or from another rank. `wait` before the tensor is used again."""

    def __init__(self, works: Sequence[dist.Work | None], buffers: Sequence[torch.Tensor]) -> None:
        self._works = [work for work in works if work is not None]
        self._buffers = list(buffers)  # they must live as long as the sending

    def wait(self) -> None:
        while self._works:
            self._works[0].wait()
            self._works.pop(0)
        self._buffers.clear()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory; backends know few dtypes."""
    return tensor.view(-1).view(torch.uint8)


def flatten(tensors: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """(path, value) of each leaf of nested dicts; an empty dict is a leaf."""
    leaves: list[tuple[tuple[str, ...], Any]] = []
    for key, value in tensors.items():
        if isinstance(value, dict) and value:
            leaves += flatten(value, (*path, key))
        else:
            leaves.append(((*path, key), value))
    return leaves


def nest(leaves: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in leaves:
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return nested


def metadata_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorMetadata(value.device.type, value.dtype, value.size())
    return value
