# SPDX-License-Identifier: Apache-2.0
"""`python -m spar bench`: the time of each operation, against other ways to do the same."""
