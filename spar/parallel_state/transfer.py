# SPDX-License-Identifier: Apache-2.0
"""Point-to-point transfers: tensors as bytes, nested dicts as leaves, and sends in flight."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class TensorMetadata(NamedTuple):
    """What a rank needs to allocate a tensor before receiving it."""

    device: str  # the device type; the receiver uses its own index
    dtype: torch.dtype
    size: torch.Size


class Work:
    """A transfer in flight. Call `wait` before you read or change its tensor, as with dist.Work."""

    def __init__(
        self,
        works: Sequence[dist.Work | Work | None],
        buffers: Sequence[torch.Tensor],
        on_completion: Callable[[], object] | None = None,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._buffers = list(buffers)  # must stay alive until the send completes
        self._on_completion = on_completion
        self._lock = threading.Lock()  # gloo wakes only one of two concurrent waits

    def wait(self) -> None:
        """Block until the transfer completes. May be called several times, from several threads."""
        with self._lock:
            while self._works:
                self._works[0].wait()
                self._works.pop(0)
            if self._on_completion is not None:
                self._on_completion()
            self._on_completion = None
            self._buffers.clear()

    def is_completed(self) -> bool:
        """Return whether the transfer is known to be complete. Gloo reports this only after a `wait`."""
        return all(work.is_completed() for work in list(self._works))


class Outbox:
    """Keeps the sends to one rank alive until they complete, even if the caller discards their handles.

    Gloo reports a completed send only to a `wait`, and a `wait` that times out aborts the whole group. So a
    thread waits for the sends if more than MAX_KEPT are kept. It ends when none is left.
    """

    MAX_KEPT = 8  # at most this many completed sends are kept

    def __init__(self) -> None:
        self._sent: deque[Work] = deque()  # in order of completion
        self._lock = threading.Lock()
        self._has_thread = False

    def __len__(self) -> int:
        return len(self._sent)

    def keep(self, work: Work) -> Work:
        """Keep a send alive until it completes, and return it."""
        with self._lock:
            while self._sent and self._sent[0].is_completed():
                self._sent.popleft()
            self._sent.append(work)
            if len(self._sent) > self.MAX_KEPT and not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._wait_for_all, name="spar: sends", daemon=True).start()
        return work

    def _wait_for_all(self) -> None:
        while True:
            with self._lock:
                if not self._sent:
                    self._has_thread = False
                    return
                oldest = self._sent[0]
            with suppress(Exception):  # raised again by the caller's wait or by the next send
                oldest.wait()
            with self._lock:
                if self._sent and self._sent[0] is oldest:
                    self._sent.popleft()


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, contiguous and with conj and neg resolved; copies only if necessary."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as uint8, since backends support few dtypes."""
    return tensor.view(-1).view(torch.uint8)


def serialize(obj: Any, device: torch.device) -> torch.Tensor:
    """Pickle an object into a uint8 tensor on `device`."""
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)


def deserialize(data: torch.Tensor) -> Any:
    """Unpickle an object from a uint8 tensor."""
    return pickle.loads(data.cpu().numpy().tobytes())


def flatten(tensors: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return (path, value) of each leaf of nested dicts. An empty dict is a leaf."""
    leaves: list[tuple[tuple[str, ...], Any]] = []
    for key, value in tensors.items():
        if isinstance(value, dict) and value:
            leaves += flatten(value, (*path, key))
        else:
            leaves.append(((*path, key), value))
    return leaves


def unflatten(leaves: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Rebuild nested dicts from the leaves that `flatten` returned."""
    nested: dict[str, Any] = {}
    for path, value in leaves:
        parent = nested
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        parent[path[-1]] = value
    return nested


def metadata_of(value: Any) -> Any:
    """Return a tensor's TensorMetadata, and any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return TensorMetadata(value.device.type, value.dtype, value.size())
    return value
