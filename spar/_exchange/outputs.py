# SPDX-License-Identifier: Apache-2.0
"""`out=`: check the caller's tensors, and write an exchange's outputs to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._transports.dtypes import copy_items, resolved
from .arguments import Arguments
from .exchange import Exchange, Tensors
from .observers import have_tangents, is_any_traced, must_record


def write_to(
    out: Any, calls: Sequence[Arguments], at: Sequence[str], exchange: Exchange
) -> list[torch.Tensor]:
    """Check `out`, write the outputs of the calls' exchange to it, and return its tensors."""
    inputs = [call.input for call in calls]
    outs = checked(out, calls, at, exchange)
    world = exchange.group.world
    if world == 1 or inputs[0].is_meta or is_any_traced([*inputs, *outs]):
        results = inputs if world == 1 else exchange.run(inputs)
        for target, result in zip(outs, results, strict=True):
            if torch.compiler.is_compiling():
                target.copy_(result)
            else:
                copy_items(target, resolved(result).contiguous())
        return outs
    exchange.run(inputs, 0, outs, False)
    note_write(outs)
    return outs


def note_write(outs: Tensors) -> None:
    """Let autograd see that the tensors have changed."""
    for out in outs:
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)


def checked(
    out: Any, calls: Sequence[Arguments], at: Sequence[str], exchange: Exchange
) -> list[torch.Tensor]:
    """Return `out` as a list, one tensor for each call; raise if the outputs cannot be written there."""
    first, inputs = calls[0], [call.input for call in calls]
    single = len(at) == 1 and at[0] == ""
    outs = [out] if single else out
    if not isinstance(outs, (list, tuple)) or len(outs) != len(calls):
        raise first.error("out", _summary(out), f"a list of {len(calls)} tensors, one for each input")
    if must_record(inputs):
        where, remedy = "requires a gradient, which cannot be recorded through out", "under torch.no_grad()"
        if have_tangents(inputs):
            where, remedy = "has a tangent, which out cannot have", "on its primal"
        raise first.error("out", _summary(out), f"None where input_ {where}; call it {remedy}")
    for call, target, shape, name in zip(calls, outs, exchange.shapes(inputs), at, strict=True):
        _check(call, f"out{name}", target, shape)
    if not inputs[0].is_meta and not is_any_traced([*inputs, *outs]):
        _check_memory(first, inputs, outs, at)
    return list(outs)


def _summary(out: object) -> str:
    if isinstance(out, torch.Tensor):
        return f"a tensor of shape {list(out.shape)}"
    return f"a {type(out).__name__}" + (f" of {len(out)}" if isinstance(out, (list, tuple)) else "")


def _check(call: Arguments, name: str, out: Any, shape: Sequence[int]) -> None:
    x = call.input
    if not isinstance(out, torch.Tensor):
        raise call.type_error(name, f"a {type(out).__name__}", "a tensor")
    if type(out) is not torch.Tensor and hasattr(out, "to_local"):
        raise call.type_error(name, f"a {type(out).__name__}", "a plain tensor; pass its .to_local()")
    if out.layout is not torch.strided:
        raise call.type_error(name, f"a tensor of layout {out.layout}", "a strided tensor")
    if (out.dtype, out.device) != (x.dtype, x.device):
        value = f"a tensor of {out.dtype} on {out.device}"
        raise call.type_error(name, value, f"{x.dtype} on {x.device}, as the input")
    if list(out.shape) != list(shape):
        raise call.error(name, _summary(out), f"the output's shape, {list(shape)}")
    if not out.is_contiguous():
        raise call.error(name, f"of strides {list(out.stride())}", "a contiguous tensor")
    if torch.is_grad_enabled() and out.requires_grad:
        raise call.error(name, "a tensor that requires a gradient", "one that does not; or torch.no_grad()")
    if torch.compiler.is_compiling():  # A graph writes to it by torch's own copy_.
        return
    if out.is_conj() or out.is_neg():
        raise call.error(name, "a view that conjugates or negates", "a contiguous tensor")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise call.error(name, "a tensor made in inference mode", "one made outside of it")


def _check_memory(
    call: Arguments, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], at: Sequence[str]
) -> None:
    spans = [(f"input_{name}", _span(x)) for x, name in zip(inputs, at, strict=True)]
    for out, name in zip(outs, at, strict=True):
        begin, end = _span(out)
        if begin == 0 < end:  # A storage that was resized to 0.
            raise call.error(f"out{name}", f"{_summary(out)} without memory", "one whose memory is allocated")
        for owner, (first, last) in spans:
            if begin < last and first < end:
                raise call.error(f"out{name}", f"memory that overlaps {owner}", "memory of its own")
        spans.append((f"out{name}", (begin, end)))


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor's items lie."""
    begin = x.data_ptr()
    if x.numel() == 0:
        return begin, begin
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()
