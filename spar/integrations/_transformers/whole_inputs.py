# SPDX-License-Identifier: Apache-2.0
"""The arguments of a module that runs whole: what each one is for the whole sequence.

What an argument is follows from its name, and from numbers that all ranks know. What does not is an error
which names it: a size alone may be equal to the number of own tokens by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._attention.spans import Spans
from ..._exchange.arguments import Arguments
from ...sequence_layout import SequenceLayout
from .attention import registered
from .masks import longest_run
from .router import Routed
from .tokens import Carried

_OF_SHARD = ("layout", "method", "documents", "labels", "shift_labels")  # one process passes none of them
_POSITIONS = ("position_ids", "cache_position")  # [.., S_local]
_EMBEDDINGS = ("position_embeddings", "cos", "sin", "freqs")  # begin of the name: [.., S_local, D]
_TOKENS = (
    "hidden_states",
    "residual",
    "input_ids",
    "inputs_embeds",
    "token_type_ids",
)  # end: [B, S_local, ..]
_CAUSAL = (
    "attention_mask",
    "causal_mask",
    "causal",
    "attention",
)  # masks of attention; others are of padding
_MOST_EXCHANGES = 16


class Site(NamedTuple):
    """A module that runs whole.

    Attributes:
        path: in the model.
        names: of its forward's parameters.
        configs: of the layers in it, which say what attention they call.
        config: the model's, if it has attention.
        attention: that of the layers in it while it runs.
        has_attention: whether they call attention by its name.
        window: the shortest window of theirs.
        numbers: the ints of the model's config, to which a size may be equal by chance.
    """

    path: str
    names: tuple[str, ...]
    configs: tuple[Any, ...]
    config: Any
    attention: str
    has_attention: bool
    window: int | None
    numbers: frozenset[int]


class _Pending(NamedTuple):
    """The place of a tensor among those that are gathered."""

    place: int


class _Inputs:
    """The arguments of one call."""

    def __init__(self, site: Site, layout: SequenceLayout, call: Arguments, first: Tensor) -> None:
        self.site, self.layout, self.call, self.first = site, layout, call, first
        self.sizes, self.total = layout.sizes, layout.total
        self.local = self.sizes[call.rank]
        self.tensors: list[Tensor] = []
        self.dims: list[int] = []

    # ---- values ----

    def of(self, name: str, value: Any, root: str) -> Any:
        """Return a value for the whole sequence; tensors to be gathered are pending.

        name: in messages. root: that of the argument which has the value in it.
        """
        if isinstance(value, dict):
            return {key: self.of(f"{name}[{key!r}]", x, _root(root, key)) for key, x in value.items()}
        if isinstance(value, (tuple, list)):
            items = [self.of(f"{name}[{i}]", x, root) for i, x in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, (Spans, Routed, Carried)) or "mask" in root or root in _CAUSAL:
            return self.mask(name, value, root)
        if isinstance(value, Tensor):
            return self.tensor(name, value, root)
        if isinstance(value, int) and not isinstance(value, bool) and "len" in root:
            raise self.call.error(name, value, "none: it may be the number of own tokens, or of all")
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return value
        raise self.call.error(
            name,
            f"a {type(value).__name__}",
            "tensors, masks of shard or plain values, and no cache: use_cache=False, as shard passes",
        )

    def tensor(self, name: str, x: Tensor, root: str) -> Any:
        if x is self.first:
            if x.is_floating_point() and x.dim() < 3:
                raise self.unclear(name, x, "tokens of all samples may be in one dim")
            return self.gather(name, x, 1, "[B, S_local, ...]")
        if x.dim() == 0:
            return x
        if root in _POSITIONS:
            return self.gather(name, x, x.dim() - 1, "[..., S_local]")
        if root.startswith(_EMBEDDINGS):
            return self.gather(name, x, x.dim() - 2, "[..., S_local, D]")
        if root.endswith(_TOKENS):
            return self.gather(name, x, 1, "[B, S_local, ...]")
        batch = self.first.size(0)
        counts = {*self.sizes, self.total, *(batch * size for size in self.sizes)}
        if x.dim() > 1 and x.size(0) in (1, batch) and x.size(1) == self.local:
            if alike := self.site.numbers & set(self.sizes):
                raise self.unclear(name, x, f"the model's config has {min(alike)}, too")
            return self.gather(name, x, 1, "[B, S_local, ...]")
        if counts & set(x.shape):
            raise self.unclear(name, x, "only [B, S_local, ...] is known")
        return x

    def gather(self, name: str, x: Tensor, dim: int, expected: str) -> _Pending:
        if not 0 <= dim < x.dim() or x.size(dim) != self.local:
            raise self.call.error(
                name, f"of shape {list(x.shape)}", f"{expected}, and this rank has {self.local} tokens"
            )
        self.tensors.append(x)
        self.dims.append(dim)
        return _Pending(len(self.tensors) - 1)

    def unclear(self, name: str, x: Tensor, why: str) -> ValueError:
        return self.call.error(
            name,
            f"of shape {list(x.shape)}, and it is not clear whether this is a number of tokens: {why}",
            "other arguments, or a name that says it. Name a module around it in whole, which receives none",
        )

    # ---- masks ----

    def mask(self, name: str, mask: Any, root: str) -> Any:
        """Return a mask as one process passes it."""
        while isinstance(mask, (Routed, Carried)):
            mask = mask.mask
        if mask is None and root in _CAUSAL and self.site.has_attention:
            mask = self.causal(name)
        if mask is None:
            return None
        if isinstance(mask, Spans):
            return self.dense(mask)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return self.gather(name, mask, 1, "[B, S_local]")
        shape = list(mask.shape) if isinstance(mask, Tensor) else []
        if len(shape) == 4 and shape[2] in (1, self.total) and shape[3] == self.total:
            return mask
        value = f"of shape {shape}" if shape else f"a {type(mask).__name__}"
        expected = f"a mask of shard, [B, {self.local}] of padding, or [B, 1, {self.total}, {self.total}]"
        raise self.call.error(name, value, expected)

    def causal(self, name: str) -> Spans | None:
        """Return the mask of attention for which shard passes none."""
        window = self.site.window
        if window is not None and longest_run(self.layout) > window:
            raise self.call.error(name, "None", f"a mask, as there is a window of {window} tokens")
        if self.layout.is_packed:
            return _of_documents(self.layout.lengths)
        # only sdpa is causal without a mask
        return _of_documents((self.total,)) if self.attention() == "eager" else None

    def dense(self, spans: Spans) -> Tensor:
        """Return the booleans of a mask, or what eager attention adds to scores, [B, H, S, S]."""
        like, batch = self.first, self.first.size(0)
        dtype = like.dtype if self.attention() == "eager" else torch.bool

        def make() -> Tensor:
            allowed = spans.to(like.device).dense()
            if dtype == torch.bool:
                return allowed
            zeros = torch.zeros((), dtype=dtype, device=like.device)
            return torch.where(allowed, zeros, torch.finfo(dtype).min)

        mask: Tensor = spans.remember(("whole", dtype, str(like.device)), make)
        return mask.expand(batch, -1, -1, -1)

    def attention(self) -> str:
        """Return the attention of the layers in the module while it runs."""
        names = [config._attn_implementation for config in self.site.configs]
        others = [name for name in names if name not in registered]
        return self.site.attention if len(others) < len(names) or not others else str(others[0])

    # ---- the exchanges ----

    def finish(self, value: Any) -> Any:
        """Gather what is pending, tensors of one kind at once, and put it into its places.

        Positions have no gradient, and would have one if they were gathered with hidden states.
        """
        kinds = [
            (x.dtype, x.device, dim, x.requires_grad) for x, dim in zip(self.tensors, self.dims, strict=True)
        ]
        done: list[Tensor] = list(self.tensors)
        for kind in dict.fromkeys(kinds):
            at = [index for index, other in enumerate(kinds) if other == kind]
            parts = self.layout.all_gather([self.tensors[index].contiguous() for index in at], kind[2])
            for index, whole in zip(at, parts, strict=True):
                done[index] = whole
        return _filled(value, done)


def gathered(
    site: Site, layout: SequenceLayout, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module for the whole sequence. Collective over the layout's group.

    Raises:
        ValueError: it is not clear what an argument is.
    """
    passed = {name: value for name, value in kwargs.items() if name not in _OF_SHARD}
    names = [*site.names[: len(args)], *(f"args[{i}]" for i in range(len(site.names), len(args)))]
    values = zip((*names, *passed), (*args, *passed.values()), strict=True)
    tensors = [x for name, x in values if isinstance(x, Tensor) and x.dim() > 1 and not _is_beside(name)]
    first = tensors[0] if tensors else torch.zeros(1, device="cpu")
    with Arguments(
        f"whole {site.path}", first, layout.group, names[0] if names else "input", _MOST_EXCHANGES
    ) as call:
        if not tensors:
            raise call.error("its arguments", [*names, *passed], "a tensor [B, S_local, ...] among them")
        inputs = _Inputs(site, layout, call, first)
        positional = tuple([inputs.of(name, x, name) for name, x in zip(names, args, strict=True)])
        named = {name: inputs.of(name, x, name) for name, x in passed.items()}
        done: tuple[tuple[Any, ...], dict[str, Any]] = inputs.finish((positional, named))
        return done


def _is_beside(name: str) -> bool:
    """Whether an argument is beside the tokens: positions and masks."""
    return name in (*_POSITIONS, *_CAUSAL) or name.startswith(_EMBEDDINGS) or "mask" in name


def _root(root: str, key: Any) -> str:
    """Return by which name a value of a dict is known: masks of several kinds are in one."""
    if "mask" not in root:
        return str(key)
    of_padding = ("conv", "linear_attention", "mamba", "padding")
    return "padding_mask" if key in of_padding else "attention_mask"


def _filled(value: Any, done: list[Tensor]) -> Any:
    if isinstance(value, _Pending):
        return done[value.place]
    if isinstance(value, dict):
        return {key: _filled(x, done) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_filled(x, done) for x in value]
        return items if isinstance(value, list) else tuple(items)
    return value


@functools.lru_cache(maxsize=4)
def _of_documents(lengths: tuple[int, ...]) -> Spans:
    """Return the causal mask of packed documents: their layout has it, outside of the module."""
    counts = torch.tensor(lengths, device="cpu")
    ids = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), counts)
    return Spans.causal(len(ids)) & Spans.documents(ids)
