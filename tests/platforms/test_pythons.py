# SPDX-License-Identifier: Apache-2.0
"""One build of the extension for all CPythons from 3.10: a gather of two ranks, by each interpreter found.

They have no torch: the extension is loaded without the package.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from spar import _C

PROGRAM = """
import array, importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("spar._C", sys.argv[1])
core = importlib.util.module_from_spec(importlib.util.spec_from_loader("spar._C", loader))
loader.exec_module(core)

def address(values):
    return values.buffer_info()[0]

class Tensor:
    def __init__(self, values):
        self.shape, self.values = (len(values),), values

    def data_ptr(self):
        return address(self.values)

    def stride(self):
        return (1,)

def plan_of(rank, values):
    args = (3, 0, 0, 12, -1)  # before: dim 0 in even shards of 12 items; after: all items on each rank
    exchange = core.Exchange("gather", "", 2, rank, 1, (args,), 0, False, 1.0, 0)
    return exchange.plan((Tensor(values),), core.SIDE_PULL)

inputs = [array.array("B", range(6 * rank, 6 * rank + 6)) for rank in range(2)]
outputs = [array.array("B", bytes(12)) for rank in range(2)]
wires = [array.array("B", bytes(6)) for rank in range(2)]
plans = [plan_of(rank, inputs[rank]) for rank in range(2)]
for rank, (plan, addresses) in enumerate(plans):
    assert plan.out_shapes == ((12,),), plan.out_shapes
    plan.copy_own(addresses, (address(outputs[rank]),), 0, False, 1.0)
    plan.pack(addresses, address(wires[rank]))
for rank, (plan, _) in enumerate(plans):
    plan.unpack(address(wires[1 - rank]), (address(outputs[rank]),), 0, False, 1.0)
    assert list(outputs[rank]) == list(range(12)), outputs[rank]
try:
    plan_of(5, inputs[0])
except ValueError as error:
    assert "rank 5 of 2 ranks" in str(error), error
else:
    raise AssertionError("rank 5 of 2 was accepted")
print("%d.%d" % sys.version_info[:2])
"""


def interpreter(version: str) -> str | None:
    """Return a python of that version on the path, or in pyenv's folder."""
    places = [shutil.which(f"python{version}")]
    places += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for place in places:
        if place and subprocess.run([place, "-c", ""], capture_output=True).returncode == 0:
            return place
    return None


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_gather(version: str) -> None:
    if not (python := interpreter(version)):
        pytest.skip(f"there is no Python {version}")
    command = [python, "-I", "-W", "error", "-c", PROGRAM, _C.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == version
