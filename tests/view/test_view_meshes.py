# SPDX-License-Identifier: Apache-2.0
"""spar.parallelize beside tensor, pipeline and data parallelism: meshes of 2 x 2 and 2 x 2 x 2 ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from conftest import Ranks
from helpers.meshes import (
    Decoder,
    batch,
    check_gradients,
    decoder,
    divide,
    full,
    layer_plan,
    loss_of,
    mean,
    of_one_process,
    same,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import spar
from spar.testing import compare

pytestmark = pytest.mark.one_transport

POOL = (4, 8)  # Tests of 8 ranks stand last: WORLD then has 8.
PRELOAD = ["torch.distributed.pipelining", "torch.distributed.checkpoint.state_dict"]
LENGTH = 13


def mesh_of(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


# ---- tensor parallelism ----


def compared(kind: str, mesh: DeviceMesh, is_first: bool = False, **options: Any) -> spar.testing.Report:
    """Compare a decoder that is divided over tp, and its sequence over cp, with one process."""
    ids, labels = batch(LENGTH)

    def shard(model: Any, given: Any) -> Any:
        shards = [
            lambda: divide(model, mesh["tp"], kind),
            lambda: spar.parallelize(model, mesh["cp"], **options),
        ]
        for each in reversed(shards) if is_first else shards:
            each()
        return given

    return compare(decoder, (ids, labels), shard, dist.group.WORLD, reduce="mean", show=False)


def check_tensor_parallel(rank: int, world: int, _: Any) -> None:
    mesh = mesh_of("cp", "tp")
    for kind in ("layers", "vocabulary", "sequence"):
        assert compared(kind, mesh).worst.max_rel_error < 1e-9, kind
    assert compared("vocabulary", mesh_of("tp", "cp"), is_first=True).worst.max_rel_error < 1e-9
    for options in ({"layout": "zigzag", "method": "ring"}, {"outputs": "parts"}):
        assert compared("layers", mesh, **options).worst.max_rel_error < 1e-9, options
    with loss_parallel():  # of logits that are divided by the vocabulary
        report = compare(
            LossOfLogits, batch(LENGTH), shard_logits(mesh), dist.group.WORLD, reduce="mean", show=False
        )
    assert report.worst.max_rel_error < 1e-9, report


class LossOfLogits(nn.Module):
    """Computes the loss outside of the sharded model, as a training loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = decoder()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.model(ids), labels)


def shard_logits(mesh: DeviceMesh) -> Callable[[Any, Any], Any]:
    def shard(model: Any, given: Any) -> Any:
        divide(model.model, mesh["tp"], "DTensor logits")
        spar.parallelize(model.model, mesh["cp"])
        return given

    return shard


def test_tensor_parallelism_is_exact_on_any_mesh(ranks: Ranks) -> None:
    ranks(4, check_tensor_parallel)


def check_first_difference(rank: int, world: int, _: Any) -> None:
    """Divided tensors are not taken for wrong ones."""
    mesh = mesh_of("cp", "tp")

    def wrong_weight(model: Any) -> None:
        model.layers[1].up.weight.data.mul_(1.1)

    def wrong_gradient(model: Any) -> None:
        model.layers[1].n2.register_full_backward_pre_hook(lambda module, grads: tuple(g * 2 for g in grads))

    for change, kind in ((wrong_weight, "value"), (wrong_gradient, "gradient")):

        def shard(model: Any, given: Any, change: Any = change) -> Any:
            divide(model, mesh["tp"])
            spar.parallelize(model, mesh["cp"])
            change(model)
            return given

        for group in (mesh["cp"], dist.group.WORLD):
            report = compare(decoder, batch(LENGTH), shard, group, reduce="mean", show=False)
            assert report.worst.max_rel_error > 1e-2
            found = report.first
            assert found is not None and found.kind == kind, str(found)
            assert str(found.module).startswith("layers.1"), str(found)


def test_compare_finds_differences_beside_tensor_parallelism(ranks: Ranks) -> None:
    ranks(4, check_first_difference)


# ---- pipelines ----


def stage_of(model: Decoder, at: int) -> Decoder:
    """Leave one of two stages of a model. Its other layer is an identity, so that names stay."""
    model.layers[1 - at] = nn.Identity()
    if at == 0:
        model.norm = model.head = None
    else:
        model.embedding = None
    return model


def check_pipeline(rank: int, world: int, _: Any, names: tuple[str, ...]) -> None:
    mesh = mesh_of(*names)
    at, cp = mesh["pp"].get_local_rank(), mesh["cp"].get_group()
    ids, labels = batch(LENGTH)
    expected, gradients = of_one_process(ids, labels)
    layout = spar.SequenceLayout.even(LENGTH, cp)
    for schedule, between in ((ScheduleGPipe, "whole"), (Schedule1F1B, "whole"), (Schedule1F1B, "parts")):
        stage = stage_of(decoder(), at)
        if "tp" in names:
            parallelize_module(stage.layers[at], mesh["tp"], layer_plan(False))
        size = LENGTH if between == "whole" else layout.sizes[cp.rank()]
        sent = torch.zeros(2, size, 16, dtype=torch.float64, requires_grad=True)
        if between == "whole":
            spar.parallelize(stage, cp)
        elif at == 0:
            spar.parallelize(stage, cp, outputs="parts")
            # A part's gradient is that of the sum of the ranks' losses; the next stage returns one process's.
            stage.register_forward_hook(
                lambda module, args, out: out.register_hook(lambda gradient: gradient * cp.size()) and None
            )
        else:
            spar.parallelize(stage, cp, inputs=["x"])
        logits = torch.zeros(2, LENGTH, 28, dtype=torch.float64, requires_grad=True)
        pipe = PipelineStage(
            stage,
            at,
            2,
            torch.device("cpu"),
            input_args=(ids[:2], sent)[at],
            output_args=(sent, logits)[at],
            group=mesh["pp"].get_group(),
        )
        losses: list[Tensor] = []
        run = schedule(pipe, n_microbatches=2, loss_fn=loss_of)
        if at == 0:
            run.step(ids)
        else:
            run.step(target=labels, losses=losses)
            same("loss", torch.stack(losses).mean(), expected)
        check_gradients(stage, gradients, [cp], (schedule, between))


def test_stages_of_a_pipeline_send_whole_activations_or_parts(ranks: Ranks) -> None:
    ranks(4, check_pipeline, ("pp", "cp"))


# ---- data parallelism ----


def wrapped(kind: str, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return a decoder that is wrapped, the decoder, and its optimizer."""
    model = decoder()
    spar.parallelize(model, mesh["cp"])
    outer: nn.Module = model
    if kind == "DDP":
        outer = DistributedDataParallel(model)
    else:  # cp is folded into the ranks that parameters are sharded over
        over = mesh["dp", "cp"] if kind == "HSDP" else mesh["dp", "cp"]._flatten("dp_cp")
        for block in model.layers:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    return outer, model, torch.optim.AdamW(model.parameters(), 1e-2)


def train(outer: nn.Module, model: nn.Module, optimizer: Any, steps: range, rows: slice) -> list[Tensor]:
    """Return the loss and the norm of gradients of each step."""
    found = []
    for step in steps:
        ids, labels = batch(LENGTH + step)
        loss = outer(ids[rows], labels[rows])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found += [mean(loss, [dist.group.WORLD]), full(norm)]
    return found


def check_data_parallel(rank: int, world: int, _: Any, folder: Path) -> None:
    model = decoder()
    expected = train(model, model, torch.optim.AdamW(model.parameters(), 1e-2), range(3), slice(None))
    mesh = mesh_of("dp", "cp")
    rows = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    for kind in ("DDP", "FSDP", "HSDP"):
        outer, mine, optimizer = wrapped(kind, mesh)
        found = train(outer, mine, optimizer, range(2), rows)
        states = dict(zip(("model", "optimizer"), get_state_dict(mine, optimizer), strict=True))
        checkpoints.save(states, checkpoint_id=folder / kind)
        outer, mine, optimizer = wrapped(kind, mesh)  # another one, which goes on from the checkpoint
        states = dict(zip(("model", "optimizer"), get_state_dict(mine, optimizer), strict=True))
        checkpoints.load(states, checkpoint_id=folder / kind)
        set_state_dict(
            mine, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        found += train(outer, mine, optimizer, range(2, 3), rows)
        for each, other in zip(found, expected, strict=True):
            same((kind, found, expected), each, other)
        for (name, p), other in zip(mine.named_parameters(), model.parameters(), strict=True):
            same((kind, name), full(p.detach()), other)


def test_wrappers_over_dp_and_cp_clip_and_continue_from_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, check_data_parallel, tmp_path)


# ---- what is refused ----


def forward(model: Any, *given: Any) -> None:
    model(*(given or batch(LENGTH)))


def same_ranks(kind: str) -> None:
    """Divide a model's parameters over the ranks that share its sequence."""
    cp = mesh_of("dp", "cp")["cp"]
    model = decoder()
    divide(model, cp, kind)
    spar.parallelize(model, cp)
    forward(model)


def vocabulary_over_cp() -> None:
    cp = mesh_of("dp", "cp")["cp"]
    model = decoder()
    parallelize_module(model, cp, {"embedding": ColwiseParallel(output_layouts=Replicate())})
    spar.parallelize(model, cp)
    forward(model)


def other_places(make: Callable[[], tuple[Any, DeviceMesh]]) -> None:
    cp, tp = make()
    model = decoder()
    divide(model, tp)
    spar.parallelize(model, cp)
    forward(model, *batch(12))  # ranks have equally many tokens


def crossed() -> tuple[Any, DeviceMesh]:
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    return groups[dist.get_rank() // 2], DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("x", "tp"))["tp"]


def descending() -> tuple[Any, DeviceMesh]:
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("cp", "tp"))
    return mesh["cp"], mesh["tp"]


def local_outputs() -> None:
    """SequenceParallel whose outputs are plain tensors of this rank's tokens of tp's."""
    mesh, model = mesh_of("cp", "tp"), decoder()
    parallelize_module(model.layers[0], mesh["tp"], {"n1": SequenceParallel(use_local_output=True)})
    spar.parallelize(model, mesh["cp"])
    forward(model)


def input_over_cp() -> None:
    cp = mesh_of("dp", "cp")["cp"]
    model = Decoder()
    model.embedding = None
    spar.parallelize(model, cp)
    forward(model, distribute_tensor(torch.zeros(2, 12, 16), cp, [Shard(1)]))


def averaged_over_dp() -> None:
    """No parameter is whole when a forward begins: each rank has a shard of dp's."""
    mesh, model = mesh_of("dp", "cp"), decoder()
    spar.parallelize(model, mesh["cp"])
    for module in (model.embedding, *model.layers, model.norm, model.head, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(*batch(LENGTH)).backward()
        optimizer.step()


def nested(outer_first: bool) -> None:
    mesh, model = mesh_of("a", "b"), decoder()
    targets = [(model, "a", None), (model.layers[0], "b", [""])]
    for module, name, blocks in targets if outer_first else reversed(targets):
        spar.parallelize(module, mesh[name], blocks=blocks)


def inner_of_blocks() -> None:
    mesh, model = mesh_of("a", "b"), decoder()
    spar.parallelize(model, mesh["a"])
    spar.parallelize(model.layers[0].attention, mesh["b"], blocks=[""])
    forward(model)


def beside_torchs() -> None:
    cp = mesh_of("dp", "cp")["cp"]
    model = decoder()
    spar.parallelize(model, cp)
    with context_parallel(cp, buffers=[torch.zeros(12)], buffer_seq_dims=[0]):
        forward(model, *batch(12))


OVER = r"DTensor.from_local at .* is over ranks that share a sequence; take a mesh of other ranks"
TAKEN = r"parallelize: the model's module .* is parallelized already, itself or as a part of another model"
PLACES = r"from_local at .* is over ranks with other tokens: rank \d part \d of 2, rank \d part \d of 2; let"
DRIFTED = (
    r"the parameter .* is another value on rank 1 than on rank 0; .* average .*, which ascend in each dim"
)
REFUSED: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "layers over cp": (lambda: same_ranks("layers"), RuntimeError, OVER),
    "a vocabulary over cp": (vocabulary_over_cp, RuntimeError, OVER),
    "sequences over cp": (lambda: same_ranks("sequence"), RuntimeError, OVER),
    "other places": (lambda: other_places(crossed), RuntimeError, PLACES),
    "a mesh in another order": (lambda: other_places(descending), ValueError, DRIFTED),
    "local outputs": (local_outputs, RuntimeError, r"divides dim 1, .* by use_local_output=False"),
    "an input": (
        input_over_cp,
        ValueError,
        r"an input is a DTensor \[2, 12, 16\] over ranks .*; pass its full",
    ),
    "an average over dp alone": (averaged_over_dp, ValueError, DRIFTED),
    "a block and its model": (lambda: nested(False), ValueError, TAKEN),
    "a model and its block": (lambda: nested(True), ValueError, TAKEN),
    "a module in a block": (
        inner_of_blocks,
        RuntimeError,
        r"Attention .* is parallelized inside of a parallel",
    ),
    "torch's context_parallel": (beside_torchs, RuntimeError, OVER),
}


def check_refused(rank: int, world: int, _: Any) -> None:
    warnings.simplefilter("ignore")
    for name, (run, kind, text) in REFUSED.items():
        with pytest.raises(kind, match=text):
            run()
            pytest.fail(name)


def test_meshes_that_cannot_be_right_are_refused(ranks: Ranks) -> None:
    ranks(4, check_refused)


def check_siblings(rank: int, world: int, _: Any) -> None:
    """Two modules of a model, each over its own group, whose names differ from one another's."""
    mesh, model = mesh_of("a", "b"), decoder()
    ids, labels = batch(LENGTH)
    expected, gradients = of_one_process(ids, labels)
    for block, name in zip(model.layers, ("a", "b"), strict=True):
        spar.parallelize(block, mesh[name], blocks=[""])
    loss = model(ids, labels)
    loss.backward()
    same("loss", loss, expected)
    check_gradients(model, gradients, [dist.group.WORLD], "siblings")


def test_modules_beside_one_another_have_their_own_groups(ranks: Ranks) -> None:
    ranks(4, check_siblings)


# ---- 8 ranks ----


def check_three_dims(rank: int, world: int, _: Any) -> None:
    mesh = mesh_of("dp", "cp", "tp")
    ids, labels = batch(LENGTH)
    expected, gradients = of_one_process(ids, labels)
    model = decoder()
    divide(model, mesh["tp"], "vocabulary")
    report = spar.parallelize(model, mesh["cp"])
    at = mesh["dp"].get_local_rank()
    loss = model(ids.chunk(2)[at], labels.chunk(2)[at])
    loss.backward()
    groups = [mesh[name].get_group() for name in ("cp", "dp")]
    same("loss", mean(loss, groups), expected)
    check_gradients(model, gradients, groups, "dp x cp x tp")
    assert report.share < 0.55 and not report.functions, str(report)


def test_three_dims(ranks: Ranks) -> None:
    ranks(8, check_three_dims)


def test_a_pipeline_of_two_other_dims(ranks: Ranks) -> None:
    ranks(8, check_pipeline, ("pp", "cp", "tp"))
