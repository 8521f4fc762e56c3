# SPDX-License-Identifier: Apache-2.0
"""Cases of all_to_all, all_gather and reduce_scatter. A call takes the setting, the total and the inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import spar

from ..shards import Make, add, even, exact_gather, multiple, swap, uneven, uneven_sizes, zigzag
from ..trial import NO_GRADIENT, Case, Setting

LARGE = 1 << 20  # elements of the whole tensor where a transfer is large


def all_to_all_cases() -> list[Case]:
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


def collective_cases() -> list[Case]:
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


def _large_total(world: int) -> int:
    return LARGE // 6


def _without_gradient(make: Make) -> Make:
    return lambda s: dataclasses.replace(make(s), gradient=NO_GRADIENT)


def _waited(exchanged: tuple[Any, spar.Work]) -> Any:
    exchanged[1].wait()
    return exchanged[0]
