# SPDX-License-Identifier: Apache-2.0
"""The orders in which cp may have the ranks of 2 ring x 2 ulysses ranks, and who makes them so."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import init_device_mesh

from spar import parallel_state as ps
from spar.parallel_state import ParallelState


def _mesh(*names: str) -> ParallelState:
    return ps.take_over_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def _coordinators() -> ParallelState:
    ps.init_distributed_environment()
    ps.initialize_model_parallel(ulysses_degree=2, ring_degree=2)
    return ps.get_parallel_state()


# by maker: the state, and the layout's number of inner ranks, negative where these are neighbours
ORDERS: dict[str, tuple[Callable[[], ParallelState], int]] = {
    "init_parallel_state": (
        lambda: ps.init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2),
        2,
    ),
    "mesh of ulysses x ring": (lambda: _mesh("ulysses", "ring"), 2),
    "mesh of ring x ulysses": (lambda: _mesh("ring", "ulysses"), -2),
    "initialize_model_parallel": (_coordinators, -2),
}
