# SPDX-License-Identifier: Apache-2.0
"""What a Trainer with sequence groups needs: groups, an accelerator, and arguments that are refused."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import IterableDataset

from .._model.model import states_of
from .._model.report import Report
from ._parallelize import parallelize

WHERE = "integrations.trainer"
# The oldest and the newest (major, minor) with which this was tested: it overrides methods of theirs that are
# not documented.
VERSIONS = {"transformers": ((5, 5), (5, 23)), "accelerate": ((1, 11), (1, 15))}
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()  # by WORLD: trainers of one size share their groups


def check_versions() -> None:
    for name, (oldest, newest) in VERSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not oldest <= tuple(map(int, version.split(".")[:2])) <= newest:
            found = "is not" if version is None else f"{version} is"
            first, last, end = (".".join(map(str, x)) for x in (oldest, newest, (newest[0], newest[1] + 1)))
            raise ImportError(
                f"{WHERE}: {name} {found} installed; expected {first} to {last}, with which this was tested: "
                f"pip install '{name}>={first},<{end}'"
            )


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
        counts_as_process: whether a sequence group is one process, as it is where Trainer counts its labels.
    """

    size: int
    options: Mapping[str, Any]
    mesh: Any = None
    report: Report | None = None
    where: str = WHERE
    counts_as_process: bool = False

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
            # accelerate calls ranks with the same samples "tp".
            known[key] = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "tp"))
        self.mesh = known[key]

    @property
    def replicas(self) -> int:
        """The number of sequence groups, each of which has its own samples."""
        return 1 if self.mesh is None else int(self.mesh.size(0))

    @contextlib.contextmanager
    def as_processes(self) -> Iterator[None]:
        """Let Trainer see sequence groups as processes, with `get_tp_size()` and `accelerator.num_processes`.

        Some versions of it divide both counts of labels and losses' scales by `get_tp_size()`, others do not.
        """
        before, self.counts_as_process = self.counts_as_process, True
        try:
            yield
        finally:
            self.counts_as_process = before

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


@functools.cache
def accelerator_class() -> type:
    """Return the class of accelerators of trainers with sequence groups."""
    from accelerate import Accelerator
    from accelerate.utils import recursively_apply
    from transformers.trainer_utils import seed_worker, unwrap_peft_model

    class SequenceAccelerator(Accelerator):  # type: ignore[misc]
        sequences: Sequences

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            for each in args:
                if isinstance(each, torch.nn.Module):
                    self._parallelize(each)
            return super().prepare(*args, **kwargs)

        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            self._parallelize(model)
            return super().prepare_model(model, *args, **kwargs)

        def _parallelize(self, model: Any) -> None:
            inner = self.unwrap_model(model, keep_torch_compile=False)
            # What generates is the model inside of PEFT's.
            self.sequences.parallelize(unwrap_peft_model(inner))

        def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
            seeds = data_loader.worker_init_fn
            if isinstance(seeds, functools.partial) and seeds.func is seed_worker:
                # Workers that mask tokens at random do it alike on the ranks of a sequence group.
                seeded = functools.partial(seeds, rank=self.sequences.mesh.get_local_rank(0))
                data_loader.worker_init_fn = seeded
            return super().prepare_data_loader(data_loader, *args, **kwargs)

        @property
        def dispatch_batches(self) -> bool:
            """Whether rank 0 reads for all: accelerate cannot give several ranks the same samples then."""
            return False

        @property
        def num_processes(self) -> int:
            if self.sequences.counts_as_process:
                return self.sequences.replicas
            return int(super().num_processes)

        def _prepare_device_mesh(self) -> Any:
            return self.sequences.mesh

        def gather(self, tensor: Any) -> Any:
            """Gather what each sequence group has once; so does gather_for_metrics, which calls this."""
            return recursively_apply(self.sequences.one_of_each, super().gather(tensor))

        def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
            try:
                recursively_apply(lambda x: x, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
            if use_gather_object and self.sequences.mesh.get_local_rank(1):
                input_data = []  # accelerate joins the lists of all ranks
            return super().gather_for_metrics(input_data, use_gather_object)

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
    for is_refused, problem, expected in refused:
        if is_refused:
            raise ValueError(f"{WHERE}: {problem}; with sequence parallelism expected {expected}")


def check_dataset(dataset: Any, sequences: Sequences) -> None:
    """Refuse to evaluate on a stream by several sequence groups: accelerate repeats samples at its end."""
    if isinstance(dataset, IterableDataset) and sequences.replicas > 1:
        raise ValueError(
            f"{WHERE}: {type(dataset).__name__} is an IterableDataset, and there are {sequences.replicas} "
            "sequence groups, which would evaluate samples twice; expected a dataset with __len__ and "
            "__getitem__, or sequence_parallel_size equal to the number of ranks"
        )
