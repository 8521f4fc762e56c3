"""The coordinator of a pipeline's stages. Source: seed 002."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from .coordinator import GroupCoordinator
from .process_groups import new_group_of
from .transfer import Pending, TensorMetadata, metadata_of


class PipelineGroupCoordinator(GroupCoordinator):
    """The stages of a pipeline: named tensors go from each to the next, also while others compute.

    A name, with an index, has one dtype and shape, which is told with its first tensor; `reset_buffer`, on
    both sides, forgets them. Tensors of one name come in the order in which they were sent.
    """

    device_groups: list[dist.ProcessGroup | None]  # of two stages: for what each of them sends

    def __init__(
        self, group_ranks: list[list[int]], local_rank: int, torch_distributed_backend: str | None
    ) -> None:
        super().__init__(group_ranks, local_rank, torch_distributed_backend)
        # between two stages what goes there and what goes back must not wait for one another
        two = any(len(ranks) == 2 for ranks in group_ranks)  # collective: all ranks decide alike
        back = new_group_of(group_ranks, torch_distributed_backend, type(self).__name__) if two else None
        if self.world_size == 2:
            self.device_groups = [self.device_group, back]

    def _adopt(self, device_group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, local_rank: int) -> None:
        super()._adopt(device_group, cpu_group, local_rank)
        self.device_groups = []
        self.reset_buffer()

    def _lane(self, tensor: torch.Tensor, sends: bool) -> dist.ProcessGroup:
        lanes = [group for group in self.device_groups if group is not None]
        if not lanes or tensor.is_cpu:
            return super()._lane(tensor, sends)
        return lanes[self.rank_in_group if sends else 1 - self.rank_in_group]

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [*super()._groups(), *self.device_groups[1:]]

    def reset_buffer(self) -> None:
        """Forgets which shapes were told, and what was to be received."""
        self._told: dict[tuple[str, int], TensorMetadata] = {}
        self._heard: dict[tuple[str, int], TensorMetadata] = {}
        self._tasks: list[tuple[str, int]] = []
        self._receiving: list[tuple[tuple[str, int], torch.Tensor, Pending | None]] = []

    @staticmethod
    def _tag(key: tuple[str, int]) -> int:
        """By which backends that have tags tell names apart."""
        return zlib.crc32(repr(key).encode()) & 0x7FFFFFFF

    def pipeline_isend(self, tensor: torch.Tensor, name: str = "latent", segment_idx: int = -1) -> Pending:
        """Starts to send a tensor to the next stage; wait for it before the tensor changes.

        Raises:
            ValueError: a pipeline of one stage; another dtype or shape than this name had before.
        """
        dst = self._other("the next stage", self.group_next_rank)
        key = (name or "latent", segment_idx)
        metadata, told = metadata_of(tensor), self._told.get(key)
        works: list[Pending] = []
        if told is None:
            works.append(self._isend_object(metadata, dst, self._tag(key)))
            self._told[key] = metadata
        elif told != metadata:
            expected = f"{told.dtype} of shape {list(told.size)} as before, or reset_buffer() on both stages"
            raise self._error(f"tensor {key}", f"{tensor.dtype} of shape {list(tensor.shape)}", expected)
        if tensor.numel():
            works.append(self._isend(tensor, dst, self._tag(key)))
        return Pending(works, [])

    def pipeline_send(self, tensor: torch.Tensor, name: str = "latent", segment_idx: int = -1) -> None:
        """The same, until it is sent."""
        self.pipeline_isend(tensor, name, segment_idx).wait()

    def _start(self, key: tuple[str, int]) -> tuple[torch.Tensor, Pending | None]:
        src = self._other("the stage before", self.group_prev_rank)
        if key not in self._heard:
            self._heard[key] = self._recv_object(src, self._tag(key))
        tensor = self._empty(self._heard[key])
        return tensor, self._irecv(tensor, src, self._tag(key)) if tensor.numel() else None

    def pipeline_recv(self, idx: int = -1, name: str = "latent") -> torch.Tensor:
        """A new tensor from the stage before."""
        tensor, pending = self._start((name or "latent", idx))
        if pending is not None:
            pending.wait()
        return tensor

    def add_pipeline_recv_task(self, idx: int = -1, name: str = "latent") -> None:
        """Notes that this tensor is to be received; `recv_next` starts it."""
        self._tasks.append((name or "latent", idx))

    def recv_next(self) -> None:
        """Starts to receive the next noted tensor; the first of a name waits until the sender told its shape.

        Raises:
            ValueError: none is noted.
        """
        if not self._tasks:
            raise self._error(
                "the list of tensors to receive", "empty", "add_pipeline_recv_task before recv_next"
            )
        key = self._tasks.pop(0)
        self._receiving.append((key, *self._start(key)))

    def get_pipeline_recv_data(self, idx: int = -1, name: str = "latent") -> torch.Tensor:
        """Waits for a tensor that `recv_next` started, and returns it.

        Raises:
            ValueError: this one was not started.
        """
        key = (name or "latent", idx)
        for i, (other, tensor, pending) in enumerate(self._receiving):
            if other == key:
                if pending is not None:
                    pending.wait()
                del self._receiving[i]
                return tensor
        raise self._error("the tensor asked for", key, f"one of {[other for other, *_ in self._receiving]}")
