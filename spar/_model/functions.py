# SPDX-License-Identifier: Apache-2.0
"""What torch says of a function: its name, those of its arguments, and which of them it writes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from .._C import replaced
from .bodies import has_body
from .nested import tensors_in

# Names that torch's C functions also take, as numpy has them: numpy_compatibility_arg_names of torch.
_OTHER_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}
# Their schemas name an argument as written, of which they change no element.
_WRITE_NO_ELEMENT = frozenset({"requires_grad_", "detach_", "record_stream", "retain_grad"})
# Methods in C without a schema that write their first argument.
_OPERATORS_NAMES = """
__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__ __imatmul__ __setitem__ apply_ map_ map2_
"""
_OPERATORS = frozenset(_OPERATORS_NAMES.split())
# Functions without a schema that only read elements.
_READING_NAMES = """
__bool__ __complex__ __float__ __index__ __int__ __long__ __nonzero__ tolist numpy __array__ __array_wrap__
__format__ __repr__ __reversed__ __deepcopy__ __reduce_ex__ __rlshift__ __rrshift__ byte char cdouble cfloat
__contains__ __dlpack_device__ get_name get_nbytes dim_order as_tensor asarray tensor new_tensor
lu unique unravel_index lobpcg svd_lowrank pca_lowrank
"""
_READING = frozenset(_READING_NAMES.split())


# Operators of torch whose schemas do not say which of their arguments they write, or send to one rank.
_HIDING = ("c10d.", "_c10d_functional.isend", "_c10d_functional.irecv", "_c10d_functional.batch_p2p_ops")


class Function:
    """A torch function, or an operator of another library.

    Attributes:
        name: by which rules are found.
        is_operator: whether it is an operator of another library.
        writes: positions and names of the arguments of which it changes elements.
        is_inplace: whether the first is one of them.
        is_known: False for a function of torch of which nothing here says what it writes; a rule may.
        places: where its arguments are, by their names; empty if rules are written for its order.
    """

    __slots__ = (
        "_first",
        "_other_names",
        "is_inplace",
        "is_known",
        "is_operator",
        "name",
        "places",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.name = name_of(func)
        self.is_operator = is_operator(func)
        schemas = schemas_of(func, self.name)
        self.places = {} if isinstance(func, FunctionType) else _places(schemas)
        self._first = _first(func, schemas)
        # Operators take no other names.
        is_in_c = not isinstance(func, FunctionType) and not isinstance(func, (OpOverload, OpOverloadPacket))
        others = _OTHER_NAMES if is_in_c else {}
        names = {argument.name for schema in schemas for argument in schema.arguments}
        self._other_names = {a: b for a, b in others.items() if a not in names}
        self.writes = _written(self.name, schemas)
        self.is_inplace = any(position == 0 for position, _ in self.writes)
        is_of_library = "." in self.name
        self.is_known = (
            bool(schemas or self.writes or is_of_library or has_body(func)) or self.name in _READING
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments by torch's own names, the first by its position."""
        if not self._other_names.keys().isdisjoint(kwargs):
            kwargs = {self._other_names.get(name, name): value for name, value in kwargs.items()}
        if not args and self._first is not None and self._first in kwargs:
            rest = {name: value for name, value in kwargs.items() if name != self._first}
            return (kwargs[self._first],), rest
        return args, kwargs

    def with_binding(self, run: Any, pairs: Any) -> Any:
        """Return what binds arguments, and runs a function with values in the place of some."""

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = replaced(*self.bind(args, kwargs), pairs)
            return run(*args, **kwargs)

        return call

    def written(self, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among a call's arguments that it writes."""
        found: list[Tensor] = []
        for position, name in (*self.writes, (len(args), "out")):
            given = args[position] if position < len(args) else kwargs.get(name)
            found += [x for x in tensors_in(given) if not any(x is known for known in found)]
        return found


@functools.lru_cache(maxsize=4096)
def function_of(func: Any) -> Function:
    return Function(func)


def _places(schemas: list[Any]) -> dict[str, int]:
    """Return where arguments are whose place is the same in all schemas that have them."""
    found: dict[str, int] = {}
    for schema in schemas:
        for i, argument in enumerate(schema.arguments):
            if found.setdefault(argument.name, i) != i:
                found[argument.name] = -1
    return {name: i for name, i in found.items() if i >= 0}


def _first(func: Any, schemas: list[Any]) -> str | None:
    """Return the name of a function's first argument, as callers have it."""
    if isinstance(func, FunctionType):
        # A function that wraps one in C has no signature.
        with contextlib.suppress(ValueError):
            return next(iter(inspect.signature(func).parameters), None)
        return None
    first = next((schema.arguments[0].name for schema in schemas if schema.arguments), None)
    # The first argument of arange may be its start or its end.
    if _places(schemas).get(first or "") != 0:
        return None
    return "input" if first == "self" and not isinstance(func, (OpOverload, OpOverloadPacket)) else first


def _written(name: str, schemas: list[Any]) -> list[tuple[int, str]]:
    """Return positions and names of the arguments that a function writes."""
    if name in _WRITE_NO_ELEMENT:
        return []
    if not schemas:
        is_method = name.endswith("_") and not name.endswith("__")
        return [(0, "input")] if is_method or name in _OPERATORS else []
    found = {
        (i, argument.name)
        for schema in schemas
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and not argument.is_out
        and "Tensor" in str(argument.type)
    }
    return sorted(found)


# ---- names and schemas ----


def name_of(func: Any) -> str:
    """Return the name by which rules are found: get_x for the attribute x."""
    if is_operator(func):
        return str(_packet(func))
    # An overload has the name of its function: mean.dim is mean.
    if isinstance(func, OpOverload):
        func = func.overloadpacket
    name: str = getattr(func, "__name__", str(func))
    if isinstance(func, FunctionType) and not _is_of_torch(func):
        return f"{func.__module__}.{name}"
    if name not in ("__get__", "__set__"):
        return name
    attribute = func.__self__
    return f"{name[2:5]}_{getattr(attribute, 'fget', attribute).__name__}"


def _is_of_torch(func: FunctionType) -> bool:
    """Whether torch has the function, or one that somebody put in the place of its own.

    Functions of other libraries that ask whether a mode is active come to it as torch's do.
    """
    owners = torch, Tensor, torch.nn.functional
    is_in_place = any(getattr(owner, func.__name__, None) is func for owner in owners)
    return is_in_place or str(func.__module__).partition(".")[0] == "torch"


def is_operator(func: Any) -> bool:
    """Whether a function is an operator of another library, whose name says nothing of what it computes."""
    is_any = isinstance(func, (OpOverload, OpOverloadPacket))
    return is_any and not _packet(func)._qualified_op_name.startswith("aten::")


def hides_writes(name: str) -> bool:
    """Whether an operator's schema lacks what it writes: it cannot run on whole tensors."""
    return name.startswith(_HIDING)


def schemas_of(func: Any, name: str) -> list[Any]:
    """Return the schemas of a function's overloads; none of a function that torch has none for."""
    if isinstance(func, OpOverload):
        return [func._schema]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, overload)._schema for overload in func.overloads()]
    all_of_name: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [schema for schema in all_of_name if not _is_of_script(schema)]


def _is_of_script(schema: Any) -> bool:
    """Whether a schema is one of TorchScript alone, as that of sorting a list."""
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return not torch._C._dispatch_has_kernel(schema.name + overload)


def _packet(func: Any) -> OpOverloadPacket:
    packet: OpOverloadPacket = func.overloadpacket if isinstance(func, OpOverload) else func
    return packet
