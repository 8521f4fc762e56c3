# SPDX-License-Identifier: Apache-2.0
"""Attention of a sharded model: a backend of diffusers' dispatcher, and a wrapper for joint processors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..._attention.attention import attention
from ..._group.registry import place_of
from ...sequence_layout import SequenceLayout
from .names import Names
from .sequences import Sequences

_counter = itertools.count()
Local = Callable[..., torch.Tensor]  # the model's own kernel, of q, k, v and a mask


class ShardedAttention:
    """What a model's attention needs to know: the group, the forward's sequences, the module's arguments."""

    def __init__(self, group: Any) -> None:
        self.place = place_of(group)
        self.sequences: Sequences | None = None  # of the forward that runs, or is recomputed
        self.text: int | None = None  # tokens that the current module received as encoder_hidden_states

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        local: Local,
        *,
        seq_dim: int,
        causal: bool,
        dropout_p: float,
        scale: float | None,
        own_kernel: bool,
    ) -> torch.Tensor:
        """Attend over the whole sequence with this rank's queries.

        Args:
            q, k, v: `[B, S_local, H, D]`, or with seq_dim 2 `[B, H, S_local, D]`.
            mask: a key mask of this rank's keys, or None.
            local: attends to this rank's k and v.
            own_kernel: whether `local` must also compute the whole; else torch's kernel does.
        """
        sequences = self.sequences
        if self.place.world == 1:
            return local(q, k, v, mask)
        if sequences is None:
            raise self.error(
                "neither in a forward of the model nor in a recompute of one whose output has a gradient",
                "a call of the model; disable(model) lets its parts run alone",
            )
        if not sequences.totals:
            return local(q, k, v, mask)  # before anything is sharded
        queries = self._layout(sequences, "queries", q.size(seq_dim))
        keys = queries
        if self.text is not None and queries.kind != "joint":
            if not sequences.text:
                return self._to_whole_text(q, k, v, mask, local, seq_dim)
            keys = self._layout(sequences, "keys", k.size(seq_dim))
        elif k.size(seq_dim) != q.size(seq_dim):
            raise self.error(
                f"{k.size(seq_dim)} keys and {q.size(seq_dim)} queries in a module without "
                "encoder_hidden_states",
                "as many keys as queries, this rank's tokens",
            )
        if own_kernel and (mask is not None or causal):
            raise self.error(
                "a mask or is_causal with another backend than native", 'set_attention_backend("native")'
            )
        if causal and (queries.kind == "joint" or self.text is not None):
            raise self.error("is_causal over two sequences", "one sequence, whose order is known")
        return attention(
            q,
            k,
            v,
            queries if keys is queries else (queries, keys),
            causal=causal,
            mask=None if mask is None else self._whole_mask(mask, k.size(seq_dim), keys),
            scale=None if own_kernel else scale,
            dropout_p=0.0 if own_kernel else dropout_p,
            attend=(lambda q, k, v: local(q, k, v, None)) if own_kernel else None,
            seq_dim=seq_dim,
            head_dim=3 - seq_dim,
        )

    def _to_whole_text(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        local: Local,
        seq_dim: int,
    ) -> torch.Tensor:
        """Attend to a text of which every rank has the whole: no exchange."""
        assert self.text is not None
        if k.size(seq_dim) > self.text:
            raise self.error(
                f"{k.size(seq_dim)} keys in a module with a text of {self.text} tokens, which is not sharded",
                "keys of the text only; shard encoder_hidden_states",
            )
        return local(q, k, v, mask)

    def _layout(self, sequences: Sequences, kind: str, size: int) -> SequenceLayout:
        layout = sequences.layout_of(size)
        if layout is None:
            raise self.error(
                f"{size} {kind}, which are no shard of the sequences that the plan shards ({sequences})",
                "the shard of one of them, or of two that are joined; shard every sequence that they contain",
            )
        return layout

    def _whole_mask(self, mask: torch.Tensor, size: int, keys: SequenceLayout) -> torch.Tensor:
        """Gather a mask of this rank's keys, [B, S_local] or [B or 1, H or 1, 1, S_local]."""
        if mask.size(-1) != size or not (mask.dim() == 2 or (mask.dim() == 4 and mask.size(2) == 1)):
            raise self.error(
                f"a mask of shape {list(mask.shape)}",
                f"one value for each of this rank's keys, [B, {size}] or [B, 1, 1, {size}]; shard the mask",
            )
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        whole: torch.Tensor = keys.gather(mask.contiguous(), 3)
        return whole

    def error(self, actual: str, expected: str) -> ValueError:
        place = self.place
        return ValueError(
            f"attention of a sharded model on rank {place.rank} of {place.world}: {actual}; "
            f"expected {expected}"
        )


def register_backend(names: Names, attention: ShardedAttention, inner: Any) -> Any:
    """Register a backend of diffusers' dispatcher that attends over the whole sequence; return its name.

    inner: the backend that a processor had: a name, or None for the active one.
    """
    registry = names.registry
    name = f"spar-{next(_counter)}"
    member = str.__new__(names.backend_name, name)  # the enum itself is not changed
    member._name_ = member._value_ = name

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        def local(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:
            out: torch.Tensor = names.dispatch(
                q, k, v, mask, dropout_p, is_causal, scale, q.size(2) != k.size(2), others, backend=inner
            )
            return out

        options = {key: value for key, value in others.items() if value is not None and value is not False}
        if options and attention.place.world > 1:
            raise attention.error(f"attention_kwargs {options!r:.200}", "none")
        active = registry.get_active_backend()[0] if inner is None else inner
        return attention(
            query,
            key,
            value,
            attn_mask,
            local,
            seq_dim=1,
            causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            own_kernel=names.backend_name(active).value != "native",
        )

    registry.register(member)(attend)
    # the dispatcher passes arguments of these names only
    registry._supported_arg_names[member] = set().union(*registry._supported_arg_names.values()) - {"others"}
    return member


def unregister_backend(names: Names, member: Any) -> None:
    for table in (names.registry._backends, names.registry._constraints, names.registry._supported_arg_names):
        table.pop(member, None)


class JointProcessor:
    """A processor that calls torch's attention itself, over this rank's tokens: SD3's."""

    def __init__(self, inner: Any, attention: ShardedAttention) -> None:
        self.inner = inner
        self.attention = attention

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with _Intercept(self.attention):
            return self.inner(attn, hidden_states, encoder_hidden_states, attention_mask, *args, **kwargs)


class _Intercept(TorchFunctionMode):
    """Compute each call of scaled_dot_product_attention over the whole sequence."""

    def __init__(self, attention: ShardedAttention) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._attend if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        def local(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
        ) -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        return self.attention(
            query,
            key,
            value,
            attn_mask,
            local,
            seq_dim=2,
            causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            own_kernel=False,
        )
