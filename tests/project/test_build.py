# SPDX-License-Identifier: Apache-2.0
"""setup.py: three lines that name what to install where spar cannot be built; the metadata for PyPI."""

from __future__ import annotations

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    f"apt-get install gcc libc6-dev python3.{sys.version_info[1]}-dev",
    "dnf install gcc python3-devel",
]


def rejected_build(tmp_path: Path, *, command: str = "build_ext", **environment: str) -> list[str]:
    """Return the lines that setup.py prints; check that it builds nothing."""
    folders = {"build": ["--build-base"], "build_ext": ["--build-lib", "--build-temp"]}[command]
    arguments = [command, *(item for option in folders for item in (option, str(tmp_path / "built")))]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert not (tmp_path / "built").exists()
    return (done.stdout + done.stderr).splitlines()


def check_packages(lines: list[str]) -> None:
    assert len(lines) == 3, lines
    for line, packages in zip(lines[1:], PACKAGES, strict=True):
        assert packages in line


@pytest.mark.parametrize("command", ["build", "build_ext"])
@pytest.mark.parametrize("environment", [{"CC": "/nonexistent"}, {"PATH": "/nonexistent", "CC": "gcc"}])
def test_missing_compiler_is_reported(tmp_path: Path, command: str, environment: dict[str, str]) -> None:
    lines = rejected_build(tmp_path, command=command, **environment)
    assert lines[0].startswith("spar needs a C compiler: No such file or directory: " + environment["CC"])
    check_packages(lines)


@pytest.mark.parametrize(
    ("without", "what"), [("Python.h", "CPython's headers (Python.h"), ("stdio.h", "the C library's headers")]
)
def test_missing_headers_are_reported(tmp_path: Path, without: str, what: str) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text(
        f'#!/bin/sh\nif grep -q {without}; then echo "fatal error: {without}: No such file" >&2; exit 1; fi\n'
    )
    compiler.chmod(0o755)
    lines = rejected_build(tmp_path, CC=str(compiler))
    assert lines[0].startswith(f"spar needs {what}")
    assert lines[0].endswith(f"failed: fatal error: {without}: No such file")
    check_packages(lines)


def test_other_systems_are_rejected(tmp_path: Path) -> None:
    lines = rejected_build(tmp_path, _PYTHON_HOST_PLATFORM="win-amd64")
    assert len(lines) == 3
    assert lines[0] == "spar builds on Linux and macOS, not for win-amd64."
    assert "over torch.distributed" in lines[2]


def test_missing_compiler_is_reported_on_macos(tmp_path: Path) -> None:
    lines = rejected_build(tmp_path, CC="/nonexistent", _PYTHON_HOST_PLATFORM="macosx-11.0-arm64")
    assert lines[0].startswith("spar needs a C compiler")
    assert lines[1:] == ["    macOS: xcode-select --install"]


def metadata(folder: Path, **environment: str) -> email.message.Message:
    """Return the metadata that setup.py writes."""
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "SPAR_REPOSITORY"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text())


def links(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", re.sub(r"(?s)```.*?```|`[^`\n]+`", "", text)))


def test_links_of_the_description_lead_to_the_repository(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    found = metadata(tmp_path, SPAR_REPOSITORY="https://example.org/me/spar/")
    tag = f"v{found['Version']}"
    text = str(found.get_payload())
    assert len(links(text)) == len(links(readme))
    for link in links(readme):
        if link.startswith("https:"):
            continue
        path = link if not link.startswith("#") else f"README.md{link}"
        assert (ROOT / path.partition("#")[0]).exists()
        kind = "raw" if link.endswith(".png") else "blob"
        assert f"https://example.org/me/spar/{kind}/{tag}/{path}" in links(text)
    urls = dict(url.split(", ") for url in found.get_all("Project-URL", ()))
    assert urls["Source"] == "https://example.org/me/spar"
    assert urls["Changelog"] == f"https://example.org/me/spar/blob/{tag}/CHANGELOG.md"


def test_without_a_repository_links_stay_relative(tmp_path: Path) -> None:
    found = metadata(tmp_path)
    assert str(found.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Project-URL" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](R/blob/v1/docs/a.md#b)"),
        ("[a](./a.md) ![b](c.png)", "[a](R/blob/v1/a.md) ![b](R/raw/v1/c.png)"),
        ("[a](#b)", "[a](R/blob/v1/README.md#b)"),
        ("[![a](b.svg)](c.md)", "[![a](R/raw/v1/b.svg)](R/blob/v1/c.md)"),
        ("[a](https://a.b) [c](mailto:a@b)", "[a](https://a.b) [c](mailto:a@b)"),
        ("`f[0](x)` [a](b)", "`f[0](x)` [a](R/blob/v1/b)"),
        ("```\n[a](b)\n```\n[a](b)", "```\n[a](b)\n```\n[a](R/blob/v1/b)"),
    ],
)
def test_rewritten_links(text: str, expected: str) -> None:
    functions = runpy.run_path(str(ROOT / "release" / "description.py"))
    assert functions["absolute_links"](text, "R", "v1") == expected


IMPORT = """
import sys
try:
    import spar
except ImportError as error:
    print([name for name in sys.modules if name.startswith("spar")], error)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose extension is not built."""
    for folder in ("spar", "csrc"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    return tmp_path


@pytest.mark.parametrize("command", [["-m", "spar", "info"], ["script.py"]])
def test_checkout_without_extension_names_the_remedy(checkout: Path, command: list[str]) -> None:
    (checkout / "script.py").write_text("import spar")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = [sys.executable, *command]
    done = subprocess.run(run, cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(
        f"ImportError: Python found spar in the checkout {checkout}, whose C extension is not"
    )
    assert f"pip install -e {checkout} " in last and "run from another folder" in last


def test_failed_import_leaves_no_module_and_its_own_text(checkout: Path) -> None:
    run = [sys.executable, "-c", IMPORT]
    done = subprocess.run(run, cwd=checkout, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("[] Python found spar in the checkout")
    broken = checkout / "spar" / "_C.abi3.so"
    broken.write_text("no library")
    done = subprocess.run(run, cwd=checkout, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith(f"[] {broken}: ") and "checkout" not in done.stdout


CHANGES = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-01-31

### Added

- A thing: [docs/a.md](docs/a.md).

## [1.1.0]

- No date.

## [1.0.0] - 2025-12-31

## [0.9.0] - 2025-11-30
"""


def release_notes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    function: Callable[..., str] = runpy.run_path(str(ROOT / "release" / "notes.py"))["notes"]
    return function


def test_release_notes_are_the_section_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = release_notes(monkeypatch)
    assert notes("v1.2.0", "1.2.0", CHANGES, None) == "### Added\n\n- A thing: [docs/a.md](docs/a.md)."
    linked = notes("v1.2.0", "1.2.0", CHANGES, "https://example.org/me/spar/")
    assert linked.endswith("[docs/a.md](https://example.org/me/spar/blob/v1.2.0/docs/a.md).")


@pytest.mark.parametrize(
    ("tag", "version", "expected"),
    [
        ("v1.2.1", "1.2.0", "the tag is v1.2.1, and the version of the source 1.2.0"),
        ("1.2.0", "1.2.0", "expected the tag v1.2.0"),
        ("v1.2", "1.2", r"no section '## \[1.2\]"),
        ("v1.1.0", "1.1.0", r"has '## \[1.1.0\]'; expected .*YYYY-MM-DD"),
        ("v1.0.0", "1.0.0", r"nothing below '## \[1.0.0\] - 2025-12-31'"),
    ],
)
def test_release_without_notes_is_refused(
    monkeypatch: pytest.MonkeyPatch, tag: str, version: str, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        release_notes(monkeypatch)(tag, version, CHANGES, None)


def test_this_version_has_release_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    version = runpy.run_path(str(ROOT / "spar" / "_version.py"))["__version__"]
    text = release_notes(monkeypatch)(f"v{version}", version, (ROOT / "CHANGELOG.md").read_text(), None)
    assert "### " in text and "\n## [" not in text
