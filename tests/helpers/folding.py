# SPDX-License-Identifier: Apache-2.0
"""Folding models: ESMFold and its trunk, and small blocks like those of Boltz and OpenFold."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

S, C, HEADS, MSA, ROWS = 32, 16, 4, 8, 12  # the widths of s, z and m [B, ROWS, N, MSA]; heads of pairs


# ---- blocks like Boltz's: einsum, and attention with scores ----


class Product(nn.Module):
    """Triangle multiplication: outgoing edges, or incoming ones."""

    def __init__(self, outgoing: bool, by_einsum: bool) -> None:
        super().__init__()
        self.outgoing, self.by_einsum = outgoing, by_einsum
        self.norm, self.norm_out = nn.LayerNorm(C), nn.LayerNorm(C)
        self.p, self.g = nn.Linear(C, 2 * C), nn.Linear(C, 2 * C)
        self.out, self.gate = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        z = self.norm(z)
        x = self.p(z) * self.g(z).sigmoid() * mask[..., None]
        a, b = x.chunk(2, dim=-1)
        if self.by_einsum:
            x = torch.einsum("bikd,bjkd->bijd" if self.outgoing else "bkid,bkjd->bijd", a, b)
        else:
            a, b = (y.permute(0, 3, 1, 2) for y in (a, b))
            x = (a @ b.mT if self.outgoing else a.mT @ b).permute(0, 2, 3, 1)
        return self.out(self.norm_out(x)) * self.gate(z).sigmoid()


class TriangleAttention(nn.Module):
    """Attention within rows, around the starting node, or within columns, around the ending one."""

    def __init__(self, starting: bool, by_sdpa: bool) -> None:
        super().__init__()
        self.starting, self.by_sdpa = starting, by_sdpa
        self.norm, self.bias = nn.LayerNorm(C), nn.Linear(C, HEADS, bias=False)
        self.qkv, self.gate, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        if not self.starting:
            z, mask = z.transpose(1, 2), mask.transpose(1, 2)
        z = self.norm(z)
        bias = self.bias(z).permute(0, 3, 1, 2)[:, None]  # [B, 1, H, N, N]
        of_mask = (1e9 * (mask - 1))[:, :, None, None]  # [B, N, 1, 1, N]
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(2, 3) for x in self.qkv(z).chunk(3, -1))
        if self.by_sdpa:
            x = F.scaled_dot_product_attention(q, k, v, bias + of_mask)
        else:
            scores = (q / 2) @ k.mT
            scores += of_mask
            scores += bias
            x = scores.softmax(-1) @ v
        x = self.out(x.transpose(2, 3).flatten(-2) * self.gate(z).sigmoid())
        return x if self.starting else x.transpose(1, 2)


class PairBias(nn.Module):
    """Attention of s with a bias of z."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(S), nn.Linear(S, 3 * S), nn.Linear(S, S)
        self.bias = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, HEADS))

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in self.qkv(self.norm(s)).chunk(3, -1))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 3 + self.bias(z).permute(0, 3, 1, 2)
        weights = (scores + (1e9 * (mask - 1))[:, None, None]).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))


def transition(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
    )


def drop(z: Tensor, p: float, training: bool, columns: bool = False) -> Tensor:
    """Drop whole rows or columns, as Boltz does."""
    if not training or not p:
        return z
    kept = torch.rand_like(z[:, 0:1, :, 0:1] if columns else z[:, :, 0:1, 0:1]) > p
    return z * kept / (1 - p)


class Pairformer(nn.Module):
    """A block of AlphaFold 3's kind, as Boltz writes it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.mul_out, self.mul_in = Product(True, True), Product(False, True)
        self.att_start, self.att_end = TriangleAttention(True, False), TriangleAttention(False, False)
        self.attention, self.over_z, self.over_s = PairBias(), transition(C), transition(S)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        def dropped(x: Tensor, columns: bool = False) -> Tensor:
            return drop(x, self.dropout, self.training, columns)

        z = z + dropped(self.mul_out(z, pair_mask))
        z = z + dropped(self.mul_in(z, pair_mask))
        z = z + dropped(self.att_start(z, pair_mask))
        z = z + dropped(self.att_end(z, pair_mask), columns=True)
        z = z + self.over_z(z)
        s = s + self.attention(s, z, mask)
        return s + self.over_s(s), z


# ---- blocks like OpenFold's: matmul, sdpa, and an outer product mean ----


class OuterProductMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ab, self.out = nn.LayerNorm(MSA), nn.Linear(MSA, 8), nn.Linear(16, C)

    def forward(self, m: Tensor, msa_mask: Tensor) -> Tensor:
        a, b = (self.ab(self.norm(m)) * msa_mask[..., None]).chunk(2, -1)
        outer = torch.einsum("...bac,...dae->...bdce", a.transpose(-2, -3), b.transpose(-2, -3))
        count = torch.einsum("...abc,...adc->...bdc", msa_mask[..., None], msa_mask[..., None])
        return self.out(outer.flatten(-2)) / (count + 1e-3)


class Evoformer(nn.Module):
    """A block of AlphaFold 2's kind, as OpenFold writes it; its MSA has one attention, along rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.over_m = nn.LayerNorm(MSA), nn.Linear(MSA, 3 * MSA), nn.Linear(MSA, MSA)
        self.bias, self.outer = nn.Linear(C, HEADS), OuterProductMean()
        self.mul_out, self.mul_in = Product(True, False), Product(False, False)
        self.att_start, self.att_end = TriangleAttention(True, True), TriangleAttention(False, True)
        self.over_z = transition(C)

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(2, 3) for x in self.qkv(self.norm(m)).chunk(3, -1))
        bias = self.bias(z).permute(0, 3, 1, 2)[:, None] + (1e9 * (msa_mask - 1))[:, :, None, None]
        m = m + F.scaled_dot_product_attention(q, k, v, bias).transpose(2, 3).flatten(-2)
        m = m + self.over_m(m).relu()
        z = z + self.outer(m, msa_mask)
        z = z + self.mul_out(z, pair_mask)
        z = z + self.mul_in(z, pair_mask)
        z = z + self.att_start(z, pair_mask)
        z = z + self.att_end(z, pair_mask)
        return m, z + self.over_z(z)


# ---- whole models ----


class Trunk(nn.Module):
    """Two blocks of a kind: "esmfold", "pairformer" or "evoformer"."""

    def __init__(self, kind: str, dropout: float = 0.0, chunk: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.options = kind, {}
        if kind == "esmfold":
            self.options = {"chunk_size": chunk}
        self.blocks = nn.ModuleList([self._block(dropout) for _ in range(2)])
        self.double()
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def _block(self, dropout: float) -> nn.Module:
        if self.kind == "pairformer":
            return Pairformer(dropout)
        if self.kind == "evoformer":
            return Evoformer()
        from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

        widths = {"sequence_state_dim": S, "pairwise_state_dim": C}
        widths |= {"sequence_head_width": 8, "pairwise_head_width": HEADS}
        return EsmFoldTriangularSelfAttentionBlock(SimpleNamespace(**widths, dropout=dropout))

    def forward(self, s: Tensor, z: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            s, z = block(s, z, *masks, **self.options)
        return s, z


def inputs(kind: str, length: int) -> list[Tensor]:
    """Return s or m, z, and their masks, where the last two tokens are no residues."""
    generator = torch.Generator().manual_seed(1)
    first = (1, ROWS, length, MSA) if kind == "evoformer" else (1, length, S)
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (first, (1, length, length, C))
    ]
    mask = torch.ones(1, length, dtype=torch.float64)
    mask[0, -2:] = 0
    if kind == "esmfold":
        return [*drawn, mask]
    of_first = mask if kind == "pairformer" else mask[:, None].repeat(1, ROWS, 1)
    return [*drawn, of_first, mask[:, :, None] * mask[:, None]]


def esmfold(chunk: int | None) -> nn.Module:
    """Return an EsmForProteinFolding with a language model, two blocks and one recycling."""
    from transformers import EsmConfig, EsmForProteinFolding

    words = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"
    structure = {"sequence_dim": 24, "pairwise_dim": 8, "ipa_dim": 8, "resnet_dim": 16, "num_heads_ipa": 3}
    trunk = {"num_blocks": 2, "sequence_state_dim": S, "pairwise_state_dim": C, "sequence_head_width": 8}
    trunk |= {"pairwise_head_width": HEADS, "max_recycles": 1, "chunk_size": chunk}
    trunk |= {"structure_module": structure | {"num_blocks": 2, "dropout_rate": 0.0}}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = EsmConfig(
        **sizes,
        vocab_list=words.split(),
        vocab_size=33,
        pad_token_id=1,
        mask_token_id=32,
        position_embedding_type="rotary",
        is_folding_model=True,
        esmfold_config={"fp16_esm": False, "trunk": trunk, "lddt_head_hid_dim": 16},
    )
    torch.manual_seed(0)
    model = EsmForProteinFolding(config).double().eval()
    for p in model.trunk.parameters():
        nn.init.normal_(p, std=0.2)
    return model
