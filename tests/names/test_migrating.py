# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md: the code before and after each diff has the same results and gradients."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers import other_libraries
from helpers.processes import finish, start
from helpers.reference import assert_same, cells

import spar
from spar.data import sp_slice_and_pad_input
from spar.parallel_state import RankGenerator, set_sequence_parallel_group
from spar.sharding import ShardingValidator, sp_shard_with_padding

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
Group = dist.ProcessGroup
LENGTHS = [7, 0, 2, 5]  # of packed sequences


@functools.cache
def blocks() -> dict[str, tuple[str, str]]:
    """Return the code before and after each diff, by heading."""
    found = {}
    for section in PAGE.read_text().split("\n### ")[1:]:
        heading, _, rest = section.partition("\n")
        (diff,) = (part.split("\n```")[0] for part in rest.split("```diff\n")[1:])
        assert all(line[0] in " +-" for line in diff.splitlines()), heading
        before, after = (
            "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", sign)) for sign in "-+"
        )
        found[heading] = before, after
    return found


@contextmanager
def installed(group: Group | None) -> Iterator[None]:
    """Install stand-ins for the other libraries, and set their and spar's sequence group."""
    names = {
        ".".join(name.split(".")[: n + 1])
        for name in other_libraries.MODULES
        for n in range(name.count(".") + 1)
    }
    other_libraries.sequence.group = group
    set_sequence_parallel_group(group)
    try:
        for name in names:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(other_libraries.MODULES.get(name, {}))
        yield
    finally:
        for name in names:
            del sys.modules[name]
        other_libraries.sequence.group = None
        set_sequence_parallel_group(None)


def heads(rank: int, world: int, seq: int = 6) -> dict[str, Any]:
    """Even parts of the sequence, with all 6 heads: `[B, S/P, H, D]`."""
    return {"x": cells((2, seq, 6, 3), torch.float32, salt=rank), "seq": seq * world}


def uneven(rank: int, world: int) -> dict[str, Any]:
    """The first rank's part of the sequence is one longer."""
    return heads(rank, world, 5 + (rank == 0)) | {"seq": 5 * world + 1}


def alike(rank: int, world: int, seq: int = 12) -> dict[str, Any]:
    """The whole sequence, on all ranks."""
    return {"x": cells((2, seq, 3), torch.float32), "seq": seq}


def packed(rank: int, world: int) -> dict[str, Any]:
    return {"x": cells((sum(LENGTHS), 3), torch.float32), "lengths": LENGTHS}


def hybrid(rank: int, world: int) -> dict[str, Any]:
    return alike(rank, world, 20) | {"lengths": [7, 0, 8, 5]}


def tokens(rank: int, world: int) -> dict[str, Any]:
    ids = torch.arange(13)[None] % 5
    return {"x": cells((5, 2), torch.float32), "input_ids": ids, "position_ids": torch.arange(13)[None]}


def videos(rank: int, world: int) -> dict[str, Any]:
    """A whole sequence, on all ranks, whose length no number of ranks divides."""
    return {"x": cells((2, 13, 6, 3), torch.float32), "seq": 13}


def scaled_down(rank: int, world: int) -> dict[str, Any]:
    """For attention, whose weights are not to be those of one key."""
    given = heads(rank, world)
    return given | {"x": given["x"] / given["x"].abs().max(), "seq_lens": torch.tensor([6 * world] * 2)}


def samples(rank: int, world: int) -> dict[str, Any]:
    return {"samples": [cells((i, 2), torch.float32, salt=rank) for i in range(3)]}


Inputs = Callable[[int, int], dict[str, Any]]
INPUTS: dict[str, Inputs] = {
    "Ulysses by hand": scaled_down,
    "FastVideo": videos,
    "Wan2.2": scaled_down,
    "sp_gather": heads,
    "sp_shard": alike,
    "sp_shard_with_padding": lambda rank, world: alike(rank, world, 13),
    "ShardingValidator": alike,
    "SPDataProcessor": samples,
    "sp_slice_and_pad_input, gather_forward_split_backward_and_unpad": tokens,
    "the group": lambda rank, world: {},
    "all_to_all": uneven,
    "split and gather": lambda rank, world: alike(rank, world, 13),
    "load balanced": alike,
    "packed sequences": packed,
    "DeepSpeed": heads,
    "yunchang, 4 dims": heads,
    "yunchang, 5 dims: Q, K and V in one tensor": lambda rank, world: {
        "x": cells((2, 4, 3, 6, 2), torch.float32, salt=rank)
    },
    "verl": heads,
    "verl, a sequence that was padded": lambda rank, world: heads(rank, world) | {"seq": 6 * world - 1},
    "xtuner": alike,
    "ColossalAI": alike,
}
HYBRID = "ring x ulysses, _with_cp"
# only imports are tested here
NAMES = {
    "names of parallel_state": "initialize_model_parallel",
    "names of distributed.utils": "get_pp_indices",
}
NO_GRADIENT = {"ShardingValidator", "SPDataProcessor", "the group"}
ATTENTION = {"Ulysses by hand", "Wan2.2"}  # the last bits differ


def flat(y: Any) -> list[Any]:
    return list(y) if isinstance(y, (list, tuple)) else [y]


def run(code: str, inputs: dict[str, Any]) -> tuple[list[Any], torch.Tensor | None]:
    """Run a block and return its results, and the gradient of x if y has one.

    Each result has another gradient on each rank.
    """
    names = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    if "x" in names:
        names["x"].requires_grad_()
    exec(compile(code, str(PAGE), "exec"), names)
    results = flat(names["y"])
    graded = [y for y in results if isinstance(y, torch.Tensor) and y.requires_grad]
    if graded:
        grads = [cells(tuple(y.shape), y.dtype, salt=inputs["rank"] + i) for i, y in enumerate(graded)]
        torch.autograd.backward(graded, grads)
    extra = [names[name] for name in ("pad_size", "padding", "position_ids", "own_ids") if name in names]
    return results + extra, names["x"].grad if "x" in names else None


def both(
    heading: str, inputs: dict[str, Any]
) -> tuple[tuple[list[Any], torch.Tensor | None], tuple[list[Any], torch.Tensor | None]]:
    before, after = blocks()[heading]
    assert before != after
    with installed(inputs["group"]):
        was = run(before, inputs)
    with installed(inputs["group"]):
        becomes = run(after, inputs)
    assert len(was[0]) == len(becomes[0]) > 0
    return was, becomes


def check_block(rank: int, world: int, group: Group, heading: str) -> None:
    inputs = INPUTS[heading](rank, world) | {"group": group, "P": world, "rank": rank}
    (was, grad_was), (becomes, grad_becomes) = both(heading, inputs)
    for a, b in zip(was, becomes, strict=True):
        if heading in ATTENTION:
            torch.testing.assert_close(b.detach(), a.detach())
        elif isinstance(a, torch.Tensor):
            assert_same(b.detach(), a.detach(), heading)
        else:
            assert a == b
    if heading in NO_GRADIENT:
        assert grad_was is None and grad_becomes is None
    elif heading == "sp_gather":  # had no gradient before (see the guide)
        assert grad_was is None and grad_becomes is not None
        grad = cells(tuple(becomes[0].shape), torch.float32, salt=rank)
        assert_same(grad_becomes, grad.chunk(world, 1)[rank] * world)
    elif heading == "Wan2.2":
        assert grad_was is None and grad_becomes is not None and bool(grad_becomes.any())
    elif heading in ATTENTION:
        torch.testing.assert_close(grad_becomes, grad_was)
    else:
        assert grad_was is not None and grad_becomes is not None and bool(grad_becomes.any())
        if heading in (
            "sp_shard",
            "sp_shard_with_padding",
            "FastVideo",
        ):  # now the mean over ranks (see the guide)
            dist.all_reduce(grad_was, group=group)
            grad_was /= world
        assert_same(grad_becomes, grad_was, heading)


@pytest.mark.parametrize("heading", INPUTS)
@pytest.mark.parametrize("world", [2, 3])
def test_blocks_keep_results_and_gradients(pool: Ranks, world: int, heading: str) -> None:
    pool.transport = "shm"
    pool(world, check_block, heading)


def check_hybrid(rank: int, folder: Path) -> None:
    group = dist.group.WORLD
    inputs = hybrid(rank, 4) | {"group": group, "P": 4, "rank": rank}
    (was, grad_was), (becomes, grad_becomes) = both(HYBRID, inputs)
    for a, b in zip(was, becomes, strict=True):
        assert_same(b.detach(), a.detach())
    assert grad_was is not None and grad_becomes is not None
    torch.testing.assert_close(grad_becomes, grad_was)


def test_ring_x_ulysses_block_keeps_results_and_gradients(tmp_path: Path) -> None:
    assert finish(start(check_hybrid, 4, tmp_path), 60) == [0] * 4


@pytest.mark.parametrize("heading", NAMES)
def test_blocks_of_names_import_from_spar(heading: str) -> None:
    before, after = (ast.parse(code).body for code in blocks()[heading])
    ((was,), (becomes,)) = before, after
    assert isinstance(was, ast.ImportFrom) and isinstance(becomes, ast.ImportFrom)
    names = [alias.name for alias in becomes.names]
    assert names == [alias.name for alias in was.names]
    assert becomes.module is not None and becomes.module.startswith("spar.")
    module = pytest.importorskip(becomes.module, reason=f"{becomes.module} does not exist")
    if not hasattr(module, NAMES[heading]):
        pytest.skip(f"{becomes.module} does not have these names")
    assert [name for name in names if not hasattr(importlib.import_module(becomes.module), name)] == []


def test_tables_use_names_that_exist() -> None:
    """Of spar: names in code outside of the diffs. Arguments that they are called with are not compared."""
    code = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.S))
    names = {name for text in code for name in re.findall(r"(?<![\w.])spar((?:\.[A-Za-z_]\w*)+)", text)}
    assert len(names) > 10
    for name in names:
        operator.attrgetter(name[1:])(spar)


def test_every_block_is_tested() -> None:
    assert set(blocks()) == {*INPUTS, HYBRID, *NAMES}


def test_every_stand_in_is_imported_by_a_block() -> None:
    imported = {
        (node.module, alias.name)
        for before, _ in blocks().values()
        for node in ast.walk(ast.parse(before))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {(module, name) for module, names in other_libraries.MODULES.items() for name in names} <= imported


def check_padding(rank: int, world: int, group: Group) -> None:
    set_sequence_parallel_group(group)
    try:
        x = torch.ones(1, 3, dtype=torch.uint8)
        part, _ = sp_shard_with_padding(x, 1, -1)
        assert part.tolist() == [[1, 255 if rank else 1]]
        with pytest.raises(ValueError, match="pad_value is 300; expected a value of"):
            sp_shard_with_padding(x, 1, 300)
        _, positions, _ = sp_slice_and_pad_input(x, torch.arange(3, dtype=torch.int32)[None])
        assert positions is not None and positions.dtype == torch.int32
    finally:
        set_sequence_parallel_group(None)


def test_padding_keeps_dtypes(pool: Ranks) -> None:
    pool.transport = "shm"
    pool(2, check_padding)


@pytest.mark.parametrize("calls", [["shard", "gather", "shard"], ["gather", "shard"]])
@pytest.mark.filterwarnings("ignore:spar")
def test_sharding_validator_depends_on_call_order(calls: list[str]) -> None:
    validator = ShardingValidator()
    with validator.track():
        for call in calls:
            getattr(validator, call)(torch.zeros(2), "x", 0)
    with pytest.raises(ValueError, match="sharded, but never gathered: 'x'"):
        validator.validate()


def test_rank_generator_expert_groups() -> None:
    ranks = RankGenerator(tp=2, sp=1, pp=2, cfg=1, dp=2)
    with pytest.raises(ValueError, match="token is 'ep'"):
        ranks.get_ranks("ep")
    assert [len(group) for group in ranks.get_ranks("tp-sp-cfg-dp")] == [ranks.ep] * 2
