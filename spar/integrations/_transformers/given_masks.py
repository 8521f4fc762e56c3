# SPDX-License-Identifier: Apache-2.0
"""Masks of the caller's, over the whole sequence: each layer honours them, or `shard` refuses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._attention.spans import Spans
from ...sequence_layout import SequenceLayout
from .masks import WINDOWS, lengths_by_sample
from .mixers import RECURRENT, WITHOUT_TOKENS, mask_kinds, mixers_of
from .sources import has_attention, masks_of_forward

Mask = torch.Tensor | Spans | None
Error = Callable[[str, Any, str], ValueError]  # of what was passed, its value, and what is expected
_NAME = "batch['attention_mask']"
_ATTENDING = {"full_attention", *WITHOUT_TOKENS}  # kinds of layers that honour any mask


def attention_kinds(config: Any) -> list[str]:
    """Return the kinds of a model's masks, also where its config has no layer_types."""
    windowed = [kind for kind, name in WINDOWS.items() if getattr(config, name, None) is not None]
    return mask_kinds(config) or windowed[:1] or ["full_attention"]


def mask_of(mask: Any, size: int, total: int, error: Error) -> Mask | dict[str, Mask]:
    """Check the shape of a batch's attention mask, or of those of a dict by kind of layer."""
    if isinstance(mask, Mapping):
        return {kind: _checked(f"{_NAME}[{kind!r}]", each, size, total, error) for kind, each in mask.items()}
    return _checked(_NAME, mask, size, total, error)


def _checked(name: str, mask: Any, size: int, total: int, error: Error) -> Mask:
    if mask is None:
        return None
    shape = list(mask.shape) if isinstance(mask, (torch.Tensor, Spans)) else None
    fits = shape == [size, total] or (
        shape is not None
        and len(shape) == 4
        and shape[0] in (1, size)
        and shape[2] in ((total,) if isinstance(mask, Spans) else (1, total))
        and shape[3] == total
    )
    if not fits:
        value = f"of shape {shape}" if shape else f"a {type(mask).__name__}"
        whole = f"[{size}, 1, {total}, {total}] of the whole"
        raise error(name, value, f"[{size}, {total}], or a tensor or spar.Spans {whole}, or a dict of these")
    checked: torch.Tensor | Spans = mask
    return checked


def is_padding(mask: Mask | dict[str, Mask]) -> bool:
    """Whether a mask says which tokens are padding, [B, S], and nothing else."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def kept_apart(
    masks: Mask | dict[str, Mask],
    model: Any,
    config: Any,
    whole: frozenset[torch.nn.Module],
    longest: int,
    layout: SequenceLayout,
    error: Error,
) -> torch.Tensor | None:
    """Check that each kind of layer honours the caller's masks; return the documents that they have.

    Transformers makes no masks of these: a layer that has a rule of its own, such as a window or a state,
    would lose the rule, or ignore the mask.

    Args:
        masks: one for all layers, or a dict by kind.
        whole: the modules that run on the whole sequence, which keep no documents apart.
        longest: the highest position, plus one.

    Returns:
        The first token of each token's document, [B or 1, S], which layers without attention are to keep
        apart; None if there is one document, or no such layer.
    """
    if not has_attention(model):
        raise error(_NAME, text(masks), "[B, S], or none: the model has no attention")
    kinds, mixers = attention_kinds(config), mixers_of(model)
    if named := isinstance(masks, Mapping):
        several, by_kind = len(kinds) > 1, masks_of_forward(model).by_kind
        if set(masks) != set(kinds) or (several and not by_kind):
            expected = "one for all layers" if several and not by_kind else f"one for each of {kinds}"
            raise error(_NAME, f"a dict with masks for {sorted(masks)}", expected)
    if mixers and not set(kinds) & set(RECURRENT):
        kinds = [*kinds, RECURRENT[0]]  # of a config that does not name them
    documents = None
    for kind in kinds:
        mask = masks.get(kind) if isinstance(masks, Mapping) else masks
        name = f"{_NAME}[{kind!r}]" if named else _NAME
        if kind in WINDOWS:
            _check_window(name, mask, kind, config, named, longest, layout.total, error)
        elif kind in RECURRENT:
            if mask is not None and not is_padding(mask):
                documents = _documents_of(name, mask, layout, error)
        elif kind not in _ATTENDING and not isinstance(mask, torch.Tensor):
            # A tensor reaches modules that run whole as in one process; spans would be spar's promise.
            raise error(name, text(mask), f"none: whether layers of {kind} honour it is not known")
    if documents is not None and whole:
        expected = (
            "one document: modules of whole= are as in one process, where states pass through documents"
        )
        raise error(_NAME, text(masks), expected)
    return documents


def _check_window(
    name: str, mask: Mask, kind: str, config: Any, named: bool, longest: int, total: int, error: Error
) -> None:
    """Refuse one mask for all layers by which a query attends to keys outside of a layer's window.

    A tensor is used as it is: so it is in one process.
    """
    size = getattr(config, WINDOWS[kind], None)
    if size is None or longest <= size or isinstance(mask, torch.Tensor) or (named and mask is not None):
        return
    is_chunk = kind == "chunked_attention"
    window = Spans.chunks(total, size) if is_chunk else Spans.window(total, size - 1, None)
    if mask is not None and torch.equal((mask & window).ends, mask.ends):
        return
    clip = f"spar.Spans.{f'chunks({total}, {size})' if is_chunk else f'window({total}, {size - 1}, 0)'}"
    others = [other for other in attention_kinds(config) if other != kind]
    entries = {**dict.fromkeys(others, "spans"), kind: f"spans & {clip}"}
    example = ", ".join(f"{key!r}: {value}" for key, value in entries.items())
    raise error(
        name,
        f"{text(mask)}, by which queries attend to keys outside of config.{WINDOWS[kind]}, {size}",
        f"a dict with a mask for each kind of layer, which is used as it is, such as {{{example}}}",
    )


def _documents_of(
    name: str, mask: torch.Tensor | Spans, layout: SequenceLayout, error: Error
) -> torch.Tensor | None:
    """Return the documents of a mask that layers without attention honour, too; None: there is one."""
    first = _first_tokens(mask, layout.total)
    if first is None:
        raise error(
            name,
            f"{text(mask)}, and the model has layers of linear attention, state spaces or convolutions, "
            "which pass a state or tokens on to the next token whatever a mask says",
            "spans of plain documents, spar.Spans.causal(S) & spar.Spans.documents(ids), which these layers "
            "keep apart, too; or [B, S] for padding. Pass branches of a tree as documents of their own",
        )
    lengths = lengths_by_sample(first)
    if layout.is_packed and lengths != (tuple(size for size in layout.lengths if size),):
        raise error(name, f"of documents of {lengths!r:.200}", f"{layout.lengths!r:.200}, as the layout")
    return first if bool(first.any()) else None


def _first_tokens(mask: torch.Tensor | Spans, total: int) -> torch.Tensor | None:
    """Return the first token of each token's document, [B or 1, S], if a mask is that of causal documents."""
    if mask.shape[1] != 1 or mask.shape[2] != total:
        return None
    if isinstance(mask, Spans):
        first = mask.on_cpu[:, 0, :, 0]
        plain = Spans.causal(total) & Spans.documents(first)
        return first if torch.equal(plain.ends, mask.on_cpu) else None
    allowed = (mask == 0 if mask.is_floating_point() else mask != 0).cpu()
    first = allowed[:, 0].int().argmax(-1)
    plain = Spans.causal(total) & Spans.documents(first)
    return first if bool((plain.dense() == allowed).all()) else None


def text(mask: Any) -> str:
    return f"of shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
