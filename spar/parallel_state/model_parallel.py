# SPDX-License-Identifier: Apache-2.0
"""Initialize torch.distributed and the groups of a diffusion transformer. From vLLM-Omni.

These functions read and write the current topology (`spar.topology`). Functions that make groups are
collective: every rank must call them with the same arguments.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch
import torch.distributed as dist

from .._checks import check_backend, check_bool, check_int, check_ints, check_rank_groups, check_str
from ..topology.topology import current, forget_all
from .coordinator import GroupCoordinator, SequenceParallelGroupCoordinator
from .getters import find, get_local_rank
from .pipeline import PipelineGroupCoordinator
from .process_groups import destroy_group, new_group_of
from .rank_groups import RankGenerator, sequence_rank_groups

__all__ = [
    "HAS_FLASH_ATTN",
    "destroy_distributed_env",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "env_info",
    "init_distributed_environment",
    "init_dit_group",
    "init_model_parallel_group",
    "init_world_group",
    "initialize_model_parallel",
    "logger",
    "model_parallel_is_initialized",
    "set_seq_parallel_pg",
]


def get_packages_info() -> dict[str, bool]:
    """Return which optional packages are installed, without importing them."""
    return {"has_flash_attn": importlib.util.find_spec("flash_attn") is not None}


env_info = get_packages_info()
HAS_FLASH_ATTN = env_info["has_flash_attn"]
logger = logging.getLogger("spar.parallel_state")

_MODES = ("data", "pipeline", "tensor", "expert", "sequence", "classifier_free_guidance", "fully_shard")

# ---- the environment ----


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
) -> None:
    """Initialize torch.distributed, unless it is initialized, and the world group. From vLLM-Omni.

    Args:
        world_size: the number of ranks, or -1: passed on to torch.distributed.init_process_group.
        rank: this process's rank, or -1, likewise.
        distributed_init_method: the `init_method`, likewise.
        local_rank: this process's rank on its host. Default: LOCAL_RANK with env://, else the rank.
        backend: default gloo for CPU tensors, and nccl for CUDA tensors if CUDA is available.

    Raises:
        AssertionError: the world group exists with another size than torch.distributed.
        TypeError, ValueError: an argument has the wrong type, or a number is below -1.
    """
    caller = "init_distributed_environment"
    world_size = check_int(caller, "world_size", world_size, -1)
    rank = check_int(caller, "rank", rank, -1)
    check_str(caller, "distributed_init_method", distributed_init_method)
    local_rank = check_int(caller, "local_rank", local_rank, -1)
    check_backend(caller, backend)
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if local_rank == -1 and distributed_init_method == "env://":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if not dist.is_initialized():
        dist.init_process_group(
            backend, init_method=distributed_init_method, world_size=world_size, rank=rank
        )
        if torch.cuda.is_available():
            local = local_rank if local_rank >= 0 else dist.get_rank()
            torch.cuda.set_device(local % torch.cuda.device_count())
    if local_rank == -1:
        local_rank = dist.get_rank()
    world = find("world")
    if world is None:
        current().coordinators["world"] = init_world_group(
            list(range(dist.get_world_size())), local_rank, backend
        )
    elif world.world_size != dist.get_world_size():
        raise AssertionError(
            f"{caller}: the world group has {world.world_size} ranks; expected {dist.get_world_size()} as in "
            "torch.distributed; call destroy_distributed_environment() first"
        )


def init_world_group(ranks: list[int], local_rank: int, backend: str) -> GroupCoordinator:
    """Make a coordinator of one group, `ranks`, for use as the world group. From vLLM-Omni."""
    ranks = check_ints("init_world_group", "ranks", ranks, 0)
    check_backend("init_world_group", backend)
    return GroupCoordinator([ranks], local_rank, backend)


def destroy_distributed_environment() -> None:
    """Destroy torch.distributed and with it all groups of all topologies. From vLLM-Omni."""
    world = find("world")
    if world is not None:
        world.destroy()
    forget_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def destroy_distributed_env() -> None:
    """Call `destroy_model_parallel`, then `destroy_distributed_environment`. From vLLM-Omni."""
    destroy_model_parallel()
    destroy_distributed_environment()


# ---- model parallel groups ----


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str | None,
    parallel_mode: str,
    **kwargs: dist.ProcessGroup | None,
) -> GroupCoordinator:
    """Make the coordinator for one kind of parallelism. Collective over the world. From vLLM-Omni.

    Args:
        group_ranks: the global ranks of each group, in any order.
        local_rank: this process's rank on its host.
        backend: the backend of the device group; None for that of the world.
        parallel_mode: data, pipeline, tensor, expert, sequence, classifier_free_guidance or fully_shard.
        kwargs: ulysses_group and ring_group, for "sequence".

    Returns:
        A PipelineGroupCoordinator for "pipeline", a SequenceParallelGroupCoordinator for "sequence", else a
        GroupCoordinator.

    Raises:
        AssertionError: `parallel_mode` is none of these.
        ValueError: the groups do not fit the world, or this rank is in none of them.
        TypeError: an argument has the wrong type.
    """
    caller = "init_model_parallel_group"
    group_ranks = check_rank_groups(caller, "group_ranks", group_ranks)
    check_backend(caller, backend)
    check_str(caller, "parallel_mode", parallel_mode)
    if parallel_mode not in _MODES:
        raise AssertionError(
            f"{caller}: parallel_mode is {parallel_mode!r}; expected one of {', '.join(_MODES)}"
        )
    if parallel_mode == "pipeline":
        return PipelineGroupCoordinator(group_ranks, local_rank, backend)
    if parallel_mode == "sequence":
        return SequenceParallelGroupCoordinator(group_ranks, local_rank, backend, **kwargs)
    return GroupCoordinator(group_ranks, local_rank, backend)


def init_dit_group(dit_parallel_size: int, backend: str | None) -> None:
    """Make the group of the model's ranks, 0 to dit_parallel_size - 1. Collective. From vLLM-Omni."""
    size = check_int("init_dit_group", "dit_parallel_size", dit_parallel_size, 1)
    check_backend("init_dit_group", backend)
    current().dit = dist.new_group(list(range(size)), backend=backend)


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
    sp_group_ranks: list[list[int]] | None = None,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the ulysses and ring groups inside each sequence group. Collective. From vLLM-Omni.

    Args:
        sp_ulysses_degree: the size of the ulysses groups.
        sp_ring_degree: the size of the ring groups.
        rank: this process's global rank.
        world_size: the world size, a multiple of sp_ulysses_degree * sp_ring_degree.
        use_ulysses_low: if True, ulysses groups are contiguous in their sequence group and ring groups are
            strided; if False, the reverse.
        sp_group_ranks: the ranks of each sequence group. Default: runs of consecutive ranks.

    Returns:
        This rank's ulysses group and ring group.

    Raises:
        AssertionError: `world_size` is not a multiple of sp_ulysses_degree * sp_ring_degree.
        ValueError: `sp_group_ranks` has groups of another size, or does not hold each rank once. Or `rank` is
            not this process's rank.
        TypeError: an argument has the wrong type.
        RuntimeError: torch.distributed is not initialized.
    """
    caller = "set_seq_parallel_pg"
    groups = sequence_rank_groups(
        sp_ulysses_degree, sp_ring_degree, world_size, use_ulysses_low, sp_group_ranks
    )
    rank = check_int(caller, "rank", rank, 0, world_size - 1)
    _check_initialized(caller)
    if rank != dist.get_rank():
        raise ValueError(f"{caller}: rank is {rank}; expected this process's rank, {dist.get_rank()}")
    return _make_ulysses_and_ring(groups, None)


def _check_initialized(caller: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{caller}: torch.distributed is not initialized; call init_distributed_environment first"
        )


def _make_ulysses_and_ring(
    groups: tuple[list[list[int]], list[list[int]]], backend: str | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make all ulysses and ring groups and return this rank's. Collective."""
    ulysses, ring = (new_group_of(ranks, backend, "set_seq_parallel_pg") for ranks in groups)
    if ulysses is None or ring is None:
        raise ValueError(
            f"set_seq_parallel_pg: the ulysses groups are {groups[0]}; "
            f"expected one with this process's rank, {dist.get_rank()}"
        )
    return ulysses, ring


def initialize_model_parallel(
    data_parallel_size: int = 1,
    cfg_parallel_size: int = 1,
    sequence_parallel_size: int | None = None,
    ulysses_degree: int = 1,
    ring_degree: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    fully_shard_degree: int = 1,
    hsdp_replicate_size: int = 1,
    enable_expert_parallel: bool = False,
    backend: str | None = None,
) -> None:
    """Make the groups of the current topology in the order tp-sp-pp-cfg-dp, tp fastest. From vLLM-Omni.

    Collective. With dp, cfg, pp and sp of size 2 on 16 ranks, rank 0 is in the groups [0, 8], [0, 4], [0, 2]
    and [0, 1].

    Args:
        data_parallel_size: the size of the data dim.
        cfg_parallel_size: the size of the guidance dim.
        sequence_parallel_size: must be ulysses_degree * ring_degree, the default.
        ulysses_degree: the size of the ulysses groups, contiguous in a sequence group.
        ring_degree: the size of the ring groups, strided in a sequence group.
        tensor_parallel_size: the size of the tensor dim.
        pipeline_parallel_size: the number of pipeline stages.
        fully_shard_degree: consecutive ranks that shard one copy of the parameters. If all other sizes are 1,
            the data-parallel size becomes fully_shard_degree * hsdp_replicate_size.
        hsdp_replicate_size: replicas of the parameters in that case; else unused.
        enable_expert_parallel: also make the expert group, tp-sp-cfg-dp.
        backend: the backend of all device groups, ulysses and ring too; None for that of the world.

    Raises:
        ValueError: sequence_parallel_size is not ulysses_degree * ring_degree, a size is below 1, or
            fully_shard_degree does not divide the number of ranks.
        TypeError: an argument has the wrong type.
        RuntimeError: the layout has fewer or more ranks than the world (no size is derived from the world
            size), or torch.distributed is not initialized.
        AssertionError: the groups are already initialized.
    """
    caller = "initialize_model_parallel"
    data_parallel_size = check_int(caller, "data_parallel_size", data_parallel_size, 1)
    cfg_parallel_size = check_int(caller, "cfg_parallel_size", cfg_parallel_size, 1)
    ulysses_degree = check_int(caller, "ulysses_degree", ulysses_degree, 1)
    ring_degree = check_int(caller, "ring_degree", ring_degree, 1)
    tensor_parallel_size = check_int(caller, "tensor_parallel_size", tensor_parallel_size, 1)
    pipeline_parallel_size = check_int(caller, "pipeline_parallel_size", pipeline_parallel_size, 1)
    fully_shard_degree = check_int(caller, "fully_shard_degree", fully_shard_degree, 1)
    hsdp_replicate_size = check_int(caller, "hsdp_replicate_size", hsdp_replicate_size, 1)
    if sequence_parallel_size is not None:
        sequence_parallel_size = check_int(caller, "sequence_parallel_size", sequence_parallel_size, 1)
    check_bool(caller, "enable_expert_parallel", enable_expert_parallel)
    check_backend(caller, backend)
    sp = ring_degree * ulysses_degree
    if sequence_parallel_size not in (None, sp):
        raise ValueError(
            f"{caller}: sequence_parallel_size is {sequence_parallel_size}; "
            f"expected {sp}, ring_degree {ring_degree} * ulysses_degree {ulysses_degree}"
        )
    product = data_parallel_size * cfg_parallel_size * sp * pipeline_parallel_size * tensor_parallel_size
    standalone = product == 1 and fully_shard_degree > 1
    dp = fully_shard_degree * hsdp_replicate_size if standalone else data_parallel_size
    layout = RankGenerator(
        tensor_parallel_size, sp, pipeline_parallel_size, cfg_parallel_size, dp, fully_shard_degree
    )
    sharded = layout.get_ranks("fs", independent_ranks=True)
    _check_initialized(caller)
    world = dist.get_world_size()
    if world != layout.world_size:
        # no size is derived: leftover ranks would be in no group, or be unrequested replicas
        more, remainder = divmod(world, layout.world_size)
        name, size = (
            ("hsdp_replicate_size", hsdp_replicate_size) if standalone else ("data_parallel_size", dp)
        )
        hint = "" if remainder or not more else f"; pass {name}={size * more} to use all ranks"
        raise RuntimeError(f"{caller}: {layout} is {layout.world_size} ranks; the world has {world}{hint}")
    topology = current()
    existing = sorted(set(topology.coordinators) - {"world"})
    if existing:
        raise AssertionError(
            f"{caller}: the groups {existing} are already initialized; call destroy_model_parallel() first"
        )
    local_rank = get_local_rank()
    modes = {"dp": "data", "cfg": "classifier_free_guidance", "pp": "pipeline", "tp": "tensor"}
    coordinators = {
        name: init_model_parallel_group(layout.get_ranks(name), local_rank, backend, mode)
        for name, mode in modes.items()
    }
    coordinators["fs"] = init_model_parallel_group(sharded, local_rank, backend, "fully_shard")
    if enable_expert_parallel:
        ranks = layout.get_ranks("tp-sp-cfg-dp")
        coordinators["ep"] = init_model_parallel_group(ranks, local_rank, backend, "expert")
    ranks = layout.get_ranks("sp")
    ulysses, ring = _make_ulysses_and_ring(
        sequence_rank_groups(ulysses_degree, ring_degree, world, True, ranks), backend
    )
    coordinators["sp"] = init_model_parallel_group(
        ranks, local_rank, backend, "sequence", ulysses_group=ulysses, ring_group=ring
    )
    init_dit_group(layout.world_size, backend)
    topology.coordinators |= coordinators
    topology.refresh()
    logger.debug("rank %d: %s", dist.get_rank(), layout)


def model_parallel_is_initialized() -> bool:
    """Return whether `initialize_model_parallel` made the current topology's groups. From vLLM-Omni."""
    return {"dp", "cfg", "sp", "pp", "tp"} <= set(current().coordinators)


def destroy_model_parallel() -> None:
    """Destroy the groups made by `initialize_model_parallel`, if any. From vLLM-Omni."""
    topology = current()
    sp = topology.coordinators.get("sp")
    if isinstance(sp, SequenceParallelGroupCoordinator):
        destroy_group(sp.ulysses_group)
        destroy_group(sp.ring_group)
    for name, coordinator in topology.coordinators.items():
        if name != "world":
            coordinator.destroy()
    if isinstance(topology.dit, dist.ProcessGroup):
        destroy_group(topology.dit)
    topology.coordinators = {k: v for k, v in topology.coordinators.items() if k == "world"}
    topology.dit = None
    topology.refresh()
