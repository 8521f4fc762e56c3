# SPDX-License-Identifier: Apache-2.0
"""Masks that models of transformers make in a view: spans instead of S x S elements, where they are large."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..._attention.prefix_tree import SpansOfTree
from ..._attention.spans import Spans
from ..._model.leaves import has_blocks, refuse
from ..._model.part import part_of
from ..._model.spans_mask import dense_of, mask_of
from ..._model.view import View, current_view, without_view
from .masks import WINDOWS, MaskRequest, leaves_intervals, parts_of

# Smaller masks stay booleans: their memory is no concern, and one fused kernel may beat many blocks.
LEAST_BYTES = 1 << 22
_NAME, _EAGER = "sdpa", "eager"
_WITHOUT_TOKENS = {"mlp", "moe"}  # layers of Nemotron-H in which no token sees another one
# Layers whose functions run along a prefix tree: `served`.
_ALONG_TREES = {"linear_attention", "conv", "hybrid", "mamba"}
_PLAIN = ("causal_mask_function", "bidirectional_mask_function")
_ARGUMENTS = (
    "batch_size",
    "q_length",
    "kv_length",
    "q_offset",
    "kv_offset",
    "mask_function",
    "attention_mask",
    "use_vmap",
    "device",
)


@contextmanager
def making_spans(masking_utils: Any) -> Iterator[None]:
    """Replace transformers' mask functions for `sdpa` and `eager` by ones that make spans in a view.

    Does nothing if the interface is not as in transformers 5.23, or if the user registered another function.
    """
    interface = getattr(masking_utils, "AttentionMaskInterface", None)
    own: Any = getattr(masking_utils, "sdpa_mask", None)
    floats: Any = getattr(masking_utils, "eager_mask", None)
    if interface is None or not _is_known(own) or interface().get(_NAME) is not own:
        yield
        return
    interface.register(_NAME, _intercepting(own, own))
    has_floats = _is_known(floats, "dtype") and interface().get(_EAGER) is floats
    if has_floats:
        interface.register(_EAGER, _intercepting(floats, own))
    try:
        yield
    finally:
        interface.register(_NAME, own)
        if has_floats:
            interface.register(_EAGER, floats)


@functools.lru_cache(maxsize=256)
def _is_known(own: Any, *more: str) -> bool:
    return callable(own) and {*_ARGUMENTS, *more} <= inspect.signature(own).parameters.keys()


@functools.lru_cache(maxsize=256)
def _intercepting(own: Callable[..., Any], booleans: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes spans where `own` would make booleans, or floats from `booleans`."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def mask(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            if has_blocks() and booleans is own and _is_causal_alone(kwargs):
                return None
            made = own(*args, **kwargs)
            if has_blocks() and made is not None and made.numel() * made.element_size() >= LEAST_BYTES:
                refuse("its masks are large, and are spans only outside of a graph")
            return made
        asked = signature.bind(*args, **kwargs)
        asked.apply_defaults()
        given, view = asked.arguments, current_view()
        if isinstance(given["attention_mask"], Spans):
            if view is None:
                return dense_of(_of_caller(None, given))
            view.spans_read.masks += 1
            with without_view():  # ranks share the work: they run other code
                return _of_caller(view, given)
        if view is None:
            return own(*args, **kwargs)
        batch, total = given["batch_size"], given["kv_length"]
        shape, dtype = (batch, 1, total, total), given.get("dtype", torch.bool)
        if not _may_be_spans(given) or batch * total * total * dtype.itemsize < LEAST_BYTES:
            return own(*args, **kwargs)
        function = given["mask_function"]
        # A mask function that broadcasts shows whether there is a mask, and its shape, without its memory.
        others = given | given.get("kwargs", {}) | {"mask_function": _everything, "use_vmap": False}
        if booleans is not own:  # eager_mask calls it so.
            others["allow_is_causal_skip"] = False
        found = booleans(**{name: x for name, x in others.items() if name not in ("dtype", "kwargs")})
        if found is None:
            return None
        spans = None
        if tuple(found.shape) == shape and found.dtype == torch.bool:
            spans = _spans(view, function, shape, given["attention_mask"], found.device)
        return own(*args, **kwargs) if spans is None else mask_of(spans, shape, found.device, dtype)

    return mask


def _is_causal_alone(asked: dict[str, Any]) -> bool:
    """Whether attention is causal and nothing else, for which eager code has no mask.

    Before torch 2.14 transformers makes one in graphs: Dynamo says there that it exports.
    """
    total, window = asked.get("kv_length"), asked.get("local_size")
    is_plain = asked.get("attention_mask") is None and asked.get("allow_is_causal_skip", False)
    return is_plain and asked.get("q_length") == total and (window is None or total < window)


def _of_caller(view: View | None, given: dict[str, Any]) -> Tensor:
    """Return a mask of the Spans that the caller passed; refuse these where a layer does not honour them.

    transformers makes no mask of a tensor [B, H, S, S], and so would lose a window without a word.
    """
    spans, function, more = given["attention_mask"], given["mask_function"], given.get("kwargs", {})
    batch, total, device = given["batch_size"], given["kv_length"], torch.device(given["device"])
    sizes, group = spans.shape, None if view is None else view.parts.group
    offsets = given["q_offset"], given["kv_offset"]
    if sizes[0] not in (1, batch) or sizes[2:] != (given["q_length"], total) or offsets != (0, 0):
        raise ValueError(
            f"attention_mask is {spans}, and this layer has {given['q_length']} queries and {total} keys of "
            f"{batch} samples; expected Spans of all of them, and no cache (use_cache=False)"
        )
    if isinstance(spans, SpansOfTree):
        # The layer's own mask, such as a window, is one of depths. The tree is on the CPU.
        depths = int(spans.tree.position_ids.max()) + 1
        shape = 1, 1, depths, depths
        cpu = torch.device("cpu")
        of_depths = MaskRequest(function, shape, leaves_intervals(function), None, cpu).spans(group)
        causal = of_depths & Spans.causal(depths)
        if _reads_tensors(function) or not torch.equal(causal.ends, of_depths.ends):
            raise ValueError(
                f"attention_mask is that of a prefix tree, and a layer's own mask ({function.__qualname__}) "
                "lets tokens attend to later ones, or depends on their places, as that of images does; "
                "expected a causal model and text: pass the samples without a tree"
            )
        spans = spans.tree.along(of_depths)
    elif not _is_plain(function):
        # By spans inside of the layer's own mask nothing is lost.
        shape = batch, 1, total, total
        own = MaskRequest(function, shape, leaves_intervals(function), None, device).spans(group)
        if not torch.equal((spans.to(device) & own).ends, spans.to(device).ends):
            raise ValueError(
                f"attention_mask is {spans}, by which queries attend to keys outside of a layer's own mask "
                f"({function.__qualname__}), such as a window; expected Spans inside of it, or a 4-D "
                "tensor, which replaces it"
            )
    layers = getattr(more.get("config"), "layer_types", None) or ()
    others = [kind for kind in layers if kind not in {"full_attention", *WINDOWS, *_WITHOUT_TOKENS}]
    if others and not torch.equal(spans.on_cpu, Spans.causal(total).ends):
        if view is None or not isinstance(spans, SpansOfTree) or not _ALONG_TREES.issuperset(others):
            raise ValueError(
                f"attention_mask is {spans}, and the model has layers of {', '.join(sorted(set(others)))}, "
                "which ignore it; expected Spans.causal(S): pass each document as a sample of its own"
            )
        view.spans_read.layers = len(others)
    shape = batch, sizes[1], *sizes[2:]
    return mask_of(spans.to(device), shape, device, given.get("dtype", torch.bool))


def _is_plain(function: Any) -> bool:
    """Whether a mask function is that of full attention, which a mask of the caller's replaces."""
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", "") == "transformers.masking_utils" and name in _PLAIN


def _reads_tensors(function: Any) -> bool:
    """Whether a mask function has a number for each token, such as its image's: it is indexed by places."""
    return any(
        x.numel() > 1 if isinstance(x, Tensor) else callable(x) and _reads_tensors(x)
        for x in parts_of(function)
    )


def _may_be_spans(asked: dict[str, Any]) -> bool:
    """Whether queries and keys are the whole sequence, and padding is whole and has a bool for each token."""
    names = "batch_size", "q_length", "kv_length", "q_offset", "kv_offset"
    sizes = [asked[name] for name in names]
    if any(type(size) is not int for size in sizes) or sizes[1] != sizes[2] or sizes[3:] != [0, 0]:
        return False
    valid = asked["attention_mask"]
    return valid is None or (
        isinstance(valid, Tensor)
        and part_of(valid) is None
        and valid.dtype == torch.bool
        and list(valid.shape) == [sizes[0], sizes[2]]
    )


def _everything(*indices: Tensor) -> Tensor:
    """Allow all pairs: as transformers' functions, of index tensors that broadcast."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=indices[0].device)


def _spans(
    view: View, function: Any, shape: tuple[int, int, int, int], valid: Tensor | None, device: torch.device
) -> Spans | None:
    """Return the spans of a mask; None if a query has too many intervals, or the function reads parts."""
    if valid is not None and bool(valid.all()):
        valid = None
    try:
        spans = MaskRequest(function, shape, leaves_intervals(function), valid, device).spans(
            view.parts.group
        )
    # All ranks raise, because they have the same mask.
    except ValueError:
        return None
    return spans if part_of(spans.ends) is None else None
