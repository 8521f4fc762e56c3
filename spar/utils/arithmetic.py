"""Small arithmetic of models that are spread over ranks, and checks of arguments. Source: seed 004."""

from __future__ import annotations

import os
import sys
import time

import torch

# Before these versions os.sched_yield keeps the GIL. Source: seed 004.
USE_SCHED_YIELD = sys.version_info[:3] >= (3, 11, 1) or (
    sys.version_info[:2] == (3, 10) and sys.version_info[2] >= 8
)


def sched_yield() -> None:
    """Lends this core, and the GIL, to whoever waits for it. Source: seed 004."""
    if USE_SCHED_YIELD and hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ValueError where denominator is 0 or does not divide numerator. Source: seed 004."""
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator, which must be a whole number, else ValueError. Source: seed 004."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[torch.Tensor]:
    """Cuts the last dim into equal parts. Source: seed 004.

    Args:
        tensor: [..., n], n a multiple of num_partitions.
        num_partitions: how many parts, at least 1.
        contiguous_split_chunks: whether each part shall be contiguous, which copies where it is not.

    Returns:
        num_partitions tensors [..., n / num_partitions]; views where they are not copied.

    Raises:
        ValueError: a tensor without dims, no partitions, n that is no multiple of them.
    """
    where = "split_tensor_along_last_dim"
    check_whole(where, "num_partitions", num_partitions, 1)
    if tensor.dim() == 0:
        raise ValueError(f"{where}: tensor has no dims; expected at least one")
    if tensor.size(-1) % num_partitions:
        raise ValueError(
            f"{where}: tensor has {tensor.size(-1)} in its last dim; expected a multiple of {num_partitions}"
        )
    parts = tensor.split([tensor.size(-1) // num_partitions] * num_partitions, -1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)


def get_pp_indices(num_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """The layers of a pipeline stage. Source: seed 004.

    Each stage has num_layers // pp_size; the remainder goes one each to the stages counted back from the one
    before the last. So the last is spared, and the first as long as possible: they hold the embeddings.

    Args:
        num_layers: layers of the model, at least 0.
        pp_rank: the stage.
        pp_size: how many stages there are, at least 1.

    Returns:
        The stage's first layer, and the first one behind it.

    Raises:
        ValueError: a negative num_layers, no stages, a pp_rank that is none of them.
    """
    check_whole("get_pp_indices", "num_layers", num_layers, 0)
    check_whole("get_pp_indices", "pp_size", pp_size, 1)
    check_whole("get_pp_indices", "pp_rank", pp_rank, 0, pp_size - 1)
    each, more = divmod(num_layers, pp_size)
    first = pp_size - 1 - more  # of the stages with one layer more

    def begin(stage: int) -> int:
        return stage * each + min(max(stage - first, 0), more)

    return begin(pp_rank), begin(pp_rank + 1)


def check_whole(where: str, name: str, value: int, low: int, high: int | None = None) -> None:
    expected = f"at least {low}" if high is None else f"{low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{where}: {name} is {value!r}; expected a whole number, {expected}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{where}: {name} is {value}; expected {expected}")


def check_place(where: str, rank: int, world_size: int) -> None:
    check_whole(where, "world_size", world_size, 1)
    check_whole(f"{where} with world_size {world_size}", "rank", rank, 0, world_size - 1)
