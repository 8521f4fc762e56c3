# SPDX-License-Identifier: Apache-2.0
"""How spar.integrations.diffusers shards a model: plans, sequences, attention."""
