# SPDX-License-Identifier: Apache-2.0
"""The project's page on PyPI: README.md with links that lead to the repository, and the project's URLs.

No address of a repository is written down in the source. SPAR_REPOSITORY has it during a release, for example
https://github.com/OWNER/NAME; without it, links stay relative and there are no URLs.
"""

from __future__ import annotations

import re

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Rewrite the relative links of a README in the repository's root to the files of a tag; skip code."""

    def rewrite(match: re.Match[str]) -> str:
        image, target = match["image"], match["target"]
        if _ABSOLUTE.match(target):
            return match[0]
        if target.startswith("#"):  # PyPI gives headings no anchors
            target = f"README.md{target}"
        path = target.removeprefix("./")
        label = match["text"] if image else _LINK.sub(rewrite, match["text"])  # a badge: an image in a link
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if i % 2 else _LINK.sub(rewrite, part) for i, part in enumerate(parts))


def project_urls(repository: str, tag: str) -> dict[str, str]:
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def metadata(readme: str, version: str, repository: str | None) -> dict[str, object]:
    """Return setup()'s arguments for the page of a version."""
    arguments: dict[str, object] = {"long_description_content_type": "text/markdown"}
    if not repository:
        return arguments | {"long_description": readme}
    repository, tag = repository.rstrip("/"), f"v{version}"
    arguments["long_description"] = absolute_links(readme, repository, tag)
    return arguments | {"project_urls": project_urls(repository, tag)}
