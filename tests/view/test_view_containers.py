# SPDX-License-Identifier: Apache-2.0
"""Outputs of a sharded model in containers of any kind, nested tensors, and pickling."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from torch import Tensor, nn

import spar
from spar._model.nested import changed, tensors_in

pytestmark = pytest.mark.one_transport


class Attributes(dict[str, Any]):
    """Whose attributes are its entries, and whose unknown ones raise KeyErrors."""

    __getattr__ = dict.__getitem__


class Bunch(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


class Mirrored(OrderedDict[str, Any]):
    """Has its entries as attributes, too, as outputs of transformers have."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Two(dict[str, Any]):
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a=a, b=b)


class Pair(tuple[Any, ...]):
    note = "none"

    def __new__(cls, a: Any, b: Any) -> Pair:
        made = super().__new__(cls, (a, b))
        made.note = "made"
        return made


Named = namedtuple("Named", "first second")


def mirrored(x: Tensor) -> Mirrored:
    out = Mirrored()
    out["a"] = x
    return out


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {3: x, (0, 1): [x], "none": None},
    "OrderedDict": lambda x: OrderedDict([("b", x), (0, x)]),
    "defaultdict": lambda x: defaultdict(list, {3: x}),
    "UserDict": lambda x: UserDict(a=x),
    "a read-only mapping": lambda x: MappingProxyType({"a": x}),
    "attributes": lambda x: Attributes(a=x, b=1),
    "a bunch": lambda x: Bunch(a=x),
    "mirrored attributes": mirrored,
    "a dict's subclass": lambda x: Two(x, 2),
    "a tuple's subclass": lambda x: Pair(x, 1),
    "a named tuple": lambda x: Named(x, [x]),
    "return types": lambda x: x.sort(1),
}


class Model(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.layers = make, nn.ModuleList([nn.Linear(6, 6).double()])

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layers[0](x))


def check_outputs(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)).double()
    for name, make in MAKERS.items():
        model = Model(make)
        expected = model(x)
        spar.parallelize(model, group)
        found = model(x)
        assert type(found) is type(expected), name
        assert getattr(type(found), "note", None) is None or found.note == expected.note
        pairs = zip(tensors_in(found), tensors_in(expected), strict=True)
        assert all(torch.allclose(own, one) and own.shape == x.shape for own, one in pairs), name
        if name in ("attributes", "a bunch", "mirrored attributes"):
            assert found.a is found["a"]
        if name == "defaultdict":
            assert found[4] == []


def test_outputs_in_containers_are_whole(ranks: Ranks) -> None:
    ranks(2, check_outputs)


def test_containers_without_other_tensors_are_the_same_objects() -> None:
    x = torch.ones(2)
    for value in ([x, 1], (x,), {"a": [x]}, Bunch(a=x), Counter("ab"), Named(1, x), torch.Size([1])):
        assert changed(lambda x: x, value) is value


def check_nested(rank: int, world: int, group: dist.ProcessGroup) -> None:
    def padded(make: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        linear = nn.Linear(6, 6).double()
        return lambda x: torch.nested.to_padded_tensor(linear(make([x[0, :5], x[1, :3]])), 0.0)

    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1)).double()
    for make in (torch.nested.as_nested_tensor, torch.nested.nested_tensor):
        model = Model(padded(make))
        expected = model(x)
        spar.parallelize(model, group)
        if make is torch.nested.as_nested_tensor:
            torch.testing.assert_close(model(x), expected)
        else:
            with pytest.raises(RuntimeError, match=r"nested_tensor at .*; call torch.nested.as"):
                model(x)


@pytest.mark.filterwarnings("ignore:sharded Model", "ignore:The PyTorch API of nested tensors")
def test_nested_tensors(ranks: Ranks) -> None:
    ranks(2, check_nested)


def check_pickle(rank: int, world: int, group: dist.ProcessGroup) -> None:
    model: nn.Module = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.TransformerEncoder(model, 1, enable_nested_tensor=False)
    before = pickle.dumps(model)
    for blocks in (None, [""]):
        spar.parallelize(model, group, blocks=blocks)
        with pytest.raises(TypeError, match=r"cannot pickle a sharded model.*save model.state_dict"):
            pickle.dumps(model)
        spar.unparallelize(model)
        assert len(pickle.dumps(model)) == len(before)


def test_a_sharded_model_does_not_pickle(ranks: Ranks) -> None:
    ranks(2, check_pickle)
