# SPDX-License-Identifier: Apache-2.0
"""Models of diffusers: what is to be sharded of each, and what was of other libraries' parallelism."""

from __future__ import annotations

from typing import Any

import torch

from ..._model.images import has_convolutions
from .names import check_names

_OF_PIPELINES = ("transformer", "transformer_2", "unet", "vae")  # the attributes of a pipeline to shard
# The attributes of an autoencoder that its `decode` and `encode` call.
_CODERS = ("decoder", "encoder")


def is_of_diffusers(model: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "diffusers" for kind in type(model).__mro__)


def check_no_pipeline(model: Any, where: str) -> None:
    """Raise a TypeError that names the models in a pipeline, if it is one."""
    inner = [name for name in _OF_PIPELINES if isinstance(getattr(model, name, None), torch.nn.Module)]
    if inner and not isinstance(model, torch.nn.Module):
        expected = " and ".join(f"pipe.{name}" for name in inner)
        raise TypeError(
            f"{where}: model is a {type(model).__name__}; expected a model in it: pass {expected}"
        )


def check_model(model: torch.nn.Module, where: str) -> None:
    """Check what spar uses of diffusers, and that diffusers' own parallelism is off."""
    check_names(where)
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(
            f"{where}: diffusers' own enable_parallelism was called; expected a model without it"
        )


def coders_of(model: torch.nn.Module, where: str) -> list[torch.nn.Module]:
    """Return the decoder and the encoder of an autoencoder, whose rows are sharded; none of another model.

    Raises:
        ValueError: the autoencoder has no decoder of images or videos.
    """
    if not is_autoencoder(model):
        return []
    found = {name: getattr(model, name, None) for name in _CODERS}
    coders = {name: coder for name, coder in found.items() if isinstance(coder, torch.nn.Module)}
    convolved = {name for name, coder in coders.items() if has_convolutions(coder)}
    if "decoder" not in convolved or len(convolved) < len(coders):
        lacking = next(name for name in found if name not in convolved)
        raise ValueError(
            f"{where}: {type(model).__name__} has no {lacking} of 2-D or 3-D convolutions, whose rows "
            "could be sharded; expected an autoencoder of images or videos"
        )
    return [*coders.values()]


def is_autoencoder(model: torch.nn.Module) -> bool:
    return is_of_diffusers(model) and callable(getattr(model, "decode", None))


def forget_parts(model: torch.nn.Module) -> None:
    """Empty a model's cache of diffusers, which holds parts."""
    if getattr(model, "is_cache_enabled", False):
        model._reset_stateful_cache()  # type: ignore[operator]
