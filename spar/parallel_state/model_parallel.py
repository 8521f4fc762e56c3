"""The distributed environment and the groups of a served diffusion transformer. Source: seed 002.

All of it reads and writes the current topology (`spar.topology`). What makes groups is collective: every rank
calls it alike.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch
import torch.distributed as dist

from .._runtime.checks import check_backend, check_bool, check_int, check_ints, check_rank_groups, check_str
from ..topology.topology import current, forget_all
from .coordinator import GroupCoordinator, SequenceParallelGroupCoordinator
from .getters import find, local_rank_of_this_process
from .pipeline import PipelineGroupCoordinator
from .process_groups import end_group, new_group_of
from .rank_groups import RankGenerator, sequence_rank_groups


def get_packages_info() -> dict[str, bool]:
    """Which optional packages this environment has; none is imported."""
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
    """Initializes torch.distributed, where nobody did, and the world group. Source: seed 002.

    Args:
        world_size, rank, distributed_init_method: as torch.distributed.init_process_group takes them.
        local_rank: this rank's on its host; by default LOCAL_RANK with env://, else the rank.
        backend: by default gloo for the CPU, and nccl for CUDA where there is CUDA.

    Raises:
        AssertionError: there is a world group of another size.
        TypeError, ValueError: an argument of another type, a number below -1.
    """
    where = "init_distributed_environment"
    world_size = check_int(where, "world_size", world_size, -1)
    rank = check_int(where, "rank", rank, -1)
    check_str(where, "distributed_init_method", distributed_init_method)
    local_rank = check_int(where, "local_rank", local_rank, -1)
    check_backend(where, backend)
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
            f"init_distributed_environment: there is a world group of {world.world_size} ranks; "
            f"torch.distributed has {dist.get_world_size()}"
        )


def init_world_group(ranks: list[int], local_rank: int, backend: str) -> GroupCoordinator:
    """The coordinator of one group, which is to be the world. Source: seed 002."""
    ranks = check_ints("init_world_group", "ranks", ranks, 0)
    check_backend("init_world_group", backend)
    return GroupCoordinator([ranks], local_rank, backend)


def destroy_distributed_environment() -> None:
    """Ends torch.distributed, and with it every group of every topology. Source: seed 002."""
    world = find("world")
    if world is not None:
        world.destroy()
    forget_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def destroy_distributed_env() -> None:
    """`destroy_model_parallel`, then `destroy_distributed_environment`. Source: seed 002."""
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
    """The coordinator that a kind of parallelism needs. Source: seed 002.

    Args:
        group_ranks: the global ranks of each group; they need not be consecutive.
        local_rank: this rank's on its host.
        backend: of its tensors' group; None for that of the world.
        parallel_mode: data, pipeline, tensor, expert, sequence, classifier_free_guidance or fully_shard.
        kwargs: ulysses_group and ring_group, for sequence.

    Raises:
        AssertionError: another parallel_mode.
        ValueError: groups that this world cannot have, or that leave this rank out.
    """
    where = "init_model_parallel_group"
    group_ranks = check_rank_groups(where, "group_ranks", group_ranks)
    check_backend(where, backend)
    check_str(where, "parallel_mode", parallel_mode)
    if parallel_mode not in _MODES:
        raise AssertionError(f"parallel_mode is {parallel_mode!r}; expected one of {', '.join(_MODES)}")
    if parallel_mode == "pipeline":
        return PipelineGroupCoordinator(group_ranks, local_rank, backend)
    if parallel_mode == "sequence":
        return SequenceParallelGroupCoordinator(group_ranks, local_rank, backend, **kwargs)
    return GroupCoordinator(group_ranks, local_rank, backend)


def init_dit_group(dit_parallel_size: int, backend: str | None) -> None:
    """The group of the model's ranks, 0 to dit_parallel_size - 1. Source: seed 002."""
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
    """Makes the ulysses and the ring groups inside of each sequence group. Source: seed 002.

    Args:
        sp_ulysses_degree, sp_ring_degree: their sizes.
        rank: this process's global rank.
        world_size: ranks altogether, a multiple of the product of both sizes.
        use_ulysses_low: ulysses groups are runs of a sequence group and ring groups strided; else the
            other way round.
        sp_group_ranks: the sequence groups; by default runs of consecutive ranks.

    Returns:
        This rank's ulysses group and ring group.

    Raises:
        AssertionError: world_size is no multiple.
        ValueError: sp_group_ranks of another number or size; ranks that are twice, or not in the world; rank
            is not this process's.
        TypeError: an argument of another type.
        RuntimeError: torch.distributed is not initialized.
    """
    where = "set_seq_parallel_pg"
    groups = sequence_rank_groups(
        sp_ulysses_degree, sp_ring_degree, world_size, use_ulysses_low, sp_group_ranks
    )
    rank = check_int(where, "rank", rank, 0, world_size - 1)
    _check_initialized(where)
    if rank != dist.get_rank():
        raise ValueError(f"{where}: rank is {rank}; expected this process's rank, {dist.get_rank()}")
    return _levels(groups, None)


def _check_initialized(where: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{where}: torch.distributed is not initialized; call init_distributed_environment first"
        )


def _levels(
    groups: tuple[list[list[int]], list[list[int]]], backend: str | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's ulysses and ring group, of those that all ranks make."""
    ulysses, ring = (new_group_of(ranks, backend, "set_seq_parallel_pg") for ranks in groups)
    if ulysses is None or ring is None:
        raise ValueError(
            f"set_seq_parallel_pg: the ulysses groups are {groups[0]}; "
            f"rank {dist.get_rank()} is in none of them"
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
    """Makes the groups of the current topology: tp-sp-pp-cfg-dp, the first fastest. Source: seed 002.

    With 2 each of dp, cfg, pp and sp on 16 ranks, rank 0 is in the groups [0, 8], [0, 4], [0, 2] and [0, 1].

    Args:
        data_parallel_size, cfg_parallel_size, tensor_parallel_size, pipeline_parallel_size: of these dims.
        sequence_parallel_size: ulysses_degree * ring_degree, which it is by default.
        ulysses_degree, ring_degree: ulysses groups are runs of a sequence group, ring groups are strided.
        fully_shard_degree: ranks that share one copy of the parameters: runs of all ranks. Where all other
            sizes are 1 the data dim becomes fully_shard_degree * hsdp_replicate_size.
        hsdp_replicate_size: such copies, in that case.
        enable_expert_parallel: also makes the group of the experts, tp-sp-cfg-dp.
        backend: of the tensors' groups, ulysses and ring too; None for that of the world.

    Raises:
        ValueError: sequence_parallel_size is not ulysses_degree * ring_degree, a size below 1, a
            fully_shard_degree that does not divide the ranks.
        TypeError: an argument of another type.
        RuntimeError: the world has fewer ranks than the layout, or more, as no size is derived from it;
            torch.distributed is not initialized.
        AssertionError: the groups are there already.
    """
    where = "initialize_model_parallel"
    data_parallel_size = check_int(where, "data_parallel_size", data_parallel_size, 1)
    cfg_parallel_size = check_int(where, "cfg_parallel_size", cfg_parallel_size, 1)
    ulysses_degree = check_int(where, "ulysses_degree", ulysses_degree, 1)
    ring_degree = check_int(where, "ring_degree", ring_degree, 1)
    tensor_parallel_size = check_int(where, "tensor_parallel_size", tensor_parallel_size, 1)
    pipeline_parallel_size = check_int(where, "pipeline_parallel_size", pipeline_parallel_size, 1)
    fully_shard_degree = check_int(where, "fully_shard_degree", fully_shard_degree, 1)
    hsdp_replicate_size = check_int(where, "hsdp_replicate_size", hsdp_replicate_size, 1)
    if sequence_parallel_size is not None:
        sequence_parallel_size = check_int(where, "sequence_parallel_size", sequence_parallel_size, 1)
    check_bool(where, "enable_expert_parallel", enable_expert_parallel)
    check_backend(where, backend)
    sp = ring_degree * ulysses_degree
    if sequence_parallel_size not in (None, sp):
        raise ValueError(
            f"{where}: sequence_parallel_size is {sequence_parallel_size}; "
            f"expected {sp}, ring_degree {ring_degree} * ulysses_degree {ulysses_degree}"
        )
    others = data_parallel_size * cfg_parallel_size * sp * pipeline_parallel_size * tensor_parallel_size
    standalone = others == 1 and fully_shard_degree > 1
    dp = fully_shard_degree * hsdp_replicate_size if standalone else data_parallel_size
    layout = RankGenerator(
        tensor_parallel_size, sp, pipeline_parallel_size, cfg_parallel_size, dp, fully_shard_degree
    )
    sharded = layout.get_ranks("fs", independent_ranks=True)
    _check_initialized(where)
    world = dist.get_world_size()
    if world != layout.world_size:
        # what is left over would be in no group, or copies that nobody asked for
        more, rest = divmod(world, layout.world_size)
        name, size = (
            ("hsdp_replicate_size", hsdp_replicate_size) if standalone else ("data_parallel_size", dp)
        )
        hint = "" if rest or not more else f"; {name}={size * more} would fit"
        raise RuntimeError(f"{where}: {layout} is {layout.world_size} ranks; the world has {world}{hint}")
    topology = current()
    there = sorted(set(topology.coordinators) - {"world"})
    if there:
        raise AssertionError(f"{where}: the groups {there} are there; see destroy_model_parallel")
    modes = {"dp": "data", "cfg": "classifier_free_guidance", "pp": "pipeline", "tp": "tensor"}
    made = {
        name: init_model_parallel_group(layout.get_ranks(name), local_rank_of_this_process(), backend, mode)
        for name, mode in modes.items()
    }
    made["fs"] = init_model_parallel_group(sharded, local_rank_of_this_process(), backend, "fully_shard")
    if enable_expert_parallel:
        ranks = layout.get_ranks("tp-sp-cfg-dp")
        made["ep"] = init_model_parallel_group(ranks, local_rank_of_this_process(), backend, "expert")
    ranks = layout.get_ranks("sp")
    levels = _levels(sequence_rank_groups(ulysses_degree, ring_degree, world, True, ranks), backend)
    made["sp"] = init_model_parallel_group(
        ranks,
        local_rank_of_this_process(),
        backend,
        "sequence",
        ulysses_group=levels[0],
        ring_group=levels[1],
    )
    init_dit_group(layout.world_size, backend)
    topology.coordinators |= made
    topology.refresh()
    logger.debug("rank %d: %s", dist.get_rank(), layout)


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` made the current topology's groups. Source: seed 002."""
    return {"dp", "cfg", "sp", "pp", "tp"} <= set(current().coordinators)


def destroy_model_parallel() -> None:
    """Destroys the groups that `initialize_model_parallel` made, if it did. Source: seed 002."""
    topology = current()
    sp = topology.coordinators.get("sp")
    if isinstance(sp, SequenceParallelGroupCoordinator):
        end_group(sp.ulysses_group)
        end_group(sp.ring_group)
    for name, coordinator in topology.coordinators.items():
        if name != "world":
            coordinator.destroy()
    if isinstance(topology.dit, dist.ProcessGroup):
        end_group(topology.dit)
    topology.coordinators = {k: v for k, v in topology.coordinators.items() if k == "world"}
    topology.dit = None
    topology.refresh()
