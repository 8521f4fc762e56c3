# SPDX-License-Identifier: Apache-2.0
"""The choice of a transport, a pure function of the peer info."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

import conftest
import pytest
from helpers import core, tables
from helpers.core import CoreError, Status
from helpers.fault_cases import FAULTS

from spar import _C
from spar._transports import CHANNELS

pytestmark = pytest.mark.quick

IN_C = [name for name, *_ in _C.traffic()]
TRANSPORTS = ["local", *IN_C]

# ---- The choice of a transport ----------------------------------------------------------------------------


class Choice:
    def __init__(
        self, info: Sequence[core.PeerInfo], device: str = "cpu", refused: core.Refusal | None = None
    ) -> None:
        chosen = core.Choice()
        array = (core.PeerInfo * len(info))(*info)
        core.check(core.library().spar_choose(array, len(info), 0, device.encode(), refused, byref(chosen)))
        self.name = chosen.transport.contents.name.decode()
        self.reason = chosen.reason.decode()
        self.rejected = {
            chosen.rejected_names[i].decode(): chosen.rejected_reasons[i].value.decode()
            for i in range(chosen.rejected)
        }


def make_info(count: int = 3, **fields: object) -> list[core.PeerInfo]:
    """Make peer info, the same on all ranks; 'local' can serve if local_world is set."""
    return [
        core.PeerInfo(**{"version": b"1", "check": b"auto", "no_shm": b"no socket", **fields})
        for _ in range(count)
    ]


def expect_no_choice(info: Sequence[core.PeerInfo], status: Status, *words: str) -> None:
    texts = set()
    for _ in info:  # every rank computes the same
        with pytest.raises(CoreError) as caught:
            Choice(info)
        assert caught.value.status == status, caught.value
        assert all(word in caught.value.text for word in words), caught.value
        texts.add(caught.value.text)
    assert len(texts) == 1


def test_first_transport_that_can_serve_is_chosen() -> None:
    choice = Choice(make_info(local_world=5))
    assert (choice.name, choice.rejected) == ("local", {})
    assert "3 ranks" in choice.reason


def test_rejected_transports_are_reported_with_reasons() -> None:
    apart = make_info(local_world=5)
    apart[2].local_world = 6
    choice = Choice(apart)
    rejected = {"local": "rank 2 is not in rank 0's process", "shm": "rank 0: no socket"}
    assert (choice.name, choice.rejected) == ("tcp", rejected)
    choice = Choice(apart, refused=core.Refusal(1, (b"tcp",), (b"rank 1: no route",)))
    assert choice.name == "torch" and "any ProcessGroup" in choice.reason
    rejected |= dict.fromkeys(("push", "nccl"), "for cuda tensors alone")
    rejected |= {"tcp": "rank 1: no route"}
    assert choice.rejected == rejected


def test_transport_with_failed_set_up_is_skipped() -> None:
    refused = core.Refusal(1, (b"local",), (b"rank 1: no memory",))
    choice = Choice(make_info(local_world=5), refused=refused)
    assert (choice.name, choice.rejected["local"]) == ("tcp", "rank 1: no memory")
    forced = make_info(local_world=5, transport=b"local")
    with pytest.raises(CoreError, match="SPAR_TRANSPORT=local cannot serve: rank 1: no memory"):
        Choice(forced, refused=refused)


def test_shm_requires_cpu_tensors_and_one_process_per_rank() -> None:
    ranks = make_info()
    for rank, own in enumerate(ranks):
        own.endpoint = core.Endpoint(100 + rank, 7 + rank)
    assert Choice(ranks).name == "shm"
    assert Choice(ranks, "cuda").rejected["shm"] == "for cpu tensors alone"
    ranks[2].endpoint = ranks[1].endpoint
    assert Choice(ranks).rejected["shm"] == "ranks 1 and 2 are one process"


def test_tcp_requires_cpu_tensors_and_linux_on_each_rank() -> None:
    ranks = make_info()
    assert Choice(ranks).name == "tcp"
    assert Choice(ranks, "cuda").rejected["tcp"] == "for cpu tensors alone"
    ranks[1].no_tcp = b"connections between ranks need Linux"
    choice = Choice(ranks)
    assert (choice.name, choice.rejected["tcp"]) == ("torch", "rank 1: connections between ranks need Linux")


def test_nccl_requires_cuda_on_each_rank() -> None:
    ranks = make_info()
    assert Choice(ranks, "cuda").name == "nccl"
    ranks[1].no_nccl = b"no libcuda: libcuda.so.1: cannot open"
    choice = Choice(ranks, "cuda")
    assert choice.name == "torch"
    assert choice.rejected["nccl"] == "rank 1: no libcuda: libcuda.so.1: cannot open"
    ctypes.memset(
        ctypes.addressof(ranks[1]) + core.PeerInfo.no_nccl.offset, ord("x"), core.PeerInfo.no_nccl.size
    )
    assert Choice(ranks, "cuda").rejected["nccl"] == "rank 1: " + 95 * "x"


def test_push_requires_cuda_on_each_rank_of_one_host() -> None:
    ranks = make_info()
    for rank, own in enumerate(ranks):
        own.endpoint = core.Endpoint(100 + rank, 7 + rank)
    assert Choice(ranks, "cuda").name == "push"
    refused = core.Refusal(1, (b"push",), (b"wrong words from rank 1",))
    assert Choice(ranks, "cuda", refused=refused).name == "nccl"
    ranks[2].host[0] = 5
    choice = Choice(ranks, "cuda")
    assert (choice.name, choice.rejected["push"]) == ("nccl", "ranks 0 and 2 are on different hosts")
    ranks[2].host[0] = 0
    ranks[1].no_push = b"no libcuda: libcuda.so.1: cannot open"
    assert Choice(ranks, "cuda").rejected["push"] == "rank 1: no libcuda: libcuda.so.1: cannot open"
    many = (core.PeerInfo * 65)(*[ranks[0]] * 65)
    for rank, own in enumerate(many):
        own.endpoint = core.Endpoint(100 + rank, 7 + rank)
    assert Choice(many, "cuda").rejected["push"] == "65 ranks; expected at most 64"


def test_the_core_of_the_tests_adds_a_transport() -> None:
    assert core.transports() == TRANSPORTS


def test_each_transport_is_a_row_on_the_side_of_python_and_of_the_tests() -> None:
    rows = tables.TRANSPORTS
    assert [*CHANNELS] == [*rows] == IN_C
    assert {*conftest.TRANSPORTS} <= {name for name, row in rows.items() if "cpu" in row.devices}
    for row in rows.values():
        assert {*row.instead} <= {*FAULTS}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_forced_transport_is_chosen(name: str) -> None:
    ranks = make_info(local_world=5, transport=name.encode())
    for rank, own in enumerate(ranks):
        own.endpoint = core.Endpoint(100 + rank, 7 + rank)
    choice = Choice(ranks, tables.TRANSPORTS[name].devices[0] if name in tables.TRANSPORTS else "cpu")
    assert choice.name == name
    earlier = TRANSPORTS[: TRANSPORTS.index(name)]
    assert choice.rejected == dict.fromkeys(earlier, f"SPAR_TRANSPORT={name}")


def test_forced_transport_that_cannot_serve_raises() -> None:
    expect_no_choice(
        make_info(transport=b"local"), Status.TRANSPORT, "SPAR_TRANSPORT=local", "rank 0 is not in"
    )


@pytest.mark.parametrize(
    ("name", "other"), [("nccl", "cpu"), ("push", "cpu"), ("shm", "cuda"), ("tcp", "cuda")]
)
def test_transport_is_not_forced_on_tensors_that_it_cannot_move(name: str, other: str) -> None:
    free, forced = (Choice(make_info(transport=request), other) for request in (b"", name.encode()))
    assert (forced.name, forced.reason, forced.rejected) == (free.name, free.reason, free.rejected)


def test_excluded_transport_is_skipped() -> None:
    choice = Choice(make_info(local_world=5, transport=b"^local"))
    assert choice.name == "tcp"
    assert choice.rejected["local"] == "excluded by SPAR_TRANSPORT=^local"


def test_excluding_the_last_transport_raises() -> None:
    with pytest.raises(CoreError) as caught:
        Choice(make_info(transport=b"^torch"), "meta")  # the other transports serve cpu or cuda
    assert caught.value.status == Status.TRANSPORT
    assert all(word in caught.value.text for word in ("^torch", "leaves no transport", "meta"))


@pytest.mark.parametrize("name", ["bogus", "^bogus", "^", "Local", "loca", "localx", "^^local", " local"])
def test_unknown_transport_error_lists_known_names(name: str) -> None:
    expect_no_choice(
        make_info(local_world=5, transport=name.encode()),
        Status.INVALID,
        f"SPAR_TRANSPORT is '{name}'",
        *TRANSPORTS,
    )


def test_error_of_a_long_setting_says_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPAR_TRANSPORT", 40 * "x")
    with pytest.raises(
        ValueError, match="has 40 characters; expected the name of a transport, or \\^ and one"
    ):
        _C.choose(_C.peer_info(), "cpu", ())


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("field", "words"), [("version", "version"), ("transport", "SPAR_TRANSPORT"), ("check", "SPAR_CHECK")]
)
def test_settings_that_differ_between_ranks_raise(field: str, words: str, rank: int) -> None:
    differing = make_info(local_world=5, transport=b"torch")
    first = getattr(differing[0], field).decode()
    setattr(differing[rank], field, b"other")
    expect_no_choice(differing, Status.INVALID, words, f"'{first}' on rank 0", f"'other' on rank {rank}")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_error_of_one_rank_is_reported_on_all_ranks(rank: int) -> None:
    failed = make_info(local_world=5, check=b"1")
    failed[rank] = core.PeerInfo(version=b"1", error=b"SPAR_CHECK is 'x'; known: auto|0|1")
    expect_no_choice(failed, Status.INVALID, f"rank {rank}: SPAR_CHECK is 'x'; known: auto|0|1")


@pytest.mark.parametrize("field", ["version", "error", "transport", "check"])
def test_malformed_peer_info_raises(field: str) -> None:
    unreadable = make_info(local_world=5)
    place = getattr(core.PeerInfo, field)
    ctypes.memset(ctypes.addressof(unreadable[1]) + place.offset, ord("x"), place.size)
    expect_no_choice(unreadable, Status.TRANSPORT, "rank 1", "malformed")


def test_choice_depends_on_peer_info_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given = make_info(local_world=5)
    before = [bytes(own) for own in given]
    monkeypatch.setenv("SPAR_TRANSPORT", "torch")
    assert Choice(given).name == "local"
    assert [bytes(own) for own in given] == before


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_comm_with_invalid_rank_is_rejected(world: int, rank: int) -> None:
    array = (core.PeerInfo * 4)(*make_info(4, local_world=5))
    comm, result = ctypes.POINTER(core.Comm)(), core.SetupResult()
    status = core.library().spar_comm_open(
        core.local(), array, world, rank, 1, None, byref(comm), byref(result)
    )
    assert status == Status.INVALID
    assert f"rank {rank} of {world}" in core.last_error()


def test_failed_setup_result_is_reported_on_all_ranks() -> None:
    array = (core.PeerInfo * 2)(*make_info(2, local_world=5))
    comm, own = ctypes.POINTER(core.Comm)(), core.SetupResult()
    core.check(core.library().spar_comm_open(core.local(), array, 2, 0, 1, None, byref(comm), byref(own)))
    results = (core.SetupResult * 2)(own, core.SetupResult(failed=1, reason=b"no descriptors", offset=1))
    core.check(core.library().spar_comm_connect(comm, results, byref(core.Deadline()), byref(own)))
    assert own.failed and own.reason == b"rank 1: no descriptors"
    core.library().spar_comm_close(comm)
