# SPDX-License-Identifier: Apache-2.0
"""The one call that shards a model of torch, transformers or diffusers over the sequence, and its undoing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._model.batch_parts import LayoutOf
from .._model.model import check_module, is_sharded, sharded, unsharded
from .._model.report import Report
from ..topology.resolve import Group
from ._diffusers import models as diffusers
from ._libraries import LIBRARIES
from ._transformers.mixers import serve
from ._transformers.orders import order_sets, restore_sets


def parallelize(
    model: torch.nn.Module,
    group: Group = None,
    *,
    method: str | None = None,
    layout: str | LayoutOf = "even",
    inputs: Sequence[str] = (),
    outputs: str = "whole",
    blocks: Sequence[str] | None = None,
    tile: int | None = None,
    strict: bool = False,
) -> Report:
    """Shard the sequence of any torch model over the ranks of a group, in each later forward.

    Every rank calls the model with the same whole inputs and receives the whole output, of the type that the
    model returns. From its first block on each rank has its part of the tokens, of any number, by
    `cal_split_sizes`; the model's code still sees whole shapes. Each torch function runs on parts, with an
    exchange where it mixes tokens, or whole on each rank, which the report names. Of an autoencoder of
    diffusers each rank has rows of the images, in `decode` and `encode`. Compute the same loss on all ranks,
    and average gradients of parameters over them, as DDP and FSDP2 do: they are then those of one process.
    Does not communicate.

    Args:
        model: it is changed in place, until `unparallelize`. Not a wrapper such as DDP, nor a pipeline.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current topology's
            sequence group (WORLD if there is none).
        method: of attention: "ulysses", "gather", "ring", "2d" or "ulysses_gather"; None chooses for each.
            "hybrid": sequences lie over the ring and ulysses groups of the current parallel state, whose cp
            group is `group`.
        layout: how sequences lie on the ranks: "even"; "zigzag", which balances the work of causal attention
            by "gather" and "ring"; or a function, from a dict of the forward's arguments to a SequenceLayout
            of `group` for sequences of its length, such as a balanced one of packed documents. Its documents
            are ignored: the model's mask says what attends to what.
        inputs: names of arguments of forward that are this rank's tokens, `[B, S_local, ...]`, in the order
            of the layout; all others are whole. Ranks exchange their numbers of tokens before each forward,
            but not if `layout` is a function, which then receives these arguments.
        outputs: "whole"; or "parts": what the model returns of a sequence `[B, S, ...]` is this rank's
            tokens of it, such as logits `[B, S_local, V]`, and averaged gradients are those of the mean of
            the ranks' losses. A loss that the model computes is one process's in any case.
        blocks: names of modules, with wildcards, such as "layers.*"; each shards the sequence that it
            receives, if it is whole. "": the model, such as one of convolutions, of whose images
            `[N, C, H, W]` or videos `[N, C, T, H, W]` each rank has rows, or columns where rows are few; of
            sounds `[N, C, L]`, a part of the length. None: the elements of each
            outermost ModuleList or Sequential that has attention in it; of each ModuleList if none has.
        tile: the tokens of a tile, of each sequence of the batch. Modules that compute each token alone, such
            as MLPs, experts and norms, then run on tiles of this rank's tokens, and backward runs each tile
            again: what they compute inside is never whole. So does the model's head with a cross entropy, in
            a step with gradients: the logits among the outputs are then None. Results are the same; weights'
            gradients are sums over tiles, in float32 where weights have 16 bits, and cannot be differentiated
            again. The report lists the modules. The model is not compiled.
        strict: whether a function inside blocks that would run whole raises.

    Returns:
        The report of the first forward, empty until then.

    Raises:
        ValueError: the model is parallelized already or wrapped, or has no such blocks; an autoencoder has no
            2-D or 3-D convolutions, as one of sound; tile is no int from 1. The model is unchanged.
        TypeError: model is no module.
        ImportError: the model is of diffusers, whose version lacks a name that spar uses.
    """
    where = "parallelize"
    diffusers.check_no_pipeline(model, where)
    check_module(model, where)
    coders: list[torch.nn.Module] = []
    if diffusers.is_of_diffusers(model):
        diffusers.check_model(model, where)
        coders = diffusers.coders_of(model, where)
    serve(model)
    order_sets(model)
    if not coders:
        return sharded(
            model,
            group,
            where,
            blocks=blocks,
            method=method,
            layout=layout,
            inputs=inputs,
            outputs=outputs,
            tile=tile,
            strict=strict,
            library=LIBRARIES,
        )
    if method == "hybrid":
        raise ValueError(f'{where}: method is "hybrid"; expected another for an autoencoder, of rows')
    if inputs or (layout, outputs, tile) != ("even", "whole", None):
        given = "layout, inputs, outputs or tile are given"
        raise ValueError(f"{where}: {given}; expected none for an autoencoder")
    if blocks is not None:
        raise ValueError(
            f"{where}: blocks is {blocks!r}; expected None for an autoencoder, or its decoder as the model"
        )
    for coder in coders:
        check_module(coder, where)
        if is_sharded(coder):
            kind = type(coder).__name__
            raise ValueError(f"{where}: the model's {kind} is parallelized already; undo that first")
    report: Report | None = None
    for coder in coders:
        report = sharded(
            coder,
            group,
            where,
            blocks=[""],
            method=method,
            strict=strict,
            library=LIBRARIES,
            report=report,
        )
    assert report is not None
    return report


def unparallelize(model: torch.nn.Module) -> None:
    """Undo `parallelize`: no hook or attribute is left, and a cache of diffusers is emptied.

    Raises:
        ValueError: the model is not parallelized, or its forward was replaced since.
    """
    where = "unparallelize"
    if isinstance(model, torch.nn.Module) and diffusers.is_autoencoder(model) and not is_sharded(model):
        coders = [coder for coder in diffusers.coders_of(model, where) if is_sharded(coder)]
        for coder in coders:
            unsharded(coder, where)
        if coders:
            return
    unsharded(model, where)
    diffusers.forget_parts(model)
    restore_sets(model)
