# SPDX-License-Identifier: Apache-2.0
"""The tests' gloo groups take whatever arguments a version of torch passes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from helpers.shared_gloo import shared


class Gloo:
    """torch's class by its constructors' arguments: those of a later version have fields, or not."""

    class _Options:
        def __init__(self) -> None:
            self._devices: list[str] = []
            self._timeout = timedelta(0)
            self.enable_reconfigure = False

    @staticmethod
    def create_default_device() -> str:
        return "the device"

    def __init__(self, *args: Any, **named: Any) -> None:
        self.args, self.named = args, named


def test_named_arguments_become_fields_of_the_options() -> None:
    group = shared(Gloo)("store", 1, 2, timeout=timedelta(seconds=3), enable_reconfigure=True)
    *first, options = group.args
    assert (first, group.named) == (["store", 1, 2], {})
    fields = {"_devices": ["the device"], "_timeout": timedelta(seconds=3), "enable_reconfigure": True}
    assert vars(options) == fields


def test_other_arguments_reach_torch_unchanged() -> None:
    group = shared(Gloo)("store", 1, 2, timeout=timedelta(seconds=3), of_a_later_torch=4)
    assert group.args == ("store", 1, 2)
    assert group.named == {"timeout": timedelta(seconds=3), "of_a_later_torch": 4}
    group = shared(Gloo)("store", 1, 2, timedelta(seconds=3), True)
    assert (group.args, group.named) == (("store", 1, 2, timedelta(seconds=3), True), {})
