# SPDX-License-Identifier: Apache-2.0
"""Names, arguments and settings of earlier releases: a warning, or a line in CHANGELOG.md."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks

import spar
from spar.parallel_state import ParallelState

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
REMOVAL = "0.3.0"  # the release that removes what warns here


@pytest.mark.parametrize(("given", "neighbours"), [(True, "ring"), (False, None)])
def test_ring_by_ring_warns_and_works(given: bool, neighbours: str | None) -> None:
    expected = rf"ring_by_ring=\) is deprecated .* {re.escape(REMOVAL)}; use cp_neighbours"
    with pytest.warns(DeprecationWarning, match=expected) as caught:
        by_name = ParallelState(ring_by_ring=given)
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=expected):
        by_place = ParallelState(None, None, given)  # type: ignore[arg-type,unused-ignore]
    for state in (by_name, by_place):
        assert state.get_cp_neighbours() == neighbours and state.is_cp_ring_by_ring() is given


def test_current_arguments_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ParallelState(cp_neighbours="ulysses").get_cp_neighbours() == "ulysses"


def gather_with_affinity(rank: int, world: int, group: dist.ProcessGroup) -> None:
    pair = dist.new_group(list(range(world)))
    with mock.patch.dict(os.environ, SPAR_AFFINITY="1"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spar.gather_forward_split_backward(torch.zeros(2), pair, 0)
        spar.gather_forward_split_backward(torch.zeros(2), pair, 0)
    (warning,) = (w for w in caught if "SPAR_AFFINITY" in str(w.message))
    assert warning.category is DeprecationWarning and warning.filename == __file__
    assert "no effect since spar 0.2.0" in str(warning.message) and REMOVAL in str(warning.message)


@pytest.mark.one_transport
def test_removed_variable_warns_once_per_group(ranks: Ranks) -> None:
    ranks(2, gather_with_affinity)


def test_what_is_gone_is_in_the_changelog() -> None:
    """What no warning covers has its line: undocumented modules, and a counter that was always 0."""
    section = CHANGELOG.split("\n## [0.2.0]")[1].split("\n## [0.1.0]")[0]
    parts = {part.split("\n")[0]: part for part in section.split("\n### ")[1:]}
    gone = ("spar.exchanges", "spar.collectives", "spar.hybrid")
    for name in (*gone, "calls.p2p", "SPAR_AFFINITY"):
        assert f"`{name}`" in parts["Removed"], name
    assert "ring_by_ring" in parts["Deprecated"]
    assert not any(importlib.util.find_spec(name) for name in gone)
    assert "calls.p2p" not in spar.memory_stats()


def use_former_names(rank: int, world: int, group: dist.ProcessGroup) -> None:
    from spar.integrations import diffusers

    pairs = [(spar.shard_model, spar.unshard_model), (diffusers.enable, diffusers.disable)]
    for shard, undo in pairs:
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
        with pytest.warns(DeprecationWarning, match=r"use spar.parallelize\(model, group\)") as caught:
            report = shard(model, group, method="gather")
        assert caught[0].filename == __file__ and "spar 0.4.0" in str(caught[0].message)
        model(torch.zeros(1, 4, 8))
        assert report.share == 0.5
        with pytest.warns(DeprecationWarning, match=r"use spar.unparallelize\(model\)"):
            undo(model)
        assert "forward" not in vars(model)


def use_all_gather(rank: int, world: int, group: dist.ProcessGroup) -> None:
    layout, x = spar.SequenceLayout.even(4, group), torch.rand(4 // world).requires_grad_()
    with pytest.warns(DeprecationWarning, match=r'use SequenceLayout.gather\(backward="sum"\)') as caught:
        y = layout.all_gather(x, 0)
    assert caught[0].filename == __file__ and torch.equal(y, layout.gather(x, 0, backward="sum"))
    y.backward(torch.full_like(y, rank + 1.0))
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]


@pytest.mark.one_transport
def test_former_gather_with_exact_gradients_warns_and_works(ranks: Ranks) -> None:
    ranks(2, use_all_gather)


def use_attend(rank: int, world: int, group: dist.ProcessGroup) -> None:
    layout, x = spar.SequenceLayout.even(4, group), torch.rand(1, 4 // world, 2, 8)
    kernels = [spar.attention(x, x, x, layout, kernel="blockwise")]
    with pytest.warns(DeprecationWarning, match=r"attend=\) is deprecated .* 0.4.0; use kernel=") as caught:
        kernels.append(spar.attention(x, x, x, layout, attend="blockwise"))  # type: ignore[call-overload]
    assert caught[0].filename == __file__ and torch.equal(*kernels)
    with pytest.raises(TypeError, match="kernel and attend are passed"):
        spar.attention(x, x, x, layout, attend="flash", kernel=None)  # type: ignore[call-overload]


@pytest.mark.one_transport
def test_former_name_of_kernel_warns_and_works(ranks: Ranks) -> None:
    ranks(2, use_attend)


@pytest.mark.one_transport
def test_former_names_of_parallelize_warn_and_work(ranks: Ranks) -> None:
    ranks(2, use_former_names)
