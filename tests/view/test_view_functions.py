# SPDX-License-Identifier: Apache-2.0
"""Schemas of torch's functions in a view; calls by each name of their arguments; what functions write."""

from __future__ import annotations

import copy
import functools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Ranks
from helpers.view_cases import PAIRS, Inputs, compare, compiled, viewed
from helpers.view_hostile import outcome
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from spar import cal_split_sizes, parallelize
from spar._model.call import RULES, Plan, Step, rule_of
from spar._model.functions import function_of, name_of
from spar._model.part import Parts, part_of
from spar._model.planning import MEMORY
from spar._model.view import View

# Exchanges over each transport are tested by other modules.
pytestmark = pytest.mark.one_transport


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "bound"),
    [
        (F.softmax, (), {"dim": -1, "input": 0}, ((0,), {"dim": -1})),
        (torch.sum, (), {"axis": 1, "a": 0}, ((0,), {"dim": 1})),
        (torch.Tensor.mean, (0,), {"axis": 1, "keepdims": True}, ((0,), {"dim": 1, "keepdim": True})),
        (torch.add, (0,), {"x2": 1}, ((0,), {"other": 1})),
        (torch.where, (), {"other": 2, "input": 1, "condition": 0}, ((0,), {"other": 2, "input": 1})),
        (torch.ops.aten.sum.dim_IntList, (0,), {"dim": 1}, ((0,), {"dim": 1})),
        (torch.linalg.diagonal, (), {"A": 0, "dim1": 1}, ((0,), {"dim1": 1})),
        (F.embedding, (), {"weight": 1, "input": 0}, ((0,), {"weight": 1})),
        (F.linear, (0, 1), {}, ((0, 1), {})),
        (torch.arange, (), {"start": 0, "end": 4}, ((), {"start": 0, "end": 4})),
    ],
)
def test_arguments_are_bound_by_the_names_of_torch(
    function: Any, args: Any, kwargs: dict[str, Any], bound: Any
) -> None:
    assert function_of(function).bind(args, kwargs) == bound


def test_rules_have_the_names_that_functions_of_torch_have() -> None:
    """F.logsigmoid is called log_sigmoid, for example: a rule of another name would never be asked."""
    spaces = (torch, torch.Tensor, F, torch._C._nn, torch.special, torch.fft, torch.linalg)
    found = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found -= {name for name in dir(F) if isinstance(getattr(F, name), BuiltinFunctionType)}
    for space in spaces:
        for name in dir(space):
            value = getattr(space, name, None)
            found.add(name_of(value) if callable(value) else f"get_{name}")
    # Names of classes of attributes, of a setter, and of an attribute that newer torch lacks.
    assert set(RULES) - found <= {"get_is_*", "set_requires_grad", "get_names"}


def test_calls_with_other_names_are_bound_when_they_run_again() -> None:
    run = function_of(torch.sum).with_binding(lambda *args, **kwargs: (args, kwargs), ((1, 5),))
    assert run(a=0, axis=1) == ((0, 5), {"dim": 1})


def test_functions_say_what_they_write() -> None:
    a, b, c = (torch.zeros(2) for _ in range(3))
    written = {
        torch.Tensor.add_: ((a, b), {}, [a]),
        torch.add: ((a, b), {}, []),
        torch.Tensor.__iadd__: ((a, b), {}, [a]),
        torch.Tensor.__setitem__: ((a, 0, b), {}, [a]),
        torch.ops.aten.rrelu_with_noise.default: ((a, b), {}, [b]),
        torch._foreach_mul_: (([a, b], c), {}, [a, b]),
        torch.Tensor.map_: ((a, b, min), {}, [a]),
        torch.Tensor.requires_grad_: ((a,), {}, []),
        torch.sort: ((a,), {}, []),
    }
    for function, (args, kwargs, expected) in written.items():
        found = function_of(function).written(args, kwargs)
        assert [id(x) for x in found] == [id(x) for x in expected], function


def test_each_function_of_torch_is_known_or_refused() -> None:
    """With parts, these are refused: torch does not say whether they change their arguments."""
    all_of_torch = {f for listed in torch.overrides.get_overridable_functions().values() for f in listed}
    found = [function_of(func) for func in all_of_torch]
    unknown = {f.name for f in found if not f.is_known and rule_of(f.name) is None} - MEMORY
    assert {name for name in unknown if not name.startswith(("get_", "sym_", "_"))} <= {
        *("autocast", "backward", "const_data_ptr", "dsmm", "hsmm", "is_shared", "module_load"),
        *("register_hook", "register_post_accumulate_grad_hook", "saddmm", "storage_type"),
    }


OTHER_NAMES = """
x.sum(axis=1, keepdims=True)
x - x.mean(1, keepdims=True)
x.sum((0, 1), keepdims=True)
torch.mean(x, 1, keepdims=True)
torch.sum(a=x, axis=0)
torch.softmax(x=x, dim=2)
x.amax(axis=0, keepdims=True)
torch.stack(x.unbind(axis=1))
x.unbind(axis=2)[0]
x.chunk(2, axis=1)[0]
x.unsqueeze(axis=1)
x.select(axis=2, index=1)
x.narrow(axis=1, start=2, length=6)
x.tensor_split(2, axis=1)[1]
x.index_select(axis=1, index=ids[0])
x.std(axis=2, keepdims=True)
torch.add(x, x2=y)
torch.mul(x1=x, x2=y)
torch.clamp(x=x, min=0)
torch.cat([x, y], axis=1)
F.linear(bias=b, weight=w, input=x)
torch.embedding(w, ids)
torch.embedding(x[0], ids).sum(0)
torch._C._nn.mse_loss(x, y)
torch._C._nn.nll_loss(x[0].log_softmax(-1), ids[0], None, 1, -100)
torch.as_tensor(x) * y
"""
WRITES = """
z = x * 1; torch.linalg.diagonal(z).mul_(2); out = z + 0
z = x * 1; torch.broadcast_tensors(z)[0].mul_(2); out = z + 0
z = x * 1; torch.atleast_3d(z).mul_(2); out = z + 0
z = x * 1; torch.as_tensor(z).mul_(2); out = z + 0
z = x * 1; z.sum_to_size(2, 12, 6).mul_(2); out = z + 0
z = x * 1; F.alpha_dropout(z, 0.5, False).mul_(2); out = z + 0
z = x * 1; F.feature_alpha_dropout(z, 0.5, False).mul_(2); out = z + 0
z = x.detach() * 1; F.dropout(z.split([3, 9], 1)[1], 0.1, training=False).relu_(); out = z + 0
z = x.detach() * 1; F.relu(z.split([3, 9], 1)[1], inplace=True); out = z + 0
z = x.detach() * 1; z.numpy()[:, 3] = 0; out = z + 0
z = x.detach() * 1; torch._foreach_mul_([z], 2); out = z + 0
z = x.detach() * 1; torch._foreach_add_([z, y], [y, z]); out = z + y
z = x.detach() * 1; z.map_(y.detach(), lambda a, c: a + c); out = z + 0
z = x.detach() * 1; z.apply_(abs); out = z + 0
z = x.detach() * 1; torch.nn.init.constant_(z, 3.0); out = z + 0
z = x.detach() * 1; torch.nn.init.normal_(z); out = z + 0
z = x.detach() * 1; torch.nn.init.kaiming_uniform_(z[0]); out = z + 0
z = x * 1; z.index_put_((ids[:1, 0] * 0,), z[:1] * 2); out = z + 0
z = x * 1; z.cumsum_(1); out = z + y
z = x * 1; z.data.mul_(2); out = z.detach() + 0
"""
REFUSED = "changed in place through another one|read-only|torch does not say which arguments it writes"


def check_lines(rank: int, world: int, group: dist.ProcessGroup) -> None:
    failures = []
    for lines, may_refuse in ((OTHER_NAMES, False), (WRITES, True)):
        for i, line in enumerate(lines.strip().splitlines()):
            for pair in (PAIRS[(i + world) % len(PAIRS)], ("tokens", "tokens"), ("uneven", "tokens")):
                try:
                    problem = compare(group, compiled(line), pair, Inputs(3))
                except Exception as error:
                    problem = None if may_refuse and re.search(REFUSED, str(error)) else repr(error)
                if problem:
                    failures.append(f"{line} of {pair}: {problem}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world", [2, 3])
def test_other_names_are_exact_and_no_write_is_lost(ranks: Ranks, world: int) -> None:
    ranks(world, check_lines)


def check_local_size(rank: int, world: int, group: dist.ProcessGroup) -> None:
    part = Parts(group, world, rank).part(1, (12,))
    step = Step(Plan(part), torch.neg)
    assert step.find_result("neg", torch.ones(2, 6, 3)) is part.shard((2, 6, 3))
    for shape in ((2, 12, 3), (6,)):
        with pytest.raises(RuntimeError, match=r"neg: the rule says Part\(dim=1.*; this is a fault of spar"):
            step.find_result("neg", torch.ones(shape))


def test_a_result_of_another_local_size_than_its_part_is_an_error(ranks: Ranks) -> None:
    ranks(2, check_local_size)


def check_hostile(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for seed in range(30 * world, 30 * world + 30):
        found: list[Any] = [None] * world
        dist.all_gather_object(found, outcome(seed, group), group=group)
        assert len({kind for kind, _ in found}) == 1 and found[0][0] != "wrong", (seed, found)


@pytest.mark.parametrize("world", [2, 3])
def test_programs_that_leave_torch_are_right_or_refused(ranks: Ranks, world: int) -> None:
    ranks(world, check_hostile)


def check_unseen(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """No mode sees these functions in C."""
    assert part_of(viewed(group, lambda view, x: x.as_subclass(Tensor))) is not None
    unseen: list[Any] = [
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: torch.to_dlpack(x),
        lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    ]
    for function in unseen:
        with pytest.raises(RuntimeError, match="reads the memory of sharded tensors"):
            viewed(group, lambda view, x, function=function: function(x))


def test_functions_that_no_mode_sees_are_refused(ranks: Ranks) -> None:
    ranks(2, check_unseen)


def check_threads(rank: int, world: int, group: dist.ProcessGroup) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is there before the view

        def run(view: View, x: Tensor) -> Any:
            assert pool.submit(torch.ones(2).sum).result() == 2
            return pool.submit(x.mean).result()

        with pytest.raises(RuntimeError, match=r"mean at .* in a thread that the model started"):
            viewed(group, run)
    errors: list[Any] = []

    def compute(x: Tensor) -> None:
        try:
            x.mean()
        except RuntimeError as error:
            errors.append(error)

    def start(view: View, x: Tensor) -> None:
        thread = threading.Thread(target=compute, args=(x,))
        thread.start()
        thread.join()

    viewed(group, start)
    assert len(errors) == 1


def test_threads_of_a_model_do_not_compute_on_parts(ranks: Ranks) -> None:
    ranks(2, check_threads)


class Layers(nn.Module):
    """Blocks, each in a checkpoint that saves some of its products."""

    def __init__(self, saved: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3 if saved else 0.0), nn.Linear(6, 6))
            for _ in range(2)
        )
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_saved = self.saved is None or function in self.saved
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        for layer in self.layers:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x


def check_modes(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The view's own checks, in the first forward and at each new length, are not seen by dispatch modes."""
    for saved in ((torch.ops.aten.addmm.default,), None):
        torch.manual_seed(0)
        model = Layers(saved).double()
        reference = copy.deepcopy(model)
        parallelize(model, group)
        for length in (12, 12, 9):
            x, operations = Inputs(3).x[:, :length], []
            for each in (reference, model):
                torch.manual_seed(1)
                with FlopCounterMode(display=False) as counter:
                    loss = each(x).square().mean()
                loss.backward()
                operations.append(counter.get_total_flops())
            tokens = cal_split_sizes(length, world)[rank]
            assert operations[1] == operations[0] * tokens // length
            for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
                dist.all_reduce(own.grad, group=group)
                torch.testing.assert_close(own.grad / world, expected.grad)
                own.grad = expected.grad = None


@pytest.mark.parametrize("world", [2, 3])
def test_modes_around_a_view_see_what_the_model_does(ranks: Ranks, world: int) -> None:
    ranks(world, check_modes)
