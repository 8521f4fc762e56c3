# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver's functions through ctypes, looked up as the C core does: by name and version."""

from __future__ import annotations

import ctypes
from typing import Any

DeviceAddress = ctypes.c_uint64  # CUdeviceptr


class DriverError(Exception):
    """A function that is missing, or failed."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Driver:
    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(str(error)) from None
        self.functions: dict[str, Any] = {}
        self.call("cuInit", 2000, 0)

    def function(self, name: str, version: int) -> Any:
        """Return the function whose parameters are those of this CUDA version, such as 12000."""
        if name not in self.functions:
            address, status = ctypes.c_void_p(), ctypes.c_int()
            code = self.library.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status)
            )
            if code or not address.value:
                raise DriverError(f"this driver has no {name}")
            # no argtypes: pointers are passed by byref(), and what is wider than an int in a type of ctypes
            self.functions[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)
        return self.functions[name]

    def call(self, name: str, version: int, *arguments: Any) -> None:
        code = self.function(name, version)(*arguments)
        if code:
            raise DriverError(f"{name}: {self.text(code)}", code)

    def get(self, kind: type, name: str, version: int, *arguments: Any) -> Any:
        """Return the value that the function writes to its first argument."""
        value = kind()
        self.call(name, version, ctypes.byref(value), *arguments)
        return value.value

    def enter(self, ordinal: int) -> None:
        """Make the device's primary context, which torch uses too, current in this thread."""
        device = self.get(ctypes.c_int, "cuDeviceGet", 2000, ordinal)
        context = self.get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", 7000, device)
        self.call("cuCtxSetCurrent", 4000, ctypes.c_void_p(context))

    def text(self, code: int) -> str:
        words = ctypes.c_char_p()
        failed = self.function("cuGetErrorName", 6000)(code, ctypes.byref(words))
        return f"error {code}" if failed or not words.value else f"{words.value.decode()} ({code})"
