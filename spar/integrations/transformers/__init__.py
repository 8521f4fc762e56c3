"""Run and train a stock transformers model over a sharded sequence.

    spar.integrations.transformers.register()
    model.set_attn_implementation("spar")
    batch = spar.integrations.transformers.shard(model, batch, group=cp, token_group=dp)
    loss = model(**batch).loss * world  # DDP and FSDP average gradients over `world` ranks
    loss.backward()
"""

from __future__ import annotations

from .attention import register
from .batch import shard

__all__ = ["register", "shard"]
