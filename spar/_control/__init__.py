# SPDX-License-Identifier: Apache-2.0
"""How ranks agree on each call, learn of failures, and know who is missing. Private."""
