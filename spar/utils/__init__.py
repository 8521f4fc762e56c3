# SPDX-License-Identifier: Apache-2.0
"""Utilities for serving code: groups without global state, and arithmetic on sizes. From vLLM.

docs/utils.md describes which hosts can reach a group's port, and the security implications.
"""

from .arithmetic import (
    USE_SCHED_YIELD,
    divide,
    ensure_divisibility,
    get_pp_indices,
    sched_yield,
    split_tensor_along_last_dim,
)
from .process_group import (
    init_gloo_process_group,
    stateless_destroy_torch_distributed_process_group,
    stateless_init_torch_distributed_process_group,
)
from .stateless_group import StatelessProcessGroup

__all__ = [
    "USE_SCHED_YIELD",
    "StatelessProcessGroup",
    "divide",
    "ensure_divisibility",
    "get_pp_indices",
    "init_gloo_process_group",
    "sched_yield",
    "split_tensor_along_last_dim",
    "stateless_destroy_torch_distributed_process_group",
    "stateless_init_torch_distributed_process_group",
]
