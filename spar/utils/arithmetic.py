"""Small arithmetic of models that are spread over ranks, and checks of arguments. Source: seed 004."""

from __future__ import annotations

import os
import sys
import time

import torch

from .._runtime.checks import check_bool, check_int, check_type

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
    numerator = check_int("ensure_divisibility", "numerator", numerator)
    denominator = check_int("ensure_divisibility", "denominator", denominator)
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """numerator / denominator, which must be a whole number, else ValueError. Source: seed 004."""
    numerator = check_int("divide", "numerator", numerator)
    denominator = check_int("divide", "denominator", denominator)
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
    check_type(where, "tensor", tensor, torch.Tensor, "a tensor")
    num_partitions = check_int(where, "num_partitions", num_partitions, 1)
    check_bool(where, "contiguous_split_chunks", contiguous_split_chunks)
    if tensor.dim() == 0:
        raise ValueError(f"{where}: tensor has no dims; expected at least one")
    if tensor.size(-1) % num_partitions:
        raise ValueError(
            f"{where}: tensor has {tensor.size(-1)} in its last dim; expected a multiple of {num_partitions}"
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
    """The layers of a pipeline stage. Source: seed 004.

    Each stage has num_layers // pp_size; the remainder goes one each to the stages counted back from the one
    before the last. So the last is spared, and the first as long as possible: they hold the embeddings.

    Args:
        num_layers: layers of the model, at least 0.
        pp_rank: the stage.
        pp_size: how many stages there are, at least 1.
        num_hidden_layers: vLLM's name of num_layers; one of the two is required.

    Returns:
        The stage's first layer, and the first one behind it.

    Raises:
        ValueError: a negative num_layers, no stages, a pp_rank that is none of them.
        TypeError: an argument that is not an int; both or neither of num_layers and num_hidden_layers.
    """
    where, name, given = "get_pp_indices", "num_layers", num_layers
    if num_hidden_layers is not None:
        if num_layers is not None:
            raise TypeError(
                f"{where}: num_layers is {num_layers!r:.200} and num_hidden_layers is "
                f"{num_hidden_layers!r:.200}; expected one of them"
            )
        name, given = "num_hidden_layers", num_hidden_layers
    layers = check_int(where, name, given, 0)
    size = check_int(where, "pp_size", pp_size, 1)
    stage = check_int(where, "pp_rank", pp_rank, 0, size - 1)
    each, more = divmod(layers, size)
    first = size - 1 - more  # of the stages with one layer more

    def begin(stage: int) -> int:
        return stage * each + min(max(stage - first, 0), more)

    return begin(stage), begin(stage + 1)
