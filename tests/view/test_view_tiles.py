# SPDX-License-Identifier: Apache-2.0
"""spar.parallelize(tile=): which modules run on tiles, and uses of logits that wait for a loss."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.averages import gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spar

PRELOAD = ["torch._dynamo"]
POOL = (2,)
Group = dist.ProcessGroup
VOCABULARY = 53


class Head(nn.Module):
    """A norm and a head behind a layer, and a loss that a test passes."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = nn.ModuleList([nn.Linear(8, 8)]), loss
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head, self.norm(self.layers[0](x)), labels)


def of_mean(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def changed_in_place(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    rows, doubled = logits.flatten(0, 1), logits * 2
    logits[..., 5] = -3.0
    logits.div_(2)
    return of_mean(logits, labels) + of_mean(doubled, labels) + F.cross_entropy(rows, labels.flatten())


def without_gradients(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    with torch.no_grad():
        scaled, right = logits * 3, (logits.argmax(-1) == labels).double().mean()
    return (
        of_mean(logits, labels) + (scaled * x.sum(-1, keepdim=True)).mean() + right * logits.square().mean()
    )


def hooked(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    logits.register_hook(lambda gradient: gradient * 2)
    return of_mean(logits, labels)


def kept(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Logits that a module keeps, which are read behind the forward."""
    logits = head(x)
    head.newest, head.all = logits, [{"logits": logits}]
    return of_mean(logits, labels)


def used_often(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    each = of_mean(logits, labels, reduction="none")
    weighted = of_mean(logits, labels, weight=torch.linspace(0.1, 1, VOCABULARY, dtype=x.dtype))
    return of_mean(logits, labels) + of_mean(logits * 2, labels, reduction="sum") + each.mean() + weighted


def all_ignored(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return of_mean(head(x), torch.full_like(labels, -100))


def checkpointed(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return of_mean(checkpoint(head, x, use_reentrant=True), labels)


def loss_in_checkpoint(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    passed = checkpoint(of_mean, logits * 2, labels, use_reentrant=False)
    return passed + checkpoint(lambda labels: of_mean(logits, labels), labels, use_reentrant=False)


@torch.jit.script
def scripted_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seen_by_no_mode(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    return scripted_mean(logits, labels) + of_mean(logits.as_subclass(nn.Buffer), labels)


def frozen_since(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head(x)
    head.requires_grad_(False)
    return of_mean(logits, labels)


def input_changed(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = head.requires_grad_(False)(x)
    x.mul_(2)
    return of_mean(logits, labels)


LOSSES = (
    *(changed_in_place, without_gradients, hooked, used_often, all_ignored),
    *(checkpointed, loss_in_checkpoint, seen_by_no_mode),
)


def check_losses(rank: int, world: int, group: Group) -> None:
    """Whatever a model does with logits, results are as in one process, or an error."""
    torch.manual_seed(0)
    x, labels = torch.randn(2, 23, 8, dtype=torch.float64), torch.arange(46).view(2, 23)
    labels[:, :3] = -100
    one = Head(hooked).double()
    for loss in LOSSES:
        one.loss, results = loss, []
        tiled = copy.deepcopy(one)
        spar.parallelize(tiled, group, blocks=["layers.*"], tile=4)
        for model in (one, tiled):
            model.zero_grad()
            out = model(x, labels)
            out.backward()
            results.append([out.detach(), *gradients(model, group)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, equal_nan=True, msg=loss.__name__)
    for loss in (frozen_since, input_changed):
        tiled.loss = loss
        with pytest.raises(RuntimeError, match="what it reads was changed, replaced or frozen"):
            tiled(x, labels)
    tiled.loss = kept
    tiled(x, labels)
    whole = one.head(one.norm(one.layers[0](x))).detach()
    own = spar.SequenceLayout.even(23, group).shard(whole, 1)
    for logits in (tiled.head.newest, tiled.head.all[0]["logits"]):
        torch.testing.assert_close(logits.detach(), own)
    tiled.loss = lambda head, x, labels: of_mean(head.requires_grad_()(x).double(), labels)
    gc.collect()
    gc.disable()
    hidden = []
    tiled.norm.register_forward_hook(lambda *given: hidden.append(weakref.ref(given[2])))
    tiled(x, labels)
    gc.enable()
    assert hidden[0]() is None


def test_uses_of_logits(pool: Ranks) -> None:
    pool(2, check_losses)


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x)


def check_checkpointed_loss(rank: int, world: int, group: Group) -> None:
    """A checkpoint around head and loss runs the head once for each tile in forward, and once in backward."""

    def loss(head: nn.Module, x: Tensor, labels: Tensor) -> Any:
        return checkpoint(lambda x: of_mean(head(x), labels), x, use_reentrant=False)

    torch.manual_seed(0)
    model = Head(loss)
    model.head = Counted(8, VOCABULARY)
    spar.parallelize(model, group, blocks=["layers.*"], tile=2)
    x, labels = torch.randn(2, 23, 8), torch.arange(46).view(2, 23)
    model(x, labels).backward()  # finds what runs on tiles
    Counted.calls = 0
    model(x, labels).backward()
    assert Counted.calls == 2 * (1 + 6)  # without tokens, and 6 tiles


def test_checkpoint_around_the_loss(pool: Ranks) -> None:
    pool(2, check_checkpointed_loss)


class Layer(nn.Module):
    """A layer whose parts must not run on tiles, each for another reason, but for one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        inner: dict[str, nn.Module] = {
            "borrows": Borrows(self.scale),
            "fits": nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)),
            "counts": Counts(),
            "keeps": Keeps(),
            "collects": Collects(),
            "normalizes": Normalizes(),
            "by_mode": ByMode(),
            "appends": Appends(),
            "by_length": ByLength(),
            "adds": Adds(),
            "drops": nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Dropout(0.5), nn.Linear(32, 8)),
            "is_hooked": nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)),
        }
        self.inner = nn.ModuleDict(inner)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner.values():
            given: dict[str, Tensor] = {}
            x = x + (module(x, given) if isinstance(module, Collects) else module(x))
            x = x + given.get("kept", 0)
        return x + x.cumsum(1) / x.size(1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).sigmoid() * self.up(x))
        return out


class Borrows(Mlp):
    """Reads a parameter of another module."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scales = [scale]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[0]


class Counts(Mlp):
    """Changes a buffer in place."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class Keeps(Mlp):
    """Keeps an activation for later."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class Collects(Mlp):
    """Writes an activation to a dict that it is given."""

    def forward(self, x: Tensor, given: dict[str, Tensor] | None = None) -> Tensor:
        assert given is not None
        given["kept"] = super().forward(x)
        return given["kept"] * 2


class Normalizes(Mlp):
    """Writes a buffer by out=."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        F.normalize(self.seen + torch.arange(8, dtype=x.dtype), dim=0, out=self.seen)
        return super().forward(x * self.seen)


class ByMode(Mlp):
    """Reads its mode and a buffer, which both change before backward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale * (2 if self.training else 1))


class Appends(Mlp):
    """Has a list, which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x) * self.calls[0]


class ByLength(Mlp):
    """Has positions, and reads the length."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.size(1), dtype=x.dtype)[:, None] / x.size(1)
        return super().forward(x + place)


class Shares(Mlp):
    """Returns its argument, too."""

    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x.clone())


class Adds(nn.Module):
    """Changes its argument by the name under which a module returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shares()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        same, y = self.inner(x)
        same += y
        return x + x.cumsum(1) / x.size(1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.norm = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Scaled(Mlp):
    """Divides by the length: that of the sequence, also on a tile; may add noise."""

    is_noisy = False

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(8, dtype=x.dtype) if self.is_noisy else 0
        return super().forward(x / x.size(1) + noise)


def check_modules(rank: int, world: int, group: Group) -> None:
    """What mixes tokens, counts, keeps, draws or is hooked runs at once; all else as in one process."""
    torch.manual_seed(0)
    one = Stack().double()
    tiled, x = copy.deepcopy(one), torch.randn(2, 23, 8, dtype=torch.float64)
    seen: list[tuple[int, ...]] = []
    tiled.layers[0].inner["is_hooked"][1].register_forward_hook(lambda *given: seen.append(given[2].shape))
    report = spar.parallelize(tiled, group, blocks=["layers.*"], tile=4)
    for _ in range(2):
        results = []
        for model in (one, tiled):
            torch.manual_seed(1)
            loss = model(x).square().mean()
            model.zero_grad()
            by_mode = model.eval().layers[0].inner["by_mode"]
            by_mode.scale = by_mode.scale * 3
            loss.backward()
            model.train()
            results.append([loss.detach(), *gradients(model, group), model.layers[0].inner["counts"].seen])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert seen == 2 * [(2, 23, 32)]
    assert sorted(each.module for each in report.tiled) == ["ByMode", "Scaled", "Sequential"], report
    reasons = {each.module: each.reason.split(" at ")[0] for each in report.untiled}
    assert reasons == {
        "Borrows": "reads a weight or an activation that is neither its own nor an argument",
        "Counts": "changes an argument, parameter or buffer in place",
        "Normalizes": "changes an argument, parameter or buffer in place",
        "Keeps": "changes its attribute kept",
        "Appends": "changes its attribute calls",
        "ByLength": "mixes tokens",
        "Adds": "has cumsum",
        "Shares": "returns tensors that share memory with an argument or each other",
        "Sequential": "has random numbers",
    }
    second = Stack()
    second.layers[0].inner["is_hooked"][1] = tiled.layers[0].inner["is_hooked"][1]
    spar.parallelize(second, group, blocks=["layers.*"], tile=4)  # models may share an activation
    with pytest.raises(RuntimeError, match="ran by tiles, whose gradients cannot"):
        tiled(x).sum().backward(create_graph=True)
    tiled.norm.is_noisy = True
    with pytest.raises(RuntimeError, match="draws random numbers, which it did not in its first run"):
        tiled(x)
    spar.unparallelize(tiled)
    assert "forward" not in vars(tiled.norm)
    for tile in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"tile is {tile}; expected the tokens of a tile"):
            spar.parallelize(tiled, group, blocks=["layers.*"], tile=tile)


def test_which_modules_run_on_tiles(pool: Ranks) -> None:
    pool(2, check_modules)
