"""What goes from rank to rank: tensors as bytes, nested dicts as leaves, and what is still under way."""

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
    """What a rank must know to receive a tensor."""

    device: str  # its type; the index is the receiver's own
    dtype: torch.dtype
    size: torch.Size


class Pending:
    """Something under way to or from another rank. `wait` before the tensor is used again."""

    def __init__(
        self,
        works: Sequence[dist.Work | Pending | None],
        buffers: Sequence[torch.Tensor],
        then: Callable[[], object] | None = None,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._buffers = list(buffers)  # they must live as long as the sending
        self._then = then  # what is to be done when it has come
        self._turn = threading.Lock()  # gloo lets one wait return, and leaves a second one waiting

    def wait(self) -> None:
        with self._turn:
            while self._works:
                self._works[0].wait()
                self._works.pop(0)
            if self._then is not None:
                self._then()
            self._then = None
            self._buffers.clear()

    def is_completed(self) -> bool:
        """Whether it is known to be over; over gloo it is once somebody waited."""
        return all(work.is_completed() for work in list(self._works))


class Outbox:
    """What is being sent to one rank. It lives until it is sent, also where the caller drops its handle.

    Gloo tells the end of a sending only to who waits for it, and a wait that reaches its limit ends the whole
    group. So where many are kept that nobody waited for, a thread does so, and ends with them.
    """

    KEPT = 8  # at most, of those that are over

    def __init__(self) -> None:
        self._sent: deque[Pending] = deque()  # in the order in which they end
        self._lock = threading.Lock()
        self._waits = False  # whether the thread is there

    def __len__(self) -> int:
        return len(self._sent)

    def keep(self, pending: Pending) -> Pending:
        with self._lock:
            while self._sent and self._sent[0].is_completed():
                self._sent.popleft()
            self._sent.append(pending)
            if len(self._sent) > self.KEPT and not self._waits:
                self._waits = True
                threading.Thread(target=self._wait, name="spar: sends", daemon=True).start()
        return pending

    def _wait(self) -> None:
        while True:
            with self._lock:
                if not self._sent:
                    self._waits = False
                    return
                oldest = self._sent[0]
            with suppress(Exception):  # its error is for who waits for it, or for the next sending
                oldest.wait()
            with self._lock:
                if self._sent and self._sent[0] is oldest:
                    self._sent.popleft()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory; backends know few dtypes."""
    return tensor.view(-1).view(torch.uint8)


def packed(obj: Any, device: torch.device) -> torch.Tensor:
    """An object as bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)


def unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())


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
