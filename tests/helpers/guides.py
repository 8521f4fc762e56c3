# SPDX-License-Identifier: Apache-2.0
"""What the Python code of README.md and docs/ takes as given, and what its results must be."""

from __future__ import annotations

import copy
import functools
import math
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_rl import Model as SmallDecoder, given as of_rl
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import spar
from helpers.graphs import check_page as check_graphs, given as of_graphs
from helpers.whole_attention import whole_attention
from spar.utils import stateless_destroy_torch_distributed_process_group

WORLD = 4
Names = dict[str, Any]


# ---- what a page's blocks take as given; each block gets its own ----


class Small(torch.nn.Module):
    """Any model of a token's features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)


class Output(NamedTuple):
    loss: torch.Tensor


class WithLoss(torch.nn.Module):
    """A model that returns an output with a loss, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from helpers import meshes  # here, as DTensors take half a second to import

        self.decoder = meshes.decoder()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output(self.decoder(ids, labels))


def of_readme(group: dist.ProcessGroup) -> Names:
    """A model, and the batch of a data-parallel rank: half of the rows."""
    from torch.distributed.fsdp import fully_shard

    from helpers import meshes

    first = group.rank() // 2 * 2
    ids, labels = (x[first : first + 2] for x in meshes.batch(13))
    given = {"model": WithLoss(), "batch": {"ids": ids, "labels": labels}}
    return {**given, "fully_shard": fully_shard, "init_device_mesh": init_device_mesh}


def of_ops(group: dist.ProcessGroup) -> Names:
    layout = spar.SequenceLayout.zigzag(16, group)
    q = torch.randn(1, 4, 6, 2)
    model = Small()
    return {
        "q": q,
        "k": q.clone(),
        "v": q.clone(),
        "x": torch.randn(2, 4, 4),
        "seq": 16,
        "heads": 6,
        "layout": layout,
        "step": 3,
        "model": model,
        "batch": torch.randn(2, 32),
        "project": torch.sin,
        "attend": lambda q, k, v=None: q,
        "block": functools.partial(block, group),
    }


def block(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    return spar.all_to_all(spar.all_to_all(x, group, 2, 1).sin(), group, 1, 2)


def of_attention(group: dist.ProcessGroup) -> Names:
    layout = spar.SequenceLayout.zigzag(18, group)
    q = torch.randn(1, layout.sizes[group.rank()], 2, 4)
    ids = torch.arange(18)[None] // 7
    far = torch.randn(1, 9, 2, 4)
    names: Names = {"total": 18, "x": torch.randn(1, 18, 8), "q": q, "k": q, "v": q, "ids": ids}
    return {**names, "layout": layout, "far_k": far, "far_v": far}


def of_gradients(group: dist.ProcessGroup) -> Names:
    own = spar.cal_split_sizes(10, WORLD)[group.rank()]
    model = torch.nn.Linear(6, 5)
    batches = [(torch.randn(1, 3, 6), torch.randint(5, (1, 3))) for _ in range(2)]
    return {
        "labels": torch.arange(10)[None] % 5,
        "logits": torch.randn(1, own, 5, requires_grad=True),
        "world": group,
        "model": model,
        "micro_batches": batches,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }


def of_topology(group: dist.ProcessGroup) -> Names:
    def model(tokens: torch.Tensor) -> torch.Tensor:
        return spar.gather_forward_split_backward(tokens.sin(), None, 0).sum()

    return {"model": model, "tokens": torch.randn(3, requires_grad=True)}


def of_utils(group: dist.ProcessGroup) -> Names:
    return {"rank": group.rank(), "world_size": WORLD, "x": torch.randn(1, 2, 4, 3)}


def of_packed(group: dist.ProcessGroup) -> Names:
    generator = torch.Generator().manual_seed(2)
    names = ("whole_q", "whole_k", "whole_v")
    return {name: torch.randn(1, 24, 4, 8, generator=generator) for name in names}


def of_debugging(group: dist.ProcessGroup) -> Names:
    return {"x": torch.randn(1, 2, 4, 3)}


def of_several_nodes(group: dist.ProcessGroup) -> Names:
    return {"ranks_per_node": 2}


def of_any_model(group: dist.ProcessGroup) -> Names:
    model, x = encoder()["model"].float(), torch.randn(2, 13, 64)
    spar.parallelize(model, group)
    given = {"model": model, "x": x, "target": torch.zeros_like(x)}
    return given | {"DistributedDataParallel": DistributedDataParallel}


class Decoder(SmallDecoder):
    """Logits, over a sharded sequence or, without a layout, over a whole one."""

    def forward(self, ids: torch.Tensor, layout: spar.SequenceLayout | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.head(super().forward(ids, layout))
        return logits


def encoder() -> Names:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True, dtype=torch.float64)
    return {"model": torch.nn.TransformerEncoder(layer, 2), "x": torch.randn(2, 13, 64, dtype=torch.float64)}


def of_meshes(group: dist.ProcessGroup) -> Names:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from helpers import meshes  # here, as DTensors take half a second to import

    return {
        "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
        "parallelize_module": parallelize_module,
        "model": meshes.decoder(),
        "plan": meshes.layer_plan(sequence=False),
    }


def of_evaluation(group: dist.ProcessGroup) -> Names:
    """A decoder to evaluate; and a model to save, in a folder that all ranks have."""
    from torch.distributed.fsdp import fully_shard  # here, as its import takes half a second

    folder = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    generator = torch.Generator().manual_seed(0)
    return encoder() | {
        "math": math,
        "cp": group,
        "batches": [torch.randint(19, (2, total), generator=generator) for total in (21, 3)],
        "decoder": Decoder(0),
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard,
        "init_device_mesh": init_device_mesh,
        "folder": folder[0],
        "path": f"{folder[0]}/checkpoint.pt",
    }


def of_science(group: dist.ProcessGroup) -> Names:
    """Pairs, a graph, and fields whose latitudes and rows of patches no number of ranks divides."""
    fields = {"x": torch.randn(1, 5, 93, 48), "target": torch.randn(1, 5, 93, 48)}
    return of_graphs(group) | {"z": torch.randn(1, 9, 9, 6)} | fields


GIVEN: dict[str, Callable[[dist.ProcessGroup], Names]] = {
    "README.md": of_readme,
    "any-model.md": of_any_model,
    "evaluation.md": of_evaluation,
    "memory.md": lambda group: encoder() | {"cp": group},
    "meshes.md": of_meshes,
    "profiling.md": of_debugging,
    "ops.md": of_ops,
    "attention.md": of_attention,
    "gradients.md": of_gradients,
    "topology.md": of_topology,
    "utils.md": of_utils,
    "packed.md": of_packed,
    "rl.md": of_rl,
    "science.md": of_science,
    "several-nodes.md": of_several_nodes,
    "debugging.md": of_debugging,
}


# ---- what a block's results must be, beside raising nothing ----


def check_data_parallel(names: Names) -> None:
    """Two samples, each over two ranks, have the loss and the gradients of one process with both."""
    alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    torch.manual_seed(0)
    model = names["Model"]()
    samples = torch.randint(100, (2, 1, 34), generator=torch.Generator().manual_seed(1)).flatten(0, 1)
    logits = model(samples[:, :-1], spar.SequenceLayout.even(33, alone))
    loss = F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
    loss.backward()
    torch.testing.assert_close(names["loss"].detach(), loss.detach(), atol=1e-6, rtol=1e-6)
    for found, expected in zip(names["model"].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, atol=1e-6, rtol=1e-5)


def check_packed(names: Names) -> None:
    starts = [0, 5, 17, 17]
    for begin, length in zip(starts, names["lengths"], strict=True):
        document = slice(begin, begin + length)
        parts = [names[name][:, document] for name in ("whole_q", "whole_k", "whole_v")]
        if length:
            torch.testing.assert_close(names["whole"][:, document], whole_attention(*parts, causal=True))
    places = torch.cat([torch.arange(length) for length in names["lengths"]])
    assert torch.equal(names["positions"], places[names["layout"].index()])


def check_readme(names: Names) -> None:
    """Averaged gradients are those of one process with the rows of both data-parallel ranks."""
    from helpers import meshes

    _, gradients = meshes.of_one_process(*meshes.batch(13))
    meshes.same("loss", names["loss"], meshes.of_one_process(**names["batch"])[0])
    meshes.check_gradients(names["model"].decoder, gradients, [], "README.md")


def check_utils(names: Names) -> None:
    assert names["settings"] == {"layers": 32} and names["y"].shape == (1, 2 * WORLD, 1, 3)
    names["group_of_objects"].barrier()
    stateless_destroy_torch_distributed_process_group(names["group"])


def check_any_model(names: Names) -> None:
    whole = copy.deepcopy(names["model"])
    spar.unparallelize(whole)
    torch.testing.assert_close(whole.eval()(names["x"]), names["model"].eval()(names["x"]))
    assert names["report"].share < 0.4


def check_groups_of_a_node(names: Names) -> None:
    """The sequence groups are ranks 0 and 1, and 2 and 3, as if these shared a node."""
    first = dist.get_rank() // 2 * 2
    assert names["mesh"]["cp"].mesh.tolist() == [first, first + 1]


def check_rings_across_nodes(names: Names) -> None:
    first = dist.get_rank() // 2 * 2
    assert names["mesh"]["ulysses"].mesh.tolist() == [first, first + 1]
    whole = torch.arange(1000)
    assert torch.equal(names["layout"].gather(names["layout"].shard(whole, 0), 0), whole)


def check_evaluation(names: Names) -> None:
    """The metrics are those of one process, over all batches."""
    whole = names["batches"]
    logits = torch.cat([names["decoder"](ids)[:, :-1].flatten(0, 1) for ids in whole])
    labels = torch.cat([ids[:, 1:].flatten() for ids in whole])
    loss = F.cross_entropy(logits, labels).item()
    right = (logits.argmax(-1) == labels).double().mean().item()
    expected = {"loss": loss, "perplexity": math.exp(loss), "accuracy": right}
    assert names["metrics"] == pytest.approx(expected)


def check_checkpoint(names: Names) -> None:
    """What rank 0 saved is the state of one process after the same step, by the same names."""
    dist.barrier()
    saved = torch.load(names["path"])
    saved = saved.get("model", saved)
    alone = encoder()
    optimizer = torch.optim.AdamW(alone["model"].parameters())
    alone["model"](alone["x"]).square().mean().backward()
    optimizer.step()
    expected = alone["model"].state_dict()
    assert list(saved) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names["folder"])


def check_pairs(names: Names) -> None:
    """Products and transposes are this rank's rows of those of one process."""
    a, b = names["z"], names["z"] + 1
    whole = {
        "outgoing": torch.einsum("bikc,bjkc->bijc", a, b),
        "incoming": torch.einsum("bkic,bkjc->bijc", a, b),
        "columns": a.transpose(1, 2),
    }
    for name, expected in whole.items():
        torch.testing.assert_close(names[name], names["layout"].shard(expected, 1))


def check_meshes(names: Names) -> None:
    """FSDP2 has averaged the gradients."""
    from helpers import meshes

    ids, labels = meshes.batch(13)
    expected, gradients = meshes.of_one_process(ids, labels)
    loss = names["model"](ids, labels)
    loss.backward()
    meshes.same("loss", loss, expected)
    meshes.check_gradients(names["model"], gradients, [], "meshes.md")


def check_graph_network(names: Names) -> None:
    """The result is that of one process, and each rank has an equal share."""
    whole = copy.deepcopy(names["model"])
    spar.unparallelize(whole)
    torch.testing.assert_close(names["y"], whole(names["nodes"], names["edges"]))
    assert names["report"].share < 0.3


def check_weather(names: Names) -> None:
    """The loss and the gradients are those of one process."""
    whole = copy.deepcopy(names["model"])
    spar.unparallelize(whole)
    whole.zero_grad()
    loss = whole(names["x"], names["target"])
    loss.backward()
    torch.testing.assert_close(names["loss"], loss)
    for own, expected in zip(names["model"].parameters(), whole.parameters(), strict=True):
        dist.all_reduce(own.grad)
        torch.testing.assert_close(own.grad / WORLD, expected.grad, atol=1e-5, rtol=1e-4)
    assert names["report"].share < 0.28


CHECKS = {
    ("README.md", 0): check_readme,
    ("any-model.md", 0): check_any_model,
    ("data-parallel.md", 0): check_data_parallel,
    ("evaluation.md", 0): check_evaluation,
    ("evaluation.md", 3): check_checkpoint,
    ("evaluation.md", 4): check_checkpoint,
    ("meshes.md", 0): check_meshes,
    ("packed.md", 0): check_packed,
    ("science.md", 1): check_pairs,
    ("science.md", 7): check_graph_network,
    ("science.md", 8): check_weather,
    ("utils.md", 0): check_utils,
    ("several-nodes.md", 1): check_groups_of_a_node,
    ("several-nodes.md", 2): check_rings_across_nodes,
    **{("science.md", 2 + number): functools.partial(check_graphs, number) for number in range(5)},
}
