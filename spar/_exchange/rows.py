# SPDX-License-Identifier: Apache-2.0
"""`Rows`: the rows of a sharded dim that each rank wants, as `SequenceLayout.rows` plans them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from .. import _C
from ..errors import SparError
from .arguments import Arguments, check_summable
from .exchange import ONE, Scale
from .layouts import Args, Layout
from .observers import must_record
from .row_exchange import RowExchange, RowMaps
from .row_plan import RowPlan, plan_rows
from .together import exchange_together
from .work import Work

T = TypeVar("T", torch.Tensor, list[torch.Tensor])


class Rows:
    """The rows of a sharded dim that each rank wants; made by `SequenceLayout.rows`.

    It serves tensors of any dtype, width and dim on the index's device. Each row travels once to each rank
    that wants it. A plan may be used any number of times, also inside of compiled functions. Calls are
    collective, also on ranks with an empty index; all ranks must use plans in the same order.

    Attributes:
        own: how many rows this rank has.
        received: how many rows of others it receives.
    """

    def __init__(self, plan: RowPlan, group: dist.ProcessGroup, layout: object) -> None:
        self.own, self.received = plan.own, plan.received
        self._plan, self._group, self._layout = plan, group, layout
        # They live as long as the plan.
        self._exchanges: dict[tuple[object, ...], RowExchange] = {}

    @property
    def local(self) -> torch.Tensor:
        """The place in a `table` of each entry of the index: int64, in the index's shape."""
        return self._plan.local

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """How many rows travel: a row for each receiver, with a number for each owner."""
        sizes, world = self._plan.sizes, self._group.size()
        return tuple([sizes[at : at + world] for at in range(0, len(sizes), world)])

    def __repr__(self) -> str:
        return f"Rows({list(self.local.shape)} of {self._layout}: {self.own} own, {self.received} received)"

    @overload
    def gather(self, x: T, dim: int = 0, *, async_op: Literal[False] = False) -> T: ...

    @overload
    def gather(self, x: T, dim: int = 0, *, async_op: Literal[True]) -> tuple[T, Work]: ...

    def gather(self, x: Any, dim: int = 0, *, async_op: bool = False) -> Any:
        """Gather the wanted rows: `whole.index_select(dim, index)`. Gradients are added at the rows' owners.

        Args:
            x: this rank's shard, any strided tensor; or a list of tensors of one dtype and device, which one
                exchange moves together.
            dim: the sharded dim.
            async_op: return while the exchange runs. Until the Work's `wait()` has returned, do not read the
                output, and do not modify x.

        Returns:
            A new tensor with the index's dims in the place of dim, zeros where it is -1; for a list of
            tensors a list. With async_op a tuple of that and a `spar.Work`.

        Raises:
            ValueError: x is not this rank's shard, or dim is out of range.
            TypeError: x is not on the index's device.
            MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
        """
        return self._apply("Rows.gather", x, dim, async_op)

    @overload
    def add(self, y: T, dim: int = 0, *, async_op: Literal[False] = False) -> T: ...

    @overload
    def add(self, y: T, dim: int = 0, *, async_op: Literal[True]) -> tuple[T, Work]: ...

    def add(self, y: Any, dim: int = 0, *, async_op: bool = False) -> Any:
        """Add all ranks' rows at their index in a whole of zeros, and keep this rank's shard of it.

        It is the transpose of `gather`, and each is the other's gradient. Rows of the same index are added
        on their rank before they travel.

        Args:
            y: rows in the order of the index, whose dims they have in the place of dim: what `gather`
                returns. Any strided tensor of a dtype that torch adds, or a list of tensors.
            dim: the sharded dim of the result.
            async_op: as for `gather`.

        Returns:
            A new tensor; for a list of tensors a list. With async_op a tuple of that and a `spar.Work`.

        Raises:
            ValueError: y does not have the index's shape, or dim is out of range.
            TypeError: y is not on the index's device, or torch does not add its dtype.
            MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
        """
        return self._apply("Rows.add", y, dim, async_op)

    @overload
    def table(self, x: T, dim: int = 0, *, async_op: Literal[False] = False) -> T: ...

    @overload
    def table(self, x: T, dim: int = 0, *, async_op: Literal[True]) -> tuple[T, Work]: ...

    def table(self, x: Any, dim: int = 0, *, async_op: bool = False) -> Any:
        """Put the rows of others that this rank wants behind its own, each once: what `local` indexes.

        Args:
            x: as for `gather`.
            dim: the sharded dim.
            async_op: as for `gather`.

        Returns:
            A new tensor of `own + received` rows along dim, and behind them one of zeros if the plan has
            `padding=True`; for a list of tensors a list. With async_op a tuple of that and a `spar.Work`.

        Raises:
            ValueError, TypeError, MismatchError: as for `gather`.
        """
        return self._apply("Rows.table", x, dim, async_op)

    def _apply(self, name: str, x: Any, dim: int, async_op: bool) -> Any:
        plan, adds, selects = self._plan, name == "Rows.add", name != "Rows.table"

        def check(calls: list[Arguments], at: list[str]) -> tuple[tuple[Args, ...], Scale]:
            for call, which in zip(calls, at, strict=True):
                self._check(call, dim, adds, which)
            check_summable(calls[0], adds, must_record([call.input for call in calls]))
            return (), ONE

        def make(calls: Sequence[Arguments]) -> RowExchange:
            group, dims = calls[0].group, tuple([dim % call.ndim for call in calls])
            known = None if is_dynamo_compiling() else self._exchanges.get((name, dims))
            if known is not None and known.group is group:
                return known
            made = RowExchange(name, group, RowMaps(plan, dims, selects), adds, note=plan.note)
            if not is_dynamo_compiling():
                self._exchanges[name, dims] = made
            return made

        most = _C.MOST_TENSORS // (len(plan.parts) + (not selects))
        return exchange_together(name, x, self._group, check, async_op=async_op, make=make, most=most)

    def _check(self, call: Arguments, dim: int, adds: bool, at: str) -> None:
        """Check a tensor; at: names it in messages."""
        index, name = self.local, f"input_{at}"
        if call.input.device != index.device and not call.input.is_meta:
            raise call.type_error(name, f"a tensor on {call.input.device}", f"{index.device}, as the index")
        if adds:  # The dims of the index count as one.
            call.ndim = max(call.ndim - index.dim() + 1, 1)
        dim = call.dim("dim", dim)
        if not adds:
            size = call.input.size(dim)
            if size != self.own:
                expected = f"{self.own}, rank {call.rank}'s shard in {self._layout}"
                raise call.error(name, f"of size {size} in dim {dim}", expected)
        elif call.shape[dim : dim + index.dim()] != index.shape:
            expected = f"the index's {list(index.shape)} from dim {dim} on"
            raise call.error(name, f"of shape {list(call.shape)}", expected)


def rows_of(
    layout: Layout, group: dist.ProcessGroup, text: object, index: torch.Tensor, padding: bool
) -> Rows:
    """Plan rows; layout: of the dim that is sharded. text: the layout in messages."""
    name = "SequenceLayout.rows"
    if torch.compiler.is_compiling():
        raise SparError(f"{name}: a plan cannot be made in compiled code; make it outside, and use it there")
    with Arguments(name, index, group, "index", exchanges=2) as call:
        return Rows(plan_rows(call, layout, padding), group, text)
