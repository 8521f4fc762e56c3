# SPDX-License-Identifier: Apache-2.0
"""What a Trainer with sequence groups needs: groups, an accelerator, and arguments that are refused."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import IterableDataset

from .._model.model import states_of
from .._model.report import Report
from .._model.stand_ins import replaced
from ._parallelize import parallelize
from ._refusals import check_version, refuse

WHERE = "integrations.trainer"
# The oldest and the newest (major, minor) with which this was tested: it overrides methods of theirs that are
# not documented.
VERSIONS = {"transformers": ((5, 5), (5, 23)), "accelerate": ((1, 11), (1, 15))}
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()  # by WORLD: trainers of one size share their groups


def check_versions() -> None:
    for name, (oldest, newest) in VERSIONS.items():
        check_version(WHERE, name, oldest, newest)


def check_settings(where: str, size: Any, options: Mapping[str, Any]) -> None:
    """Check what an integration is given: how many ranks share a sequence, and options of `parallelize`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{where}: sequence_parallel_size is {size!r}; expected an int from 1")
    for name in sorted({"inputs", "outputs"} & options.keys()):
        raise ValueError(
            f"{where}: {name} is {options[name]!r:.200}; expected none, as a trainer's batches and outputs "
            "are whole"
        )


@dataclass
class Sequences:
    """The sequence groups of a Trainer.

    Attributes:
        size: the number of ranks that share each sequence: consecutive ones.
        options: of `parallelize`.
        mesh: data-parallel ranks x ranks of a sequence group; None if the size is 1.
        report: of the newest model that was parallelized.
        where: the integration, for messages.
    """

    size: int
    options: Mapping[str, Any]
    mesh: Any = None
    report: Report | None = None
    where: str = WHERE

    def begin(self, device: torch.device) -> None:
        """Make the mesh, or take that of an earlier Trainer."""
        world = dist.group.WORLD if dist.is_available() else None
        problem = f"{self.where}: sequence_parallel_size is {self.size}"
        if world is None:
            raise ValueError(
                f"{problem}, and this is one process; expected {self.size} or more ranks: "
                f"torchrun --nproc-per-node {self.size} script.py"
            )
        if world.size() % self.size:
            raise ValueError(f"{problem}; must divide the number of ranks, {world.size()}")
        known = _meshes.setdefault(world, {})
        key = device.type, self.size
        if key not in known:
            shape = world.size() // self.size, self.size
            known[key] = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp"))
        self.mesh = known[key]

    @property
    def replicas(self) -> int:
        """The number of sequence groups, each of which has its own samples."""
        return 1 if self.mesh is None else int(self.mesh.size(0))

    @property
    def index(self) -> int:
        """This rank's sequence group."""
        return int(self.mesh.get_local_rank(0))

    def parallelize(self, model: torch.nn.Module) -> None:
        """Parallelize a model, unless a Trainer with these groups did."""
        group = self.mesh.get_group(1)
        for state in states_of(model):
            if state.view.parts.group is not group:
                raise ValueError(
                    f"{self.where}: the model is parallelized over another group; call "
                    "spar.unparallelize(model), as the trainer parallelizes it itself"
                )
            self.report = state.view.report
            return
        self.report = parallelize(model, group, **self.options)

    def one_of_each(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return what one rank of each sequence group gave to a gather over all ranks."""
        own = gathered.size(0) // self.mesh.size()
        ranks: torch.Tensor = gathered.unflatten(0, (self.replicas, self.size, own))
        return ranks[:, 0].flatten(0, 1)


def seeding_by_group(size: int) -> tuple[Any, str, Any]:
    """Return what to set, so that `set_seed(seed, device_specific=True)` seeds the ranks of a group alike."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import random

    def state() -> SimpleNamespace:
        return SimpleNamespace(process_index=AcceleratorState().process_index // size)

    return random, "AcceleratorState", state


@functools.cache
def accelerator_class() -> type:
    """Return the class of accelerators of trainers with sequence groups: each group is one process."""
    from accelerate import Accelerator
    from accelerate.utils import operations, recursively_apply
    from transformers.trainer_utils import seed_worker, unwrap_peft_model

    gather, gather_object = operations._gpu_gather, operations._gpu_gather_object

    class SequenceAccelerator(Accelerator):  # type: ignore[misc]
        sequences: Sequences
        counts_groups = False

        @property
        def num_processes(self) -> int:
            return self.sequences.replicas if self.counts_groups else int(super().num_processes)

        @property
        def process_index(self) -> int:
            return self.sequences.index if self.counts_groups else int(super().process_index)

        def as_groups(self) -> contextlib.AbstractContextManager[None]:
            """Let each sequence group be one process, also for accelerate's functions that gather.

            Not always: accelerate's own code for FSDP2 asks for the number of the rank.
            """

            def once(tensor: Any) -> Any:
                return recursively_apply(self.sequences.one_of_each, gather(tensor))

            def objects_once(values: Any) -> Any:
                return gather_object([] if self.sequences.mesh.get_local_rank(1) else values)

            return replaced(
                (self, "counts_groups", True),
                (operations, "_gpu_gather", once),
                (operations, "_gpu_gather_object", objects_once),
            )

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            for each in args:
                if isinstance(each, torch.nn.Module):
                    self.parallelize(each)
            return super().prepare(*args, **kwargs)

        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            self.parallelize(model)
            return super().prepare_model(model, *args, **kwargs)

        def parallelize(self, model: Any) -> None:
            inner = self.unwrap_model(model, keep_torch_compile=False)
            # What generates is the model inside of PEFT's.
            self.sequences.parallelize(unwrap_peft_model(inner))

        def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
            seeds = data_loader.worker_init_fn
            if isinstance(seeds, functools.partial) and seeds.func is seed_worker:
                # Workers that mask tokens at random do it alike on the ranks of a sequence group.
                data_loader.worker_init_fn = functools.partial(seeds, rank=self.sequences.index)
            with self.as_groups():
                return super().prepare_data_loader(data_loader, *args, **kwargs)

        @property
        def dispatch_batches(self) -> bool:
            """Whether rank 0 reads for all: accelerate cannot give several ranks the same samples then."""
            return False

        def gather(self, tensor: Any) -> Any:
            with self.as_groups():
                return super().gather(tensor)

        def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
            with self.as_groups():
                return super().gather_for_metrics(*args, **kwargs)

        def reduce(self, tensor: Any, reduction: str = "sum", *args: Any, **kwargs: Any) -> Any:
            total = super().reduce(tensor, reduction, *args, **kwargs)
            if reduction != "sum":
                return total
            return recursively_apply(lambda x: (x / self.sequences.size).to(x.dtype), total)

    return SequenceAccelerator


def check_arguments(trainer: Any) -> None:
    """Refuse what would not give the numbers of one process, or was not tested."""
    args, accelerator = trainer.args, trainer.accelerator
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    strategy, loaders = args.train_sampling_strategy, args.accelerator_config
    tensor_parallel = getattr(trainer.model, "_tp_size", None) or 1
    loaded = getattr(trainer.model, "is_distributed_loading_by_transformers", False)
    refused = (
        (trainer.is_deepspeed_enabled, "deepspeed is enabled", "DDP, or fsdp=True"),
        (fsdp is not None and fsdp.fsdp_version != 2, "FSDP 1 is enabled", '"version": 2 in fsdp_config'),
        (accelerator.parallelism_config, "parallelism_config is given", "None"),
        (strategy == "batch_rebalance", f"train_sampling_strategy is {strategy!r}", "another"),
        (loaders.dispatch_batches, "accelerator_config has dispatch_batches=True", "None or False"),
        (args.use_liger_kernel, "use_liger_kernel is True", "False"),
        (
            loaded or tensor_parallel > 1,
            "from_pretrained sharded the model",
            "no tp_plan or distributed_config",
        ),
    )
    refuse(WHERE, refused)


def check_dataset(dataset: Any, sequences: Sequences) -> None:
    """Refuse to evaluate on a stream by several sequence groups: accelerate repeats samples at its end."""
    if isinstance(dataset, IterableDataset) and sequences.replicas > 1:
        raise ValueError(
            f"{WHERE}: {type(dataset).__name__} is an IterableDataset, and there are {sequences.replicas} "
            "sequence groups, which would evaluate samples twice; expected a dataset with __len__ and "
            "__getitem__, or sequence_parallel_size equal to the number of ranks"
        )
