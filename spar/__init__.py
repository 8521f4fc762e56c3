"""spar: the sequence-parallel communication layer for PyTorch."""

from ._version import __version__
from .communicator import Transport
from .errors import (
    ExchangeTimeoutError,
    GroupBrokenError,
    MismatchError,
    OutOfMemoryError,
    PeerLostError,
    SparError,
    TransportError,
)
from .groups import close, empty_cache, init, memory_stats, transport
from .ops import all_to_all, gather_forward_split_backward, split_forward_gather_backward
from .sizes import cal_split_sizes, cal_split_sizes_multi

__all__ = [
    "ExchangeTimeoutError",
    "GroupBrokenError",
    "MismatchError",
    "OutOfMemoryError",
    "PeerLostError",
    "SparError",
    "Transport",
    "TransportError",
    "__version__",
    "all_to_all",
    "cal_split_sizes",
    "cal_split_sizes_multi",
    "close",
    "empty_cache",
    "gather_forward_split_backward",
    "init",
    "memory_stats",
    "split_forward_gather_backward",
    "transport",
]
