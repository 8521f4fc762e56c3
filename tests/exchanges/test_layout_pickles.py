# SPDX-License-Identifier: Apache-2.0
"""A SequenceLayout is a value: it pickles, copies and loads in processes that do not have its group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from helpers.processes import finish, start
from helpers.reference import assert_same
from helpers.tables import MAKERS

import spar
from spar import SequenceLayout, data

EXCHANGES: dict[str, Callable[[SequenceLayout, torch.Tensor, torch.Tensor], Any]] = {
    "SequenceLayout.gather": lambda layout, own, whole: layout.gather(own, 0),
    "reduce_scatter": lambda layout, own, whole: layout.reduce_scatter(whole, 0),
    "SequenceLayout.halo": lambda layout, own, whole: layout.halo(own, 1, 0),
    "SequenceLayout.shift": lambda layout, own, whole: layout.shift(own, 1, 0),
    "SequenceLayout.shard": lambda layout, own, whole: layout.shard(whole.requires_grad_(), 0, "down"),
    "all_to_all": lambda layout, own, whole: spar.all_to_all(own, None, 1, 0, layout=layout),
    "token_logprobs": lambda layout, own, whole: spar.token_logprobs(
        own[None], layout.index()[None] % 4, layout, gather="sequence"
    ),
    "masked_mean": lambda layout, own, whole: spar.masked_mean(own.T, own.T, layout),
    "attention": lambda layout, own, whole: spar.attention(*[own[None, :, None]] * 3, layout),
}


def parts(layout: SequenceLayout) -> list[torch.Tensor]:
    """What needs no group."""
    whole = torch.arange(4.0 * layout.total).view(-1, 4)
    return [
        layout.index(),
        layout.positions(),
        layout.cu_seqlens(),
        torch.tensor(layout.sizes),
        layout.shard(whole, 0),
        *layout.shard([whole.T, whole[None]], 1),
        layout.drop_halo(layout.shard(whole, 0), 0, 0),
    ]


class Parts(torch.utils.data.Dataset[Any]):
    """The parts of layouts, and what exchanges raise."""

    def __init__(self, layouts: list[SequenceLayout], packed: data.PackedSamples) -> None:
        self.layouts, self.packed = layouts, packed

    def __len__(self) -> int:
        return len(self.layouts)

    def __getitem__(self, i: int) -> Any:
        layout = self.layouts[i]
        again = pickle.loads(pickle.dumps(layout))
        assert again == layout and hash(again) == hash(layout)
        whole = torch.arange(4.0 * layout.total).view(-1, 4)
        for name, exchange in EXCHANGES.items():
            with pytest.raises(ValueError, match="^" + name) as caught:
                exchange(layout, layout.shard(whole, 0), whole.clone())
            assert f"has no group {layout.group.group_name!r} of 2 ranks" in str(caught.value), caught.value
        return repr(layout), parts(layout), self.packed.shard(torch.arange(8).view(2, 4))


def load_in_workers(rank: int, folder: Path) -> None:
    group = dist.new_group([0, 1])
    layouts = [m.make(group, *given) for m in MAKERS.values() for given in m.examples(2)]
    packed = data.PackedSamples(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), group)
    # a worker of either kind imports torch: one on each rank
    method = ("forkserver", "spawn")[rank]
    loader = torch.utils.data.DataLoader(
        Parts(layouts, packed), batch_size=None, num_workers=1, multiprocessing_context=method
    )
    for layout, (text, found, of_samples) in zip(layouts, loader, strict=True):
        assert text == repr(layout)
        assert_same(of_samples, packed.shard(torch.arange(8).view(2, 4)))
        for x, y in zip(found, parts(layout), strict=True):
            assert_same(x, y, text)
    zigzag = SequenceLayout.zigzag(11, group)
    sent: list[Any] = [None, None]
    dist.all_gather_object(sent, zigzag)
    assert sent == [zigzag] * 2 and sent[1 - rank].group is group, "the place is the receiver's"
    torch.save({"layout": zigzag}, folder / f"{rank}.pt")
    if rank == 0:
        with pytest.raises(pickle.UnpicklingError, match=r"add_safe_globals\(\[spar.*SequenceLayout\]"):
            torch.load(folder / "0.pt")
        with torch.serialization.safe_globals([SequenceLayout]):
            assert torch.load(folder / "0.pt") == {"layout": zigzag}
    # A name that another job gave to a group of another size.
    other = SequenceLayout.__new__(SequenceLayout)
    other.__setstate__(("even", (9,), (group.group_name, 3, 1)))
    assert other.sizes == (3, 3, 3) and other.index().tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="of 3 ranks"):
        other.gather(torch.ones(3), 0)
    assert_same(zigzag.gather(zigzag.index(), 0), torch.arange(11))


def test_layouts_shard_in_workers_and_load_without_a_group(tmp_path: Path) -> None:
    assert finish(start(load_in_workers, 2, tmp_path), 120) == [0, 0]
    layout = torch.load(tmp_path / "1.pt", weights_only=False)["layout"]
    assert repr(layout) == "SequenceLayout.zigzag(11, 2 ranks)"
    assert layout.index().tolist() == [3, 4, 5, 6, 7, 8]
