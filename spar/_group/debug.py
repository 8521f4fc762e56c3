# SPDX-License-Identifier: Apache-2.0
"""What this rank knows of a group while a call hangs, as text. It takes no lock, and never communicates."""

from __future__ import annotations

from collections.abc import Iterator

from .._control import fork, status
from .._control.state import LOCAL, OVER, SHARED, Transport
from ..errors import by_rank
from .group import Group

_MOST_BLOCKS = 20
_STAGES = {
    LOCAL: "its peers know nothing of it yet",
    SHARED: "its peers count on this rank",
    OVER: "its transport has it, or it is over",
}


def described(group: Group) -> str:
    """Return the state of a group on this rank, of its transports, and of its newest exchange."""
    title = f"group {group.name!r}, rank {group.rank} of {group.world}"
    if group.process != fork.process:
        return f"{title}: process {group.process} made it; this forked child cannot use it"
    lines = [title, *_calls(group)]
    lines += [] if group.transports else [f"no transport: {group.transport('cpu').reason}"]
    for transport in tuple(group.transports.values()):
        lines += _transport(group, transport)
    return "\n".join([*lines, *_newest(group)])


def _calls(group: Group) -> Iterator[str]:
    owner, queue = group._owner, group.queue
    where = f"thread {owner} is in a call" if owner else "no call is under way"
    flight = 0 if queue is None else queue.in_flight()
    progress = OVER if group.core_has(group.calls) else group.progress
    yield f"calls: {group.calls}, {flight} in flight; {where}; the newest: {_STAGES[progress]}"
    yield f"broken: {group.broken or 'no'}"


def _transport(group: Group, transport: Transport) -> Iterator[str]:
    yield f"{transport.device} over {transport.name}: {transport.reason}"
    channel = group.channels.get(transport.device)
    core = None if channel is None else channel.core
    if core is not None and core.broken is not None:
        yield f"  broken: {core.broken}"
    ranks = [] if core is None else core.ranks()
    if not ranks:
        yield "  no mailboxes: how far each rank is cannot be read without communication"
        return
    yield by_rank([_progress(*row) for row in ranks])
    yield f"  {_missing(group, [row[:2] for row in ranks])}"
    yield status.listing([str(status.CallStatus.of(*call)) for *_, call, _ in ranks]).strip()


def _progress(
    published: int, done: int, broken: str | None, failed: str | None, ended: bool, *_: object
) -> str:
    text = f"published call {published}" + (f", which failed with {failed}" if failed else "")
    text += f"; done call {done}" + (f"; broke the group with {broken}" if broken else "")
    return text + ("; its process has ended" if ended else "")


def _missing(group: Group, words: list[tuple[int, int]]) -> str:
    """Return which ranks have not reached the newest call of any rank, or not its end."""

    def place(number: int) -> int:  # call numbers wrap, at 32 bits
        return (number - words[group.rank][0] + (1 << 31)) % (1 << 32)

    published, done = [row[0] for row in words], [row[1] for row in words]
    newest = max(published, key=place)
    for calls, verb in ((published, "made"), (done, "ended")):
        ranks = tuple(rank for rank, call in enumerate(calls) if place(call) < place(newest))
        if ranks:
            return f"call {newest} is not {verb} by {status.named(group, ranks)}"
    return f"call {newest} is over on all ranks"


def _newest(group: Group) -> Iterator[str]:
    core = group.newest
    if core is None:
        return
    plan = core.newest
    if plan is None:
        yield f"newest exchange: {core.op}{core.text}, without a plan yet, or with one too large to keep"
        return
    blocks = plan.blocks("push")
    yield f"newest exchange: {plan.describe(core.op, core.text, 0, 0)[0]}"
    yield f"  {sum(plan.push_bytes)} bytes to others; blocks: {len(blocks)}"
    for block in blocks[:_MOST_BLOCKS]:
        yield f"  {_block(*block)}"
    if len(blocks) > _MOST_BLOCKS:
        yield f"  and {len(blocks) - _MOST_BLOCKS} more"


def _block(
    peer: int, tensor: int, source: int, target: int, run: int, loops: tuple[tuple[int, int, int], ...]
) -> str:
    times = "".join(f", {extent} times each {src} -> {dst}" for extent, src, dst in loops)
    return f"to rank {peer}: tensor {tensor}, {run} bytes from {source} to {target}{times}"
