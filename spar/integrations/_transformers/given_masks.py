# SPDX-License-Identifier: Apache-2.0
"""Functions of transformers that read the caller's mask, which may be the spans of a prefix tree.

They are called as those of `scans`, also in a forward that runs whole, without a view.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..._attention.prefix_tree import SpansOfTree
from ..._attention.spans import Spans
from ..._model.view import View

# Of the function that weighs each token by its mask.
_WEIGHING = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_UNCOUNTED = "which does not say how often a token counts"


def router_loss(view: View | None, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute the loss of a router, in which a place of a tree counts as often as samples have it.

    transformers weighs tokens by the mask of padding. So the loss is that of the padded samples.
    """
    signature = inspect.signature(own)
    given = signature.bind(*args, **kwargs).arguments
    mask = given.get("attention_mask")
    if not isinstance(mask, Spans):
        return NotImplemented
    if isinstance(mask, SpansOfTree) and [*signature.parameters] == _WEIGHING:
        return own(**given | {"attention_mask": mask.tree.counts[None]})
    problem = "by which it may not weigh tokens" if isinstance(mask, SpansOfTree) else _UNCOUNTED
    raise ValueError(
        f"{own.__name__} of {own.__module__}: attention_mask is {mask}, {problem}; expected the mask of "
        "tree.batch() and a function of transformers 5.23, or output_router_logits=False"
    )


def without_padding(
    view: View | None, own: Callable[..., Any], hidden_states: Tensor, attention_mask: Any
) -> Any:
    """Return hidden states as they are: a tree has no padding, and the function behind follows it."""
    if view is None or not isinstance(attention_mask, SpansOfTree):
        return NotImplemented
    view.spans_read.layers += 1  # if that function does not run along the tree, the forward raises
    return hidden_states


def biases_by_places(
    view: View | None, own: Callable[..., Any], attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse biases of attention that count the places of a row."""
    if isinstance(attention_mask, Spans):
        raise ValueError(
            f"attention_mask is {attention_mask}, and the model's ALiBi counts places of the row; "
            "expected the samples as a padded batch"
        )
    return NotImplemented
