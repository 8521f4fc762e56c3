# SPDX-License-Identifier: Apache-2.0
"""Train a stock transformers model by GRPO with its samples sharded over ranks, beside one process.

    torchrun --standalone --nproc-per-node 4 examples/rl.py [--dp 2] [--fsdp] [--tree]

The policy continues lines of Python's own documentation, and is rewarded for ASCII. Both runs learn from the
same rollouts. One process pads them; the ranks pack and shard them, with --tree without what samples share.
The losses must agree in each update. If they do not, or if rewards do not rise, all ranks exit with an error.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from llm import documents, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

import spar

TOLERANCE = 1e-4  # relative, of losses in float32
UPDATES = 2  # for each rollout
CLIP_LOW, CLIP_HIGH, KL = 0.8, 1.28, 0.02
END = 248  # bytes from here on end a completion


class Rollouts(NamedTuple):
    """Samples `[N, T]`, padded on the right, with the same number of samples for each prompt."""

    ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    rewards: Tensor  # [N]
    advantages: Tensor  # [N]

    def of(self, rank: int, ranks: int) -> Rollouts:
        """Return those of a data-parallel rank."""
        return Rollouts(*(x.chunk(ranks)[rank] for x in self))


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dp", type=int, default=1, help="data-parallel groups; the other ranks share samples"
    )
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters by FSDP2, too; else DDP")
    parser.add_argument("--tree", action="store_true", help="compute what samples share once; else pack them")
    parser.add_argument("--steps", type=int, default=6, help="rollouts, of two updates each")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="for each prompt")
    parser.add_argument("--lr", type=float, default=0.006)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 4 examples/rl.py")
    if int(os.environ["WORLD_SIZE"]) % args.dp or args.prompts % args.dp:
        parser.error(f"--dp must divide the number of ranks and --prompts, got {args.dp}")
    return args


def losses_of(logprobs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor) -> Tensor:
    """Return GRPO's loss of each token."""
    ratio, apart = (logprobs - old).exp(), reference - logprobs
    clipped = ratio.clamp(CLIP_LOW, CLIP_HIGH) * advantages
    return KL * (apart.exp() - apart - 1) - torch.minimum(ratio * advantages, clipped)


# ---- one process: padded samples, in plain torch ----


@torch.no_grad()
def roll_out(model: Any, args: Namespace, random: torch.Generator) -> Rollouts:
    """Sample completions of up to 16 bytes for lines of different lengths."""
    lines = [x for x in documents() if len(x) > 60]
    starts = torch.randint(len(lines), (args.prompts,), generator=random).tolist()
    sizes = torch.randint(8, 48, (args.prompts,), generator=random).tolist()
    prompts = [lines[i][:size] for i, size in zip(starts, sizes, strict=True) for _ in range(args.samples)]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    first = lengths.clone()
    ids = torch.stack([pad(prompt, (0, 64 - len(prompt))) for prompt in prompts])
    place, every = torch.arange(64), torch.arange(len(ids))
    running = torch.ones(len(ids), dtype=torch.bool)
    while running.any() and int((lengths - first).max()) < 16:
        logits = model(input_ids=ids, attention_mask=(place < lengths[:, None]).long()).logits
        chosen = logits[every, lengths - 1].softmax(-1).multinomial(1, generator=random)[:, 0]
        ids[every[running], lengths[running]] = chosen[running]
        lengths = lengths + running
        running = running & (chosen < END)
    kept, completion = place < lengths[:, None], (place < lengths[:, None]) & (place >= first[:, None])
    rewards = ((ids < 128) & completion).sum(1) / completion.sum(1)
    groups = rewards.view(args.prompts, -1)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return Rollouts(ids, kept.long(), completion.long(), rewards, advantages.flatten())


def padded_logprobs(model: Any, rollouts: Rollouts) -> Tensor:
    logits = model(input_ids=rollouts.ids, attention_mask=rollouts.attention_mask).logits[:, :-1]
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, rollouts.ids[:, 1:, None])[..., 0]
    return logprobs


def train_in_one_process(args: Namespace) -> tuple[list[Rollouts], list[float]]:
    model, reference, losses, rollouts = make_model(), make_model(), [], []
    optimizer = torch.optim.Adam(model.parameters(), args.lr, eps=1e-5)
    random = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        batch = roll_out(model, args, random)
        rollouts.append(batch)
        with torch.no_grad():
            old, known = padded_logprobs(model, batch), padded_logprobs(reference, batch)
        mask = batch.completion_mask[:, 1:]
        for _ in range(UPDATES):
            values = losses_of(padded_logprobs(model, batch), old, known, batch.advantages[:, None])
            loss = ((values * mask).sum(1) / mask.sum(1)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return rollouts, losses


# ---- the ranks: packed samples, sharded ----


class Batch(NamedTuple):
    """What the ranks of cp compute together.

    Attributes:
        row: the arguments of the model, whole.
        labels, layout: this rank's, of the row's tokens.
        samples: how the samples' tokens lie on the ranks.
    """

    row: dict[str, Any]
    labels: Tensor
    layout: spar.SequenceLayout
    samples: spar.data.PackedSamples
    tree: spar.data.Tree | None


def batch_of(own: Rollouts, cp: DeviceMesh, as_tree: bool) -> Batch:
    if as_tree:
        merged = spar.data.PrefixTree(own.ids, cp, mask=own.attention_mask)
        (tree,) = merged.trees
        return Batch(tree.batch(), tree.shard_labels(), tree.layout, merged, tree)
    packed = spar.data.PackedSamples(own.attention_mask, group=cp)
    (layout,) = packed.layouts
    places = packed.pack(own.attention_mask.cumsum(1) - 1)  # restart: samples do not attend to each other
    row = {"input_ids": packed.pack(own.ids), "position_ids": places}
    return Batch(row, packed.shard(own.ids, shift=1, fill=-100), layout, packed, None)


class Policy(nn.Module):
    """Log-probabilities, computed inside of what DDP or FSDP2 wraps: there the head's weight is whole."""

    def __init__(self, model: Any, cp: DeviceMesh) -> None:
        super().__init__()
        self.model = model
        self.layout: Any = None  # of the newest row
        # Without the head, so that no rank has logits of all tokens.
        spar.parallelize(model.model, cp, layout=lambda _: self.layout, outputs="parts")

    def forward(self, batch: Batch) -> Tensor:
        self.layout = batch.layout
        hidden = self.model.model(**batch.row).last_hidden_state  # of the whole row: this rank's tokens
        head = self.model.lm_head.weight
        logprobs, _ = spar.token_logprobs((hidden, head), batch.labels, batch.layout)
        return logprobs if batch.tree is None else batch.tree.expand(logprobs)


def wrapped(policy: Policy, args: Namespace, mesh: DeviceMesh) -> Any:
    """Let DDP or FSDP2 average gradients over all ranks."""
    if not args.fsdp:
        return DistributedDataParallel(policy)
    for layer in policy.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(policy, mesh=mesh)


def train_sharded(args: Namespace, rollouts: list[Rollouts]) -> Iterator[tuple[float, Batch]]:
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (args.dp, dist.get_world_size() // args.dp), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh["dp"], mesh["cp"]
    policy, reference = wrapped(Policy(make_model(), cp), args, mesh), Policy(make_model(), cp)
    optimizer = torch.optim.Adam(policy.parameters(), args.lr, eps=1e-5)
    for rollout in rollouts:
        own = rollout.of(dp.get_local_rank(), args.dp)
        batch = batch_of(own, cp, args.tree)
        samples, (layout,) = batch.samples, batch.samples.layouts
        mask, advantages = samples.shard(own.completion_mask, shift=1), samples.shard(own.advantages)
        with torch.no_grad():
            old, known = policy(batch), reference(batch)
        for _ in range(UPDATES):
            values = losses_of(policy(batch), old, known, advantages)
            loss = spar.masked_mean(values, mask, layout, by="sample", group=world, averaged_by=world)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach()), batch


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    known: list[Any] = [train_in_one_process(args) if rank == 0 else None]
    dist.broadcast_object_list(known, src=0)
    rollouts, single = known[0]
    begin = time.perf_counter()
    losses, batches = zip(*train_sharded(args, rollouts), strict=True)
    seconds = time.perf_counter() - begin
    apart = max(abs(a - b) for a, b in zip(losses, single, strict=True)) / max(map(abs, single))
    rewards = [float(batch.rewards.mean()) for batch in rollouts]
    if rank == 0:
        print(" step   reward   loss in one process   sharded")
        for step, reward in enumerate(rewards):
            one, other = single[UPDATES * step + 1], losses[UPDATES * step + 1]
            print(f"{step:5}   {reward:6.3f}   {one:19.6f}   {other:7.6f}")
        how = f"dp {args.dp} x cp {world // args.dp}, {'FSDP2' if args.fsdp else 'DDP'}"
        last = batches[-1].tree or batches[-1].layout
        print(f"{world} ranks ({how}): {len(losses)} updates in {seconds:.1f} s, the last {last}")
    dist.destroy_process_group()
    if not apart < TOLERANCE or not rewards[-1] > rewards[0] + 0.1:
        sys.exit(
            f"losses differ by {apart:.1e}; allowed: {TOLERANCE:.0e}. Rewards must rise by 0.1: {rewards}"
        )
    if rank == 0:
        what = "prefix trees" if args.tree else "packed samples"
        print(f"proved: GRPO learns the same over {world} ranks, which share {what}, as in one process.")
        print(f"All {len(losses)} losses agree within {apart:.0e} of the largest. No padding.")


if __name__ == "__main__":
    main()
