"""One group of ranks with what they do together, as the diffusion servers spell it. Source: seed 002.

Ranks in arguments are ranks in the group; `ranks`, `first_rank`, `next_rank` and the like are global ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._runtime.checks import check_backend, check_int, check_rank_groups
from ..ops import gather_forward_split_backward
from ..topology.groups_by_name import backends_of
from .process_groups import device_of, end_group, new_group_of, ranks_of
from .transfer import (
    Outbox,
    Pending,
    TensorMetadata,
    as_bytes,
    flatten,
    metadata_of,
    nest,
    packed,
    plain,
    unpacked,
)


class GroupCoordinator:
    """A group of ranks: device_group moves tensors, cpu_group what goes over the CPU. Source: seed 002.

    Making one is collective over the whole world: every rank creates every group, in one order.

    Args:
        group_ranks: the global ranks of each group; this rank's is kept. They need not be consecutive.
        local_rank: this rank's on its host, the index of its device.
        torch_distributed_backend: of device_group; None for that of the world.

    Attributes:
        rank, local_rank: this process's global rank, and that on its host.
        ranks, world_size, rank_in_group: the group's global ranks, how many, and which is this one.
        device_group, cpu_group: its ProcessGroups; gloo is the second.
        device: where its tensors are.

    Where cpu_group takes no CPU tensors (`over` a group of nccl alone) objects and CPU tensors travel through
    memory of `device`.

    Raises:
        ValueError: a rank that is twice in group_ranks or not in the world; this rank is in none of them.
    """

    def __init__(
        self, group_ranks: list[list[int]], local_rank: int, torch_distributed_backend: str | None
    ) -> None:
        what = type(self).__name__
        group_ranks = check_rank_groups(what, "group_ranks", group_ranks)
        check_int(what, "local_rank", local_rank, 0)
        check_backend(what, torch_distributed_backend, "torch_distributed_backend")
        device_group = new_group_of(group_ranks, torch_distributed_backend, what)
        cpu_group = new_group_of(group_ranks, "gloo", what)
        if device_group is None or cpu_group is None:
            raise ValueError(
                f"{what}: the groups are {group_ranks}; this rank, {dist.get_rank()}, is in none of them"
            )
        self._owns = True
        self._adopt(device_group, cpu_group, local_rank)

    @classmethod
    def over(cls, group: dist.ProcessGroup, local_rank: int) -> GroupCoordinator:
        """One over a group that exists and that it does not own. Nothing is communicated.

        torch.distributed need not know the group: its ranks are then those in the group.
        """
        made = cls.__new__(cls)
        made._owns = False
        made._adopt(group, group, local_rank)
        return made

    def _adopt(self, device_group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, local_rank: int) -> None:
        self.local_rank = local_rank
        self.device_group: dist.ProcessGroup | None = device_group
        self.cpu_group: dist.ProcessGroup | None = cpu_group
        self.ranks = ranks_of(device_group)
        self.world_size = device_group.size()
        self.rank_in_group = device_group.rank()
        self.rank = self.ranks[self.rank_in_group]
        self.device = device_of(device_group, local_rank)
        self._host = torch.device("cpu") if "cpu" in backends_of(cpu_group) else self.device
        self._outboxes: dict[int, Outbox] = {}  # by the rank that it goes to

    @property
    def group(self) -> dist.ProcessGroup:
        """device_group, as long as there is one."""
        if self.device_group is None:
            raise RuntimeError(f"{type(self).__name__} of the ranks {self.ranks} was destroyed")
        return self.device_group

    @property
    def host_group(self) -> dist.ProcessGroup:
        """cpu_group, as long as there is one: to torch None would be the whole world."""
        if self.cpu_group is None:
            raise RuntimeError(f"{type(self).__name__} of the ranks {self.ranks} was destroyed")
        return self.cpu_group

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
        """The next one in the group, after the last the first."""
        return (self.rank_in_group + 1) % self.world_size

    @property
    def group_prev_rank(self) -> int:
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

    def _member(self, what: str, rank: int) -> int:
        return check_int(self._where, what, rank, 0, self.world_size - 1)

    def _other(self, what: str, rank: int) -> int:
        rank = self._member(what, rank)
        if rank == self.rank_in_group:
            raise self._error(what, rank, "another rank than this one")
        return rank

    def _dim(self, input_: torch.Tensor, dim: int) -> int:
        return check_int(self._where, "dim", dim, -input_.dim(), input_.dim() - 1) % input_.dim()

    # ---- tensors of all ranks; none is differentiable ----

    def all_reduce(
        self, input_: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduces input_ in place, and returns it."""
        if self.world_size > 1:
            buffer = self._movable(input_)
            dist.all_reduce(buffer, op=op, group=self.group)
            if buffer is not input_:
                with torch.no_grad():
                    input_.copy_(buffer)
        return input_

    def _extents(self, input_: torch.Tensor, dim: int) -> list[int]:
        own = torch.tensor([input_.size(dim)], device=input_.device)
        return [int(size) for size in gather_forward_split_backward(own, self.group, 0).tolist()]

    def all_gather(
        self, input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        """All ranks' tensors, concatenated along dim, or as a list. Their extents in dim may differ.

        In a group of one it is input_ itself.
        """
        dim = self._dim(input_, dim)
        if self.world_size == 1:
            return [input_] if separate_tensors else input_
        with torch.no_grad():
            own = self._movable(input_)
            sizes = self._extents(own, dim)
            gathered = gather_forward_split_backward(own, self.group, dim, sizes, None).to(input_.device)
        return [part.contiguous() for part in gathered.split(sizes, dim)] if separate_tensors else gathered

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """All ranks' tensors, concatenated along dim, on rank dst; None on the others."""
        dim, dst = self._dim(input_, dim), self._member("dst", dst)
        if self.world_size == 1:
            return input_
        sizes = self._extents(self._movable(input_), dim)
        if self.rank_in_group != dst:
            if input_.numel():
                self._isend(input_, dst).wait()
            return None
        parts = []
        for src, size in enumerate(sizes):
            shape = torch.Size([*input_.shape[:dim], size, *input_.shape[dim + 1 :]])
            parts.append(input_.detach() if src == dst else input_.new_empty(shape))
        for pending in [
            self._irecv(part, src) for src, part in enumerate(parts) if src != dst and part.numel()
        ]:
            pending.wait()
        return torch.cat(parts, dim)

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank src's tensor into everybody's input_, which it returns."""
        src = self._member("src", src)
        if self.world_size > 1 and input_.numel():
            buffer = self._movable(plain(input_))
            self._group_for(buffer).broadcast(as_bytes(buffer), src).wait()
            if buffer.data_ptr() != input_.data_ptr():
                with torch.no_grad():
                    input_.copy_(buffer)
        return input_

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)

    # ---- objects: anything that pickle takes ----

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        """Rank src's object, on every rank."""
        return self.broadcast_object_list([obj], src)[0]

    def broadcast_object_list(
        self, obj_list: list[Any], src: int = 0, group: dist.ProcessGroup | None = None
    ) -> list[Any]:
        """Rank src's objects into everybody's list, which it returns; all lists have one length.

        Args:
            group: the ProcessGroup to use, of the same ranks; by default cpu_group.
        """
        src = self._member("src", src)
        if self.world_size > 1:
            over = self.host_group if group is None else group
            where = torch.device("cpu") if "cpu" in backends_of(over) else self.device
            sends = self.rank_in_group == src
            data = packed(obj_list, where) if sends else torch.empty(0, dtype=torch.uint8, device=where)
            size = torch.tensor([data.numel()], device=where)
            over.broadcast(size, src).wait()
            data = data if sends else data.new_empty(int(size))
            over.broadcast(data, src).wait()
            if not sends:
                obj_list[:] = unpacked(data)
        return obj_list

    def send_object(self, obj: Any, dst: int) -> None:
        """Returns when rank dst has it."""
        self._isend_object(obj, self._other("dst", dst)).wait()

    def recv_object(self, src: int) -> Any:
        return self._recv_object(self._other("src", src))

    def _isend_object(self, obj: Any, dst: int, tag: int = 0) -> Pending:
        data = packed(obj, self._host)
        size = torch.tensor([data.numel()], device=self._host)
        return self._started([size, data], self.host_group, dst, tag)

    def _recv_object(self, src: int, tag: int = 0) -> Any:
        size = torch.empty(1, dtype=torch.int64, device=self._host)
        self.host_group.recv([size], src, tag).wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._host)
        self.host_group.recv([data], src, tag).wait()
        return unpacked(data)

    # ---- tensors from rank to rank ----

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """To rank dst, by default the next; returns when it may be used again."""
        dst = self._other("dst", self.group_next_rank if dst is None else dst)
        if tensor.numel():
            self._isend(tensor, dst).wait()

    def recv(
        self, size: torch.Size | Sequence[int], dtype: torch.dtype, src: int | None = None
    ) -> torch.Tensor:
        """A new tensor from rank src, by default the one before."""
        src = self._other("src", self.group_prev_rank if src is None else src)
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        if tensor.numel():
            self._irecv(tensor, src).wait()
        return tensor

    def _movable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Itself, or a copy where its groups can move it."""
        return tensor.detach().to(self._host) if tensor.is_cpu and self._host.type != "cpu" else tensor

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.host_group if tensor.is_cpu else self.group

    def _lane(self, tensor: torch.Tensor, sends: bool) -> dist.ProcessGroup:
        """The group over which a tensor goes from this rank, or comes to it."""
        return self._group_for(tensor)

    def _isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Pending:
        ready = self._movable(plain(tensor))
        return self._started([as_bytes(ready)], self._lane(ready, True), dst, tag)

    def _started(self, tensors: list[torch.Tensor], lane: dist.ProcessGroup, dst: int, tag: int) -> Pending:
        """Sends them. They live until they are sent, also where the caller drops what this returns."""
        pending = Pending([lane.send([tensor], dst, tag) for tensor in tensors], tensors)
        if tensors[0].is_cpu:
            return self._outboxes.setdefault(dst, Outbox()).keep(pending)
        for tensor in tensors:
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        return pending

    def _irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Pending:
        """Into a contiguous tensor."""
        buffer = self._movable(tensor)
        work = self._lane(buffer, False).recv([as_bytes(buffer)], src, tag)
        return Pending([work], [tensor], None if buffer is tensor else lambda: tensor.copy_(buffer))

    # ---- dicts of tensors and of anything else, which may be nested ----

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[str, Any] | None = None,
        src: int = 0,
        group: dist.ProcessGroup | None = None,
        metadata_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any] | None:
        """Rank src's dict, on every rank; tensors come on the device type that they had.

        Args:
            group, metadata_group: not used; tensors and objects go over the coordinator's own groups.
        """
        sends = self.rank_in_group == self._member("src", src)
        if self.world_size == 1:
            return tensor_dict
        leaves = flatten(self._checked(tensor_dict)) if sends else []
        metadata = self.broadcast_object([(path, metadata_of(value)) for path, value in leaves], src)
        if not sends:
            leaves = [(path, self._empty(value)) for path, value in metadata]
        for _, value in leaves:
            if isinstance(value, torch.Tensor):
                self.broadcast(plain(value) if sends else value, src)
        return tensor_dict if sends else nest(leaves)

    def isend_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> list[Pending]:
        """Starts to send a dict to rank dst, by default the next; wait for each before its tensors change."""
        dst = self._other("dst", self.group_next_rank if dst is None else dst)
        leaves = flatten(self._checked(tensor_dict))
        handles = [self._isend_object([(path, metadata_of(value)) for path, value in leaves], dst)]
        for _, value in leaves:
            if isinstance(value, torch.Tensor) and value.numel():
                handles.append(self._isend(value, dst))
        return handles

    def irecv_tensor_dict(self, src: int | None = None) -> tuple[dict[str, Any], list[Pending], list[Any]]:
        """Starts to receive a dict from rank src, by default the one before.

        It waits for the dict's keys, not for its tensors. The third, what to do then, is always empty.
        """
        src = self._other("src", self.group_prev_rank if src is None else src)
        leaves = [(path, self._empty(value)) for path, value in self._recv_object(src)]
        tensors = [value for _, value in leaves if isinstance(value, torch.Tensor) and value.numel()]
        return nest(leaves), [self._irecv(tensor, src) for tensor in tensors], []

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int | None = None) -> dict[str, Any] | None:
        """To rank dst, by default the next. In a group of one it returns the dict, else None."""
        if self.world_size == 1:
            return tensor_dict
        for handle in self.isend_tensor_dict(tensor_dict, dst):
            handle.wait()
        return None

    def recv_tensor_dict(self, src: int | None = None) -> dict[str, Any] | None:
        """From rank src, by default the one before. None in a group of one."""
        if self.world_size == 1:
            return None
        tensor_dict, handles, _ = self.irecv_tensor_dict(src)
        for handle in handles:
            handle.wait()
        return tensor_dict

    def _checked(self, tensor_dict: dict[str, Any] | None) -> dict[str, Any]:
        if not isinstance(tensor_dict, dict):
            raise TypeError(str(self._error("tensor_dict", f"a {type(tensor_dict).__name__}", "a dict")))
        return tensor_dict

    def _empty(self, value: Any) -> Any:
        if not isinstance(value, TensorMetadata):
            return value
        device = self.device if value.device == self.device.type else torch.device(value.device)
        return torch.empty(value.size, dtype=value.dtype, device=device)

    def destroy(self) -> None:
        """Destroys its groups, as far as it made them."""
        if self._owns:
            for group in self._groups():
                end_group(group)
        self.device_group = self.cpu_group = None

    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [self.device_group, self.cpu_group]


class SequenceParallelGroupCoordinator(GroupCoordinator):
    """The ranks of a sequence, and the ulysses and ring groups that they consist of.

    Args:
        ulysses_group, ring_group: this rank's, as `set_seq_parallel_pg` makes them.

    Attributes:
        ulysses_group, ulysses_world_size, ulysses_rank: of all-to-all attention.
        ring_group, ring_world_size, ring_rank: of ring attention.

    Raises:
        RuntimeError: one of the two groups is missing.
    """

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str | None,
        **kwargs: dist.ProcessGroup | None,
    ) -> None:
        if unknown := set(kwargs) - {"ulysses_group", "ring_group"}:
            raise TypeError(f"{type(self).__name__}: unknown arguments {sorted(unknown)}")
        for name in ("ulysses_group", "ring_group"):
            if kwargs.get(name) is None:
                raise RuntimeError(f"{type(self).__name__}: {name} is missing; set_seq_parallel_pg makes it")
        super().__init__(group_ranks, local_rank, torch_distributed_backend)
        self.levels(kwargs["ulysses_group"], kwargs["ring_group"])

    def levels(self, ulysses: dist.ProcessGroup | None, ring: dist.ProcessGroup | None) -> None:
        """Takes the groups; one that is None has this rank alone."""
        self.ulysses_group, self.ring_group = ulysses, ring
        self.ulysses_world_size = 1 if ulysses is None else ulysses.size()
        self.ulysses_rank = 0 if ulysses is None else ulysses.rank()
        self.ring_world_size = 1 if ring is None else ring.size()
        self.ring_rank = 0 if ring is None else ring.rank()
