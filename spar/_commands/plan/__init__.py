# SPDX-License-Identifier: Apache-2.0
"""`python -m spar plan`: what a sequence-parallel set-up costs, from spar's own plans, before it runs."""
