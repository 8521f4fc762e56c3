"""What blocks add up to: outputs merged by the log-sum-exp of each query, and sums of gradients.

Memory is not filled before: a first block is copied, or its tensor taken if it covers all.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from .kernels.kernel import BlockInputs, Kernel, accumulated


def run_of(x: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    """Return a run of dim 2; x itself if that is all of it, which takes less time than a view."""
    if not is_dynamo_compiling() and size == x.shape[2]:
        return x
    return x.narrow(2, begin, size)


class Runs:
    """Runs of tensors along dim 2. The newest are kept: most steps of a ring ask for the same ones."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = self._newest = tensors
        self._at = 0, tensors[0].shape[2]

    def of(self, begin: int, size: int) -> tuple[torch.Tensor, ...]:
        if is_dynamo_compiling():  # no guards on sizes
            return tuple([x.narrow(2, begin, size) for x in self._tensors])
        if self._at != (begin, size):
            self._at = begin, size
            self._newest = tuple([run_of(x, begin, size) for x in self._tensors])
        return self._newest


class _Unwritten:
    """The parts of a dim that nothing was written to yet; none under torch.compile, which fuses a fill."""

    def __init__(self, size: int) -> None:
        self.parts = [] if is_dynamo_compiling() else [(0, size)]

    def cut(self, begin: int, size: int) -> list[tuple[int, int, bool]]:
        """Cut a run into (begin, size, whether it is unwritten), and note that it is written."""
        if not self.parts:
            return [(begin, size, False)]
        end, found, left, at = begin + size, [], [], begin
        for first, last in self.parts:
            low, high = max(first, begin), min(last, end)
            if low >= high:
                left.append((first, last))
                continue
            if at < low:
                found.append((at, low - at, False))
            found.append((low, high - low, True))
            at = high
            left += [part for part in ((first, low), (high, last)) if part[0] < part[1]]
        if at < end:
            found.append((at, end - at, False))
        self.parts = left
        return found


class Sum:
    """The sum of blocks' gradients along dim 2, in the dtype of the sums.

    While one run has in it all that was added, its memory is all there is.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like, self._kind = like, accumulated(like.dtype)
        self._unwritten = _Unwritten(like.shape[2])
        self._run: tuple[int, torch.Tensor] | None = None  # where it begins
        self._whole: torch.Tensor | None = None

    def add(self, begin: int, part: torch.Tensor) -> None:
        """Add a block's part, a new tensor, which begins at `begin`."""
        if self._run is None:
            if self._whole is None and not is_dynamo_compiling():
                self._run = begin, self._as_summed(part)
            else:
                self._write(begin, part)
            return
        first, run = self._run
        before, behind = begin - first, begin + part.shape[2] - first - run.shape[2]
        if before >= 0 >= behind:
            run_of(run, before, part.shape[2]).add_(part)
        elif before <= 0 <= behind:
            part = self._as_summed(part)
            run_of(part, -before, run.shape[2]).add_(run)
            self._run = begin, part
        else:
            self._run = None
            self._write(first, run)
            self._write(begin, part)

    def _as_summed(self, part: torch.Tensor) -> torch.Tensor:
        return part if part.dtype == self._kind else part.to(self._kind)

    def _write(self, begin: int, part: torch.Tensor) -> None:
        whole = self._memory()
        for at, size, first in self._unwritten.cut(begin, part.shape[2]):
            target, source = run_of(whole, at, size), run_of(part, at - begin, size)
            if first:
                target.copy_(source)
            else:
                target.add_(source)

    def total(self) -> torch.Tensor:
        if self._run is not None:
            first, run = self._run
            if run.shape[2] == self._like.shape[2]:
                return run
            self._run = None
            self._write(first, run)
        whole = self._memory()
        for first, last in self._unwritten.parts:
            whole.narrow(2, first, last - first).zero_()
        return whole

    def _memory(self) -> torch.Tensor:
        if self._whole is None:
            make = torch.zeros_like if is_dynamo_compiling() else torch.empty_like
            self._whole = make(self._like, dtype=self._kind)
        return self._whole


class Merged:
    """The output of all blocks so far, and each query's log-sum-exp; -inf for a query without keys."""

    def __init__(self, q: torch.Tensor, width: int) -> None:
        self._q, self._width = q, width
        self._unwritten = _Unwritten(q.shape[2])
        self._both: tuple[torch.Tensor, torch.Tensor] | None = None
        self._runs: Runs | None = None  # of both, once all is written

    def add(self, query: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a block's output, new tensors, whose queries begin at `query`."""
        if self._runs is not None:
            mine, sums = self._runs.of(query, out.shape[2])
            _merge(mine, sums, out, lse)
            return
        cuts = self._unwritten.cut(query, out.shape[2])
        if cuts == [(0, self._q.shape[2], True)] and out.dtype == accumulated(self._q.dtype):
            self._both = out, lse
        else:
            whole = self._memory()
            for at, size, first in cuts:
                mine, sums = run_of(whole[0], at, size), run_of(whole[1], at, size)
                found, others = run_of(out, at - query, size), run_of(lse, at - query, size)
                if first:
                    mine.copy_(found)
                    sums.copy_(others)
                else:
                    _merge(mine, sums, found, others)
        if not self._unwritten.parts:
            self._runs = Runs(*self._memory())

    def total(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._memory()
        for first, last in self._unwritten.parts:
            out.narrow(2, first, last - first).zero_()
        return out, lse

    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._both is None:
            batch, heads, queries, _ = self._q.shape
            kind, device = accumulated(self._q.dtype), self._q.device
            make = torch.zeros if is_dynamo_compiling() else torch.empty
            out = make(batch, queries, heads, self._width, dtype=kind, device=device).transpose(1, 2)
            self._both = out, torch.full((batch, heads, queries), -torch.inf, dtype=kind, device=device)
        return self._both


def _merge(mine: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge a block's output and log-sum-exp into those of other blocks."""
    # not exp(lse - logaddexp(..)): scores of -1e9 absorb a logarithm, and the weights would not sum to 1
    weight = torch.sub(lse, sums).sigmoid_().nan_to_num_(0.0)  # both are -inf: a query without keys so far
    mine.lerp_(out.to(mine.dtype), weight[..., None])
    sums.copy_(torch.logaddexp(sums, lse))


def forward_of(kernel: Kernel, inputs: BlockInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel; for queries to which the mask leaves no key, flash kernels return 0 as log-sum-exp."""
    out, lse = kernel.forward(inputs)
    if inputs.mask is None:
        return out, lse
    dead = (inputs.mask == -torch.inf).all(-1)
    return out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -torch.inf)
