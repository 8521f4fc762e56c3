# SPDX-License-Identifier: Apache-2.0
"""`token_logprobs`: the log-probability and the entropy of each token of a sharded sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from .._checks import check_int, check_number, check_type
from .._exchange.arguments import Arguments, ranks_of
from .._exchange.grad_scale import NOT_GIVEN, GradScale
from .._exchange.observers import has_values
from .._group.group import Call
from ..sequence_layout import SequenceLayout
from .samples import check_shard, split_samples

_NAME = "token_logprobs"
_GATHERS = (None, "sequence", "samples")
Logits = Tensor | Sequence[Tensor]


@overload
def token_logprobs(
    logits: Logits,
    labels: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    gather: Literal["sequence"] | None = None,
    grad_scale: GradScale = NOT_GIVEN,
) -> tuple[Tensor, Tensor]: ...


@overload
def token_logprobs(
    logits: Logits,
    labels: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    gather: Literal["samples"],
    grad_scale: GradScale = NOT_GIVEN,
) -> tuple[list[Tensor], list[Tensor]]: ...


def token_logprobs(
    logits: Logits,
    labels: Tensor,
    layout: SequenceLayout,
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    gather: Literal["sequence", "samples"] | None = None,
    grad_scale: GradScale = NOT_GIVEN,
) -> Any:
    """Compute the log-probability of each label, and the entropy of each token's distribution.

    Logits are processed in tiles of 16 MB of float32. Memory for them does not grow with the sequence, nor
    with the vocabulary. Gradients are exact, and those of weight and bias are to be summed over the ranks, as
    all gradients of local losses are. Without `gather` nothing is exchanged.

    Args:
        logits: `[B, S/P, V]`, of this rank's tokens; or (hidden, weight) or (hidden, weight, bias) of the
            head, `[B, S/P, D]`, `[V, D]` and `[V]`: logits then exist in tiles only, which backward computes
            again. 16-bit types are computed in float32.
        labels: `[B, S/P]` ints: the next token of each, shifted before the sequence was sharded, as
            `SequenceLayout.shift` does. Or `[B, S/P, K]`: K labels of each token, such as a teacher's
            likeliest ones.
        layout: how the sequence lies on the ranks.
        temperature: that of sampling, above 0: logits are divided by it. Or a tensor `[B, S/P]`, that of each
            token, which receives no gradient.
        ignore_index: the label of tokens that do not count, such as the last one of a sample.
        gather: None keeps this rank's tokens. "sequence" gathers `[B, S]` in natural order, on every rank.
            "samples" gathers a list with a tensor `[length]` for each sample: each document of each row of a
            packed layout, else each row. One exchange moves both results.
        grad_scale: of the gather, as in `SequenceLayout.gather`; it must be given if a gradient is recorded.

    Returns:
        Log-probabilities, of the shape of labels, and entropies `[B, S/P]` in float32, or float64 if logits
        are. A log-probability is 0, without a gradient, where the label is ignore_index; an entropy where all
        labels of the token are. With gather `[B, S]`, or lists.

    Raises:
        ValueError: shapes do not fit the layout or each other, a label is not in the vocabulary, or a
            temperature is not above 0. On a GPU such a label or a token's temperature is a device-side
            assertion, as in torch's `cross_entropy`.
        TypeError: a tensor is of another type; also a weight that FSDP2 has sharded.
        NotImplementedError: in forward mode or under torch.func.
        RuntimeError: at backward, with create_graph=True: it cannot be differentiated again.
        MismatchError: with `gather`, calls differ between ranks, or one fails. Every rank raises.
    """
    check_type(_NAME, "layout", layout, SequenceLayout, "a SequenceLayout")
    exchanges = int(gather is not None)
    x, *head = _listed(logits, layout, exchanges)
    with Arguments(_NAME, x, layout.group, "hidden" if head else "logits", exchanges) as call:
        weight, bias = _checked_head(call, x, head)
        ignore_index = check_int(call.where, "ignore_index", ignore_index, -(2**63), 2**63 - 1)
        labels = _checked_labels(call, labels, layout, ignore_index, len(weight) if head else x.size(2))
        heat = _checked_temperature(call, temperature, labels, ignore_index)
        if gather not in _GATHERS:
            raise call.error("gather", repr(gather), '"sequence", "samples" or None')
        from .vocabulary import token_logprobs_of  # defines ops for torch: 4 ms of the import of spar

        results = token_logprobs_of(x, weight, bias, labels, heat, ignore_index)
        if gather is None:
            return results
        whole = layout.gather(results, 1, grad_scale)
        if gather == "sequence":
            return whole[0], whole[1]
        return split_samples(whole[0], layout), split_samples(whole[1], layout)


def _listed(logits: Logits, layout: SequenceLayout, exchanges: int) -> list[Tensor]:
    """Return logits, or hidden states and their head, as a list."""
    if not isinstance(logits, (tuple, list)):
        return [cast(Tensor, logits)]
    if len(logits) not in (2, 3):
        ranks = ranks_of(layout.group, _NAME)
        with Call(ranks, _NAME, exchanges):
            raise TypeError(
                f"{_NAME} on rank {ranks.rank} of {ranks.world}: logits is a {type(logits).__name__} of "
                f"{len(logits)}; expected a tensor, (hidden, weight) or (hidden, weight, bias)"
            )
    return list(logits)


def _checked_head(call: Arguments, x: Tensor, head: Sequence[Any]) -> tuple[Any, Any]:
    """Check the types and shapes of logits, or of hidden states and their head."""
    names = ("hidden", "weight", "bias")[: 1 + len(head)] if head else ("logits",)
    weight, bias = (*head, None, None)[:2]
    for name, y in zip(names, (x, *head), strict=True):
        if not isinstance(y, Tensor) and (name != "bias" or y is not None):
            raise call.type_error(name, f"a {type(y).__name__}", "a tensor")
        if y is None:
            continue
        if hasattr(y, "to_local"):
            raise call.type_error(
                name, "a DTensor", "a plain tensor: under FSDP2 call token_logprobs inside of the forward of "
                "the module that `fully_shard` wraps, where its parameters are whole"
            )  # fmt: skip
        if not y.is_floating_point() or y.dtype.itemsize < 2:
            raise call.type_error(name, f"a tensor of {y.dtype}", "a float dtype of at least 16 bits")
        if y.device != x.device:
            raise call.error(name, f"on {y.device}", f"a tensor on {x.device}, as {names[0]} is")
    if x.dim() != 3:
        shape = "[B, S/P, D]" if head else "[B, S/P, V]"
        raise call.error(names[0], f"of shape {list(x.shape)}", shape)
    if head and (weight.dim() != 2 or weight.size(1) != x.size(2)):
        raise call.error("weight", f"of shape {list(weight.shape)}", f"[V, {x.size(2)}], as hidden has")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise call.error("bias", f"of shape {list(bias.shape)}", f"[{weight.size(0)}], as weight has")
    return weight, bias


def _checked_labels(
    call: Arguments, labels: Any, layout: SequenceLayout, ignore_index: int, vocabulary: int
) -> Tensor:
    """Check that labels fit the logits, the layout and the vocabulary; return them as int64."""
    plain = isinstance(labels, Tensor) and labels.dtype != torch.bool
    if not plain or labels.is_floating_point() or labels.is_complex():
        what = f"a tensor of {labels.dtype}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise call.type_error("labels", what, "a tensor of ints")
    check_shard(call, call.input_name, call.input, layout)
    if labels.dim() not in (2, 3) or labels.shape[:2] != call.shape[:2]:
        expected = (
            f"{list(call.shape[:2])}, the next token of each of this rank's tokens, or K in a third dim"
        )
        raise call.error("labels", f"of shape {list(labels.shape)}", expected)
    if labels.device != call.input.device:
        raise call.error("labels", f"on {labels.device}", f"a tensor on {call.input.device}, as logits are")
    labels = labels.long()  # narrower ints would wrap the vocabulary that they are compared with
    if has_values(labels):
        wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))]
        if wrong.numel():
            raise call.error("labels", f"{int(wrong[0])}", f"0 to {vocabulary - 1}, or ignore_index")
    return cast(Tensor, labels)


def _checked_temperature(
    call: Arguments, temperature: Any, labels: Tensor, ignore_index: int
) -> Tensor | None:
    """Return the temperatures as a tensor of the computation's dtype; None: 1."""
    x = call.input
    kind = torch.promote_types(x.dtype, torch.float32)
    if not isinstance(temperature, Tensor):
        check_number(call.where, "temperature", temperature)
        if temperature <= 0:
            raise call.error("temperature", temperature, "a number above 0")
        return None if temperature == 1 else torch.full((), float(temperature), dtype=kind, device=x.device)
    if temperature.shape != call.shape[:2] or temperature.device != x.device:
        expected = f"a number, or {list(call.shape[:2])} on {x.device}, one of each of this rank's tokens"
        raise call.error(
            "temperature", f"of shape {list(temperature.shape)} on {temperature.device}", expected
        )
    if not temperature.is_floating_point() or temperature.requires_grad:
        what = f"a tensor of {temperature.dtype}"
        what += " that requires a gradient" if temperature.requires_grad else ""
        raise call.type_error("temperature", what, "floats without a gradient; pass temperature.detach()")
    ignored = (labels == ignore_index).view(*call.shape[:2], -1).all(-1)
    heat: Tensor = temperature.to(kind).masked_fill(ignored, 1)  # such as 0 in padding
    if has_values(heat):
        wrong = heat[~((heat > 0) & (heat < torch.inf))]
        if wrong.numel():
            raise call.error("temperature", f"{wrong[0].item():g} of a token", "a number above 0, and finite")
    return heat
