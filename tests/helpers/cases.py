# SPDX-License-Identifier: Apache-2.0
"""Random calls of every op, and the checks that each must pass, with all ranks in one process."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st

from helpers import core
from helpers.core import Plan
from helpers.tables import EXCHANGES, Draw, Move

WORLDS = (1, 2, 3, 4, 5, 7, 8, 16, 31, 64)
ITEMS = (1, 2, 3, 4, 8, 12, 16)
MAX = 2**63 - 1

# The same cases on every run, so that a failure is due to a change. EXPLORE=1 draws new ones.
EXAMPLES = settings(
    deadline=None,
    derandomize="EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# ---- Cases ------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "view", "transposed", "stepped", "expanded")


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a call."""

    item: int
    shape: tuple[int, ...]  # of the global tensor
    layout: str
    move: Move

    def whole(self) -> torch.Tensor:
        """Return the global tensor; cells hold their index. An "expanded" layout repeats every other dim."""
        shape = self.shape
        if self.layout == "expanded":
            shape = tuple(1 if n > 1 and i % 2 == 0 else n for i, n in enumerate(shape))
        count = torch.Size(shape).numel()
        if self.item == 1:  # modulo a prime: equal cells are not a power of two apart
            cycle = torch.arange(251, dtype=torch.uint8)
            return cycle.repeat(-(-count // 251))[:count].view(*shape, 1).expand(*self.shape, 1)
        index = torch.arange(count).view(shape)
        shifts = (8 * torch.arange(self.item)).clamp(max=56)
        return (index.unsqueeze(-1) >> shifts & 255).to(torch.uint8).expand(*self.shape, self.item)

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same values in the layout's memory format."""
        dims = list(range(x.dim() - 1))
        if self.layout == "transposed":
            order = dims[1:] + dims[:1] + [len(dims)]
            return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
        if self.layout == "stepped":
            steps = [2 if i in (dims[0], dims[-1]) else 1 for i in dims]
            extents = [step * n + 1 for step, n in zip(steps, x.shape, strict=False)]
            room = torch.full((*extents, x.shape[-1]), 0xDD, dtype=torch.uint8)
            return room[tuple(slice(1, None, step) for step in steps)].copy_(x)
        return x.contiguous() if self.layout == "contiguous" else x

    def inputs(self, world: int) -> list[torch.Tensor]:
        return [self.laid_out(x) for x in self.move.before.parts(self.whole(), world)]

    def expected(self, world: int) -> Sequence[torch.Tensor]:
        return self.move.after.parts(self.whole(), world)


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    world: int
    parts: list[Part]

    @property
    def args(self) -> list[list[int]]:
        return [part.move.args for part in self.parts]

    def inputs(self) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(part.inputs(self.world) for part in self.parts), strict=True))

    def expected(self) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(part.expected(self.world) for part in self.parts), strict=True))

    def plans(self, sides: int = 0, inputs: list[tuple[torch.Tensor, ...]] | None = None) -> list[Plan]:
        return core.build_plans(self.op, self.inputs() if inputs is None else inputs, self.args, sides)


LARGEST = {1: 150, 2: 40, 3: 13, 4: 7, 5: 4, 6: 3}  # extents by ndim: about a thousand cells


def make_case(op: str, world: int, draw: Draw) -> Case:
    parts = []
    for _ in range(draw(1, 3)):
        ndim = draw(EXCHANGES[op].min_dims, 6)
        shape = [draw(0, LARGEST[ndim]) for _ in range(ndim)]
        item = ITEMS[draw(0, len(ITEMS) - 1)]
        layout = LAYOUTS[draw(0, len(LAYOUTS) - 1)]
        move = EXCHANGES[op].move(draw, shape, world)
        parts.append(Part(item, tuple(shape), layout, move))
    return Case(op, world, parts)


@st.composite
def cases(draw: st.DrawFn, op: str) -> Case:
    def number(first: int, last: int) -> int:
        return draw(st.integers(first, last))

    return make_case(op, draw(st.integers(1, 9)), number)


def seeded_case(op: str, world: int, seed: int) -> Case:
    return make_case(op, world, random.Random(f"{op} {world} {seed}").randint)


# ---- Checks of every case ---------------------------------------------------------------------------------


def check_content(case: Case) -> None:
    """Check that an exchange gives each rank its output, and leaves the inputs unchanged."""
    inputs = case.inputs()
    plans = case.plans(inputs=inputs)
    memories = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for own in inputs for x in own]
    before = [memory.clone() for memory in memories]
    outputs = core.world(case.world).exchange(plans, inputs)
    for rank, (ours, theirs) in enumerate(zip(outputs, case.expected(), strict=True)):
        for got, wanted in zip(ours, theirs, strict=True):
            assert got.shape == wanted.shape, f"rank {rank}"
            assert torch.equal(got, wanted), f"rank {rank}"
    assert all(map(torch.equal, before, memories)), "an input was modified"


def check_writes(case: Case) -> None:
    """Check that the blocks of all ranks cover each output exactly once, stay in bounds, and are merged."""
    inputs = case.inputs()
    plans = case.plans(inputs=inputs)
    for receiver in plans:
        counts = [torch.zeros(tensor.out_bytes, dtype=torch.int32) for tensor in receiver.tensors]
        moved = [0] * len(counts)
        for sender, own in zip(plans, inputs, strict=True):
            spans = [span(x) for x in own]
            bytes_ = 0
            for block in sender.blocks(receiver.rank):
                extents, src, dst = zip(*block.loops, strict=True) if block.loops else ((), (), ())
                # as_strided raises out of bounds; a block that writes a byte twice moves too many bytes
                region = counts[block.tensor].as_strided((*extents, block.run), (*dst, 1), block.dst)
                region += 1
                moved[block.tensor] += region.numel()
                bytes_ += region.numel()
                last = block.src + sum((n - 1) * step for n, step in zip(extents, src, strict=True))
                assert block.src >= 0 and last + block.run <= spans[block.tensor]
                assert_merged(block)
            assert bytes_ == sender.struct.push[receiver.rank].bytes
        for count, total, tensor in zip(counts, moved, receiver.tensors, strict=True):
            assert total == tensor.out_bytes
            assert bool((count == 1).all())


def span(items: torch.Tensor) -> int:
    """Bytes from the first item's first to the last item's last."""
    if items.numel() == 0:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(items.shape, items.stride(), strict=True))


def assert_merged(block: core.BlockRow) -> None:
    assert all(extent > 1 for extent, _, _ in block.loops)
    if block.loops:
        _, src, dst = block.loops[-1]
        assert (src, dst) != (block.run, block.run), "the innermost loop belongs to the run"
    for (_, src, dst), (n, inner_src, inner_dst) in zip(block.loops, block.loops[1:], strict=False):
        assert (src, dst) != (inner_src * n, inner_dst * n), "two loops are one"


def check_packed(case: Case) -> None:
    """Check that packing and unpacking give the same outputs, and that both ends count the same bytes."""
    inputs = case.inputs()
    plans = case.plans(core.SIDE_PULL, inputs)
    pushed = [plan.push_bytes for plan in plans]
    pulled = [plan.pull_bytes for plan in plans]
    assert pushed == [list(column) for column in zip(*pulled, strict=True)]
    for ours, theirs in zip(core.exchange_packed(plans, inputs), case.expected(), strict=True):
        assert all(map(torch.equal, ours, theirs))


def check_inverse(case: Case) -> None:
    """Check that the inverse op of the table restores the inputs."""
    inputs, shared = case.inputs(), core.world(case.world)
    outputs = shared.exchange(case.plans(inputs=inputs), inputs)
    args = [part.move.inverse_args for part in case.parts]
    back = shared.exchange(core.build_plans(EXCHANGES[case.op].inverse, outputs, args), outputs)
    for ours, theirs in zip(back, inputs, strict=True):
        assert all(map(torch.equal, ours, theirs))


def items(*shape: int, item: int = 2) -> torch.Tensor:
    return torch.zeros(*shape, item, dtype=torch.uint8)


CHECKS = [check_content, check_writes, check_packed, check_inverse]
every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[6:])
every_op = pytest.mark.parametrize("op", EXCHANGES)
