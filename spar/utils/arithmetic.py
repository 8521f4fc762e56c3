# SPDX-License-Identifier: Apache-2.0
"""Arithmetic for models that are partitioned over ranks. From vLLM."""

from __future__ import annotations

import os
import sys
import time

import torch

from .._checks import check_bool, check_int, check_type

# Older versions keep the GIL in os.sched_yield. From vLLM.
USE_SCHED_YIELD = sys.version_info[:3] >= (3, 11, 1) or (
    sys.version_info[:2] == (3, 10) and sys.version_info[2] >= 8
)


def sched_yield() -> None:
    """Yield the core and the GIL to other threads. From vLLM."""
    if USE_SCHED_YIELD and hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ValueError if denominator is 0 or does not divide numerator. From vLLM."""
    numerator = check_int("ensure_divisibility", "numerator", numerator)
    denominator = check_int("ensure_divisibility", "denominator", denominator)
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return numerator // denominator. Raises ValueError unless it divides evenly. From vLLM."""
    numerator = check_int("divide", "numerator", numerator)
    denominator = check_int("divide", "denominator", denominator)
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[torch.Tensor]:
    """Split a tensor into equal parts along its last dim. From vLLM.

    Args:
        tensor: `[..., N]`, with N a multiple of `num_partitions`.
        num_partitions: the number of parts, at least 1.
        contiguous_split_chunks: copy each part that is not contiguous.

    Returns:
        `num_partitions` tensors `[..., N/num_partitions]`; views unless copied.

    Raises:
        ValueError: the tensor has no dims, `num_partitions` is below 1 or does not divide N.
        TypeError: an argument has the wrong type.
    """
    caller = "split_tensor_along_last_dim"
    check_type(caller, "tensor", tensor, torch.Tensor, "a tensor")
    num_partitions = check_int(caller, "num_partitions", num_partitions, 1)
    check_bool(caller, "contiguous_split_chunks", contiguous_split_chunks)
    if tensor.dim() == 0:
        raise ValueError(f"{caller}: tensor is a scalar; expected at least one dim")
    if tensor.size(-1) % num_partitions:
        raise ValueError(
            f"{caller}: tensor.size(-1) is {tensor.size(-1)}; expected a multiple of {num_partitions}"
        )
    parts = tensor.split([tensor.size(-1) // num_partitions] * num_partitions, -1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)


def get_pp_indices(
    num_layers: int | None = None,
    pp_rank: int | None = None,
    pp_size: int | None = None,
    *,
    num_hidden_layers: int | None = None,
) -> tuple[int, int]:
    """Compute which layers a pipeline stage holds. From vLLM.

    Each stage has num_layers // pp_size layers. The remaining layers go one each to the stages before the
    last, counted backwards. So the last stage, and if possible the first, get none: they hold the embeddings.

    Args:
        num_layers: the number of layers of the model, at least 0.
        pp_rank: the stage.
        pp_size: the number of stages, at least 1.
        num_hidden_layers: vLLM's name for num_layers. Pass exactly one of the two.

    Returns:
        The half-open range (first, end) of the stage's layers.

    Raises:
        ValueError: num_layers is negative, pp_size is below 1, or pp_rank is not in [0, pp_size).
        TypeError: an argument is not an int, or not exactly one of num_layers and num_hidden_layers is given.
    """
    caller, name, value = "get_pp_indices", "num_layers", num_layers
    if num_hidden_layers is not None:
        if num_layers is not None:
            raise TypeError(
                f"{caller}: num_layers is {num_layers!r:.200} and num_hidden_layers is "
                f"{num_hidden_layers!r:.200}; expected one of them"
            )
        name, value = "num_hidden_layers", num_hidden_layers
    layers = check_int(caller, name, value, 0)
    size = check_int(caller, "pp_size", pp_size, 1)
    stage = check_int(caller, "pp_rank", pp_rank, 0, size - 1)
    per_stage, extra = divmod(layers, size)
    first = size - 1 - extra  # the first stage with an extra layer

    def start(stage: int) -> int:
        return stage * per_stage + min(max(stage - first, 0), extra)

    return start(stage), start(stage + 1)
