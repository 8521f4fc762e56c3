# SPDX-License-Identifier: Apache-2.0
"""benchmarks/figures.py: its page, what fails, and what stays from earlier runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import figures
from figures import Part

from spar._commands.bench.report import Row, Time, is_view

SMALL, LARGE = 2048, 1 << 23


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Return a part that prints, and one that fails."""
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "results")
    parts = [
        Part("one", "The first", "It prints.", 0, ("-c", "print('a figure'); print('[rank0] noise')")),
        Part("two", "The second", "It fails.", 0, ("-c", "print('so far'); raise SystemExit(3)")),
    ]
    monkeypatch.setattr(figures, "PARTS", parts)
    return parts


def test_page_has_commands_outputs_and_failures(parts: list[Part], tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    assert figures.run(parts, 60, out) == 1
    page = out.read_text()
    assert "```console\na figure\n```" in page
    assert "`OMP_NUM_THREADS=1 python -c print('a figure')" in page
    assert "so far" in page and "**It failed**: exit status 3." in page
    assert figures.run(parts[:1], 60, out) == 0
    assert "**It failed**" in out.read_text(), "a part that did not run again stays"
    assert list(figures.sections(out.read_text())) == ["The first", "The second"]


def test_hanging_part_is_a_failure(parts: list[Part], tmp_path: Path) -> None:
    slow = Part("one", "The first", "It hangs.", 0, ("-c", "import time; time.sleep(60)"))
    assert figures.run([slow], 0.5, tmp_path / "page.md") == 1
    assert "killed after 0.5 s" in (tmp_path / "page.md").read_text()


def rows_of(operation: str, seconds: tuple[float, float]) -> list[Row]:
    return [
        Row(operation, "forward", size, size, Time(s, s), Time(20 * s, 20 * s), Time(size * 1e-9, 0.0))
        for size, s in zip((SMALL, LARGE), seconds, strict=True)
    ]


def test_table_of_operations() -> None:
    copied, view = rows_of("gather", (5e-6, 4e-3)), rows_of("split", (5e-6, 6e-6))
    assert not is_view(copied[0], copied + view) and is_view(view[0], copied + view)
    lines = figures.operations_table(copied + view).splitlines()
    assert lines[0] == "| | 2 KB | 8 MB |"
    assert lines[2] == "| gather, forward | 5 us (20 x) | 4.0 ms (20 x, 0.48 copy) |"
    assert lines[3] == "| split, forward | 5 us (20 x) | 6 us (20 x) |"


def test_parts_that_do_not_run_stay_as_the_page_has_them() -> None:
    written = figures.PAGE.read_text()
    assert figures.page(figures.sections(written)) == written


def test_each_part_has_its_own_name_and_program() -> None:
    assert len({part.name for part in figures.PARTS}) == len(figures.PARTS)
    for part in figures.PARTS:
        script = next((word for word in part.command if word.startswith("benchmarks/")), "")
        assert not script or (figures.ROOT / script).exists(), script
