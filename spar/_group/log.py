# SPDX-License-Identifier: Apache-2.0
"""The logger `spar`: its settings SPAR_LOG and SPAR_LOG_FILE, and at level debug a line for each call."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from .._control.agreement import failure_text
from .._control.state import GroupState
from .._transports.channel import Channel
from .profiling import plan_of

log = logging.getLogger("spar")
_BUILD_SETTINGS = {"SPAR_WERROR", "SPAR_DEBUG", "SPAR_SANITIZE", "SPAR_REPOSITORY"}


def read_settings(group: GroupState) -> None:
    """Set the logger up, once per process; warn of variables that look like a setting and are none."""
    level_name = _C.env("log")
    level = logging.CRITICAL + 1 if level_name == "off" else getattr(logging, level_name.upper())
    if log.level != level:  # setLevel clears the caches of all loggers
        log.setLevel(level)
    group.logs_calls = log.isEnabledFor(logging.DEBUG)
    if not log.handlers:
        # in its group ranks of several processes may have the same number
        rank = dist.get_rank() if dist.is_initialized() else group.rank
        log.addHandler(_handler(rank))
        log.propagate = False
        variables = sorted(variable for _, variable, *_ in _C.env_rows())
        for name in unknown_settings():
            log.warning("%s is no setting of spar; known: %s", name, ", ".join(variables))


def _handler(rank: int) -> logging.Handler:
    line = f"spar rank {rank} %(levelname)s: %(message)s"
    name = (_C.env("log_file") or "").replace("%r", str(rank))
    try:
        handler = logging.FileHandler(name) if name else logging.StreamHandler()
    except OSError as error:
        raise ValueError(
            f"SPAR_LOG_FILE is {name!r} on rank {rank}, where it cannot be opened: {error.strerror}; "
            "expected a file in a folder that exists"
        ) from error
    handler.setFormatter(logging.Formatter(f"%(asctime)s {line}" if name else line))
    return handler


def unknown_settings() -> list[str]:
    """Return the names of environment variables that look like a setting of spar, and are none."""
    variables = {variable for _, variable, *_ in _C.env_rows()} | _BUILD_SETTINGS
    return sorted(name for name in os.environ if name.startswith("SPAR_") and name not in variables)


# ---- a line for each call ----


def logged(
    group: GroupState,
    channel: Channel,
    exchange: Callable[..., list[Any] | None],
    core: _C.Exchange,
    inputs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | None,
    forward: int,
    alike: bool,
    number: int,
    deadline: float,
) -> list[Any] | None:
    """Run an exchange on a channel; then log it, when what is wrong with it alone has been reported."""
    begin = time.monotonic_ns()
    outputs = exchange(core, inputs, outs, forward, alike, number, deadline)
    if outputs is None:
        return None
    microseconds = (time.monotonic_ns() - begin) // 1000
    plan, rows = plan_of(channel, core, inputs), int(core.sums)
    log.debug(
        "%s: %s%s; here %s -> %s, %d bytes to others over %s, %d us",
        group.title(core.op, number),
        plan.describe("", core.text, 0, 0)[0].strip(),
        f", gradient of call {forward}" if forward > 0 else "",
        _listed([list(x.shape[rows:]) for x in inputs]),
        _listed([list(shape[rows:]) for shape in plan.out_shapes]),
        sum(plan.push_bytes),
        channel.name,
        microseconds,
    )
    return outputs


def _listed(shapes: list[list[int]]) -> str:
    return ", ".join(map(str, shapes))


def failed(group: GroupState, op: str, error: BaseException, outcome: str) -> None:
    """Log a call that failed; outcome: how the peers learn of it."""
    ranks = getattr(error, "ranks", ())
    cause = f" because of rank {', '.join(map(str, ranks))}" if ranks else ""
    text = failure_text(error).partition("\n")[0]
    log.debug("%s: failed%s, %s: %s", group.title(op), cause, outcome, text)
