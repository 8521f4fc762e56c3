# SPDX-License-Identifier: Apache-2.0
"""Limits of the process's cgroup, read from synthetic /proc and cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import core

pytestmark = pytest.mark.quick

NONE = 2**63 - 1
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
MEMORY = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 master:2 - cgroup cgroup rw,memory"
CPU = "36 31 0:33 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
UNIFIED = "41 31 0:38 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
OTHERS = (
    "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
    "40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd",
)
GB = 1 << 30


def tree(folder: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> bytes:
    """Write /proc/self and files below /sys/fs/cgroup; return the root folder as bytes, for the core."""
    proc = folder / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in (*OTHERS, *mounts)))
    for name, text in files.items():
        path = folder / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return os.fsencode(folder)


def memory(root: bytes) -> int:
    return core.library().spar_cgroup_memory(root)


def cores(root: bytes) -> int:
    return core.library().spar_cgroup_cores(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b/memory.max": f"{GB}\n", "a/memory.max": f"{2 * GB}\n"}, GB),
        ({"a/b/memory.max": f"{3 * GB}\n", "a/memory.max": f"{2 * GB}\n"}, 2 * GB),
        ({"a/b/memory.max": "max\n", "a/memory.max": "max\n", "memory.max": f"{4 * GB}\n"}, 4 * GB),
        ({"a/b/memory.max": f"{3 * GB}\n", "a/b/memory.high": f"{GB}\n"}, GB),
        ({"a/b/memory.max": "max\n", "a/b/memory.high": "max\n"}, NONE),
        ({"a/other/memory.max": "1\n", "a/b/c/memory.max": "1\n", "memory.max": f"{GB}\n"}, GB),
        ({"a/b/memory.max": "", "a/memory.max": "many\n", "memory.max": "-5\n"}, NONE),
        ({"a/b/memory.max": "0\n"}, NONE),
        ({}, NONE),
    ],
)
def test_v2_limit_is_minimum_over_ancestors(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert memory(tree(tmp_path, "0::/a/b\n", [V2.format(root="/")], files)) == expected


def test_v1_limit_is_minimum_over_ancestors(tmp_path: Path) -> None:
    files = {
        "memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/a/memory.limit_in_bytes": f"{GB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu,cpuacct/c/cpu.cfs_quota_us": "350000\n",
        "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    cgroup = "9:name=systemd:/x\n5:memory:/a/b\n3:cpu,cpuacct:/c\n"
    root = tree(tmp_path, cgroup, [MEMORY.format(root="/"), CPU.format(root="/")], files)
    assert (memory(root), cores(root)) == (GB, 3)


def test_hybrid_reads_both_hierarchies(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": f"{2 * GB}\n",
        "unified/u/cpu.max": "200000 100000\n",
        "unified/u/memory.max": f"{3 * GB}\n",
    }
    mounts = [MEMORY.format(root="/"), UNIFIED.format(root="/")]
    root = tree(tmp_path, "4:memory:/a\n0::/u\n", mounts, files)
    assert (memory(root), cores(root)) == (2 * GB, 2)


@pytest.mark.parametrize(
    ("cgroup", "mount_root", "file"),
    [
        ("/docker/1f", "/docker/1f", "memory.max"),  # the mount starts at the container's cgroup
        ("/docker/1f/job", "/docker/1f", "job/memory.max"),
        ("/", "/", "memory.max"),  # a cgroup namespace
        ("/job", "/", "job/memory.max"),
        ("/../other", "/..", "other/memory.max"),  # outside the namespace, mounted from its parent
        ("/", "/../..", "memory.max"),  # mounted from outside the namespace: the path below is unknown
        ("/../other", "/", "memory.max"),
        ("/docker/1fa", "/docker/1f", "memory.max"),  # not below the mount
        ("/docker/1f (deleted)", "/docker", "memory.max"),
    ],
)
def test_mount_of_a_cgroup_subtree(tmp_path: Path, cgroup: str, mount_root: str, file: str) -> None:
    files = {file: f"{GB}\n", "../other/memory.max": "1\n"}
    root = tree(tmp_path, f"0::{cgroup}\n", [V2.format(root=mount_root)], files)
    assert memory(root) == GB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", NONE),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("800000 100000\n", 8),
        ("800000\n", NONE),
        ("800000 0\n", NONE),
        ("", NONE),
        ("much\n", NONE),
    ],
)
def test_cpu_quota_gives_cores(tmp_path: Path, text: str, expected: int) -> None:
    files = {"a/cpu.max": text, "cpu.max": "max 100000\n"}
    assert cores(tree(tmp_path, "0::/a/b\n", [V2.format(root="/")], files)) == expected


def test_missing_and_garbled_files_set_no_limit(tmp_path: Path) -> None:
    assert (memory(os.fsencode(tmp_path)), cores(os.fsencode(tmp_path))) == (NONE, NONE)
    lines = ["", " - ", "1 2 3 4 - cgroup2", "1 2 3 / /x rw - cgroup", "1 2 3 / /x rw - cgroup2", "-" * 9000]
    root = tree(tmp_path, "\n0\n0:\n::::\n" + "x" * 9000, [*lines, V2.format(root="/" + "y" * 9000)], {})
    assert (memory(root), cores(root)) == (NONE, NONE)


def test_escaped_mount_point_is_decoded(tmp_path: Path) -> None:
    mount = "31 23 0:28 / /sys/fs/cgroup/a\\040b\\134c rw - cgroup2 cgroup2 rw"
    assert memory(tree(tmp_path, "0::/\n", [mount], {"a b\\c/memory.max": f"{GB}\n"})) == GB


def test_limit_is_read_from_the_last_of_several_mounts(tmp_path: Path) -> None:
    mounts = ["30 23 0:28 /x /other rw - cgroup2 cgroup2 rw", V2.format(root="/")]
    assert memory(tree(tmp_path, "0::/a\n", mounts, {"a/memory.max": f"{GB}\n"})) == GB
