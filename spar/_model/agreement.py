# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks call a model with the same inputs and parameters: others would train silently.

Each forward begins with one exchange of a few numbers: hashes of the inputs and, in forwards 1, 2, 4, 8 and
so on, of the parameters. On a GPU they are compared at the forward's end, by when they have long arrived.
"""

from __future__ import annotations

import copy
import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._exchange.arguments import ranks_of
from .._group.registry import place_of
from .._transports.cuda import to_host
from .._transports.dtypes import PLAIN_TYPES
from ..ops.gather import all_gather
from .hashes import compared, names_of, numbers, prefixes
from .part import part_of
from .places import comparing, forward_on, may_compare

# A share of a tensor's norm, because another GPU may round embeddings differently.
_TOLERANCE = 1e-2
# Inputs of one forward; structures of inputs that are known.
_MOST_LEAVES, _MOST_KNOWN = 10_000, 1000
_ROOM, _COUNT = 64, 0  # numbers in a row, and which of them is that of its forwards
# Bytes and hashes that ranks exchange once they differ.
_TEXT, _MOST_PARAMETERS = 1 << 14, 4096
_SCALARS = (bool, int, float)
_ADVICE = (
    "expected equal inputs on all ranks: draw noise, timesteps and sampled tokens from one seed, or "
    "broadcast them; a DataLoader with a DistributedSampler over the sequence ranks gives each other rows: "
    "let it count the ranks of a sequence as one"
)

OTHER_PARAMETERS = (
    "expected the same parameters on all ranks: load or broadcast them on all, and average the gradients "
    "over the sequence group too, as DDP or FSDP2 over its ranks does. Divide parameters over ranks of one "
    "mesh with the sequence's, which ascend in each dim. Mark those that are to differ: "
    "parameter.allreduce = False"
)
OTHER_CODE = (
    "the ranks ran different code, or drew from generators in different states, in the forward before; run "
    "the same layers and hooks on all ranks, and seed torch, random and numpy alike"
)


class _Pending(NamedTuple):
    """The ranks' numbers on their way to the host."""

    key: tuple[Any, ...]  # of the inputs: of each the name, the type or shape, and the dtype or value
    rows: Tensor
    ready: Any  # an event of the device; None: they are there


class Agreement:
    """What the ranks of a group compare of one model's inputs and parameters.

    Attributes:
        word: of the view at the end of the forward before, or 0: between hosts NCCL's calls compare none.
    """

    def __init__(self, group: Any, model: torch.nn.Module) -> None:
        self.group, self.model, self.word = group, model, 0
        self._forwards = 0
        self._known: dict[tuple[Any, ...], int] = {}  # hashes of structures
        self._pending: _Pending | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        return Agreement(self.group, copy.deepcopy(self.model, memo))

    def begin(self, inputs: Mapping[str, Any], device: torch.device) -> None:
        """Exchange numbers of a forward's inputs; compare them, or on a GPU leave that to `end`. Collective.

        Raises:
            ValueError: inputs or parameters differ between ranks. Every rank raises.
        """
        self._pending = None
        ranks = ranks_of(self.group, "")
        if not may_compare(ranks, device):
            return
        self._forwards += 1
        with comparing():
            self._pending = self._exchanged(inputs, device, ranks.synchronous)
            if self._pending.ready is None or ranks.synchronous:
                self._compare_pending()

    def end(self, word: int) -> None:
        """Compare what `begin` has exchanged, where it did not; keep the view's word. Collective."""
        self._compare_pending()
        self.word = word

    def _compare_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.ready is not None:  # recorded before the forward's work: it does not wait for that
            pending.ready.synchronize()
        rows = pending.rows.tolist()
        counts = [row.pop(_COUNT) for row in rows]
        self._forwards = max(counts)  # a rank that failed before it compared has counted one less
        if any(row != rows[0] for row in rows):
            with torch.no_grad():
                self._compare(pending.key, rows)

    def _exchanged(self, inputs: Mapping[str, Any], device: torch.device, always: bool) -> _Pending:
        """always: compare the parameters in each forward."""
        key: list[Any] = []
        host: list[int] = []
        ints: list[Tensor] = []
        floats: list[Tensor] = []
        compares = always or self._forwards & (self._forwards - 1) == 0
        listed = compared(self.model, self.group) if compares else []
        hashed = prefixes(listed, torch.device("cpu"))[-1].item() if listed else 0
        for name, x in itertools.islice(_leaves(inputs), _MOST_LEAVES):
            if isinstance(x, _SCALARS):
                key += (name, type(x), x)
                continue
            key += (name, (*x.shape, x.device.type), x.dtype)
            found = numbers(x)
            if x.device.type == "cpu":
                host += [_as_int(n.item()) for n in found]
            else:
                (ints if len(found) == 1 else floats).extend(found)
        known = tuple(key)
        head = self._forwards, self._structure(known), self.word, hashed
        row = torch.tensor([[*head, *host]], device="cpu").to(device)
        if ints or floats:
            rest = [torch.stack(ints)] if ints else []
            rest += [torch.stack(floats).double().view(torch.int64)] if floats else []
            row = torch.cat([row[0], *rest])[None]
        # Ranks with other inputs have more or fewer numbers; padded, they can compare the structure first.
        row = torch.nn.functional.pad(row, (0, -row.size(1) % _ROOM))
        return _Pending(known, *to_host(all_gather(row, self.group)))

    def _structure(self, key: tuple[Any, ...]) -> int:
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = zlib.crc32("\n".join(_texts(key)).encode())
        return found

    # ---- what differs ----

    def _compare(self, key: tuple[Any, ...], rows: list[list[int]]) -> None:
        """Raise the error of the first difference. All ranks have the same rows."""
        if any(row[0] != rows[0][0] for row in rows):
            raise self._error(self._other_structure(key), _ADVICE)
        if _C.words_differ([row[1] for row in rows]):
            raise RuntimeError(f"{forward_on(place_of(self.group))}: {OTHER_CODE}")
        tensors = [(name, x, kind) for name, x, kind in _triples(key) if type(x) is tuple]
        host = [(name, kind) for name, x, kind in tensors if x[-1] == "cpu"]
        rest = [(name, kind) for name, x, kind in tensors if x[-1] != "cpu"]
        if len({row[2] for row in rows} - {0}) > 1:  # 0: that rank did not compute it
            raise self._error(self._other_parameter(), OTHER_PARAMETERS)
        at = 3
        for name, kind in host:
            at = self._check(rows, name, at, _is_float(kind))
        for has_floats in (False, True):
            for name, kind in rest:
                if _is_float(kind) == has_floats:
                    at = self._check(rows, name, at, has_floats)

    def _check(self, rows: list[list[int]], name: str, at: int, is_float: bool) -> int:
        """Compare one tensor's numbers; return where those of the next one are."""
        end = at + 1 + is_float
        for rank, row in enumerate(rows):
            own, first = row[at:end], rows[0][at:end]
            if own != first and not (is_float and _are_near(own, first)):
                raise self._error(f"{name} is another value on rank {rank}", _ADVICE)
        return end

    def _other_structure(self, key: tuple[Any, ...]) -> str:
        text = "\n".join(_texts(key)).encode()[:_TEXT].ljust(_TEXT, b"\0")
        rows = self._gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace").split("\n") for row in rows]
        for rank, other in enumerate(texts):
            for a, b in itertools.zip_longest(texts[0], other, fillvalue="no more"):
                if a != b:
                    return f"{b} on rank {rank}, {a} on rank 0"
        return "the ranks have other inputs"

    def _other_parameter(self) -> str:
        listed = compared(self.model, self.group)
        own = prefixes(listed, torch.device("cpu"))[:_MOST_PARAMETERS]
        rows = self._gathered(torch.nn.functional.pad(own, (0, _MOST_PARAMETERS - len(own))))
        for at, name in enumerate(names_of(listed)[:_MOST_PARAMETERS]):
            for rank, row in enumerate(rows):
                if row[at] != rows[0][at]:
                    return f"the parameter {name} is another value on rank {rank} than on rank 0"
        return "the ranks have other parameters"

    def _gathered(self, row: Tensor) -> list[list[int]]:
        rows: list[list[int]] = all_gather(row[None].to(device_of(self.model)), self.group).tolist()
        return rows

    def _error(self, problem: str, advice: str) -> ValueError:
        return ValueError(f"{forward_on(place_of(self.group))}: {problem}; {advice}")


def device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _leaves(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the plain whole tensors and the numbers in inputs, with names."""
    for name, x in sorted(inputs.items()):  # callers may pass keywords in any order
        if isinstance(x, Tensor):
            is_plain = type(x) in PLAIN_TYPES and x.layout is torch.strided and not x.is_nested
            if is_plain and not x.is_meta and not x.is_quantized and part_of(x) is None:
                yield name, x
        elif isinstance(x, _SCALARS):
            yield name, x
        elif isinstance(x, (list, tuple)):
            yield from _leaves({f"{name}[{i}]": entry for i, entry in enumerate(x)})
        elif isinstance(x, Mapping):
            yield from _leaves({f"{name}[{entry!r}]": value for entry, value in x.items()})
        elif is_dataclass(x) and not isinstance(x, type):
            yield from _leaves({f"{name}.{f.name}": getattr(x, f.name, None) for f in fields(x)})


def _triples(key: tuple[Any, ...]) -> Iterator[tuple[Any, Any, Any]]:
    return zip(key[::3], key[1::3], key[2::3], strict=True)


def _texts(key: tuple[Any, ...]) -> list[str]:
    return [
        f"{name} of shape {list(x[:-1])}, {kind} on {x[-1]}" if type(x) is tuple else f"{name} {kind!r}"
        for name, x, kind in _triples(key)
    ]


def _is_float(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex


def _as_int(number: float) -> int:
    """Return an int, or the bits of a float."""
    return number if isinstance(number, int) else int(struct.unpack("q", struct.pack("d", number))[0])


def _are_near(a: list[int], b: list[int]) -> bool:
    """Whether two tensors' projections and squared norms are the same but for rounding."""
    (x, xx), (y, yy) = [struct.unpack("2d", struct.pack("2q", *bits)) for bits in (a, b)]
    if not math.isfinite(x + y + xx + yy):
        return repr((x, xx)) == repr((y, yy))
    largest = max(xx, yy)
    is_near = abs(x - y) <= _TOLERANCE * math.sqrt(largest) and abs(xx - yy) <= _TOLERANCE * largest
    return bool(is_near)
