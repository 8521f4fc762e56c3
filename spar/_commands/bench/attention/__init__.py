# SPDX-License-Identifier: Apache-2.0
"""`spar bench --attention`."""
