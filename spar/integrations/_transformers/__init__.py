# SPDX-License-Identifier: Apache-2.0
"""What spar.integrations.transformers is made of."""
