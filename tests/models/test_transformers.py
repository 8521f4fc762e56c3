# SPDX-License-Identifier: Apache-2.0
"""spar.integrations.transformers: losses and gradients of stock models are those of one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from conftest import Ranks
from helpers import llms
from helpers.llms import check_exact, even, left_padded, maker, packed, packed_rows, whole, zigzag
from helpers.whole_attention import METHODS

from spar import SequenceLayout
from spar.integrations.transformers import shard
from spar.parallel_state import destroy_parallel_state, init_parallel_state

PRELOAD = llms.PRELOAD
POOL = (2, 3, 4)


def check_model(rank: int, world: int, group: llms.Group, name: str) -> None:
    """Each method with one layout; over the numbers of ranks, each with each."""
    make = maker(name)
    for place, method in enumerate(METHODS):
        layout = (None, even, zigzag)[(place + world) % 3]
        check_exact(make, whole(), group, method=method, layout=layout)
    check_exact(make, left_padded(), group)
    for method in METHODS:
        check_exact(make, packed(5, 20, 4, 12), group, method=method)


@pytest.mark.parametrize("world", POOL)
@pytest.mark.parametrize("name", llms.MODELS)
def test_models_are_exact(pool: Ranks, name: str, world: int) -> None:
    pool(world, check_model, name)


def check_other_models(rank: int, world: int, group: llms.Group) -> None:
    for name, config in llms.OTHERS.items():
        for batch in (whole(), left_padded(), packed(5, 20, 12)):
            check_exact(maker(name, **config), batch, group)


def test_other_models_are_exact(pool: Ranks) -> None:
    pool(2, check_other_models)


def check_masks(rank: int, world: int, group: llms.Group) -> None:
    """Padding and documents by each method; on an even and on an odd number of ranks by each layout, too."""
    make = maker("llama")
    batches = (left_padded(), packed(5, 20, 4, 12), packed_rows())
    for place, (method, batch) in enumerate(product((None, *METHODS), batches)):
        for layout in (even, zigzag) if world in (2, 3) else ((even, zigzag)[place % 2],):
            check_exact(make, batch, group, method=method, layout=layout)


@pytest.mark.parametrize("world", (1, *POOL))
def test_padding_and_documents_are_exact(pool: Ranks, world: int) -> None:
    pool(world, check_masks)


def check_balanced(rank: int, world: int, group: llms.Group, name: str) -> None:
    """Documents that mostly stay whole, one of which a rank shares with others."""
    lengths = (5, 20, 4, 12)
    layout = SequenceLayout.balanced(lengths, group)
    for method in (None, *METHODS):
        check_exact(maker(name), packed(*lengths), group, method=method, layout=layout)


@pytest.mark.parametrize("name", ["llama", "windows in some layers"])
def test_balanced_layouts_are_exact(pool: Ranks, name: str) -> None:
    pool(3, check_balanced, name)


def check_hybrid(rank: int, world: int, group: llms.Group) -> None:
    """Ring x ulysses, and its group taken from the layout."""
    state = init_parallel_state(ring_attention_size=2, ulysses_parallel_size=2)
    try:
        layout = SequenceLayout.hybrid(37, state)
        for batch in (whole(), left_padded()):
            check_exact(maker("llama"), batch, layout.group, layout=layout)
        model = maker("llama")()
        model.set_attn_implementation("spar")
        part = shard(model, whole(), layout)
        assert part["input_ids"].equal(whole()["input_ids"][:, layout.index()])
    finally:
        destroy_parallel_state()


def test_hybrid_layout_is_exact(pool: Ranks) -> None:
    pool(4, check_hybrid)


def check_whole_masks(rank: int, world: int, group: llms.Group) -> None:
    """A mask of the caller's, in which the first tokens see each other; and one for keys alone."""
    prefix = torch.ones(37, 37, dtype=torch.bool).tril()
    prefix[:9, :9] = True
    keys = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    keys[0, ..., 20:25] = False  # a stock model does not add causality to it
    added = torch.zeros(37, 37).masked_fill(~prefix, -torch.inf)
    for mask, method in product((prefix[None, None], keys, added[None, None]), METHODS):
        check_exact(maker("llama"), whole() | {"attention_mask": mask}, group, method=method)


def test_masks_of_the_caller_are_exact(pool: Ranks) -> None:
    pool(2, check_whole_masks)
