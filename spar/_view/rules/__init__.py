# SPDX-License-Identifier: Apache-2.0
"""Rules: how each torch function runs on parts. Importing this package registers them."""

from . import attention, losses, metadata, pieces, pointwise, products, random, reductions, rows, shapes  # noqa: F401
