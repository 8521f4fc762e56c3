# SPDX-License-Identifier: Apache-2.0
"""What a model did under a view: which functions ran whole, and how much of the work each rank does."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isnan, nan, prod
from typing import Any, NamedTuple

import torch

from .._attention.choice import PASSED, Choice
from .part import whole_numel, whole_shape

_TORCH = os.path.dirname(torch.__file__)
# typing_extensions wraps what torch deprecates.
_PACKAGES = (
    _TORCH,
    os.path.join(os.path.dirname(_TORCH), "typing_extensions.py"),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)


class RanWhole(NamedTuple):
    """A function that ran on gathered arguments on each rank."""

    function: str
    place: str
    in_block: bool
    calls: int

    def __str__(self) -> str:
        times = f" x{self.calls}" if self.calls > 1 else ""
        return f"{self.function} at {self.place}{times}"


class RanEagerly(NamedTuple):
    """Blocks of a class that torch.compile was to compile, and that run eagerly."""

    block: str
    reason: str
    blocks: int

    def __str__(self) -> str:
        return f"{self.block} x{self.blocks}: {self.reason}"


class Tiled(NamedTuple):
    """Modules of a class that `tile` let run by tiles; or, with a reason, that run at once."""

    module: str
    reason: str
    modules: int

    def __str__(self) -> str:
        return f"{self.module} x{self.modules}" + (f": {self.reason}" if self.reason else "")


class Attended(NamedTuple):
    """How ranks shared attentions that the forward computed alike, and why."""

    method: str
    slices: int
    reason: str
    calls: int

    def __str__(self) -> str:
        slices = f" in {self.slices} slices of heads" if self.slices > 1 else ""
        return f"{self.method}{slices} x{self.calls}: {self.reason}"


class Report:
    """Of the first forward.

    Attributes:
        share: the multiply-adds of this rank inside blocks, as a share of one process's; nan if none ran, as
            before the first forward.
        functions: those that ran whole on each rank, with the line of the model that called each.
        attention: the methods by which ranks shared attention, and why.
        eager: blocks that torch.compile was to compile in a later forward, and why they run eagerly.
        why_by_block: why a model that torch.compile was to compile is not one graph, but compiled by block.
        tiled: modules that run by tiles, of these and later forwards.
        untiled: modules with modules inside that do not, and why; without those that would save nothing.
    """

    def __init__(self) -> None:
        self._whole: Counter[tuple[str, str, bool]] = Counter()
        self._attention: Counter[Choice] = Counter()
        self._eager: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # blocks, by their identity
        self._tiled: defaultdict[tuple[str, str], set[int]] = defaultdict(set)  # modules, by their identity
        self.runs_again = False  # whether code runs on a further tile
        self.why_by_block: list[str] = []
        self.warned = False
        self._convolved_whole = False  # images or videos, in a block
        # By whether it is inside blocks: multiply-adds of this rank, and of the whole.
        self._work = {True: [0, 0], False: [0, 0]}

    @property
    def functions(self) -> list[RanWhole]:
        return [RanWhole(*key, count) for key, count in self._whole.items()]

    @property
    def attention(self) -> list[Attended]:
        return [Attended(*choice, calls) for choice, calls in self._attention.items()]

    @property
    def eager(self) -> list[RanEagerly]:
        return [RanEagerly(*key, len(blocks)) for key, blocks in self._eager.items()]

    @property
    def tiled(self) -> list[Tiled]:
        return [Tiled(*key, len(modules)) for key, modules in self._tiled.items() if not key[1]]

    @property
    def untiled(self) -> list[Tiled]:
        return [Tiled(*key, len(modules)) for key, modules in self._tiled.items() if key[1]]

    @property
    def share(self) -> float:
        return _quotient(*self._work[True])

    @property
    def share_of_model(self) -> float:
        """Multiply-adds of this rank, as a share of one process's, of the whole forward."""
        return _quotient(*(a + b for a, b in zip(*self._work.values(), strict=True)))

    def add(self, work: tuple[int, int], in_block: bool) -> None:
        local, whole = work
        self._work[in_block][0] += local
        self._work[in_block][1] += 0 if self.runs_again else whole

    def ran_whole(self, name: str, in_block: bool) -> None:
        self._whole[name, place_of_caller(), in_block] += 1

    def add_attention(self, method: str | None, choice: Choice) -> None:
        """method: as the caller of `parallelize` passed it; where it is None a rule of the view may have."""
        by_rule = choice.reason == PASSED and method is None
        self._attention[choice._replace(reason="few keys move") if by_rule else choice] += 1

    def add_eager(self, block: torch.nn.Module, reason: str) -> None:
        self._eager[type(block).__name__, reason].add(id(block))

    def add_tiled(self, name: str, module: torch.nn.Module, reason: str) -> None:
        self._tiled[name, reason].add(id(module))

    def add_by_block(self, reason: str) -> None:
        if reason not in self.why_by_block:
            self.why_by_block.append(reason)

    def count(self, name: str, args: Any, kwargs: dict[str, Any], in_block: bool) -> None:
        """Add the multiply-adds of a function that runs whole."""
        work = multiply_adds(name, args, kwargs)
        if work:
            self.add((work, work), in_block)
            self._convolved_whole |= in_block and name in ("conv2d", "conv3d")

    def __str__(self) -> str:
        if isnan(self.share_of_model):
            shares = "has run no matrix product, convolution or attention yet"
        elif isnan(self.share):
            shares = f"does {self.share_of_model:.1%} of all multiply-adds, of which none are in blocks"
        else:
            shares = f"does {self.share:.1%} of the multiply-adds in blocks, {self.share_of_model:.1%} of all"
        lines = [f"this rank {shares}"]
        if self._convolved_whole and self.share > 0.9:
            lines.append('  for rows of images or videos, pass blocks=[""] to spar.parallelize')
        lines += [f"  attention by {each}" for each in self.attention]
        lines += [f"  compiled by block, not as one graph: {each}" for each in self.why_by_block]
        lines += [f"  eager, not compiled: {each}" for each in self.eager]
        lines += [f"  by tiles: {each}" for each in self.tiled]
        lines += [f"  not by tiles: {each}" for each in self.untiled]
        lines += [f"  whole {'in a block' if w.in_block else 'outside blocks'}: {w}" for w in self.functions]
        return "\n".join(lines)


def _quotient(local: int, whole: int) -> float:
    return local / whole if whole else nan


def multiply_adds(name: str, args: Any, kwargs: dict[str, Any]) -> int:
    """Return how many multiply-adds a function of whole tensors does, as far as they are of weight."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not x.is_nested]
    if len(tensors) < 2:
        return 0
    a, b = tensors[:2]
    if name == "linear":
        return whole_numel(a) * b.size(0)
    if name in ("matmul", "__matmul__", "bmm", "mm"):
        return whole_numel(a) * (whole_shape(b)[-1] if b.dim() > 1 else 1)
    if name == "baddbmm" and len(tensors) == 3:
        return whole_numel(b) * whole_shape(tensors[2])[-1]
    if name == "scaled_dot_product_attention":
        return 2 * whole_numel(a) * whole_shape(b)[-2]
    if name in ("grouped_mm", "_grouped_mm"):  # rows, each by the matrix of its group
        return whole_numel(a) * b.size(-1)
    if name in ("conv1d", "conv2d", "conv3d"):
        stride = args[3] if len(args) > 3 else kwargs.get("stride", 1)
        strides = [stride] if isinstance(stride, int) else list(stride)
        steps = prod(strides * (b.dim() - 2) if len(strides) == 1 else strides)
        return whole_numel(a) // max(whole_shape(a)[1 - b.dim()] * steps, 1) * b.numel()
    if name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        return whole_numel(a) * b.numel() // max(b.size(0), 1)
    return 0


def frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def place_of_caller() -> str:
    """Return file:line of the innermost code that is neither torch's nor spar's."""
    for frame in frames():
        name = name_of_file(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
    return "unknown"


def warn_caller(text: str) -> None:
    """Warn at the innermost code that is neither torch's nor spar's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and not name_of_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def name_of_file(path: str) -> str:
    """Return the name of a file whose code is neither torch's nor spar's; else an empty string."""
    return "" if path.startswith((*_PACKAGES, "<")) else os.path.basename(path)
