# SPDX-License-Identifier: Apache-2.0
"""What a rank needs in a training step: parameters under FSDP2, activations, logits, exchanges.

Parameters are float32, sharded by FSDP2, and the model computes in the layer's dtype.
`tests/models/test_plan_memory.py` compares the activations with those of real steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..._attention.grid import fewest_bytes_2d
from .config import Model
from .layer import HYBRID, Layer
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
    """

    name: str
    state: int
    gathered: int
    embeddings: int
    exchanges: int
    kept: int
    layer: int
    logits: int

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
        return max(0, int(free / (self.peak - self.fixed) * tokens) // 1024 * 1024)


def uses(model: Model, layer: Layer, way: Way, shards: int) -> list[Use]:
    """Return the memory of the rank with the most tokens: without savings, with checkpoints, and tiles.

    Args:
        shards: the ranks over which FSDP2 shards the parameters.
    """
    item, tokens = layer.dtype.itemsize, layer.batch * way.tokens
    hidden, wide = model.hidden, model.intermediate
    # As float32, normed, and times the weight, in each norm.
    norm = tokens * (hidden * (4 + 2 * item) + 4)
    saved = 2 * norm + _attention(model, layer, way) + 4 * item * tokens * wide
    gradients = item * tokens * (2 * wide + hidden)
    logits = tokens * model.vocabulary * 3 * 4
    queries = tokens * (model.heads + 2 * model.key_heads) * model.width * item

    def use(name: str, checkpoints: bool, tiles: bool) -> Use:
        kept = item * tokens * hidden if checkpoints else saved
        return Use(
            name,
            state=16 * model.parameters // shards,
            gathered=item * (model.outside + model.of_head) + (3 * item + 4) * model.of_layer,
            embeddings=layer.batch * layer.tokens * hidden * item,
            exchanges=SLOT + queries,
            kept=model.layers * kept + norm,
            layer=gradients + (saved if checkpoints else 0),
            logits=TILES + tokens * hidden * (4 + item) if tiles else logits,
        )

    return [
        use("nothing more", False, False),
        use("checkpoints", True, False),
        use("and tiles of logits", True, True),
    ]


def _attention(model: Model, layer: Layer, way: Way) -> int:
    """Return the bytes that the attention of a layer keeps: queries, keys, values, outputs, log-sum-exps."""
    tokens = layer.batch * way.tokens
    item, width = layer.dtype.itemsize, model.width
    queries, own = tokens * model.heads * width * item, 2 * tokens * model.key_heads * width * item
    # Ulysses holds more than a rank's own where ranks share key heads; alone, a rank exchanges none.
    more = max(own, way.held)
    keys = {"gather": own + way.held, "ring": own, HYBRID: own}.get(way.method, more)
    normed = tokens * (model.heads + model.key_heads) * width * (4 + item) if model.normed else 0
    if way.method == "2d":
        # A rank attends with all heads of its row's queries, and merges results of the row.
        _, columns = fewest_bytes_2d(model.heads, model.key_heads, layer.ranks)
        results = (2 * columns + 2) * queries + (2 * columns + 1) * 4 * tokens * model.heads
        return results + keys + normed
    outputs = queries * (1 if way.method in ("gather", "ring") else 2)  # before the exchange and behind it
    return queries + keys + outputs + 4 * tokens * model.heads + normed
