# SPDX-License-Identifier: Apache-2.0
"""Compute which ranks form which groups. No communication. From vLLM-Omni."""

from __future__ import annotations

import itertools
import math

from .._checks import check_bool, check_int, check_ints, check_rank_groups, check_str, check_type

DEFAULT_ORDER = "tp-sp-pp-cfg-dp"


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: list[int], mask: list[bool]
) -> list[list[int]]:
    """Compute the rank groups over the masked dims of a layout, first dim fastest. From vLLM-Omni.

    rank = sum over dims k of i_k * (product of the sizes before k). Ranks that differ only in masked dims
    share a group: sizes 2 x 2 x 2 (tp-pp-dp) with only dp masked give [0, 4], [1, 5], [2, 6], [3, 7].

    Args:
        world_size: the product of `parallel_size`.
        parallel_size: the size of each dim.
        mask: for each dim, whether the groups span it.

    Returns:
        The groups, ordered by their first rank.

    Raises:
        ValueError: the sizes do not multiply to `world_size`, or `mask` has another length.
        TypeError: an argument has the wrong type.
    """
    where = "generate_masked_orthogonal_rank_groups"
    world_size = check_int(where, "world_size", world_size, 1)
    parallel_size = check_ints(where, "parallel_size", parallel_size, 1)
    check_type(where, "mask", mask, (list, tuple), "a list of bools")
    for i, masked in enumerate(mask):
        check_bool(where, f"mask[{i}]", masked)
    if len(mask) != len(parallel_size):
        raise ValueError(f"{where}: mask is {mask}; expected one entry for each of the sizes {parallel_size}")
    if math.prod(parallel_size) != world_size:
        raise ValueError(f"{where}: parallel_size is {parallel_size}; expected a product of {world_size}")
    strides = [1, *itertools.accumulate(parallel_size, lambda a, b: a * b)][:-1]

    def over(chosen: bool) -> list[int]:
        """Return the offsets of the ranks over the dims whose mask is `chosen`, the first dim fastest."""
        dims = zip(parallel_size, strides, mask, strict=True)
        steps = [range(0, size * stride, stride) for size, stride, masked in dims if masked == chosen]
        return [sum(offsets) for offsets in itertools.product(*steps[::-1])]

    inside = over(True)
    return [[start + offset for offset in inside] for start in over(False)]


class RankGenerator:
    """Rank groups of a layout of orthogonal dims, the first dim in `order` fastest. From vLLM-Omni.

    Args:
        tp: the size of the tensor dim.
        sp: the size of the sequence dim.
        pp: the size of the pipeline dim.
        cfg: the size of the guidance dim.
        dp: the size of the data dim.
        fs: size of the fully-sharded groups: runs of consecutive ranks, independent of the order. A str here
            is the order, because callers of vLLM-Omni pass it in this position.
        order: dims joined by "-". Omitted dims must have size 1 and are appended.
        rank_offset: the first rank of the layout.

    Attributes:
        world_size: tp * sp * pp * cfg * dp.
        ep: tp * sp * cfg * dp, the ranks that share the experts.
        order, ordered_size: all dims, including the omitted ones, and their sizes.

    Raises:
        RuntimeError: the order omits a dim with a size above 1.
        ValueError: a size is below 1, or the order has an unknown or repeated dim.
        TypeError: an argument has the wrong type.
    """

    def __init__(
        self,
        tp: int,
        sp: int,
        pp: int,
        cfg: int,
        dp: int,
        fs: int | str = 1,
        order: str = DEFAULT_ORDER,
        rank_offset: int = 0,
    ) -> None:
        if isinstance(fs, str) and order == DEFAULT_ORDER:
            order, fs = fs, 1
        sizes = {"tp": tp, "sp": sp, "pp": pp, "cfg": cfg, "dp": dp, "fs": fs}
        self.name_to_size = {k: check_int("RankGenerator", k, size, 1) for k, size in sizes.items()}
        self.tp, self.sp, self.pp, self.cfg, self.dp, self.fs = self.name_to_size.values()
        check_str("RankGenerator", "order", order)
        self.rank_offset = check_int("RankGenerator", "rank_offset", rank_offset, 0)
        self.ep = self.tp * self.sp * self.cfg * self.dp
        self.world_size = self.ep * self.pp
        dims = [name for name in self.name_to_size if name != "fs"]
        listed = order.lower().split("-")
        if len(set(listed)) != len(listed) or not set(listed) <= set(dims):
            raise ValueError(f"RankGenerator: order is {order!r}; expected each of {dims} at most once")
        for name in dims:
            if name not in listed:
                if self.name_to_size[name] != 1:
                    raise RuntimeError(
                        f"RankGenerator: order is {order!r} without {name}, whose size is "
                        f"{self.name_to_size[name]}; expected every dim with a size above 1: add {name}"
                    )
                listed.append(name)
        self.order = "-".join(listed)
        self.ordered_size = [self.name_to_size[name] for name in listed]

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return, for each dim of `order`, whether `token` names it. Both are dims joined by "-".

        Raises:
            ValueError: `token` names a dim that is not in `order`.
        """
        check_str("RankGenerator.get_mask", "order", order)
        check_str("RankGenerator.get_mask", "token", token)
        dims, chosen = order.split("-"), token.split("-")
        if not set(chosen) <= set(dims):
            raise ValueError(f"RankGenerator: token is {token!r}; expected dims of {order!r}, joined by '-'")
        return [dim in chosen for dim in dims]

    def get_ranks(self, token: str, independent_ranks: bool = False) -> list[list[int]]:
        """Return the groups over the dims of `token`, ordered by their first rank.

        Args:
            token: dims joined by "-", such as "tp-dp". The ranks that share the experts are "tp-sp-cfg-dp".
            independent_ranks: instead split the world into runs of consecutive ranks of the token's size
                (for "fs").

        Raises:
            ValueError: `token` has an unknown dim, or its size does not divide the world size.
        """
        check_str("RankGenerator.get_ranks", "token", token)
        check_bool("RankGenerator.get_ranks", "independent_ranks", independent_ranks)
        if independent_ranks:
            names = token.split("-")
            if not set(names) <= set(self.name_to_size):
                raise ValueError(
                    f"RankGenerator: token is {token!r}; expected dims of {', '.join(self.name_to_size)}"
                )
            size = math.prod(self.name_to_size[name] for name in names)
            if self.world_size % size:
                raise ValueError(
                    f"RankGenerator: {token} is {size}; expected a divisor of {self.world_size}, "
                    f"the ranks of {self}"
                )
            groups = [list(range(start, start + size)) for start in range(0, self.world_size, size)]
        else:
            mask = self.get_mask(self.order, token)
            groups = generate_masked_orthogonal_rank_groups(self.world_size, self.ordered_size, mask)
        return [[rank + self.rank_offset for rank in group] for group in groups]

    def __str__(self) -> str:
        """Return the layout as printed in errors, such as "tp 1 x sp 2 x pp 1 x cfg 1 x dp 2 (fs 1)"."""
        sizes = zip(self.order.split("-"), self.ordered_size, strict=True)
        return " x ".join(f"{name} {size}" for name, size in sizes) + f" (fs {self.fs})"


def sequence_rank_groups(
    ulysses: int, ring: int, world_size: int, use_ulysses_low: bool, sp_group_ranks: list[list[int]] | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Compute the ulysses groups and the ring groups inside each sequence group.

    Raises:
        AssertionError: world_size is not a multiple of ulysses * ring.
        ValueError: a size is below 1, a group has another size, or the groups do not cover each rank once.
        TypeError: an argument has the wrong type.
    """
    caller = "set_seq_parallel_pg"
    ulysses = check_int(caller, "sp_ulysses_degree", ulysses, 1)
    ring = check_int(caller, "sp_ring_degree", ring, 1)
    world_size = check_int(caller, "world_size", world_size, 1)
    check_bool(caller, "use_ulysses_low", use_ulysses_low)
    size = ulysses * ring
    layout = f"ulysses {ulysses} x ring {ring}"
    if world_size % size:
        raise AssertionError(f"{caller}: world_size is {world_size}; expected a multiple of {size}, {layout}")
    if sp_group_ranks is None:
        sp_group_ranks = [list(range(start, start + size)) for start in range(0, world_size, size)]
    sp_group_ranks = check_rank_groups(caller, "sp_group_ranks", sp_group_ranks)
    sizes = [len(ranks) for ranks in sp_group_ranks]
    ranks = sorted(itertools.chain(*sp_group_ranks))
    if sizes != [size] * (world_size // size) or ranks != list(range(world_size)):
        raise ValueError(
            f"{caller}: Invalid sp_group_ranks: sp_group_ranks is {sp_group_ranks}; expected "
            f"{world_size // size} groups of {size} ranks, {layout}, with the ranks 0 to {world_size - 1}"
        )
    low = ulysses if use_ulysses_low else ring
    runs = [ranks[i : i + low] for ranks in sp_group_ranks for i in range(0, size, low)]
    strided = [ranks[i::low] for ranks in sp_group_ranks for i in range(low)]
    return (runs, strided) if use_ulysses_low else (strided, runs)
