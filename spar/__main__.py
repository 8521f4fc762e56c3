# SPDX-License-Identifier: Apache-2.0
"""Run spar's commands: `python -m spar --help`."""

from __future__ import annotations

import sys

from ._commands.arguments import main

if __name__ == "__main__":
    sys.exit(main())
