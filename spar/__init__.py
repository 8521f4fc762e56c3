# SPDX-License-Identifier: Apache-2.0
"""spar: context parallelism for PyTorch, by one call and by operations.

What most programs call:

    parallelize      shard the sequence of a model of torch, transformers or diffusers
    unparallelize    undo it
    SequenceLayout   how a sequence lies on the ranks; it shards, gathers, shifts, and adds halos
    attention        scaled dot product attention over a sharded sequence
    Spans            which keys its queries attend to
    mean_loss        divide all ranks' loss by the number of all ranks' tokens
    masked_mean      average values over tokens, samples or groups of samples
    token_logprobs   log-probability and entropy of each token, from tiles of logits
    rank_seed        seed dropout, differently on each rank
    transport        report how a group moves bytes, and why

Operations on one process group, each differentiable:

    all_to_all         scatter one dim over the ranks, gather another
    all_to_all_single  send slices of any sizes for each pair of ranks
    all_gather         concatenate the shards of all ranks; sum their gradients
    reduce_scatter     sum over the ranks, and keep this rank's shard
    roll               move tokens along a sequence, and around its end
    by_heads           run a function that mixes tokens head by head, such as linear attention
    by_state           run a recurrence with a linear state, of which states alone travel

Work is an exchange in flight, which `async_op=True` returns. Rows plans an exchange of the rows that each
rank wants by their index. A group's set-up and end: init, close, memory_stats, empty_cache, debug.

Names of MindSpeed-MM and LightRFT, for code that has them:

    split_forward_gather_backward                keep this rank's shard; gather gradients
    gather_forward_split_backward                concatenate the shards of all ranks; split the gradient
    gather_forward_split_backward_and_unpad      the same, then remove padding from the end
    load_balanced_split_forward_gather_backward  keep two chunks, balanced for a causal mask
    load_balanced_gather_forward_split_backward  undo it, in natural order
    packed_data_split_forward_gather_backward    keep this rank's shard of each of several packed sequences
    packed_data_gather_forward_split_backward    undo it
    reorder_output                               reorder gathered zigzag chunks into natural order
    cal_split_sizes, cal_split_sizes_multi       sizes of the ranks' shards

Over ring x ulysses, by the parallel state: split_forward_gather_backward_with_cp,
gather_forward_split_backward_with_cp, packed_data_split_forward_gather_backward_with_cp and
packed_data_gather_forward_split_backward_with_cp.

Modules:

    spar.sharding        sp_shard, sp_gather, sp_shard_with_padding, over the current topology
    spar.data            distribute samples and padding over sequence ranks
    spar.parallel_state  create groups, or use those of a DeviceMesh
    spar.topology        use several sets of groups in one process
    spar.testing         compare a sharded model with one process
    spar.utils           process groups without torch.distributed's global state
    spar.integrations    stock models of transformers and diffusers
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import (
    _extension as _extension,  # first
    parallel_state as parallel_state,
    sharding as sharding,
    topology as topology,
)
from ._control.state import Transport
from ._exchange.rows import Rows
from ._exchange.work import Work
from ._version import __version__
from .errors import (
    ExchangeTimeoutError,
    GroupBrokenError,
    MismatchError,
    OutOfMemoryError,
    PeerLostError,
    SparError,
    TransportError,
)
from .groups import close, debug, empty_cache, init, memory_stats, transport
from .loss import mean_loss
from .ops.all_to_all import all_to_all
from .ops.all_to_all_single import all_to_all_single
from .ops.by_heads import by_heads
from .ops.by_state import by_state
from .ops.gather import all_gather, reduce_scatter
from .ops.hybrid import (
    gather_forward_split_backward_with_cp,
    packed_data_gather_forward_split_backward_with_cp,
    packed_data_split_forward_gather_backward_with_cp,
    split_forward_gather_backward_with_cp,
)
from .ops.masked_mean import masked_mean
from .ops.names.lightrft import gather_forward_split_backward_and_unpad
from .ops.names.mindspeed_mm import reorder_output
from .ops.roll import roll
from .ops.splits import (
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    split_forward_gather_backward,
)
from .ops.token_logprobs import token_logprobs
from .random import rank_seed
from .sequence_layout import SequenceLayout
from .sizes import cal_split_sizes, cal_split_sizes_multi

__all__ = [
    "ExchangeTimeoutError",
    "GroupBrokenError",
    "MismatchError",
    "OutOfMemoryError",
    "PeerLostError",
    "Rows",
    "SequenceLayout",
    "Spans",
    "SparError",
    "Transport",
    "TransportError",
    "Work",
    "__version__",
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "attention",
    "by_heads",
    "by_state",
    "cal_split_sizes",
    "cal_split_sizes_multi",
    "close",
    "debug",
    "empty_cache",
    "gather_forward_split_backward",
    "gather_forward_split_backward_and_unpad",
    "gather_forward_split_backward_with_cp",
    "init",
    "load_balanced_gather_forward_split_backward",
    "load_balanced_split_forward_gather_backward",
    "masked_mean",
    "mean_loss",
    "memory_stats",
    "packed_data_gather_forward_split_backward",
    "packed_data_gather_forward_split_backward_with_cp",
    "packed_data_split_forward_gather_backward",
    "packed_data_split_forward_gather_backward_with_cp",
    "parallelize",
    "rank_seed",
    "reduce_scatter",
    "reorder_output",
    "roll",
    "split_forward_gather_backward",
    "split_forward_gather_backward_with_cp",
    "token_logprobs",
    "transport",
    "unparallelize",
]

if _TYPE_CHECKING:
    from . import data as data, integrations as integrations, testing as testing, utils as utils
    from ._attention.attention import attention as attention
    from ._attention.spans import Spans as Spans
    from .integrations._parallelize import parallelize as parallelize, unparallelize as unparallelize


def __getattr__(name: str) -> object:
    """Import at its first use what not all callers need: attention takes a third of the time of all."""
    if name in ("attention", "Spans"):
        from ._attention import attention, spans

        globals().update(attention=attention.attention, Spans=spans.Spans)
        return globals()[name]
    if name in ("parallelize", "unparallelize"):
        from .integrations import _parallelize

        return getattr(_parallelize, name)
    if name in ("shard_model", "unshard_model"):
        from .integrations import _former_names

        return getattr(_former_names, name)
    if name in ("data", "integrations", "testing", "utils"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of `__all__`, too, before their first use: `help(spar)` shows what this lists."""
    return [*{*globals(), *__all__}]
