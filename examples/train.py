# SPDX-License-Identifier: Apache-2.0
"""Train a small language model with its sequence split over the ranks, and the same model in one process.

    torchrun --standalone --nproc-per-node 2 examples/train.py

The text is the standard library of the running Python. Both runs start from one seed and use the same
batches, so their losses and gradients must agree. If they do not, all ranks report the difference and exit
with an error. demo.py measures what the ranks save and what their exchanges take.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is imported: silence its profiler

import demo
import torch
import torch.distributed as dist
from model import LAYOUTS, ByteModel, alone
from torch import Tensor, nn
from torch.autograd.profiler import profile
from tqdm import tqdm

import spar
from spar import SequenceLayout

TOLERANCE = 1e-4  # relative, of losses and gradients in float32
WARM_UP, PROFILED = 5, 5  # first and last steps, left out of a step's time

Batch = tuple[Tensor, Tensor]  # tokens and labels, each [batch, seq]


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    # By default neither the tokens nor the heads divide by four.
    parser.add_argument("--layout", choices=LAYOUTS, default="plain", help="how the sequence is split")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=510, help="tokens in a sequence")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--corpus-bytes", type=int, default=2**21, help="upper limit of the text to read")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="file to draw the curves into")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node 2 examples/train.py")
    if args.layout == "hybrid" and int(os.environ["WORLD_SIZE"]) % 2:
        parser.error(f"--layout hybrid needs an even number of ranks, got {os.environ['WORLD_SIZE']}")
    if args.steps <= WARM_UP + PROFILED:
        parser.error(f"--steps must be more than {WARM_UP + PROFILED}, got {args.steps}")
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of --heads, got {args.dim} and {args.heads}")
    return args


def read_corpus(args: Namespace) -> Tensor:
    """Read the first bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= args.corpus_bytes:
            break
    if min(len(text), args.corpus_bytes) <= args.seq:
        sys.exit(f"the text has {len(text)} bytes; must be more than --seq, {args.seq}")
    return torch.frombuffer(text[: args.corpus_bytes], dtype=torch.uint8)


def make_batches(args: Namespace, corpus: Tensor) -> list[Batch]:
    generator = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(len(corpus) - args.seq, (args.steps, args.batch, 1), generator=generator)
    windows = corpus[starts + torch.arange(args.seq + 1)].long()
    # A label is the next byte, which another rank may hold: shift here, split later.
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def make_model(args: Namespace, seq: int) -> ByteModel:
    torch.manual_seed(args.seed)
    return ByteModel(seq, args.dim, args.heads, args.layers)


def activations(args: Namespace, layout: SequenceLayout) -> int:
    """Return the bytes that this rank keeps for backward of a sequence as long as the layout's."""
    tokens = torch.zeros(args.batch, layout.total, dtype=torch.long)
    return demo.kept_bytes(make_model(args, layout.total), (tokens, tokens.clone()), layout)


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


class Momentum:
    """Stochastic gradient descent. Adam, which ignores the size of gradients, would hide a wrong reduction.

    torch.optim's is not used because it imports torch's compiler: two seconds on every rank.
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.parameters = list(model.parameters())
        self.velocities = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for p, velocity, gradient in zip(self.parameters, self.velocities, gradients, strict=True):
            velocity.mul_(self.momentum).add_(gradient.view_as(p))
            p.sub_(velocity, alpha=self.lr)


class Difference(NamedTuple):
    own: float
    single: float  # of one process
    error: float  # relative

    @classmethod
    def of_losses(cls, own: float, single: float) -> Difference:
        return cls(own, single, abs(own - single) / abs(single))

    @classmethod
    def of_gradients(cls, own: Tensor, single: Tensor) -> Difference:
        """Compare the element that differs most, relative to the largest: many gradients are close to 0."""
        apart = (own - single).abs()
        worst = int(apart.argmax())
        return cls(float(own[worst]), float(single[worst]), float(apart[worst] / single.abs().max()))


def demand_agreement(what: str, step: int, difference: Difference) -> None:
    """Exit on every rank, with the values of all, if one rank differs too much from one process."""
    seen = [difference] * dist.get_world_size()
    dist.all_gather_object(seen, difference)
    parted = [rank for rank, d in enumerate(seen) if not d.error <= TOLERANCE]  # "not" so that NaN counts
    if parted:
        lines = [f"rank {dist.get_rank()}: step {step}: {what} differs from one process on ranks {parted}"]
        lines[0] += f" (allowed: {TOLERANCE:.0e})"
        for rank, d in enumerate(seen):
            lines.append(f"    rank {rank}: {d.own:.9g}, one process {d.single:.9g}: {d.error:.1e} apart")
        sys.exit("\n".join(lines))


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # of each loss from one process, relative
    gradients: Tensor | None = None  # of the first step
    seconds: list[float] = field(default_factory=list)  # of each step
    exchanges: list[float] = field(default_factory=list)  # seconds of each in the profiled steps, in order

    def step_seconds(self) -> float:
        timed = self.seconds[WARM_UP:-PROFILED]
        return sum(timed) / len(timed)


def make_bar(title: str, steps: int) -> tqdm[None]:
    terminal = sys.stderr.isatty()
    return tqdm(
        total=steps,
        desc=title,
        disable=dist.get_rank() != 0,
        ascii=not terminal,
        # A log cannot redraw a bar: each update is a line there, so print few.
        mininterval=0.1 if terminal else 2.0,
        bar_format="{l_bar}{bar:20}{r_bar}" + ("" if terminal else "\n"),
    )


def train(
    args: Namespace, layout: SequenceLayout, batches: Sequence[Batch], title: str, single: Run | None = None
) -> Run:
    """Train a new model. Given the run of one process, every rank compares its own after each step."""
    model = make_model(args, args.seq)
    optimizer = Momentum(model, args.lr)
    sizes = [p.numel() for p in model.parameters()]
    profiler = profile()  # torch.profiler's own core, which does not load torch's compiler
    run = Run()
    with ExitStack() as stack:
        bar = stack.enter_context(make_bar(title, args.steps))
        for step, (tokens, labels) in enumerate(batches):
            if step == args.steps - PROFILED:
                stack.enter_context(profiler)
            start = time.perf_counter()
            model.zero_grad()
            # Over all tokens: summed over the ranks, this is the mean loss of one process.
            loss = model(tokens, labels, layout).sum() / labels.numel()
            loss.backward()
            # DistributedDataParallel and FSDP average instead: call (loss * ranks).backward() there.
            gradients = sum_over_ranks(flat_gradients(model), layout.group)
            optimizer.step(torch.split(gradients, sizes))
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(float(sum_over_ranks(loss.detach(), layout.group)))
            if step == 0:
                run.gradients = gradients
            if single is not None:
                loss_apart = Difference.of_losses(run.losses[step], single.losses[step])
                demand_agreement("the loss", step, loss_apart)
                run.differences.append(loss_apart.error)
            bar.set_postfix_str(f"loss {run.losses[step]:.3f}", refresh=False)
            bar.update()
    run.exchanges = demo.exchange_seconds(profiler)
    return run


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    corpus = read_corpus(args)
    batches = make_batches(args, corpus)
    make_layout = LAYOUTS[args.layout]
    layout = make_layout(args.seq)
    group = dist.new_group([0])  # collective: every rank calls it
    title = f"{world} rank{'s' * (world > 1)}"
    if rank == 0:
        heads = spar.cal_split_sizes(args.heads, world)
        print(f"{title}, {args.layout} layout: {args.seq} tokens as {list(layout.sizes)}", end="")
        print(f", {args.heads} heads as {heads}" if args.layout != "hybrid" else "")
        print(f"text: {len(corpus):,} bytes of {sysconfig.get_paths()['stdlib']}/*.py", flush=True)

    known: list[Any] = [None, None]
    if rank == 0:
        whole = alone(layout, group)
        known[0] = train(args, whole, batches, "one process")
        known[1] = activations(args, whole)
    dist.broadcast_object_list(known, src=0)
    single, kept_alone = known

    spread = train(args, layout, batches, title, single)
    assert spread.gradients is not None
    gradients = Difference.of_gradients(spread.gradients, single.gradients)
    demand_agreement("a summed gradient", 0, gradients)

    def kept(seq: int) -> int:
        """Return the bytes that the rank with most keeps for backward of so many tokens."""
        return demo.largest(activations(args, make_layout(seq)))

    memory = demo.Memory.of(kept_alone, args.seq, kept, world)
    times = demo.Times.of(spread.exchanges, PROFILED)
    usual = demo.beside_the_usual_code(args.batch, args.heads, args.dim // args.heads, layout)
    if rank == 0:
        demo.draw(args.out, f"{title}, {args.layout} layout", single, spread, TOLERANCE)
        print(f"loss: {spread.losses[0]:.3f} at first, {spread.losses[-1]:.3f} after {args.steps} steps")
        apart = f"losses {max(spread.differences):.0e}, first step's gradients {gradients.error:.0e}"
        print(f"largest difference from one process: {apart} (relative; allowed: {TOLERANCE:.0e})")
        print(memory.line(args.seq))
        print(demo.speed(spread.step_seconds(), single.step_seconds(), world))
        print(times.line(sum(spread.seconds[-PROFILED:]) / PROFILED))
        print(usual)
        print(demo.transport(layout.group))
        print(f"curves: {args.out}", flush=True)
    dist.barrier()  # no rank leaves before the picture is written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
