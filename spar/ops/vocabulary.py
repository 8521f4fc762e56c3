# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies over a vocabulary, tile by tile, so that float32 logits are never whole.

A tile is a few tokens by a part of the vocabulary. Forward keeps running maxima and sums, as online softmax
does. Backward computes each tile again from the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._exchange.autocast import no_autocast
from .._exchange.dispatch import define_kernel
from .._exchange.observers import have_tangents, is_transformed

TOKENS, COLUMNS = 1024, 4096  # a tile has 16 MB in float32
_LEAST = -1e4  # its exp is 0 in each dtype, and its product with 0 is not NaN


def _parts(size: int, most: int) -> Iterator[slice]:
    return (slice(first, min(first + most, size)) for first in range(0, size, most))


class _Head:
    """The logits of tokens: given, or those of hidden states."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: Tensor | None
    ) -> None:
        """x: logits `[B, S, V]`, or with a weight `[V, D]` hidden states `[B, S, D]`."""
        x = x.flatten(0, 1)
        self.x, self.weight, self.bias = x, weight, bias
        self.temperature = None if temperature is None else temperature.reshape(-1, 1).expand(len(x), 1)
        self.kind = torch.promote_types(x.dtype, torch.float32)
        self.columns = x.size(1) if weight is None else weight.size(0)

    def wide(self, columns: slice) -> tuple[Tensor | None, Tensor | None]:
        """Return a part of the weight and of the bias in the dtype of the computation."""
        return (
            None if self.weight is None else self.weight[columns].to(self.kind),
            None if self.bias is None else self.bias[columns].to(self.kind),
        )

    def tile(self, rows: slice, columns: slice, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return new logits `[rows, columns]`, divided by the temperature."""
        if weight is None:
            z = self.x[rows, columns].to(self.kind, copy=True)
        else:
            z = self.x[rows].to(self.kind) @ weight.T
        if bias is not None:
            z += bias
        return self.divided(z, rows)

    def divided(self, z: Tensor, rows: slice) -> Tensor:
        """Divide logits, or their gradients, by their temperatures."""
        return z if self.temperature is None else z.div_(self.temperature[rows])


def _places(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return whether each label `[T, K]` lies in a part of the vocabulary, and where."""
    inside = (labels >= columns.start) & (labels < columns.stop)
    return inside, (labels - columns.start).clamp(0, columns.stop - columns.start - 1)


def _by_token(labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels `[T, K]`, which of them are ignored, and tokens `[T, 1]` of which all are."""
    labels = labels.reshape(labels.shape[:2].numel(), 1 if labels.dim() == 2 else labels.size(2))
    ignored = labels == ignore_index
    return labels, ignored, ignored.all(1, keepdim=True)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    labels: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
) -> list[Tensor]:
    """Return the log-probability of each label, the entropy `[B, S]`, and the log-sum-exp `[2, B S]`.

    The log-sum-exp is a maximum and the rest: their sum would lose what logits of one size differ in.
    """
    head, shape = _Head(x, weight, bias, temperature), labels.shape
    labels, ignored, dead = _by_token(labels, ignore_index)
    torch._assert_async(
        (ignored | ((labels >= 0) & (labels < head.columns))).all(),
        f"token_logprobs: labels must be 0 to {head.columns - 1}, or ignore_index",
    )
    if temperature is not None:
        torch._assert_async((temperature > 0).all(), "token_logprobs: temperatures must be above 0")
    top = torch.full_like(dead[:, 0], torch.finfo(head.kind).min, dtype=head.kind)
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    picked = torch.zeros_like(labels, dtype=head.kind)
    with no_autocast(x.device.type):
        for columns in _parts(head.columns, COLUMNS):
            wide = head.wide(columns)
            for rows in _parts(len(labels), TOKENS):
                z = head.tile(rows, columns, *wide)
                inside, place = _places(labels[rows], columns)
                picked[rows] += torch.where(inside, z.gather(1, place), 0)
                old, sums = top[rows], total[rows]
                new = torch.maximum(old, z.amax(1))
                step = (old - new).clamp_(min=_LEAST)
                scale = step.exp()
                exps = z.sub_(new[:, None]).clamp_(min=_LEAST).exp()
                weighted[rows] = (weighted[rows] + step * sums) * scale + (z.mul_(exps)).sum(1)
                total[rows] = sums * scale + exps.sum(1)
                top[rows] = new
    rest = total.log()
    # Results are no views, which FSDP2 warns of.
    logprobs = (picked - top[:, None] - rest[:, None]).view(shape).masked_fill(ignored.view(shape), 0)
    entropy = (rest - weighted / total).view(shape[:2]).masked_fill(dead.view(shape[:2]), 0)
    return [logprobs, entropy, torch.stack([top, rest])]


def _backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    labels: Tensor,
    entropy: Tensor,
    lse: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of x, weight and bias, of those that need one; else empty tensors."""
    head, entropy = _Head(x, weight, bias, temperature), entropy.flatten()
    labels, ignored, dead = _by_token(labels, ignore_index)
    top, rest = lse[..., None].unbind()
    of_logprobs = grads[0].reshape(labels.shape).masked_fill(ignored, 0)
    of_all, of_entropy = of_logprobs.sum(1, keepdim=True), grads[1].reshape(-1, 1)
    dx = _zeros(x, needs[0], x.dtype if weight is None else head.kind)
    dw, db = (_zeros(y, needed, None) for y, needed in zip((weight, bias), needs[1:], strict=True))
    of_x = dx.flatten(0, 1) if needs[0] else dx
    with no_autocast(x.device.type):
        for columns in _parts(head.columns, COLUMNS):
            wide = head.wide(columns)
            sums = [None if y is None else torch.zeros_like(y) for y in wide]
            for rows in _parts(len(labels), TOKENS):
                z = head.tile(rows, columns, *wide).sub_(top[rows]).clamp_(min=_LEAST).sub_(rest[rows])
                p = z.exp()
                z.add_(entropy[rows, None]).mul_(of_entropy[rows]).add_(of_all[rows]).mul_(p).neg_()
                inside, place = _places(labels[rows], columns)
                z.scatter_add_(1, place, of_logprobs[rows] * inside)
                head.divided(z.masked_fill_(dead[rows], 0), rows)
                if wide[0] is None:
                    of_x[rows, columns] = z
                    continue
                if needs[0]:
                    of_x[rows] += z @ wide[0]
                if needs[1] and sums[0] is not None:
                    sums[0].addmm_(z.T, head.x[rows].to(head.kind))
                if needs[2] and sums[1] is not None:
                    sums[1] += z.sum(0)
            for gradient, part, needed in zip((dw, db), sums, needs[1:], strict=True):
                if needed and part is not None:
                    gradient[columns] = part
    return [dx.to(x.dtype) if needs[0] else dx, dw, db]


def _zeros(like: Tensor | None, needed: bool, kind: torch.dtype | None) -> Tensor:
    """Return a gradient to add to; without a tensor that needs one an empty one."""
    if like is None or not needed:
        return torch.zeros(0, device="cpu")
    return torch.zeros(like.shape, dtype=kind or like.dtype, device=like.device)


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, *_: Any) -> list[Tensor]:
    kind = torch.promote_types(x.dtype, torch.float32)
    shapes = labels.shape, labels.shape[:2], (2, labels.shape[:2].numel())
    return [x.new_empty(shape, dtype=kind) for shape in shapes]


def _fake_backward(
    grads: Sequence[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    needs = rest[-1]
    return [
        torch.empty(0, device="cpu") if y is None or not needed else y.new_empty(y.shape)
        for y, needed in zip((x, weight, bias), needs, strict=True)
    ]


_INPUTS = "Tensor x, Tensor? weight, Tensor? bias, Tensor labels"
define_kernel(
    "token_logprobs",
    f"({_INPUTS}, Tensor? temperature, int ignore_index) -> Tensor[]",
    _forward,
    _fake,
)
define_kernel(
    "token_logprobs_backward",
    f"(Tensor[] grads, {_INPUTS}, Tensor entropy, Tensor lse, Tensor? temperature, int ignore_index,"
    " bool[] needs) -> Tensor[]",
    _backward,
    _fake_backward,
)


class TokenLogprobs(torch.autograd.Function):
    """The log-probability and the entropy of each token; the gradient cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, labels: Tensor, temperature: Any, ignore_index: int
    ) -> Any:
        tensors = x, weight, bias, labels
        logprobs, entropy, lse = torch.ops.spar.token_logprobs(*tensors, temperature, ignore_index)
        ctx.save_for_backward(*tensors, entropy, lse, temperature)
        ctx.ignore_index = ignore_index
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "token_logprobs: log-probabilities cannot be differentiated twice (create_graph=True); for "
                "that compute them by torch.log_softmax from logits"
            )
        needs = list(ctx.needs_input_grad[:3])
        found = torch.ops.spar.token_logprobs_backward(
            list(grads), *ctx.saved_tensors, ctx.ignore_index, needs
        )
        gradients = [x if needed else None for x, needed in zip(found, needs, strict=True)]
        return *gradients, None, None, None


def token_logprobs_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    labels: Tensor,
    temperature: Tensor | None,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of labels, and entropies: float32, or float64 if x is.

    labels: `[B, S]` or `[B, S, K]`. temperature: of each token, or one; None: 1.
    x: logits `[B, S, V]`, or hidden states `[B, S, D]` with a weight `[V, D]` and perhaps a bias `[V]`.
    """
    learned = [y for y in (x, weight, bias) if y is not None]
    if is_transformed() or (forward_ad._current_level >= 0 and have_tangents(learned)):
        raise NotImplementedError(
            "token_logprobs: there is no forward-mode derivative, and none under torch.func; for that "
            "compute log-probabilities by torch.log_softmax from logits"
        )
    return cast(
        tuple[Tensor, Tensor],
        TokenLogprobs.apply(x, weight, bias, labels, temperature, ignore_index),  # type: ignore[no-untyped-call]
    )
