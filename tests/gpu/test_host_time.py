# SPDX-License-Identifier: Apache-2.0
"""What a repeated call over push costs the host: which functions in Python it enters, and which of the driver
it calls. A call of 2 KB takes less time on the GPU than on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Ranks, standin_ranks
from helpers import host_time
from helpers.push_ranks import over_push

SLOT = 1 << 20

COMPILES = "is_dynamo_compiling"
CALL = ["all_to_all", "repeat", COMPILES]
FRAMES = {
    "packed": CALL,
    "direct": CALL,
    "recorded": [*CALL, "forward"],
    "backward": ["backward", COMPILES, "transposed", "begin", "run", COMPILES],
}

DRIVER = {
    "cuCtxGetCurrent": 2,
    "cuCtxSetCurrent": 1,
    "cuThreadExchangeStreamCaptureMode": 2,
    "cuStreamGetCaptureInfo": 1,
    "cuStreamGetId": 1,
    "cuLaunchKernel": 1,
    "cuEventRecord": 1,
}
# Before a direct call allocates its output, it enters the device, and asks whether the stream is captured.
DIRECT = {"cuCtxGetCurrent": 4, "cuThreadExchangeStreamCaptureMode": 4, "cuStreamGetCaptureInfo": 2}
CALLS = {
    "packed": DRIVER,
    "direct": DRIVER | DIRECT | {"cuLaunchKernel": 3},
    "recorded": DRIVER,
    "backward": DRIVER,
}


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    yield from standin_ranks((2,))


def test_repeated_calls_enter_few_functions_and_call_the_driver_little(gpus: Ranks) -> None:
    """A change that makes calls cheaper lowers the tables above."""
    for costs in gpus(2, over_push, SLOT, host_time.costs):
        assert {kind: frames for kind, (frames, _) in costs.items()} == FRAMES
        assert {kind: calls for kind, (_, calls) in costs.items()} == CALLS
