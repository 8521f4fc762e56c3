# SPDX-License-Identifier: Apache-2.0
"""Check and time all operations between GPUs: python benchmarks/gpu_ops.py [--out FILE].

Needs spar and torch with CUDA. Starts a rank for each GPU; with one GPU, two ranks on it, which needs NCCL
2.30. The exit status is 1 if something is wrong, 2 if there is no device to run on, and 128 + N if signal N
ended a rank. `--device cpu` runs the same operations over shared memory, without the times. `--loop` leaves
NCCL to a library that was preloaded, for two ranks on one GPU (stages/loop.py), without the times too.

Correctness: forward and backward of every operation, with uneven pieces and several dtypes, against the whole
tensors; replays of a CUDA graph; a rank that does not make a call, closes the group or makes another call.
Speed: the host time of a call, and all_to_all against the usual formulation (permute, all_to_all_single,
permute).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_ranks
import torch
import torch.distributed as dist
from report import Report
from torch import Tensor

import spar
from spar._commands.bench import formulations
from spar._group.registry import group_of

MIB = 1 << 20
SIZES = (MIB // 4, 2 * MIB, 32 * MIB, 200 * MIB)
HOST_GOALS = {2 << 10: 12, 8 * MIB: 14, 200 * MIB: 16}  # bytes of a rank: microseconds of the host, at most
Operation = Callable[[Tensor], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    check(got.shape == wanted.shape and torch.equal(got.cpu(), wanted), what)


def there_and_back(
    name: str, forward: Operation, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor, device: torch.device
) -> None:
    """Check both directions of one operation against y and dx; all tensors are on the CPU."""
    leaf = x.clone().to(device).requires_grad_()
    out = forward(leaf)
    out.backward(dy.to(device))
    same(out.detach(), y, f"{name} of {x.dtype}")
    assert leaf.grad is not None
    same(leaf.grad, dx, f"the gradient of {name} of {x.dtype}")


def check_operations(device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn, dtype in enumerate(DTYPES):
        random = torch.Generator().manual_seed(turn)  # the same on all ranks
        seq, heads = 400 * world + 3, 3 * world + 1
        whole, grads = (torch.randn(2, seq, heads, 24, generator=random).to(dtype) for _ in range(2))
        sizes = spar.cal_split_sizes(seq, world)

        def part(x: Tensor, dim: int = 1) -> Tensor:
            return x.tensor_split(world, dim)[rank].contiguous()

        def zigzag(x: Tensor) -> Tensor:
            chunks = x.chunk(2 * world, 1)
            return torch.cat([chunks[rank], chunks[-1 - rank]], 1)

        def packed(x: Tensor) -> Tensor:
            return torch.cat([part(document) for document in x.split(lengths, 1)], 1)  # noqa: B023

        lengths = [5, seq - 12, 7]
        table = spar.cal_split_sizes_multi(lengths, world)
        there_and_back(
            "all_to_all",
            lambda x: spar.all_to_all(x, None, 2, 1, gather_size=seq),  # noqa: B023
            *(part(whole), part(whole, 2), part(grads, 2), part(grads)),
            device,
        )
        # the shards of a total, its split, and its gather
        kinds: dict[str, tuple[Callable[..., Tensor], int, Operation, Operation]] = {
            "": (
                part,
                seq,
                lambda x: spar.split_forward_gather_backward(x, None, 1),
                lambda x: spar.gather_forward_split_backward(x, None, 1, sizes),  # noqa: B023
            ),
            "zigzag ": (
                zigzag,
                2 * world * 90,
                lambda x: spar.load_balanced_split_forward_gather_backward(x, None, 1),
                lambda x: spar.load_balanced_gather_forward_split_backward(x, None, 1),
            ),
            "packed ": (
                packed,
                seq,
                lambda x: spar.packed_data_split_forward_gather_backward(x, None, lengths, 1),  # noqa: B023
                lambda x: spar.packed_data_gather_forward_split_backward(x, table, None, 1),  # noqa: B023
            ),
        }
        for kind, (shard, total, split, gather) in kinds.items():
            x, g = whole[:, :total], grads[:, :total]
            there_and_back(f"{kind}split", split, x, shard(x), shard(g), g / world, device)
            there_and_back(f"{kind}gather", gather, shard(x), x, g, shard(g) * world, device)


def check_graph(device: torch.device) -> None:
    """Check replays of a small exchange, and of one with several steps."""
    world = dist.get_world_size()
    for seq in (64, 16 * 1024):
        x = torch.zeros(1, seq, 8 * world, 64, device=device)
        spar.all_to_all(x, None)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = spar.all_to_all(x, None)
        for value in (1.0, 2.0):
            x.fill_(value + dist.get_rank())
            graph.replay()
            torch.cuda.synchronize()
            wanted = torch.arange(world).repeat_interleave(seq).add(value)
            same(y[0, :, 0, 0], wanted, f"a replay with {seq} tokens")


ABSENCE_S = 5


def check_absence(device: torch.device) -> None:
    """Rank 0 makes no call; the others' streams continue at the timeout, and their next call raises."""
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # torch's communicator, outside of the limit
    x = torch.zeros(4, device=device)
    spar.gather_forward_split_backward(x, group, 0)
    group_of(group).timeout = ABSENCE_S  # not SPAR_TIMEOUT, which limits the set-up, too
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        time.sleep(ABSENCE_S + 3)
        return
    begin = time.monotonic()
    spar.gather_forward_split_backward(x, group, 0)
    check(time.monotonic() - begin < 1, "the call waited for the device")
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    check(-0.5 < waited - ABSENCE_S < 2, f"the stream continued after {waited:.1f} s, not {ABSENCE_S} s")
    expect_error(group, x, spar.ExchangeTimeoutError, "a timeout")


def expect_error(group: dist.ProcessGroup, x: Tensor, error: type[spar.SparError], what: str) -> None:
    try:
        spar.gather_forward_split_backward(x, group, 0)
    except error:
        return
    check(False, f"a call after {what} did not raise {error.__name__}")


def meet() -> None:
    """Wait on the host for all ranks; NCCL's barrier would wait in the stream, behind calls that hang."""
    store, rank, world = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    number = store.add(f"meetings of rank {rank}", 1)
    if store.add(f"at meeting {number}", 1) == world:
        store.set(f"meeting {number}", "")
    store.wait([f"meeting {number}"])


def check_close(device: torch.device) -> None:
    """The last rank closes the group; the others' next call raises, and WORLD stays usable."""
    group, x = dist.new_group(), torch.zeros(4, device=device)
    spar.gather_forward_split_backward(x, group, 0)
    torch.cuda.synchronize()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last:
        spar.close(group)
    meet()
    time.sleep(0.5)  # peers learn of it from a watchdog
    if not is_last:
        expect_error(group, x, spar.GroupBrokenError, "a peer's close")
    meet()
    spar.gather_forward_split_backward(x, None, 0)
    torch.cuda.synchronize()


def check_abort(device: torch.device) -> None:
    """Rank 0 makes another call: it raises, the others' streams are ended, and their next call raises."""
    group, x = dist.new_group(), torch.zeros(4, 2, device=device)
    spar.gather_forward_split_backward(x, group, 0)
    torch.cuda.synchronize()
    begin = time.monotonic()
    if dist.get_rank() != 0:
        spar.gather_forward_split_backward(x, group, 0)
    meet()
    if dist.get_rank() == 0:
        expect_error(group, x.new_zeros(4, 3), spar.MismatchError, "a peer's other call")
    torch.cuda.synchronize()
    if dist.get_rank() != 0:
        time.sleep(0.5)
        expect_error(group, x, spar.MismatchError, "a peer's other call")
    check(time.monotonic() - begin < 10, "an abort took longer than 10 s")


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Return a call's median time on the device."""
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def even_input(size: int, device: torch.device) -> Tensor:
    """Return a rank's input of an all_to_all as before attention, of `size` bytes or a little less."""
    world = dist.get_world_size()
    heads = 8 * world if size >= MIB // 4 else world
    tokens = max(1, size // (2 * 128 * heads))
    return torch.zeros(1, tokens, heads, 128, device=device, dtype=torch.bfloat16)


def host_us(x: Tensor) -> float:
    """Return the host time of a call, of several that follow each other."""
    for _ in range(3):
        spar.all_to_all(x, None)
    spent = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            spar.all_to_all(x, None)
        spent.append((time.perf_counter() - begin) / 20 * 1e6)
    torch.cuda.synchronize()
    return min(spent)


def times(device: torch.device, report: Report) -> None:
    """Time all_to_all beside the usual formulation, where torch's backend has it, its permutes and a copy."""
    world = dist.get_world_size()
    host = {size: host_us(even_input(size, device)) for size in HOST_GOALS}
    report.figure("call_us", host)
    report.say("Host time of a call, of 20 that follow each other:")
    report.table("bytes of a rank", "us", "goal: at most")
    for size, goal in HOST_GOALS.items():
        report.row(f"{size // 1024} KiB", f"{host[size]:.1f}", str(goal))
    columns = ("spar", "permute + all_to_all_single + permute", "its permutes alone", "a copy of the input")
    report.table("bytes of a rank", *columns)
    found: dict[str, list[float | None]] = {}
    for size in SIZES:
        x = even_input(size, device)

        def permutes(x: Tensor = x) -> Tensor:
            parts = x.unflatten(2, (world, -1)).movedim(2, 0).contiguous()
            back: Tensor = parts.movedim(0, 1).flatten(1, 2).contiguous()
            return back

        calls: list[Callable[[], object]] = [
            lambda x=x: spar.all_to_all(x, None),  # type: ignore[misc]
            lambda x=x: formulations.exchange(x, 2, 1),  # type: ignore[misc]
            permutes,
            x.clone,
        ]
        row: list[float | None] = []
        for call in calls:
            try:
                for _ in range(3):
                    call()
                row.append(microseconds(call, 10))
            except (RuntimeError, ValueError):  # not every backend has all_to_all_single of CUDA tensors
                row.append(None)
        meet()
        found[f"{size // 1024} KiB"] = row
        cells = ["not possible" if us is None else f"{us:.0f} us" for us in row]
        report.row(f"{size // 1024} KiB", *cells)
    report.figure("us", found)


FAULTS = {
    "If a rank closes the group, the next call of its peers raises.": check_close,
    "If a rank makes another call, all ranks raise, and their streams continue.": check_abort,
    "If a rank makes no call, the stream continues at the timeout; the next call raises.": check_absence,
}


def check_gpus(device: torch.device, report: Report, loop: bool) -> None:
    name, ranks = torch.cuda.get_device_name(device), dist.get_world_size()
    version = "the loop library" if loop else "NCCL " + ".".join(map(str, gpu_ranks.loaded_nccl()))
    report.say(f"{name} x {torch.cuda.device_count()}, {ranks} ranks, torch {torch.__version__}, {version}.")
    check_graph(device)
    report.say("Replays of CUDA graphs are correct.")
    report.say()
    if loop:
        groups = ctypes.CDLL("libnccl.so.2").loop_groups()
        check(groups > 0, "no exchange used the loop library: is it preloaded?")
        report.figure("groups", groups)
    for what, check_fault in FAULTS.items():
        check_fault(device)
        report.say(f"- {what}")
    if ranks <= torch.cuda.device_count():  # else they take turns
        report.say()
        times(device, report)


CLOSE_S = 20


def end_group() -> None:
    """Destroy torch's group. A destruction that hangs ends the process with the stacks of its threads."""
    faulthandler.dump_traceback_later(CLOSE_S, exit=True)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    kind, loop, out = options.device, options.loop, options.out
    device = gpu_ranks.device_of(kind, rank)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(options.backend, f"file://{store}", limit, rank=rank, world_size=world)
    report = Report(options.data if rank == 0 else None, rank == 0)
    check_operations(device)
    transport = spar.transport(None, device)
    check(transport.name == ("nccl" if kind == "cuda" else "shm"), str(transport))
    report.say(
        f"{world} ranks, transport {transport.name}: all operations are correct, forward and backward."
    )
    if kind == "cuda":
        check_gpus(device, report, loop)
    if rank == 0 and out:
        Path(out).write_text("\n".join(report.lines) + "\n")
    end_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu_ranks.add_arguments(parser)
    parser.add_argument("--loop", action="store_true", help="over a preloaded library instead of NCCL")
    parser.add_argument("--out", help="also write the page to this file")
    options = parser.parse_args()
    if options.loop:
        options.backend = options.backend or "gloo"
    if options.device == "cuda":
        os.environ["SPAR_TRANSPORT"] = "nccl"  # stages/push.py has the other one
    return gpu_ranks.start(run, options, "gpu_ops", shares_gpus=options.loop)


if __name__ == "__main__":
    sys.exit(main())
