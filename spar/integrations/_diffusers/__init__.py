# SPDX-License-Identifier: Apache-2.0
"""What spar knows of diffusers: its models, its kernels, and the names that it uses."""
