"""The code of docs/data-parallel.md and docs/packed.md, run on real ranks and compared with one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.whole_attention import whole_attention
from test_faults import finish, start

import spar

DOCS = Path(__file__).parent.parent / "docs"


def first_block(page: str) -> str:
    found = re.search(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert found
    return found[1]


def check_data_parallel(rank: int, folder: Path) -> None:
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    names: dict[str, Any] = {}
    exec(first_block("data-parallel.md"), names)
    torch.manual_seed(0)
    model = names["Model"]()
    samples = torch.randint(100, (2, 1, 34), generator=torch.Generator().manual_seed(1)).flatten(0, 1)
    logits = model(samples[:, :-1], spar.SequenceLayout.even(33, alone))
    loss = F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
    loss.backward()
    torch.testing.assert_close(names["loss"].detach(), loss.detach(), atol=1e-6, rtol=1e-6)
    for found, expected in zip(names["model"].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, atol=1e-6, rtol=1e-5)
    dist.barrier()


def test_data_parallel_guide(tmp_path: Path) -> None:
    assert finish(start(check_data_parallel, 4, tmp_path), 120) == [0] * 4


def check_packed(rank: int, world: int, group: dist.ProcessGroup) -> None:
    generator = torch.Generator().manual_seed(2)
    names: dict[str, Any] = {"group": group}
    for name in ("whole_q", "whole_k", "whole_v"):
        names[name] = torch.randn(1, 24, 4, 8, generator=generator)
    exec(first_block("packed.md"), names)
    starts = [0, 5, 17, 17]
    for begin, length in zip(starts, names["lengths"], strict=True):
        document = slice(begin, begin + length)
        parts = [names[name][:, document] for name in ("whole_q", "whole_k", "whole_v")]
        if length:
            torch.testing.assert_close(names["whole"][:, document], whole_attention(*parts, causal=True))
    places = torch.cat([torch.arange(length) for length in names["lengths"]])
    assert torch.equal(names["positions"], places[names["layout"].index()])


def test_packed_guide(pool: Ranks) -> None:
    pool(2, check_packed)
