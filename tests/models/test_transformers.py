"""spar.integrations.transformers: losses and gradients of stock models are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from conftest import TRANSPORTS, Ranks
from helpers import llms
from helpers.llms import check_exact, even, left_padded, maker, packed, packed_rows, whole, zigzag
from helpers.whole_attention import METHODS

PRELOAD = llms.PRELOAD
WORLDS = (2, 3, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    pool = Ranks(WORLDS)
    pool.transport = TRANSPORTS[0]
    yield pool
    pool.stop()


def check_model(rank: int, world: int, group: llms.Group, name: str) -> None:
    make = maker(name)
    for method, layout in product(METHODS, (None, even, zigzag)):
        check_exact(make, whole(), group, method=method, layout=layout)
    check_exact(make, left_padded(), group)
    for method in METHODS:
        check_exact(make, packed(5, 20, 4, 12), group, method=method)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", llms.MODELS)
def test_models_are_exact(pool: Ranks, name: str, world: int) -> None:
    pool(world, check_model, name)


def check_masks(rank: int, world: int, group: llms.Group) -> None:
    """Padding and documents, each by each method and layout."""
    make = maker("llama")
    for method, layout in product((None, *METHODS), (even, zigzag)):
        for batch in (left_padded(), packed(5, 20, 4, 12), packed_rows()):
            check_exact(make, batch, group, method=method, layout=layout)


@pytest.mark.parametrize("world", (1, *WORLDS))
def test_padding_and_documents_are_exact(pool: Ranks, world: int) -> None:
    pool(world, check_masks)
