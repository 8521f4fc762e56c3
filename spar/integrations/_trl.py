# SPDX-License-Identifier: Apache-2.0
"""What trainers of TRL need beside those of transformers: the batch to generate, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

from ._refusals import check_version, refuse
from ._trainer import WHERE
from ._trl_tree import use_trees

VERSION = 1, 16
# Each was compared with one process.
_GENERATING = "GRPOTrainer", "RLOOTrainer"
_COMPARING = "DPOTrainer", "KTOTrainer"  # with a reference
_TRAINERS = "SFTTrainer", "RewardTrainer", *_COMPARING, *_GENERATING


def prepare(trainer: Any, checks_step: bool, prefix_tree: bool) -> None:
    """Refuse what would not give the numbers of one process; count sequence groups in the arguments.

    A trainer that is not of TRL is left as it is.
    """
    kinds = [each for each in type(trainer).__mro__ if each.__module__.partition(".")[0] == "trl"]
    name = kinds[0].__name__ if kinds else type(trainer).__name__
    if prefix_tree and name not in _GENERATING:
        raise ValueError(
            f"{WHERE}: prefix_tree is True for {name}; expected False, or {' or '.join(_GENERATING)}, whose "
            "samples share prompts"
        )
    if not kinds:
        return
    check_version(WHERE, "trl", VERSION, VERSION)
    if name not in _TRAINERS:
        raise ValueError(f"{WHERE}: {name} of TRL was not tested; expected {', '.join(_TRAINERS)}")
    if name in _GENERATING:
        _check_generation(trainer, checks_step)
        _count_groups(trainer)
    if prefix_tree:
        use_trees(trainer)
    if name in _COMPARING:
        _shard_references(trainer)


def _check_generation(trainer: Any, checks_step: bool) -> None:
    args = trainer.args
    refused = (
        (args.use_vllm, "use_vllm is True", "False: the ranks generate by the sharded model"),
        (
            args.use_transformers_continuous_batching,
            "use_transformers_continuous_batching is True",
            "False: the ranks generate by the sharded model",
        ),
        (getattr(trainer, "tools", None), "tools are given", "none"),
        (getattr(trainer, "environment_factories", None), "environment_factory is given", "None"),
        (getattr(trainer, "rollout_func", None), "rollout_func is given", "None"),
        (checks_step, "check is True", "False for a trainer that generates: it counts its steps"),
    )
    refuse(WHERE, refused)


def _count_groups(trainer: Any) -> None:
    """Let the arguments, which count ranks, have the batch that all sequence groups generate at once."""
    args, replicas = trainer.args, trainer.sequences.replicas
    total = args.per_device_train_batch_size * args.steps_per_generation * replicas
    sizes = [("per_device_train_batch_size x steps_per_generation", total, args.num_generations)]
    if args.eval_strategy != "no":
        count = args.num_generations_eval or args.num_generations
        sizes.append(("per_device_eval_batch_size", args.per_device_eval_batch_size * replicas, count))
    for name, size, count in sizes:
        if size % count:
            raise ValueError(
                f"{WHERE}: {name} x {replicas} sequence groups is {size}; must be divisible by the number of "
                f"generations, {count}"
            )
    args.generation_batch_size = total


def _shard_references(trainer: Any) -> None:
    """Let the ranks share what `precompute_ref_log_probs` computes before the trainer prepares its model."""
    own = trainer._precompute_ref_logps

    @functools.wraps(own)
    def precompute(*args: Any, **kwargs: Any) -> Any:
        trainer.accelerator.parallelize(trainer.ref_model or trainer.model)
        return own(*args, **kwargs)

    trainer._precompute_ref_logps = precompute
