# SPDX-License-Identifier: Apache-2.0
"""Documents that list what the sources have: the environment, errors, layouts."""

from __future__ import annotations

import ast
import re

import pytest
from helpers.tables import KINDS
from test_source import CSRC, LAYOUT, ROOT, SIGNATURES

import spar
from spar import _C

pytestmark = [pytest.mark.spread, pytest.mark.quick]


def test_environment_is_documented() -> None:
    """The table of docs/env.md has exactly the rows of csrc/base/env.def."""
    text = (ROOT / "docs" / "env.md").read_text()
    rows = [
        f"| `{variable}` | {kind.replace('|', ', ')} | {default or 'unset'} | {help_text} |"
        for _, variable, kind, default, help_text in _C.env_rows()
    ]
    assert re.findall(r"^\| `.*", text, re.MULTILINE) == rows
    assert f"at most {_C.LONGEST_S}," in text


def core_messages() -> list[str]:
    """Return the formats of the core's errors, except those of arguments, with ... for each value."""
    found = []
    for path in sorted(CSRC.rglob("*.c")):
        text = path.read_text()
        calls = re.findall(
            r'spar_fail(?:_ranks?)?\(\s*([^;",]*?),\s*(?:[^;"]*?,\s*)?((?:"(?:[^"\\]|\\.)*"\s*)+)', text
        )
        calls += re.findall(r'\b(fail_missing|spar_group_break)\([^;]*?((?:"(?:[^"\\]|\\.)*"\s*)+)', text)
        for status, quoted in calls:
            if status != "SPAR_INVALID":
                whole = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', quoted))
                found.append(re.sub(r"%[-.*\d]*(?:ll|z)?[a-z]", "...", whole).strip())
    return [message for message in found if message != "..."]


def python_messages() -> list[str]:
    """Return the longest fixed part of each text that is raised as one of spar's errors."""
    names, found = {name for name, value in vars(spar).items() if name.endswith("Error")}, []
    folders = ("_exchange", "_group", "_transports")
    for path in (path for folder in folders for path in (ROOT / "spar" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                strings = [
                    part.value
                    for part in ast.walk(node.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                found.append(max(strings, key=len, default=""))
    return found


def test_errors_are_documented() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    core, ours = core_messages(), python_messages()
    assert len(core) > 40 and len(ours) > 4
    for message in core:
        assert f"`{message}`" in text, message
    for message in ours:
        assert message.strip(" :'\n") in text, message
    for name in (name for name in vars(spar) if name.endswith("Error")):
        assert f"## {name}" in text, name
    for name in ("reliability", "errors"):
        assert f"docs/{name}.md" in (ROOT / "README.md").read_text()


def test_documents_have_a_row_for_each_layout_operation_and_transport() -> None:
    architecture, ops, performance, readme = (
        (ROOT / name).read_text()
        for name in ("docs/architecture.md", "docs/ops.md", "docs/performance.md", "README.md")
    )
    for kind in KINDS:
        assert f"`{kind}`" in architecture, kind
    for name in set(SIGNATURES) - {"transport", "init", "close", "debug", "empty_cache", "memory_stats"}:
        assert f"`{name}(" in ops, name
    for name in LAYOUT:
        assert f"`{name}(" in ops or f"`{name.removeprefix('SequenceLayout.')}(" in ops, name
    for name, *_ in _C.traffic():
        assert f"| {name} |" in readme, name
        assert re.search(rf"^\| {name}\b", performance, re.M), name
