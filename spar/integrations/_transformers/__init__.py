# SPDX-License-Identifier: Apache-2.0
"""What views are told of transformers."""
