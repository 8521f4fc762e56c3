# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder, and its parameters: of matrices, as norms and biases are less than a hundredth."""

from __future__ import annotations

from dataclasses import dataclass

from .decoders import Decoder


@dataclass(frozen=True)
class Experts:
    """Of the layers that have them.

    Attributes:
        layers: how many do.
        count, chosen: experts of a layer, and those that a token is sent to.
        width: of an expert.
        shared: width of what computes every token beside them; 0: none does.
    """

    layers: int
    count: int
    chosen: int
    width: int
    shared: int


@dataclass(frozen=True)
class Latent:
    """Latent attention.

    Attributes:
        queries, keys: widths of the latents; queries of 0 are none.
        rotated: width of the part of a head's keys that all heads share.
    """

    queries: int
    keys: int
    rotated: int


@dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
        decoder: what its layers are made of.
        layers, hidden, heads, key_heads, width, value_width: as in `Layer`.
        intermediate: width of the MLP in layers without experts.
        vocabulary: tokens.
        tied: whether the head is the embedding.
        capped: whether a tanh caps the logits.
        is_part: whether the config has other models, which are not counted.
    """

    decoder: Decoder
    layers: int
    hidden: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    intermediate: int
    vocabulary: int
    tied: bool
    capped: bool
    is_part: bool
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def sparse(self) -> int:
        """Layers with experts."""
        return self.experts.layers if self.experts else 0

    @property
    def of_layer(self) -> int:
        """Parameters of the largest layer."""
        return self._of_attention + (self._of_experts or self._of_mlp)

    @property
    def of_head(self) -> int:
        """Parameters of the head, or of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters of the embedding and, if it is another one, of the head."""
        return self.of_head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        mlps = (self.layers - self.sparse) * self._of_mlp + self.sparse * self._of_experts
        return self.layers * self._of_attention + mlps + self.outside

    @property
    def _of_attention(self) -> int:
        queries, keys = self.heads * self.width, self.key_heads * self.width
        values, outputs = self.key_heads * self.value_width, self.heads * self.value_width
        latent = self.latent
        if latent is None:
            return self.hidden * (queries + keys + values + outputs)
        of_queries = latent.queries * (self.hidden + queries) if latent.queries else self.hidden * queries
        of_keys = self.hidden * (latent.keys + latent.rotated)
        of_keys += latent.keys * (keys - self.key_heads * latent.rotated + values)
        return of_queries + of_keys + self.hidden * outputs

    @property
    def _of_mlp(self) -> int:
        return self.decoder.matrices * self.intermediate * self.hidden

    @property
    def _of_experts(self) -> int:
        """Parameters of experts, of what is beside them, and of the router."""
        experts = self.experts
        if experts is None:
            return 0
        columns = experts.count * experts.width + experts.shared
        return (self.decoder.matrices * columns + experts.count) * self.hidden
