# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of a process group: the order of its calls, its transports, what broke it. Private."""
