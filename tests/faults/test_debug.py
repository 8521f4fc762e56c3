# SPDX-License-Identifier: Apache-2.0
"""What shows how calls go, and where they hang: SPAR_LOG=debug, SPAR_LOG_FILE and spar.debug."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import tables
from helpers.processes import finish, start

import spar
from spar.errors import by_rank

Group = dist.ProcessGroup


# ---- the log ----


@contextlib.contextmanager
def log_to(file: Path, group: Group, level: str = "debug") -> Iterator[None]:
    """Use a group with other settings of the log, which this process and the group have read before."""

    def restart() -> None:
        spar.close(group)
        for handler in logging.getLogger("spar").handlers[:]:
            logging.getLogger("spar").removeHandler(handler)
            handler.close()
        dist.barrier(group)

    restart()
    try:
        with mock.patch.dict(os.environ, SPAR_LOG=level, SPAR_LOG_FILE=str(file)):
            yield
    finally:
        restart()


def lines_of(file: Path, words: str = "") -> list[str]:
    return [line for line in file.read_text().splitlines() if words in line]


def check_lines(rank: int, world: int, group: Group, folder: Path) -> None:
    sizes = list(range(1, world + 1))
    with log_to(folder / "rank %r.log", group):
        x = torch.zeros(3, 2 * world, requires_grad=True)
        spar.all_to_all(x, group, 1, 0).sum().backward()
        spar.reduce_scatter(torch.zeros(2 * world), group)
        with torch.profiler.profile() as profiled:
            spar.all_gather(torch.zeros(rank + 1), group, sizes=sizes)
        spar.all_gather(torch.zeros(rank + 1), group, sizes=sizes, async_op=True)[1].wait()
        name = spar.transport(group).name
    assert "spar::all_gather" in {event.name for event in profiled.events()}
    rows, columns = f"dim 0 in {[3] * world}", f"dim 1 in {[2] * world}"
    before, after, dtype = f"[3, {2 * world}]", f"[{3 * world}, 2]", "of torch.float32 on cpu"
    whole, sums = f"[{3 * world}, {2 * world}]", f"[{world}, {2 * world}]: dim 0 in {[1] * world}"
    gathers = f"[6]: dim 0 in [1, 2, 3] -> whole {dtype}; here [{rank + 1}] -> [6], {4 * (rank + 1)}"
    expected = [  # with the bytes to each other rank
        f"all_to_all: {whole}: {rows} -> {columns} {dtype}, gradient recorded; here {before} -> {after}, 24",
        f"backward of all_to_all: {whole}: {columns} -> {rows} {dtype}, gradient of call 1; "
        f"here {after} -> {before}, 24",
        f"reduce_scatter: {sums} -> dim 1 in {[2] * world} {dtype}; here [{2 * world}] -> [2], 8",
        *(f"all_gather: {gathers}", f"all_gather: {gathers}"),
    ]
    text = (
        rf"\d.* spar rank {rank} DEBUG: (.*), call (\d) on group {group.group_name!r}, rank {rank} of {world}"
    )
    text += rf"(: .*, )(\d+) bytes to others over {name}, \d+ us"
    for i, line in enumerate(lines_of(folder / f"rank {rank}.log", " us")):
        op, number, what, sent = re.fullmatch(text, line).groups()  # type: ignore[union-attr]
        assert (int(number), f"{op}{what}{int(sent) // (world - 1)}") == (i + 1, expected[i])
    assert i + 1 == len(expected)


def test_debug_log_has_a_line_for_each_call_in_a_file_for_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, check_lines, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"rank {rank}.log" for rank in range(3)]


def check_failures(rank: int, world: int, group: Group, folder: Path) -> None:
    with log_to(folder / "%r", group):
        spar.init(group)
        with pytest.raises(ValueError if rank == 1 else spar.MismatchError):
            spar.all_gather(torch.zeros(2), group, 7 if rank == 1 else 0)
        with pytest.raises(spar.MismatchError):
            spar.all_gather(torch.zeros(2 + (rank == 2)), group)
        with pytest.raises((spar.OutOfMemoryError, RuntimeError)):
            spar.all_gather(torch.zeros(1).expand(1 << 42), group)
        spar.all_gather(torch.zeros(2), group)
    own, differs, memory = lines_of(folder / str(rank), ": failed")
    where = f"on group {group.group_name!r}, rank {rank} of {world}: failed"
    if rank == 1:
        assert f"all_gather, call 1 {where}, reported by this rank: ValueError: all_gather on" in own
    else:
        cause = "because of rank 1, known to all ranks: MismatchError: all_gather, call 1 on"
        assert f"all_gather, call 1 {where} {cause}" in own
        assert "rank 1 failed: ValueError: " in own
    cause = "because of rank 2, known to all ranks: MismatchError: "
    assert f"all_gather, call 2 {where} {cause}" in differs
    assert f"all_gather, call 3 {where}, reported by this rank: " in memory
    assert len(lines_of(folder / str(rank), "call 4 ")) == 1


def test_debug_log_has_a_line_for_a_call_that_fails_on_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, check_failures, tmp_path)


def check_quiet(rank: int, world: int, group: Group, folder: Path) -> None:
    with log_to(folder / "all", group, "info"):
        spar.all_gather(torch.zeros(2), group)
        dist.barrier(group)
        lines = lines_of(folder / "all")
        dist.barrier(group)
    assert sorted(re.findall(r"spar rank (\d) INFO: group .*: transport", "\n".join(lines))) == ["0", "1"]
    assert len(lines) == 2


def test_log_file_is_shared_without_a_rank_in_its_name_and_info_logs_no_calls(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, check_quiet, tmp_path)


def check_no_folder(rank: int, world: int, group: Group, folder: Path) -> None:
    with log_to(folder / str(rank) / "log", group):  # rank 1 has the folder
        kind, text = (spar.MismatchError, "rank 0 failed: ValueError: ") if rank else (ValueError, "")
        with pytest.raises(kind, match=f"{text}SPAR_LOG_FILE is '.*' on rank 0, .*opened: No such file"):
            spar.all_gather(torch.zeros(2), group)


def test_log_file_that_cannot_be_opened_raises_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    ranks(2, check_no_folder, tmp_path)


# ---- spar.debug ----


def shown_in_thread(group: Group, call: Callable[[], object], words: str, file: Path) -> str:
    """Make a call that hangs; return what spar.debug shows on another thread.

    That creates the file once the words are shown.
    """
    found: list[str] = []

    def watch() -> None:
        found.append(until(lambda: spar.debug(group), words))
        file.touch()

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    thread.join()
    return found[0]


def shown_in_handler(group: Group, call: Callable[[], object], words: str, file: Path) -> str:
    """The same in a signal's handler."""
    found = [""]

    def handle(*_: object) -> None:
        if not file.exists() and words in (text := spar.debug(group)):
            found[0] = text
            file.touch()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found[0]


def until(read: Callable[[], str], words: str) -> str:
    deadline = time.monotonic() + 60
    while words not in (text := read()):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    return text


def check_hang(rank: int, world: int, group: Group, folder: Path) -> None:
    spar.close(group)  # call numbers begin at 1
    dist.barrier(group)
    x = torch.zeros(2, 2 * world)
    spar.all_gather(x, group)
    missing = "call 2 is not made by rank 1 (process "

    def call() -> None:
        spar.all_to_all(x, group, 1, 0)

    if rank == 1:
        before = spar.debug(group)
        until(lambda: "".join(sorted(file.name for file in folder.iterdir())), "02")
        call()
        assert (
            f"group {group.group_name!r}, rank 1 of 3\ncalls: 1, 0 in flight; no call is under way" in before
        )
        assert "newest exchange: all_gather [6, 6]: dim 0 in [2, 2, 2] -> whole of torch.float32" in before
        return
    show = shown_in_thread if rank == 0 else shown_in_handler
    lines = show(group, call, "  rank 0, 2: published call 2;", folder / str(rank)).splitlines()
    name, reason = spar.transport(group).name, spar.transport(group).reason
    assert re.fullmatch(r"calls: 2, 0 in flight; thread \d+ is in a call; the newest: its .*", lines[1])
    assert lines[2:4] == ["broken: no", f"cpu over {name}: {reason}"]
    assert lines[4:6] == [
        "  rank 0, 2: published call 2; done call 1",
        "  rank 1: published call 1; done call 1",
    ]
    assert lines[6].startswith(f"  {missing}")
    (near,) = (ranks for ranks in spar.transport(group).hosts if rank in ranks)
    last = [("is in", "all_to_all, call 2"), ("has ended", "all_gather, call 1")]
    rows = [
        f"{state} {call} on group {group.group_name!r}"
        if peer in near
        else f"made {call} on group {group.group_name!r}, the newest known here"
        for peer, (state, call) in enumerate([*last, last[0]])
    ]
    listed = ["last call of each rank, on any group:", *by_rank(rows).splitlines()]
    assert lines[7 : 7 + len(listed)] == listed
    assert lines[-5:] == [
        "newest exchange: all_to_all [6, 6]: dim 0 in [2, 2, 2] -> dim 1 in [2, 2, 2] of torch.float32 "
        "on cpu",
        "  32 bytes to others; blocks: 3",
        *(
            f"  to rank {peer}: tensor 0, 8 bytes from {8 * peer} to {16 * rank}, 2 times each 24 -> 8"
            for peer in range(3)
        ),
    ]


def test_debug_shows_who_is_missing_while_a_call_hangs(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, check_hang, tmp_path)


def check_ends(rank: int, world: int, group: Group) -> None:
    lengths = [4 * world] * 10
    layout = spar.SequenceLayout.packed(lengths, group)
    layout.gather(torch.zeros(layout.sizes[rank], 2), 0, backward="sum")
    blocks = spar.debug(group).split("blocks: ")[1].splitlines()
    assert blocks[0] == str(10 * world)
    assert blocks[-1] == f"  and {10 * world - 20} more"
    assert len(blocks) == 22
    with pytest.raises(ValueError if rank == 1 else spar.MismatchError):
        spar.all_gather(torch.zeros(2), group, 7 if rank == 1 else 0)
    dist.barrier(group)
    text = spar.debug(group)
    assert re.search(
        r"^  rank 1: published call (\d), which failed with ValueError; done call \1$", text, re.M
    )
    if rank == 1 and spar.transport(group).name == "tcp":  # it has heard nothing of other hosts since
        assert re.search(r"^  call \d is not made by .*rank 2 \(", text, re.M)
    else:
        assert re.search(r"^  call \d is over on all ranks$", text, re.M)
    child, parent = os.pipe()
    if (process := os.fork()) == 0:
        os.write(parent, spar.debug(group).encode())
        os._exit(0)
    os.waitpid(process, 0)
    assert re.search(rf"process {os.getpid()} made it; this forked child", os.read(child, 1000).decode())
    spar.close(group)
    assert "no transport: the group has not exchanged anything yet" in spar.debug(group)


def test_debug_shows_failures_and_blocks_and_runs_at_any_time(ranks: Ranks) -> None:
    ranks(3, check_ends)


def check_alone(rank: int, world: int, group: Group) -> None:
    spar.all_gather(torch.zeros(2), group)
    assert "no transport: a group of one exchanges nothing" in spar.debug(group)


@pytest.mark.one_transport
def test_debug_of_a_group_of_one(ranks: Ranks) -> None:
    ranks(1, check_alone)


def check_across_hosts(rank: int, folder: Path) -> None:
    """Each rank knows what has arrived from the other: its calls, and that its process has ended."""
    other = 1 - rank
    call = f"gather_forward_split_backward, call 1 on group '{dist.group.WORLD.group_name}'"  # type: ignore[union-attr]
    text = spar.debug()
    assert re.search(r"^  rank [01](, 1)?: published call 1; done call 1$", text, re.M)
    if spar.transport().name == "tcp":  # over torch, the end of a call arrives in the next one
        assert "\n  call 1 is over on all ranks\n" in text
    assert f"  rank {rank}: has ended {call}\n" in text
    assert f"  rank {other}: made {call}, the newest known here\n" in text


@pytest.mark.parametrize("transport", ["tcp", tables.ACROSS])
def test_debug_across_hosts(tmp_path: Path, transport: str) -> None:
    processes = start(check_across_hosts, 2, tmp_path, SPAR_TRANSPORT=transport)
    assert finish(processes, 40) == [0, 0]


def check_without_mailboxes(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "none"
    spar.all_gather(torch.zeros(2))
    assert "  no mailboxes: how far each rank is cannot be read without communication" in spar.debug()


def test_debug_without_mailboxes(tmp_path: Path) -> None:
    """Over torch, between hosts whose ranks cannot connect."""
    processes = start(check_without_mailboxes, 2, tmp_path, set_up=False, SPAR_TRANSPORT=tables.ACROSS)
    assert finish(processes, 40) == [0, 0]
