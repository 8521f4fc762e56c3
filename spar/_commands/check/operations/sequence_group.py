# SPDX-License-Identifier: Apache-2.0
"""Cases of spar.sharding and spar.data, which use the current topology's sequence group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....ops.names.lightrft import SPDataProcessor, sp_slice_and_pad_input
from ....ops.names.vllm_omni import ShardingValidator, sp_gather, sp_shard, sp_shard_with_padding
from ..shards import any_total, even, gather, split
from ..trial import NO_GRADIENT, Case, Setting, Tensors, Trial, numbers


def sequence_group_cases() -> list[Case]:
    """The operations that use the current topology's sequence group."""

    def shard(s: Setting, total: int, x: Tensor) -> Tensor:
        with s.topology:
            return sp_shard(x, 1, validate=False)

    def gathered(s: Setting, total: int, x: Tensor) -> Tensor:
        with s.topology:
            return sp_gather(x, 1)

    def with_padding(s: Setting) -> Trial:
        total = any_total(s.world)
        x, padding = numbers(2, total, 3), -total % s.world

        def run(x: Tensor) -> Tensor:
            with s.topology:
                return sp_shard_with_padding(x, 1)[0]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            return [[part] for part in pad(inputs[0][0], (0, 0, 0, padding)).chunk(s.world, 1)]

        return Trial([[x]] * s.world, run, reference, scale=lambda g: g / s.world)

    def validated(s: Setting) -> Trial:
        """The gradients of its shard and gather are those of sp_shard and sp_gather."""

        def run(x: Tensor) -> Tensor:
            validator = ShardingValidator()
            with s.topology, validator.track():
                y = validator.gather(validator.shard(x, "x", 1, validate_divisible=False), "x", 1)
            validator.validate()
            return y

        x = numbers(2, any_total(s.world), 3)
        return Trial([[x]] * s.world, run, lambda inputs: inputs, NO_GRADIENT)

    def processed(s: Setting) -> Trial:
        parts = [[numbers(2, 3, seed=rank)] for rank in range(s.world)]

        def run(x: Tensor) -> Tensors:
            with s.topology, SPDataProcessor() as processor:
                everything = processor.preprocess({"x": x, "names": [f"{s.rank}"] * 2})
                own = processor.postprocess(everything)
            names = torch.tensor([int(name) for name in own["names"]], device="cpu")
            return [everything["x"], own["x"], names]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            whole = torch.cat([own[0] for own in inputs])
            return [[whole, own[0], torch.tensor([rank, rank])] for rank, own in enumerate(inputs)]

        return Trial(parts, run, reference, NO_GRADIENT)

    def sliced(s: Setting) -> Trial:
        total = any_total(s.world)
        ids, padding = torch.arange(2 * total).view(2, total), -total % s.world
        positions = torch.arange(total)[None]

        def run(ids: Tensor, positions: Tensor) -> Tensors:
            with s.topology:
                part, placed, _ = sp_slice_and_pad_input(ids, positions)
            return [part, positions if placed is None else placed]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            whole = pad(ids, (0, padding))
            placed = torch.cat([positions, torch.arange(padding)[None]], 1)
            return [[part, placed] for part in whole.chunk(s.world, 1)]

        return Trial([[ids, positions]] * s.world, run, reference, NO_GRADIENT)

    return [
        Case("sharding.sp_shard", "uneven", split(shard, even)),
        Case("sharding.sp_gather", "uneven", gather(gathered, even)),
        Case("sharding.sp_shard_with_padding", "uneven", with_padding),
        Case("sharding.ShardingValidator", "shard and gather", validated),
        Case("data.SPDataProcessor", "", processed),
        Case("data.sp_slice_and_pad_input", "uneven", sliced),
    ]
