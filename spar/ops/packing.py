# SPDX-License-Identifier: Apache-2.0
"""`PackedSamples`: the samples of a batch in rows without padding, and back."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._checks import check_int, check_ints
from .._exchange.arguments import ranks_of
from .._exchange.grad_scale import NOT_GIVEN, GradScale
from .._group.group import Call
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout
from ..topology.resolve import Group, process_group

_NAME = "PackedSamples"
_UNPACK = "PackedSamples.unpack"


class PackedSamples:
    """Packs the samples of a batch into rows without padding, and brings outputs back by sample.

        packed = spar.data.PackedSamples(attention_mask, group=cp)
        ids = packed.shard(input_ids)  # this rank's tokens of all samples
        labels = packed.shard(input_ids, shift=1, fill=-100)  # their next tokens
        ...
        padded = packed.unpack(outputs)  # [N, T] again

    Nothing is exchanged but in `unpack`. All ranks of the group pass the same samples.

    Attributes:
        layouts: the packed layout of each row.
        rows: the numbers of the samples of each row, ascending.
    """

    def __init__(
        self,
        samples: Tensor | Sequence[int],
        group: Group = None,
        *,
        max_tokens: int | None = None,
        rows: int = 1,
    ) -> None:
        """Decide which samples share a row.

        Args:
            samples: an attention mask `[N, T]`, whose ones are the samples' tokens, wherever the padding is;
                or the samples' lengths, a list of ints or an int tensor `[N]`. On a GPU it is waited for.
            group: the ranks that share a row: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or
                None for the current topology's sequence group.
            max_tokens: how many tokens a row may have, on all its ranks together. None: no limit.
            rows: make at least so many rows, of about equal numbers of tokens. FSDP2 needs the same number
                on all data-parallel ranks: the largest that one of them needs.

        Raises:
            ValueError: there are no samples, one is longer than max_tokens, or rows are more than samples.
        """
        real = process_group(group, _NAME)
        place = place_of(real)
        self._where = f"{_NAME} on rank {place.rank} of {place.world}"
        self._shape: tuple[int, int] | None = None
        if isinstance(samples, Tensor) and samples.dim() == 2:
            self._shape = samples.size(0), samples.size(1)
            places = samples.ne(0).cpu().flatten().nonzero()[:, 0]  # where tokens are in the batch
            self._lengths: list[int] = samples.ne(0).sum(1).tolist()
        else:
            listed = samples.tolist() if isinstance(samples, Tensor) else samples
            self._lengths = check_ints(self._where, "samples", listed, 0)
            places = torch.arange(sum(self._lengths), device="cpu")
        if not self._lengths:
            raise ValueError(f"{self._where}: samples is empty; expected at least one sample")
        rows = check_int(self._where, "rows", rows, 1)
        if rows > len(self._lengths):
            raise ValueError(
                f"{self._where}: rows is {rows}; expected at most {len(self._lengths)}, the number of samples"
            )
        self.rows = self._grouped(rows, max_tokens)
        by_sample = places.split(self._lengths)
        self._tokens = [torch.cat([by_sample[sample] for sample in row]) for row in self.rows]
        self.layouts = [
            SequenceLayout.packed([self._lengths[sample] for sample in row], real) for row in self.rows
        ]

    def pack(self, x: Tensor | Sequence[Tensor], row: int = 0, *, shift: int = 0, fill: float = 0) -> Tensor:
        """Concatenate the samples of a row.

        Args:
            x: what the batch has for each token: `[N, T, ...]` for a mask, or for lengths a list of N tensors
                `[length, ...]`; or for each sample: `[N]`, such as advantages, which all its tokens get.
                Without a gradient.
            row: which row.
            shift: 1 takes for each token what the next one of its sample has, as labels need.
            fill: for tokens without such a token; x's dtype must have it.

        Returns:
            A tensor `[1, S, ...]`, the whole row, as a parallelized model takes it.
        """
        layout, flat = self._layout(row), self._flat(x)
        _check_fill(self._where, flat, fill)
        source, valid = self._shifted(layout, row, shift)
        packed = flat[source.to(flat.device)]
        missing = (~valid).to(flat.device).view(-1, *[1] * (flat.dim() - 1))
        return packed.masked_fill(missing, fill)[None]

    def shard(self, x: Tensor | Sequence[Tensor], row: int = 0, *, shift: int = 0, fill: float = 0) -> Tensor:
        """Concatenate the samples of a row, and keep this rank's tokens: `[1, S/P, ...]`; see `pack`."""
        return self._layout(row).shard(self.pack(x, row, shift=shift, fill=fill), 1)

    def unpack(
        self,
        outputs: Tensor | Sequence[Tensor],
        *,
        shift: int = 0,
        fill: float = 0,
        grad_scale: GradScale = NOT_GIVEN,
    ) -> Any:
        """Gather outputs of all rows, and put them back to the samples, on every rank. Collective.

        Args:
            outputs: this rank's tokens `[1, S/P, ...]` of each row, a list; a tensor if there is one row.
            shift: 1 gives each output to the next token of its sample: log-probabilities of labels to the
                tokens whose they are. The last one of each sample is dropped.
            fill: of padding, and of tokens without an output.
            grad_scale: as in `SequenceLayout.gather`; it must be given if a gradient is recorded.

        Returns:
            A tensor `[N, T, ...]` where samples came as a mask, else a list of N tensors `[length, ...]`.

        Raises:
            ValueError: outputs are not those of the rows.
            MismatchError: calls differ between ranks, also in the lengths of samples. Every rank raises.
        """
        ranks, wholes, targets = ranks_of(self.layouts[0].group, _UNPACK), [], []
        with Call(ranks, _UNPACK, len(self.rows)):
            where = f"{_UNPACK} on rank {ranks.rank} of {ranks.world}"
            if not isinstance(outputs, (Tensor, list, tuple)):
                raise TypeError(f"{where}: outputs is a {type(outputs).__name__}; expected a list of tensors")
            parts = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            if len(parts) != len(self.rows):
                raise ValueError(
                    f"{where}: outputs are of {len(parts)} rows; expected a list of {len(self.rows)}, one "
                    "for each row"
                )
            for row, (part, layout) in enumerate(zip(parts, self.layouts, strict=True)):
                if isinstance(part, Tensor):
                    if part.dim() < 2 or len(part) != 1:
                        raise ValueError(
                            f"{where}: outputs[{row}] is of shape {list(part.shape)}; expected [1, S/P, ...]"
                        )
                    _check_fill(where, part, fill)
                target, valid = self._shifted(layout, row, shift)
                wholes.append(layout.gather(part, 1, grad_scale)[0][valid.to(part.device)])
                targets.append(target[valid])
        values, target = torch.cat(wholes), torch.cat(targets).to(parts[0].device)
        size = sum(self._lengths) if self._shape is None else self._shape[0] * self._shape[1]
        flat = values.new_full((size, *values.shape[1:]), fill).index_copy(0, target, values)
        if self._shape is not None:
            return flat.unflatten(0, self._shape)
        return list(flat.split(self._lengths))

    def _layout(self, row: int) -> SequenceLayout:
        return self.layouts[check_int(self._where, "row", row, 0, len(self.rows) - 1)]

    def _flat(self, x: Any) -> Tensor:
        """Return what the batch has for each of its places: a token, or padding."""
        count, shape = len(self._lengths), self._shape
        expected = f"[{count}], for each sample, or "
        if isinstance(x, Tensor) and tuple(x.shape) == (count,):
            lengths = torch.tensor(self._lengths if shape is None else [shape[1]] * count, device=x.device)
            x = x.repeat_interleave(lengths)
        elif shape is not None:
            if not isinstance(x, Tensor) or tuple(x.shape[:2]) != shape:
                raise self._error(x, expected + f"[{shape[0]}, {shape[1]}, ...], as the mask")
            x = x.flatten(0, 1)
        else:
            if not isinstance(x, (list, tuple)) or list(map(len, x)) != self._lengths:
                raise self._error(x, expected + "a list of tensors of the samples' lengths")
            x = torch.cat(list(x))
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{self._where}: x requires a gradient, of which each rank would have a part; expected data "
                "without one: pass x.detach()"
            )
        return cast(Tensor, x)

    def _error(self, x: Any, expected: str) -> ValueError:
        what = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        if isinstance(x, (list, tuple)):
            what = f"a list of lengths {[len(part) for part in x]!r:.200}"
        return ValueError(f"{self._where}: x is {what}; expected {expected}")

    def _shifted(self, layout: SequenceLayout, row: int, shift: int) -> tuple[Tensor, Tensor]:
        """Return for each token of a row the place of the one `shift` behind it, and whether there is one."""
        shift = check_int(self._where, "shift", shift, -(2**31), 2**31)
        tokens, ends = self._tokens[row], layout.cu_seqlens().to(torch.int64)
        document = torch.searchsorted(ends, torch.arange(len(tokens), device="cpu"), right=True)
        other = torch.arange(len(tokens), device="cpu") + shift
        valid = (other >= ends[document - 1]) & (other < ends[document])
        return tokens[torch.where(valid, other, 0)], valid

    def _grouped(self, rows: int, max_tokens: int | None) -> list[list[int]]:
        """Return the samples of each row: the longest first, each to the row that has least."""
        if max_tokens is None:
            return self._balanced(rows)
        most = self._check_longest(max_tokens)

        def fit(number: int) -> list[list[int]] | None:
            found = self._balanced(number)
            fits = max(sum(self._lengths[sample] for sample in row) for row in found) <= most
            return found if fits else None

        # By growing steps, then by halves: samples just over half of max_tokens need twice the least.
        least, last, step = max(rows, -(-sum(self._lengths) // most)), len(self._lengths), 1
        low, high = least - 1, least
        while (found := fit(high)) is None:
            low, high, step = high, min(high + step, last), 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            if (fewer := fit(middle)) is None:
                low = middle
            else:
                high, found = middle, fewer
        return found

    def _check_longest(self, max_tokens: Any) -> int:
        most, longest = check_int(self._where, "max_tokens", max_tokens, 1), max(self._lengths)
        if longest > most:
            raise ValueError(
                f"{self._where}: max_tokens is {most}, and sample {self._lengths.index(longest)} has "
                f"{longest} tokens; expected at least as many: rows do not share a sample"
            )
        return most

    def _balanced(self, rows: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(rows)]
        least = [(0, 0, row) for row in range(rows)]  # tokens, samples, row
        for sample in sorted(range(len(self._lengths)), key=lambda sample: -self._lengths[sample]):
            tokens, samples, row = heapq.heappop(least)
            found[row].append(sample)
            heapq.heappush(least, (tokens + self._lengths[sample], samples + 1, row))
        return [sorted(row) for row in found]


def _check_fill(where: str, x: Tensor, fill: float) -> None:
    """Check that a tensor of ints or bools can hold a number: torch would wrap it."""
    if not x.is_floating_point() and not x.is_complex() and x.new_full((), fill).item() != fill:
        raise ValueError(
            f"{where}: fill is {fill!r:.200}; expected a number that {x.dtype} has: convert x first"
        )
