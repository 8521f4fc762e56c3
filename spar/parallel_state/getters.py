# SPDX-License-Identifier: Apache-2.0
"""Query sizes and ranks of the current topology's groups. From vLLM-Omni.

Without a sequence group, the sequence, ulysses and ring sizes are 1 and the ranks 0. The other functions
raise AssertionError if their group is not initialized.
"""

from __future__ import annotations

import math
import os
from typing import cast

import torch.distributed as dist

from .._tracing import constant
from ..topology.groups_by_name import ParallelState
from ..topology.topology import current, process_wide, sequence_group
from .coordinator import GroupCoordinator, SequenceParallelGroupCoordinator
from .pipeline import PipelineGroupCoordinator

__all__ = [
    "get_cfg_group",
    "get_classifier_free_guidance_rank",
    "get_classifier_free_guidance_world_size",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_dit_group",
    "get_dit_world_size",
    "get_dp_group",
    "get_fs_group",
    "get_fully_shard_rank",
    "get_fully_shard_world_size",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_world_size",
    "get_pp_group",
    "get_ring_parallel_rank",
    "get_ring_parallel_world_size",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_sp_group",
    "get_ulysses_parallel_rank",
    "get_ulysses_parallel_world_size",
    "get_world_group",
    "is_dp_last_group",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
]


def get_local_rank() -> int:
    """Return this process's rank on its host: the world coordinator's, else LOCAL_RANK, else 0."""
    world = find("world")
    return int(os.environ.get("LOCAL_RANK", 0)) if world is None else world.local_rank


def find(name: str) -> GroupCoordinator | None:
    """Return the current topology's coordinator `name`, or None.

    If another API made the group, make a coordinator over it, once.
    """
    topology = current()
    existing = topology.coordinators.get(name) or topology.views.get(name)
    if existing is None and name == "world":  # shared by all topologies
        existing = process_wide().coordinators.get("world")
    if existing is not None or name == "world":
        return cast(GroupCoordinator | None, existing)
    state = topology.sequence_state if name == "sp" else topology.state
    names = {"sp": "cp", "dp": "dp", "fs": "fsdp"}
    group = state.get_group(names[name]) if state is not None and name in names else None
    if state is None or group is None:
        return None
    kind = SequenceParallelGroupCoordinator if name == "sp" else GroupCoordinator
    view = topology.views[name] = kind.over(group, get_local_rank())
    if isinstance(view, SequenceParallelGroupCoordinator):
        view.levels(state.get_group("ulysses"), state.get_group("ring"))
    return view


def _coordinator(name: str, initializer: str = "initialize_model_parallel") -> GroupCoordinator:
    coordinator = find(name)
    if coordinator is None:
        raise AssertionError(f"the {name} group is not initialized; call {initializer}() first")
    return coordinator


def get_world_group() -> GroupCoordinator:
    """Return the coordinator of all ranks. Raises AssertionError without one, as the functions below do."""
    return _coordinator("world", "init_distributed_environment")


def get_sp_group() -> SequenceParallelGroupCoordinator:
    """Return the coordinator of the sequence group, whichever API made it."""
    return cast(SequenceParallelGroupCoordinator, _coordinator("sp"))


def get_pp_group() -> PipelineGroupCoordinator:
    """Return the coordinator of the pipeline stages."""
    return cast(PipelineGroupCoordinator, _coordinator("pp"))


def get_cfg_group() -> GroupCoordinator:
    """Return the coordinator of the classifier-free guidance group."""
    return _coordinator("cfg")


def get_dp_group() -> GroupCoordinator:
    """Return the coordinator of the data-parallel group."""
    return _coordinator("dp")


def get_fs_group() -> GroupCoordinator:
    """Return the coordinator of the ranks that shard one copy of the parameters."""
    return _coordinator("fs")


def get_dit_group() -> dist.ProcessGroup:
    """Return the group of all ranks of the model."""
    dit = current().dit
    if dit is None:
        raise AssertionError("the DiT group is not initialized; call initialize_model_parallel() first")
    return dit


# A model's forward may call these in a single process too.


def get_sequence_parallel_world_size() -> int:
    """Return the size of the current topology's sequence group, or 1 without one. In LightRFT too."""
    group = sequence_group()
    return 1 if group is None else group.size()


def get_sequence_parallel_rank() -> int:
    """Return this rank in the sequence group, or 0 without one. In LightRFT too."""
    group = sequence_group()
    return 0 if group is None else group.rank()


@constant
def _constant_size_and_rank(state: ParallelState, name: str) -> tuple[int, int]:
    return state.get_group_size(name), state.get_rank(name)


def _size_and_rank(name: str) -> tuple[int, int]:
    state = current().sequence_state
    return (1, 0) if state is None else _constant_size_and_rank(state, name)


def get_ulysses_parallel_world_size() -> int:
    """Return the size of the ulysses group, or 1 without one."""
    return _size_and_rank("ulysses")[0]


def get_ulysses_parallel_rank() -> int:
    """Return this rank in the ulysses group, or 0 without one."""
    return _size_and_rank("ulysses")[1]


def get_ring_parallel_world_size() -> int:
    """Return the size of the ring group, or 1 without one."""
    return _size_and_rank("ring")[0]


def get_ring_parallel_rank() -> int:
    """Return this rank in the ring group, or 0 without one."""
    return _size_and_rank("ring")[1]


def get_pipeline_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return get_pp_group().world_size


def get_pipeline_parallel_rank() -> int:
    """Return this rank's pipeline stage."""
    return get_pp_group().rank_in_group


def is_pipeline_first_stage() -> bool:
    """Return whether this rank is in the first pipeline stage."""
    return get_pp_group().is_first_rank


def is_pipeline_last_stage() -> bool:
    """Return whether this rank is in the last pipeline stage."""
    return get_pp_group().is_last_rank


def get_classifier_free_guidance_world_size() -> int:
    """Return the size of the classifier-free guidance group."""
    return get_cfg_group().world_size


def get_classifier_free_guidance_rank() -> int:
    """Return this rank in the classifier-free guidance group."""
    return get_cfg_group().rank_in_group


def get_data_parallel_world_size() -> int:
    """Return the size of the data-parallel group."""
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    """Return this rank in the data-parallel group."""
    return get_dp_group().rank_in_group


def get_fully_shard_world_size() -> int:
    """Return the size of the fully-sharded group."""
    return get_fs_group().world_size


def get_fully_shard_rank() -> int:
    """Return this rank in the fully-sharded group."""
    return get_fs_group().rank_in_group


def is_dp_last_group() -> bool:
    """Return whether this rank is the last of its sequence, guidance and pipeline groups."""
    return get_sp_group().is_last_rank and get_cfg_group().is_last_rank and get_pp_group().is_last_rank


def get_dit_world_size() -> int:
    """Return the number of ranks of the model: dp * cfg * sp * pp * tp."""
    return math.prod(_coordinator(name).world_size for name in ("dp", "cfg", "sp", "pp", "tp"))
