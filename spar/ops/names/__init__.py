# SPDX-License-Identifier: Apache-2.0
"""Names of other systems for operations: a module for each system."""
