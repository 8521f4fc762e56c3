# SPDX-License-Identifier: Apache-2.0
"""A global view: models compute on shards of a sequence, and see whole tensors."""
