# SPDX-License-Identifier: Apache-2.0
"""Rules: how each torch function runs on parts. Importing this package registers them."""

from . import (  # noqa: F401
    attention,
    contractions,
    losses,
    metadata,
    pieces,
    pointwise,
    pools,
    products,
    random,
    reductions,
    resampling,
    rows,
    scatters,
    shapes,
    spatial,
    spatial_norms,
    unfolding,
)
