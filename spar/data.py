# SPDX-License-Identifier: Apache-2.0
"""Move data in and out of sequence parallelism: packed samples, and LightRFT's samples and padded slices."""

from .ops.names.lightrft import (
    SPDataProcessor,
    gather_forward_split_backward_and_unpad,
    sp_slice_and_pad_input,
)
from .ops.packing import PackedSamples

__all__ = [
    "PackedSamples",
    "SPDataProcessor",
    "gather_forward_split_backward_and_unpad",
    "sp_slice_and_pad_input",
]
