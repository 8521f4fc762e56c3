# SPDX-License-Identifier: Apache-2.0
"""Heads over the model inside: sequence classification, question answering and token classification.

A head with values of a whole sequence, such as those of its last token, runs on every rank, on what all ranks
have: the model's forward receives the whole batch, hooks pass this rank's part of it to the model inside, and
gather what that returns. A loss is multiplied so that those of all ranks sum to that of one process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ...sequence_layout import SequenceLayout
from .sources import names_of

SEQUENCE, ANSWERS, TOKENS = "sequence", "answers", "tokens"  # what a head's values and labels are of
_KINDS = {"SequenceClassif": SEQUENCE, "QuestionAnswer": ANSWERS, "TokenClassif": TOKENS}  # parts of names
# parts of the names of outputs, and of heads, that have one value for a sequence in another way
_OTHERS = ("MultipleChoice", "NextSentence", "DoubleHeads")
_LABELS = {SEQUENCE: ("labels",), ANSWERS: ("start_positions", "end_positions")}
_FOR_HOOKS = ("layout", "inside", "num_items_in_batch")  # of `whole_part`: the model's forward has none
_IGNORED = -100  # the label that does not count
_WHY_NOT = (
    "{}. Shard the batch for the model inside it, gather last_hidden_state by the layout, and apply the head "
    "to that"
)


def head_of(model: Any) -> str | None:
    """Return which of the known heads a model has; None: its values and labels are those of a decoder."""
    names = _names(model)
    return next((kind for part, kind in _KINDS.items() if any(part in name for name in names)), None)


def is_whole(head: str | None) -> bool:
    """Whether a head runs on the whole sequence on each rank."""
    return head in _LABELS


def labels_of(head: str | None) -> tuple[str, ...]:
    """Return the names of labels that are not of tokens."""
    return _LABELS.get(head or "", ())


def why_no_head(model: Any, learns: bool) -> str | None:
    """Return why a model's head cannot run over a sharded sequence; None if it can.

    learns: whether there are labels.
    """
    head, base = head_of(model), model.base_model
    if any(part in name for part in _OTHERS for name in _names(model)):
        return _WHY_NOT.format("its head pools the tokens of a sequence, and a rank has its own alone")
    beside = [model, *(child for child in model.children() if child is not base)]
    for part in [*beside, base] if is_whole(head) else beside:
        for name in ("pooler", "seq_relationship"):
            if getattr(part, name, None) is not None:
                return f"its {name} takes the first token of a sequence, which one rank has"
    if head == TOKENS and learns:
        from transformers.loss.loss_utils import ForTokenClassification

        known = getattr(model, "loss_function", None) is ForTokenClassification
        if not known or not {"loss_function", "CrossEntropyLoss"} & names_of(type(model).forward):
            return "its loss is not that of token classification; pass no labels"
    if not is_whole(head):
        return None
    if base is model or not _passes_on(model.forward):
        return _WHY_NOT.format("its head pools the tokens of a sequence, and has no model inside it to shard")
    inside = frozenset(base.modules())
    for path, module in model.named_modules():
        drops = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0 and module.training
        if drops and module not in inside:
            why = f"{path} is a Dropout in its head, which would draw other numbers on each rank"
            return _WHY_NOT.format(f"{why}. Set its p to 0")
    return None


def _names(model: Any) -> tuple[str, str]:
    return type(model).__name__, str(inspect.signature(model.forward).return_annotation)


def _passes_on(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


# ---- what `shard` returns ----


def check_labels(head: str, batch: Mapping[str, Any], size: int, total: int, several: bool) -> str | None:
    """Check the labels of a head that runs whole; return what is wrong with them, and what is expected.

    several: whether they are counted with those of other batches.
    """
    names = _LABELS[head]
    given = [name for name in names if batch.get(name) is not None]
    if given and len(given) < len(names):
        return f"batch has {given}; expected {list(names)}, or none of them"
    for name in given:
        x = batch[name]
        if not isinstance(x, Tensor) or x.dim() == 0 or x.size(0) != size:
            value = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            return f"batch[{name!r}] is {value}; expected [{size}] or [{size}, labels], of samples"
        if head == SEQUENCE and not bool((x != _IGNORED).any()):
            return f"batch[{name!r}] is {_IGNORED} in all samples; expected a label"
        if head == ANSWERS and several and bool((x >= total).any()):
            # The loss is then a mean over fewer samples, and other ranks do not know over how many.
            return f"batch[{name!r}] is {int(x.max())}; expected less than {total}, the number of tokens"
    return None


def labels_counted(head: str, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the number of labels over which a head takes the mean; None if there are none."""
    labels = batch.get(_LABELS[head][0])
    if labels is None:
        return None
    return (labels != _IGNORED).sum() if head == SEQUENCE else torch.ones_like(labels).sum()


def whole_part(
    batch: Mapping[str, Any],
    inside: dict[str, Any],
    names: tuple[str, ...],
    plain: tuple[str, ...],
    count: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments of the forward of a model whose head runs whole.

    Args:
        inside: this rank's arguments of the model inside.
        names: the entries of the batch that forward receives as they are.
        plain: those of them that are not of tokens, which forward passes on if it needs them there.
        count: the number of all ranks' labels.
    """
    part = {name: batch[name] for name in names if batch.get(name) is not None}
    others = {} if count is None else {"num_items_in_batch": count}
    inside = {name: value for name, value in inside.items() if name not in plain}
    return part | others | {"layout": inside["layout"], "inside": inside}


# ---- hooks ----


class _Passed(NamedTuple):
    """What the hooks of one forward share.

    Attributes:
        inside: the arguments of the model inside; None: the head is one of tokens.
        labels: of tokens, which forward does not receive; of samples, which it does, too.
        count: the number of all ranks' labels.
    """

    layout: SequenceLayout
    inside: dict[str, Any] | None
    labels: Tensor | None
    count: Any


class _Running:
    """The forward that runs, if `shard` made its arguments."""

    def __init__(self, head: str) -> None:
        self.head = head
        self.passed: _Passed | None = None
        self.gathered = False


def install_head(model: Any) -> None:
    """Put hooks on a model with a head; they are idle in forwards without a layout."""
    _remove(model)
    if (head := head_of(model)) is None:
        return
    running = _Running(head)
    model.register_forward_pre_hook(functools.partial(_before, running), with_kwargs=True)
    model.register_forward_hook(functools.partial(_after, running), always_call=True)
    if is_whole(head):
        base = model.base_model
        names = tuple(inspect.signature(base.forward).parameters)
        base.register_forward_pre_hook(functools.partial(_before_base, running, names), with_kwargs=True)
        _last_of_tokens(model).register_forward_hook(functools.partial(_gather, running))


def _last_of_tokens(model: Any) -> Module:
    """Return the module behind which a head sees all tokens: its values of each token are less to gather."""
    from transformers import modeling_layers

    known = {
        modeling_layers.GenericForSequenceClassification: "score",
        modeling_layers.GenericForQuestionAnswering: "qa_outputs",
    }
    for generic, name in known.items():
        if type(model).forward is generic.forward:
            last: Module = getattr(model, name)
            return last
    base: Module = model.base_model
    return base


def _remove(model: Module) -> None:
    """Remove the hooks: PEFT may have wrapped or copied modules since."""
    for module in model.modules():
        for entries in (module._forward_pre_hooks, module._forward_hooks):
            ours = (_before, _after, _before_base, _gather)
            for key in [key for key, hook in entries.items() if getattr(hook, "func", None) in ours]:
                del entries[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def _before(running: _Running, module: Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Take what the model's forward has no use for."""
    layout, inside = kwargs.get("layout"), kwargs.get("inside")
    running.passed, running.gathered = None, False
    if not isinstance(layout, SequenceLayout) or (is_whole(running.head) and inside is None):
        return None
    labels = kwargs.get((*labels_of(running.head), "labels")[0])
    running.passed = _Passed(layout, inside, labels, kwargs.get("num_items_in_batch"))
    dropped = _FOR_HOOKS if inside is not None else ("labels", "shift_labels", "num_items_in_batch")
    return args, {name: value for name, value in kwargs.items() if name not in dropped}


def _before_base(
    running: _Running, names: tuple[str, ...], module: Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Pass this rank's part on to the model inside."""
    if running.passed is None or running.passed.inside is None:
        return None
    return (), dict(zip(names, args, strict=False)) | kwargs | running.passed.inside


def _gather(running: _Running, module: Module, args: Any, output: Any) -> Any:
    """Gather what the head reads: each rank's gradient is a part, so backward sums them."""
    if running.passed is None:
        return None
    running.gathered, layout = True, running.passed.layout
    if isinstance(output, Tensor):
        return layout.all_gather(output, 1)
    if isinstance(output, tuple):
        return layout.all_gather(output[0], 1), *output[1:]
    hidden = layout.all_gather(output.last_hidden_state, 1)
    return type(output)(**(dict(output) | {"last_hidden_state": hidden}))


def _after(running: _Running, module: Any, args: Any, output: Any) -> Any:
    """Let the ranks' losses sum to that of one process."""
    passed, running.passed = running.passed, None
    if passed is None or output is None:
        return None
    if is_whole(running.head) and not running.gathered:
        raise ValueError(
            f"{type(module).__name__}: its forward did not call its base_model, whose values its head needs "
            "of all ranks; expected one that does. spar.parallelize(model, group) runs models of any kind"
        )
    if passed.labels is None:
        return None
    first = output[0] if isinstance(output, tuple) else output["loss" if passed.inside else "logits"]
    if passed.inside is None:
        loss = _loss_of_tokens(module, first, passed.labels.to(first.device), passed.count)
        rest = output
    else:
        own = labels_counted(running.head, {labels_of(running.head)[0]: passed.labels})
        loss = first * (own / (passed.count * len(passed.layout.sizes)))
        rest = output[1:] if isinstance(output, tuple) else output
    if isinstance(output, tuple):
        return loss, *rest
    return type(output)(**(dict(rest) | {"loss": loss}))


def _loss_of_tokens(module: Any, logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    """Return the sum of this rank's token losses over the number of all ranks' labels."""
    if "loss_function" in names_of(type(module).forward):
        loss: Tensor = module.loss_function(logits, labels, module.config, num_items_in_batch=count)
        return loss
    total = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    loss = total / count  # in the dtype of the model's own CrossEntropyLoss
    return loss
