# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in the Trainer of transformers, with its TrainingArguments as they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .._model.model import states_of
from .._model.stand_ins import replaced
from ._trainer import (
    WHERE,
    Sequences,
    accelerator_class,
    check_arguments,
    check_dataset,
    check_settings,
    check_versions,
    seeding_by_group,
)
from ._trainer_check import compare_with_one_process
from ._trl import prepare

__all__ = ["SequenceParallel", "install", "uninstall"]

_Settings = tuple[int, bool, bool, dict[str, Any]]
_Trainer: Any = object  # what the mixin precedes: transformers is not imported before it is used
_replaced: list[tuple[Any, str, Any]] = []  # by `install`: the class, the name, and what was there


def install(
    sequence_parallel_size: int,
    *,
    check: bool = False,
    prefix_tree: bool = False,
    mixin: type | None = None,
    **options: Any,
) -> None:
    """Let every Trainer that is made from now on shard its sequences over ranks.

    Trainers of other libraries that derive from it, too. Call it on all ranks, before the Trainer is made.
    Until `uninstall` it replaces `Trainer.__init__`, which makes the trainer a `SequenceParallel`, and what
    accelerate's `set_seed(device_specific=True)` reads, which then seeds the ranks of a sequence group alike.

    Args:
        sequence_parallel_size: how many ranks share each sequence; it divides the number of ranks. Others
            are data-parallel. `per_device_train_batch_size` and the like are those of a sequence group.
        check: whether the first training step compares the loss and the gradients with one process: each
            rank also runs the model whole, so take samples that fit.
        prefix_tree: whether GRPOTrainer and RLOOTrainer of TRL compute the log-probabilities of a micro-batch
            over its `spar.data.PrefixTree`: a prompt's tokens once for all of its generations. Any other
            trainer raises ValueError. A `layout` other than "even" lays trees out "balanced".
        mixin: a class that derives from `SequenceParallel`, for trainers that need more; None: this.
        options: of `spar.parallelize`, such as `layout` and `method`; not `inputs` and `outputs`.

    Raises:
        ImportError: the version of transformers or accelerate is not one with which this was tested.
        ValueError: sequence_parallel_size is not a positive int, or it is 1 and prefix_tree is True.
        RuntimeError: it is installed already.
    """
    check_versions()
    if _replaced:
        raise RuntimeError("integrations.trainer.install: it is installed; call uninstall() first")
    from transformers import Trainer

    settings = {"_sequence_settings": _checked(sequence_parallel_size, check, prefix_tree, options)}
    own = Trainer.__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        if not isinstance(self, SequenceParallel):
            names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
            self.__class__ = type(kind.__name__, (mixin or SequenceParallel, kind), settings | names)
        own(self, *args, **kwargs)

    replace(*seeding_by_group(sequence_parallel_size))
    replace(Trainer, "__init__", init)


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until `uninstall`."""
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def uninstall() -> None:
    """Undo `install`: trainers that are made from now on are those of transformers."""
    while _replaced:
        setattr(*_replaced.pop())


def _checked(size: Any, check: bool, prefix_tree: bool, options: Mapping[str, Any]) -> _Settings:
    check_settings(WHERE, size, options)
    if prefix_tree and size == 1:
        raise ValueError(
            f"{WHERE}: prefix_tree is True, and sequence_parallel_size is 1; expected 2 or more, or "
            "prefix_tree=False"
        )
    return size, check, prefix_tree, dict(options)


class SequenceParallel(_Trainer):  # type: ignore[misc]
    """A mixin: `class SFT(SequenceParallel, SFTTrainer)` shards its sequences over ranks.

    The trainer's methods see whole batches, outputs and losses, as in one process. The ranks of a sequence
    group have the same samples, and the model is parallelized when the trainer prepares it.

    Args:
        sequence_parallel_size: as that of `install`.
        check: as that of `install`.
        prefix_tree: as that of `install`.
        options: of `spar.parallelize`.
    """

    _sequence_settings: _Settings
    _is_loss_only = False  # in a prediction step
    # Methods besides Trainer's that read of a model's outputs its loss alone, unless they return the outputs.
    readers_of_loss: tuple[Any, ...] = ()
    model: Any
    model_wrapped: Any

    def __init__(
        self,
        *args: Any,
        sequence_parallel_size: int,
        check: bool = False,
        prefix_tree: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_versions()
        self._sequence_settings = _checked(sequence_parallel_size, check, prefix_tree, options or {})
        with replaced(seeding_by_group(self._sequence_settings[0])):
            super().__init__(*args, **kwargs)

    # ---- samples ----

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        size, check, prefix_tree, options = self._sequence_settings
        self.sequences, self._checks_step = Sequences(size, options), check and size > 1
        if size == 1:
            return
        check_arguments(self)
        self.sequences.begin(self.accelerator.device)
        prepare(self, check, prefix_tree)
        self.accelerator.__class__ = accelerator_class()
        self.accelerator.sequences = self.sequences
        gather = self.accelerator.gather_for_metrics
        self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        if not is_training:
            check_dataset(dataset, self.sequences)
        return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)

    # ---- counts, which Trainer adds over all ranks ----

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(super().get_total_train_batch_size(args)) // self.sequences.size

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_groups():
            return super()._get_num_items_in_batch(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> float:
        return float(super().floating_point_ops(inputs)) / self.sequences.size

    # ---- steps ----

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)
        if not self.is_fsdp_enabled and not isinstance(wrapper, DistributedDataParallel):
            # After an evaluation before training Trainer would not wrap the model, and ranks would diverge.
            self.model_wrapped = self.model
            vars(self.model).pop("_is_accelerate_prepared", None)
        return super()._prepare_for_training(*args, **kwargs)

    def _as_groups(self) -> contextlib.AbstractContextManager[None]:
        """Let each sequence group be one process, where a trainer generates, gathers and scales."""
        return self.accelerator.as_groups() if self.sequences.size > 1 else contextlib.nullcontext()

    def _prepare_inputs(self, inputs: Any) -> Any:
        with self._as_groups():
            return super()._prepare_inputs(inputs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, count = super().get_batch_samples(*args, **kwargs)
        if self._checks_step and samples:  # here gradients are averaged, also of a micro-batch
            self._checks_step = False
            self.current_gradient_accumulation_steps = len(samples)
            model = self.model_wrapped
            step = functools.partial(self.training_step, model, samples[0], num_items_in_batch=count)
            compare_with_one_process(self, model, step)
        return samples, count

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss as Trainer does; where only it reads the outputs, no rank gathers the logits."""
        from transformers import Trainer

        own = super().compute_loss
        views = [state.view for state in states_of(model)]
        readers = Trainer.compute_loss, *self.readers_of_loss
        reads_loss = getattr(own, "__func__", None) in readers
        reads_loss = reads_loss and self.label_smoother is None and self.compute_loss_func is None
        has_logits = not reads_loss or (return_outputs and not self._is_loss_only)
        # Where another reads the logits they are whole, and computed.
        name, value = ("may_wait", False) if has_logits else ("returns_parts", True)
        with self._as_groups(), replaced(*((view, name, value) for view in views)):
            return own(model, inputs, return_outputs, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kw: Any
    ) -> Any:
        from transformers import Trainer

        own = super().prediction_step
        readers = Trainer.prediction_step, *self.readers_of_loss
        reads_loss = prediction_loss_only and getattr(own, "__func__", None) in readers
        with replaced((self, "_is_loss_only", reads_loss)):
            return own(model, inputs, prediction_loss_only, *args, **kw)
