# SPDX-License-Identifier: Apache-2.0
"""Trainer with sequence groups in use: checkpoints, wrappers and subclasses."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ranks
from helpers import trainers
from helpers.llms import recipe
from helpers.trainers import Run, arguments, model, pad, samples
from test_trainer import PRELOAD as PRELOAD, Case, Group, four as four, two as two

import spar
import spar.integrations.trainer


@contextlib.contextmanager
def installed(rank: int, world: int, size: int, **options: Any) -> Iterator[None]:
    trainers.as_launched(rank, world)
    spar.integrations.trainer.install(size, **options)
    try:
        yield
    finally:
        spar.integrations.trainer.uninstall()


def stock(folder: Path, kind: Any = None, make: Any = model, changes: Any = None, **options: Any) -> Any:
    from transformers import Trainer

    given: Case = {"train_dataset": samples(16), "eval_dataset": samples(8, seed=9), "data_collator": pad}
    return (kind or Trainer)(make(), arguments(folder, **(changes or {})), **(given | options))


def page_on_ranks(rank: int, world: int, group: Group, folder: Path) -> Run:
    """Run the block of the page."""
    from transformers import Trainer

    trainers.as_launched(rank, world)
    names: Case = {"spar": spar, "Trainer": Trainer, "model": model(), "arguments": arguments(folder)}
    names |= {"dataset": samples(16), "collator": pad}
    try:
        exec(recipe("transformers.md", "trainer.install("), names)
    finally:
        spar.integrations.trainer.uninstall()
    return trainers.result(names["trainer"], [])


def test_first_lines_of_the_page(two: Ranks, tmp_path: Path) -> None:
    one = stock(tmp_path)
    one.train()
    for found in two(2, page_on_ranks, tmp_path):
        trainers.check_same(found, trainers.result(one, []), 1e-5)


@contextlib.contextmanager
def sharding_on_cpus() -> Iterator[None]:
    """Let accelerate use its FSDP plugin for CPUs, for which it ignores it."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    own = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, kwargs["fsdp_plugin"]
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init
    environment, kind = dict(os.environ), PartialState._shared_state.get("distributed_type")
    try:
        yield
    finally:
        AcceleratorState.__init__ = own
        os.environ.clear()  # accelerate leaves ACCELERATE_USE_FSDP there
        os.environ.update(environment)
        PartialState._shared_state["distributed_type"] = kind


FSDP2: Case = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


# ---- checkpoints ----


SAVES = {"num_train_epochs": 2, "optim": "adamw_torch", "learning_rate": 0.01, "eval_strategy": "epoch"}
SAVES |= {"save_strategy": "steps", "save_steps": 3}  # an epoch has 4


def resumed(folder: Path, changes: Case = SAVES) -> Run:
    """Train, then train again from the middle of the first epoch."""
    stock(folder, changes=changes).train()
    trainer = stock(folder, changes=changes)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return trainers.result(trainer, [])


def resume_on_ranks(rank: int, world: int, group: Group, folder: Path, one: Path) -> tuple[Run, ...]:
    """Return runs that are resumed from the checkpoint of one process, of the ranks, and of FSDP2."""
    with installed(rank, world, world):
        trainer = stock(folder, changes=SAVES)
        trainer.train(resume_from_checkpoint=str(one / "checkpoint-3"))
        found = trainers.result(trainer, []), resumed(folder / "DDP")
        with sharding_on_cpus():
            return *found, resumed(folder / "FSDP2", SAVES | FSDP2)


def test_resumes_in_an_epoch_also_from_one_process(two: Ranks, tmp_path: Path) -> None:
    one, ranks = tmp_path / "one", tmp_path / "ranks"
    expected = resumed(one)
    assert [entry["step"] for entry in expected.logged] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8]
    whole = stock(tmp_path, changes=SAVES | {"save_strategy": "no"})
    whole.train()
    trainers.check_same(expected.logged[:-1], trainers.result(whole, []).logged[:-1], 1e-5)
    for found in two(2, resume_on_ranks, ranks, one):
        for each in found:
            trainers.check_same(each.logged, expected.logged, 1e-4)
            trainers.check_same(each.parameters, expected.parameters, 1e-3)  # Adam divides by small gradients


BEST = {"num_train_epochs": 3, "learning_rate": 3.0, "eval_strategy": "epoch", "save_strategy": "epoch"}
BEST |= {"load_best_model_at_end": True}


def best(folder: Path) -> Run:
    from transformers import TrainerCallback

    class Events(TrainerCallback):  # type: ignore[misc]
        """The events of a run, in order."""

        def __init__(self) -> None:
            self.seen: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                self.seen.append(name)
            return super().__getattribute__(name)

    events = Events()
    trainer = stock(folder, changes=BEST, callbacks=[events])
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    name = Path(trainer.state.best_model_checkpoint).name
    return trainers.result(trainer, [name, trainer.evaluate()["eval_loss"], events.seen])


def best_on_ranks(rank: int, world: int, group: Group, folder: Path) -> Run:
    with installed(rank, world, world):
        return best(folder)


def test_best_model_is_loaded_and_saved_plainly(two: Ranks, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    expected = best(tmp_path / "one")
    assert expected.found[0] != "checkpoint-12"  # the last one
    for found in two(2, best_on_ranks, tmp_path / "ranks"):
        trainers.check_same(found, expected, 1e-4)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "ranks" / "saved")
    trainers.check_same(dict(saved.named_parameters()), expected.parameters, 1e-4)
    names = [sorted(os.listdir(tmp_path / each / "saved")) for each in ("one", "ranks")]
    assert names[0] == names[1]


# ---- wrappers of the model ----


def alike() -> list[trainers.Sample]:
    """Return samples of one length: Dynamo compiles each anew."""
    every = samples(8, seed=1)
    return [each | {name: each[name][:9].repeat(2)[:9] for name in ("input_ids", "labels")} for each in every]


WRAPPED: dict[str, Case] = {
    "FSDP2": FSDP2,
    "torch.compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


def wrapped(folder: Path, changes: Case) -> tuple[Any, Run]:
    trainer = stock(folder, changes=changes, train_dataset=alike(), eval_dataset=alike())
    trainer.train()
    return trainer, trainers.result(trainer, [trainer.evaluate()["eval_loss"]])


def wrapped_on_ranks(rank: int, world: int, group: Group, folder: Path, changes: Case) -> Run:
    with installed(rank, world, 2, check=True), sharding_on_cpus():
        trainer, found = wrapped(folder, changes)
    report = trainer.sequences.report
    assert report.share < 0.6 and not report.eager and type(trainer).__name__ == "Trainer"
    assert type(trainer.model).__name__ == ("FSDP" if "fsdp" in changes else "") + "LlamaForCausalLM"
    return found


@pytest.mark.parametrize(("name", "replicas"), [("FSDP2", 1), ("FSDP2", 2), ("torch.compile", 1)])
def test_wrapped_models(two: Ranks, four: Ranks, name: str, replicas: int, tmp_path: Path) -> None:
    sizes = {f"per_device_{kind}_batch_size": 2 * replicas for kind in ("train", "eval")}
    _, expected = wrapped(tmp_path, sizes)
    for found in (two, four)[replicas - 1](2 * replicas, wrapped_on_ranks, tmp_path, WRAPPED[name]):
        trainers.check_same(found, expected, 1e-5)


# ---- install, subclasses, several trainers ----


def own_losses() -> Any:
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        """Its loss reads logits."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.shapes = getattr(self, "shapes", set()) | {inputs["labels"].shape}
            outputs = model(**inputs)
            assert outputs.logits.shape[:2] == inputs["labels"].shape
            loss = outputs.loss + outputs.logits.square().mean()
            return (loss, outputs) if kwargs.get("return_outputs") or args[:1] == (True,) else loss

    return Own


def subclasses_on_ranks(rank: int, world: int, group: Group, folder: Path) -> list[Run]:
    trainers.as_launched(rank, world)
    own = own_losses()
    mixed = type("Mixed", (spar.integrations.trainer.SequenceParallel, own), {})
    found = [stock(folder, functools.partial(mixed, sequence_parallel_size=2))]
    with installed(rank, world, 2, layout="zigzag"):
        found.append(stock(folder, own))
        assert isinstance(found[1], own) and type(found[1]).__name__ == "Own"
    for trainer in found:
        trainer.train()
        assert trainer.sequences.report.share < 0.6
    return [trainers.result(trainer, [trainer.evaluate()["eval_loss"]]) for trainer in found]


def test_subclasses_whose_loss_reads_logits(two: Ranks, tmp_path: Path) -> None:
    one = stock(tmp_path, own_losses())
    one.train()
    expected = trainers.result(one, [one.evaluate()["eval_loss"]])
    for found in two(2, subclasses_on_ranks, tmp_path):
        for each in found:
            trainers.check_same(each, expected, 1e-5)


def evaluated_first(trainer: Any) -> Run:
    """Evaluate the loss, train, evaluate it again, and predict; return the tokens of the logits in each."""
    seen: set[int] = set()
    found = []
    trainer.model.register_forward_hook(lambda module, given, out: seen.add(out.logits.size(1)))
    for run in (trainer.evaluate, trainer.train, trainer.evaluate, lambda: trainer.predict(alike())):
        run()
        found.append(set(seen))
        seen.clear()
    return trainers.result(trainer, found)


def evaluated_first_on_ranks(rank: int, world: int, group: Group, folder: Path) -> Run:
    with installed(rank, world, 2):
        trainer = stock(folder, train_dataset=alike(), eval_dataset=alike())
    return evaluated_first(trainer)


def test_logits_are_gathered_only_where_they_are_read(two: Ranks, tmp_path: Path) -> None:
    """Of 9 tokens, of which a rank has 4 or 5."""
    expected = evaluated_first(stock(tmp_path, train_dataset=alike(), eval_dataset=alike()))
    found = two(2, evaluated_first_on_ranks, tmp_path)
    assert [each.found for each in found] == [[{5}, {5}, {5}, {9}], [{4}, {4}, {4}, {9}]]
    for each in found:
        trainers.check_same(each[:2], expected[:2], 1e-5)


def several_on_ranks(rank: int, world: int, group: Group, folder: Path) -> tuple[Run, Run, Run]:
    """Return a run after one that fails, another of its model, and one of data-parallel ranks."""
    from transformers import Trainer

    before = Trainer.__init__
    with pytest.raises(ZeroDivisionError), installed(rank, world, 2):
        stock(folder, data_collator=lambda every: 1 // 0).train()
    assert Trainer.__init__ is before
    with installed(rank, world, 2):
        with pytest.raises(RuntimeError, match=r"call uninstall\(\) first"):
            spar.integrations.trainer.install(2)
        first = stock(folder)
        first.train()
        again = stock(folder, make=lambda: first.model)
        again.train()
        found = trainers.result(first, []), trainers.result(again, [])
    parallel = stock(folder)
    assert type(parallel) is Trainer
    parallel.train()
    return *found, trainers.result(parallel, [])


def plain_on_ranks(rank: int, world: int, group: Group, folder: Path) -> Run:
    trainers.as_launched(rank, world)
    trainer = stock(folder)
    trainer.train()
    return trainers.result(trainer, [])


def test_trainers_one_after_another(two: Ranks, tmp_path: Path) -> None:
    one = stock(tmp_path)
    one.train()
    logged = trainers.result(one, []).logged
    again = stock(tmp_path, make=lambda: one.model)
    again.train()
    parallel = two(2, plain_on_ranks, tmp_path)[0]
    for found in two(2, several_on_ranks, tmp_path):
        trainers.check_same(found[0].logged, logged, 1e-5)
        trainers.check_same(found[1], trainers.result(again, []), 1e-5)
        trainers.check_same(found[2], parallel, 1e-5)


def gather_on_ranks(rank: int, world: int, group: Group, folder: Path) -> tuple[Any, ...]:
    with installed(rank, world, 2):
        accelerator = stock(folder).accelerator
    half = rank // 2
    tensors = {"rows": torch.tensor([[half], [half + 10]]), "one": torch.tensor(half)}
    objects = accelerator.gather_for_metrics([{"text": half}])
    return accelerator.gather_for_metrics(tensors), objects, accelerator.gather(torch.tensor([rank]))


def test_metrics_are_gathered_once(four: Ranks, tmp_path: Path) -> None:
    expected = {"rows": torch.tensor([[0], [10], [1], [11]]), "one": torch.tensor([0, 1])}
    for tensors, objects, every in four(4, gather_on_ranks, tmp_path):
        trainers.check_same(tensors, expected, 1e-9)
        assert objects == [{"text": 0}, {"text": 1}] and every.tolist() == [0, 2]


# ---- the comparison of the first step ----


def scale_gradient(trainer: Any, name: str, factor: float) -> None:
    """Scale a parameter's gradient, while the model is sharded."""
    from transformers import TrainerCallback

    from spar._model.model import states_of

    class Scale(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
            (state,) = states_of(model)
            p = model.get_parameter(name)
            p.register_hook(lambda gradient: gradient * (1.0 if state.is_whole else factor))

    trainer.add_callback(Scale())


def check_on_ranks(rank: int, world: int, group: Group, folder: Path) -> Run:
    name = "model.layers.1.mlp.up_proj.weight"
    with installed(rank, world, 2, check=True):
        wrong, dropped, right = stock(folder), stock(folder, make=with_dropout), stock(folder)
        scale_gradient(wrong, name, 1.01)
        with pytest.raises(RuntimeError, match=f"differs from one process, most in {name}: by 1.0e-02"):
            wrong.train()
        with pytest.raises(ValueError, match=r"attention_dropout=0.1, .* expected 0 for this comparison"):
            dropped.train()
        right.train()
        return trainers.result(right, [])


def with_dropout() -> Any:
    return model(attention_dropout=0.1)


def test_first_step_is_compared(two: Ranks, tmp_path: Path) -> None:
    one = stock(tmp_path)
    one.train()
    for found in two(2, check_on_ranks, tmp_path):
        trainers.check_same(found, trainers.result(one, []), 1e-5)


def test_groups_of_one_rank_change_nothing(tmp_path: Path) -> None:
    """In one process, without torch.distributed."""
    one = stock(tmp_path)
    one.train()
    spar.integrations.trainer.install(1, check=True)
    try:
        trainer = stock(tmp_path)
    finally:
        spar.integrations.trainer.uninstall()
    trainer.train()
    trainers.check_same(trainers.result(trainer, []), trainers.result(one, []), 1e-9)
