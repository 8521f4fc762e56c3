# SPDX-License-Identifier: Apache-2.0
"""Random numbers that differ between the ranks of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ._checks import check_int
from ._group.registry import place_of
from .topology.resolve import Group, process_group


@contextmanager
def rank_seed(seed: int, group: Group = None) -> Iterator[None]:
    """Seed torch's generators for this rank, and restore their states at the end.

    Random numbers, such as dropout's, differ between the ranks of the group and between seeds, and are the
    same in every run. Never communicates. It is a context manager and a decorator.

    It seeds the CPU's generator, and the current device's if the group serves its type and torch has
    initialized it. Pass another seed for each step, such as the step's number.

    Recompute in `torch.utils.checkpoint` draws the same numbers if rank_seed is inside the checkpointed
    function, or around the call of `checkpoint` with `preserve_rng_state=True`, its default.

    Args:
        seed: any int, the same on all ranks of the group.
        group: all ranks that hold different tokens: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name,
            or None for the current topology's sequence group (WORLD if there is none).
    """
    real = process_group(group, "rank_seed")
    _, world, rank = place_of(real)
    mixed = mixed_seed(check_int(f"rank_seed on rank {rank} of {world}", "seed", seed), rank)
    with preserved(real) as device:
        torch.default_generator.manual_seed(mixed)
        if device is not None:
            torch.get_device_module(device).manual_seed(mixed)
        yield


@contextmanager
def preserved(group: dist.ProcessGroup) -> Iterator[str | None]:
    """Restore the states of torch's generators at the end: the CPU's, and the current device's.

    Yields the type of that device; None if only the CPU's generator is to be seeded.
    """
    if (device := _device(group)) is None:
        with torch.random.fork_rng(devices=[]):
            yield None
        return
    with torch.random.fork_rng([torch.get_device_module(device).current_device()], device_type=device):
        yield device


def mixed_seed(seed: int, rank: int) -> int:
    """Return a seed of 64 bits; its lower 32 bits, which are all that the CPU uses, differ between ranks."""
    hashed = int.from_bytes(hashlib.blake2b(b"%d" % seed, digest_size=8).digest(), "little")
    odd = 0x9E3779B97F4A7C15  # so that rank * odd differs between all ranks, modulo 2^32 as well
    return (hashed + rank * odd) % 2**64


def _device(group: dist.ProcessGroup) -> str | None:
    """Return the type of the device whose generator is to be seeded besides the CPU's."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or all(device.type != accelerator.type for device in group._device_types):
        return None
    initialized = getattr(torch.get_device_module(accelerator.type), "is_initialized", bool)
    return accelerator.type if initialized() else None
