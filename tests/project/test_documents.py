# SPDX-License-Identifier: Apache-2.0
"""Compare documents with the code: names, figures, and the files of a source distribution."""

from __future__ import annotations

import inspect
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from operator import attrgetter
from pathlib import Path

import pytest

import spar
import spar.integrations.diffusers
import spar.integrations.lightning
import spar.integrations.llamafactory
import spar.integrations.torchtitan
import spar.integrations.trainer
import spar.integrations.transformers
import spar.testing
import spar.utils

ROOT = Path(__file__).parents[2]
PERFORMANCE, FIGURES = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("performance", "figures"))
README = (ROOT / "README.md").read_text()
SOURCES = ("benchmarks", "csrc", "docs", "examples", "fuzz", "release", "spar", "tests")


def test_tables_of_operations_match_exports() -> None:
    """The tables of docs/ops.md list exactly spar's operations, by their full names."""
    text = (ROOT / "docs" / "ops.md").read_text().split("\n### Layouts\n")
    tables = text[0] + text[1].split("\n## By the parallel state\n")[1]
    names = set(re.findall(r"^\| `(\w+)\(", tables, re.M))
    not_operations = {"transport", "init", "close", "debug", "empty_cache", "memory_stats", "Transport"}
    not_operations |= {"parallelize", "unparallelize"}
    functions = {
        name
        for name in spar.__all__
        if callable(getattr(spar, name)) and not isinstance(getattr(spar, name), type)
    }
    assert names == functions - not_operations


def public_names() -> set[str]:
    modules = [spar, spar.testing, spar.utils, spar.topology, spar.sharding, spar.data, spar.parallel_state]
    of_integrations = spar.integrations
    modules += [of_integrations.transformers, of_integrations.trainer]
    modules += [of_integrations.llamafactory, of_integrations.lightning]
    modules += [of_integrations.torchtitan]
    return {f"{module.__name__}.{name}" for module in modules for name in module.__all__}


def test_every_public_name_is_on_one_api_page() -> None:
    """mkdocs fails if a page names something that does not exist, but not if no page names something."""
    pages = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]
    assert sorted(shown) == sorted(public_names())


def test_docstrings_have_no_colon_in_returns() -> None:
    """The site would show what precedes it as the type."""
    for name in public_names() - {"spar.__version__"}:
        value = attrgetter(name.removeprefix("spar."))(spar)
        for each in (value, *(vars(value).values() if isinstance(value, type) else ())):
            returns = re.search(r"^Returns:\n((?: .*\n?)+)", inspect.getdoc(each) or "", re.M)
            assert returns is None or ": " not in returns[1], each


def test_contributing_lists_all_make_targets() -> None:
    targets = re.findall(r"^\t@echo 'make ([\w-]+)", (ROOT / "Makefile").read_text(), re.M)
    listed = set(re.findall(r"\bmake ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(targets) >= 20 and set(targets) <= listed


def test_files_to_add_something_exist() -> None:
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n### ")
    for title in ("A layout", "An operation", "A transport", "A model of transformers or diffusers"):
        (section,) = (text for text in sections if text.startswith(f"{title}\n"))
        files = [name for row in re.findall(r"^\| (`[^|]+`) \|", section, re.M) for name in row.split(", ")]
        assert len(files) >= 7, title
        for name in files:  # NAME stands for what is added
            assert exists(ROOT / name.strip("`")), name


def exists(path: Path) -> bool:
    """Whether a file exists; a name in capitals stands for one that is to be added beside others."""
    return path.exists() or (path.parent.is_dir() and path.stem in ("NAME", "FAMILY"))


def test_paths_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = {path.name for source in SOURCES for path in (ROOT / source).rglob("*")}
    found = set(re.findall(r"`([\w.*/-]+)`", text)) | set(re.findall(r"\]\(([^#:)]+)[#)]", text))
    paths = {name for name in found if "/" in name and (ROOT / name.split("/")[0]).exists()}
    paths = {name for name in paths if not name.startswith(("build/", "dist/", ".venv/"))}
    assert len(paths) >= 60
    for name in sorted(paths):
        assert exists(ROOT / name) or any(ROOT.glob(name)), name
    files = {name for name in found - paths if re.fullmatch(r"[a-z]\w*\.(py|[ch]|def|txt)", name)}
    assert len(files) >= 8
    assert files <= names | {path.name for path in ROOT.iterdir()}, files - names


def test_tests_list_no_transports() -> None:
    """They draw from helpers/tables.py or from the transports that conftest.py finds."""
    listed = re.compile(r"""[\[(]["']shm["'], ["']torch["'][\])]""")
    for path in (ROOT / "tests").rglob("*.py"):
        assert not listed.search(path.read_text()), path


def test_figures_are_those_of_their_script() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "_site" / "figures.py"))
    figures = {f"{figure.name}.svg": figure.write() for figure in (draw() for draw in script["FIGURES"])}
    assert figures == {path.name: path.read_text() for path in (ROOT / "docs" / "figures").iterdir()}


def fastest_and_slowest(table: str) -> tuple[float, float]:
    """Return the least and greatest speed-up of a gather's backward from 1 MB on."""
    rows = re.findall(r"^\| (?:packed |zigzag )?gather, backward \|(.*)\|$", table, re.MULTILINE)
    assert len(rows) == 3
    factors = [float(factor) for row in rows for factor in re.findall(r"\(([\d.]+) x, ", row)]
    return min(factors), max(factors)


def test_gather_backward_figures_match_tables() -> None:
    two, four = (figures(f"Operations, {ranks} ranks") for ranks in (2, 4))
    (text,) = re.findall(r"from 1 MB spar is (.*?) times faster on 2 ranks and (.*?) times on 4", PERFORMANCE)
    found = [tuple(float(bound) for bound in part.split(" to ")) for part in text]
    assert found == [fastest_and_slowest(two), fastest_and_slowest(four)]


def figures(title: str) -> str:
    """Return a section of docs/figures.md."""
    return FIGURES.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_figures_of_readme_are_those_of_the_last_run() -> None:
    expected: dict[int, list[str]] = {}
    for ranks in (2, 4):
        rows = re.findall(
            r"^ *(\d+)  (usual )?ulysses +([\d.]+) ms \([\d.]+\) +([\d.]+) ms",
            figures(f"Attention, {ranks} ranks"),
            re.M,
        )
        found = {(int(total), bool(usual)): (float(a), float(b)) for total, usual, a, b in rows}
        for total in sorted({total for total, _ in found}):
            (step, outside), (usual_step, usual_outside) = found[total, False], found[total, True]
            cells = f"{outside:.1f} ms", f"{usual_outside / outside:.1f}", f"{step / usual_step:.2f}"
            expected.setdefault(total, []).extend(cells)
    table = README.split("\n## How fast\n")[1].split("\n## ")[0]
    rows_of_readme = re.findall(r"^\| ([\d,]+) \|(.*)\|$", table, re.M)
    words = re.compile(r" times.*")
    shown = {
        int(total.replace(",", "")): [words.sub("", cell.strip()) for cell in row.split("|")]
        for total, row in rows_of_readme
    }
    assert shown == expected and len(shown) == 5


def test_speed_of_all_to_all_in_readme_is_that_of_the_last_run() -> None:
    (row,) = re.findall(r"^\| all_to_all, forward \|(.*)\|$", figures("Operations, 2 ranks"), re.M)
    factors = re.findall(r"\(([\d.]+) x", row)
    text = "`all_to_all` alone is {} times faster than the usual code at 2 KB, and {} times at 100 MB"
    assert text.format(factors[0], factors[-1]) in " ".join(README.split())


def test_speed_on_a_gpu_in_readme_is_that_of_the_last_run() -> None:
    log, text = (ROOT / "docs" / "gpu-verified.md").read_text(), " ".join(README.split())
    ratios = [
        float(spar) / float(alone)
        for what in ("causal", "window of 512")
        for spar, alone in re.findall(
            rf"^\| [\d,]+ \| {what} \| .*? \| ([\d.]+), .*? \| \S+ ([\d.]+)", log, re.M
        )
    ]
    causal, window = "takes {:.2f} and {:.2f} times as long as", "took {:.1f} and {:.1f} times as long as"
    assert causal.format(*ratios[:2]) in text and window.format(*ratios[2:]) in text, ratios


def test_memory_in_readme_is_that_of_the_last_run() -> None:
    rows = re.findall(r"^ +(\d+) .* (\d+) MiB$", figures("Memory of a rank"), re.M)
    last = {int(ranks): int(peak) for ranks, peak in rows}
    shares = [f"{last[ranks] / last[1]:.2f}" for ranks in (2, 4, 8)]
    text = "2, 4 and 8 ranks need {}, {} and {} of the {:,} MiB of one process"
    assert text.format(*shares, last[1]) in " ".join(README.split())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git to list the tracked files")
def test_source_distribution_contains_tracked_files(tmp_path: Path) -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [name for name in files.stdout.splitlines() if (ROOT / name).exists()]
    for name in tracked:  # a copy without *.egg-info, whose list of files setuptools would add
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    command = [sys.executable, "setup.py", "-q", "sdist"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {name for name in tracked if "/" not in name or name.startswith(SOURCES)}
    assert wanted - held <= {".gitignore"}
