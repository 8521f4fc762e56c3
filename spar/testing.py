# SPDX-License-Identifier: Apache-2.0
"""Compare a sequence-parallel model with the same model in one process: loss, logits and gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import check_int
from ._control.state import Place
from ._doctor.diagnose import diagnose
from ._doctor.difference import Difference, first_difference
from ._doctor.entries import local_of_layout, local_of_view
from ._doctor.trace import Trace
from ._group.group import MOST_EXCHANGES
from ._group.registry import group_of
from ._model.model import states_of
from .ops.gather import all_gather, reduce_scatter
from .random import preserved
from .sequence_layout import SequenceLayout
from .sizes import cal_split_sizes
from .topology.resolve import Group, process_group

__all__ = ["Difference", "Entry", "Report", "compare", "diagnose"]

_NAME = "testing.compare"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # Parts of parameters' names.
_TOGETHER = 1 << 20  # elements of gradients from which an exchange takes no further one
_ALIKE = 1e-3  # the relative error from which a gradient is wrong, and up to which it is a factor


@dataclass(frozen=True)
class Entry:
    """How far one tensor is from that of one process.

    Attributes:
        name: "loss", "logits", or a parameter's name with ".grad".
        max_abs_error: the largest difference of an element, over all ranks.
        max_rel_error: the same, divided by the largest element of the reference.
        reference_norm: the 2-norm of the reference.
        factor: of a gradient that is wrong by a factor alone: that factor. It is the number of ranks, or its
            reciprocal, where a grad_scale or the factor of the loss does not fit the reduction of gradients.
    """

    name: str
    max_abs_error: float
    max_rel_error: float
    reference_norm: float
    factor: float | None = None


@dataclass(frozen=True)
class Report:
    """What `compare` found; equal on all ranks. `str` returns it as a table.

    Attributes:
        ranks: the group's size.
        loss: the loss of the sharded model, over all ranks.
        reference_loss: the loss of one process.
        entries: the loss, the logits if the model returns them, and the gradient of each parameter.
        first: if one is wrong, where the models first differ, as far as that is found.
    """

    ranks: int
    loss: float
    reference_loss: float
    entries: tuple[Entry, ...]
    first: Difference | None = None

    @property
    def worst(self) -> Entry:
        """The entry with the largest max_rel_error. NaN counts as the largest."""
        return max(self.entries, key=lambda e: math.inf if math.isnan(e.max_rel_error) else e.max_rel_error)

    def __str__(self) -> str:
        head = ("", "max abs error", "max rel error", "reference norm")
        rows = [
            (e.name, *(f"{x:.3e}" for x in (e.max_abs_error, e.max_rel_error, e.reference_norm)))
            for e in self.entries
        ]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{name:<{width}}" + "".join(f"{x:>16}" for x in values) for name, *values in (head, *rows)]
        for i, entry in enumerate(self.entries, 1):
            if entry.factor is not None:
                lines[i] += f"   {entry.factor:.4g} times the reference: see grad_scale in docs/gradients.md"
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        title = f"loss of {ranks}: {self.loss:.8g}; of one process: {self.reference_loss:.8g}"
        end = [f"worst: {self.worst.name}, {self.worst.max_rel_error:.3e}"]
        return "\n".join([title, *lines, *end, *([f"first: {self.first}"] if self.first else [])])


def compare(
    model_fn: Callable[[], torch.nn.Module],
    batch: Any,
    shard_fn: Callable[[torch.nn.Module, Any], Any],
    group: Group = None,
    *,
    layout: SequenceLayout | None = None,
    seq_dim: int = 1,
    reduce: str | None = "sum",
    seed: int = 0,
    show: bool = True,
) -> Report:
    """Run a model sharded over a group, and whole on each rank, forward and backward; compare them.

    Collective. Each rank builds the model twice, from the same seed. It runs the first one on the whole
    batch, which must not communicate, and the second one on its shard. If a loss, logits or a gradient are
    wrong by more than 1e-3, it builds and runs both again, to find the first call that differs. Use a small
    model in float32 or float64, without dropout.

    A batch is passed to the model as keyword arguments if it is a dict, as arguments if it is a tuple or
    list, else as the only argument. The model returns a 0-dim loss, a tuple `(loss, logits)`, or an output
    with `loss` and, if there are logits, `logits`, as keys or attributes.

    Args:
        model_fn: builds the model. All ranks must build the same one.
        batch: the whole batch, equal on all ranks.
        shard_fn: receives the second model and the batch; returns this rank's batch. It may change the model
            in place, to enable sequence parallelism or to apply `fully_shard`.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current topology's
            sequence group (WORLD if there is none). Beside tensor parallelism pass all ranks: they run the
            models again together, to find the first difference.
        layout: how the logits lie on the ranks. None: the only SequenceLayout in this rank's batch, else
            consecutive shards in the order of the ranks. Logits of the whole size need none.
        seq_dim: the sequence's dim in the logits.
        reduce: how gradients of parameters are to be reduced over the group: "sum", "mean", or None if
            backward did so. Loss, logits and gradients that are DTensors are gathered first.
        seed: the seed for model_fn, shard_fn and forward. The generators' states are restored.
        show: whether rank 0 of the group prints the report.

    Returns:
        A `Report`. If all ranks have the same loss to the bit, as after `mean_loss`, that is the loss.
        Otherwise it is the sum of the ranks' losses.

    Raises:
        ValueError: the ranks' references differ, the logits' size does not match, or the names of parameters
            differ between the two models.
        TypeError: the model returned no loss.
        MismatchError: another rank failed.
    """
    real = process_group(group, _NAME)
    state = group_of(real)
    place = state.place
    with state.call(_NAME, MOST_EXCHANGES):
        check_int(f"{_NAME} on rank {place.rank} of {place.world}", "seed", seed)
        if reduce not in ("sum", "mean", None):
            raise _error(place, "reduce", repr(reduce), '"sum", "mean" or None')
        with preserved(real):
            runs = _Runs(place, real, seq_dim, seed)
            torch.manual_seed(seed)
            reference = runs.run(model_fn(), batch)
            runs.check_equal(reference.loss)
            torch.manual_seed(seed)
            model = model_fn()
            part = shard_fn(model, batch)
            sharded = runs.run(model, part)
            losses = runs.of_each_rank(sharded.loss)
            loss = losses[0] if bool((losses == losses[0]).all()) else losses.sum()
            entries = runs.entries(["loss"], [loss], [reference.loss], [reference.loss])
            if reference.logits is not None and sharded.logits is not None:
                logits = runs.local_logits(reference.logits, sharded.logits, layout or _only_layout(part))
                entries += runs.entries(["logits"], [sharded.logits], [logits], [reference.logits])
            if reference.gradients.keys() != sharded.gradients.keys():
                unmatched = sorted(reference.gradients.keys() ^ sharded.gradients.keys())
                expected = "the same names; do not replace modules in shard_fn"
                raise _error(place, "parameters of only one of the models", f"{unmatched[:8]}", expected)
            for names in _batches(sharded.gradients):
                reduced = runs.reduced([sharded.gradients[name] for name in names], reduce)
                wholes = [reference.gradients[name] for name in names]
                entries += runs.entries([f"{name}.grad" for name in names], reduced, wholes, wholes)
            report = Report(place.world, float(loss), float(reference.loss), tuple(entries))
            if not report.worst.max_rel_error <= _ALIKE:
                first = runs.first_difference(model_fn, batch, shard_fn, layout, reduce != "sum")
                report = replace(report, first=first)
    if show and place.rank == 0:
        print(report, flush=True)
    return report


class _Result(NamedTuple):
    loss: Tensor
    logits: Tensor | None
    gradients: dict[str, Tensor]


class _Runs(NamedTuple):
    """What the two runs of a comparison share."""

    place: Place
    group: Any
    seq_dim: int
    seed: int

    def run(self, model: torch.nn.Module, batch: Any) -> _Result:
        torch.manual_seed(self.seed)
        loss, logits = self._outputs(self.call(model, batch))
        loss.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = _whole(gradient.detach())
        return _Result(_whole(loss.detach()), None if logits is None else _whole(logits.detach()), gradients)

    def first_difference(
        self, model_fn: Any, batch: Any, shard_fn: Any, layout: SequenceLayout | None, mean: bool
    ) -> Difference | None:
        """Run both models again, and compare the functions that they call."""
        torch.manual_seed(self.seed)
        model = model_fn()
        part = shard_fn(model, batch)
        views, layout = states_of(model), layout or _only_layout(part)
        if not views and layout is None:
            return None
        local = local_of_view if layout is None or views else local_of_layout(layout)
        sharded = Trace(model)
        torch.manual_seed(self.seed)
        sharded.run(functools.partial(self.call, model, part), views)
        torch.manual_seed(self.seed)
        model = model_fn()
        whole = Trace(model, sharded, local)
        torch.manual_seed(self.seed)
        whole.run(functools.partial(self.call, model, batch), ())
        sharded.gradients.clear()  # they may be DTensors; the report has them
        return first_difference(sharded, whole, self.group, self.place.world, mean=mean)

    def call(self, model: Any, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)

    def _outputs(self, output: Any) -> tuple[Tensor, Tensor | None]:
        if isinstance(output, Mapping):
            loss, logits = output.get("loss"), output.get("logits")
        elif isinstance(output, (tuple, list)):
            loss, logits = (*output, None, None)[:2]
        else:
            loss, logits = getattr(output, "loss", output), getattr(output, "logits", None)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            value = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
            expected = "a 0-dim tensor: return a loss, (loss, logits), or an output with loss and logits"
            raise _error(self.place, "the model's loss", value, expected, TypeError)
        return loss, logits if isinstance(logits, Tensor) else None

    def of_each_rank(self, number: Tensor) -> Tensor:
        return all_gather(number.reshape(1).double(), self.group)

    def check_equal(self, loss: Tensor) -> None:
        losses = self.of_each_rank(loss)
        spread = float(losses.max() - losses.min())
        if spread > 1e-4 * float(losses.abs().max()):  # another model or batch; NaN is reported as a value
            raise _error(
                self.place,
                "the loss of one process",
                f"{losses.tolist()} on the group's ranks",
                "one value; build the same model on all ranks, and pass the same batch",
            )

    def reduced(self, gradients: Sequence[Tensor], reduce: str | None) -> Sequence[Tensor]:
        """Reduce gradients over the ranks, in their order."""
        if reduce is None:
            return gradients
        flat = torch.cat([gradient.double().flatten() for gradient in gradients])
        sizes = cal_split_sizes(flat.numel(), self.place.world)
        total = all_gather(reduce_scatter(flat, self.group), self.group, sizes=sizes)
        total = total / self.place.world if reduce == "mean" else total
        parts = total.split([gradient.numel() for gradient in gradients])
        return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]

    def local_logits(self, whole: Tensor, local: Tensor, layout: SequenceLayout | None) -> Tensor:
        """Return the part of the reference's logits that this rank has."""
        dim, total = self.seq_dim, whole.size(self.seq_dim)
        sizes = self.of_each_rank(torch.tensor(local.size(dim), device=local.device)).long().tolist()
        if all(size == total for size in sizes):
            part = whole
        elif layout is not None:
            part = layout.shard(whole, dim)
        else:
            first = sum(sizes[: self.place.rank]) if sum(sizes) == total else 0
            part = whole.narrow(dim, first, min(local.size(dim), total - first))
        if part.shape != local.shape:
            expected = f"{list(part.shape)}, of {list(whole.shape)} in one process; pass layout= or seq_dim="
            raise _error(self.place, "the logits' shape", f"{list(local.shape)}", expected)
        return part

    def entries(
        self,
        names: Sequence[str],
        actual: Sequence[Tensor],
        parts: Sequence[Tensor],
        wholes: Sequence[Tensor],
    ) -> list[Entry]:
        """parts: of the reference, to which `actual` corresponds; wholes: all of it."""
        own = [_largest(x.double() - y.double()) for x, y in zip(actual, parts, strict=True)]
        errors = all_gather(torch.stack(own), self.group).view(self.place.world, -1).amax(0).tolist()
        entries = []
        for name, error, x, whole in zip(names, errors, actual, wholes, strict=True):
            reference = whole.double()
            largest = float(_largest(reference))
            relative = error / largest if largest else (math.inf if error else error)
            factor = None
            if name.endswith(".grad") and _ALIKE < relative < math.inf:  # equal on all ranks
                factor = self._factor(x.double(), reference)
            entries.append(Entry(name, error, relative, float(reference.norm()), factor))
        return entries

    def _factor(self, gradient: Tensor, reference: Tensor) -> float | None:
        """Return the factor by which a gradient differs on all ranks; None if it differs in another way."""
        ratio = (gradient * reference).sum() / reference.square().sum()
        residual = _largest(gradient - ratio * reference) / _largest(reference * ratio)
        ratios, residuals = self.of_each_rank(ratio), self.of_each_rank(residual)
        same = bool((ratios - ratios[0]).abs().max() <= _ALIKE * ratios[0].abs())
        return float(ratios[0]) if same and bool(residuals.max() <= _ALIKE) else None


def _batches(gradients: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of gradients that are exchanged together: neighbours on one device."""
    names: list[str] = []
    count, device = 0, None
    for name, gradient in gradients.items():
        if names and (gradient.device != device or count > _TOGETHER):
            yield names
            names, count = [], 0
        names.append(name)
        count, device = count + gradient.numel(), gradient.device
    if names:
        yield names


def _whole(tensor: Any) -> Tensor:
    """Gather a DTensor."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _largest(tensor: Tensor) -> Tensor:
    return tensor.abs().max() if tensor.numel() else tensor.new_zeros(())


def _only_layout(batch: Any) -> SequenceLayout | None:
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(values, Iterable) or isinstance(values, Tensor):
        return None
    layouts = {value for value in values if isinstance(value, SequenceLayout)}
    return layouts.pop() if len(layouts) == 1 else None


def _error(
    place: Place, name: str, value: str, expected: str, kind: type[Exception] = ValueError
) -> Exception:
    return kind(f"{_NAME} on rank {place.rank} of {place.world}: {name} is {value}; expected {expected}")
