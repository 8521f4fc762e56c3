# SPDX-License-Identifier: Apache-2.0
"""Attention over a sharded sequence: which heads, keys and blocks a rank needs, and what computes them."""
