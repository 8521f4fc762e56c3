"""Train a small language model with its sequence split over four ranks, and the same model in one process.

    torchrun --standalone --nproc-per-node 4 examples/train.py

The text is the standard library of the running Python. Both runs start from one seed and use the same
batches, so their losses and gradients must agree. If they do not, all ranks report the difference and exit
with an error.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is imported: silence its profiler

import torch
import torch.distributed as dist
from model import LAYOUTS, ByteModel, Sharding
from torch import Tensor, nn
from torch.autograd.profiler import profile
from tqdm import tqdm

import spar

TOLERANCE = 1e-4  # relative, of losses and gradients in float32
WARM_UP, PROFILED = 5, 5  # first and last steps, left out of the tokens per second
# spar's events in a profile: an exchange, and a wait for a shard that goes round a ring
EVENTS = ("spar::exchange", "spar::attention", "spar::backward of attention")

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
        parser.error("start it with: torchrun --standalone --nproc-per-node 4 examples/train.py")
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


def make_model(args: Namespace) -> ByteModel:
    torch.manual_seed(args.seed)
    return ByteModel(args.seq, args.dim, args.heads, args.layers)


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def local_loss(losses: Tensor, labels: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's losses over the number of all tokens; summed over ranks, one process's mean loss."""
    return losses.sum() / labels.numel()


def gathered_loss(losses: Tensor, labels: Tensor, sharding: Sharding) -> Tensor:
    """Return the mean loss of all tokens, the same on every rank."""
    return sharding.gather(losses, 1).mean()


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
    seconds: list[float] = field(default_factory=list)  # of each step
    share: float = 0.0  # spar's share of the profiled steps' time
    exchanges: float = 0.0  # for each step

    def speed(self, tokens: int) -> float:
        timed = self.seconds[WARM_UP:-PROFILED]
        return tokens * len(timed) / sum(timed)


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
    args: Namespace,
    sharding: Sharding,
    batches: Sequence[Batch],
    title: str,
    single: Sequence[float] | None = None,
) -> Run:
    """Train a new model. Given the losses of one process, every rank compares its own after each step."""
    model = make_model(args)
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
            loss = local_loss(model(tokens, labels, sharding), labels, sharding)
            loss.backward()
            # DistributedDataParallel and FSDP average instead: call (loss * ranks).backward() there.
            gradients = sum_over_ranks(flat_gradients(model), sharding.layout.group)
            optimizer.step(torch.split(gradients, sizes))
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(float(sum_over_ranks(loss.detach(), sharding.layout.group)))
            if single is not None:
                demand_agreement("the loss", step, Difference.of_losses(run.losses[step], single[step]))
            bar.set_postfix_str(f"loss {run.losses[step]:.3f}", refresh=False)
            bar.update()
    exchanges = [event for event in profiler.key_averages() if event.key in EVENTS]
    run.share = sum(event.cpu_time_total for event in exchanges) / 1e6 / sum(run.seconds[-PROFILED:])
    run.exchanges = sum(event.count for event in exchanges) / PROFILED
    return run


Loss = Callable[[Tensor, Tensor, Sharding], Tensor]


def first_gradients(model: ByteModel, sharding: Sharding, batch: Batch, loss: Loss) -> Tensor:
    model.zero_grad()
    loss(model(*batch, sharding), batch[1], sharding).backward()
    return flat_gradients(model)


# Which reduction over the ranks yields the gradient of one process. Columns: the loss, shard's grad_scale,
# gather's, where the parameter is used, the reduction. docs/gradients.md has the same as factors.
#
# - The backward of all_to_all is its exact transpose. A rank gets the derivative of the sum of all ranks'
#   local losses with respect to its own copy of a parameter, and the gradient is the sum over the copies.
# - The split's backward gathers its slices' gradients. For a parameter before the split (the table of
#   positions) every rank has the whole gradient. "down" divides it by the number of ranks, so that the sum
#   over the copies is right again.
# - A gathered loss is the same on every rank. The gather's backward keeps the rank's own slice, and "up"
#   makes it `world` times larger, so that the gradient is the mean over the copies.
EVERYWHERE, INSIDE, BEFORE = "all", "between split and gather", "before the split"
CLAIMS: tuple[tuple[Loss, str | None, str | None, str, str], ...] = (
    (local_loss, "down", "up", EVERYWHERE, "sum"),
    (gathered_loss, "down", "up", EVERYWHERE, "average"),
    (local_loss, None, None, INSIDE, "sum"),
    (local_loss, None, None, BEFORE, "average"),
    (gathered_loss, None, None, INSIDE, "sum"),
    (gathered_loss, None, None, BEFORE, "average"),
)
ADVICE = """\
With the defaults, sum all gradients of a local loss, and average those of a gathered loss. DDP and FSDP
average: multiply a local loss by the number of ranks there. With None on both, sum the gradients of
parameters between split and gather, and average (or keep) those of parameters before the split."""


class Measured(NamedTuple):
    how: str  # the loss, and grad_scale of split and gather
    where: str
    right: str
    average: float  # largest relative difference from one process
    sum: float


def measure_reductions(args: Namespace, sharding: Sharding, batch: Batch, single: Tensor) -> list[Measured]:
    """Compare the first step's gradients, averaged and summed over the ranks, with those of one process."""
    model = make_model(args)
    before = torch.cat([torch.full([p.numel()], p is model.positions) for p in model.parameters()])
    parts = {EVERYWHERE: before | True, INSIDE: ~before, BEFORE: before}
    totals: dict[tuple[Loss, Sharding], Tensor] = {}
    group = sharding.layout.group
    rows = []
    for loss, shard_scale, gather_scale, where, right in CLAIMS:
        scaled = replace(sharding, shard_scale=shard_scale, gather_scale=gather_scale)
        if (loss, scaled) not in totals:
            totals[loss, scaled] = sum_over_ranks(first_gradients(model, scaled, batch, loss), group)
        own, expected = totals[loss, scaled][parts[where]], single[parts[where]]
        average = Difference.of_gradients(own / group.size(), expected)
        summed = Difference.of_gradients(own, expected)
        how = f"{loss.__name__.removesuffix('_loss')}, {shard_scale} / {gather_scale}"
        what = f"the {right} of the gradients ({where}; {how})"
        demand_agreement(what, 0, average if right == "average" else summed)
        rows.append(Measured(how, where, right, average.error, summed.error))
    return rows


def draw(path: Path, title: str, single: Run, spread: Run, errors: list[float]) -> None:
    from matplotlib.figure import Figure  # on rank 0 only; without pyplot it always draws with Agg

    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(single.losses, color="tab:orange", linewidth=6, alpha=0.5, label="one process")
    losses.plot(spread.losses, color="tab:blue", linewidth=1.5, label=title)
    losses.set(title="A byte-level language model of Python's standard library", ylabel="loss, nats per byte")
    apart.plot(errors, ".-", color="tab:blue", label="relative difference")
    apart.axhline(TOLERANCE, color="tab:red", linestyle="--", label="allowed")
    apart.set_yscale("symlog", linthresh=1e-8)  # a difference may be 0
    apart.set(xlabel="step", ylim=(0, 1e-2), yticks=[0, 1e-8, 1e-6, 1e-4])
    for axes in (losses, apart):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=120)


def report(
    args: Namespace,
    ranks: str,
    group: dist.ProcessGroup | None,
    single: Run,
    spread: Run,
    errors: list[float],
    rows: list[Measured],
) -> None:
    print(f"\n step  loss: one process  {ranks:>11}  relative difference")
    for step in sorted({*range(0, args.steps, 5), args.steps - 1}):
        print(f"{step:5}  {single.losses[step]:17.6f}  {spread.losses[step]:11.6f}  {errors[step]:19.1e}")
    largest = f"losses {max(errors):.1e}, first step's gradients {rows[0].sum:.1e}"
    print(f"largest difference: {largest} (allowed: {TOLERANCE:.0e})")

    print("\nthe first step's gradients, reduced over the ranks: relative difference from one process")
    print("loss, grad_scale of split / gather  parameters                average      sum  right")
    for row in rows:
        print(f"{row.how:34}  {row.where:24}  {row.average:7.1e}  {row.sum:7.1e}  {row.right}")
    print(ADVICE)

    tokens = args.batch * args.seq
    speeds = f"{spread.speed(tokens):,.0f} on {ranks}, {single.speed(tokens):,.0f} in one process"
    print(f"\ntokens per second: {speeds}; one thread each, {len(os.sched_getaffinity(0))} cores")
    print(f"time in spar: {spread.share:.1%} of a step in {spread.exchanges:g} exchanges", end="")
    print(" (mean over the ranks, including waits for slower ones)")
    transport = spar.transport(group)
    print(f"transport: {transport.name} ({transport.reason})")
    for name, reason in transport.rejected:
        print(f"    not {name}: {reason}")
    print(f"curves: {args.out}", flush=True)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    corpus = read_corpus(args)
    batches = make_batches(args, corpus)
    sharding = Sharding(LAYOUTS[args.layout](args.seq))
    group = dist.new_group([0])  # collective: every rank calls it
    alone = sharding.alone(group) if rank == 0 else sharding  # the other ranks do not use it
    ranks = f"{world} rank{'s' * (world > 1)}"
    title = f"{ranks}, {args.layout} layout"
    if rank == 0:
        heads = spar.cal_split_sizes(args.heads, world)
        print(f"{title}: {args.seq} tokens as {list(sharding.layout.sizes)}, {args.heads} heads as {heads}")
        print(f"text: {len(corpus):,} bytes of {sysconfig.get_paths()['stdlib']}/*.py", flush=True)

    known: list[Any] = [None, None]
    if rank == 0:
        known[0] = train(args, alone, batches, "one process")
        known[1] = first_gradients(make_model(args), alone, batches[0], local_loss)
    dist.broadcast_object_list(known, src=0)
    single, gradients = known

    rows = measure_reductions(args, sharding, batches[0], gradients)
    spread = train(args, sharding, batches, ranks, single.losses)
    shares = [spread.share] * world
    dist.all_gather_object(shares, spread.share)
    spread.share = sum(shares) / world
    if rank == 0:
        errors = [Difference.of_losses(a, b).error for a, b in zip(spread.losses, single.losses, strict=True)]
        draw(args.out, title, single, spread, errors)
        report(args, ranks, sharding.layout.group, single, spread, errors, rows)
    dist.barrier()  # no rank leaves before the picture is written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
