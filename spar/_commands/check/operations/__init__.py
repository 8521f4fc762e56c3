# SPDX-License-Identifier: Apache-2.0
"""What each public operation must do, as cases of `spar check`."""
