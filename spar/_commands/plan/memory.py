# SPDX-License-Identifier: Apache-2.0
"""What a rank needs in a training step: parameters under FSDP2, activations, logits, exchanges.

Parameters are float32, sharded by FSDP2, and the model computes in the layer's dtype.
`tests/models/test_plan_memory.py` compares the activations with those of real steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..._attention.grid import fewest_bytes_2d
from .layer import HYBRID, Layer
from .model import Model
from .ways import Way

SLOT = 128 << 20  # bytes that a group keeps over push at first
TILES = 3 * (16 << 20)  # bytes of logits, and what is computed from them, in `token_logprobs`
USABLE = 0.9  # of a device's memory: the rest is CUDA's, NCCL's, and lost between blocks


@dataclass(frozen=True)
class Use:
    """The bytes of a rank's memory in a step, with some savings.

    Attributes:
        name: of the savings.
        state: parameters, gradients and two moments of Adam in float32, this rank's shards.
        gathered: what FSDP2 gathers in 16 bits: two layers, the embedding and the head, and their gradients.
        embeddings: of the whole sequence, before the first layer shards them.
        exchanges: slots, and the queries, keys and values that an exchange packs.
        kept: activations between forward and backward.
        layer: a layer in its backward: what a checkpoint computes again, and gradients.
        logits: this rank's log-softmax, its gradient and that of the logits, in float32; or tiles of them.
        tiled: what `logits` would be besides if one tile had all tokens; 0 without tiles.
    """

    name: str
    state: int
    gathered: int
    embeddings: int
    exchanges: int
    kept: int
    layer: int
    logits: int
    tiled: int

    @property
    def fixed(self) -> int:
        """What does not grow with the tokens."""
        return self.state + self.gathered + SLOT

    @property
    def peak(self) -> int:
        """The largest sum: a layer is in its backward after the logits are gone."""
        most = max(self.layer, self.logits)
        return self.state + self.gathered + self.embeddings + self.exchanges + self.kept + most

    def longest(self, tokens: int, device: float) -> int:
        """Return how many tokens fit into a device of so many bytes, in 1,024s, if `tokens` need the peak."""
        free = USABLE * device - self.fixed
        around = self.peak - self.fixed - max(self.layer, self.logits)
        rest = self.logits - min(self.tiled, TILES)  # the tiles' bytes grow until there are several
        of_logits = max(free / (around + rest + self.tiled), (free - TILES) / (around + rest))
        fits = min(free / (around + self.layer), of_logits)
        return max(0, int(fits * tokens) // 1024 * 1024)


def uses(model: Model, layer: Layer, way: Way, shards: int) -> list[Use]:
    """Return the memory of the rank with the most tokens: without savings, with checkpoints, and tiles.

    Args:
        shards: the ranks over which FSDP2 shards the parameters.
    """
    item, tokens = layer.dtype.itemsize, layer.batch * way.tokens
    hidden, decoder = model.hidden, model.decoder
    norm = 4 * decoder.floats + item * decoder.items
    around = tokens * hidden * (decoder.norms * norm + item * decoder.inputs)
    around += _attention(model, layer, way, norm)
    kinds = [(model.layers - model.sparse, _mlp(model, item)), (model.sparse, _experts(model, item))]
    kinds = [(count, cost) for count, cost in kinds if count]
    saved = sum(count * (around + tokens * cost.kept) for count, cost in kinds)
    gradients = max(tokens * cost.gradients for _, cost in kinds)
    again = max(around + tokens * (cost.kept + cost.gradients) for _, cost in kinds)
    logits = tokens * model.vocabulary * (3 * 4 + item * model.capped)
    exchanged = model.heads * model.width + model.key_heads * (model.width + model.value_width)

    def use(name: str, checkpoints: bool, tiles: bool) -> Use:
        kept = item * tokens * hidden * model.layers if checkpoints else saved
        return Use(
            name,
            state=16 * model.parameters // shards,
            gathered=item * (model.outside + model.of_head) + (3 * item + 4) * model.of_layer,
            embeddings=layer.batch * layer.tokens * hidden * item,
            exchanges=SLOT + tokens * exchanged * item,
            kept=kept + tokens * hidden * (norm + item),
            layer=again if checkpoints else gradients,
            logits=min(logits, TILES) + tokens * hidden * (4 + item) if tiles else logits,
            tiled=logits if tiles else 0,
        )

    return [
        use("nothing more", False, False),
        use("checkpoints", True, False),
        use("and tiles of logits", True, True),
    ]


class _Cost(NamedTuple):
    """Bytes of a token: kept until backward, and the gradients that live at once there."""

    kept: int
    gradients: int


def _mlp(model: Model, item: int) -> _Cost:
    wide = model.intermediate
    return _Cost(item * model.decoder.wide * wide, item * (wide + model.hidden))


def _experts(model: Model, item: int) -> _Cost:
    """Return the cost of experts, which compute a token once for each expert that it is sent to."""
    experts, hidden, decoder = model.experts, model.hidden, model.decoder
    if experts is None:
        return _Cost(0, 0)
    kept = experts.chosen * (decoder.wide * experts.width + 2 * hidden) + decoder.wide * experts.shared
    weighted = item + (8 if decoder.in_floats else item)
    return _Cost(item * kept, experts.chosen * hidden * weighted)


def _attention(model: Model, layer: Layer, way: Way, norm: int) -> int:
    """Return the bytes that the attention of a layer keeps: queries, keys, values, outputs, log-sum-exps.

    Args:
        norm: bytes that a norm keeps of an element.
    """
    tokens = layer.batch * way.tokens
    item, width = layer.dtype.itemsize, model.width
    queries, outputs = [tokens * model.heads * size * item for size in (width, model.value_width)]
    own = tokens * model.key_heads * (width + model.value_width) * item
    # Ulysses holds more than a rank's own where ranks share key heads; alone, a rank exchanges none.
    more = max(own, way.held)
    keys = {"gather": own + way.held, "ring": own, HYBRID: own}.get(way.method, more)
    if model.latent:
        normed = tokens * (model.latent.queries + model.latent.keys) * (norm + item)
    else:
        normed = tokens * (model.heads + model.key_heads) * width * norm * model.decoder.normed
    if way.method == "2d":
        # A rank attends with all heads of its row's queries, and merges results of the row.
        _, columns = fewest_bytes_2d(model.heads, model.key_heads, layer.ranks)
        results = queries + (2 * columns + 1) * outputs + (2 * columns + 1) * 4 * tokens * model.heads
        return results + keys + normed
    results = outputs * (1 if way.method in ("gather", "ring") else 2)  # before the exchange and behind it
    return queries + keys + results + 4 * tokens * model.heads + normed
