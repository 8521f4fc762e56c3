# SPDX-License-Identifier: Apache-2.0
"""Names of before `spar.parallelize`, which runs models of transformers now: docs/transformers.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._deprecated import warn_deprecated
from ..ops.gather import all_gather
from ..sequence_layout import SequenceLayout
from ..topology.resolve import Group, process_group
from ._former_names import REMOVAL
from ._parallelize import parallelize, unparallelize

__all__ = ["register", "shard", "total_loss"]

_STATE = "_spar_former"  # the attribute of a model that `shard` parallelized
_SHARE, _LAYOUT = "spar_share", "layout"  # what `shard` adds to the batch
_IGNORED = -100  # the label of a token that does not count


def register(name: str = "spar") -> None:
    """Deprecated: a parallelized model needs no attention of its own. Makes the name one for `sdpa`."""
    warn_deprecated("transformers.register", "spar.parallelize(model, group)", REMOVAL)
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        for option in ("s_aux", "sinks", "softcap"):
            if kwargs.get(option) is not None:
                raise ValueError(
                    f"attention of {type(module).__name__}: {option} is given, which sdpa does not compute; "
                    'call model.set_attn_implementation("eager")'
                )
        return AttentionInterface()["sdpa"](module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return AttentionMaskInterface()["sdpa"](*args, **kwargs)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)


def shard(
    model: Any,
    batch: Mapping[str, Any],
    layout: SequenceLayout | None = None,
    *,
    group: Group = None,
    method: str | None = None,
    scan: str | None = None,
    token_group: Group = None,
    check: bool = True,
    whole: Any = None,
) -> dict[str, Any]:
    """Deprecated: `spar.parallelize(model, group)` once, then `model(**batch)` with the whole batch.

    Parallelizes the model of transformers inside of `model`, and returns the whole batch. The loss of
    `model(**shard(...))` is this rank's share of the loss of all tokens, as before, and other outputs of a
    sequence are this rank's tokens. `scan`, `check` and `whole` have no effect.

    Collective over `token_group` if there are labels.
    """
    warn_deprecated("transformers.shard", "spar.parallelize(model, group), then model(**batch)", REMOVAL)
    real = process_group(
        layout.group if group is None and layout is not None else group, "transformers.shard"
    )
    former = _former(_stock(model), real, "hybrid" if _is_hybrid(layout) else method)
    if layout is None:
        ids = batch.get("input_ids")
        total = (batch["inputs_embeds"] if ids is None else ids).size(1)
        layout = SequenceLayout.even(total, real)
    share = 1 / real.size()
    if token_group is not None and batch.get("num_items_in_batch") is None:
        share *= _share_of_labels(former.model, batch, real, process_group(token_group, "transformers.shard"))
    return {**batch, "use_cache": False, _LAYOUT: layout, _SHARE: share}


def total_loss(loss: torch.Tensor, *, group: Group = None, token_group: Group = None) -> torch.Tensor:
    """Deprecated: the loss of a parallelized model is that of one process. Sums what `shard` divided.

    Collective over `group`, and over `token_group`.
    """
    warn_deprecated("transformers.total_loss", "the loss itself", REMOVAL)
    real = process_group(group, "transformers.total_loss")
    total = loss.detach().double()
    tokens = None if token_group is None else process_group(token_group, "transformers.total_loss")
    if tokens is None or not _contains(tokens, real):
        total = all_gather(total[None], real).sum()
    if tokens is not None:
        total = all_gather(total[None], tokens).sum()
    return total.to(loss.dtype)


class _Former:
    """A model that `shard` parallelized.

    Attributes:
        layout, share: of the newest forward.
    """

    def __init__(self, model: Any, group: Any, method: str | None) -> None:
        self.model, self.group, self.method = model, group, method
        self.layout: SequenceLayout | None = None
        self.share = 1.0
        layout_of: Any = "even" if method == "hybrid" else lambda _: self.layout
        parallelize(model, group, method=method, layout=layout_of, outputs="parts")
        self._hooks = [
            model.register_forward_pre_hook(self._take, with_kwargs=True),
            model.register_forward_hook(self._divide),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        unparallelize(self.model)

    def _take(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = {**kwargs}
        self.share, self.layout = kwargs.pop(_SHARE, 1.0), kwargs.pop(_LAYOUT, None)
        return args, kwargs

    def _divide(self, model: Any, args: Any, output: Any) -> Any:
        """Return the output with this rank's share of the loss: a tuple begins with it, or has none."""
        if isinstance(output, tuple):
            has_loss = isinstance(output[0], torch.Tensor) and output[0].dim() == 0
            return (output[0] * self.share, *output[1:]) if has_loss else output
        if getattr(output, "loss", None) is not None:
            output.loss = output.loss * self.share
        return output


def _former(model: Any, group: Any, method: str | None) -> _Former:
    """Return the state of a model that is parallelized over the group by the method."""
    former: _Former | None = vars(model).get(_STATE)
    if former is not None and (former.group is not group or former.method != method):
        former.remove()
        former = None
    if former is None:
        former = vars(model)[_STATE] = _Former(model, group, method)
    return former


def _stock(model: Any) -> Any:
    """Return the model of transformers, which may be inside of PEFT, DDP or torch.compile."""
    from transformers import PreTrainedModel

    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(
        f"transformers.shard: model is a {type(model).__name__}; expected a model of transformers"
    )


def _is_hybrid(layout: SequenceLayout | None) -> bool:
    return layout is not None and layout.kind == "hybrid"


def _share_of_labels(model: Any, batch: Mapping[str, Any], group: Any, tokens: Any) -> float:
    """Return what part of the labels of all data-parallel ranks this rank's batch has."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is None and labels is not None and type(model).__name__.endswith("ForCausalLM"):
        shifted = labels[:, 1:]
    found = next((x for x in (shifted, labels, batch.get("start_positions")) if x is not None), None)
    if found is None:
        return 1.0
    own = (
        (found != _IGNORED).sum()
        if not found.is_floating_point()
        else torch.tensor(len(found), device=found.device)
    )
    total = all_gather(own.to(torch.int64)[None], tokens).sum() / (
        group.size() if _contains(tokens, group) else 1
    )
    return float(own) / max(float(total), 1.0)


def _contains(outer: Any, inner: Any) -> bool:
    ranks = torch.distributed.get_process_group_ranks
    return set(ranks(inner)) <= set(ranks(outer))
