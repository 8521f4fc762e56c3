# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of a public operation, and run its exchange."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._control.state import Place
from .._group.group import Call, Group as Group_, is_faking
from .._group.registry import by_process_group, group_at, group_of, place_of
from .._transports.dtypes import PLAIN_TYPES
from ..sizes import as_int, swapped_hint
from ..topology.resolve import Group, process_group
from .autograd import apply
from .exchange import ARITHMETIC, MOVE, ONE, SCALABLE, SUM, Exchange, Scale, Tensors, in_steps
from .graph_ops import in_graph
from .layouts import Args, Layout, by_sizes, even, pair
from .observers import must_record

Sizes = Sequence[int] | torch.Tensor
# The key by which a group remembers an exchange; None: it does not.
Key = tuple[object, ...] | None
_STRIDED = torch.strided
_LONG = 256  # numbers of a layout, which take longer to compare than what a remembered exchange saves


def ranks_of(group: Group | Group_ | Place, name: str) -> Group_ | Place:
    """Return spar's state of a group argument; under torch.compile this rank's place in the group."""
    if isinstance(group, Place):
        known = group.handle and group.world > 1 and not is_dynamo_compiling()
        return group_at(group.handle) if known else group
    if isinstance(group, Group_):
        return group
    if is_dynamo_compiling():
        return place_of(process_group(group, name))
    return group_of(process_group(group, name))


def not_empty(
    name: str,
    tensors: Sequence[torch.Tensor],
    group: Group | Group_ | Place,
    argument: str = "tensors",
    exchanges: int = 1,
) -> list[torch.Tensor]:
    """Return the tensors of an operation as a list; report to the peers that they are none, or no list."""
    # A tensor would be iterated as a list of its rows.
    is_one = isinstance(tensors, torch.Tensor)
    listed = [] if is_one else list(tensors)
    if not listed:
        ranks = ranks_of(group, name)
        with Call(ranks, name, exchanges):
            where = f"{name} on rank {ranks.rank} of {ranks.world}"
            if is_one:
                raise TypeError(f"{where}: {argument} is a tensor; expected a list of tensors")
            raise ValueError(f"{where}: {argument} is an empty list; expected at least one tensor")
    return listed


def from_cumulative(numbers: Sequence[int]) -> Sequence[int]:
    """Return the lengths between cu_seqlens; empty if the numbers cannot be cumulative."""
    if not numbers or numbers[0] != 0:
        return ()
    lengths = [end - begin for begin, end in itertools.pairwise(numbers)]
    return lengths if min(lengths, default=-1) >= 0 else ()


def cumulative_hint(lengths: Sequence[int]) -> str:
    text = f"[{', '.join(map(str, lengths[:16]))}{', ...' if len(lengths) > 16 else ''}]"
    return f". These look like cu_seqlens, which are cumulative; pass the lengths: {text}"


class Arguments(Call):
    """The arguments of one call of a public operation, and the block in which they are checked.

    Errors name the argument, its value and the rank; they are reported to the peers: see `Group.call`.

    Attributes:
        group: spar's state of the group; under torch.compile this rank's place in it.
        shape, ndim: of the input.
        note: as in Exchange.
    """

    __slots__ = ("input", "input_name", "ndim", "note", "rank", "shape", "world")

    def __init__(
        self,
        name: str,
        input_: torch.Tensor,
        group: Group | Group_ | Place,
        input_name: str = "input_",
        exchanges: int = 1,
    ) -> None:
        """exchanges: how many exchanges forward makes at most; the peers wait for them if this rank fails."""
        state = None if is_dynamo_compiling() else by_process_group.get(id(group))
        self.group = ranks_of(group, name) if state is None else state
        self.name, self.input_name, self.note, self.exchanges = name, input_name, "", exchanges
        self.world, self.rank = self.group.world, self.group.rank
        self.input, self.tensors = input_, 0
        self.device = None

    def __enter__(self) -> Arguments:
        """Check the input."""
        group = self.group
        if self.exchanges and isinstance(group, Group_):
            self.before = group.calls if group.queue is None else group.count()
        try:
            input_, name = self.input, self.input_name
            if type(input_) not in PLAIN_TYPES:
                kind = f"a {type(input_).__name__}"
                if not isinstance(input_, torch.Tensor):
                    raise self.type_error(name, kind, "a tensor")
                if hasattr(input_, "to_local"):
                    raise self.type_error(name, kind, "a plain tensor; pass its .to_local()")
            if input_.layout is not _STRIDED:
                raise self.type_error(name, f"a tensor of layout {input_.layout}", "a strided tensor")
            if input_.is_nested:
                raise self.type_error(name, "a nested tensor", "a strided tensor, such as one of its parts")
            if input_.is_quantized:  # an exchange would lose its scale and zero point
                raise self.type_error(name, f"a quantized tensor of {input_.dtype}", "its int_repr()")
            self.shape = shape = input_.shape
            self.ndim = len(shape)
            if not shape:
                raise self.error(name, "a 0-dim tensor", "at least one dim")
            return self
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            x = self.input
            if self.device is None and isinstance(x, torch.Tensor):  # a FakeTensor is not exchanged
                self.device = "meta" if hasattr(x, "fake_mode") else x.device.type
            super().__exit__(kind, error, trace)

    def beside(self, input_: torch.Tensor, name: str) -> Arguments:
        """Return those of another tensor that the same exchange moves, whose checks this block reports."""
        call = Arguments(self.name, input_, self.group, name, 0)
        call.__enter__()
        return call

    def error(self, name: str, value: object, expected: str) -> ValueError:
        return ValueError(self._message(name, value, expected))

    def type_error(self, name: str, value: object, expected: str) -> TypeError:
        return TypeError(self._message(name, value, expected))

    @property
    def where(self) -> str:
        return f"{self.name} on rank {self.rank} of {self.world}"

    def _message(self, name: str, value: object, expected: str) -> str:
        return f"{self.where}: {name} is {value}; expected {expected}"

    def one_of(self, **arguments: object) -> None:
        """Raise ValueError if more than one of the arguments is not None."""
        passed = [name for name, value in arguments.items() if value is not None]
        if len(passed) > 1:
            text = " and ".join([f"{name} is {arguments[name]!r:.200}" for name in passed])
            raise ValueError(f"{self.where}: {text}; expected one of them")

    def integer(self, name: str, value: int, expected: str = "an int") -> int:
        if type(value) is int:
            return value
        try:
            return as_int(value)
        except TypeError:
            raise self.type_error(name, f"{value!r:.200}", expected) from None

    def dim(self, name: str, dim: int) -> int:
        ndim = self.ndim
        if type(dim) is not int:
            dim = self.integer(name, dim)
        elif 0 <= dim < ndim:
            return dim
        if not -ndim <= dim < ndim:
            shape = list(self.input.shape)
            which = "an input" if self.input_name == "input_" else self.input_name
            raise self.error(name, dim, f"{-ndim} to {ndim - 1} for {which} of shape {shape}")
        return dim % ndim

    def sizes(self, name: str, sizes: Sizes | None) -> Args:
        if sizes is None:
            return ()
        if isinstance(sizes, torch.Tensor):
            sizes = self._from_tensor(name, sizes)
        elif not isinstance(sizes, (list, tuple)):
            expected = "a list, tuple or 1-D int tensor of one size for each rank, or None"
            raise self.error(name, repr(sizes), expected)
        if len(sizes) != self.world:
            raise self.error(
                name,
                f"{list(sizes)!r:.200}",
                f"{self.world} sizes, one for each rank{swapped_hint(sizes, self.world)}",
            )
        try:
            numbers = tuple([size if type(size) is int else as_int(size) for size in sizes])
        except TypeError:
            numbers = (-1,)
        for number in numbers:
            if number < 0:
                raise self.error(name, list(sizes), "ints of at least 0")
        if not torch.compiler.is_compiling() and sum(numbers) >= 2**63:
            raise self.error(name, list(numbers), "sizes that sum to less than 2^63")
        return numbers

    def _from_tensor(self, name: str, sizes: torch.Tensor) -> list[int]:
        kind = sizes.dtype
        if sizes.dim() != 1 or kind.is_floating_point or kind.is_complex or kind is torch.bool:
            raise self.type_error(name, f"a tensor of {kind} with {sizes.dim()} dims", "a 1-D int tensor")
        numbers: list[int] = sizes.tolist()
        return numbers

    def lengths(self, name: str, lengths: Sequence[int] | torch.Tensor) -> Args:
        """Convert the lengths of packed sequences to ints of at least 0."""
        if isinstance(lengths, torch.Tensor):
            lengths = self._from_tensor(name, lengths)
        if torch.compiler.is_compiling():  # the core checks them when it runs
            return tuple(lengths)
        total: object = None
        with contextlib.suppress(TypeError, RuntimeError):
            total = sum(lengths)
        try:
            if type(total) is not int:  # objects with __index__, such as numpy integers, are among them
                lengths = [as_int(length) for length in lengths]
                total = sum(lengths)
            least = min(lengths, default=0)
        except TypeError:
            raise self.type_error(name, repr(lengths)[:200], "a list, tuple or 1-D tensor of ints") from None
        if least < 0:
            raise self.error(name, f"a list that contains {least}", "lengths of at least 0")
        if total >= 2**63:
            raise self.error(name, f"a list that sums to {total}", "a sum below 2^63")
        return tuple(lengths)

    def check_sum(self, name: str, lengths: Args, dim: int) -> None:
        total, size = sum(lengths), self.input.size(dim)
        if total != size:
            expected = f"lengths that sum to {size}, the size of dim {dim}"
            if (cut := from_cumulative(lengths)) and lengths[-1] == size:
                expected += cumulative_hint(cut)
            raise self.error(name, f"a list that sums to {total}", expected)

    def wrong_total(self, name: str, total: int, dim: int, fitting: Sequence[int]) -> ValueError:
        """Return the error for a global size that does not match the local size; it names those that do."""
        local, expected = self.input.size(dim), "an input that is even in that dim"
        if fitting:
            first, last = fitting[0], fitting[-1]
            expected = (
                str(first) if first == last else f"{first} {'or' if len(fitting) == 2 else 'to'} {last}"
            )
        expected += f", as rank {self.rank} of {self.world} holds {local} of dim {dim}"
        if total == local:
            expected += ". Did you pass the local size?"
        return self.error(name, total, expected)

    def table(self, name: str, table: torch.Tensor | Sequence[Sequence[int]]) -> tuple[int, int, Args]:
        """Read the local sizes of each sequence on each rank: `[world, sequences]`.

        Returns the number of sequences, this rank's total, and the core's ints: the global lengths if the
        sequences are sharded by `cal_split_sizes`, else the whole table.
        """
        if torch.compiler.is_compiling() or is_faking():  # there is no memory to read
            rows = [list(row) for row in table]
            return len(rows[0]), sum(rows[self.rank]), tuple(itertools.chain(*rows))
        if isinstance(table, (list, tuple)):
            table = [row.tolist() if isinstance(row, torch.Tensor) else row for row in table]
        try:
            sizes = torch.as_tensor(table, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise self.type_error(name, repr(table)[:200], "a table of ints") from None
        if sizes.dim() != 2 or sizes.size(0) != self.world:
            raise self.error(name, f"of shape {list(sizes.shape)}", f"a row for each of {self.world} ranks")
        if sizes.numel() and (sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool):
            raise self.type_error(name, f"a table of {sizes.dtype}", "ints")
        sizes = sizes.to("cpu", torch.int64).contiguous()
        sequences = sizes.size(1)
        least, total, numbers = _C.table(sizes.data_ptr(), self.world, sequences, self.rank)
        if least < 0:
            raise self.error(name, f"a table that contains {least}", "sizes of at least 0")
        return sequences, total, numbers

    def zigzag(self, name: str, total: int, world: int) -> int:
        """Return the global size; check that it divides into two chunks per rank of `world`."""
        if total % (2 * world):
            raise self.error(
                name,
                f"a total of {total} to split",
                f"a multiple of {2 * world}, two chunks for each of {world} ranks",
            )
        return total

    def grad_scale(self, grad_scale: str | float | None) -> Scale:
        if grad_scale is None:
            return ONE
        if isinstance(grad_scale, str):
            if grad_scale not in ("up", "down"):
                raise self.error("grad_scale", repr(grad_scale), '"up", "down", None or a float')
            return float(self.world), grad_scale == "down"
        if isinstance(grad_scale, (int, float)) and not isinstance(grad_scale, bool):
            try:
                return float(grad_scale) + 0.0, False  # -0.0 equals 0.0, by which a call is kept
            except OverflowError:
                value = "an int beyond a float's range"
                raise self.error("grad_scale", value, '"up", "down", None or a float') from None
        raise self.type_error("grad_scale", repr(grad_scale), '"up", "down", None or a float')

    def shards(self, name: str, dim: int, sizes: Sizes | None) -> Layout | None:
        """Return the layout in which this rank's shard is the input's extent of `dim`; None without sizes."""
        if sizes is None:
            return None
        numbers, local = self.sizes(name, sizes), self.input.size(dim)
        if numbers[self.rank] != local:
            raise self.error(
                name,
                list(numbers),
                f"{local} at index {self.rank}, rank {self.rank}'s size of dim {dim}"
                + (". Did you split the local size?" if sum(numbers) == local else ""),
            )
        return by_sizes(dim, numbers)

    def gathered_size(self, dim: int) -> int:
        """Return the global size of a dim along which all ranks have the same local size."""
        local = self.input.size(dim)
        if not torch.compiler.is_compiling() and local * self.world >= 2**63:
            expected = f"a size that is below 2^63 on {self.world} ranks together"
            raise self.error(self.input_name, f"of size {local} in dim {dim}", expected)
        return local * self.world

    def parts(self, name: str, dim: int, sizes: Sizes | None) -> Layout:
        """Return the layout that shards all of the input's `dim`, by the size rule if there are no sizes."""
        total = self.shape[dim]
        if sizes is None:
            return even(dim, total)
        numbers = self.sizes(name, sizes)
        if sum(numbers) != total:
            raise self.error(name, list(numbers), f"sizes that sum to {total}, the size of dim {dim}")
        return by_sizes(dim, numbers)

    def apply(self, before: Layout, after: Layout, grad_scale: Scale, key: Key = None) -> torch.Tensor:
        """Exchange the input from one layout to another, as `apply_together` does."""
        return apply_together((self,), (pair(before, after),), grad_scale, key)[0]


def apply_together(
    calls: Sequence[Arguments],
    args: tuple[Args, ...],
    grad_scale: Scale = ONE,
    key: Key = None,
    kind: int = MOVE,
) -> Tensors:
    """Run one exchange of the calls' inputs, whose arguments are checked; record it if one needs a gradient.

    Args:
        args: the layouts of each input, as in Exchange.
        key: by which the group remembers the exchange: `repeat`, which returns none if a tracer must see it.
        kind: as in Exchange.
    """
    first = calls[0]
    inputs: Tensors = (first.input,) if len(calls) == 1 else [call.input for call in calls]
    records, compiles = False, is_dynamo_compiling()
    for x in inputs:
        records = records or x.requires_grad or forward_ad._current_level >= 0
    if records:
        records = must_record(inputs)
    if kind != MOVE:
        check_summable(first, kind == SUM, records)
    if first.world == 1:
        key = None  # there is no exchange to repeat
        if not records or grad_scale[0] == 1.0:
            return inputs
    if records and grad_scale[0] != 1.0:
        _check_scalable(first)
    group, options = first.group, (ONE, grad_scale, kind, records, first.note)
    if compiles:
        return in_graph(Exchange(first.name, group, args, *options), inputs)
    if isinstance(group, Place) or len(args[0]) > _LONG:
        exchange = Exchange(first.name, group, args, *options)
    else:
        decided = first.name, args, options
        cached = group.exchanges.get(decided)
        exchange = cached or Exchange(first.name, group, args, *options)
        if cached is None:
            group.exchanges[decided] = exchange
        if key is not None:
            group.exchanges[key] = exchange
    if records:
        return apply(exchange, inputs)
    return exchange.run(inputs, traced=None if key is None else False)


def apply_chain(
    call: Arguments, steps: Sequence[tuple[Group_ | Place, Args]], grad_scale: Scale
) -> torch.Tensor:
    """Run one exchange of the input after another, on several groups; record them as one operation."""
    x, records = call.input, must_record((call.input,))
    if records and grad_scale[0] != 1.0:
        _check_scalable(call)
    grouped = [(group, (args,)) for group, args in steps]
    exchange = in_steps(call.name, grouped, grad_scale, MOVE, records, call.note)
    return (in_graph(exchange, (x,)) if is_dynamo_compiling() else apply(exchange, (x,)))[0]


def _check_scalable(call: Arguments) -> None:
    """Raise TypeError if a gradient of the input's dtype cannot be scaled."""
    dtype = call.input.dtype
    if dtype not in SCALABLE:
        raise call.type_error(
            "input_",
            f"a tensor of {dtype} whose gradient is to be scaled",
            "a floating or complex dtype of at least 16 bits, or grad_scale=None",
        )


def check_summable(call: Arguments, sums: bool, records: bool) -> None:
    """Raise TypeError if torch cannot add the input's items, which the call sums, or else its backward."""
    dtype = call.input.dtype
    if (sums or records) and dtype not in ARITHMETIC:
        value = f"a tensor of {dtype}" + ("" if sums else " whose gradients are to be summed")
        raise call.type_error("input_", value, "a dtype that torch adds, such as torch.float32")
