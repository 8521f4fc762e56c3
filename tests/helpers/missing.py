# SPDX-License-Identifier: Apache-2.0
"""Modules that a trainer imports and does not call in a run on CPUs, in place of large packages."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Name(type):
    """A name of such a module: a class to derive from, and a decorator that returns its function."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else lambda decorated: decorated


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_replaced = any(f"{name}.".startswith(f"{package}.") for package in self.packages)
        return ModuleSpec(name, self, is_package=True) if is_replaced else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def replace(*packages: str) -> None:
    """Let later imports of these packages or modules, which are not installed, and of theirs succeed."""
    sys.meta_path.insert(0, _Finder(packages))
