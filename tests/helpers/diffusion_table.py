# SPDX-License-Identifier: Apache-2.0
"""Print a table in Markdown of how diffusers' transformer classes are sharded.

From tests/: python -m helpers.diffusion_table [class ...]
"""

from __future__ import annotations

import sys

from conftest import PRELOAD, Ranks

from .diffusion_check import CASES, Outcome, check_classes


def table(outcomes: list[Outcome]) -> str:
    rows = ["| class | result | multiply-adds on a rank of 2 | whole on each rank |", "|---|---|---|---|"]
    for each in outcomes:
        rows.append(f"| {each.name} | {each.verdict} | {each.share:.1%} | {', '.join(each.whole)} |")
    return "\n".join(rows)


def main() -> None:
    PRELOAD.append("diffusers.models.transformers")
    ranks = Ranks((2,))
    try:
        outcomes, _ = ranks(
            2, check_classes, [name for name in CASES if name in sys.argv[1:] or not sys.argv[1:]]
        )
    finally:
        ranks.stop()
    print(table(outcomes))


if __name__ == "__main__":
    main()
