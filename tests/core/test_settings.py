# SPDX-License-Identifier: Apache-2.0
"""Settings from the environment, and the cores that a rank has."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from ctypes import byref
from pathlib import Path

import pytest
from helpers import core
from helpers.core import CoreError, Status
from test_choice import make_info

from spar import _C

pytestmark = pytest.mark.quick

# ---- The environment --------------------------------------------------------------------------------------

VARIABLES = [variable for _, variable, *_ in _C.env_rows()]  # core's rows need a build
YEAR = 31536000
BAD = {  # by kind: rejected values, and accepted ones
    "seconds": (
        [
            *(
                "0",
                "0.0",
                "-1",
                "+1",
                "--1",
                "x",
                "1s",
                " 1",
                "1 ",
                "1\t",
                ".",
                "e3",
                "1e",
                "1e+",
                "1_0",
                "1,5",
            ),
            *("nan", "inf", "infinity", "0x10", "1e999", "0e999", "1e-999", "1e99999999999999999999"),
            *("9e9", "1e10", "1e15", str(YEAR + 1), "31536000.1", "1" + "0" * 400),
        ],
        ["1", "0.5", ".5", "5.", "1e3", "1E3", "1e+3", "1e-3", "0.1", "123.456", "01", str(YEAR), "3.1536e7"],
    ),
    "count": (
        ["-1", "+1", "--1", "1.5", "x", "1x", "0x10", "1e3", " 1", "1 ", "1_0", str(2**62 + 1), "9" * 30],
        ["0", "7", "100000", "007", str(YEAR * 10**6)],
    ),
    "text": ([], ["anything", "^x"]),
}


def env(row: core.EnvRow) -> str:
    value = read(row)
    kind = row.kind.decode()
    if kind == "seconds" and value.text:
        assert value.seconds == float(value.text)
    if kind == "count" and value.text:
        assert value.count == int(value.text)
    return value.text.decode()


def read(row: core.EnvRow) -> core.EnvValue:
    value, by_field = core.EnvValue(), core.EnvValue()
    core.check(core.library().spar_env_get(byref(row), byref(value)))
    core.check(core.library().spar_env_field(row.field, byref(by_field)))
    assert by_field.text == value.text
    return value


def values_of(row: core.EnvRow) -> tuple[list[str], list[str]]:
    kind = row.kind.decode()
    if kind in BAD:
        return BAD[kind]
    choices = kind.split("|")
    assert len(choices) > 1, f"{row.variable.decode()} has a kind without cases here: {kind}"
    wrong = [
        "bogus",
        choices[0][:-1],
        choices[0] + "x",
        choices[-1].upper() + "X",
        kind,
        "|".join(choices[:2]),
        "|",
    ]
    return [value for value in wrong if value], choices  # "" counts as unset


every_row = pytest.mark.parametrize("variable", VARIABLES)


@functools.cache
def rows() -> dict[str, core.EnvRow]:
    return {row.variable.decode(): row for row in core.env_rows()}


def test_the_extension_has_the_rows_of_the_core() -> None:
    assert list(rows()) == VARIABLES


@every_row
def test_default_is_accepted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows()[variable]
    monkeypatch.delenv(variable, raising=False)
    assert env(row) == row.fallback.decode()
    for value in ("", row.fallback.decode()):
        monkeypatch.setenv(variable, value)
        assert env(row) == row.fallback.decode()


@every_row
def test_known_values_are_accepted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in values_of(rows()[variable])[1]:
        monkeypatch.setenv(variable, value)
        assert env(rows()[variable]) == value


@every_row
def test_unknown_value_error_lists_known_values(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows()[variable]
    wrong, known = values_of(row)
    for value in wrong:
        monkeypatch.setenv(variable, value)
        with pytest.raises(CoreError) as caught:
            env(row)
        assert caught.value.status == Status.INVALID
        assert f"{variable} is '{value[:40]}'" in caught.value.text
        if row.kind.decode() not in BAD:
            assert all(word in caught.value.text for word in known)
        own = core.PeerInfo()  # peers receive the error
        core.library().spar_peer_info_read(byref(own))
        assert own.error.decode() == caught.value.text[: core.PeerInfo.error.size - 1]


def test_peer_info_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    own = core.PeerInfo()
    core.library().spar_peer_info_read(byref(own))
    assert (own.version, own.error, own.transport, own.check) == (b"test", b"", b"", b"auto")
    monkeypatch.setenv("SPAR_TRANSPORT", "^shm")
    monkeypatch.setenv("SPAR_CHECK", "1")
    core.library().spar_peer_info_read(byref(own))
    assert (own.error, own.transport, own.check) == (b"", b"^shm", b"1")
    monkeypatch.setenv("SPAR_TRANSPORT", "x" * 40)
    core.library().spar_peer_info_read(byref(own))
    assert b"SPAR_TRANSPORT has 40" in own.error


def test_env_returns_parsed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert [_C.env(field) for field in ("timeout", "plan_cache", "local_ranks", "check")] == [
        *(None, 1024, None, "auto")
    ]
    monkeypatch.setenv("SPAR_TIMEOUT", "1e3")
    monkeypatch.setenv("SPAR_PLAN_CACHE", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    values = [_C.env(field) for field in ("timeout", "plan_cache", "local_ranks")]
    assert values == [1000.0, 7, 4] and [type(value) for value in values] == [float, int, int]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert _C.env("local_ranks") is None
    monkeypatch.setenv("SPAR_TIMEOUT", "9e9")
    with pytest.raises(ValueError, match=f"'9e9'; expected a number of seconds above 0 and at most {YEAR}"):
        _C.env("timeout")


@pytest.mark.parametrize("value", ["abc", "0", "-1", "4x", "1e3", " 4", str(2**31)])
def test_invalid_local_world_size_is_in_the_peer_info(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    own = core.PeerInfo()
    core.library().spar_peer_info_read(byref(own))
    text = f"LOCAL_WORLD_SIZE is '{value}'; expected an integer from 1 to {2**31 - 1}"
    assert own.error.decode() == text
    assert "LOCAL_WORLD_SIZE" not in {variable for _, variable, *_ in _C.env_rows()}


def test_unknown_env_field_is_an_internal_error() -> None:
    assert core.library().spar_env_field(b"bogus", byref(core.EnvValue())) == Status.INTERNAL
    assert "bogus" in core.last_error()


# ---- Cores ------------------------------------------------------------------------------------------------


def test_core_count_follows_the_affinity_mask() -> None:
    """Ranks spin if each has a core, by the affinity mask, which a launcher may set."""
    mine = os.sched_getaffinity(0)
    most = core.library().spar_cores()
    assert 1 <= most <= len(mine)
    try:
        os.sched_setaffinity(0, {min(mine)})
        assert core.library().spar_cores() == 1
    finally:
        os.sched_setaffinity(0, mine)
    assert core.library().spar_cores() == most


# ---- the cores that are a rank's own ----------------------------------------------------------------------


def shares(masks: Sequence[int], local_ranks: int) -> list[int]:
    """Return each rank's share of the cores by the ranks' affinities, which are masks of at most 64 bits."""
    ranks = (core.PeerInfo * len(masks))(*make_info(len(masks)))
    for own, mask in zip(ranks, masks, strict=True):
        own.cores[3] = mask  # cores 192 to 255
    share = core.library().spar_core_share
    sets, stride = ctypes.addressof(ranks) + core.PeerInfo.cores.offset, ctypes.sizeof(core.PeerInfo)
    return [share(sets, stride, len(masks), rank, local_ranks) for rank in range(len(masks))]


def test_ranks_bound_apart_have_their_own_cores() -> None:
    usable = _C.limits()[0]
    host = min(os.cpu_count() or 1, core.library().spar_cgroup_cores(b""))
    assert shares([1, 2], host) == [1, 1]
    assert shares([1, 2], host + 1) == [0, 0], "some ranks of the host share a core"
    assert shares([7 << 4, 7], 2) == [max(min(3, host // 2), usable // 2)] * 2
    assert shares([1, 6], 1) == [usable, max(min(2, host), usable)]


@pytest.mark.parametrize("masks", [[1], [1, 1], [1, 3], [0, 2], [1, 2, 4, 6]])
def test_other_ranks_have_an_equal_share(masks: list[int]) -> None:
    usable = _C.limits()[0]
    for local_ranks in (1, 2, usable, usable + 1):
        assert shares(masks, local_ranks) == [usable // local_ranks] * len(masks)


SLOW_GETENV = """
#include <string.h>
#include <unistd.h>
extern char **environ;

/* The C library's, which is late for this variable: a setenv meanwhile frees what it walks. */
char *getenv(const char *name)
{
    char **each = environ;
    size_t length = strlen(name);
    if (strcmp(name, "GLOO_SOCKET_IFNAME") == 0)
        usleep(200000);
    for (; *each; each++)
        if (strncmp(*each, name, length) == 0 && (*each)[length] == '=')
            return *each + length + 1;
    return NULL;
}
"""
CHANGES_BESIDE = """
import importlib.util, os, sys, threading

spec = importlib.util.spec_from_file_location("spar._C", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
done = threading.Event()

def change():
    for number in range(5000):
        os.environ[f"CHANGED_{number}"] = ""
        if done.is_set():
            return

thread = threading.Thread(target=change)
thread.start()
print(core.own_address())
done.set()
thread.join()
"""


@pytest.mark.not_under_asan("the program does not preload the sanitizer")
def test_environment_that_another_thread_changes(tmp_path: Path) -> None:
    """The extension calls getenv with Python's lock held, without which another thread may call setenv."""
    source, library = tmp_path / "getenv.c", tmp_path / "getenv.so"
    source.write_text(SLOW_GETENV)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    command = [sys.executable, "-c", CHANGES_BESIDE, _C.__file__]
    done = subprocess.run(
        command, env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done
