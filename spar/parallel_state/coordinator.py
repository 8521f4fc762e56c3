"""Group coordinators: collectives and point-to-point transfers of tensors, objects and dicts. From vLLM-Omni.

Ranks in arguments are ranks in the group. `ranks`, `first_rank`, `next_rank` and the like are global ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._runtime.checks import check_backend, check_int, check_rank_groups
from ..ops import gather_forward_split_backward
from ..topology.groups_by_name import backends_of
from .process_groups import destroy_group, device_of, new_group_of, ranks_of
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


class GroupCoordinator:
    """A group of ranks, with one process group for device tensors and one for CPU tensors. From vLLM-Omni.

    Construction is collective over the world: every rank makes every group, in the same order.

    If cpu_group does not support CPU tensors (`over` an nccl-only group), objects and CPU tensors are staged
    through memory of `device`.

    Args:
        group_ranks: the global ranks of each group, in any order. The coordinator keeps this rank's group.
        local_rank: this process's rank on its host, which selects its device.
        torch_distributed_backend: the backend of device_group; None for that of the world.

    Attributes:
        rank, local_rank: this process's global rank, and its rank on its host.
        ranks: the global ranks of the group.
        world_size, rank_in_group: the size of the group, and this rank in it.
        device_group, cpu_group: the ProcessGroups for device tensors and, over gloo, for CPU tensors.
        device: the device of the group's tensors.

    Raises:
        ValueError: a rank is twice in `group_ranks` or not in the world, or this rank is in no group.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self, group_ranks: list[list[int]], local_rank: int, torch_distributed_backend: str | None
    ) -> None:
        where = type(self).__name__
        group_ranks = check_rank_groups(where, "group_ranks", group_ranks)
        check_int(where, "local_rank", local_rank, 0)
        check_backend(where, torch_distributed_backend, "torch_distributed_backend")
        device_group = new_group_of(group_ranks, torch_distributed_backend, where)
        cpu_group = new_group_of(group_ranks, "gloo", where)
        if device_group is None or cpu_group is None:
            raise ValueError(
                f"{where}: group_ranks is {group_ranks}; "
                f"expected a group with this process's rank, {dist.get_rank()}"
            )
        self._owns_groups = True
        self._set_groups(device_group, cpu_group, local_rank)

    @classmethod
    def over(cls, group: dist.ProcessGroup, local_rank: int) -> GroupCoordinator:
        """Make a coordinator over an existing group, without owning it. No communication.

        If the group is not registered with torch.distributed, its group ranks serve as global ranks.
        """
        made = cls.__new__(cls)
        made._owns_groups = False
        made._set_groups(group, group, local_rank)
        return made

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
        self._outboxes: dict[int, Outbox] = {}  # by destination rank

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

    def _error(self, what: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self._where}: {what} is {value}; expected {expected}")

    def _check_rank(self, what: str, rank: int) -> int:
        return check_int(self._where, what, rank, 0, self.world_size - 1)

    def _check_peer(self, what: str, rank: int) -> int:
        rank = self._check_rank(what, rank)
        if rank == self.rank_in_group:
            raise self._error(what, rank, "another rank than this one")
        return rank

    def _check_dim(self, input_: torch.Tensor, dim: int) -> int:
        return check_int(self._where, "dim", dim, -input_.dim(), input_.dim() - 1) % input_.dim()

    # ---- collectives over tensors; none is differentiable ----

    def all_reduce(
        self, input_: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce input_ over the group in place, and return it."""
        if self.world_size > 1:
            buffer = self._stage(input_)
            dist.all_reduce(buffer, op=op, group=self.group)
            if buffer is not input_:
                with torch.no_grad():
                    input_.copy_(buffer)
        return input_

    def _gather_sizes(self, input_: torch.Tensor, dim: int) -> list[int]:
        own = torch.tensor([input_.size(dim)], device=input_.device)
        return [int(size) for size in gather_forward_split_backward(own, self.group, 0).tolist()]

    def all_gather(
        self, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather the tensors of all ranks, concatenated along dim or as a list. Sizes along dim may differ.

        In a group of one rank the result is input_ itself.
        """
        dim = self._check_dim(input_, dim)
        if self.world_size == 1:
            return [input_] if separate_tensors else input_
        with torch.no_grad():
            own = self._stage(input_)
            sizes = self._gather_sizes(own, dim)
            gathered = gather_forward_split_backward(own, self.group, dim, sizes, None).to(input_.device)
        return [part.contiguous() for part in gathered.split(sizes, dim)] if separate_tensors else gathered

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Gather the tensors of all ranks on rank dst, concatenated along dim. Other ranks return None.

        Sizes along dim may differ.
        """
        dim, dst = self._check_dim(input_, dim), self._check_rank("dst", dst)
        if self.world_size == 1:
            return input_
        sizes = self._gather_sizes(self._stage(input_), dim)
        if self.rank_in_group != dst:
            if input_.numel():
                self._isend(input_, dst).wait()
            return None
        parts = []
        for src, size in enumerate(sizes):
            shape = torch.Size([*input_.shape[:dim], size, *input_.shape[dim + 1 :]])
            parts.append(input_.detach() if src == dst else input_.new_empty(shape))
        for work in [self._irecv(part, src) for src, part in enumerate(parts) if src != dst and part.numel()]:
            work.wait()
        return torch.cat(parts, dim)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copy rank src's tensor into input_ on every rank, and return input_."""
        src = self._check_rank("src", src)
        if self.world_size > 1 and input_.numel():
            buffer = self._stage(materialize(input_))
            self._group_for(buffer).broadcast(as_bytes(buffer), src).wait()
            if buffer.data_ptr() != input_.data_ptr():
                with torch.no_grad():
                    input_.copy_(buffer)
        return input_

    def barrier(self) -> None:
        """Block until all ranks of the group called this."""
        dist.barrier(group=self.host_group)

    # ---- picklable objects ----

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        """Return rank src's object on every rank."""
        return self.broadcast_object_list([obj], src)[0]

    def broadcast_object_list(
        self, obj_list: list[Any], src: int = 0, group: dist.ProcessGroup | None = None
    ) -> list[Any]:
        """Replace the contents of obj_list by rank src's objects on every rank, and return it.

        Args:
            obj_list: the objects on rank src; a list of the same length on the others.
            src: the source rank.
            group: a ProcessGroup of the same ranks to use instead of cpu_group.
        """
        src = self._check_rank("src", src)
        if self.world_size > 1:
            over = self.host_group if group is None else group
            device = torch.device("cpu") if "cpu" in backends_of(over) else self.device
            is_src = self.rank_in_group == src
            data = serialize(obj_list, device) if is_src else torch.empty(0, dtype=torch.uint8, device=device)
            size = torch.tensor([data.numel()], device=device)
            over.broadcast(size, src).wait()
            data = data if is_src else data.new_empty(int(size))
            over.broadcast(data, src).wait()
            if not is_src:
                obj_list[:] = deserialize(data)
        return obj_list

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

    # ---- point-to-point tensors ----

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
        return (
            tensor.detach().to(self._host_device)
            if tensor.is_cpu and self._host_device.type != "cpu"
            else tensor
        )

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

    # ---- nested dicts of tensors and picklable objects ----

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[str, Any] | None = None,
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        metadata_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any] | None:
        """Return rank src's dict on every rank. Tensors keep their device type.

        Args:
            tensor_dict: the dict on rank src; not used on the others.
            src: the source rank.
            group, metadata_group: not used; the coordinator's own groups are.
        """
        is_src = self.rank_in_group == self._check_rank("src", src)
        if self.world_size == 1:
            return tensor_dict
        leaves = flatten(self._check_dict(tensor_dict)) if is_src else []
        metadata = self.broadcast_object([(path, metadata_of(value)) for path, value in leaves], src)
        if not is_src:
            leaves = [(path, self._allocate(value)) for path, value in metadata]
        for _, value in leaves:
            if isinstance(value, torch.Tensor):
                self.broadcast(materialize(value) if is_src else value, src)
        return tensor_dict if is_src else unflatten(leaves)

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

    def destroy(self) -> None:
        """Destroy the groups that this coordinator made; keep those it was made `over`."""
        if self._owns_groups:
            for group in self._groups():
                destroy_group(group)
        self.device_group = self.cpu_group = None

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [self.device_group, self.cpu_group]


class SequenceParallelGroupCoordinator(GroupCoordinator):
    """A sequence group with its ulysses and ring groups. From vLLM-Omni.

    Args:
        group_ranks, local_rank, torch_distributed_backend: as for GroupCoordinator.
        ulysses_group, ring_group: this rank's groups, as made by `set_seq_parallel_pg`.

    Attributes:
        ulysses_group, ulysses_world_size, ulysses_rank: the group for all-to-all attention.
        ring_group, ring_world_size, ring_rank: the group for ring attention.

    Raises:
        RuntimeError: one of the two groups is missing.
        TypeError: an unknown keyword argument.
    """

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str | None,
        **kwargs: dist.ProcessGroup | None,
    ) -> None:
        if unknown := set(kwargs) - {"ulysses_group", "ring_group"}:
            raise TypeError(
                f"{type(self).__name__}: unknown arguments {sorted(unknown)}; "
                "expected ulysses_group and ring_group"
            )
        for name in ("ulysses_group", "ring_group"):
            if kwargs.get(name) is None:
                raise RuntimeError(
                    f"{type(self).__name__}: {name} is missing; pass a group made by set_seq_parallel_pg()"
                )
        super().__init__(group_ranks, local_rank, torch_distributed_backend)
        self.levels(kwargs["ulysses_group"], kwargs["ring_group"])

    def levels(self, ulysses: dist.ProcessGroup | None, ring: dist.ProcessGroup | None) -> None:
        """Set the ulysses and ring groups. None stands for a group of this rank alone."""
        self.ulysses_group, self.ring_group = ulysses, ring
        self.ulysses_world_size = 1 if ulysses is None else ulysses.size()
        self.ulysses_rank = 0 if ulysses is None else ulysses.rank()
        self.ring_world_size = 1 if ring is None else ring.size()
        self.ring_rank = 0 if ring is None else ring.rank()
