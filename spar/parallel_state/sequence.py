# SPDX-License-Identifier: Apache-2.0
"""The coordinator of a sequence group. From vLLM-Omni."""

from __future__ import annotations

import torch.distributed as dist

from .coordinator import GroupCoordinator


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
