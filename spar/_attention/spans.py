# SPDX-License-Identifier: Apache-2.0
"""Spans: the keys of each query as intervals, in 8 bytes for each instead of a boolean for each pair."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .._checks import digest
from .._exchange.observers import is_fake
from ..sizes import as_named_int
from .mask_functions import by_bisection, by_pairs, intervals_of

P = ParamSpec("P")
Result = TypeVar("Result")


def _with_values(function: Callable[P, Result]) -> Callable[P, Result]:
    """Call a function outside of dispatch modes: what follows from spans' values is no tensor of the model.

    Under FakeTensorMode they would have none, and what is remembered would be fake in later calls.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


# Sorts empty intervals behind all others.
_FAR = 2**31 - 1


class Spans:
    """The keys that each query attends to: an immutable set of intervals, a mask without S x S booleans.

    Made by one of the class methods, by `&` (keys in both) and `|` (keys in either), or from `ends`:

        spar.Spans.window(S, 511, 0) & spar.Spans.documents(ids)

    Pass one object to all layers: it remembers the blocks of work that follow from it, which layers, backward
    and recomputation share.

    Args:
        ends: int32 `[B or 1, H or 1, S, 2n]`: for each query the first key and the end of the keys (one
            behind the last) of each of n intervals, which may overlap. An interval whose end is not behind
            its first key is empty; a query without keys receives zeros.
        keys: the number of keys; None: that of the queries.

    Attributes:
        ends: as passed, with the intervals of a query in order and apart from each other, as few as there
            can be; empty ones are (0, 0), behind the others.
        keys: the number of keys.
        layout: the SequenceLayout by which a model under `spar.parallelize` lays the tokens out; None: as
            it lays out any sequence.

    Raises:
        TypeError, ValueError: ends has another dtype or shape, or names a key that does not exist.
    """

    # transformers passes a mask of four dims through its models as it is.
    ndim = 4
    layout: Any = None  # a SequenceLayout

    @_with_values
    def __init__(self, ends: Tensor, keys: int | None = None) -> None:
        if not isinstance(ends, Tensor) or ends.dtype != torch.int32:
            raise TypeError(f"Spans: ends is {_kind(ends)}; expected an int32 tensor [B, H, S, 2n]")
        if ends.dim() != 4 or ends.size(3) % 2 or ends.size(3) == 0:
            raise ValueError(f"Spans: ends is of shape {list(ends.shape)}; expected [B or 1, H or 1, S, 2n]")
        self.keys = ends.size(2) if keys is None else _size("Spans", "keys", keys)
        if ends.numel():
            low, high = (int(x) for x in ends.aminmax())
            if low < 0 or high > self.keys:
                value = low if low < 0 else high
                raise ValueError(f"Spans: ends has {value}; expected 0 to {self.keys}, the number of keys")
        self.ends = _normal(ends.unflatten(3, (-1, 2)), self.keys)
        self._made: dict[Any, Any] = {}

    # ---- closed forms ----

    @classmethod
    def causal(cls, total: int) -> Spans:
        """Attend to the keys up to the query's own place."""
        return cls.window(total, None, 0)

    @classmethod
    @_with_values
    def window(cls, total: int, left: int | None, right: int | None) -> Spans:
        """Attend to `left` keys before the query's place, the key there, and `right` behind; None: to all."""
        total = _size("Spans.window", "total", total)
        sides = [
            None if side is None else _size("Spans.window", name, side)
            for name, side in (("left", left), ("right", right))
        ]
        places = torch.arange(total, dtype=torch.int32, device="cpu")
        first = torch.zeros_like(places) if sides[0] is None else (places - min(sides[0], total)).clamp(min=0)
        end = places + 1 + (total if sides[1] is None else min(sides[1], total))
        return cls(torch.stack([first, end.clamp(max=total)], -1)[None, None])

    @classmethod
    @_with_values
    def chunks(cls, total: int, size: int, begin: Tensor | None = None) -> Spans:
        """Attend to the query's own chunk of `size` tokens, on both sides; combine with `causal`.

        begin: int `[B]`, where the first chunk of each sample begins; what is before it is in chunks, too.
        """
        total, size = _size("Spans.chunks", "total", total), _size("Spans.chunks", "size", size, 1)
        places = torch.arange(total, device="cpu")[None]
        if begin is None:
            begin = torch.zeros(1, dtype=torch.int64, device="cpu")
        if not isinstance(begin, Tensor) or begin.is_floating_point() or begin.is_complex():
            raise TypeError(f"Spans.chunks: begin is {_kind(begin)}; expected an int tensor [B]")
        if begin.dim() != 1 or begin.numel() == 0:
            raise ValueError(f"Spans.chunks: begin is of shape {list(begin.shape)}; expected [B]")
        offset = begin.to("cpu", torch.int64)[:, None]
        first = (places - offset).div(size, rounding_mode="floor") * size + offset
        return cls._of_samples(first, first + size, total)

    @classmethod
    @_with_values
    def documents(cls, ids: Tensor) -> Spans:
        """Attend to the query's own document, on both sides.

        ids: `[B, S]` or `[S]`; neighbours of one number are in one document.
        """
        ids = _by_sample("Spans.documents", "ids", ids)
        return cls._of_samples(*_runs(ids), ids.size(1))

    @classmethod
    @_with_values
    def padding(cls, valid: Tensor) -> Spans:
        """Attend to the keys that are not padding, wherever they are.

        valid: bool or int `[B, S]`, 0 for padding, as an attention_mask.
        """
        valid = _by_sample("Spans.padding", "valid", valid) != 0
        return cls(intervals_of(valid)[:, None, None].expand(-1, -1, valid.size(1), -1))

    @classmethod
    @_with_values
    def together(cls, ids: Tensor) -> Spans:
        """Attend to the query's own block, on both sides; a query without a block to no key.

        For `|`: `causal | together` lets the tokens of an image see each other.

        ids: int `[B, S]` or `[S]`; neighbours of one number, at least 0, are a block; -1: in no block.
        """
        ids = _by_sample("Spans.together", "ids", ids)
        first, end = _runs(ids)
        return cls._of_samples(first, torch.where(ids >= 0, end, first), ids.size(1))

    @classmethod
    @_with_values
    def prefix(cls, total: int, size: int) -> Spans:
        """Attend to the first `size` keys, for `|`: a prefix, or the first tokens beside a window."""
        total, size = _size("Spans.prefix", "total", total), _size("Spans.prefix", "size", size)
        ends = torch.tensor([0, min(size, total)], dtype=torch.int32, device="cpu")
        return cls(ends.expand(1, 1, total, 2))

    @classmethod
    def _of_samples(cls, first: Tensor, end: Tensor, total: int) -> Spans:
        """Make spans of the first keys and ends of all samples, [B, S]; they may be beyond the sequence."""
        return cls(torch.stack([first, end], -1).clamp(0, total).to(torch.int32)[:, None])

    # ---- a function ----

    @classmethod
    @_with_values
    def of(
        cls,
        function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        shape: Sequence[int],
        *,
        contiguous: bool = False,
        group: Any = None,
        device: torch.device | str = "cpu",
    ) -> Spans:
        """Make spans of a mask function, as torch's flex_attention and transformers have them.

        It is called here and never again. By default all pairs are evaluated once, some queries at a time.
        The result is that of flex_attention's create_mask: torch.vmap calls the function for one pair.

        Args:
            function: of one (batch, head, query, key), int64 tensors without dims; it returns a bool tensor
                without dims: True where the query attends to the key. It may read tensors at these indices
                and reduce what it finds.
            shape: (B, H, S, T), the sizes of the indices. Pass 1 for B and H if the function ignores them.
            contiguous: whether each query attends to the key in its own place, and its keys are one interval:
                then their ends are found by bisection, in about 2 log2 T calls of B x S elements. The result
                is wrong where that does not hold.
            group: ranks that call this together, with the same function, and evaluate a part each: a
                ProcessGroup, or another that `spar.all_gather` takes. None: this rank evaluates all pairs.
            device: of the index tensors, on which the function's own tensors are.

        Raises:
            TypeError, ValueError: the function returns something else, torch.vmap cannot batch it (`if` on
                an index, `.item()`), or it needs more intervals for a query than fit into as many bytes as
                booleans; pass a mask tensor then.
        """
        sizes = [_size("Spans.of", "shape", size) for size in shape]
        if len(sizes) != 4:
            raise ValueError(f"Spans.of: shape is {tuple(sizes)}; expected (B, H, S, T)")
        ends = (
            by_bisection(function, sizes, device) if contiguous else by_pairs(function, sizes, device, group)
        )
        return cls(ends, sizes[3])

    # ---- combinations ----

    @_with_values
    def __and__(self, other: Spans) -> Spans:
        """Keep the keys that both have."""
        one, two = self._pair(other)
        pairs = [
            torch.broadcast_tensors(a[..., :, None], b[..., None, :]) for a, b in zip(one, two, strict=True)
        ]
        first, end = torch.maximum(*pairs[0]), torch.minimum(*pairs[1])
        made = Spans(torch.stack([first, torch.maximum(first, end)], -1).flatten(3), self.keys)
        return made._laid_out(self, other)

    @_with_values
    def __or__(self, other: Spans) -> Spans:
        """Keep the keys that either has."""
        one, two = self._pair(other)
        shape = torch.broadcast_shapes(one[0].shape[:3], two[0].shape[:3])
        both = [torch.cat([x.expand(*shape, -1) for x in pair], -1) for pair in zip(one, two, strict=True)]
        return Spans(torch.stack(both, -1).flatten(3), self.keys)._laid_out(self, other)

    def _laid_out(self, *others: Spans) -> Spans:
        """Take the layout of the spans of which these were made, which must not be two."""
        layouts = {id(x.layout): x.layout for x in others if x.layout is not None}
        if len(layouts) > 1:
            raise ValueError(f"Spans: combined are those of two trees, {[*others]}; expected one tree")
        if layouts:
            (self.layout,) = layouts.values()
        return self

    def _pair(self, other: object) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the first keys and the ends, [B, H, S, n], of both."""
        if not isinstance(other, Spans):
            raise TypeError(f"Spans: combined with a {type(other).__name__}; expected Spans")
        sizes = list(zip(self.shape[:2], other.shape[:2], strict=True))
        if self.shape[2:] != other.shape[2:] or any(a != b and 1 not in (a, b) for a, b in sizes):
            raise ValueError(
                f"Spans: {self} and {other}; expected the same numbers of queries and of keys, and B and H "
                "that are equal or 1"
            )
        other_ends = other.ends.to(self.ends.device)
        return self.ends.unflatten(3, (-1, 2)).unbind(-1), other_ends.unflatten(3, (-1, 2)).unbind(-1)

    def of_heads(self, begin: int, count: int) -> Spans:
        """Return the spans of some heads, which are remembered; itself if all heads have the same."""
        if self.ends.size(1) == 1:
            return self
        key = "heads", begin, count
        return self.remember(key, lambda: Spans(self.ends.narrow(1, begin, count), self.keys))

    # ---- what it says ----

    @property
    def shape(self) -> torch.Size:
        """(B or 1, H or 1, S, T), as of the mask of booleans."""
        return torch.Size([*self.ends.shape[:3], self.keys])

    @_with_values
    def dense(
        self, query: int = 0, queries: int | None = None, key: int = 0, keys: int | None = None
    ) -> Tensor:
        """Return the booleans `[B or 1, H or 1, queries, keys]` of a block of queries and keys."""
        ends = self.ends[:, :, query:] if queries is None else self.ends.narrow(2, query, queries)
        places = torch.arange(
            key, self.keys if keys is None else key + keys, dtype=torch.int32, device=ends.device
        )
        first, end = ends.unflatten(3, (-1, 2))[..., None].unbind(-2)
        allowed: Tensor = ((places >= first) & (places < end)).any(3)
        return allowed

    def remember(self, key: Any, make: Callable[[], Result]) -> Result:
        """Return what was made of these spans by this key, or make it."""
        if key not in self._made:
            self._made[key] = _with_values(make)()
        made: Result = self._made[key]
        return made

    @property
    def on_cpu(self) -> Tensor:
        """`ends`, on the CPU."""
        return self.remember("cpu", self.ends.cpu)

    def to(self, device: torch.device | str) -> Spans:
        """Return these spans on a device: for the booleans of blocks that are computed there."""
        if self.ends.device == torch.device(device):
            return self
        return self.remember(("on", str(device)), lambda: self._with_ends(self.ends.to(device)))

    def _with_ends(self, ends: Tensor) -> Spans:
        """Return spans with these ends, which say the same on another device."""
        made = object.__new__(type(self))
        vars(made).update(vars(self) | {"ends": ends, "_made": {}})
        return made

    @property
    def digest(self) -> int:
        """63 bits of all the spans, by which ranks compare them."""
        return self.remember("digest", lambda: digest(self.on_cpu))

    def __getitem__(self, index: object) -> Any:
        raise ValueError(
            f"{self}: the model's code reads its mask as a tensor; expected a model that makes masks of it"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"Spans has no attribute {name!r}; if a model's code reads its mask as a tensor, expected a "
                'model under spar.parallelize, which makes masks of Spans, with attn_implementation="sdpa"'
            )

    # transformers counts the tokens of padding on the left of a mask where it makes chunks: there are none.

    def cumsum(self, dim: int) -> Tensor:
        return torch.ones(self.shape[0], 1, dtype=torch.int64, device=self.ends.device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.zeros_like:
            return NotImplemented
        return torch.zeros(args[0].shape[0], 1, dtype=torch.int64, device=args[0].ends.device)

    def __repr__(self) -> str:
        batch, heads, queries, numbers = self.ends.shape
        return f"Spans(B={batch}, H={heads}, S={queries}, T={self.keys}, intervals={numbers // 2})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Spans, (self.ends, self.keys)


def _normal(ends: Tensor, keys: int) -> Tensor:
    """Sort the intervals `[B, H, S, n, 2]` of each query, join those that touch, and drop what is equal."""
    first, end = ends.unbind(-1)
    empty = first >= end
    if first.size(3) > 1:
        first, order = first.masked_fill(empty, _FAR).sort(-1)
        reach = end.masked_fill(empty, 0).gather(-1, order).cummax(-1)[0]
        empty = first == _FAR
        starts = ~empty
        starts[..., 1:] &= first[..., 1:] > reach[..., :-1]
        # The number of the joined interval that each one is in.
        into = (starts.cumsum(-1) - 1).clamp(min=0)
        count = max(int(starts.sum(-1).max()) if starts.numel() else 0, 1)
        if count < first.size(3) or not bool((starts | empty).all()):
            blank = first.new_zeros(*first.shape[:3], first.size(3))
            end = blank.scatter_reduce(-1, into, reach.masked_fill(empty, 0), "amax")
            first = blank.scatter_add(-1, into, first.masked_fill(~starts, 0))
        else:
            end = reach
        first, end = first[..., :count], end[..., :count]
        empty = first >= end
    if 8 * first.size(3) > max(keys, 1024):
        raise ValueError(
            f"Spans: a query has {first.size(3)} intervals of {keys} keys, which take more bytes than "
            "booleans; pass a mask tensor"
        )
    made = torch.stack([first.masked_fill(empty, 0), end.masked_fill(empty, 0)], -1).flatten(3)
    for dim in (0, 1):
        if made.size(dim) > 1 and bool((made == made.narrow(dim, 0, 1)).all()):
            made = made.narrow(dim, 0, 1)
    return made.contiguous()


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place and the end of the run of equal numbers that each place is in, [B, S]."""
    changes = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0))
    return torch.searchsorted(changes, changes), torch.searchsorted(changes, changes, right=True)


def _by_sample(where: str, name: str, x: object) -> Tensor:
    """Return a tensor [B, S] or [S] as [B, S] on the CPU."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{where}: {name} is {_kind(x)}; expected a bool or int tensor [B, S]")
    if is_fake(x):
        raise ValueError(
            f"{where}: {name} is a meta or fake tensor; expected values, of which spans are made"
        )
    if x.dim() not in (1, 2) or x.size(-1) == 0:
        raise ValueError(
            f"{where}: {name} is of shape {list(x.shape)}; expected [B, S] with at least one token"
        )
    x = x.cpu()
    return x[None] if x.dim() == 1 else x


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _size(where: str, name: str, value: object, least: int = 0) -> int:
    size = as_named_int(f"{where}: {name}", value)
    if size < least or size >= _FAR:
        raise ValueError(f"{where}: {name} is {size}; expected an int from {least} to {_FAR - 1}")
    return size


# As arguments of `closed`.
Keywords = tuple[int, int, bool, tuple[int | None, int | None] | None, tuple[int, ...]]


def with_keywords(given: Spans | None, keywords: Keywords) -> Spans:
    """Return what the caller's spans and keywords of `spar.attention` leave together, which is remembered."""
    if given is None:
        return closed(*keywords)
    _, _, causal, window, documents = keywords
    if not causal and window is None and not documents:
        return given
    return given.remember(keywords, lambda: given & closed(*keywords))


# Of long packed sequences each is megabytes.
@functools.lru_cache(16)
@_with_values
def closed(
    queries: int,
    keys: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    documents: tuple[int, ...],
) -> Spans:
    """Return the spans of keywords of `spar.attention`, which all calls with equal ones share.

    documents: the lengths of packed documents; empty: the sequence is one.
    """
    left, right = window or (None, None)
    spans = Spans.window(max(queries, keys), left, 0 if causal else right)
    if queries != keys:
        # A window has a meaning for equal numbers alone: these are all keys, or those up to a place.
        return Spans(spans.ends.narrow(2, 0, queries).clamp(max=keys), keys)
    if documents:
        lengths = torch.tensor(documents, device="cpu")
        ids = torch.arange(len(documents), device="cpu").repeat_interleave(lengths)
        spans &= Spans.documents(ids)
    return spans
