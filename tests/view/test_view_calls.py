# SPDX-License-Identifier: Apache-2.0
"""Calls of torch functions that a view's C code knows: keys, what they do, errors, references, threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from spar import _C
from spar._C import mark_results, replaced
from spar._model.view import Mode  # its module tells the C code what to use

WHOLE = torch.ones(2, 3)


def part(shard: object = "a shard", shape: tuple[int, ...] = (2, 3)) -> Tensor:
    x = torch.ones(shape)
    x._spar_shard = shard  # type: ignore[attr-defined]
    return x


class Calls(Mode, TorchFunctionMode):
    """Keeps what `_call` and `_finish` receive."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, bool, tuple[Any, ...], dict[str, Any]]] = []
        self.finished: list[Any] = []

    def _call(self, key: Any, sharded: bool, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.called.append((key, sharded, args, kwargs))
        return func(*args, **kwargs)

    def _finish(self, rest: Any, base: Any, out: Any) -> Any:
        self.finished.append((rest, base, out))
        return out


def key_of(*args: Any, **kwargs: Any) -> Any:
    """Return a call's key, and whether it has a part."""
    calls = Calls()
    calls.__torch_function__(lambda *_, **__: None, (), args, kwargs)
    (key, sharded, given, named) = calls.called[0]
    assert (given, named) == (args, kwargs)
    return key[1:] if key else None, sharded


class Index(int):
    pass


DIFFERENT: list[tuple[Any, ...]] = [
    (1,),
    (True,),
    (1.0,),
    (0,),
    (False,),
    (0.0,),
    (None,),
    ("1",),
    (),
    ([1],),
    ((1,),),
    (torch.Size([1]),),
    ([1, 2],),
    ([1], 2),
    ([[1], 2],),
    ([[1, 2]],),
    (slice(1),),
    (slice(1, None),),
    (slice(1, None, 1),),
    (slice(1, None, True),),
    (slice(1, None, 2.0),),
    (slice(None),),
    (slice(0, None),),
    (...,),
    (torch.float32,),
    (torch.float16,),
    (torch.device("cpu"),),
    (torch.strided,),
    (torch.channels_last,),
    (WHOLE,),
    (torch.ones(3, 2),),
    (part(),),
    (part("another"),),
    (slice(part(), None),),
    (part(), 1),
    (tuple(range(40)),),
    (tuple(range(41)),),
]


def test_other_calls_have_other_keys() -> None:
    keys = [key_of(*args)[0] for args in DIFFERENT]
    assert None not in keys and len(set(keys)) == len(DIFFERENT)
    named = [key_of(), key_of(a=1), key_of(b=1), key_of(a=1, b=2), key_of(b=1, a=2), key_of(a=[1, 2])]
    assert len({key for key, _ in named}) == len(named)


def test_equal_calls_have_equal_keys() -> None:
    pairs: list[tuple[Any, Any]] = [
        (2.5, -7.0),  # `run` reads a float's value from the arguments
        (2.5, float("nan")),
        (0.0, -0.0),
        (WHOLE, nn.Parameter(torch.zeros(2, 3))),
        (part(), part()),
        (part(), part(shape=(1, 3))),  # equal shards have equal shapes
        ([WHOLE, (2.5, None)], [torch.zeros(2, 3), (1.5, None)]),
    ]
    for one, other in pairs:
        assert key_of(one) == key_of(other) and key_of(a=one) == key_of(a=other)
        assert hash(key_of(one)) == hash(key_of(other))


@pytest.mark.parametrize(
    "value, has_part",
    [
        (object(), False),
        ({"x": WHOLE}, False),
        ({"x": [part(SimpleNamespace(part="a part"))]}, True),
        (Index(1), False),
        (torch.Generator(), False),
    ],
)
def test_what_no_key_can_tell_apart_is_never_known(value: Any, has_part: bool) -> None:
    assert key_of(value) == (None, has_part)
    assert key_of([value, part()]) == (None, True) and key_of(part(), x=value) == (None, True)


def test_subclasses_of_tensors_have_keys_of_their_own() -> None:
    class Named(Tensor):
        pass

    class Held:
        part = "a part"

    x = torch.ones(2, 3).as_subclass(Named)
    assert key_of(x) == ((Named, *key_of(WHOLE)[0]), False)
    x._spar_shard = shard = Held()  # type: ignore[attr-defined]
    assert key_of(x) == ((Named, shard), True)


def known(func: Callable[..., Any], args: Any, kwargs: Any = None, **does: Any) -> Calls:
    """Return a mode that knows a call."""
    calls = Calls()
    calls.__torch_function__(lambda *_, **__: None, (), args, kwargs)
    key = (func, *calls.called.pop()[0][1:])
    values = {"run": func, "replaced": (), "result": None, "rest": None} | does
    calls._remember(key, *values.values())
    return calls


def test_known_calls_are_run() -> None:
    x, y = part(), part()
    calls = known(torch.add, (x, y), {"alpha": 2.0}, result="sum")
    out = calls.__torch_function__(torch.add, (), (x, y), {"alpha": 3.0})
    assert torch.equal(out, torch.full((2, 3), 4.0)) and out._spar_shard == "sum"
    assert not calls.called
    calls.__torch_function__(torch.add, (), (x, y))
    assert len(calls.called) == 1
    calls._forget()
    calls.__torch_function__(torch.add, (), (x, y), {"alpha": 3.0})
    assert len(calls.called) == 2


def test_arguments_are_replaced() -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    x = part()
    values = ((2, "c"), ("name", "d"), (1, "b"), (7, "last"))
    args, kwargs = (x, 1, 2), {"other": 3}
    calls = known(run, args, kwargs, replaced=values)
    expected = (x, "b", "c", "last"), {"other": 3, "name": "d"}
    assert calls.__torch_function__(run, (), args, kwargs) == expected
    assert replaced(args, kwargs, values) == expected
    assert (args, kwargs) == ((x, 1, 2), {"other": 3})
    named = known(run, (x,), None, replaced=(("name", "d"),))
    assert named.__torch_function__(run, (), (x,)) == ((x,), {"name": "d"})


def test_several_results_are_marked() -> None:
    x = part()
    calls = known(torch.chunk, (x, 3, 1), result=["a", None, "c"], rest="rest")
    out = calls.__torch_function__(torch.chunk, (), (x, 3, 1))
    assert [y._spar_shard for y in out] == ["a", None, "c"]
    ((rest, base, finished),) = calls.finished
    assert rest == "rest" and base is x and finished is out


def test_functions_of_whole_tensors_run_as_they_are() -> None:
    calls = Calls()
    for _ in range(2):
        calls.__torch_function__(torch.neg, (), (WHOLE,))
    assert len(calls.called) == 2
    calls._remember_plain(torch.neg)
    assert torch.equal(calls.__torch_function__(torch.neg, (), (WHOLE,), {}), -WHOLE)
    assert len(calls.called) == 2
    calls.__torch_function__(torch.neg, (), (part(),))
    assert len(calls.called) == 3


def test_watched_calls_and_transforms_are_not_known() -> None:
    x = part()
    calls = known(torch.neg, (x,))
    calls._remember_plain(torch.abs)
    calls._is_watching = True
    calls.__torch_function__(torch.neg, (), (x,))
    calls.__torch_function__(torch.abs, (), (WHOLE,))
    assert len(calls.called) == 2
    calls._is_watching = False
    calls.__torch_function__(torch.neg, (), (x,))
    calls.__torch_function__(torch.abs, (), (WHOLE,))
    assert len(calls.called) == 2

    def transformed(y: Tensor) -> Tensor:
        calls.__torch_function__(torch.neg, (), (x,))
        calls.__torch_function__(torch.abs, (), (WHOLE,))
        return y

    torch.vmap(transformed)(torch.ones(2))
    assert len(calls.called) == 4


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("in a function")


def test_errors_reach_the_caller() -> None:
    x = part()

    class Hostile(list[Any]):
        def __iter__(self) -> Any:
            raise KeyError("in a list")

    calls = known(fails, (x,), result="found")
    with pytest.raises(ZeroDivisionError, match="in a function"):
        calls.__torch_function__(fails, (), (x,))
    with pytest.raises(ZeroDivisionError):
        Calls().__torch_function__(fails, (), (WHOLE,))
    with pytest.raises(KeyError, match="in a list"):
        calls.__torch_function__(torch.neg, (), (Hostile([1]),))
    with pytest.raises(RecursionError):
        calls.__torch_function__(torch.neg, (), (loop(),))
    with pytest.raises(AttributeError):  # what is marked is no tensor
        known(len, (x,), result="found").__torch_function__(len, (), (x,))
    for results in (["a"], ["a"] * 3):
        with pytest.raises(ValueError, match="2 results, where equal calls had"):
            known(torch.chunk, (x, 2), result=results).__torch_function__(torch.chunk, (), (x, 2))
    with pytest.raises(ValueError, match="-1 results"):
        mark_results(x, ["a"])
    with pytest.raises(IndexError, match="argument -1"):
        replaced((1,), {}, ((-1, 2),))
    with pytest.raises(TypeError, match="unhashable"):
        calls.__torch_function__([], (), (WHOLE,))
    wrong: list[tuple[Any, ...]] = [
        (),
        (fails,),
        (fails, (), [x]),
        (fails, (), (), 1),
        (fails, (), (), {}, 1),
    ]
    for given in wrong:
        with pytest.raises(TypeError):
            calls.__torch_function__(*given)


def loop() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def test_no_references_are_kept() -> None:
    x, y, calls = part(), part(), Calls()
    args, kwargs, rest = (x, [1, y], slice(x, 1)), {"a": 1.5, "b": (x,)}, object()

    def run(*_: Any, **__: Any) -> Tensor:
        return y

    calls = known(run, args, kwargs, replaced=((1, 2), ("c", rest)), result="found", rest=rest)
    held = (x, y, args, kwargs, rest, run, args[1])

    def work() -> None:
        calls.__torch_function__(run, (), args, kwargs)
        for bad in ((x, object()), (x, loop())):
            with pytest.raises((ZeroDivisionError, RecursionError)):
                calls.__torch_function__(fails, (), bad, kwargs)
        calls.called.clear()
        calls.finished.clear()

    work()
    before = [sys.getrefcount(each) for each in held]
    for _ in range(10):
        work()
    gc.collect()
    assert [sys.getrefcount(each) for each in held] == before


def test_a_mode_in_a_cycle_is_freed() -> None:
    calls = Calls()
    calls._remember((1,), calls, (), None, None)
    calls._remember_plain(calls.__torch_function__)
    gone = weakref.ref(calls)
    del calls
    gc.collect()
    assert gone() is None


def test_threads_have_modes_of_their_own() -> None:
    x = part()
    modes = [known(torch.mul, (x, 2.0), result=name) for name in ("one", "other")]
    failures: list[Any] = []

    def work(calls: Calls, name: str) -> None:
        with calls:
            for i in range(2000):
                out = torch.mul(x, float(i + 1))
                if out._spar_shard != name or float(out[0, 0]) != i + 1:  # type: ignore[attr-defined]
                    failures.append((name, i))

    threads = [threading.Thread(target=work, args=each) for each in zip(modes, ("one", "other"), strict=True)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


class Others(TorchFunctionMode):
    """A mode that is none of a view, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def depth() -> int:
    return torch._C._len_torch_function_stack()


def test_functions_in_python_are_given_to_a_mode() -> None:
    """As by torch's own function: without a Mode that one runs."""
    x, inner = part(), []

    def run(y: Tensor, *, scale: float) -> Tensor:
        inner.append(depth())
        return y * scale

    calls, others = known(run, (x,), {"scale": 2.0}, result="found"), Others()
    handles: tuple[Any, ...] = (handle_torch_function, _C.handle_torch_function)
    for handle in handles:
        with others, calls:
            out = handle(run, (x,), x, scale=3.0)
            assert out._spar_shard == "found" and float(out[0, 0]) == 3 and depth() == 2
            with pytest.raises(ZeroDivisionError, match="in a function"):
                handle(fails, (x,), x)
            assert depth() == 2
            with others:
                handle(run, (x,), x, scale=3.0)
        assert inner == [1, 2] and depth() == 0
        inner.clear()
        assert torch.equal(handle(torch.mul, (x,), x, other=2), x * 2)
        with pytest.raises(TypeError, match="no implementation found"):
            handle(fails, (1,), 1)
        with pytest.raises(TypeError):
            handle(torch.neg)
    held = (x, calls, run, others)
    counts = [sys.getrefcount(each) for each in held]
    for _ in range(10):
        with calls:
            _C.handle_torch_function(run, (x,), x, scale=3.0)
        with pytest.raises(TypeError):
            _C.handle_torch_function(fails, (1,), x, scale=3.0)
    inner.clear()
    assert [sys.getrefcount(each) for each in held] == counts
