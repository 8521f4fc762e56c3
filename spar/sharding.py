# SPDX-License-Identifier: Apache-2.0
"""Shard and gather tensors over the current topology's sequence group. From vLLM-Omni."""

from .ops.names.vllm_omni import (
    ShardingValidator,
    get_sharding_validator,
    sp_gather,
    sp_shard,
    sp_shard_with_padding,
)

__all__ = ["ShardingValidator", "get_sharding_validator", "sp_gather", "sp_shard", "sp_shard_with_padding"]
