# SPDX-License-Identifier: Apache-2.0
"""Where a sharded model first differs from the same model in one process."""
