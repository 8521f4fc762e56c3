# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a check: one for each GPU, or two on one."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from report import FAILED, Report
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

import spar

ON_ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
Run = Callable[[int, int, str, argparse.Namespace], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", help="torch's backend, instead of nccl (cpu: gloo)")
    parser.add_argument("--ranks", type=int, help="number of ranks, instead of one for each GPU")
    parser.add_argument("--data", help="also write what was found to this file, as JSON")


def device_of(kind: str, rank: int) -> torch.device:
    """Make a rank's device the current one, and return it."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def loaded_nccl() -> tuple[int, int, int]:
    """Return the version of the loaded library; torch.cuda.nccl.version() names what torch was built with."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:  # linked into torch
        major, minor, patch, *_ = torch.cuda.nccl.version()
        return major, minor, patch
    return version.value // 10000, version.value // 100 % 100, version.value % 100


def count(options: argparse.Namespace, who: str, shares_gpus: bool = False) -> int:
    """Return how many ranks to start; skip what this machine cannot run.

    shares_gpus: whether more ranks than GPUs need nothing of NCCL.
    """
    report = Report(options.data)
    if options.backend not in dist.Backend.backend_list:
        report.skip(f"{who}: this torch has no backend {options.backend}")
    if options.device == "cpu":
        return options.ranks or 2
    if not torch.cuda.is_available():
        report.skip(f"{who}: torch has no CUDA device; nothing was checked")
    world = options.ranks or max(2, torch.cuda.device_count())
    if world > torch.cuda.device_count() and not shares_gpus:
        if loaded_nccl() < (2, 30, 0):
            report.skip(f"{who}: two ranks on one GPU need NCCL 2.30 or newer")
        os.environ |= ON_ONE_GPU
    return world


def attempt(report: Report, what: str, step: Callable[[], object]) -> None:
    """Run a step; report its error, and go on, so that it hides no other. One of the group is raised."""
    try:
        step()
    except spar.SparError:
        raise
    except Exception as error:
        report.expect(False, f"{what}: {type(error).__name__}: {str(error)[:500]}")


def end(report: Report) -> None:
    """End a rank's checks; exit with the report's status where something was wrong."""
    dist.barrier()
    dist.destroy_process_group()
    if report.status():
        sys.exit(report.status())


def start(run: Run, options: argparse.Namespace, who: str, shares_gpus: bool = False) -> int:
    """Call run(rank, world, file of a store, options) in a process for each rank; return the exit status."""
    is_shared = shares_gpus and torch.cuda.device_count() == 1
    options.backend = options.backend or ("gloo" if options.device == "cpu" or is_shared else "nccl")
    world = count(options, who, shares_gpus)
    method = "spawn" if options.device == "cuda" else "fork"  # CUDA does not work in a fork
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = world, f"{folder}/store", options
        try:
            start_processes(run, arguments, nprocs=world, start_method=method)
        except ProcessRaisedException as error:
            print(f"{who}: wrong:\n{error}", file=sys.stderr)
            return FAILED
        except ProcessExitedException as error:
            print(f"{who}: {error}", file=sys.stderr)
            return 128 - error.exit_code if error.exit_code < 0 else FAILED
    return 0
