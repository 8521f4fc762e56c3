# SPDX-License-Identifier: Apache-2.0
"""Pack documents of different lengths into one sharded sequence of a stock transformers model.

    torchrun --standalone --nproc-per-node 4 examples/packed.py

The documents are topics of Python's own documentation. They lie whole on one rank where the ranks remain
balanced. There is no padding, and no mask in the batch: position_ids restart. The loss and the gradients must
be those of the documents one by one in one process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from llm import documents, make_model
from torch import Tensor

import spar

TOLERANCE = 1e-4  # relative, in float32
TOKENS = 3000  # at most, of all documents


def chosen() -> list[Tensor]:
    """Return documents from 20 to 1000 bytes, until they have TOKENS."""
    found: list[Tensor] = []
    for document in documents():
        if 20 <= len(document) <= 1000 and sum(map(len, found)) + len(document) <= TOKENS:
            found.append(document)
    return found


def pack(texts: list[Tensor]) -> dict[str, Tensor]:
    """Return one sample, as transformers.DataCollatorWithFlattening does: position_ids restart."""
    ids, positions = torch.cat(texts), torch.cat([torch.arange(len(text)) for text in texts])
    labels = ids.masked_fill(positions == 0, -100)  # no document predicts the next one
    return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}


def lay_out(batch: dict[str, Any]) -> spar.SequenceLayout:
    """Return how the tokens of a forward, of which these are the arguments, lie on the ranks."""
    positions = batch["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]
    return spar.SequenceLayout.balanced(lengths)


def one_by_one(texts: list[Tensor]) -> tuple[float, Tensor]:
    """Return the mean loss over all documents' labels, and the gradients, in one process."""
    model, total = make_model(), 0.0
    count = sum(len(text) - 1 for text in texts)
    for text in texts:
        loss = model(input_ids=text[None], labels=text[None], num_items_in_batch=count).loss
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 4 examples/packed.py")
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    texts = chosen()

    model, batch = make_model(), pack(texts)
    report = spar.parallelize(model, layout=lay_out)
    loss = model(**batch).loss
    loss.backward()

    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradients)
    gradients /= world  # DDP and FSDP2 average them, too
    if rank == 0:
        expected, whole = one_by_one(texts)
        error = abs(float(loss.detach()) - expected) / expected
        apart = float((gradients - whole).norm() / whole.norm())
        lengths = sorted(len(text) for text in texts)
        print(f"{len(texts)} documents of {lengths[0]} to {lengths[-1]} bytes, {sum(lengths)} in all")
        print(f"tokens by rank: {list(lay_out(batch).sizes)}; {report}")
        print(f"loss {float(loss.detach()):.6f}; of the documents one by one {expected:.6f}")
        if not error < TOLERANCE or not apart < TOLERANCE:
            sys.exit(f"the loss differs by {error:.1e}, gradients by {apart:.1e}; allowed: {TOLERANCE:.0e}")
        print(f"proved: {world} ranks compute {len(texts)} packed documents as one process does one by one.")
        print(f"The loss agrees within {error:.0e}, the gradients within {apart:.0e}; no padding.")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
