# SPDX-License-Identifier: Apache-2.0
"""What runs in this thread: the layout of the model's forward, and the module that runs whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ...sequence_layout import SequenceLayout
from .attention import registered
from .whole_inputs import Site


class Entered(NamedTuple):
    """A module that runs whole.

    Attributes:
        layout: of the sequence outside of it.
        attentions: for each of the site's configs the attention that it had, which `leave` restores.
    """

    site: Site
    layout: SequenceLayout
    attentions: tuple[str | None, ...]


class _State(threading.local):
    """State of one thread: backward runs layers again in threads of its own.

    Attributes:
        layout: that of the forward of a model that runs; None: it runs whole sequences, or none runs.
        owner: the model that received it.
        is_known: whether it is restored in a layer that gradient checkpointing runs again.
        entered: the module that runs whole, if one does.
    """

    layout: SequenceLayout | None = None
    owner: Any = None
    is_known: bool = False
    entered: Entered | None = None


state = _State()


def enter(site: Site, layout: SequenceLayout) -> None:
    """Let the attention of the layers in a module be that of one process."""
    attentions = tuple([config._attn_implementation_internal for config in site.configs])
    state.entered = Entered(site, layout, attentions)
    for config, attention in zip(site.configs, attentions, strict=True):
        if attention in registered:
            config._attn_implementation_internal = site.attention


def leave() -> Entered | None:
    """Undo `enter`; return what it entered."""
    entered = state.entered
    if entered is not None:
        for config, attention in zip(entered.site.configs, entered.attentions, strict=True):
            config._attn_implementation_internal = attention
        state.entered = None
    return entered


class Carrying:
    """A model's checkpointing function, whose layers find this thread's state when they run again."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout, entered = state.layout, state.entered

        def again(*args: Any, **kwargs: Any) -> Any:
            before = state.layout, state.is_known, state.entered
            state.layout, state.is_known = layout, True
            if entered is not None and before[2] is None:
                enter(entered.site, entered.layout)
            try:
                return function(*args, **kwargs)
            finally:
                if entered is not None and before[2] is None:
                    leave()
                state.layout, state.is_known = before[:2]

        return self.checkpoint(again, *args, **kwargs)
