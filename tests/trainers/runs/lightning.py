# SPDX-License-Identifier: Apache-2.0
"""Runs of Lightning's Trainer; each rank returns its results, by case.

A case is `one`, a process without a group, which comes first, or `sp2` and the like. Words behind it say what
else is so: `sp2-manual`.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import SumMetric

import spar
from spar._model.model import states_of
from spar.integrations.lightning import SequenceParallel, SequenceParallelStrategy

SAMPLES, LENGTH = 14, 13  # neither 2 nor 4 ranks divide the length


class Model(torch.nn.Module):
    """A causal language model of 3 heads, of which 2 and 4 ranks have uneven numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24)
        layer = torch.nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(24, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + torch.arange(ids.size(1))[:, None] / ids.size(1)
        mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        return self.head(self.encoder(x, mask))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.tokens = SumMetric()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seen: list[int] = []

    def loss(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(
            "samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        self.losses.append(loss.item())
        self.seen += batch[0].tolist()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.norms.append(float(getattr(norm, "full_tensor", lambda: norm)()))

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch[1]), sync_dist=True)
        self.log("val_worst", self.loss(batch[1]), reduce_fx="max", sync_dist=True)
        self.tokens(batch[1].numel())
        self.log("val_tokens", self.tokens)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("test_loss", self.loss(batch[1]), sync_dist=True)
        gathered = self.all_gather(batch[0])
        self.log("test_gathered", float(gathered.numel()), reduce_fx="max")

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> tuple[Tensor, Tensor]:
        return batch[0], self.model(batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Manual(Module):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch[1])
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.seen += batch[0].tolist()

    def configure_optimizers(self) -> Any:
        rest = [*self.model.embedding.parameters(), *self.model.head.parameters()]
        return [torch.optim.SGD(x, lr=0.1) for x in (rest, self.model.encoder.parameters())]


class Itself(Module):
    """A LightningModule whose own forward calls the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = self.model.embedding, self.model.head
        self.layers = self.model.encoder.layers
        del self.model

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + torch.arange(ids.size(1))[:, None] / ids.size(1)
        mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)

    def loss(self, ids: Tensor) -> Tensor:
        return cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> tuple[Tensor, Tensor]:
        return batch[0], self(batch[1])


class Sharded(Module):
    """FSDP2, as Lightning's users write it."""

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):  # Lightning calls it again, to validate
            return
        for layer in self.model.encoder.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


class Failing(Module):
    """Raises in the second step."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 1:
            raise ArithmeticError("in the second step")
        return loss


class Augmented(Dataset[tuple[int, Tensor]]):
    """Samples that a loader's worker changes at random."""

    def __init__(self, is_random: bool) -> None:
        ids = torch.randint(50, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
        self.ids, self.is_random = ids, is_random

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[int, Tensor]:
        noise = torch.randint(50, (1,)) if self.is_random else 0
        return i, (self.ids[i] + noise) % 50


class FSDP2(SequenceParallel, ModelParallelStrategy):
    pass


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def strategy(size: int, words: list[str]) -> Any:
    if "fsdp" in words:
        sizes = {"data_parallel_size": world(), "tensor_parallel_size": 1}
        return FSDP2(size, save_distributed_checkpoint=False, **sizes)
    return SequenceParallelStrategy(size)


def run(folder: Path, case: str) -> dict[str, Any]:
    processes, *words = case.split("-")
    is_one, is_random = processes == "one", "workers" in words
    size = 1 if is_one else int(processes[2:])
    # As many samples as all sequence groups have; of `one`, as `words` say.
    samples = 2 if not is_one or "2" in words else 4
    root = folder / os.environ["RANK"] if is_one else folder
    pl.seed_everything(1, workers=True, verbose=False)
    kinds = {"manual": Manual, "itself": Itself, "fsdp": Sharded}
    kind = next((kinds[word] for word in words if word in kinds), Module)

    def loader(shuffle: bool = False) -> Any:
        data = Augmented(is_random)
        # Shuffled as Lightning does by itself on several ranks.
        sampler = DistributedSampler(data, 1, 0, seed=1) if shuffle and is_one else None
        return DataLoader(data, samples, sampler=sampler, num_workers=int(is_random))

    def trainer(epochs: int) -> Any:
        options: dict[str, Any] = {"devices": world()}
        if "manual" not in words:
            options |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        if is_one:
            options |= {"devices": 1, "plugins": [LightningEnvironment()]}
        else:
            options |= {"strategy": strategy(size, words)}
        options |= {"precision": "bf16-mixed"} if "bf16" in words else {}
        return pl.Trainer(max_epochs=epochs, default_root_dir=root, log_every_n_steps=1, **QUIET, **options)

    if "again" in words:
        failing = Failing()
        try:
            trainer(1).fit(failing, loader())
        except ArithmeticError:
            assert len(failing.losses) == 2 and not states_of(failing)
        pl.seed_everything(1, workers=True, verbose=False)
    module = kind()
    made = trainer(2)
    made.fit(module, loader(shuffle=True), None if is_random else loader())
    result = {
        "losses": module.losses,
        "norms": module.norms,
        "seen": module.seen,
        "metrics": {name: float(x) for name, x in made.callback_metrics.items()},
        "rate": made.optimizers[0].param_groups[0]["lr"],
        "is_plain": not states_of(module) and module.tokens.process_group is None,
    }
    if size > 1:
        result["shares"] = {name: report.share for name, report in made.strategy.reports.items()}
    path = root / f"{case}.ckpt"
    made.save_checkpoint(path)
    result["weights"] = torch.load(path, weights_only=False)["state_dict"]
    if not {"manual", "itself", "again", "bf16", "workers"} & {*words}:
        result["validated"] = made.validate(module, loader(), verbose=False)
        result["tested"] = made.test(module, loader(), verbose=False)
        result["predicted"] = made.predict(module, loader())
        resumed = kind()
        trainer(3).fit(resumed, loader(shuffle=True), ckpt_path=path)
        result["resumed"] = resumed.losses
    return result


def refusals() -> dict[str, Any]:
    """Return what mistakes raise."""

    def fit(make: Any) -> None:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = pl.Trainer(strategy=make(), accelerator="cpu", devices=world(), **quiet)
        trainer.fit(Module(), DataLoader(Augmented(False)))

    class Single(SequenceParallel, SingleDeviceStrategy):
        pass

    made = {
        "size": lambda: SequenceParallelStrategy(3),
        "no int": lambda: SequenceParallelStrategy("2"),
        "models": lambda: SequenceParallelStrategy(2, models="encoder2"),
        "options": lambda: SequenceParallelStrategy(2, options={"outputs": "parts"}),
        "base": lambda: Single(2),
        "tensor parallel": lambda: FSDP2(2, data_parallel_size=world() // 2, tensor_parallel_size=2),
        "reduction": lambda: SequenceParallelStrategy(2).reduce(torch.ones(1), reduce_op="product"),
    }
    found: dict[str, Any] = {}
    for name, make in made.items():
        try:
            fit(make)
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def fabric() -> dict[str, Any]:
    """Train a parallelized model by Fabric."""
    made = Fabric(accelerator="cpu", devices=world(), strategy="ddp")
    made.launch()
    torch.manual_seed(1)
    model, ids = Model(), Augmented(False).ids
    expected = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    spar.parallelize(model, dist.group.WORLD)
    model, _ = made.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    made.backward(loss)
    errors = [float((p.grad - g).abs().max()) for p, g in zip(model.parameters(), gradients, strict=True)]
    return {"loss": float(loss - expected), "gradients": max(errors)}


def main(folder: Path, *cases: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    others = {"refusals": refusals, "fabric": fabric}
    return {case: others[case]() if case in others else run(folder, case) for case in cases}
