# SPDX-License-Identifier: Apache-2.0
"""Point-to-point transfers of tensors, objects and dicts between the ranks of a group. From vLLM-Omni.

Ranks in arguments are ranks in the group. `ranks`, `first_rank`, `next_rank` and the like are global ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._checks import check_int
from ..topology.groups_by_name import backends_of
from .process_groups import device_of, ranks_of
from .transfer import (
    Outbox,
    TensorMetadata,
    Work,
    as_bytes,
    deserialize,
    flatten,
    materialize,
    metadata_of,
    serialize,
    unflatten,
)


class Endpoint:
    """This rank's end of the transfers in a group: its process groups, devices, ranks and sends in flight."""

    def _set_groups(
        self, device_group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, local_rank: int
    ) -> None:
        self.local_rank = local_rank
        self.device_group: dist.ProcessGroup | None = device_group
        self.cpu_group: dist.ProcessGroup | None = cpu_group
        self.ranks = ranks_of(device_group)
        self.world_size = device_group.size()
        self.rank_in_group = device_group.rank()
        self.rank = self.ranks[self.rank_in_group]
        self.device = device_of(device_group, local_rank)
        self._host_device = torch.device("cpu") if "cpu" in backends_of(cpu_group) else self.device
        self._outboxes: dict[int, Outbox] = {}  # the key is the destination rank

    @property
    def group(self) -> dist.ProcessGroup:
        """device_group; raises RuntimeError after `destroy`."""
        return self._existing(self.device_group)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """cpu_group; raises RuntimeError after `destroy`, because torch takes None for the whole world."""
        return self._existing(self.cpu_group)

    def _existing(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise RuntimeError(
                f"{type(self).__name__} of the ranks {self.ranks} was destroyed; initialize the groups again"
            )
        return group

    # ---- ranks ----

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank == self.first_rank

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.last_rank

    @property
    def group_next_rank(self) -> int:
        """The next rank in the group; wraps around."""
        return (self.rank_in_group + 1) % self.world_size

    @property
    def group_prev_rank(self) -> int:
        """The previous rank in the group; wraps around."""
        return (self.rank_in_group - 1) % self.world_size

    @property
    def next_rank(self) -> int:
        return self.ranks[self.group_next_rank]

    @property
    def prev_rank(self) -> int:
        return self.ranks[self.group_prev_rank]

    @property
    def _where(self) -> str:
        return f"{type(self).__name__}, rank {self.rank_in_group} of {self.world_size}"

    def _error(self, name: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self._where}: {name} is {value}; expected {expected}")

    def _check_rank(self, name: str, rank: int) -> int:
        return check_int(self._where, name, rank, 0, self.world_size - 1)

    def _check_peer(self, name: str, rank: int) -> int:
        rank = self._check_rank(name, rank)
        if rank == self.rank_in_group:
            raise self._error(name, rank, "another rank than this one")
        return rank

    def _check_dim(self, input_: torch.Tensor, dim: int) -> int:
        return check_int(self._where, "dim", dim, -input_.dim(), input_.dim() - 1) % input_.dim()

    # ---- tensors ----

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a tensor to rank dst (default: the next rank). Blocks until the tensor may change again."""
        dst = self._check_peer("dst", self.group_next_rank if dst is None else dst)
        if tensor.numel():
            self._isend(tensor, dst).wait()

    def recv(
        self, size: torch.Size | Sequence[int], dtype: torch.dtype, src: int | None = None
    ) -> torch.Tensor:
        """Receive a new tensor of this size and dtype from rank src (default: the previous rank)."""
        src = self._check_peer("src", self.group_prev_rank if src is None else src)
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        if tensor.numel():
            self._irecv(tensor, src).wait()
        return tensor

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy on a device that the groups support."""
        if tensor.is_cpu and self._host_device.type != "cpu":
            return tensor.detach().to(self._host_device)
        return tensor

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.host_group if tensor.is_cpu else self.group

    def _p2p_group(self, tensor: torch.Tensor, sends: bool) -> dist.ProcessGroup:
        """Return the group over which this rank sends or receives a tensor."""
        return self._group_for(tensor)

    def _isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        ready = self._stage(materialize(tensor))
        return self._start_send([as_bytes(ready)], self._p2p_group(ready, True), dst, tag)

    def _start_send(self, tensors: list[torch.Tensor], group: dist.ProcessGroup, dst: int, tag: int) -> Work:
        """Start to send tensors and keep them alive until sent, even if the caller discards the handle."""
        work = Work([group.send([tensor], dst, tag) for tensor in tensors], tensors)
        if tensors[0].is_cpu:
            return self._outboxes.setdefault(dst, Outbox()).keep(work)
        for tensor in tensors:
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        return work

    def _irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Start to receive into a contiguous tensor."""
        buffer = self._stage(tensor)
        work = self._p2p_group(buffer, False).recv([as_bytes(buffer)], src, tag)
        return Work([work], [tensor], None if buffer is tensor else lambda: tensor.copy_(buffer))

    # ---- picklable objects ----

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to rank dst. Blocks until the send completes."""
        self._isend_object(obj, self._check_peer("dst", dst)).wait()

    def recv_object(self, src: int) -> Any:
        """Receive the next object from rank src."""
        return self._recv_object(self._check_peer("src", src))

    def _isend_object(self, obj: Any, dst: int, tag: int = 0) -> Work:
        data = serialize(obj, self._host_device)
        size = torch.tensor([data.numel()], device=self._host_device)
        return self._start_send([size, data], self.host_group, dst, tag)

    def _recv_object(self, src: int, tag: int = 0) -> Any:
        size = torch.empty(1, dtype=torch.int64, device=self._host_device)
        self.host_group.recv([size], src, tag).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._host_device)
        self.host_group.recv([data], src, tag).wait()
        return deserialize(data)

    # ---- nested dicts of tensors and picklable objects ----

    def isend_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> list[Work]:
        """Start to send a dict to rank dst (default: the next rank).

        Returns:
            Handles; wait for all of them before you change the tensors. You may discard them.
        """
        dst = self._check_peer("dst", self.group_next_rank if dst is None else dst)
        leaves = flatten(self._check_dict(tensor_dict))
        handles = [self._isend_object([(path, metadata_of(value)) for path, value in leaves], dst)]
        for _, value in leaves:
            if isinstance(value, torch.Tensor) and value.numel():
                handles.append(self._isend(value, dst))
        return handles

    def irecv_tensor_dict(self, src: int | None = None) -> tuple[dict[str, Any], list[Work], list[Any]]:
        """Start to receive a dict from rank src (default: the previous rank).

        Blocks until the keys arrive, but not for the tensors.

        Returns:
            The dict, handles to wait for before you read its tensors, and an empty list (vLLM-Omni's
            postprocessing functions).
        """
        src = self._check_peer("src", self.group_prev_rank if src is None else src)
        leaves = [(path, self._allocate(value)) for path, value in self._recv_object(src)]
        tensors = [value for _, value in leaves if isinstance(value, torch.Tensor) and value.numel()]
        return unflatten(leaves), [self._irecv(tensor, src) for tensor in tensors], []

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> dict[str, Any] | None:
        """Send a dict to rank dst (default: the next rank). Returns the dict in a group of one, else None."""
        if self.world_size == 1:
            return tensor_dict
        for handle in self.isend_tensor_dict(tensor_dict, dst):
            handle.wait()
        return None

    def recv_tensor_dict(self, src: int | None = None) -> dict[str, Any] | None:
        """Receive a dict from rank src (default: the previous rank). Returns None in a group of one."""
        if self.world_size == 1:
            return None
        tensor_dict, handles, _ = self.irecv_tensor_dict(src)
        for handle in handles:
            handle.wait()
        return tensor_dict

    def _check_dict(self, tensor_dict: dict[str, Any] | None) -> dict[str, Any]:
        if not isinstance(tensor_dict, dict):
            raise TypeError(str(self._error("tensor_dict", f"a {type(tensor_dict).__name__}", "a dict")))
        return tensor_dict

    def _allocate(self, value: Any) -> Any:
        if not isinstance(value, TensorMetadata):
            return value
        device = self.device if value.device == self.device.type else torch.device(value.device)
        return torch.empty(value.size, dtype=value.dtype, device=device)
