# SPDX-License-Identifier: Apache-2.0
"""The functions of other libraries that docs/migrating.md replaces, over plain torch.distributed.

MODULES lists them by module, as the page imports them. With equal pieces they compute what spar computes;
what they do not support (uneven pieces, negative dims) is not implemented here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup
Tensors = Callable[[torch.Tensor], torch.Tensor]


def parts(x: torch.Tensor, group: Group, dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Return the parts of all ranks."""
    shape = list(x.shape)
    found = []
    for rank, size in enumerate(sizes):
        shape[dim] = size
        found.append(x.contiguous() if rank == group.rank() else torch.empty(shape, dtype=x.dtype))
        dist.broadcast(found[-1], group=group, group_src=rank)
    return found


def rule(total: int, world: int) -> list[int]:
    return [len(chunk) for chunk in torch.arange(total).tensor_split(world)]


def own(x: torch.Tensor, group: Group, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
    return x.split(sizes or rule(x.size(dim), group.size()), dim)[group.rank()].contiguous()


def whole(x: torch.Tensor, group: Group, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
    return torch.cat(parts(x, group, dim, sizes or [x.size(dim)] * group.size()), dim)


def exchanged(x: torch.Tensor, group: Group, scatter: int, gather: int, total: int | None) -> torch.Tensor:
    """Gather along one dim, and return this rank's part of the other."""
    gather_sizes = rule(total or x.size(gather) * group.size(), group.size())
    return own(whole(x, group, gather, gather_sizes), group, scatter)


class _Pair(torch.autograd.Function):
    """Apply one function in forward, and another one in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Tensors, back: Tensors) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def pair(x: torch.Tensor, there: Tensors, back: Tensors) -> torch.Tensor:
    out: torch.Tensor = _Pair.apply(x, there, back)
    return out


def scale(grad: torch.Tensor, how: str | float | None, world: int) -> torch.Tensor:
    if how is None:
        return grad
    if isinstance(how, str):
        return grad * world if how == "up" else grad / world
    return grad * how


def all_to_all(
    x: torch.Tensor, group: Group, scatter: int, gather: int, total: int | None = None
) -> torch.Tensor:
    scattered = x.size(scatter)
    return pair(
        x,
        lambda x: exchanged(x, group, scatter, gather, total),
        lambda g: exchanged(g, group, gather, scatter, scattered),
    )


def split(
    x: torch.Tensor, group: Group, dim: int, sizes: list[int] | None, how: str | float | None
) -> torch.Tensor:
    sizes = sizes or rule(x.size(dim), group.size())
    return pair(
        x,
        lambda x: own(x, group, dim, sizes),
        lambda g: whole(scale(g, how, group.size()), group, dim, sizes),
    )


def gather(
    x: torch.Tensor, group: Group, dim: int, sizes: list[int] | None, how: str | float | None
) -> torch.Tensor:
    return pair(
        x,
        lambda x: whole(x, group, dim, sizes),
        lambda g: own(scale(g, how, group.size()), group, dim, sizes),
    )


# ---- vLLM-Omni, sharding: by the sequence group that the test sets ----

sequence = SimpleNamespace(group=None)  # of vLLM-Omni and of LightRFT


def sp_shard(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    return tensor.chunk(sequence.group.size(), dim)[sequence.group.rank()]


def sp_gather(tensor: torch.Tensor, dim: int, validate: bool = True) -> torch.Tensor:
    return whole(tensor.detach(), sequence.group, dim)


def sp_shard_with_padding(tensor: torch.Tensor, dim: int, pad_value: float = 0.0) -> tuple[torch.Tensor, int]:
    shape = list(tensor.shape)
    shape[dim] = -shape[dim] % sequence.group.size()
    return sp_shard(torch.cat([tensor, torch.full(shape, pad_value)], dim), dim), shape[dim]


class ShardingValidator:
    """Collect names, as far as the page's example needs."""

    def __init__(self) -> None:
        self.open: set[str] = set()

    def track(self) -> ShardingValidator:
        return self

    def __enter__(self) -> None:
        self.open.clear()

    def __exit__(self, *_: object) -> None:
        pass

    def shard(self, tensor: torch.Tensor, name: str, dim: int) -> torch.Tensor:
        self.open.add(name)
        return sp_shard(tensor, dim)

    def gather(self, tensor: torch.Tensor, name: str, dim: int) -> torch.Tensor:
        self.open.discard(name)
        return sp_gather(tensor, dim)

    def validate(self) -> None:
        if self.open:
            raise ValueError(self.open)


# ---- LightRFT ----


def set_sequence_parallel_group(group: Group | None) -> None:
    sequence.group = group


class SPDataProcessor:
    """Lists of samples, by pickle."""

    def preprocess(self, data: list[Any]) -> list[Any]:
        gathered: list[Any] = [None] * sequence.group.size()
        dist.all_gather_object(gathered, data, group=sequence.group)
        return [sample for of_rank in gathered for sample in of_rank]

    def postprocess(self, data: list[Any]) -> list[Any]:
        each = len(data) // sequence.group.size()
        return data[sequence.group.rank() * each :][:each]


def sp_slice_and_pad_input(
    ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    padding = -ids.size(1) % sequence.group.size()
    ids = torch.cat([ids, ids.new_zeros(len(ids), padding)], 1)
    return own(ids, sequence.group, 1), torch.cat([positions, torch.arange(padding)[None]], 1), padding


def gather_and_unpad(
    x: torch.Tensor, group: Group, dim: int, padding_size: int = 0, unpad_dim: int = 0
) -> torch.Tensor:
    y = gather(x, group, dim, None, None)
    return y.narrow(unpad_dim, 0, y.size(unpad_dim) - padding_size)


# ---- MindSpeed-MM ----


def natural(total: int, world: int) -> torch.Tensor:
    """Return the global index of each element of the concatenated zigzag parts."""
    chunks = torch.arange(total).chunk(2 * world)
    return torch.cat([torch.cat([chunks[r], chunks[2 * world - 1 - r]]) for r in range(world)])


def packed_order(table: torch.Tensor) -> torch.Tensor:
    """The same for packed sequences; the table `[ranks, sequences]` holds each rank's sizes."""
    each = torch.arange(int(table.sum())).split(table.T.reshape(-1).tolist())
    world, count = table.shape
    return torch.cat([each[s * world + r] for r in range(world) for s in range(count)])


def multi(lengths: list[int], world: int) -> torch.Tensor:
    return torch.tensor([rule(length, world) for length in lengths]).T


def split_by(x: torch.Tensor, group: Group, dim: int, order: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Split in the given order; backward gathers, divides and restores the order."""
    inverse = order.argsort()
    return pair(
        x,
        lambda x: own(x.index_select(dim, order), group, dim, sizes),
        lambda g: (whole(g, group, dim, sizes) / group.size()).index_select(dim, inverse),
    )


def gather_by(x: torch.Tensor, group: Group, dim: int, order: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    inverse = order.argsort()
    return pair(
        x,
        lambda x: whole(x, group, dim, sizes).index_select(dim, inverse),
        lambda g: own((g * group.size()).index_select(dim, order), group, dim, sizes),
    )


def balanced_split(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    total, world = x.size(dim), group.size()
    return split_by(x, group, dim, natural(total, world), [total // world] * world)


def balanced_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    world = group.size()
    return gather_by(x, group, dim, natural(x.size(dim) * world, world), [x.size(dim)] * world)


def packed_split(x: torch.Tensor, group: Group, lengths: list[int], dim: int = 0) -> torch.Tensor:
    table = multi(lengths, group.size())
    return split_by(x, group, dim, packed_order(table), table.sum(1).tolist())


def packed_gather(x: torch.Tensor, table: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    return gather_by(x, group, dim, packed_order(table), table.sum(1).tolist())


mesh = SimpleNamespace(ring=None, ulysses=None)


def init_parallel_state(ring_attention_size: int, ulysses_parallel_size: int) -> None:
    """Create ring groups of consecutive ranks, and strided ulysses groups."""
    ranks = torch.arange(ring_attention_size * ulysses_parallel_size).reshape(-1, ring_attention_size)
    mesh.ring, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    mesh.ulysses, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())


def split_with_cp(x: torch.Tensor, dim: int) -> torch.Tensor:
    return split(balanced_split(x, mesh.ring, dim), mesh.ulysses, dim, None, "down")


def gather_with_cp(x: torch.Tensor, dim: int, gather_size: int) -> torch.Tensor:
    sizes = rule(gather_size // mesh.ring.size(), mesh.ulysses.size())
    return balanced_gather(gather(x, mesh.ulysses, dim, sizes, "up"), mesh.ring, dim)


def packed_split_with_cp(x: torch.Tensor, dim: int, lengths: list[int]) -> torch.Tensor:
    return split(packed_split(x, mesh.ring, lengths, dim), mesh.ulysses, dim, None, "down")


def packed_gather_with_cp(x: torch.Tensor, dim: int, lengths: list[int]) -> torch.Tensor:
    table = multi(lengths, mesh.ring.size())
    sizes = rule(int(table[mesh.ring.rank()].sum()), mesh.ulysses.size())
    return packed_gather(gather(x, mesh.ulysses, dim, sizes, "up"), table, mesh.ring, dim)


# ---- FastVideo ----


def fastvideo_shard(x: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, int]:
    """Pad the end with zeros to a multiple of the ranks."""
    shape = list(x.shape)
    shape[dim] = -shape[dim] % sequence.group.size()
    return torch.cat([x, x.new_zeros(shape)], dim).chunk(sequence.group.size(), dim)[
        sequence.group.rank()
    ], x.size(dim)


def fastvideo_gather(x: torch.Tensor, original_seq_len: int, dim: int = -1) -> torch.Tensor:
    """Gather, and sum the ranks' gradients of each shard."""
    group = sequence.group

    def back(grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad := grad.clone(), group=group)
        return own(grad, group, dim)

    return pair(x, lambda x: whole(x, group, dim), back).narrow(dim, 0, original_seq_len)


# ---- Wan2.2: without gradients ----


def wan_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    group = sequence.group
    q, k, v = (exchanged(x.detach(), group, 2, 1, None).transpose(1, 2) for x in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return exchanged(y.transpose(1, 2).contiguous(), group, 1, 2, None)


# ---- other libraries ----


class SeqAllToAll:
    """Take the group first. Arguments after the dims (batch dim, synchronization) change no value."""

    @staticmethod
    def apply(group: Group, x: torch.Tensor, scatter: int, gather: int, *_: object) -> torch.Tensor:
        return all_to_all(x, group, scatter, gather)


def gather_seq_scatter_heads(
    x: torch.Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: Any = None
) -> torch.Tensor:
    y = all_to_all(x, group, head_dim, seq_dim)
    return y.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size else y


def dim_before_group(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take the dim before the group, as xtuner and ColossalAI do; by default no gradient is scaled."""
    return lambda x, dim, group, grad_scale=None: function(x, group, dim, None, grad_scale)


_MINDSPEED = "mindspeed_mm.fsdp.distributed"
MODULES: dict[str, dict[str, Any]] = {
    "vllm_omni.diffusion.distributed.sp_sharding": {
        "sp_shard": sp_shard,
        "sp_gather": sp_gather,
        "sp_shard_with_padding": sp_shard_with_padding,
        "ShardingValidator": ShardingValidator,
        "get_sharding_validator": ShardingValidator,
    },
    "lightrft.strategy.utils.parallel_utils": {
        "SPDataProcessor": SPDataProcessor,
        "set_sequence_parallel_group": set_sequence_parallel_group,
        "get_sequence_parallel_group": lambda: sequence.group,
        "get_sequence_parallel_rank": lambda: sequence.group.rank(),
        "get_sequence_parallel_world_size": lambda: sequence.group.size(),
        "sp_slice_and_pad_input": sp_slice_and_pad_input,
        "gather_forward_split_backward_and_unpad": gather_and_unpad,
    },
    f"{_MINDSPEED}.context_parallel.communication": {
        "all_to_all": lambda x, group, scatter_dim, gather_dim, gather_size: all_to_all(
            x, group, scatter_dim, gather_dim, gather_size
        ),
        "split_forward_gather_backward": lambda x, group, dim, sizes=None, grad_scale="down": split(
            x, group, dim, sizes, grad_scale
        ),
        "gather_forward_split_backward": lambda x, group, dim, sizes=None, grad_scale="up": gather(
            x, group, dim, sizes, grad_scale
        ),
        "load_balanced_split_forward_gather_backward": balanced_split,
        "load_balanced_gather_forward_split_backward": balanced_gather,
        "packed_data_split_forward_gather_backward": packed_split,
        "packed_data_gather_forward_split_backward": packed_gather,
        "split_forward_gather_backward_with_cp": split_with_cp,
        "gather_forward_split_backward_with_cp": gather_with_cp,
        "packed_data_split_forward_gather_backward_with_cp": packed_split_with_cp,
        "packed_data_gather_forward_split_backward_with_cp": packed_gather_with_cp,
    },
    f"{_MINDSPEED}.context_parallel.utils": {
        "cal_split_sizes": rule,
        "cal_split_sizes_multi": multi,
        # in rank order: chunks 0, 2P-1, 1, 2P-2, ...
        "reorder_output": lambda x, rank, world, group, dim: x.index_select(
            dim, natural(x.size(dim), world).argsort()
        ),
    },
    f"{_MINDSPEED}.parallel_state": {"init_parallel_state": init_parallel_state},
    "fastvideo.distributed.communication_op": {
        "sequence_model_parallel_shard": fastvideo_shard,
        "sequence_model_parallel_all_gather_with_unpad": fastvideo_gather,
        "sequence_model_parallel_all_to_all_4D": lambda x, scatter_dim, gather_dim: all_to_all(
            x, sequence.group, scatter_dim, gather_dim
        ),
    },
    "wan.distributed.ulysses": {"distributed_attention": wan_attention},
    "wan.distributed.util": {"gather_forward": lambda x, dim: whole(x.detach(), sequence.group, dim)},
    "deepspeed.sequence.layer": {"_SeqAllToAll": SeqAllToAll},
    "yunchang.comm.all_to_all": {"SeqAllToAll4D": SeqAllToAll, "SeqAllToAll5D": SeqAllToAll},
    "verl.utils.ulysses": {
        "gather_seq_scatter_heads": gather_seq_scatter_heads,
        "gather_heads_scatter_seq": lambda x, head_dim, seq_dim, group: all_to_all(
            x, group, seq_dim, head_dim
        ),
    },
    "xtuner.parallel.sequence": {
        "split_forward_gather_backward": dim_before_group(split),
        "gather_forward_split_backward": dim_before_group(gather),
    },
    "colossalai.shardformer.layer._operation": {
        "split_forward_gather_backward": dim_before_group(split),
        "gather_forward_split_backward": dim_before_group(gather),
    },
}
