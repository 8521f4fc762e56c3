# SPDX-License-Identifier: Apache-2.0
"""Check that a tag is the version of the source, and print its section of CHANGELOG.md: a release's notes.

    python release/notes.py v1.2.3

SPAR_REPOSITORY: as for description.py, to which the section's links lead.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

from description import absolute_links

ROOT = Path(__file__).resolve().parent.parent
DATED = re.compile(r" - \d{4}-\d{2}-\d{2}")


def section(changelog: str, version: str) -> str:
    """Return the text below a version's heading, which must have a date.

    Raises:
        ValueError: there is no such heading, it has no date, or nothing is below it.
    """
    for part in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if heading.startswith(f"[{version}]"):
            if not DATED.fullmatch(heading.removeprefix(f"[{version}]")):
                raise ValueError(f"CHANGELOG.md has '## {heading}'; expected '## [{version}] - YYYY-MM-DD'")
            if not text.strip():
                raise ValueError(f"CHANGELOG.md has nothing below '## {heading}'")
            return text.strip()
    raise ValueError(
        f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'; move what is Unreleased there"
    )


def notes(tag: str, version: str, changelog: str, repository: str | None) -> str:
    """Return the notes of the release that a tag publishes.

    Raises:
        ValueError: the tag is not that of the version, or the changelog has no section for it.
    """
    if tag != f"v{version}":
        raise ValueError(
            f"the tag is {tag}, and the version of the source {version}; expected the tag v{version}"
        )
    text = section(changelog, version)
    return absolute_links(text, repository.rstrip("/"), tag) if repository else text


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python release/notes.py TAG")
    version = runpy.run_path(str(ROOT / "spar" / "_version.py"))["__version__"]
    try:
        print(
            notes(
                sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text(), os.environ.get("SPAR_REPOSITORY")
            )
        )
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
