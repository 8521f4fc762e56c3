# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in ms-swift: a plugin file calls `install`."""

from __future__ import annotations

import functools
from typing import Any

from swift.arguments import SftArguments
from swift.dataloader import BatchSamplerShard, DataLoaderShard

from . import trainer as integration
from ._documents import check_documents
from ._refusals import check_version, refuse
from .trainer import uninstall

__all__ = ["install", "uninstall"]

WHERE = "integrations.swift"
VERSION = 4, 6  # methods that are not documented are overridden: this one was tested


def install(sequence_parallel_size: int, *, check: bool = False, **options: Any) -> None:
    """Let the trainers that ms-swift makes from now on shard their sequences over ranks.

    Call it in a file that `--external_plugins` names, which ms-swift imports on all ranks.

    Args:
        sequence_parallel_size: as that of `spar.integrations.trainer.install`, and so are check, options and
            what is raised.
    """
    check_version(WHERE, "ms-swift", VERSION, VERSION)
    integration.install(sequence_parallel_size, check=check, mixin=_SequenceParallel, **options)
    own = SftArguments._check_padding_free

    @functools.wraps(own)
    def check_padding_free(args: Any) -> None:
        """Allow packed documents with sdpa, too, which spar computes without a mask of S x S."""
        chosen = args.attn_impl
        args.attn_impl = "flash_attn" if chosen in (None, "sdpa", "eager") else chosen
        try:
            own(args)
        finally:
            args.attn_impl = chosen

    integration.replace(SftArguments, "_check_padding_free", check_padding_free)


class _SequenceParallel(integration.SequenceParallel):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.sequences.size == 1:
            return
        attention = getattr(self.model.config, "_attn_implementation", "sdpa")
        own = self.template.sequence_parallel_size
        refused = (
            (own > 1, f"sequence_parallel_size of ms-swift is {own}", "1"),
            (attention not in ("sdpa", "eager"), f"attn_impl is {attention!r}", "sdpa or eager"),
            (self.args.tuner_backend == "unsloth", "tuner_backend is 'unsloth'", "peft"),
            (not hasattr(self, "get_sp_dataloader"), f"{type(self).__name__} was not run", "swift sft or pt"),
        )
        refuse(WHERE, refused, "spar's sequence groups")
        if self.template.padding_free:  # also where samples are packed
            check_documents(self.model, WHERE)

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Let the ranks of a sequence group read the same samples, as ranks of tensor parallelism do."""
        loader = super().get_train_dataloader(*args, **kwargs)
        if self.sequences.size == 1:
            return loader
        if not isinstance(loader, DataLoaderShard):
            raise ValueError(f"{WHERE}: streaming is True; with spar's sequence groups expected False")
        sampler = loader.batch_sampler
        while not isinstance(sampler, BatchSamplerShard):
            sampler = sampler.batch_sampler  # that of a resumed run
        sampler.tp_size = self.sequences.size
        sampler.total_samples = len(self.train_dataset) // sampler.world_size
        return loader
