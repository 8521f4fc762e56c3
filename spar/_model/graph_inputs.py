# SPDX-License-Identifier: Apache-2.0
"""The inputs of a block's graph: hollow tensors while Dynamo traces, local ones where the code runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from .hollow import dense, dense_strides, is_hollow, local_of, order_of
from .leaves import Refused
from .part import Shard, part_of, shard_of
from .spans_mask import SpansMask
from .tracing import MaskShape


class GraphInputs:
    """The inputs of a graph: which are parts or masks, and what AOTAutograd traces it with.

    Attributes:
        identities: of the tensors with which Dynamo traced.
        shards: what each is; None if it is whole.
        fakes: of local shapes, for the trace.
        masks: those that are masks of spans.
    """

    def __init__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> None:
        self.identities: set[int] = set()
        self.shards: list[Shard | None] = []
        self.fakes: list[Any] = []
        self.masks: dict[int, MaskShape] = {}
        self._orders: dict[int, Any] = {}  # of parts: their dims in memory
        self._others: list[int] = []  # which are neither arguments that are parts, nor parameters
        fake_mode = detect_fake_mode(examples)
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for i, (node, example) in enumerate(zip(nodes, examples, strict=True)):
            real = getattr(node.meta.get("grapharg"), "example", None)
            if not isinstance(real, Tensor):
                raise Refused(f"it computes with {node.name}, of which a graph has no value")
            self.identities.add(id(real))
            if is_hollow(real):
                self._add_argument(i, local_of(real), fake_mode)
                continue
            if part_of(real) is not None:
                raise Refused(f"it reads {node.name}, a part, otherwise than by an argument")
            if type(real) not in (Tensor, nn.Parameter):
                raise Refused(f"it reads {node.name}, a {type(real).__name__}")
            self.shards.append(None)
            self.fakes.append(example)
            if not isinstance(real, nn.Parameter):
                self._others.append(i)

    def _add_argument(self, i: int, x: Any, fake_mode: Any) -> None:
        if isinstance(x, SpansMask):
            spans = x._elements.spans
            if spans is None or x.dtype != torch.bool:
                raise Refused("it gets a mask of floats, or one whose elements were changed")
            self.shards.append(None)
            self.masks[i] = MaskShape(spans, x.shape, x.device)
            self.fakes.append(fake_mode.from_tensor(spans.ends, static_shapes=True))
            return
        self.shards.append(shard_of(x))
        self._orders[i] = order = order_of(x)
        with fake_mode:
            fake = torch.empty_strided(
                x.shape, dense_strides(x.shape, order), dtype=x.dtype, device=x.device
            ).requires_grad_(x.requires_grad)
            if x.requires_grad:
                with torch.enable_grad():
                    fake = fake.clone()
        self.fakes.append(fake)

    def local(self, given: Any) -> list[Any]:
        """Return the local tensors of a call, in the place of hollow ones."""
        for i in self._others:
            if part_of(given[i]) is not None:
                raise Refused("it reads a part otherwise than by an argument")
        local = [*given]
        for i in self._orders:
            local[i] = local_of(given[i])
        for i in self.masks:
            local[i] = local_of(given[i])._elements.spans.ends
        return local

    def make_dense(self, local: list[Any]) -> None:
        """Let parts lie in memory as the code expects them."""
        for i, order in self._orders.items():
            local[i] = dense(local[i], order)
