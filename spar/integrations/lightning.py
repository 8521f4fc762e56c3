# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in the Trainer of Lightning: a strategy, with LightningModules as they are."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._model.blocks import find_blocks
from .._model.model import states_of
from ._parallelize import unparallelize
from ._trainer import Sequences, check_settings

__all__ = ["SequenceParallel"]  # SequenceParallelStrategy needs Lightning

WHERE = "integrations.lightning"
_LIBRARIES = "lightning.pytorch", "pytorch_lightning"  # one library under two names, with classes of its own
_BASES = "DDPStrategy", "ModelParallelStrategy"
_ONCE_OR_MORE = "mean", "avg", "min", "max"  # the same if each value is there several times

_Strategy: Any = object  # what the mixin precedes: Lightning is not imported before it is used
SequenceParallelStrategy: Any


def __getattr__(name: str) -> Any:
    """Make `SequenceParallelStrategy` at its first use, of the Lightning that is imported."""
    if name != "SequenceParallelStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for library in [each for each in _LIBRARIES if each in sys.modules] or _LIBRARIES:
        try:
            return _strategy_of(importlib.import_module(library))
        except ModuleNotFoundError:
            continue
    raise ImportError(f"{WHERE}: Lightning is not installed; pip install lightning")


@functools.cache
def _strategy_of(library: Any) -> type:
    """Return the strategy of SP x DDP of one of the libraries."""
    names = {"__module__": __name__, "__doc__": SequenceParallel.__doc__}
    return type("SequenceParallelStrategy", (SequenceParallel, library.strategies.DDPStrategy), names)


class SequenceParallel(_Strategy):  # type: ignore[misc]
    """A mixin for DDPStrategy or ModelParallelStrategy: several ranks share each sequence.

    Steps of the LightningModule see whole batches, outputs and losses, as in one process. The ranks of a
    sequence group have the same samples, and models are parallelized from the setup to the teardown of each
    fit, validate, test and predict. What is logged, reduced or gathered has each sequence group once.

    Args:
        sequence_parallel_size: how many ranks, neighbours, share each sequence; it divides their number.
        models: names of the modules that the steps call, such as "model"; "" is the LightningModule itself.
            None: the children of the LightningModule that have blocks; itself if its own forward has them.
        options: of `spar.parallelize`, such as `layout` and `method`; not `inputs` and `outputs`.
        kwargs: of the strategy.

    Attributes:
        sequences: the groups: `mesh` is data-parallel ranks x ranks of a sequence group.
        reports: of the models that were parallelized last, by their names.
    """

    def __init__(
        self,
        sequence_parallel_size: int,
        *,
        models: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not any(base.__name__ in _BASES for base in type(self).__mro__):
            raise TypeError(
                f"{WHERE}: {type(self).__name__} derives from other strategies; expected one of "
                f"{', '.join(_BASES)}"
            )
        self.sequences = Sequences(sequence_parallel_size, options or {}, where=WHERE)
        check_settings(WHERE, sequence_parallel_size, self.sequences.options)
        self.models = [models] if isinstance(models, str) else models
        self.reports: dict[str, Any] = {}
        self._parallelized: list[torch.nn.Module] = []
        self._grouped: list[Any] = []  # metrics of torchmetrics
        super().__init__(**kwargs)

    # ---- samples ----

    def setup_environment(self) -> None:
        super().setup_environment()
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and (size := mesh["tensor_parallel"].size()) > 1:
            raise ValueError(
                f"{WHERE}: tensor_parallel_size is {size}; expected 1, and data_parallel_size={mesh.size()}: "
                "all ranks"
            )
        self.sequences.begin(self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self.sequences.mesh
        return {"num_replicas": mesh.size(0), "rank": mesh.get_local_rank(0)}

    def process_dataloader(self, dataloader: Any) -> Any:
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", self) is None:
            # Workers that augment at random do it alike on the ranks of a sequence group.
            seeds = self._library("fabric.utilities.seed").pl_worker_init_function
            dataloader.worker_init_fn = functools.partial(seeds, rank=self.sequences.mesh.get_local_rank(0))
        return super().process_dataloader(dataloader)

    def _library(self, module: str) -> Any:
        """Import a module of the Lightning of which this is a strategy."""
        is_one = any(base.__module__.startswith("lightning.") for base in type(self).__mro__)
        return importlib.import_module(("lightning." if is_one else "lightning_") + module)

    # ---- models ----

    def setup(self, trainer: Any) -> None:
        from torchmetrics import Metric

        self.reports = {}
        for name, model in self._models().items():
            model = getattr(model, "_orig_mod", model)  # of torch.compile
            is_own = not states_of(model)
            self.sequences.parallelize(model)
            if is_own:
                self._parallelized.append(model)
            self.reports[name] = self.sequences.report
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self.sequences.mesh.get_group(0)
                self._grouped.append(metric)
        super().setup(trainer)

    def _models(self) -> dict[str, torch.nn.Module]:
        module = self.lightning_module
        if self.models is not None:
            modules = dict(module.named_modules())
            for name in self.models:
                if name not in modules:
                    names = ", ".join([name for name, _ in module.named_children()])
                    raise ValueError(
                        f"{WHERE}: models has {name!r}; expected names of modules of "
                        f"{type(module).__name__}, such as {names}"
                    )
            return {name: modules[name] for name in self.models}
        children = dict(module.named_children())
        if any(isinstance(child, torch.nn.ModuleList) for child in children.values()):
            return {"": module}  # its own forward calls the blocks
        return {name: child for name, child in children.items() if self._has_blocks(child)} or {"": module}

    def _has_blocks(self, child: torch.nn.Module) -> bool:
        try:
            return bool(find_blocks(child, self.sequences.options.get("blocks"), WHERE))
        except ValueError:
            return False

    def teardown(self) -> None:
        while self._grouped:
            self._grouped.pop().process_group = None
        while self._parallelized:
            unparallelize(self._parallelized.pop())
        super().teardown()

    # ---- what is logged, which Lightning reduces over all ranks ----

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        name = str(reduce_op).rpartition(".")[2].lower()  # of a ReduceOp, too
        if _is_world(group) and isinstance(tensor, Tensor) and name not in _ONCE_OR_MORE:
            if name != "sum":
                expected = "mean, sum, min or max, or a group"
                raise ValueError(f"{WHERE}: reduce_op is {reduce_op!r}; expected {expected}")
            if self.sequences.mesh.get_local_rank(1):
                tensor.detach().zero_()  # in place, as the reduction is
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        value = torch.tensor(int(decision), device=self.root_device)
        return bool(self.reduce(value, reduce_op="min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        group = self.sequences.mesh.get_group(0) if _is_world(group) else group
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered


def _is_world(group: Any) -> bool:
    return group is None or group is dist.group.WORLD
