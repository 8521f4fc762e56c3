# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values that generation changes between forwards, as beam search reorders them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ..._model.part import part_of
from ..._model.patches import reentered
from ..._model.view import View, without_view

_NAME = "past_key_values"
_CHANGES = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")
# The attributes of an encoder-decoder's cache.
_INNER = ("self_attention_cache", "cross_attention_cache")


def follow(view: View, *values: Any) -> None:
    """Let the caches among a forward's arguments and outputs be changed in the view from now on.

    Outside of it a reordered part would be taken for a whole tensor.
    """
    for value in values:
        # The attributes of a mapping may be its entries, and raise KeyErrors.
        is_mapping = isinstance(value, Mapping)
        caches = [value.get(_NAME)] if is_mapping else [value, getattr(value, _NAME, None)]
        for cache in caches:
            for each in (cache, *[getattr(cache, name, None) for name in _INNER]):
                for layer in getattr(each, "layers", ()):
                    if part_of(getattr(layer, "keys", None)) is not None:
                        _follow(view, layer)


def _follow(view: View, layer: Any) -> None:
    for name in _CHANGES:
        own = getattr(type(layer), name, None)
        if own is not None and name not in vars(layer):
            setattr(layer, name, _Change(view, own, layer))


class _Change:
    """A method of a layer's cache, which runs in the view; it is copied with the layer."""

    def __init__(self, view: View, own: Callable[..., Any], layer: Any) -> None:
        self.view, self.own, self.layer = view, own, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = [(name, part_of(getattr(self.layer, name))) for name in ("keys", "values")]
        parts = next((part.parts for _, part in held if part is not None), self.view.parts)
        with reentered(self.view, parts):
            result = self.own(self.layer, *args, **kwargs)
            for name, part in held:
                now = getattr(self.layer, name)
                if part is not None and part_of(now) is None and now.size(part.dim) == part.whole:
                    with without_view():  # what ran whole, such as index_select of rows
                        own = self.view.shard(now, part)
                    setattr(self.layer, name, own.clone())
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> _Change:
        return _Change(self.view, self.own, copy.deepcopy(self.layer, memo))
