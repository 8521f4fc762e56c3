# SPDX-License-Identifier: Apache-2.0
"""Move data in and out of sequence parallelism: samples, and padded slices of a sequence. From LightRFT."""

from .ops.names.lightrft import (
    SPDataProcessor,
    gather_forward_split_backward_and_unpad,
    sp_slice_and_pad_input,
)

__all__ = ["SPDataProcessor", "gather_forward_split_backward_and_unpad", "sp_slice_and_pad_input"]
