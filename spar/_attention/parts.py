# SPDX-License-Identifier: Apache-2.0
"""The parts of one block, such as packed documents, which a kernel computes in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._exchange.observers import is_fake


class Parts:
    """Queries and keys that attend to each other part by part, one part behind the other in both.

    A part without keys has the queries between two others, and one without queries the keys.

    Attributes:
        queries, keys: where each part begins in the block, and the end of the last one.
        most_queries, most_keys: of one part.
        has_empty: whether some queries have no keys.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """sizes: the numbers of queries and of keys of each part, in order."""
        queries, keys = zip(*sizes, strict=True)
        self.queries, self.keys = (
            tuple(itertools.accumulate(column, initial=0)) for column in (queries, keys)
        )
        # With 1 the kernel expects a query in each part, and returns the log-sum-exp in another order.
        self.most_queries, self.most_keys = max(2, *queries), max(keys)
        self.has_empty = any(size > 0 and not of_keys for size, of_keys in sizes)
        self._made: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, samples: int) -> tuple[Tensor, Tensor]:
        """Return `queries` and `keys` of samples one behind the other, int32 [samples * parts + 1]."""
        key = device, samples
        if key not in self._made:
            # autograd saves them, which it cannot if they were made in inference mode.
            with torch.inference_mode(False):
                queries, keys = (
                    torch.tensor([0, *_repeated(ends, samples)], dtype=torch.int32, device=device)
                    for ends in (self.queries, self.keys)
                )
            if is_fake(queries):
                return queries, keys
            self._made[key] = queries, keys
        return self._made[key]


def _repeated(ends: Sequence[int], samples: int) -> Iterator[int]:
    return (sample * ends[-1] + end for sample in range(samples) for end in ends[1:])
