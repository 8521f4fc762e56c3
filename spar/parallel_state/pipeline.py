# SPDX-License-Identifier: Apache-2.0
"""The coordinator of pipeline stages. From vLLM-Omni."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from .coordinator import GroupCoordinator
from .process_groups import new_group_of
from .transfer import TensorMetadata, Work, metadata_of


class PipelineGroupCoordinator(GroupCoordinator):
    """Pipeline stages that send named tensors to the next stage while others compute. From vLLM-Omni.

    Each (name, index) has one dtype and shape, sent along with its first tensor. To change them, call
    `reset_buffer` on both stages. Tensors of one name arrive in the order in which they were sent.
    """

    device_groups: list[dist.ProcessGroup | None]  # with two stages, one group for each sender; else empty

    def __init__(
        self, group_ranks: list[list[int]], local_rank: int, torch_distributed_backend: str | None
    ) -> None:
        super().__init__(group_ranks, local_rank, torch_distributed_backend)
        # between two stages, sends in opposite directions must not wait for each other
        has_pairs = any(len(ranks) == 2 for ranks in group_ranks)  # the same on all ranks: collective
        if has_pairs:
            reverse = new_group_of(group_ranks, torch_distributed_backend, type(self).__name__)
            if self.world_size == 2:
                self.device_groups = [self.device_group, reverse]

    def _set_groups(
        self, device_group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, local_rank: int
    ) -> None:
        super()._set_groups(device_group, cpu_group, local_rank)
        self.device_groups = []
        self.reset_buffer()

    def _p2p_group(self, tensor: torch.Tensor, sends: bool) -> dist.ProcessGroup:
        groups = [group for group in self.device_groups if group is not None]
        if not groups or tensor.is_cpu:
            return super()._p2p_group(tensor, sends)
        return groups[self.rank_in_group if sends else 1 - self.rank_in_group]

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [*super()._groups(), *self.device_groups[1:]]

    def reset_buffer(self) -> None:
        """Drop the known dtypes and shapes, and all receives that were added or started."""
        self._sent_metadata: dict[tuple[str, int], TensorMetadata] = {}
        self._received_metadata: dict[tuple[str, int], TensorMetadata] = {}
        self._tasks: list[tuple[str, int]] = []
        self._receiving: list[tuple[tuple[str, int], torch.Tensor, Work | None]] = []

    @staticmethod
    def _tag(key: tuple[str, int]) -> int:
        """Return a tag for the key, so that backends with tags do not mix up names."""
        return zlib.crc32(repr(key).encode()) & 0x7FFFFFFF

    def pipeline_isend(self, tensor: torch.Tensor, name: str = "latent", segment_idx: int = -1) -> Work:
        """Start to send a tensor to the next stage.

        Args:
            tensor: the tensor; it must have the dtype and shape of the previous one of this name.
            name: what the next stage receives it under.
            segment_idx: the same, beside the name.

        Returns:
            A handle; wait for it before you change the tensor. You may discard it.

        Raises:
            ValueError: the pipeline has one stage, or the dtype or shape differ from the previous tensor's.
        """
        dst = self._check_peer("the next stage", self.group_next_rank)
        key = (name or "latent", segment_idx)
        metadata, previous = metadata_of(tensor), self._sent_metadata.get(key)
        works: list[Work] = []
        if previous is None:
            works.append(self._isend_object(metadata, dst, self._tag(key)))
            self._sent_metadata[key] = metadata
        elif previous != metadata:
            expected = (
                f"{previous.dtype} of shape {list(previous.size)} as before, or reset_buffer() on both stages"
            )
            raise self._error(f"tensor {key}", f"{tensor.dtype} of shape {list(tensor.shape)}", expected)
        if tensor.numel():
            works.append(self._isend(tensor, dst, self._tag(key)))
        return Work(works, [])

    def pipeline_send(self, tensor: torch.Tensor, name: str = "latent", segment_idx: int = -1) -> None:
        """Send a tensor to the next stage. Blocks until the tensor may change again."""
        self.pipeline_isend(tensor, name, segment_idx).wait()

    def _start_recv(self, key: tuple[str, int]) -> tuple[torch.Tensor, Work | None]:
        src = self._check_peer("the previous stage", self.group_prev_rank)
        if key not in self._received_metadata:
            self._received_metadata[key] = self._recv_object(src, self._tag(key))
        tensor = self._allocate(self._received_metadata[key])
        return tensor, self._irecv(tensor, src, self._tag(key)) if tensor.numel() else None

    def pipeline_recv(self, idx: int = -1, name: str = "latent") -> torch.Tensor:
        """Receive a new tensor from the previous stage."""
        tensor, work = self._start_recv((name or "latent", idx))
        if work is not None:
            work.wait()
        return tensor

    def add_pipeline_recv_task(self, idx: int = -1, name: str = "latent") -> None:
        """Queue a tensor to receive; `recv_next` starts the receive."""
        self._tasks.append((name or "latent", idx))

    def recv_next(self) -> None:
        """Start to receive the next queued tensor. The first of a name blocks until its shape arrives.

        Raises:
            ValueError: no tensor is queued.
        """
        if not self._tasks:
            raise self._error(
                "the queue of tensors to receive", "empty", "add_pipeline_recv_task before recv_next"
            )
        key = self._tasks.pop(0)
        self._receiving.append((key, *self._start_recv(key)))

    def get_pipeline_recv_data(self, idx: int = -1, name: str = "latent") -> torch.Tensor:
        """Wait for a tensor whose receive `recv_next` started, and return it.

        Raises:
            ValueError: `recv_next` did not start this tensor.
        """
        key = (name or "latent", idx)
        for i, (posted, tensor, work) in enumerate(self._receiving):
            if posted == key:
                if work is not None:
                    work.wait()
                del self._receiving[i]
                return tensor
        raise self._error("the requested tensor", key, f"one of {[posted for posted, *_ in self._receiving]}")
