# SPDX-License-Identifier: Apache-2.0
"""`python -m spar check`: every public operation and its gradient, against plain torch in one process."""
