# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model, from a config of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..ranks import UsageError

# Decoders of attention and a gated MLP of three matrices, and whether they norm queries and keys
TYPES = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}


@dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
        layers, hidden, heads, key_heads, width: as in `Layer`.
        intermediate: width of the MLP.
        vocabulary: tokens.
        tied: whether the head is the embedding.
        normed: whether each head's queries and keys are normed.
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    width: int
    intermediate: int
    vocabulary: int
    tied: bool
    normed: bool

    @property
    def of_layer(self) -> int:
        """Parameters of a layer's matrices. Norms and biases are less than a thousandth of them."""
        attention = 2 * (self.heads + self.key_heads) * self.width * self.hidden
        return attention + 3 * self.intermediate * self.hidden

    @property
    def of_head(self) -> int:
        """Parameters of the head, or of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters of the embedding and, if it is another one, of the head."""
        return self.of_head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.of_layer + self.outside


def read_model(name: str) -> Model:
    """Read a config.json, that of a folder, or that of a model which transformers has on this machine.

    Raises:
        UsageError: there is none, or it is of a type that the command does not count.
    """
    config = _read(name)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise UsageError(f"--model {name} is of type {kind!r}; expected one of {', '.join(TYPES)}")
    heads = _size(name, config, "num_attention_heads")
    hidden = _size(name, config, "hidden_size")
    return Model(
        layers=_size(name, config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_heads=_size(name, config, "num_key_value_heads", heads),
        width=_size(name, config, "head_dim", hidden // heads),
        intermediate=_size(name, config, "intermediate_size"),
        vocabulary=_size(name, config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        normed=TYPES[kind],
    )


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return _of_transformers(name)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # JSON's errors are ValueErrors
        raise UsageError(f"--model {name} cannot be read: {error}; expected a config.json") from None
    if not isinstance(config, dict):
        raise UsageError(
            f"--model {name} holds a {type(config).__name__}; expected the dict of a config.json"
        )
    return config


def _of_transformers(name: str) -> dict[str, Any]:
    """Return the config that transformers has on this machine under a name; nothing is downloaded."""
    missing = f"--model {name} is no file or folder, and transformers"
    if not find_spec("transformers"):
        raise UsageError(f"{missing} is not installed; expected a config.json")
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(name, local_files_only=True).to_dict()
    except (OSError, ValueError):
        raise UsageError(f"{missing} has no such model on this machine; expected a config.json") from None
    return config


def _size(name: str, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"--model {name}: {key} is {value!r}; expected an int from 1 on")
    return value
