# SPDX-License-Identifier: Apache-2.0
"""Shape inference: each operation on fake tensors returns the shapes, dtypes and gradients of a real call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.operations import setting_of_world
from helpers.processes import finish, start
from helpers.tables import MAKERS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import spar
from spar._commands.check.cases import cases
from spar._commands.check.trial import NO_GRADIENT, expected_of, listed

Group = dist.ProcessGroup
# What reads values, which fake tensors do not have.
OF_VALUES = {
    "SequenceLayout.from_local": "gathers the ranks' sizes",
    "SequenceLayout.rows": "plans by the values of the index",
    "SequenceLayout.of_runs": "the case makes its runs from a tensor",
    "data.SPDataProcessor": "pickles samples",
    "packed_data_gather_forward_split_backward": "the case passes its sizes as a tensor",
    "rank_seed": "draws numbers",
    "sharding.ShardingValidator": "compares the ranks' sizes",
    "sharding.sp_gather": "compares the ranks' sizes",
}
OTHERS = {"attention", "init"}


def of(tensors: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in listed(tensors)]


def infer_all(rank: int, folder: Path) -> None:
    setting, found = setting_of_world(), []
    for case in cases(setting.world):
        if case.operation in {*OF_VALUES, *OTHERS}:
            continue
        trial = case.make(setting)
        expected, recorded = expected_of(trial, setting), trial.gradient != NO_GRADIENT
        before = spar.transport().name
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                inputs = [mode.from_tensor(x).requires_grad_(recorded) for x in trial.inputs[rank]]
                outputs = listed(trial.run(*inputs))
                upper = [torch.empty_like(y) for y in outputs]
                grads = torch.autograd.grad(outputs, inputs, upper) if recorded else ()
            if of(outputs) != of(expected.outputs) or of(grads) != of(inputs if recorded else ()):
                found.append(f"{case.name}: {of(outputs)}, {of(grads)}; expected {of(expected.outputs)}")
        except Exception as error:
            found.append(f"{case.name}: {type(error).__name__}: {error}")
        assert spar.transport().name == before
    (folder / f"{rank}.wrong").write_text("\n".join(found))


def test_each_operation_infers_shapes(tmp_path: Path) -> None:
    codes = finish(start(infer_all, 2, tmp_path), 120)
    assert [(tmp_path / f"{rank}.wrong").read_text() for rank in range(2)] == [""] * 2
    assert codes == [0, 0]


def losses(layout: spar.SequenceLayout, device: str) -> list[Tensor]:
    """Return losses of this rank's tokens, with what their options add."""
    tokens = layout.sizes[layout.group.rank()]
    hidden = torch.randn(2, tokens, 8, device=device, requires_grad=True)
    weight = torch.randn(30, 8, device=device, requires_grad=True)
    labels = torch.zeros(2, tokens, 3, dtype=torch.long, device=device)
    heat, mask = torch.ones(2, tokens, device=device), torch.ones(2, tokens, device=device)
    several = spar.token_logprobs((hidden, weight), labels, layout, temperature=heat)
    logits = hidden @ weight.T
    gathered = spar.token_logprobs(logits, labels[..., 0], layout, gather="sequence", grad_scale=None)
    samples, _ = spar.token_logprobs(logits.detach(), labels, layout, gather="samples")
    means = [spar.masked_mean(hidden.sum(-1), mask, layout, by=by) for by in ("token", "sample")]
    groups = [0] * (2 * len(layout.lengths))
    means.append(spar.masked_mean(hidden.sum(-1), mask, layout, by="group", groups=groups))
    means.append(spar.masked_mean(hidden.sum(-1), mask, layout, total=4))
    results = [*several, *gathered, *means, spar.roll(hidden, 1, layout)]
    grads = torch.autograd.grad(results, (hidden, weight), [torch.ones_like(y) for y in results])
    summed = spar.by_heads(lambda x: x.cumsum(1), [hidden.detach().unflatten(2, (2, 4))], layout)
    return [*results, *samples, *grads, *listed(summed)]


def check_losses(rank: int, world: int, group: Group) -> None:
    for name in ("zigzag", "packed", "balanced"):
        layout = MAKERS[name].of_total(19, group)
        expected = losses(layout, "cpu")
        for device in ("meta", "cpu"):
            with FakeTensorMode() if device == "cpu" else torch.device("meta"):
                found = losses(layout, device)
                assert of(layout.index()) == of(torch.empty(layout.sizes[rank], dtype=torch.int64)), name
            assert of(found) == of(expected), name
            assert all(x.device.type == device for x in found)
        spar.all_gather(torch.ones(1), group)  # ranks' numbers of calls are still equal


@pytest.mark.one_transport
def test_losses_infer_shapes(ranks: Ranks) -> None:
    ranks(2, check_losses)
