# SPDX-License-Identifier: Apache-2.0
"""Other libraries to compare with: the all_to_all of yunchang and DeepSpeed, where they are installed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..ranks import Ranks

AllToAll = Callable[[Tensor], Any]  # [B, S/P, H, D] to [B, S, H/P, D]


def _yunchang() -> AllToAll:
    function = importlib.import_module("yunchang.comm.all_to_all").SeqAllToAll4D
    return lambda x: function.apply(dist.group.WORLD, x, 2, 1, False)


def _deepspeed() -> AllToAll:
    importlib.import_module("deepspeed.comm").init_distributed(dist.get_backend(), auto_mpi_discovery=False)
    function = importlib.import_module("deepspeed.sequence.layer")._SeqAllToAll
    return lambda x: function.apply(dist.group.WORLD, x, 2, 1, 0)


LIBRARIES = {"yunchang": _yunchang, "DeepSpeed": _deepspeed}


def find(ranks: Ranks) -> tuple[dict[str, AllToAll], list[str]]:
    """Return the libraries that all ranks can import, and a line about each that is skipped. Collective."""
    loaded: dict[str, AllToAll] = {}
    reasons: dict[str, str] = {}
    for name, load in LIBRARIES.items():
        try:
            loaded[name] = load()
        except Exception as error:  # whatever its import runs into
            absent = isinstance(error, ModuleNotFoundError) and error.name == name.lower()
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            reasons[name] = "not installed" if absent else text
    # not by all_gather_object, which needs numpy
    ranks.store.set(f"spar bench/{ranks.rank}", json.dumps(reasons))
    skipped: dict[str, str] = {}
    for rank in range(ranks.world):
        for name, reason in json.loads(ranks.store.get(f"spar bench/{rank}")).items():
            skipped.setdefault(name, f"{name} is skipped: {reason}" + (f" (rank {rank})" if rank else ""))
    return {name: way for name, way in loaded.items() if name not in skipped}, list(skipped.values())
