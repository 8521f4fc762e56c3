"""Group arguments, bad arguments, ranks that disagree: each ends in an error that says what was expected."""

from __future__ import annotations

import gc
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import TRANSPORTS, Ranks
from reference import assert_same, rule

import spar
from spar.groups import by_handle, place_of

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
    inner = dist.new_group([0, 1])
    with pytest.raises(TypeError, match=r"process_group is 2 \(an int\);.*forget the group argument\?"):
        spar.all_to_all(torch.zeros(2, 2), 2, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"process_group is \(1, 2\) \(a tuple\)"):
        spar.all_to_all(torch.zeros(2, 2), (1, 2), 1)  # type: ignore[arg-type]
    if rank > 1:
        with pytest.raises(ValueError, match=f"global rank {rank} is not among its ranks"):
            spar.all_to_all(torch.zeros(2, 2), inner, 0, 1)
    assert spar.transport(group).world_size == ALL
    assert spar.transport(group).name == os.environ["SPAR_TRANSPORT"]
    assert spar.transport(group).reason


def test_group_arguments(ranks: Ranks) -> None:
    ranks(ALL, check_group_arguments)


def test_none_needs_torch_distributed() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        spar.all_to_all(torch.zeros(2, 2), None, 0, 1)
    with pytest.raises(ValueError, match="init_process_group"):
        spar.transport()


def check_handles(rank: int, world: int, group: Group) -> None:
    first = dist.new_group(list(range(ALL)), group_desc="again")
    handle = place_of(first).handle
    assert by_handle(handle).group is first
    assert spar.transport(first).name is None
    dist.barrier()  # another rank may still be connecting to it
    dist.destroy_process_group(first)
    del first
    gc.collect()
    with pytest.raises(spar.SparError, match="destroyed"):
        by_handle(handle)
    again = dist.new_group(list(range(ALL)), group_desc="again")
    assert place_of(again).handle > handle


def test_handles_die_with_their_group_and_are_never_used_again(ranks: Ranks) -> None:
    ranks(ALL, check_handles)


# ---- bad arguments: raised before anything is sent ----

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
    (TypeError, "input_ is a list", "spar.all_to_all([1], group)"),
    (ValueError, "at least one dim", "spar.split_forward_gather_backward(torch.tensor(1.0), group, 0)"),
    (TypeError, "torch.sparse_coo", "spar.all_to_all(torch.eye(2).to_sparse(), group, 0, 1)"),
    (TypeError, "quantized tensor of torch.qint8", "gather(quantized, group, 0)"),
    (ValueError, "dim is 9", "spar.split_forward_gather_backward(x, group, 9)"),
    (ValueError, "split_sizes is (1, 2)", "spar.split_forward_gather_backward(x, group, 1, (1, 2))"),
    (ValueError, "split_sizes is [8]", "spar.split_forward_gather_backward(x, group, 1, [8])"),
    (ValueError, "split_sizes is [9, -1]", "spar.split_forward_gather_backward(x, group, 1, [9, -1])"),
    (ValueError, "split_sizes is [4, 5]; expected sizes that sum to 8", "split(x, group, 1, [4, 5])"),
    (ValueError, "gather_sizes is [8, 7.0]", "gather(x, group, 1, [8, 7.0])"),
    (ValueError, "gather_sizes is [7, 7]; expected 8 for this rank", "gather(x, group, 1, [7, 7])"),
    (ValueError, "grad_scale is 'sideways'", "gather(x, group, 1, None, 'sideways')"),
    (TypeError, "grad_scale is True", "gather(x, group, 1, None, True)"),
    (TypeError, "grad_scale is [1]", "gather(x, group, 1, None, [1])"),
]


def check_bad_arguments(rank: int, world: int, group: Group) -> None:
    names: dict[str, Any] = {
        "spar": spar,
        "torch": torch,
        "group": group,
        "x": torch.zeros(2, 8, 4, 2),
        "split": spar.split_forward_gather_backward,
        "gather": spar.gather_forward_split_backward,
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
    }
    for kind, text, call in BAD:
        with pytest.raises(kind) as caught:
            eval(call, names)
        assert text in str(caught.value), (call, str(caught.value))
        assert f"on rank {rank} of {world}" in str(caught.value)
    x = torch.ones(2) * rank
    assert_same(spar.gather_forward_split_backward(x, group, 0), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_bad_arguments_name_value_rank_and_expectation(ranks: Ranks) -> None:
    """All ranks fail alike, and the group stays in step. One that fails alone: test_local_failures.py."""
    ranks(2, check_bad_arguments)


# ---- ranks that disagree ----


def disagreements(rank: int, group: Group, odd: int) -> dict[str, tuple[Any, str]]:
    """Calls that differ on rank `odd`, and what the message must show of it."""
    strange = rank == odd
    x, sizes = torch.zeros(4, 12, 12), rule(12, 3)
    half = x.narrow(1, 0, sizes[rank])
    gather, all_to_all = spar.gather_forward_split_backward, spar.all_to_all
    return {
        "shape": (lambda: all_to_all(torch.zeros(4 + strange, 4, 12), group, 2, 1), "[5, 12, 12]"),
        "local extent": (lambda: gather(torch.zeros(4 + strange), group, 0), "[5, 5, 5]"),
        "dtype": (
            lambda: gather(half.to(torch.int32 if strange else torch.float32), group, 1),
            "torch.int32",
        ),
        "dims": (lambda: all_to_all(torch.zeros(4, 4, 4, 4), group, 3 if strange else 2, 1), "dim 3"),
        "number of dims": (lambda: gather(half[None] if strange else half, group, 0), "[3, 4, 4, 12]"),
        "op": (lambda: gather(half, group, 1) if strange else all_to_all(half, group, 2, 1), "gather"),
        "sizes": (
            lambda: gather(half, group, 1, [4, 4, 5] if strange and rank < 2 else [4, 4, 4]),
            "[4, 4, 5]",
        ),
        "requires_grad": (
            lambda: gather(half.clone().requires_grad_(strange), group, 1),
            "gradient recorded",
        ),
    }


def check_disagreement(rank: int, world: int, group: Group, what: str, odd: int) -> str:
    call, shown = disagreements(rank, group, odd)[what]
    with pytest.raises(spar.MismatchError) as caught:
        call()
    error = caught.value
    assert shown in str(error), str(error)
    assert (error.rank, error.ranks, error.group) == (rank, (odd,), group.group_name)
    assert error.op in ("gather_forward_split_backward", "all_to_all")
    assert str(error).startswith(error.op)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks, again.call) == (str(error), error.ranks, error.call)
    x = torch.full((1,), float(rank))
    assert_same(
        spar.gather_forward_split_backward(x, group, 0), torch.arange(float(world)), "usable after it"
    )
    return str(error).split(":", 1)[1]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", disagreements(0, None, 1))  # type: ignore[arg-type]
def test_mismatch_on_all_ranks(ranks: Ranks, what: str, odd: int) -> None:
    texts = ranks(3, check_disagreement, what, odd)
    assert len(set(texts)) == 1, "every rank shows the same"


# ---- settings that differ between ranks, or cannot be read ----


def check_settings(rank: int, world: int, group: Group, variable: str, values: list[str], text: str) -> None:
    fresh = dist.new_group(list(range(ALL)))
    before = os.environ.pop("SPAR_TRANSPORT")
    os.environ[variable] = values[min(rank, 1)]
    try:
        with pytest.raises(ValueError) as caught:
            spar.gather_forward_split_backward(torch.zeros(1), fresh, 0)
        assert text in str(caught.value), str(caught.value)
    finally:
        del os.environ[variable]
        os.environ["SPAR_TRANSPORT"] = before


@pytest.mark.parametrize(
    ("variable", "values", "text"),
    [
        ("SPAR_TRANSPORT", ["torch", "^torch"], "'torch' on rank 0 and '^torch' on rank 1"),
        ("SPAR_TRANSPORT", ["carrier-pigeon"] * 2, "known: "),
        ("SPAR_CHECK", ["1", "0"], "SPAR_CHECK is '1' on rank 0 and '0' on rank 1"),
        ("SPAR_CHECK", ["auto", "maybe"], "rank 1: SPAR_CHECK is 'maybe'; known: auto|0|1"),
        ("SPAR_TIMEOUT", ["30", "soon"], "rank 1: SPAR_TIMEOUT is 'soon'; expected a number of seconds"),
        *(
            ("SPAR_TIMEOUT", ["30", value], f"rank 1: SPAR_TIMEOUT is '{value}'; expected a number")
            for value in ("9e9", "1e10", "1e15", "0x10")
        ),
        *(
            ("LOCAL_WORLD_SIZE", ["1", value], f"rank 1: LOCAL_WORLD_SIZE is '{value}'; expected an integer")
            for value in ("abc", "0", "4x")
        ),
        ("SPAR_PLAN_CACHE", ["8", "-8"], "rank 1: SPAR_PLAN_CACHE is '-8'"),
        ("SPAR_LOG", ["loud"] * 2, "known: off|warning|info|debug"),
    ],
)
def test_settings_fail_on_all_ranks(ranks: Ranks, variable: str, values: list[str], text: str) -> None:
    ranks(ALL, check_settings, variable, values, text)


def check_forced(rank: int, world: int, group: Group, transports: list[str]) -> None:
    """Each transport can be forced; each can be excluded, and another serves, or none is left."""
    before = os.environ["SPAR_TRANSPORT"]
    os.environ["SPAR_CHECK"] = "0"
    try:
        for name in transports:
            fresh = dist.new_group(list(range(ALL)))
            os.environ["SPAR_TRANSPORT"] = name
            assert spar.gather_forward_split_backward(torch.zeros(1), fresh, 0).shape == (ALL,)
            assert spar.transport(fresh).name == name
            fresh = dist.new_group(list(range(ALL)))
            os.environ["SPAR_TRANSPORT"] = f"^{name}"
            if len(transports) == 1:
                with pytest.raises(spar.TransportError, match="leaves no transport"):
                    spar.gather_forward_split_backward(torch.zeros(1), fresh, 0)
            else:
                spar.gather_forward_split_backward(torch.zeros(1), fresh, 0)
                assert spar.transport(fresh).name not in (None, name)
    finally:
        del os.environ["SPAR_CHECK"]
        os.environ["SPAR_TRANSPORT"] = before


def test_forced_and_excluded_transports(ranks: Ranks) -> None:
    ranks(ALL, check_forced, TRANSPORTS)
