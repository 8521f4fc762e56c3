# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/rl.md in each layout, against samples one by one in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import TRANSPORTS, Ranks
from helpers.processes import finish, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import spar

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"
Group = dist.ProcessGroup
Names = dict[str, Any]
LENGTHS, PROMPTS = (7, 2, 9, 5), (3, 1, 8, 4)  # one completion of each of two samples is one token
LONGEST, VOCABULARY, WIDTH = max(LENGTHS), 19, 16
KNOWN = ("advantages", "old_logprobs", "reference_logprobs", "returns", "old_values")


class Model(nn.Module):
    """One layer of attention; with a layout of a sharded sequence, else of one sample."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        kind = torch.float64
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=kind)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=kind)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=kind)
        self.value = nn.Linear(WIDTH, 1, dtype=kind)

    def forward(self, ids: Tensor, layout: spar.SequenceLayout | None = None) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(x).unflatten(2, (12, 4)).chunk(3, 2)
        if layout is not None:
            return x + spar.attention(q, k, v, layout, causal=True).flatten(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Sample:
    """A sample in one process: its tokens, and what is known of each label."""

    def __init__(self, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        length = LENGTHS[number]
        self.ids = torch.randint(1, VOCABULARY, (length,), generator=random)
        self.labels = torch.cat([self.ids[1:], torch.tensor([-100])])
        self.labels[: PROMPTS[number] - 1] = -100
        self.mask = self.labels != -100
        shape = len(KNOWN), length
        self.known = dict(
            zip(KNOWN, 0.3 * torch.randn(shape, generator=random, dtype=torch.float64), strict=True)
        )
        self.known["advantages"] = self.known["advantages"][:1].expand(length) * 3
        for name in ("old_logprobs", "reference_logprobs"):
            self.known[name] = self.known[name] - 3

    def counted(self, x: Tensor) -> Tensor:
        return x[self.mask]

    def logprobs(self, model: Model, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return those of the labels that count, and the entropies."""
        every = (model.head(model(self.ids[None]))[0] / temperature).log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return every[self.mask].gather(1, self.labels[self.mask][:, None])[:, 0], entropy[self.mask]


SAMPLES = [Sample(number) for number in range(len(LENGTHS))]


# ---- each recipe in one process, in the order of the page's blocks ----


def known(sample: Sample, *names: str) -> list[Tensor]:
    return [sample.counted(sample.known[name]) for name in names]


def packed_policy(model: Model, other: Model) -> Tensor:
    rewards = torch.arange(4.0, dtype=torch.float64)
    advantages = rewards - rewards.mean()
    return torch.stack(
        [-a * s.logprobs(model)[0].mean() for a, s in zip(advantages, SAMPLES, strict=True)]
    ).mean()


def grpo(model: Model, other: Model) -> Tensor:
    means = []
    for sample in SAMPLES:
        logprobs, _ = sample.logprobs(model, 0.8)
        advantages, old, reference = known(sample, *KNOWN[:3])
        ratio = (logprobs - old).exp()
        losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        means.append((losses + 0.04 * ((reference - logprobs).exp() - (reference - logprobs) - 1)).mean())
    return torch.stack(means).mean()


def ppo(model: Model, other: Model) -> Tensor:
    losses = []
    for sample in SAMPLES:
        logprobs, entropy = sample.logprobs(model)
        advantages, old, _, returns, old_values = known(sample, *KNOWN)
        ratio = (logprobs - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        values = sample.counted(model.value(model(sample.ids[None]))[0, :, 0])
        clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
        value = torch.max((values - returns) ** 2, (clipped - returns) ** 2) / 2
        losses.append(policy + value / 2 - 0.01 * entropy)
    return torch.cat(losses).mean()


def pairs(values: Sequence[Tensor], beta: float) -> Tensor:
    first, second = torch.stack(list(values)).view(-1, 2).unbind(1)
    return -F.logsigmoid(beta * (first - second)).mean()


def dpo(model: Model, other: Model) -> Tensor:
    return pairs([s.logprobs(model)[0].sum() - s.logprobs(other)[0].sum().detach() for s in SAMPLES], 0.1)


def reward_model(model: Model, other: Model) -> Tensor:
    return pairs([model.value(model(sample.ids[None]))[0, -1, 0] for sample in SAMPLES], 1.0)


def on_policy_distillation(model: Model, other: Model) -> Tensor:
    losses = []
    for sample in SAMPLES:
        logprobs, (teacher, _) = sample.logprobs(model)[0], sample.logprobs(other)
        (old,) = known(sample, "old_logprobs")
        losses.append(-(logprobs - old).exp() * (teacher - logprobs).detach())
    return torch.cat(losses).mean()


def distillation(model: Model, other: Model, likeliest: int = VOCABULARY) -> Tensor:
    losses = []
    for sample in SAMPLES:
        every, target = (m.head(m(sample.ids[None]))[0].log_softmax(-1) for m in (model, other))
        target, places = target.detach().topk(likeliest)
        every = every.gather(-1, places)
        losses.append(sample.counted((target.exp() * (target - every)).sum(-1)))
    return torch.cat(losses).mean()


def likeliest_tokens(model: Model, other: Model) -> Tensor:
    return distillation(model, other, 4)


def micro_batches(model: Model, other: Model) -> Tensor:
    return torch.stack([-sample.logprobs(model)[0].mean() for sample in SAMPLES]).mean()


RECIPES: list[Callable[[Model, Model], Tensor]] = [
    *(packed_policy, grpo, ppo, dpo, reward_model, on_policy_distillation, distillation),
    *(likeliest_tokens, micro_batches),
]
PACKED = (packed_policy, micro_batches)  # recipes that make their own layouts
BLOCKS = [
    code
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    if "lm_head" not in code
]


# ---- what the page's blocks take as given ----


def padded(rows: Sequence[Tensor], fill: float = 0) -> Tensor:
    return torch.stack([F.pad(x, (0, LONGEST - len(x)), value=fill) for x in rows])


def given(group: Group, kind: str = "packed") -> Names:
    """Return this rank's part of the samples: rows that are padded, or one packed row."""
    packed = kind in ("packed", "balanced")
    layout: spar.SequenceLayout = getattr(spar.SequenceLayout, kind)(LENGTHS if packed else LONGEST, group)

    def own(rows: Sequence[Tensor], fill: float = 0) -> Tensor:
        whole = torch.cat(list(rows))[None] if packed else padded(rows, fill)
        return whole[:, layout.index()]

    ends = torch.tensor(LENGTHS)
    other = Model(1)
    names: Names = {
        "layout": layout,
        "cp": group,
        "world": group,
        "model": Model(0),
        "reference": other,
        "teacher": other,
        "ids": own([s.ids for s in SAMPLES]),
        "labels": own([s.labels for s in SAMPLES], -100),
        "mask": own([s.mask for s in SAMPLES]),
        "last": ends.cumsum(0) - 1 if packed else torch.arange(len(ends)) * LONGEST + ends - 1,
        "input_ids": padded([s.ids for s in SAMPLES]),
        "attention_mask": padded([torch.ones_like(s.ids) for s in SAMPLES]),
        "completion_mask": padded([F.pad(s.mask, (1, 0))[:-1] for s in SAMPLES]),
        "rewards": torch.arange(4.0, dtype=torch.float64),
    }
    return names | {name: own([s.known[name] for s in SAMPLES]) for name in KNOWN}


def check_recipes(rank: int, world: int, group: Group) -> None:
    for recipe, code in zip(RECIPES, BLOCKS, strict=True):
        model, other = Model(0), Model(1)
        expected = recipe(model, other)
        expected.backward()  # type: ignore[no-untyped-call]
        for kind in ("packed",) if recipe in PACKED else ("even", "zigzag", "packed", "balanced"):
            names = {"spar": spar, "torch": torch, "F": F} | given(group, kind)
            exec(compile(code, recipe.__name__, "exec"), names)
            note = f"{recipe.__name__}, {kind}, {world} ranks"
            if recipe is not micro_batches:
                torch.testing.assert_close(names["loss"].detach(), expected.detach(), msg=note)
            for (name, found), one in zip(names["model"].named_parameters(), model.parameters(), strict=True):
                if one.grad is None:
                    assert found.grad is None or not found.grad.any(), (note, name)
                    continue
                grad = torch.zeros_like(found) if found.grad is None else found.grad.clone()
                dist.all_reduce(grad, group=group)
                torch.testing.assert_close(
                    grad / world, one.grad, msg=lambda text, at=(note, name): f"{at}: {text}"
                )
            if recipe in PACKED:
                for row, sample in zip(names["padded"], SAMPLES, strict=True):
                    logprobs = row[: len(sample.ids)][1:][sample.mask[:-1]]
                    torch.testing.assert_close(logprobs, sample.logprobs(model)[0].detach())
            if recipe is ppo:
                assert 0 < names["clip_fraction"].item() < 1


@pytest.mark.parametrize("world", [2, 3])
def test_recipes_match_one_process(pool: Ranks, world: int) -> None:
    pool.transport = TRANSPORTS[0]
    pool(world, check_recipes)


class Policy(nn.Module):
    """What `fully_shard` wraps: the head's weight is whole inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(0)

    def forward(self, ids: Tensor, labels: Tensor, layout: spar.SequenceLayout) -> Tensor:
        head = self.model(ids, layout), self.model.head.weight
        return spar.token_logprobs(head, labels, layout)[0]


def check_fsdp2(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard  # here, as its import takes half a second

    world, expected = dist.group.WORLD, Model(0)
    loss = torch.cat([-sample.logprobs(expected)[0] for sample in SAMPLES]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    names = given(world)
    policy: Any = fully_shard(Policy(), mesh=init_device_mesh("cpu", (2,)))
    layout = names["layout"]
    logprobs = policy(names["ids"], names["labels"], layout)
    spar.masked_mean(-logprobs, names["mask"], layout, averaged_by=world).backward()
    for found, one in zip(policy.parameters(), expected.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), one.grad)
    hidden = torch.randn(*names["ids"].shape, WIDTH, dtype=torch.float64)
    with pytest.raises(TypeError, match="weight is a DTensor; expected a plain tensor: under FSDP2 call"):
        spar.token_logprobs((hidden, policy.model.head.weight), names["labels"], layout)
    dist.barrier()


def test_head_in_fsdp2(tmp_path: Path) -> None:
    assert finish(start(check_fsdp2, 2, tmp_path, set_up=False), 100) == [0, 0]
