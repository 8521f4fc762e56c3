# SPDX-License-Identifier: Apache-2.0
"""Print the table of docs/diffusers-classes.md: how diffusers' transformer classes are sharded.

From tests/: python -m helpers.diffusion_table [class ...]
"""

from __future__ import annotations

import sys

from conftest import PRELOAD, Ranks

from .diffusion_check import CASES, Outcome, check_classes


def table(outcomes: list[Outcome]) -> str:
    head = "| class | result | compiled | multiply-adds on a rank of 2 | whole on each rank |"
    rows = [head, "|---|---|---|---|---|"]
    for each in outcomes:
        compiled = each.compiled.partition(":")[0]
        rows.append(
            f"| {each.name} | {each.verdict} | {compiled} | {each.share:.1%} | {', '.join(each.whole)} |"
        )
    return "\n".join(rows)


def main() -> None:
    PRELOAD.append("diffusers.models.transformers")
    ranks = Ranks((2,))
    try:
        names = [name for name in CASES if name in sys.argv[1:] or not sys.argv[1:]]
        outcomes: list[Outcome] = []
        for name in names:
            outcomes += ranks(2, check_classes, [name], True)[0]
            print(f"{name}: {outcomes[-1].verdict}, compiled: {outcomes[-1].compiled}", file=sys.stderr)
    finally:
        ranks.stop()
    print(table(outcomes))


if __name__ == "__main__":
    main()
