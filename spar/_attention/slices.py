# SPDX-License-Identifier: Apache-2.0
"""Overlap: slices of the heads, each of which is exchanged while another one is attended to.

No head depends on another one, so the results have the bits of one exchange of all heads. In backward the
exchanges of gradients are in flight in the same way: `_exchange/work.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._exchange.exchange import Exchange, Tensors
from .._exchange.layouts import by_sizes, pair
from .._exchange.work import Work, start
from .._group.group import Group
from .._transports.channel import WORTH_A_CALL
from ..sizes import share
from .by_time import is_real, received, spans_hosts, speeds_of, step_of
from .kernels import reason_against
from .kernels.kernel import Needs
from .local import Outs, over_sequence
from .methods import Run, as_given, exchange_of_keys, of_heads, over_keys, permuted
from .problem import Problem
from .request import Request

# So many slices at most: a fourth of an exchange is then waited for.
MOST = 4
# Bytes of a slice that a rank receives at least in forward, where no speeds were measured.
LEAST = WORTH_A_CALL
# Bytes of the smallest vector register.
REGISTER = 16


def slices_of(method: str, problem: Problem, request: Request) -> int:
    """Return into how many slices all ranks cut the heads; 1: nothing overlaps.

    A rank has some of its key heads in a slice, with all query heads that attend to them: else the gradients
    of a key head would be summed in another order. On one host an exchange is a copy, which takes its time
    from the kernel.
    """
    group, shapes = problem.group, problem.shapes
    if not is_real(group, request):
        return 1
    ranks = {"ulysses": group.world, "gather": 1}.get(method, 0)
    if ranks == 0 or problem.keys is None or shapes.key_heads % ranks or not _are_apart(problem, request):
        return 1
    if method == "gather" and (problem.causal or problem.packed or problem.mask is not None):
        return 1
    most = min(MOST, shapes.key_heads // ranks)
    if most < 2 or not spans_hosts(group, request.q.device):
        return 1
    speeds = speeds_of(problem, request)
    if speeds is None:
        return max(1, min(most, received(method, problem, request) // LEAST))
    return min(range(1, most + 1), key=lambda count: step_of(speeds, method, problem, request, count))


def _are_apart(problem: Problem, request: Request) -> bool:
    """Whether the result of a head has the same bits, whatever other heads are computed with it.

    Elements of blocks that are merged have not: those that fill a vector register are computed otherwise than
    the last ones. Nor have heads whose rows do not begin at multiples of a register, random numbers, what a
    caller's function computes, and blocks of "blockwise".
    """
    if request.attend is not None or problem.dropout_p or problem.returns_lse or problem.uses_spans:
        return False
    if request.sinks is not None or problem.kernel == "blockwise":
        return False
    if problem.mask is not None and request.mask.requires_grad:
        return False
    q, _, v = permuted(problem, *request[:3])
    if q.size(3) * q.element_size() % REGISTER:
        return False
    return not reason_against("flash", q, v, Needs(problem.mask is not None, problem.softcap > 0))


def in_slices(method: str, problem: Problem, slices: int) -> Run:
    return (_ulysses if method == "ulysses" else _gather)(problem, slices)


def _ulysses(problem: Problem, slices: int) -> Run:
    """As `methods.ulysses`; a slice's output goes back while the next slice is attended to, too."""
    assert problem.keys is not None
    world, head, seq = problem.group.world, problem.shapes.head, problem.shapes.seq
    # Heads are two dims meanwhile: ranks, and the heads of a rank.
    ranks, seq = by_sizes(head, [1] * world), seq + (seq > head)
    layouts = [(seq, *x[1:]) for x in (problem.queries, problem.keys, problem.keys)]
    args = tuple([pair(layout, ranks) for layout in layouts])
    scatter = Exchange("attention", problem.group, args, note=problem.note)
    back = Exchange("attention", problem.group, (pair(ranks, layouts[0]),))
    heads, keys = _counts(problem, world, slices)
    firsts = _firsts(heads, problem.group.rank * sum(heads))
    computes = [over_sequence(problem, *place) for place in zip(firsts, heads, strict=True)]

    def attend(request: Request) -> Outs:
        counted = zip(request[:3], (heads, keys, keys), strict=True)
        cut = [x.unflatten(head, (world, -1)).split(counts, head + 1) for x, counts in counted]
        coming = _started(scatter, list(zip(*cut, strict=True)))
        going = []
        for first, count, compute in zip(firsts, heads, computes, strict=True):
            tensors = [x.flatten(head, head + 1) for x in _complete(*coming.pop(0))]
            outs = compute(permuted(problem, *tensors), of_heads(request, first, count))
            going.append(start(back, [as_given(problem, outs)[0].unflatten(head, (1, -1))]))
        parts = [_complete(*each)[0] for each in going]
        return (torch.cat(parts, head + 1).flatten(head, head + 1),)

    return _reported(problem, 2 * slices, attend)


def _gather(problem: Problem, slices: int) -> Run:
    """As `methods.gather` of all keys, to all of which each query attends."""
    exchange, compute = exchange_of_keys(problem), over_keys(problem)
    head, (heads, keys) = problem.shapes.head, _counts(problem, 1, slices)

    def attend(request: Request) -> Outs:
        queries = request.q.split(heads, head)
        cut = zip(request.k.split(keys, head), request.v.split(keys, head), strict=True)
        coming = _started(exchange, list(cut))
        parts: list[Tensor] = []
        for q in queries:
            k, v = _complete(*coming.pop(0))
            parts += as_given(problem, compute(permuted(problem, q, k, v), request))
        return (torch.cat(parts, head),)

    return _reported(problem, slices, attend)


def _started(exchange: Exchange, slices: Sequence[Tensors]) -> list[tuple[Tensors, Work]]:
    """Start the exchange of each slice, once the first one is over.

    In that all ranks see that a rank failed before it decided how many slices there are, and make no more.
    """
    outputs, work = start(exchange, slices[0])
    work.wait()
    return [(outputs, work), *[start(exchange, tensors) for tensors in slices[1:]]]


def _reported(problem: Problem, exchanges: int, attend: Run) -> Run:
    """Report what ends a call behind its first exchange once for each other one, all of which peers start."""
    group = problem.group
    assert isinstance(group, Group)

    def run(request: Request) -> Outs:
        before = group.count()
        try:
            return attend(request)
        except Exception as error:
            made = group.count() - before
            for _ in range(exchanges - made if made > 1 else 0):
                group.fail("attention", request.q.device.type, error)
            raise

    return run


def _counts(problem: Problem, ranks: int, slices: int) -> tuple[list[int], list[int]]:
    """Return how many query heads and key heads of a rank each slice has."""
    keys = [share(problem.shapes.key_heads // ranks, slices, i) for i in range(slices)]
    return [problem.shapes.heads // problem.shapes.key_heads * count for count in keys], keys


def _firsts(counts: Sequence[int], first: int) -> list[int]:
    return list(itertools.accumulate(counts[:-1], initial=first))


def _complete(outputs: Tensors, work: Work) -> Tensors:
    work.wait()
    return outputs
