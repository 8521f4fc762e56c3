# SPDX-License-Identifier: Apache-2.0
"""The first difference between two runs, over all ranks of a group."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.gather import all_gather
from .entries import MAKER, Entry, Key, Spot
from .sketches import apart, largest, relative
from .trace import Trace

# A gradient below this share of the largest one may be what rounding left.
_SMALL = 1e-3
_DRAW_APART = ("scaled_dot_product_attention", "multi_head_attention_forward")
_MOST_TEXT = 300  # characters that are shown of an error
_MOST_READERS = 4  # named in a text


@dataclass(frozen=True)
class Difference:
    """Where a sharded model first differs from one process. Equal on all ranks; `str` says it in sentences.

    Attributes:
        kind: "value"; "gradient"; "gradient of a parameter"; "error", which the sharded run alone raised;
            "inputs", if the ranks differ in one process, too; "path", if they call other functions there.
        module: the name of the innermost module; "" the model, None outside of it.
        function: what returns or reads the values, or whose backward returns the gradient.
        file, line: where it is called.
        error: the largest difference, relative to the largest value expected.
        ranks: those that differ.
        text: what `str` returns.
    """

    kind: str
    module: str | None
    function: str
    file: str
    line: int
    error: float
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


class _Row(NamedTuple):
    """What one rank found of a tensor."""

    key: Key
    distance: float | None  # between the values; None: not compared
    scale: float
    floor: float
    tolerance: float
    few: Tensor
    # Of its gradient: how far a part's is from that of one process, and how large that is. Of a whole tensor
    # both sketches, as the ranks have shares of the first.
    gradient: tuple[float, float] | tuple[Tensor, Tensor] | None
    readers: tuple[Spot, ...]
    maker: str
    is_input: bool


class _Rank(NamedTuple):
    rows: list[_Row]
    parameters: dict[str, tuple[Tensor, Tensor]]
    readers: dict[str, list[Spot]]
    error: str  # raised by the sharded run
    newest: Spot | None  # the call in which it did so


def first_difference(
    sharded: Trace,
    whole: Trace,
    group: Any,
    world: int,
    error: Exception | None = None,
    mean: bool = True,
) -> Difference | None:
    """Return the first difference, in the order of forward and then of backward. Collective.

    error: what the sharded run raised. mean: whether gradients are to be averaged over the ranks, or summed.
    """
    scale = 1 / world if mean else 1.0
    rows = [_row(key, entry, sharded.entries.get(key), scale) for key, entry in whole.entries.items()]
    shares = sharded.gradients
    parameters = {name: (shares[name] * scale, x) for name, x in whole.gradients.items() if name in shares}
    text = "" if error is None else f"{type(error).__name__}: {error}"
    ranks = _gathered(_Rank(rows, parameters, whole.readers, text, sharded.newest), group)
    found = _Found(ranks)
    return found.with_error(found.first())


def _row(key: Key, entry: Entry, same: Entry | None, scale: float) -> _Row:
    distance, size = None, 0.0
    gradient: Any = None
    if same is not None and same.value is not None and entry.value is not None:
        distance, size = apart(same.value, entry.value), largest(entry.value)
    if same is not None and entry.gradient is not None:
        if entry.part is not None and scale != 1:
            # A view's group may be smaller than the one over which runs are compared.
            scale = 1 / entry.part.parts.world
        share = torch.zeros_like(entry.gradient) if same.gradient is None else same.gradient * scale
        gradient = share, entry.gradient
        if entry.is_part or share.shape != entry.gradient.shape:
            gradient = apart(*gradient), largest(entry.gradient)
    assert entry.few is not None
    return _Row(
        key,
        distance,
        size,
        entry.floor,
        entry.tolerance,
        entry.few,
        gradient,
        tuple(entry.readers),
        entry.maker,
        entry.is_input,
    )


def _gathered(value: _Rank, group: Any) -> list[_Rank]:
    """Return the values of all ranks."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    device = group._device_types[0] if torch.device("cpu") not in group._device_types else "cpu"
    sizes = all_gather(torch.tensor([len(data)], device=device), group).tolist()
    parts = all_gather(data.to(device), group, 0, sizes).cpu().split(sizes)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


class _Found:
    """Searches what all ranks found."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.ranks = ranks
        self.rows = [*zip(*[each.rows for each in ranks], strict=False)]
        tolerances = [max(row.tolerance for row in rows) for rows in self.rows]
        self.tolerances = [*itertools.accumulate(tolerances, max)]
        self.coarsest = max(tolerances, default=0.0)

    def first(self) -> Difference | None:
        for at, rows in enumerate(self.rows):
            found = self._path(at) or self._inputs(at, rows) or self._value(at, rows)
            if found is not None:
                return found
        in_forward = any(each.error and each.newest is not None for each in self.ranks)
        return self._path(len(self.rows)) or (None if in_forward else self._gradient())

    def with_error(self, found: Difference | None) -> Difference | None:
        """Say what the sharded run raised."""
        raised = [(rank, each) for rank, each in enumerate(self.ranks) if each.error]
        if not raised:
            return found
        rank, each = raised[0]
        error = f"rank {rank} raised {each.error[:_MOST_TEXT]}"
        if found is not None:
            return replace(found, text=f"{found.text}\n  {error}")
        spot = each.newest or Spot("backward", "", 0, None, "", 0)
        ranks = tuple([rank for rank, _ in raised])
        return _made("error", spot, math.inf, ranks, f"{_call(spot)}: {error}")

    # ---- forward ----

    def _path(self, at: int) -> Difference | None:
        """Compare which functions the ranks call in one process."""
        keys = [each.rows[at].key if at < len(each.rows) else None for each in self.ranks]
        ranks = tuple([r for r, key in enumerate(keys) if key != keys[0]])
        if not ranks:
            return None
        calls = [
            f"rank {r} calls {_call(key.spot) if key else 'nothing more'}"
            for r, key in ((0, keys[0]), (ranks[0], keys[ranks[0]]))
        ]
        spot = next(key.spot for key in (keys[ranks[0]], keys[0]) if key is not None)
        advice = "seed torch, Python's random and NumPy alike, and let no branch depend on the rank"
        text = f"the ranks call other functions, also in one process: {', '.join(calls)}\n  {advice}"
        return _made("path", spot, math.inf, ranks, text)

    def _inputs(self, at: int, rows: Sequence[_Row]) -> Difference | None:
        """Compare what the ranks compute in one process."""
        first = rows[0]
        errors = [relative(apart(row.few, first.few), max(largest(first.few), row.floor)) for row in rows]
        ranks = self._beyond(at, errors)
        if not ranks:
            return None
        text = (
            f"{_call(first.key.spot)} {first.key.verb} values that differ from rank 0's"
            f"{self._by(max(errors), ranks)}, also in one process\n"
            "  pass the same inputs on all ranks, load the same weights, and seed all ranks alike"
        )
        return _made("inputs", first.key.spot, max(errors), ranks, text)

    def _value(self, at: int, rows: Sequence[_Row]) -> Difference | None:
        errors = [
            0.0 if row.distance is None else relative(row.distance, max(row.scale, row.floor)) for row in rows
        ]
        ranks = self._beyond(at, errors)
        if not ranks:
            return None
        spot, verb, _ = rows[0].key
        text = f"{_call(spot)} {verb} values that differ from one process{self._by(max(errors), ranks)}"
        before = self._call_before(at) if verb == "reads" else None
        if before is not None:
            text += f"\n  the last call that agrees is {_call(before)}\n  what runs between them is not "
            text += "followed: a custom Function, a tensor subclass, a collective in flight or an extension"
        if spot.function in _DRAW_APART:
            text += "\n  if it has dropout, it draws other numbers on each rank: set that to 0 to compare"
        return _made("value", spot, max(errors), ranks, text)

    def _beyond(self, at: int, errors: Sequence[float]) -> tuple[int, ...]:
        """Return the ranks whose errors in a row exceed its tolerance."""
        return tuple([rank for rank, error in enumerate(errors) if error > self.tolerances[at]])

    def _call_before(self, at: int) -> Spot | None:
        """Return the last call before a row's that was compared."""
        spot = self.rows[at][0].key.spot
        keys = [rows[0].key for rows in self.rows[:at] if rows[0].distance is not None]
        return next((key.spot for key in reversed(keys) if key.spot != spot), None)

    def _by(self, error: float, ranks: tuple[int, ...]) -> str:
        some = f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(self.ranks)}"
        return f" by {error:.1e} {some}" if error < math.inf else f" in shape, or in what is finite, {some}"

    # ---- backward ----

    def _gradient(self) -> Difference | None:
        """Return the difference that backward makes first: that of the latest tensor."""
        floor = _SMALL * max(self._sizes(), default=0.0)
        wrong = [*self._of_parameters(floor)]
        for at in range(len(self.rows) - 1, -1, -1):
            found = self._of_tensor(self.rows[at], floor)
            if found is not None:
                wrong.append((at, found))
                break
        return max(wrong, key=lambda pair: pair[0])[1] if wrong else None

    def _sizes(self) -> Iterator[float]:
        for row in itertools.chain(*self.rows):
            if row.gradient is not None:
                size = row.gradient[1]
                yield size if isinstance(size, float) else largest(size)
        for each in self.ranks:
            yield from (largest(whole) for _, whole in each.parameters.values())

    def _sum(self, pairs: Sequence[Any]) -> tuple[float, float]:
        """Return how far the sum of the ranks' scaled shares is from one process, and how large that is."""
        shares, wholes = zip(*pairs, strict=True)
        if any(x.shape != wholes[0].shape for x in (*shares, *wholes)):  # parts of unequal sizes, of FSDP2
            errors = [apart(share * len(pairs), whole) for share, whole in pairs]
            return max(errors), max(map(largest, wholes))
        expected = torch.stack(wholes).mean(0)
        return apart(torch.stack(shares).sum(0), expected), largest(expected)

    def _of_parameters(self, floor: float) -> Iterator[tuple[int, Difference]]:
        """Yield the parameters whose gradients differ, with the places of the calls that read them."""
        order = {rows[0].key.spot: at for at, rows in enumerate(self.rows)}
        for name in self.ranks[0].parameters:
            pairs = [each.parameters[name] for each in self.ranks if name in each.parameters]
            distance, size = self._sum(pairs)
            error = relative(distance, max(size, floor))
            if error <= self.coarsest:
                continue
            readers = _makers_first(self.ranks[0].readers.get(name, []))
            spot = readers[0] if readers else Spot("backward", "", 0, None, "", 0)
            text = (
                f"backward of {_calls(readers)}: the gradient of parameter {name}, averaged over the ranks, "
                f"differs from one process by {error:.1e}\n  the gradients of all that it returned agree"
            )
            at = max([order.get(reader, -1) for reader in readers], default=-1)
            yield at, _made("gradient of a parameter", spot, error, tuple(range(len(self.ranks))), text)

    def _of_tensor(self, rows: Sequence[_Row], floor: float) -> Difference | None:
        gradients: list[Any] = [row.gradient for row in rows if row.gradient is not None]
        if len(gradients) < len(rows):
            return None
        if not all(isinstance(distance, float) for distance, _ in gradients):
            gradients = [self._sum(gradients)] * len(rows)
        errors = [relative(distance, max(size, floor)) for distance, size in gradients]
        ranks = tuple([r for r, error in enumerate(errors) if error > self.coarsest])
        if not ranks:
            return None
        row = rows[0]
        readers = _makers_first(row.readers)
        what = f"{row.maker} before {_call(row.key.spot)}" if row.maker else _call(row.key.spot)
        verb = "takes" if row.is_input else "returned"
        text = (
            f"backward of {_calls(readers)}: the gradient of what {what} {verb} differs from one process"
            f"{self._by(max(errors), ranks)}\n  the gradients of all that was computed from it agree"
        )
        return _made("gradient", readers[0] if readers else row.key.spot, max(errors), ranks, text)


def _makers_first(spots: Sequence[Spot]) -> list[Spot]:
    """Return calls with those of custom Functions first, which are more often wrong than torch's."""
    return sorted(dict.fromkeys(spots), key=lambda spot: spot.times != MAKER)


def _call(spot: Spot) -> str:
    """Name a call by function, place and module."""
    text = f"`{spot.function}` at {spot.place}" if spot.file else spot.function
    return text if spot.module is None else f"{text} in {spot.module or 'the model'} ({spot.kind})"


def _calls(spots: Sequence[Spot]) -> str:
    unique = [*dict.fromkeys(map(_call, spots))][:_MOST_READERS]
    return ", or of ".join(unique) if unique else "what is not followed"


def _made(kind: str, spot: Spot, error: float, ranks: tuple[int, ...], text: str) -> Difference:
    return Difference(kind, spot.module, spot.function, spot.file, spot.line, error, ranks, text)
