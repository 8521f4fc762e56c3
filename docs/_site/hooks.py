# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: pages from the root's documents, links that hold on both sides, no other host."""

from __future__ import annotations

import os.path
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
PAGES["README.md"] = "index.md"
SOURCES = {page: name for name, page in PAGES.items()}
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()#:\s]+)(#[^()\s]*)?\)")
INLINE = re.compile(r"<code>[^<]*[-(\[{][^<]*</code>")
WORD = re.compile(
    r"(?<![^\s>])(?=[^\s<>]*[-(\[{])[^\s<>]{1,36}(?![^\s<>])"
)  # an entity counts as its letters
REQUEST = re.compile(
    r"""<(?:script|img|iframe|source|link(?![^>]*rel="?canonical))\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>"""
)


def on_config(config: Any) -> Any:
    """Show the version at the foot of each page."""
    version = runpy.run_path(str(ROOT / "spar" / "_version.py"))["__version__"]
    config.copyright = f"spar {version}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each document of the root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Link files to their pages, by title; of a link to a file without a page, only the text is left."""
    entries = [entry for section in config.nav for pages in section.values() for entry in pages]
    titles = {path: title for entry in entries for title, path in entry.items()}
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def resolved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], posixpath.normpath(posixpath.join(folder, link[2])), link[3] or ""
        if not (ROOT / target).is_file():
            return link[0]  # mkdocs reports it
        if not target.startswith("docs/") and target not in PAGES:
            return text
        to = PAGES.get(target, target.removeprefix("docs/"))
        if text in (link[2], posixpath.basename(link[2])):  # a file's name
            text = titles.get(to, text)
        return f"[{text}]({os.path.relpath(to, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(resolved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark words in code with hyphens and brackets, at which browsers would break lines."""
    return INLINE.sub(lambda code: WORD.sub(r'<span class="word">\g<0></span>', code[0]), html)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Reject a page that would make a browser request something from another host."""
    request = REQUEST.search(output) or re.search(r'<pre class="?mermaid', output)  # mermaid comes from a CDN
    if request:
        raise PluginError(f"{page.file.src_uri} requests from another host: {request[0]:.200}")
    return output
