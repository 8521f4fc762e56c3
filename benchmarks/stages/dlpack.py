# SPDX-License-Identifier: Apache-2.0
"""A torch tensor over memory of one's own, through DLPack: from Python, as a transport would do it in C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor."""


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter))

FLOAT = 2
_kept: dict[int, Any] = {}  # until the tensor is gone
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _delete(managed: Any) -> None:
    *_, released = _kept.pop(ctypes.addressof(managed.contents))
    released()


_deleter = Deleter(_delete)


def from_memory(address: int, count: int, device: int, released: Callable[[], object]) -> torch.Tensor:
    """Return float32 items at the address; `released` is called when the last view is gone."""
    shape = (ctypes.c_int64 * 1)(count)
    managed = Managed(
        Tensor(address, Device(device, 0), 1, DataType(FLOAT, 32, 1), shape, None, 0), None, _deleter
    )
    _kept[ctypes.addressof(managed)] = managed, shape, released
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(
        _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    )
    return tensor
