# SPDX-License-Identifier: Apache-2.0
"""Expressions of torch, and random programs of them, run on whole tensors and on parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spar._group.registry import place_of
from spar._view import rules  # noqa: F401 - registers them
from spar._view.outside import intercepted
from spar._view.part import Part, Parts
from spar._view.view import View

B, N, D = 2, 12, 6

# What a tensor [B, N, D] is on the ranks: the dim, the lengths of its sequences, and what is around the tokens.
PARTS: dict[str, tuple[int, tuple[int, ...], int, int] | None] = {
    "tokens": (1, (12,), 1, 1),
    "joint": (1, (5, 7), 1, 1),
    "three": (1, (4, 1, 7), 1, 1),
    "samples": (0, (2,), 1, 1),
    "features": (2, (6,), 1, 1),
    "frames": (1, (4,), 3, 1),
    "inner": (1, (6,), 1, 2),
    "whole": None,
}
PAIRS = [
    ("tokens", "tokens"),
    ("tokens", "whole"),
    ("joint", "joint"),
    ("joint", "tokens"),
    ("whole", "three"),
    ("samples", "tokens"),
    ("frames", "frames"),
    ("inner", "whole"),
    ("features", "tokens"),
]


class Inputs:
    """x, y [B, N, D], w [D, D], b [D], ids [B, N], mask [B, N] and index [3]: the same on all ranks."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x, self.y, self.w, self.b = draw(B, N, D), draw(B, N, D), draw(D, D), draw(D)
        self.ids = torch.randint(D, (B, N), generator=generator)
        self.mask = torch.rand(B, N, generator=generator) > 0.3
        self.mask[:, 0] = True

    def leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in (self.x, self.y, self.w, self.b)]


Function = Callable[..., Any]


def compare(
    group: dist.ProcessGroup, function: Function, pair: tuple[str, str], inputs: Inputs, limit: float = 1e-10
) -> str | None:
    """Run a function of (x, y, w, b, ids, mask) on whole tensors and on parts; return what differs, or None."""
    whole = inputs.leaves()
    torch.manual_seed(1)
    expected = _tensors(function(*[_fresh(t) for t in whole[:2]], *whole[2:], inputs.ids, inputs.mask))
    place = place_of(group)
    view = View(Parts(group, place.world, place.rank))
    mine = inputs.leaves()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [_part(view.parts, name) for name in pair]
        shards = [_fresh(t) if p is None else view.shard(_fresh(t), p) for t, p in zip(mine, parts)]
        ids, mask = inputs.ids, inputs.mask
        if parts[0] is not None and parts[0].dim < 2:
            ids, mask = (view.shard(t, parts[0]) for t in (ids, mask))
        with intercepted(), view.forward():
            out = function(*shards, *mine[2:], ids, mask)
        found = _tensors(view.gather(out))
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
        of_dtype = limit if b.dtype == torch.float64 else 1e-5
        if not torch.allclose(a.double(), b.double(), of_dtype, of_dtype, equal_nan=True):
            return f"result {i} differs by {(a.double() - b.double()).abs().max()}"
    return _gradients(group, found, expected, mine, whole, limit)


def _gradients(
    group: dist.ProcessGroup,
    found: list[Tensor],
    expected: list[Tensor],
    mine: list[Tensor],
    whole: list[Tensor],
    limit: float,
) -> str | None:
    both = [(a, b) for a, b in zip(found, expected) if b.requires_grad]
    if not both:
        return None
    generator = torch.Generator().manual_seed(5)
    uppers = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for _, b in both]
    right = torch.autograd.grad([b for _, b in both], whole, uppers, allow_unused=True, materialize_grads=True)
    if not all(a.requires_grad for a, _ in both):
        return "a result has lost its gradient"
    own = torch.autograd.grad([a for a, _ in both], mine, uppers, allow_unused=True, materialize_grads=True)
    for name, a, b in zip("xywb", own, right):
        dist.all_reduce(a, group=group)
        a = a / group.size()
        single = any(t.dtype == torch.float32 for t in expected)
        if not torch.allclose(a, b, 1e-6 if single else limit, 1e-6 if single else limit, equal_nan=True):
            return f"the gradient of {name} differs by {(a - b).abs().max()}"
    return None


def _fresh(x: Tensor) -> Tensor:
    return x * 1


def _part(parts: Parts, name: str) -> Part | None:
    values = PARTS[name]
    return None if values is None else parts.part(*values)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [torch.tensor(float(value), dtype=torch.float64)]


# ---- expressions, one for each way of calling each rule ----

EXPRESSIONS = """
x + y; x * 2 - y / 3; 1 / (x.square() + 1); x.pow(2) + y ** 2; x @ w; x + b; x * y[:, :1]; x * y[..., :1]
torch.where(x > 0, x, y); torch.maximum(x, y); x.clamp(-1, 1); torch.lerp(x, y, 0.3); x.masked_fill(mask[..., None], 2.0)
torch.addcmul(x, x, y); x.lt(y).to(x.dtype); x.to(torch.float32); x.type_as(ids) + ids[..., None]; (x > y) & (x < 1)
x.relu_(); x.mul_(y); x.add_(1).sigmoid(); x.clone().masked_fill_(mask[..., None], 0.5); x.copy_(y) + x; -x; abs(x)
torch.complex(x, y).abs(); torch.view_as_complex(x.unflatten(-1, (3, 2))).real; torch.view_as_real(torch.polar(x.abs(), y))
F.silu(x) + F.gelu(y, approximate="tanh"); F.softplus(x); F.relu(x, inplace=False); x.detach().float().half().double()
torch.ones_like(x) + x; torch.zeros_like(y, dtype=torch.float64) + x; x.new_zeros(x.shape) + x; x.new_ones(3) * x[:, :, :3]
x.shape[1] * x; x.size(1) * y; len(x) * x; x.numel() * x; x.dim() * x; torch.arange(x.shape[1])[:, None] * x
torch.full((x.size(0), x.size(1), 1), 2.0, dtype=x.dtype) * x; torch.zeros(x.shape, dtype=x.dtype) + y
x.view(2, 12, 3, 2); x.view(2, -1, 2); x.reshape(24, 6); x.reshape(2, 3, 4, 6); x.reshape(2, 72); x.flatten(0, 1)
x.flatten(1); x.flatten(); x.unflatten(1, (3, 4)); x.unflatten(2, (2, -1)); x.view(2, 12, 6); x.reshape(-1); x.view(4, 36)
x.view_as(y) + y; x.reshape_as(y); torch.ravel(x); x.unflatten(1, (4, 3)).transpose(1, 2).reshape(2, 12, 6)
x.transpose(1, 2); x.permute(2, 0, 1); x.movedim(1, 0); x.swapaxes(0, -1); x.mT; x[0].T; x[0].t(); x.permute(dims=(0, 2, 1))
x.unsqueeze(1); x.unsqueeze(-1); x[:, None]; x[..., None, :]; x.unsqueeze(2).squeeze(2); x[:1].squeeze(); x.squeeze()
x.expand(3, 2, 12, 6); x[:, :, :1].expand(-1, -1, 5); x[:, :, :1].expand_as(y); x.repeat(1, 1, 2); x.repeat(2, 1, 1); x.repeat(1, 2, 1)
x.tile(2); x.repeat_interleave(2, dim=1); x.repeat_interleave(2, 2); x.repeat_interleave(3, 0); torch.broadcast_to(x, (2, 2, 12, 6))
x.chunk(2, -1); x.chunk(3, dim=1); x.split(5, 1); x.split([5, 7], 1); x.split([4, 1, 7], dim=1); x.split(2, 2); x.unbind(-1); x.unbind(0)
torch.split(x, [2, 4], dim=-1); x.tensor_split(3, dim=1); x.unbind(1)[3]; x.chunk(2)[1]; torch.chunk(x, chunks=2, dim=2)
x.narrow(1, 0, 5); x.narrow(1, 5, 7); x.narrow(2, 1, 3); x.select(2, 1); x.select(1, 4); x.narrow(1, 3, 2)
x[0]; x[:, 0]; x[..., 0]; x[:, -1]; x[:, :5]; x[:, 5:]; x[:, 5:12]; x[:, 4:5]; x[:, 1:]; x[:, ::2]; x[:, :, ::2]; x[:, :, 1:-1]
x[..., :3] * x[..., 3:]; x[:, [1, 2]]; x[mask]; x[:, mask[0]]; x[ids > 2]; x[torch.arange(2), ids[:, 0]]; x[..., None]; x[:, :0]
x[None, :, 5:]; x[:, 5:][:, :3]; x[-1:]; x[1, 5:, 2]; x[:, :, 2].unsqueeze(-1); x.index_select(1, ids[0]); x[slice(None), slice(0, 5)]
torch.cat([x, y], 1); torch.cat([x, y], -1); torch.cat([x, y]); torch.cat([x[:, :2], x], 1); torch.stack([x, y]); torch.stack([x, y], 2)
torch.cat([y, x, y], dim=1)[:, 12:24]; torch.cat([x, x[..., :1]], 2); torch.stack([x, y], -1).flatten(-2); torch.hstack([x, y]); torch.vstack((x, y))
torch.cat((x, b.expand(2, 3, 6)), 1); torch.cat([b.expand(2, 3, 6), x], 1) * 2; torch.concat([x, y], dim=2); torch.stack([x[..., 0], x[..., 1]], 1)
F.linear(x, w); F.linear(x, w, b); F.linear(x.transpose(1, 2), torch.ones(3, 12, dtype=x.dtype)); x.matmul(w.t()); w @ x.transpose(1, 2)
x @ y.transpose(1, 2); x.transpose(1, 2) @ y; torch.bmm(x, y.mT); x[0] @ w; torch.mm(x[0], y[1].t()); x @ b; x.mT @ x; x.unsqueeze(1) @ y.unsqueeze(1).mT
torch.einsum("bnd,de->bne", x, w); torch.einsum("bnd,bmd->bnm", x, y); torch.einsum("bnd,bne->bde", x, y); torch.einsum("bnd->bd", x)
torch.einsum("bnd,bnd->bn", x, y); torch.einsum("...d,de->...e", x, w); torch.einsum("b n d, d e -> b n e", x, w); torch.einsum("nd,nd->", x[0], y[0])
torch.softmax(x @ y.mT, -1) @ y; torch.baddbmm(torch.zeros(2, 12, 12, dtype=x.dtype), x, y.mT, beta=0, alpha=0.3)
F.layer_norm(x, (6,), b, b); F.layer_norm(x, (12, 6)); F.rms_norm(x, (6,), b); F.group_norm(x, 3); F.group_norm(x.transpose(1, 2), 2); F.instance_norm(x)
F.embedding(ids, w); F.embedding(ids, w) + x; F.one_hot(ids, 6) * x; F.normalize(x, dim=-1); F.normalize(x, dim=1); F.glu(x); F.glu(x, 1)
F.conv1d(x.transpose(1, 2), w[:, :, None]); F.conv1d(x.transpose(1, 2), w[:, :, None].expand(6, 6, 3), padding=1); F.conv1d(x.mT, w[:, :2, None], groups=3)
F.conv2d(x.view(2, 3, 4, 6).permute(0, 3, 1, 2), w[:, :, None, None]); F.conv1d(x.transpose(1, 2), w[:, :, None], b, stride=2)
x.softmax(-1); x.softmax(1); F.log_softmax(x, dim=2); x.cumsum(-1); x.cumsum(1); x.sum(); x.sum(1); x.sum(-1); x.sum((0, 2)); x.sum(1, keepdim=True)
x.mean(); x.mean(1); x.mean(-1, keepdim=True); x.mean(dim=(1, 2)); x.float().mean(1); x.amax(-1); x.amax(1); x.max(); x.max(-1); x.max(1).values
x.min(2, keepdim=True).values; x.argmax(-1); x.argmax(1); x.var(-1); x.var(1); x.var(-1, True, True); x.std(2, keepdim=True); x.var(-1, unbiased=False)
x.norm(); x.norm(dim=-1); x.norm(2, -1, True); torch.linalg.vector_norm(x, dim=-1); torch.linalg.vector_norm(x, dim=1); x.prod(2); x.prod(1); x.logsumexp(-1)
x.any(-1); (x > 0).all(1); (x > 0).sum(1); x.topk(2)[0]; x.topk(2, 1)[0]; x.sort(-1)[0]; x.sort(1)[0]; x.argsort(); x.topk(3, dim=-1).indices; x.aminmax(dim=2)
mask.sum(1); mask.sum(); ids.float().mean(1); ids.sum(-1); (ids * mask).sum(); x.sum(dtype=torch.float32); x.nansum(1); x.count_nonzero(2)
F.pad(x, (1, 1)); F.pad(x, (0, 0, 1, 1)); F.pad(x, (0, 0, 0, 0, 1, 0)); x.roll(1, 2); x.roll(1, 1); x.roll(1); x.flip(-1); x.flip(1); x.flip((0, 2))
x.tril(); x.diff(dim=1); x.gather(2, ids[..., None]); x.gather(1, ids[..., None].expand(2, 12, 6)); x.scatter_add(2, ids[..., None], x[..., :1])
F.scaled_dot_product_attention(x, x, x); F.scaled_dot_product_attention(x, y, y); F.scaled_dot_product_attention(x, y[:, :5], y[:, :5])
F.scaled_dot_product_attention(H(x), H(y), H(y)); F.scaled_dot_product_attention(H(x), H(y), H(y), mask[:, None, None]); F.scaled_dot_product_attention(H(x), H(x), H(y))
F.scaled_dot_product_attention(H(x), H(x), H(x), is_causal=True); F.scaled_dot_product_attention(H(x), H(y), H(y), is_causal=True); F.scaled_dot_product_attention(x, x, x, is_causal=True)
F.scaled_dot_product_attention(H(x), H(y), H(y), (x @ y.mT)[:, None]); F.scaled_dot_product_attention(H(x), H(x), H(x), torch.ones(12, 12).tril().bool())
F.scaled_dot_product_attention(H(x), H(y), H(y), torch.ones(3, 12, 12, dtype=torch.bool).tril()); F.scaled_dot_product_attention(H(x), H(y), H(y), scale=0.3)
F.scaled_dot_product_attention(H(x), H(y), H(y), torch.ones(3, 1, 12, dtype=x.dtype) * b[:3, None, None]); F.scaled_dot_product_attention(H(x), H(y)[:, :1], H(y)[:, :1], enable_gqa=True)
F.scaled_dot_product_attention(H(x), H(b.expand(2, 4, 6)), H(b.expand(2, 4, 6))); F.scaled_dot_product_attention(H(b.expand(2, 4, 6)), H(x), H(x)); F.scaled_dot_product_attention(x, y, y, mask[:, None])
F.multi_head_attention_forward(x, x, x, 6, 2, torch.cat([w, w, w]), b.repeat(3), None, None, False, 0.0, w, b, need_weights=False)[0]
F.multi_head_attention_forward(x.transpose(0, 1), y.transpose(0, 1), y.transpose(0, 1), 6, 3, torch.cat([w, w, w]), b.repeat(3), None, None, False, 0.0, w, b, key_padding_mask=~mask)
F.cross_entropy(x.flatten(0, 1), ids.flatten()); F.cross_entropy(x.mT, ids); F.cross_entropy(x.mT, ids, reduction="sum"); F.cross_entropy(x.mT, ids, reduction="none")
F.cross_entropy(x.mT, ids, ignore_index=2); F.cross_entropy(x.mT, ids, b.detach().exp()); F.cross_entropy(x.mT, ids, label_smoothing=0.1); F.nll_loss(x.log_softmax(-1).mT, ids)
F.mse_loss(x, y); F.mse_loss(x, y, reduction="none"); F.l1_loss(x, y, reduction="sum"); F.smooth_l1_loss(x, y); F.huber_loss(x, y, delta=0.5); F.binary_cross_entropy_with_logits(x, y.sigmoid())
F.kl_div(x, y); F.cosine_similarity(x, y, dim=-1); F.interpolate(x, scale_factor=2); F.interpolate(x.mT, scale_factor=2); F.avg_pool1d(x, 2); F.max_pool1d(x.mT, 3)
F.dropout(x, 0.3); F.dropout(x, 0.0); F.dropout(x, 0.5, False); torch.rand_like(x) + x; torch.randn(x.shape, dtype=x.dtype) * x; torch.bernoulli(x.sigmoid().detach()) * x
x.item() if x.numel() == 1 else x; x.sum().item() * y; float(x.mean()) * x; x.tolist()[0][0][0] * y; bool((x > 0).any()) * x; torch.tensor(x[0, 0, 0].item()) * y
x.detach() * y; x.data + y; x.contiguous(); x.clone(); x.is_contiguous() * y; x.requires_grad * x; x.ndim * x; x.cpu() + y; x.double()
x.unfold(1, 3, 2); torch.cdist(x, y); torch.outer(x[0, :, 0], y[1, :, 0]); torch.meshgrid(x[0, :, 0], b)[0]; x.diagonal(dim1=1, dim2=2); torch.atleast_2d(x)
x.detach().unique(); torch.nonzero(x > 0); x.masked_select(mask[..., None]); torch.searchsorted(x.sort(-1)[0], y); torch.allclose(x, y) * x; torch.equal(x, x) * x
""".strip()

STATEMENTS = """
x[:, :5] = y[:, :5]; out = x
x[:, 5:] += 1; out = x
x[:, 5:] *= y[:, 5:]; out = x
x[..., :2] = 3; out = x
x[:, 2:4] = 0; out = x
x[:, [1, 2]] += 1; out = x
x[mask] = 0.5; out = x
x[0] = y[1]; out = x
x[:, :, 1] = x[:, :, 2]; out = x
x += y; out = x
x *= b; out = x
x -= x.mean(-1, keepdim=True); out = x
x.index_add_(1, ids[0], y); out = x
x.scatter_(2, ids[..., None], 1.0); out = x
z = x.view(2, 12, 3, 2); z[..., 0] = 1; out = x
z = x.transpose(1, 2); z.mul_(2); out = x
z = x[:, 5:]; z.add_(1); out = x.clone(), z
z = torch.empty_like(x); z[:, :5], z[:, 5:] = x[:, :5], y[:, 5:]; out = z
z = torch.zeros(x.shape, dtype=x.dtype); z[..., :3] = 1; out = z * x
a, c = x.chunk(2, dim=-1); out = a * c.sigmoid()
q, k, v = (t.unflatten(-1, (3, 2)).transpose(1, 2) for t in (x, y, x)); out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
h = torch.cat([b.expand(2, 4, 6), x], 1); h = F.linear(h, w); out = h[:, 4:], h[:, :4]
h = torch.cat([x, y], 1); a = F.scaled_dot_product_attention(H(h), H(h), H(h)); out = a[:, :, :12], a[:, :, 12:]
h = torch.cat([x, y], 1); q, k = H(h), H(y); out = F.scaled_dot_product_attention(q, k, k)
out = [t for t in x]
out = [row.sum() for row in x.unbind(0)]
c, s = y.cos(), y.sin(); out = x * c + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * s
out = torch.utils.checkpoint.checkpoint(lambda t: F.gelu(t @ w) + t, x, use_reentrant=False)
out = Double.apply(x) + y
out = scripted(x) * y
m = x.mean((1, 2), keepdim=True); v = x.var((1, 2), keepdim=True); out = (x - m) * torch.rsqrt(v + 1e-5)
out = torch.einsum("bhqd,bhkd->bhqk", H(x), H(y)).softmax(-1) @ H(y)
out = (H(x) @ H(y).transpose(-1, -2)).masked_fill(~mask[:, None, None], -1e9).softmax(-1) @ H(y)
k = F.elu(y) + 1; out = (F.elu(x) + 1) @ (k.mT @ y)
""".strip()


class Double(torch.autograd.Function):
    """A Function whose backward depends on the number of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = x.size(1)
        return x * 2 / x.size(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2 / grad.size(1)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * x.size(1)


def H(x: Tensor) -> Tensor:  # noqa: N802 - three heads
    return x.unflatten(-1, (3, 2)).transpose(1, 2)


def functions() -> dict[str, Function]:
    found: dict[str, Function] = {}
    for line in EXPRESSIONS.splitlines():
        for text in line.split("; "):
            found[text] = _compiled(f"out = {text}")
    for line in STATEMENTS.splitlines():
        found[line] = _compiled(line)
    return found


def _compiled(text: str) -> Function:
    code = compile(text, text, "exec")

    def run(x: Tensor, y: Tensor, w: Tensor, b: Tensor, ids: Tensor, mask: Tensor) -> Any:
        scope = {"x": x, "y": y, "w": w, "b": b, "ids": ids, "mask": mask, "torch": torch, "F": F, "H": H}
        scope |= {"Double": Double, "scripted": scripted}
        exec(code, scope)
        return scope["out"]

    return run


