# SPDX-License-Identifier: Apache-2.0
"""Which method and how many slices take the least time, by the speeds that `spar plan --measure` found."""

from __future__ import annotations

from typing import TypeGuard

import torch

from .._control.speeds import Speeds
from .._control.state import Place
from .._exchange.layouts import Layout, shards
from .._exchange.observers import is_fake
from .._group.group import Group
from ..sizes import share
from .problem import Problem
from .request import Request
from .spans import Keywords, closed


def keys_of_queries(keywords: Keywords) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where intervals of the keys of each query begin and end: two tensors [S, intervals]."""
    first, end = closed(*keywords).ends[0, 0].to(torch.int64).unflatten(1, (-1, 2)).unbind(-1)
    return first, end


def pairs_of(keywords: Keywords, layout: Layout, world: int) -> list[int]:
    """Return the pairs of a query and a key that it attends to, of each rank's queries in a layout."""
    first, end = keys_of_queries(keywords)
    before = [0, *(end - first).sum(1).cumsum(0).tolist()]  # pairs of the queries before each
    return [
        sum([before[run.start + run.size] - before[run.start] for run in runs])
        for runs in shards(layout, world)
    ]


def is_real(group: Group | Place, request: Request) -> TypeGuard[Group]:
    """Whether several ranks exchange the values of a call, outside of compiled code."""
    is_eager = not torch.compiler.is_compiling() and not is_fake(request.q)
    return isinstance(group, Group) and group.world > 1 and is_eager


def spans_hosts(group: Group, device: torch.device) -> bool:
    """Whether the ranks are on several hosts. Collective before the group's first exchange."""
    group.channel("attention", device)
    return len(group.transports[device.type].hosts) > 1


def speeds_of(problem: Problem, request: Request) -> Speeds | None:
    """Return the speeds of a group, which all ranks know alike once it is set up; None: not measured."""
    group, device = problem.group, request.q.device
    if not is_real(group, request):
        return None
    is_far, measured = spans_hosts(group, device), group.measured.get(device.type)
    if measured is None:
        return None
    return measured.far if is_far else measured.near


def received(method: str, problem: Problem, request: Request) -> int:
    """Return the bytes that a rank receives in the exchanges before the kernel, on average."""
    shapes, world, width = problem.shapes, problem.group.world, request.q.size(3)
    of_keys = problem.total_keys * shapes.key_heads * (width + shapes.value_width)
    items = of_keys * (world - 1)
    if method == "ulysses":
        items = (problem.total * shapes.heads * width + of_keys) * (world - 1) // world
    return int(shapes.batch * items // world * request.q.element_size())


def step_of(speeds: Speeds, method: str, problem: Problem, request: Request, slices: int = 1) -> float:
    """Return the seconds of forward and backward on the busiest rank."""
    shapes, world = problem.shapes, problem.group.world
    pairs, sent = pairs_of(problem.keywords, problem.queries, world), received(method, problem, request)
    of_pair = shapes.batch * (request.q.size(3) + shapes.value_width) // 2
    if method == "ulysses":
        back = problem.total * shapes.heads * shapes.value_width * (world - 1) // world**2
        sent += shapes.batch * back * request.q.element_size()
        work = of_pair * share(shapes.heads, world, 0) * sum(pairs)
        return speeds.step(work, 2 * sent, 4, slices)
    is_beside = problem.causal and problem.keys == problem.queries and not problem.packed
    work = of_pair * shapes.heads * max(pairs)
    return speeds.step(work, 2 * sent, 2, slices, 1 / world if is_beside else 0.0)
