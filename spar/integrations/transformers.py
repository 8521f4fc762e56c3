# SPDX-License-Identifier: Apache-2.0
"""Names of before `spar.parallelize`, which runs models of transformers now: docs/transformers.md."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .._deprecated import warn_deprecated
from .._group.group import MOST_EXCHANGES
from .._group.registry import group_of
from ..ops.gather import all_gather
from ..sequence_layout import SequenceLayout
from ..topology.resolve import Group, process_group
from ._former_names import REMOVAL
from ._parallelize import parallelize, unparallelize

__all__ = ["register", "shard", "total_loss"]

_STATE = "_spar_former"  # the attribute of a model that `shard` parallelized
_SHARE, _LAYOUT = "spar_share", "layout"  # what `shard` adds to the batch
_IGNORED = -100  # the label of a token that does not count
# In the names of models whose labels are not those of the next token.
_NOT_SHIFTED = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
_registered: set[str] = set()


def register(name: str = "spar") -> None:
    """Deprecated: a parallelized model needs no attention of its own. Makes the name one for `sdpa`."""
    warn_deprecated("transformers.register", "spar.parallelize(model, group)", REMOVAL)
    from transformers import AttentionInterface, AttentionMaskInterface

    if name not in _registered and name in (*AttentionInterface().valid_keys(), "eager"):
        raise ValueError(f"register: name is {name!r}, an attention of transformers; pass another name")
    _registered.add(name)

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
    own_group = layout.group if group is None and layout is not None else group
    real = process_group(own_group, "transformers.shard")
    tokens = None if token_group is None else process_group(token_group, "transformers.shard", "token_group")
    with _reported("transformers.shard", real, tokens):
        former = _former(_stock(model), real, "hybrid" if _is_hybrid(layout) else method)
        given = _with_positions(batch, layout)
        labels = _labels_of(former.model, given)
        share = 1 / real.size()
        if labels is not None and batch.get("num_items_in_batch") is None:
            if tokens is None and real.size() < torch.distributed.get_world_size():
                raise ValueError(
                    "transformers.shard: token_group is None, and group does not span all ranks; expected "
                    "the group over which labels are counted"
                )
            share *= _share_of_labels(labels, real, tokens)
        if given.get("labels") is None and given.get("shift_labels") is not None:
            given["labels"] = given["shift_labels"]  # without labels models compute no loss
        return {**given, "use_cache": False, _LAYOUT: layout or _even(given, real), _SHARE: share}


def total_loss(loss: torch.Tensor, *, group: Group = None, token_group: Group = None) -> torch.Tensor:
    """Deprecated: the loss of a parallelized model is that of one process. Sums what `shard` divided.

    Collective over `group`, and over `token_group`.
    """
    warn_deprecated("transformers.total_loss", "the loss itself", REMOVAL)
    real = process_group(group, "transformers.total_loss")
    tokens = (
        None if token_group is None else process_group(token_group, "transformers.total_loss", "token_group")
    )
    with _reported("transformers.total_loss", real, tokens):
        total = loss.detach().double()
        if tokens is None or not _contains(tokens, real):
            total = all_gather(total[None], real).sum()
        if tokens is not None:
            total = all_gather(total[None], tokens).sum()
        return total.to(loss.dtype)


@contextlib.contextmanager
def _reported(name: str, group: Any, tokens: Any) -> Iterator[None]:
    """Report what fails on this rank alone to the ranks of both groups."""
    with contextlib.ExitStack() as stack:
        for each in (group, *([] if tokens is None else [tokens])):
            stack.enter_context(group_of(each).call(name, MOST_EXCHANGES))
        yield


class _Former:
    """A model that `shard` parallelized.

    Attributes:
        newest: of the newest forward, what is taken from its arguments. Copies of the model share it.
    """

    def __init__(self, model: Any, group: Any, method: str | None) -> None:
        self.model, self.group, self.method = model, group, method
        self.newest = newest = _Newest()

        def lay_out(batch: dict[str, Any]) -> SequenceLayout:
            return newest.layout or _even(batch, group)

        layout_of: Any = "even" if method == "hybrid" else lay_out
        parallelize(model, group, method=method, layout=layout_of, outputs="parts")
        self._hooks = [
            model.register_forward_pre_hook(self._take, with_kwargs=True),
            model.register_forward_hook(self._divide),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Former:
        made = memo[id(self)] = object.__new__(_Former)
        vars(made).update(vars(self))
        made.model = copy.deepcopy(self.model, memo)
        made._hooks = copy.deepcopy(self._hooks, memo)
        return made

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        unparallelize(self.model)

    def _take(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = {**kwargs}
        self.newest.share, self.newest.layout = kwargs.pop(_SHARE, 1.0), kwargs.pop(_LAYOUT, None)
        return args, kwargs

    def _divide(self, model: Any, args: Any, output: Any) -> Any:
        """Return the output with this rank's share of the loss: a tuple begins with it, or has none."""
        if isinstance(output, tuple):
            has_loss = isinstance(output[0], torch.Tensor) and output[0].dim() == 0
            return (self._share_of(output[0]), *output[1:]) if has_loss else output
        if getattr(output, "loss", None) is not None:
            output.loss = self._share_of(output.loss)
        return output

    def _share_of(self, loss: torch.Tensor) -> torch.Tensor:
        # The mean of no labels is not a number.
        return loss * self.newest.share if self.newest.share else loss.nan_to_num() * 0


class _Newest:
    """Attributes: layout, share: None and 1 in a forward of arguments that `shard` did not return."""

    layout: SequenceLayout | None = None
    share = 1.0

    def __deepcopy__(self, memo: object) -> _Newest:
        return self


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


def _even(batch: Mapping[str, Any], group: Any) -> SequenceLayout:
    ids = batch.get("input_ids")
    return SequenceLayout.even((batch["inputs_embeds"] if ids is None else ids).size(1), group)


def _with_positions(batch: Mapping[str, Any], layout: SequenceLayout | None) -> dict[str, Any]:
    """Return the batch, with position_ids of the documents that the layout or cu_seq_lens_q has."""
    given, ends, positions = dict(batch), batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if ends is None and layout is not None and layout.is_packed:
        ends = layout.cu_seqlens()
    restarts = positions is not None and bool((positions.reshape(-1, positions.size(-1))[:, 1:] == 0).any())
    mask = batch.get("attention_mask")
    if (ends is not None or restarts) and isinstance(mask, torch.Tensor) and bool((mask != 0).all()):
        raise ValueError(
            "transformers.shard: batch['attention_mask'] is all ones, and there are packed documents, which "
            "transformers does not see beside it; expected no attention_mask"
        )
    if ends is not None and positions is None:
        ids = batch.get("input_ids")
        like = batch["inputs_embeds"] if ids is None else ids
        lengths = ends.diff().to(torch.int64).to(like.device)
        starts = torch.repeat_interleave(ends[:-1].to(like.device), lengths)
        given["position_ids"] = (torch.arange(len(starts), device=like.device) - starts).expand(len(like), -1)
    return given


def _labels_of(model: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the labels that a model's loss is a mean of; None if there are none."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is None and labels is not None and not type(model).__name__.endswith(_NOT_SHIFTED):
        shifted = labels[:, 1:]
    return next((x for x in (shifted, labels, batch.get("start_positions")) if x is not None), None)


def _share_of_labels(labels: torch.Tensor, group: Any, tokens: Any) -> float:
    """Return what part of the labels of all data-parallel ranks this rank's batch has; 0 if it has none."""
    count = len(labels) if labels.is_floating_point() else int((labels != _IGNORED).sum())
    if tokens is None:
        return float(count > 0)
    own = torch.tensor([count], device=labels.device)
    ranks = group.size() if _contains(tokens, group) else 1
    return count / max(int(all_gather(own, tokens).sum()) / ranks, 1)


def _contains(outer: Any, inner: Any) -> bool:
    ranks = torch.distributed.get_process_group_ranks
    return set(ranks(inner)) <= set(ranks(outer))
