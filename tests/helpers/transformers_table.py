# SPDX-License-Identifier: Apache-2.0
"""docs/models.md: each type of transformers under `spar.parallelize`, by task."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path

import transformers
from conftest import PRELOAD, Ranks

from .transformers_runs import WORLD, Outcome, run_type
from .transformers_types import LENGTH, TASKS, types

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "build/models.json", ROOT / "docs/models.md"
_Results = dict[str, dict[str, Outcome]]
_Rows = dict[str, dict[str, list[str]]]

_SHARE = -(-LENGTH // WORLD) / LENGTH
HEAD = f"""# All models of transformers

<!-- `make models-table` writes this page. -->

[`spar.parallelize`](any-model.md) ran each type in the registries of language models, of multimodal models
and of speech recognition of transformers {transformers.__version__}: a small model with random weights on
{WORLD} ranks, next to one process. The batch has 2 rows of {LENGTH} tokens, one of them padded on its right;
[multimodal](multimodal.md) types have an image or sound in each row, with 17 tokens of text. The loss, the
outputs and each gradient, averaged over the ranks, are **right** if no error exceeds 1e-4 of their largest
element. Weights are float64, or float32 where the code of a type requires it.

"""

NOTES = f"""
**One process fails**: no small model of the type runs in one process on text alone, or on what is passed
for its images or sound, so that there is nothing to compare with. Its row has the reason.

The columns:

- **share**: multiply-adds of a rank inside blocks, as a share of one process's. With {WORLD} ranks and
  {LENGTH} tokens it is {_SHARE:.2f} on rank 0, if nothing runs whole.
- **whole in blocks**: functions that ran on the whole sequence on each rank, and how many lines of the
  model call them. They are exact, and their work is not shared.
- **compiled**: whether [compiled blocks](any-model.md#compiled-models) are right, twice with other values, in
  training, by the backend `aot_eager`, with experts by `batched_mm`. Partly: some blocks run eagerly. By
  `inductor` where `aot_eager` fails in one process, too, as on the gradient of `softplus` in torch 2.13.
"""


def main() -> None:
    """Run types, and write the page from all results."""
    parser = argparse.ArgumentParser(prog="python -m helpers.transformers_types", description=__doc__)
    parser.add_argument("kinds", nargs="*", help="types to run again; default: all")
    parser.add_argument("--task", choices=TASKS, help="one task alone")
    parser.add_argument("--failed", action="store_true", help="run again those that were not right")
    parser.add_argument("--page-only", action="store_true", help="write the page from the last results")
    arguments = parser.parse_args()
    rows, results = rows_of(PAGE.read_text()), load()
    changed = results
    if not arguments.page_only:
        tasks = [arguments.task] if arguments.task else [*TASKS]
        skipped = rows if arguments.failed else {}
        changed = run_all(results, tasks, arguments.kinds, skipped)
    PAGE.write_text(page(rows, changed))
    print(PAGE.relative_to(ROOT))


def load() -> _Results:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {task: {kind: Outcome(*each) for kind, each in known.get(task, {}).items()} for task in TASKS}


def run_all(results: _Results, tasks: list[str], kinds: list[str], skipped: _Rows) -> _Results:
    """Run types but those of which skipped says right; add to the results, and return what is new."""
    unknown = set(kinds) - {kind for task in tasks for kind in types(task)}
    if unknown:
        raise SystemExit(f"no type of transformers {transformers.__version__}: {', '.join(sorted(unknown))}")
    changed: _Results = {task: {} for task in tasks}
    PRELOAD.append("helpers.transformers_runs")
    pool = Ranks((WORLD,))
    RESULTS.parent.mkdir(exist_ok=True)
    try:
        for task in tasks:
            for kind in [kind for kind in types(task) if not kinds or kind in kinds]:
                if skipped.get(task, {}).get(kind, [""] * 2)[1] == "right":
                    continue
                start = time.monotonic()
                outcome = results[task][kind] = changed[task][kind] = run_type(pool, task, kind)
                seconds = time.monotonic() - start
                told = f"{outcome.result} {outcome.error:.0e} share {outcome.share:.2f} {seconds:.1f} s"
                print(f"{task} {kind}: {told} {_line(outcome.note)}", flush=True)
                RESULTS.write_text(json.dumps(results, indent=1))
    finally:
        pool.stop()
    return changed


def rows_of(text: str) -> _Rows:
    """Return the rows of a page, by task and type, as cells."""
    found: _Rows = {}
    for task, (title, _) in TASKS.items():
        section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
        cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        found[task] = {row[0]: row for row in cells}
    return found


def page(rows: _Rows, results: _Results) -> str:
    """Return the page of these results; types that have none keep their rows."""
    rows = {
        task: {
            kind: row
            for kind, row in (rows[task] | _rows(task, results.get(task, {}))).items()
            if kind in types(task)
        }
        for task in TASKS
    }
    head = ["| task | types | right | refused | wrong | crash | one process fails |", f"|{'---|' * 7}"]
    for task, (title, _) in TASKS.items():
        count = Counter(row[1].partition(":")[0] for row in rows[task].values())
        counts = [count[name] for name in ("right", "refused", "wrong", "crash", "one process fails")]
        anchor = re.sub("[^a-z]+", "-", title.lower())
        head.append(f"| [{title}](#{anchor}) | {len(rows[task])} | " + " | ".join(map(str, counts)) + " |")
    causal = rows["causal"].values()
    compiled = Counter(row[4] for row in causal)
    text = HEAD + "\n".join(head) + "\n" + NOTES
    text += f"\nOf {len(causal)} causal types, {compiled['yes']} run with compiled blocks, and "
    text += f"{compiled['partly']} in part.\n"
    for task, (title, _) in TASKS.items():
        columns = [
            "type",
            "result",
            "share",
            "whole in blocks",
            *(["compiled"] if task == "causal" else []),
        ]
        lines = [columns, ["---"] * len(columns), *(row for _, row in sorted(rows[task].items()))]
        text += f"\n## {title}\n\n" + "".join("| " + " | ".join(row) + " |\n" for row in lines)
    return text


def _rows(task: str, outcomes: dict[str, Outcome]) -> dict[str, list[str]]:
    rows = {}
    for kind, each in outcomes.items():
        if each.result == "right":
            cells = [kind, "right", f"{each.share:.2f}", functions(each.whole)]
        else:
            what = "one process fails" if each.result == "none" else each.result
            cells = [kind, f"{what}: {_line(each.note)}".replace("|", "/"), "-", ""]
        rows[kind] = cells + ([(each.compiled or "").partition(":")[0]] if task == "causal" else [])
    return rows


def functions(whole: tuple[str, ...]) -> str:
    """Return names, of each the number of lines that call it."""
    counts = Counter(each.split(" at ")[0] for each in whole)
    return ", ".join(f"`{name}`" + (f" ({n})" if n > 1 else "") for name, n in sorted(counts.items()))


def _line(text: str, most: int = 160) -> str:
    """Return the start of an error's message in one line."""
    text = re.sub(r"\s+", " ", re.sub(r"<([^>]*)>", r"\1", text)).strip()
    text = re.sub(r"^.*ValueError: (?=.)", "", text) if "validator" in text else text
    return text if len(text) <= most else f"{text[: most - 1].rsplit(' ', 1)[0]} ..."
