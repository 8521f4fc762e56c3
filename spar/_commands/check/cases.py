"""The cases of `spar check`, by public operation. A case's call takes the setting, the total and the inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import spar

from ...data import SPDataProcessor, sp_slice_and_pad_input
from ...sharding import ShardingValidator, sp_gather, sp_shard, sp_shard_with_padding
from . import shards
from .attention import attention_cases
from .shards import (
    DOCUMENTS,
    Call,
    Indexed,
    Make,
    Total,
    add,
    any_total,
    documents,
    even,
    exact_gather,
    gather,
    hybrid,
    joined,
    multiple,
    packed,
    packed_hybrid,
    padded,
    split,
    swap,
    uneven,
    uneven_sizes,
    zigzag,
)
from .trial import NO_GRADIENT, OWN, Case, Setting, Tensors, Trial, numbers

LARGE = 1 << 20  # elements of the whole tensor where a transfer is large


def cases(s: Setting) -> list[Case]:
    """Return the cases for a group of this size."""
    found = [
        Case("init", "", _set_up),
        *_exchanges(),
        *_sums_and_gathers(),
        *_splits(),
        *_layouts(s),
        *_sequence_group(),
        *attention_cases(s),
        *_losses_and_seeds(),
    ]
    return found if s.world > 1 else [case for case in found if case.operation not in _NEED_RANKS]


_NEED_RANKS = {"SequenceLayout.hybrid"}  # a parallel state of one rank has no groups


def _set_up(s: Setting) -> Trial:
    """Set the group up, before the times of other operations are taken."""

    def run() -> Tensors:
        spar.init(s.group, s.device)
        return []

    return Trial([[]] * s.world, run, lambda inputs: [[]] * s.world, NO_GRADIENT)


def _without_gradient(make: Make) -> Make:
    return lambda s: dataclasses.replace(make(s), gradient=NO_GRADIENT)


def _waited(exchanged: tuple[Any, spar.Work]) -> Any:
    exchanged[1].wait()
    return exchanged[0]


def _exchanges() -> list[Case]:
    def sizes(s: Setting) -> dict[str, Any]:
        return {"gather_sizes": uneven_sizes(s.world), "scatter_sizes": uneven_sizes(s.world)}

    def total_of_sizes(world: int) -> int:
        return sum(uneven_sizes(world))

    def into_out(s: Setting, total: int, x: Tensor) -> Tensor:
        like = spar.all_to_all(x.detach(), s.group, gather_size=total)
        return spar.all_to_all(x.detach(), s.group, gather_size=total, out=torch.empty_like(like))

    makers: dict[str, Make] = {
        "uneven": swap(lambda s, total, x: spar.all_to_all(x, s.group, gather_size=total)),
        "even, bfloat16": swap(
            lambda s, total, x: spar.all_to_all(x, s.group),
            tokens=multiple,
            heads=lambda world: 2 * world,
            dtype=torch.bfloat16,
        ),
        "any sizes, one 0": swap(
            lambda s, total, x: spar.all_to_all(x, s.group, **sizes(s)),
            uneven,
            uneven,
            total_of_sizes,
            total_of_sizes,
        ),
        "zigzag layout": swap(
            lambda s, total, x: spar.all_to_all(
                x, s.group, layout=spar.SequenceLayout.zigzag(total, s.group)
            ),
            zigzag,
        ),
        "three tensors at once": swap(
            lambda s, total, *x: spar.all_to_all(x, s.group, gather_size=total), count=3
        ),
        "async_op": swap(
            lambda s, total, x: _waited(spar.all_to_all(x, s.group, gather_size=total, async_op=True))
        ),
        "out": _without_gradient(swap(into_out)),
        "large": swap(
            lambda s, total, x: spar.all_to_all(x, s.group, gather_size=total),
            tokens=lambda world: LARGE // (2 * 64 * (2 * world + 1)),
            width=64,
        ),
    }
    return [Case("all_to_all", variant, make) for variant, make in makers.items()]


def _large_total(world: int) -> int:
    return LARGE // 6


def _sums_and_gathers() -> list[Case]:
    def zigzagged(s: Setting, total: int) -> spar.SequenceLayout:
        return spar.SequenceLayout.zigzag(total, s.group)

    gathers: dict[str, Make] = {
        "uneven": exact_gather(
            lambda s, total, x: spar.all_gather(x, s.group, 1, [len(i) for i in even(total, s)]), even
        ),
        "even": exact_gather(lambda s, total, x: spar.all_gather(x, s.group, 1), even, multiple),
        "zigzag layout": exact_gather(
            lambda s, total, x: spar.all_gather(x, dim=1, layout=zigzagged(s, total)), zigzag
        ),
        "async_op": exact_gather(
            lambda s, total, x: _waited(spar.all_gather(x, s.group, 1, async_op=True)), even, multiple
        ),
        "large": exact_gather(
            lambda s, total, x: spar.all_gather(x, s.group, 1, [len(i) for i in even(total, s)]),
            even,
            _large_total,
        ),
    }
    sums: dict[str, Make] = {
        "uneven": add(lambda s, total, x: spar.reduce_scatter(x, s.group, 1), even),
        "any sizes, one 0": add(
            lambda s, total, x: spar.reduce_scatter(x, s.group, 1, uneven_sizes(s.world)),
            uneven,
            lambda world: sum(uneven_sizes(world)),
        ),
        "bfloat16": add(lambda s, total, x: spar.reduce_scatter(x, s.group, 1), even, dtype=torch.bfloat16),
        "zigzag layout": add(
            lambda s, total, x: spar.reduce_scatter(x, dim=1, layout=zigzagged(s, total)), zigzag
        ),
        "async_op": add(lambda s, total, x: _waited(spar.reduce_scatter(x, s.group, 1, async_op=True)), even),
        "large": add(lambda s, total, x: spar.reduce_scatter(x, s.group, 1), even, _large_total),
    }
    return [
        *(Case("all_gather", variant, make) for variant, make in gathers.items()),
        *(Case("reduce_scatter", variant, make) for variant, make in sums.items()),
    ]


def _splits() -> list[Case]:
    def in_topology(function: Callable[..., Tensor]) -> Call:
        def call(s: Setting, total: int, x: Tensor) -> Tensor:
            with s.topology:
                return function(x, total)

        return call

    def own_sizes(total: int, s: Setting) -> list[int]:
        return [len(i) for i in even(total, s)]

    def unpadded(s: Setting) -> Trial:
        each, padding = 4, min(2, 4 * s.world)
        parts = [[numbers(2, each, 3, seed=rank)] for rank in range(s.world)]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            return [[torch.cat([own[0] for own in inputs], 1)[:, : each * s.world - padding]]] * s.world

        return Trial(
            parts,
            lambda x: spar.gather_forward_split_backward_and_unpad(x, s.group, 1, padding, 1),
            reference,
            OWN,
        )

    def reordered(s: Setting) -> Trial:
        total = multiple(s.world)
        order = torch.cat(zigzag(total, s)).argsort()
        x = numbers(2, total, 3)
        return Trial(
            [[x]] * s.world,
            lambda x: spar.reorder_output(x, s.rank, s.world, s.group, 1),
            lambda inputs: [[own[0].index_select(1, order)] for own in inputs],
            OWN,
        )

    lengths = list(DOCUMENTS)
    return [
        Case(
            "split_forward_gather_backward",
            "uneven",
            split(lambda s, total, x: spar.split_forward_gather_backward(x, s.group, 1), even),
        ),
        Case(
            "gather_forward_split_backward",
            "uneven",
            gather(
                lambda s, total, x: spar.gather_forward_split_backward(x, s.group, 1, own_sizes(total, s)),
                even,
            ),
        ),
        Case(
            "load_balanced_split_forward_gather_backward",
            "zigzag",
            split(
                lambda s, total, x: spar.load_balanced_split_forward_gather_backward(x, s.group, 1),
                zigzag,
                multiple,
            ),
        ),
        Case(
            "load_balanced_gather_forward_split_backward",
            "zigzag",
            gather(
                lambda s, total, x: spar.load_balanced_gather_forward_split_backward(x, s.group, 1),
                zigzag,
                multiple,
            ),
        ),
        Case(
            "packed_data_split_forward_gather_backward",
            "uneven",
            split(
                lambda s, total, x: spar.packed_data_split_forward_gather_backward(x, s.group, lengths, 1),
                packed,
                documents,
            ),
        ),
        Case(
            "packed_data_gather_forward_split_backward",
            "uneven",
            gather(
                lambda s, total, x: spar.packed_data_gather_forward_split_backward(
                    x, spar.cal_split_sizes_multi(lengths, s.world), s.group, 1
                ),
                packed,
                documents,
            ),
        ),
        Case(
            "split_forward_gather_backward_with_cp",
            "ring x ulysses",
            split(
                in_topology(lambda x, total: spar.split_forward_gather_backward_with_cp(x, 1)),
                hybrid,
                multiple,
            ),
        ),
        Case(
            "gather_forward_split_backward_with_cp",
            "ring x ulysses",
            gather(
                in_topology(lambda x, total: spar.gather_forward_split_backward_with_cp(x, 1, total)),
                hybrid,
                multiple,
            ),
        ),
        Case(
            "packed_data_split_forward_gather_backward_with_cp",
            "ring x ulysses",
            split(
                in_topology(
                    lambda x, total: spar.packed_data_split_forward_gather_backward_with_cp(x, 1, lengths)
                ),
                packed_hybrid,
                documents,
            ),
        ),
        Case(
            "packed_data_gather_forward_split_backward_with_cp",
            "ring x ulysses",
            gather(
                in_topology(
                    lambda x, total: spar.packed_data_gather_forward_split_backward_with_cp(x, 1, lengths)
                ),
                packed_hybrid,
                documents,
            ),
        ),
        Case("gather_forward_split_backward_and_unpad", "", unpadded),
        Case("reorder_output", "", reordered),
    ]


def _layouts(s: Setting) -> list[Case]:
    def own_size(s: Setting, total: int) -> int:
        return len(even(total, s)[s.rank])

    kinds: dict[str, tuple[Callable[[Setting, int], spar.SequenceLayout], Indexed, Total]] = {
        "even": (lambda s, total: spar.SequenceLayout.even(total, s.group), even, any_total),
        "zigzag": (lambda s, total: spar.SequenceLayout.zigzag(total, s.group), zigzag, any_total),
        "packed": (lambda s, total: spar.SequenceLayout.packed(DOCUMENTS, s.group), packed, documents),
        "joint": (lambda s, total: spar.SequenceLayout.joint(5, total - 5, s.group), _joint, any_total),
        "from_local": (
            lambda s, total: spar.SequenceLayout.from_local(own_size(s, total), s.group),
            even,
            any_total,
        ),
        "hybrid": (lambda s, total: spar.SequenceLayout.hybrid(total, s.state), hybrid, any_total),
    }
    found = []
    for kind, (layout, index, total) in kinds.items():
        found += [
            Case(f"SequenceLayout.{kind}", way, make)
            for way, make in _ways(layout, index, total).items()
        ]
    return found


def _joint(total: int, s: Setting) -> shards.Index:
    text, image = torch.arange(total).split([5, total - 5])
    return [torch.cat(pair) for pair in zip(text.tensor_split(s.world), image.tensor_split(s.world), strict=True)]


def _ways(
    layout: Callable[[Setting, int], spar.SequenceLayout], index: Indexed, total: Total
) -> dict[str, Make]:
    """Return what each method of a layout must do."""

    def places(s: Setting) -> Trial:
        size = total(s.world)
        return Trial(
            [[]] * s.world,
            lambda: [layout(s, size).index().clone()],
            lambda inputs: [[i] for i in index(size, s)],
            NO_GRADIENT,
        )

    return {
        "index": places,
        "shard": split(lambda s, size, x: layout(s, size).shard(x, 1), index, total, scaled=False),
        "gather": gather(lambda s, size, x: layout(s, size).gather(x, 1), index, total, scaled=False),
        "all_gather": exact_gather(lambda s, size, x: layout(s, size).all_gather(x, 1), index, total),
        "reduce_scatter": add(lambda s, size, x: layout(s, size).reduce_scatter(x, 1), index, total),
    }


def _sequence_group() -> list[Case]:
    """The operations that use the current topology's sequence group."""

    def shard(s: Setting, total: int, x: Tensor) -> Tensor:
        with s.topology:
            return sp_shard(x, 1, validate=False)

    def gathered(s: Setting, total: int, x: Tensor) -> Tensor:
        with s.topology:
            return sp_gather(x, 1)

    def with_padding(s: Setting, total: int, x: Tensor) -> Tensor:
        with s.topology:
            part, padding = sp_shard_with_padding(x, 1)
        own = len(padded(total, s)[s.rank])
        if padding != -total % s.world or bool(part[:, own:].any()):
            raise AssertionError(f"padding is {padding}; expected {-total % s.world} zeros")
        return part[:, :own]

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
            if own["names"] != [f"{s.rank}"] * 2:
                raise AssertionError(f"postprocess returned {own['names']} on rank {s.rank}")
            return [everything["x"], own["x"]]

        def reference(inputs: list[Tensors]) -> list[Tensors]:
            whole = torch.cat([own[0] for own in inputs])
            return [[whole, own[0]] for own in inputs]

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
            whole = torch.nn.functional.pad(ids, (0, padding))
            placed = torch.cat([positions, torch.arange(padding)[None]], 1)
            return [[part, placed] for part in whole.chunk(s.world, 1)]

        return Trial([[ids, positions]] * s.world, run, reference, NO_GRADIENT)

    return [
        Case("sharding.sp_shard", "uneven", split(shard, even)),
        Case("sharding.sp_gather", "uneven", gather(gathered, even)),
        Case("sharding.sp_shard_with_padding", "uneven", split(with_padding, padded)),
        Case("sharding.ShardingValidator", "shard and gather", validated),
        Case("data.SPDataProcessor", "", processed),
        Case("data.sp_slice_and_pad_input", "uneven", sliced),
    ]


def _losses_and_seeds() -> list[Case]:
    def loss(averaged: bool) -> Make:
        def make(s: Setting) -> Trial:
            counts = [3 * rank for rank in range(1, s.world)] + [0 if s.world > 1 else 3]
            losses = [[numbers(1, seed=rank).sum() + rank] for rank in range(s.world)]

            def reference(inputs: list[Tensors]) -> list[Tensors]:
                mean = torch.stack([own[0].double() for own in inputs]).sum() / sum(counts)
                return [[mean.float()]] * s.world

            more = {"averaged_by": s.group} if averaged else {}
            return Trial(
                losses,
                lambda x: spar.mean_loss(x, counts[s.rank], s.group, **more),
                reference,
                OWN,
                (lambda g: g * s.world) if averaged else None,
                tolerance=1e-6,
            )

        return make

    def seeded(s: Setting) -> Trial:
        def draw() -> Tensor:
            with spar.rank_seed(7, s.group):
                return torch.rand(4)

        def run() -> Tensors:
            """Return whether numbers repeat, the generator is restored, and how many ranks' numbers differ."""
            state = torch.get_rng_state()
            first, again = draw(), draw()
            ranks = spar.all_gather(first[None].to(s.device), s.group).unique(dim=0)
            found = (torch.equal(first, again), torch.equal(state, torch.get_rng_state()), len(ranks))
            return [torch.tensor(found)]

        return Trial([[]] * s.world, run, lambda inputs: [[torch.tensor((1, 1, s.world))]] * s.world, NO_GRADIENT)

    return [
        Case("mean_loss", "a rank without tokens", loss(averaged=False)),
        Case("mean_loss", "averaged_by", loss(averaged=True)),
        Case("rank_seed", "", seeded),
    ]
