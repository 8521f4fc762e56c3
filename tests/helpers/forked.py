# SPDX-License-Identifier: Apache-2.0
"""Imported last by the process that ranks are forks of: the helpers of many tests.

A rank that imports them itself takes three times as long to start.
"""

from __future__ import annotations

import gc
import importlib
import os

from helpers.forks import PATH

MODULES = ["resource", "spar.testing", "spar.utils", "spar._model.view"]
MODULES += [
    f"helpers.{name}" for name in ("fault_cases", "operations", "orders", "processes", "whole_attention")
]
for module in MODULES:
    importlib.import_module(module)
if path := os.environ.pop(PATH):
    os.environ["PYTHONPATH"] = path  # of the commands that ranks start
else:
    del os.environ["PYTHONPATH"]
gc.collect()
gc.freeze()  # a collection in a rank would visit what is imported, and copy its pages
