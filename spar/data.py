# SPDX-License-Identifier: Apache-2.0
"""Move data in and out of sequence parallelism: packed samples, prefix trees, and LightRFT's names."""

from ._attention.prefix_tree import PrefixTree, Tree
from .ops.names.lightrft import (
    SPDataProcessor,
    gather_forward_split_backward_and_unpad,
    sp_slice_and_pad_input,
)
from .ops.packing import PackedSamples
from .ops.tree_row import Edges

__all__ = [
    "Edges",
    "PackedSamples",
    "PrefixTree",
    "SPDataProcessor",
    "Tree",
    "gather_forward_split_backward_and_unpad",
    "sp_slice_and_pad_input",
]
