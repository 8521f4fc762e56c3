# SPDX-License-Identifier: Apache-2.0
"""Errors for bad arguments name the argument and its value, for each parameter of the public API."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import spar
import spar.data
import spar.parallel_state
import spar.sharding
import spar.topology
import spar.utils
from spar.parallel_state import GroupCoordinator, RankGenerator

pytestmark = pytest.mark.quick

NOT_AN_INT: list[Any] = ["2", 2.0, None, True, [2], 1j, numpy.float32(2), torch.tensor(True), torch.zeros(2)]
NOT_A_BOOL: list[Any] = ["no", 0, 1, None, [True]]
NOT_A_STR: list[Any] = [2, None, b"gloo", ["gloo"]]
NOT_A_LIST: list[Any] = ["01", 2, None, {0: 1}]
BAD: dict[str, list[Any]] = {
    "int": NOT_AN_INT,
    "size": [*NOT_AN_INT, 0, -1],
    "size or order": [value for value in [*NOT_AN_INT, 0, -1] if not isinstance(value, str)],
    "rank": [*NOT_AN_INT, -1, 10**30],
    "offset": [*NOT_AN_INT, -1],
    "int or -1": [*NOT_AN_INT, -2],
    "int or None": [value for value in NOT_AN_INT if value is not None],
    "dim": [*NOT_AN_INT, 5, -5],
    "bool": NOT_A_BOOL,
    "str": NOT_A_STR,
    "str or None": [value for value in NOT_A_STR if value is not None],
    "ints": [*NOT_A_LIST, [1.5], ["1"], [True]],
    "bools": [*NOT_A_LIST, [0], ["yes"]],
    "rank groups": [*NOT_A_LIST, [0], [["1"]], [[True]], [[-1]]],
    "rank groups or None": [value for value in [*NOT_A_LIST, [0], [["1"]]] if value is not None],
    "number": ["1", None, [1.0], 1j],
    "seconds": ["1", None, [1.0], True, 1j, -1],
    "tensor": [1, None, [1.0], "x"],
    "object": [1, "x", [1.0]],
    "any": [],
}

X = torch.arange(4.0)[None]
ids = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "position_ids": None}
groups = {"group_ranks": [[0]], "local_rank": 0, "torch_distributed_backend": None}
store: Any = dist.HashStore()
RANKS = {"host": "str", "port": "rank", "rank": "rank", "world_size": "size"}
AT = {"host": "127.0.0.1", "port": 0, "rank": 0, "world_size": 1}
COORDINATOR = {
    "group_ranks": "rank groups",
    "local_rank": "offset",
    "torch_distributed_backend": "str or None",
}
MESH_SIZES = dict.fromkeys(inspect.signature(spar.parallel_state.init_parallel_state).parameters, "size")
MODEL_SIZES = {
    name: "size" if name != "sequence_parallel_size" else "int or None"
    for name in inspect.signature(spar.parallel_state.initialize_model_parallel).parameters
}

# For each public callable: the kind of each parameter, and the arguments of a valid call.
Row = tuple[dict[str, str], dict[str, Any]]
SIZES = {"tp": 1, "sp": 2, "pp": 1, "cfg": 1, "dp": 1}
TABLE: dict[str, Row] = {
    "parallel_state.RankGenerator": (
        dict.fromkeys(SIZES, "size") | {"fs": "size or order", "order": "str", "rank_offset": "offset"},
        SIZES,
    ),
    "parallel_state.generate_masked_orthogonal_rank_groups": (
        {"world_size": "size", "parallel_size": "ints", "mask": "bools"},
        {"world_size": 2, "parallel_size": [2], "mask": [True]},
    ),
    "parallel_state.init_distributed_environment": (
        {
            "world_size": "int or -1",
            "rank": "int or -1",
            "distributed_init_method": "str",
            "local_rank": "int or -1",
            "backend": "str or None",
        },
        {},
    ),
    "parallel_state.init_dit_group": (
        {"dit_parallel_size": "size", "backend": "str or None"},
        {"dit_parallel_size": 1, "backend": None},
    ),
    "parallel_state.init_model_parallel_group": (
        {
            "group_ranks": "rank groups",
            "local_rank": "offset",
            "backend": "str or None",
            "parallel_mode": "str",
            "kwargs": "any",
        },
        {"group_ranks": [[0]], "local_rank": 0, "backend": None, "parallel_mode": "data"},
    ),
    "parallel_state.init_parallel_state": (MESH_SIZES, {}),
    "parallel_state.init_world_group": (
        {"ranks": "ints", "local_rank": "offset", "backend": "str or None"},
        {"ranks": [0], "local_rank": 0, "backend": "gloo"},
    ),
    "parallel_state.initialize_model_parallel": (
        MODEL_SIZES | {"enable_expert_parallel": "bool", "backend": "str or None"},
        {},
    ),
    "parallel_state.set_seq_parallel_pg": (
        {
            "sp_ulysses_degree": "size",
            "sp_ring_degree": "size",
            "rank": "rank",
            "world_size": "size",
            "use_ulysses_low": "bool",
            "sp_group_ranks": "rank groups or None",
        },
        {"sp_ulysses_degree": 1, "sp_ring_degree": 1, "rank": 0, "world_size": 2},
    ),
    "parallel_state.set_sequence_parallel_group": ({"group": "object"}, {"group": None}),
    "parallel_state.take_over_mesh": ({"mesh": "object"}, {"mesh": None}),
    "parallel_state.GroupCoordinator": (COORDINATOR, groups),
    "parallel_state.PipelineGroupCoordinator": (COORDINATOR, groups),
    "parallel_state.SequenceParallelGroupCoordinator": (
        COORDINATOR | {"kwargs": "any"},
        groups | {"ulysses_group": 1, "ring_group": 1},
    ),
    "topology.bind": ({"function": "object"}, {"function": print}),
    "sharding.sp_shard": (
        {"tensor": "tensor", "dim": "dim", "validate": "bool"},
        {"tensor": X, "dim": 0},
    ),
    "sharding.sp_gather": (
        {"tensor": "tensor", "dim": "dim", "validate": "bool"},
        {"tensor": X, "dim": 0},
    ),
    "sharding.sp_shard_with_padding": (
        {"tensor": "tensor", "dim": "dim", "pad_value": "number"},
        {"tensor": X, "dim": 0},
    ),
    "sharding.get_sharding_validator": ({}, {}),
    "data.sp_slice_and_pad_input": ({"input_ids": "tensor", "position_ids": "object"}, ids),
    "data.gather_forward_split_backward_and_unpad": (
        {"input_": "tensor", "group": "any", "dim": "dim", "padding_size": "offset", "unpad_dim": "dim"},
        {"input_": X, "dim": 0, "padding_size": 1, "unpad_dim": 0},
    ),
    "utils.divide": ({"numerator": "int", "denominator": "int"}, {"numerator": 4, "denominator": 2}),
    "utils.ensure_divisibility": (
        {"numerator": "int", "denominator": "int"},
        {"numerator": 4, "denominator": 2},
    ),
    "utils.get_pp_indices": (
        {"num_layers": "offset", "pp_rank": "rank", "pp_size": "size", "num_hidden_layers": "any"},
        {"num_layers": 4, "pp_rank": 0, "pp_size": 1},
    ),
    "utils.split_tensor_along_last_dim": (
        {"tensor": "tensor", "num_partitions": "size", "contiguous_split_chunks": "bool"},
        {"tensor": X, "num_partitions": 1},
    ),
    "utils.sched_yield": ({}, {}),
    "utils.init_gloo_process_group": (
        {
            "backend": "str",
            "prefix_store": "object",
            "group_rank": "rank",
            "group_size": "size",
            "timeout": "seconds",
        },
        {
            "backend": "gloo",
            "prefix_store": dist.PrefixStore("x", store),
            "group_rank": 0,
            "group_size": 1,
            "timeout": timedelta(seconds=1),
        },
    ),
    "utils.stateless_init_torch_distributed_process_group": (
        RANKS | {"backend": "str"},
        AT | {"backend": "gloo"},
    ),
    "utils.stateless_destroy_torch_distributed_process_group": ({"pg": "object"}, {"pg": None}),
    "utils.StatelessProcessGroup.create": (
        RANKS | {"data_expiration_seconds": "offset", "store_timeout": "seconds"},
        AT,
    ),
    "utils.StatelessProcessGroup": (
        {
            "rank": "rank",
            "world_size": "size",
            "store": "object",
            "socket": "object",
            "data_expiration_seconds": "offset",
        },
        {"rank": 0, "world_size": 1, "store": store, "socket": None},
    ),
}
COUNTERS = {
    "send_dst_counter",
    "recv_src_counter",
    "broadcast_send_counter",
    "broadcast_recv_src_counter",
    "entries",
}


def check(function: Callable[..., Any], kinds: dict[str, str], arguments: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        for value in BAD[kind]:
            with pytest.raises((TypeError, ValueError)) as caught:
                function(**arguments | {name: value})
            text = str(caught.value)
            assert name in text, (name, value, text)
            assert "expected" in text, (name, value, text)
            if not isinstance(value, (torch.Tensor, list, dict)):
                shown = repr(value)[:200]
                assert shown in text or f"a {type(value).__name__}" in text, (name, value, text)


@pytest.mark.parametrize("path", TABLE)
def test_errors_name_bad_arguments(path: str) -> None:
    kinds, arguments = TABLE[path]
    function = attrgetter(path)(spar)
    assert set(inspect.signature(function).parameters) - COUNTERS == set(kinds)
    if path.endswith("unpad"):
        group = alone().device_group
        check(function, kinds, arguments | {"group": group})
    else:
        check(function, kinds, arguments)


def test_every_public_function_is_in_the_table() -> None:
    found = set()
    for module in ("parallel_state", "sharding", "data", "utils"):
        for name in getattr(spar, module).__all__:
            function = getattr(getattr(spar, module), name)
            if inspect.isfunction(function) and inspect.signature(function).parameters:
                found.add(f"{module}.{name}")
    assert found <= set(TABLE), found - set(TABLE)


def alone(kind: type[GroupCoordinator] = GroupCoordinator) -> GroupCoordinator:
    """Return a coordinator over a one-rank group, without torch.distributed's global state."""
    group = spar.utils.stateless_init_torch_distributed_process_group("127.0.0.1", 0, 0, 1, "gloo")
    return kind.over(group, 0)


METHODS: dict[str, Row] = {
    "all_gather": ({"dim": "dim"}, {"input_": X}),
    "gather": ({"dim": "dim", "dst": "rank"}, {"input_": X}),
    "broadcast": ({"src": "rank"}, {"input_": X}),
    "broadcast_object": ({"src": "rank"}, {}),
    "broadcast_object_list": ({"src": "rank"}, {"obj_list": []}),
    "send_object": ({"dst": "rank"}, {"obj": 1}),
    "recv_object": ({"src": "rank"}, {}),
    "broadcast_tensor_dict": ({"src": "rank"}, {"tensor_dict": {}}),
}


def test_coordinator_errors_name_ranks_and_dims() -> None:
    coordinator = alone()
    for name, (kinds, arguments) in METHODS.items():
        check(getattr(coordinator, name), kinds, arguments)


def test_stateless_group_errors_name_ranks() -> None:
    group = spar.utils.StatelessProcessGroup.create("127.0.0.1", 0, 0, 1)
    check(group.send_obj, {"dst": "rank"}, {"obj": 1})
    check(group.recv_obj, {"src": "rank"}, {})
    check(group.broadcast_obj, {"src": "rank"}, {"obj": 1})
    check(group.barrier, {"timeout": "seconds"}, {})


def test_sharding_validator_checks_names_and_bools() -> None:
    validator = spar.sharding.ShardingValidator()
    kinds = {"tensor": "tensor", "name": "str", "dim": "dim"}
    check(validator.shard, kinds | {"validate_divisible": "bool"}, {"tensor": X, "name": "x", "dim": 0})
    check(validator.gather, kinds, {"tensor": X, "name": "x", "dim": 0})


def test_rank_generator_checks_tokens() -> None:
    ranks = RankGenerator(**SIZES)
    check(ranks.get_ranks, {"token": "str", "independent_ranks": "bool"}, {"token": "tp"})
    check(ranks.get_mask, {"order": "str", "token": "str"}, {"order": "tp-sp", "token": "tp"})


def test_numpy_ints_are_accepted() -> None:
    two: Any = numpy.int8(2)
    ranks = RankGenerator(two, numpy.int8(100), two, 1, 1, rank_offset=numpy.uint8(1))
    assert ranks.world_size == 400
    assert ranks.get_ranks("tp")[0] == [1, 2]
    assert spar.utils.get_pp_indices(numpy.int64(4), numpy.int32(1), two) == (2, 4)
    assert spar.utils.divide(torch.tensor(4), two) == 2
    assert spar.sharding.sp_shard(X, numpy.int64(0)) is X
    assert spar.parallel_state.init_parallel_state(ring_attention_size=numpy.int64(1)).get_cp_rank() == 0
    spar.parallel_state.destroy_parallel_state()
    with pytest.raises(ValueError, match="world has 1"):
        spar.parallel_state.init_parallel_state(
            ring_attention_size=numpy.int8(100), ulysses_parallel_size=numpy.int8(100)
        )


def test_rank_generator_accepts_order_as_sixth_argument() -> None:
    ranks = RankGenerator(2, 2, 1, 1, 1, "sp-tp-pp-cfg-dp")
    assert (ranks.order, ranks.fs) == ("sp-tp-pp-cfg-dp", 1)
    assert ranks.get_ranks("sp") == RankGenerator(2, 2, 1, 1, 1, order="sp-tp-pp-cfg-dp").get_ranks("sp")
    with pytest.raises(TypeError, match="fs is 'tp-sp'; expected an int, at least 1"):
        RankGenerator(2, 2, 1, 1, 1, "tp-sp", "sp-tp")


def test_set_seq_parallel_pg_validates_groups_before_initialization() -> None:
    make = spar.parallel_state.set_seq_parallel_pg
    for groups in ([[0, 2]], [[0, 1], [1, 2]], [[0, 1], [2, 4]], [[0, 1, 2, 3]]):
        with pytest.raises(ValueError, match=r"Invalid sp_group_ranks: .*; expected 2 groups of 2 ranks"):
            make(2, 1, rank=0, world_size=4, sp_group_ranks=groups)
    with pytest.raises(ValueError, match="rank is 4; expected 0 to 3"):
        make(2, 1, rank=4, world_size=4)
    with pytest.raises(RuntimeError, match="is not initialized"):
        make(2, 1, rank=0, world_size=4, sp_group_ranks=[[0, 2], [1, 3]])


def test_get_pp_indices_accepts_either_layer_name() -> None:
    layers = spar.utils.get_pp_indices
    assert layers(num_hidden_layers=5, pp_rank=1, pp_size=3) == layers(5, 1, 3) == (2, 4)
    assert layers(num_layers=5, pp_rank=1, pp_size=3) == (2, 4)
    with pytest.raises(TypeError, match="num_layers is 5 and num_hidden_layers is 5; expected one of them"):
        layers(5, 0, 1, num_hidden_layers=5)
    with pytest.raises(TypeError, match="num_layers is None; expected an int"):
        layers(pp_rank=0, pp_size=1)
    with pytest.raises(TypeError, match="num_hidden_layers is '5'; expected an int"):
        layers(num_hidden_layers="5", pp_rank=0, pp_size=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pp_rank is None"):
        layers(5, pp_size=1)


def test_operations_without_a_process_group_say_what_to_call() -> None:
    x, needs = torch.zeros(2, 4, 4), "is None and torch.distributed is not initialized; start the"
    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: spar.all_to_all(x, None),
        "all_gather": lambda: spar.all_gather([x]),
        "init": spar.init,
        "SequenceLayout.zigzag": lambda: spar.SequenceLayout.zigzag(4),
    }
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=f"^{name}: {'process_group' if name == 'all_to_all' else 'group'} {needs}"
        ):
            call()
