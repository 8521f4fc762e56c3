"""spar: the sequence-parallel communication layer for PyTorch."""

from . import data as data
from . import parallel_state as parallel_state
from . import sharding as sharding
from ._version import __version__
from .data import gather_forward_split_backward_and_unpad
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
from .hybrid import (
    gather_forward_split_backward_with_cp,
    packed_data_gather_forward_split_backward_with_cp,
    packed_data_split_forward_gather_backward_with_cp,
    split_forward_gather_backward_with_cp,
)
from .ops import (
    all_to_all,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    reorder_output,
    split_forward_gather_backward,
)
from .rendezvous import Transport
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
    "gather_forward_split_backward_and_unpad",
    "gather_forward_split_backward_with_cp",
    "init",
    "load_balanced_gather_forward_split_backward",
    "load_balanced_split_forward_gather_backward",
    "memory_stats",
    "packed_data_gather_forward_split_backward",
    "packed_data_gather_forward_split_backward_with_cp",
    "packed_data_split_forward_gather_backward",
    "packed_data_split_forward_gather_backward_with_cp",
    "reorder_output",
    "split_forward_gather_backward",
    "split_forward_gather_backward_with_cp",
    "transport",
]
