# SPDX-License-Identifier: Apache-2.0
"""One exchange: its layouts, the checks of its arguments, its gradient, what compilers see. Private."""
