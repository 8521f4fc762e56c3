# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m spar`. Nothing else in spar imports them."""
