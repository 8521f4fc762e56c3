"""Where this rank is in the current topology's groups. Source: seed 002.

The sequence, ulysses and ring sizes are 1, and the ranks 0, where there is no topology; the others raise
AssertionError where their group is not initialized.
"""

from __future__ import annotations

import os
from typing import cast

import torch.distributed as dist

from .._runtime.tracing import constant
from ..topology.groups_by_name import ParallelState
from ..topology.topology import current, process_wide, sequence_group
from .coordinator import GroupCoordinator, SequenceParallelGroupCoordinator
from .pipeline import PipelineGroupCoordinator


def local_rank_of_this_process() -> int:
    world = find("world")
    return int(os.environ.get("LOCAL_RANK", 0)) if world is None else world.local_rank


def find(name: str) -> GroupCoordinator | None:
    """The current topology's coordinator; over groups that another spelling made where these are the same."""
    topology = current()
    known = topology.coordinators.get(name) or topology.views.get(name)
    if known is None and name == "world":  # every topology's
        known = process_wide().coordinators.get("world")
    if known is not None or name == "world":
        return cast(GroupCoordinator | None, known)
    state = topology.sequence_state if name == "sp" else topology.state
    names = {"sp": "cp", "dp": "dp", "fs": "fsdp"}
    group = state.get_group(names[name]) if state is not None and name in names else None
    if state is None or group is None:
        return None
    if name == "sp":
        found = SequenceParallelGroupCoordinator.over(group, local_rank_of_this_process())
        cast(SequenceParallelGroupCoordinator, found).levels(
            state.get_group("ulysses"), state.get_group("ring")
        )
    else:
        found = GroupCoordinator.over(group, local_rank_of_this_process())
    topology.views[name] = found
    return found


def _coordinator(name: str, maker: str = "initialize_model_parallel") -> GroupCoordinator:
    found = find(name)
    if found is None:
        raise AssertionError(f"the {name} group is not initialized; {maker} makes it")
    return found


def get_world_group() -> GroupCoordinator:
    """The coordinator of all ranks; an AssertionError without one, as below. Source: seed 002."""
    return _coordinator("world", "init_distributed_environment")


def get_sp_group() -> SequenceParallelGroupCoordinator:
    """The coordinator of the sequence group, whichever spelling made it. Source: seed 002."""
    return cast(SequenceParallelGroupCoordinator, _coordinator("sp"))


def get_pp_group() -> PipelineGroupCoordinator:
    """The coordinator of the pipeline's stages. Source: seed 002."""
    return cast(PipelineGroupCoordinator, _coordinator("pp"))


def get_cfg_group() -> GroupCoordinator:
    """The coordinator of classifier-free guidance. Source: seed 002."""
    return _coordinator("cfg")


def get_dp_group() -> GroupCoordinator:
    """The coordinator of data parallelism. Source: seed 002."""
    return _coordinator("dp")


def get_fs_group() -> GroupCoordinator:
    """The coordinator of the ranks that share one copy of the parameters. Source: seed 002."""
    return _coordinator("fs")


def get_dit_group() -> dist.ProcessGroup:
    """The group of the model's ranks. Source: seed 002."""
    dit = current().dit
    if dit is None:
        raise AssertionError("the DiT group is not initialized; initialize_model_parallel makes it")
    return dit


# What a model's forward asks, also where it runs in one process.


def get_sequence_parallel_world_size() -> int:
    """Ranks of the current topology's sequence group; 1 without one. Sources: seeds 001 and 002."""
    group = sequence_group()
    return 1 if group is None else group.size()


def get_sequence_parallel_rank() -> int:
    """This rank in it; 0 without one. Sources: seeds 001 and 002."""
    group = sequence_group()
    return 0 if group is None else group.rank()


@constant
def _level(state: ParallelState, name: str) -> tuple[int, int]:
    return state.get_group_size(name), state.get_rank(name)


def _place(name: str) -> tuple[int, int]:
    state = current().sequence_state
    return (1, 0) if state is None else _level(state, name)


def get_ulysses_parallel_world_size() -> int:
    """Ranks of the sequence group's ulysses group; 1 without one. Source: seed 002."""
    return _place("ulysses")[0]


def get_ulysses_parallel_rank() -> int:
    """This rank in it; 0 without one. Source: seed 002."""
    return _place("ulysses")[1]


def get_ring_parallel_world_size() -> int:
    """Ranks of the sequence group's ring group; 1 without one. Source: seed 002."""
    return _place("ring")[0]


def get_ring_parallel_rank() -> int:
    """This rank in it; 0 without one. Source: seed 002."""
    return _place("ring")[1]


def get_pipeline_parallel_world_size() -> int:
    """Stages of the pipeline. Source: seed 002."""
    return get_pp_group().world_size


def get_pipeline_parallel_rank() -> int:
    """This rank's stage. Source: seed 002."""
    return get_pp_group().rank_in_group


def is_pipeline_first_stage() -> bool:
    """Whether this rank is in the first stage. Source: seed 002."""
    return get_pp_group().is_first_rank


def is_pipeline_last_stage() -> bool:
    """Whether this rank is in the last stage. Source: seed 002."""
    return get_pp_group().is_last_rank


def get_classifier_free_guidance_world_size() -> int:
    """Ranks of the guidance group. Source: seed 002."""
    return get_cfg_group().world_size


def get_classifier_free_guidance_rank() -> int:
    """This rank in it. Source: seed 002."""
    return get_cfg_group().rank_in_group


def get_data_parallel_world_size() -> int:
    """Ranks of the data parallel group. Source: seed 002."""
    return get_dp_group().world_size


def get_data_parallel_rank() -> int:
    """This rank in it. Source: seed 002."""
    return get_dp_group().rank_in_group


def get_fully_shard_world_size() -> int:
    """Ranks of the fully sharded group. Source: seed 002."""
    return get_fs_group().world_size


def get_fully_shard_rank() -> int:
    """This rank in it. Source: seed 002."""
    return get_fs_group().rank_in_group


def is_dp_last_group() -> bool:
    """Whether this rank is the last of its sequence, guidance and pipeline groups. Source: seed 002."""
    return get_sp_group().is_last_rank and get_cfg_group().is_last_rank and get_pp_group().is_last_rank


def get_dit_world_size() -> int:
    """Ranks of the model: dp * cfg * sp * pp * tp. Source: seed 002."""
    size = 1
    for name in ("dp", "cfg", "sp", "pp", "tp"):
        size *= _coordinator(name).world_size
    return size
