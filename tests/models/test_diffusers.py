"""Stock transformers of diffusers over a sharded sequence: outputs and gradients are those of one process."""

from __future__ import annotations

from conftest import Ranks
from helpers.diffusion import *

def check_models(rank, world, group):
    for make, inputs in ((wan, wan_inputs), (flux, flux_inputs), (sd3, sd3_inputs)):
        check_exact(group, make(), inputs())

def test_models(pool: Ranks) -> None:
    for world in (1, 2, 3, 4):
        pool(world, check_models)
