# SPDX-License-Identifier: Apache-2.0
"""The operations, each a pair of layouts. `spar` exports them."""
