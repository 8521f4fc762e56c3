# SPDX-License-Identifier: Apache-2.0
"""Packed documents of trainers that would use flash attention, which finds them by itself."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any


def check_documents(model: Any, where: str) -> None:
    """Refuse a model of transformers whose masks do not find the documents of a packed row."""
    from transformers.trainer_utils import unwrap_peft_model

    model = unwrap_peft_model(model)
    kind = next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
    if not _masks_have_positions(kind.__module__):
        raise ValueError(
            f"{where}: {kind.__name__} passes no position_ids to its masks, and packed samples would attend "
            "to each other; expected padded batches, or a model whose masks find documents by position_ids"
        )


@functools.cache
def _masks_have_positions(module: str) -> bool:
    """Whether a module's code passes position_ids to a function of masks, or puts them into its arguments."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and "mask" in ast.unparse(node.func):
            names = [keyword.arg for keyword in node.keywords]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            is_of_masks = "mask" in ast.unparse(node.targets[0])
            keys = node.value.keys if is_of_masks else ()
            names = [
                key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ]
        else:
            continue
        if "position_ids" in names:
            return True
    return False
