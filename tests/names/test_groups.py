# SPDX-License-Identifier: Apache-2.0
"""Group arguments and bad arguments: each error states what was expected."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.reference import assert_same

import spar
from spar._group.registry import group_at, group_of, place_of

Group = dist.ProcessGroup
ALL = 7


def check_group_arguments(rank: int, world: int, group: Group) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (ALL,), mesh_dim_names=("sp",))
    plane = init_device_mesh("cpu", (1, ALL), mesh_dim_names=("dp", "sp"))
    x = torch.arange(3.0) + 3 * rank
    expected = torch.arange(3.0 * ALL)
    for argument in (group, group.group_name, None, line, (plane, "sp"), (plane, 1)):
        assert_same(spar.gather_forward_split_backward(x, argument, 0), expected, argument)
    assert place_of(group).handle == place_of(group).handle
    with pytest.raises(ValueError, match="DeviceMesh of 2 dims"):
        spar.all_to_all(torch.zeros(2, 2), plane, 0, 1)
    with pytest.raises(ValueError, match="no-such-group"):
        spar.all_to_all(torch.zeros(2, 2), "no-such-group", 0, 1)
    with pytest.raises(TypeError, match=r"process_group is 0.5 \(a float\); expected a ProcessGroup"):
        spar.all_to_all(torch.zeros(2, 2), 0.5, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"process_group is 2 \(an int\);.*forget the group argument\?"):
        spar.all_to_all(torch.zeros(2, 2), 2, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"process_group is \(1, 2\) \(a tuple\)"):
        spar.all_to_all(torch.zeros(2, 2), (1, 2), 1)  # type: ignore[arg-type]
    one = torch.zeros(())
    wrong: dict[str, Callable[[Any], Any]] = {
        "all_to_all: group is": lambda wrong: spar.all_to_all(torch.zeros(2, 2), group=wrong),
        "all_gather: group is": lambda wrong: spar.all_gather(one[None], wrong),
        "mean_loss: averaged_by is": lambda wrong: spar.mean_loss(one, 1, averaged_by=wrong),
    }
    for text, call in wrong.items():
        for value in (0.5, "no-such-group", plane):
            if value is not plane or "averaged_by" not in text:  # whose meshes may have many dims
                with pytest.raises((TypeError, ValueError), match=text):
                    call(value)
    inner = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match=f"global rank {rank} is not among its ranks"):
            spar.all_to_all(torch.zeros(2, 2), inner, 0, 1)
    assert spar.transport(group).world_size == ALL
    assert spar.transport(group).name == os.environ["SPAR_TRANSPORT"]
    assert spar.transport(group).reason


def test_group_arguments(ranks: Ranks) -> None:
    ranks(ALL, check_group_arguments)


def test_group_none_requires_init_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        spar.all_to_all(torch.zeros(2, 2), None, 0, 1)
    with pytest.raises(ValueError, match="init_process_group"):
        spar.transport()


def check_handles(rank: int, world: int, group: Group) -> None:
    first = dist.new_group(list(range(ALL)), group_desc="again")
    handle = place_of(first).handle
    assert group_at(handle).process_group is first
    assert spar.transport(first).name is None
    dist.barrier()  # another rank may still be connecting to it
    dist.destroy_process_group(first)
    del first
    gc.collect()
    with pytest.raises(spar.SparError, match="destroyed"):
        group_at(handle)
    again = dist.new_group(list(range(ALL)), group_desc="again")
    assert place_of(again).handle > handle


def test_handles_are_invalid_after_destroy_and_never_reused(ranks: Ranks) -> None:
    ranks(ALL, check_handles)


def started(x: torch.Tensor, group: Group) -> torch.Tensor:
    output, work = spar.all_to_all(x, group, 1, 0, async_op=True)
    work.wait()
    return output


def attended(method: str) -> Callable[[torch.Tensor, Group], torch.Tensor]:
    def call(x: torch.Tensor, group: Group) -> torch.Tensor:
        qkv = x.view(1, 2, ALL, 1).expand(1, 2, ALL, 4)
        return spar.attention(qkv, qkv, qkv, spar.SequenceLayout.even(2 * ALL, group), method=method)

    return call


RECORDED: dict[str, Callable[[torch.Tensor, Group], torch.Tensor]] = {
    "all_to_all": lambda x, group: spar.all_to_all(x, group, 1, 0),
    "all_to_all of two": lambda x, group: spar.all_to_all([x, x], group, 1, 0)[1],
    "async all_to_all": started,
    "gather": lambda x, group: spar.gather_forward_split_backward(x, group, 0),
    "split": lambda x, group: spar.split_forward_gather_backward(x, group, 1),
    "all_gather": lambda x, group: spar.all_gather(x, group, 0),
    "reduce_scatter": lambda x, group: spar.reduce_scatter(x, group, 1),
    **{f"{method} attention": attended(method) for method in ("ulysses", "gather", "ring")},
}


def check_destroyed(rank: int, world: int, group: Group) -> None:
    """torch's threads of a group that is alive when Python exits can abort the process."""
    for name, call in RECORDED.items():
        fresh = dist.new_group(list(range(ALL)), group_desc="destroyed")
        seen = weakref.ref(fresh)
        y = call(torch.zeros(2, ALL, requires_grad=True), fresh)
        dist.barrier()
        dist.destroy_process_group(fresh)
        del fresh
        gc.collect()
        assert seen() is None, name
        if name == "gather":  # its gradient is a part of the rank's own: nothing is exchanged
            y.sum().backward()
            continue
        with pytest.raises(spar.SparError, match="was destroyed; make each call, and its backward, before"):
            y.sum().backward()


def test_an_output_does_not_keep_its_group(ranks: Ranks) -> None:
    ranks(ALL, check_destroyed)


def check_kept_group(rank: int, world: int, group: Group) -> None:
    """Shared memory would go on to serve a destroyed group; gloo serves some calls, and hangs in others."""
    members, x = list(range(ALL)), torch.zeros(2, ALL, requires_grad=True)
    destroyed = pytest.raises(spar.SparError, match=rf"on rank {rank}: process group '\S+' was destroyed;")
    for name, call in RECORDED.items():
        kept = dist.new_group(members)
        outputs = [call(x, kept) for _ in range(2)]  # the second one repeats what the first one decided
        dist.barrier()
        dist.destroy_process_group(kept)
        if name != "split":  # the others exchange in forward, and all but a gather in backward
            with destroyed as caught:
                call(x, kept)
            assert (caught.value.group, caught.value.rank) == (kept.group_name, rank)
        if name != "gather":
            with destroyed:
                outputs[0].sum().backward()
    for use in (lambda kept: None, spar.transport, lambda kept: (spar.init(kept), spar.close(kept))):
        kept = dist.new_group(members)
        use(kept)
        dist.barrier()
        dist.destroy_process_group(kept)
        for first in (spar.init, lambda kept: spar.all_gather(x, kept, 0)):
            with destroyed:
                first(kept)
        spar.close(kept)
        with destroyed:
            spar.init(kept)


def test_kept_group_raises_after_destroy(ranks: Ranks) -> None:
    ranks(ALL, check_kept_group)


def check_peer_of_destroyed(rank: int, world: int, group: Group) -> None:
    """A rank that did not destroy the group is told by the call of one that did."""
    kept = dist.new_group(list(range(ALL)))
    output, work = spar.all_to_all(torch.zeros(ALL, ALL), kept, 1, 0, async_op=True)
    if rank == 0:
        dist.destroy_process_group(kept)
    work.wait()  # it was in flight before
    dist.barrier()
    if rank == 0:
        with pytest.raises(spar.SparError, match="was destroyed"):
            spar.all_gather(output, kept, 0)
    elif spar.transport(kept).name == "shm":  # over torch, gloo ends the call at the timeout
        with pytest.raises(spar.GroupBrokenError, match="closed the group"):
            spar.all_gather(output, kept, 0)
    dist.barrier()


def test_peers_raise_if_a_rank_uses_a_destroyed_group(ranks: Ranks) -> None:
    ranks(ALL, check_peer_of_destroyed)


# ---- bad arguments: raised before anything is sent ----

RANK, TOTALS = "{rank}", "{totals}"  # filled in by check_bad_arguments
CUMULATIVE = "These look like cu_seqlens, which are cumulative; pass the lengths: ["
BAD: list[tuple[type[Exception], str, str]] = [
    (ValueError, "scatter_dim is 4; expected -4 to 3", "spar.all_to_all(x, group, 4, 1)"),
    (ValueError, "gather_dim is -5", "spar.all_to_all(x, group, 2, -5)"),
    (ValueError, "scatter_dim is 1 and gather_dim is 1", "spar.all_to_all(x, group, 1, 1)"),
    (ValueError, "scatter_dim is -3 and gather_dim is 1", "spar.all_to_all(x, group, -3, 1)"),
    (ValueError, "gather_size is 100", "spar.all_to_all(x, group, 2, 1, 100)"),
    (ValueError, "gather_size is -1", "spar.all_to_all(x, group, 2, 1, -1)"),
    (TypeError, "gather_size is 2.5", "spar.all_to_all(x, group, 2, 1, 2.5)"),
    (TypeError, "scatter_dim is '2'", "spar.all_to_all(x, group, '2', 1)"),
    (TypeError, "scatter_dim is True", "spar.all_to_all(x, group, True, 2)"),
    (TypeError, "input_[0] is a int; expected a tensor", "spar.all_to_all([1], group)"),
    (ValueError, "at least one dim", "spar.split_forward_gather_backward(torch.tensor(1.0), group, 0)"),
    (TypeError, "torch.sparse_coo", "spar.all_to_all(torch.eye(2).to_sparse(), group, 0, 1)"),
    (TypeError, "quantized tensor of torch.qint8", "gather(quantized, group, 0)"),
    (ValueError, "dim is 9", "spar.split_forward_gather_backward(x, group, 9)"),
    (ValueError, "split_sizes is [1, 2]; expected sizes that sum to 8", "split(x, group, 1, (1, 2))"),
    (ValueError, "split_sizes is 8; expected a list, tuple or 1-D int tensor", "split(x, group, 1, 8)"),
    (TypeError, "split_sizes is a tensor of torch.float32", "split(x, group, 1, torch.ones(2))"),
    (ValueError, "split_sizes is [True, 7]", "split(x, group, 1, [True, 7])"),
    (ValueError, "split_sizes is [8]", "spar.split_forward_gather_backward(x, group, 1, [8])"),
    (ValueError, "split_sizes is [9, -1]", "spar.split_forward_gather_backward(x, group, 1, [9, -1])"),
    (ValueError, "split_sizes is [4, 5]; expected sizes that sum to 8", "split(x, group, 1, [4, 5])"),
    (ValueError, "gather_sizes is [8, 7.0]", "gather(x, group, 1, [8, 7.0])"),
    (ValueError, f"gather_sizes is [7, 7]; expected 8 at index {RANK}", "gather(x, group, 1, [7, 7])"),
    (ValueError, "Did you split the local size?", "gather(x, group, 1, [4, 4])"),
    (
        ValueError,
        f"gather_size is 8; expected {TOTALS}, as rank {RANK} of 2 holds 8 of dim 1. "
        "Did you pass the local size?",
        "spar.all_to_all(x, group, 2, 1, 8)",
    ),
    (
        ValueError,
        f"expected lengths that sum to 8, the size of dim 1. {CUMULATIVE}",
        "packed(x, group, [0, 3, 8], 1)",
    ),
    (
        ValueError,
        CUMULATIVE,
        "packed_gather(x, spar.cal_split_sizes_multi([0, 3, 15 + 2 * rank], 2), group, 1)",
    ),
    (
        TypeError,
        "input_ is a DTensor; expected a plain tensor; pass its .to_local()",
        "gather(dtensor, group, 0)",
    ),
    (ValueError, "grad_scale is 'sideways'", "gather(x, group, 1, None, 'sideways')"),
    (TypeError, "grad_scale is True", "gather(x, group, 1, None, True)"),
    (TypeError, "grad_scale is [1]", "gather(x, group, 1, None, [1])"),
]


def check_bad_arguments(rank: int, world: int, group: Group) -> None:
    from torch.distributed.tensor import DeviceMesh, DTensor

    names: dict[str, Any] = {
        "spar": spar,
        "torch": torch,
        "group": group,
        "x": torch.zeros(2, 8, 4, 2),
        "split": spar.split_forward_gather_backward,
        "gather": spar.gather_forward_split_backward,
        "packed": spar.packed_data_split_forward_gather_backward,
        "packed_gather": spar.packed_data_gather_forward_split_backward,
        "rank": rank,
        "dtensor": DTensor.from_local(torch.ones(2), DeviceMesh("cpu", list(range(ALL)))),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    }
    totals = ["15 or 16", "16 or 17"][rank]
    for kind, text, call in BAD:
        text = text.replace(RANK, str(rank)).replace(TOTALS, totals)
        with pytest.raises(kind) as caught:
            eval(call, names)
        assert text in str(caught.value), (call, str(caught.value))
        assert f"on rank {rank} of {world}" in str(caught.value)
    x = torch.ones(2) * rank
    assert_same(spar.gather_forward_split_backward(x, group, 0), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_bad_arguments_name_value_rank_and_expectation(ranks: Ranks) -> None:
    """All ranks raise, and later calls match. test_local_failures.py covers failures of one rank."""
    ranks(2, check_bad_arguments)


# ---- sizes of any int type ----


def check_int_types(rank: int, world: int, group: Group) -> None:
    x, sizes = torch.arange(7.0), [4, 3]
    split, gather = spar.split_forward_gather_backward, spar.gather_forward_split_backward
    packed, whole = (
        spar.packed_data_split_forward_gather_backward,
        spar.packed_data_gather_forward_split_backward,
    )
    as_numpy = [numpy.int64(4), numpy.uint8(3)]
    for given in (sizes, tuple(sizes), torch.tensor(sizes, dtype=torch.int32), as_numpy):
        own = split(x, group, numpy.int64(0), given)
        assert_same(own, x.split(sizes)[rank])
        assert_same(gather(own, group, numpy.int8(0), given), x)
        own = packed(x, group, given)
        assert own.shape == (4 - rank,)
        table = spar.cal_split_sizes_multi(given, 2)
        for rows in (table, table.tolist(), tuple(map(tuple, table.tolist())), list(table)):
            assert_same(whole(own, rows, group), x)
    square = torch.zeros(2, 4, 4)
    assert spar.all_to_all(square, group, numpy.int64(2), numpy.int64(1), numpy.int64(8)).shape == (2, 8, 2)
    y = spar.gather_forward_split_backward_and_unpad(x, group, 0, numpy.int64(1), numpy.int64(0))
    assert y.shape == (13,)
    assert_same(spar.reorder_output(torch.tensor([0, 3, 1, 2]), 0, numpy.int64(2), None), torch.arange(4))


def test_numpy_ints_tuples_and_tensors_as_sizes(ranks: Ranks) -> None:
    ranks(2, check_int_types)


# ---- meta tensors ----


def check_meta(rank: int, world: int, group: Group) -> None:
    spar.init(group)
    calls, before = group_of(group).calls, spar.memory_stats()
    x = torch.zeros(4, 6, device="meta", requires_grad=True)
    y = spar.all_to_all(x, group, 1, 0)
    assert (y.shape, y.device.type) == ((8, 3), "meta")
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.is_meta
    own = spar.packed_data_split_forward_gather_backward(x, group, [1, 3])
    assert own.shape == (3 - 2 * rank, 6)
    assert spar.packed_data_gather_forward_split_backward(own, [[1, 2], [0, 1]], group).shape == x.shape
    assert spar.load_balanced_gather_forward_split_backward(x, group).shape == (8, 6)
    with pytest.raises(ValueError, match="gather_size is 4"):
        spar.all_to_all(x, group, 1, 0, 4)  # an error is not reported to the peers either
    assert (group_of(group).calls, spar.memory_stats()) == (calls + 4, before)


def test_meta_tensors_infer_shapes_without_communication(ranks: Ranks) -> None:
    ranks(2, check_meta)
