# SPDX-License-Identifier: Apache-2.0
"""`python -m spar info`: what spar finds on this machine, as text or JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from itertools import groupby

from .facts import Facts, collect
from .printing import count_text, entry, parts_text, size_text

SUMMARY = "show versions, cores, memory, GPUs, libraries, settings and transports"
DESCRIPTION = """\
Show what spar finds on this machine: versions, cores, memory, GPUs and how they reach each other, the
libraries that spar opens, its settings, and which transport a group of ranks would use here. It needs no
process group. Attach its output to a report of a problem."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=1) if args.json else "\n\n".join(sections(facts)))
    return 0


def sections(facts: Facts) -> list[str]:
    """Return the facts as text, a paragraph for each kind."""
    parts = {
        "Versions": _versions(facts["versions"]),
        "Processor": _processor(facts["processor"]),
        "Memory": _memory(facts["memory"], _shared_text(facts)),
        "GPUs": _gpus(facts["gpus"]),
        "Libraries for CUDA tensors": _libraries(facts["libraries"]),
        "Settings": _settings(facts["settings"]),
        "Transports": _transports(facts["transports"], facts["gpus"]["none"]),
        "Hosts": _hosts(facts["hosts"]),
    }
    return [f"{title}\n" + "\n".join(entry(*row) for row in rows) for title, rows in parts.items()]


Rows = list[tuple[str, str]]


def _versions(facts: Facts) -> Rows:
    cuda = f"CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else "built without CUDA"
    nccl = f", NCCL {facts['torch_nccl']}" if facts["torch_nccl"] else ""
    return [
        ("spar", f"{facts['spar']}, in {facts['path']}"),
        ("torch", f"{facts['torch']}, {cuda}{nccl}"),
        ("Python", facts["python"]),
        ("system", facts["system"]),
    ]


def _processor(facts: Facts) -> Rows:
    allowed = _ranges(facts["affinity"])
    quota = "" if facts["usable_cores"] == len(facts["affinity"]) else "; the cgroup's quota is lower"
    return [
        ("model", facts["model"] or "not known"),
        ("cores", f"{facts['cores']}, of which this process may run on {allowed}"),
        ("usable", f"{count_text(facts['usable_cores'], 'core')}{quota}"),
        ("torch's threads", str(facts["torch_threads"])),
    ]


def _memory(facts: Facts, shared: str) -> Rows:
    host = [f"{size_text(facts[name])} {name}" for name in ("total", "available") if facts[name] is not None]
    lower = facts["total"] is not None and facts["usable"] < facts["total"]
    shm = facts["dev_shm"]
    room = f"{size_text(shm['total'])}, {size_text(shm['free'])} free" if shm else "none"
    return [
        ("host", ", ".join(host) or "not known"),
        ("usable", size_text(facts["usable"]) + (", the limit of this process's cgroup" if lower else "")),
        ("shared by shm", shared),
        ("/dev/shm", f"{room}; not used by spar, but by NCCL and DataLoader"),
    ]


def _shared_text(facts: Facts) -> str:
    on_one_host = facts["transports"][0]
    if "shm" in on_one_host["rejected"]:
        return f"nothing: {on_one_host['rejected']['shm']}"
    cap, usable = facts["settings"]["variables"]["SPAR_ARENA_MAX"]["value"], facts["memory"]["usable"]
    if isinstance(cap, int) and cap > 0:
        return f"at most {size_text(cap)} on each rank, by SPAR_ARENA_MAX"
    return f"at most {size_text(usable / 2)}, half of the usable memory, by all ranks of this host together"


def _gpus(facts: Facts) -> Rows:
    rows = [("none", facts["none"])] if facts["none"] else []
    for index, (device, access) in enumerate(zip(facts["devices"], facts["peer_access"], strict=True)):
        text = f"{device['name']}, {size_text(device['memory'])}, capability {device['capability']}"
        if len(access) > 1:
            reached = [peer for peer, can in enumerate(access) if can and peer != index]
            text += f"; accesses the memory of {_ranges(reached) or 'no other'}"
        rows.append((f"cuda:{index}", text))
    return rows


def _libraries(facts: list[Facts]) -> Rows:
    rows = []
    for library in facts:
        version = f" ({library['version']})" if library["version"] else ""
        state = "" if library["opened"] else ", not opened yet"
        text = f"{library['path']}{version}{state}" if library["path"] else "not opened"
        rows.append((library["name"], text))
    return rows


def _settings(facts: Facts) -> Rows:
    rows = []
    for name, setting in facts["variables"].items():
        if setting["error"]:
            rows.append((name, f"wrong: {setting['error']}"))
        elif setting["set"]:
            rows.append((name, str(setting["value"])))
    rows += [(name, "is no setting of spar; `--json` lists the settings") for name in facts["unknown"]]
    return rows or [("none", "all have their defaults; `--json` lists them")]


def _transports(facts: list[Facts], no_gpu: str | None) -> Rows:
    rows = []
    for choice in facts:
        where = f"{choice['device']}, {choice['hosts']}"
        rows.append((where, f"{choice['transport'] or 'none'}: {choice['reason']}"))
        rows += [("", f"not {name}: {why}") for name, why in choice["rejected"].items()]
    return (
        [*rows, ("", f"there are no such tensors here: {no_gpu}")] if no_gpu else rows
    )  # the last are CUDA's


def _hosts(facts: Facts) -> Rows:
    rows = [("address", facts["address"] or facts["error"])]
    group = facts["group"]
    if group is None:
        return [*rows, ("ranks", "none were launched; torchrun -m spar info shows what a group would move")]
    parts = parts_text(group["shared_memory"], group["network"])
    return [
        *rows,
        ("ranks", f"{group['ranks']}, of which {group['on_host']} are on this host"),
        ("CPU tensors", parts),
    ]


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as ranges: 0-3, 8."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
