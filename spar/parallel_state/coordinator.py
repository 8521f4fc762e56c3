# SPDX-License-Identifier: Apache-2.0
"""Group coordinators: collectives over tensors, objects and dicts. From vLLM-Omni.

Ranks in arguments are ranks in the group. `ranks`, `first_rank`, `next_rank` and the like are global ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._checks import check_backend, check_int, check_rank_groups
from ..ops.splits import gather_forward_split_backward
from ..topology.groups_by_name import backends_of
from .endpoint import Endpoint
from .process_groups import destroy_group, new_group_of
from .transfer import as_bytes, deserialize, flatten, materialize, metadata_of, serialize, unflatten


class GroupCoordinator(Endpoint):
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
        caller = type(self).__name__
        group_ranks = check_rank_groups(caller, "group_ranks", group_ranks)
        check_int(caller, "local_rank", local_rank, 0)
        check_backend(caller, torch_distributed_backend, "torch_distributed_backend")
        device_group = new_group_of(group_ranks, torch_distributed_backend, caller)
        cpu_group = new_group_of(group_ranks, "gloo", caller)
        if device_group is None or cpu_group is None:
            raise ValueError(
                f"{caller}: group_ranks is {group_ranks}; "
                f"expected a group with this process's rank, {dist.get_rank()}"
            )
        self._owns_groups = True
        self._set_groups(device_group, cpu_group, local_rank)

    @classmethod
    def over(cls, group: dist.ProcessGroup, local_rank: int) -> GroupCoordinator:
        """Make a coordinator over an existing group, without owning it. No communication.

        If the group is not registered with torch.distributed, its group ranks serve as global ranks.
        """
        coordinator = cls.__new__(cls)
        coordinator._owns_groups = False
        coordinator._set_groups(group, group, local_rank)
        return coordinator

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
        local_size = torch.tensor([input_.size(dim)], device=input_.device)
        return [int(size) for size in gather_forward_split_backward(local_size, self.group, 0).tolist()]

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
            staged = self._stage(input_)
            sizes = self._gather_sizes(staged, dim)
            gathered = gather_forward_split_backward(staged, self.group, dim, sizes, None).to(input_.device)
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

    # ---- picklable objects, and nested dicts of them and tensors ----

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
            group: not used; the coordinator's own groups are.
            metadata_group: likewise.
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
        group_ranks: as for GroupCoordinator.
        local_rank: as for GroupCoordinator.
        torch_distributed_backend: as for GroupCoordinator.
        **kwargs: ulysses_group and ring_group, this rank's groups, as made by `set_seq_parallel_pg`.

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
