"""CPython's headers for another target: those of this machine, wherever its pyconfig.h is."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "release"))
import cross


@pytest.mark.parametrize("multiarch", [True, False])
def test_headers_have_this_machines_pyconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiarch: bool
) -> None:
    include = tmp_path / "include" / "python3.99"
    include.mkdir(parents=True)
    (include / "Python.h").write_text('#include "pyconfig.h"')
    (include / "pyconfig.h").write_text("the target's" if multiarch else "this machine's")
    if multiarch:  # as on Debian
        own = tmp_path / "include" / "x86_64-linux-gnu" / "python3.99"
        own.mkdir(parents=True)
        (own / "pyconfig.h").write_text("this machine's")
    monkeypatch.setattr(cross, "BUILD", tmp_path / "build")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(include))
    monkeypatch.setattr(sysconfig, "get_config_h_filename", lambda: str(include / "pyconfig.h"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "x86_64-linux-gnu")
    folder = cross.headers()
    assert (folder / "Python.h").exists()
    assert (folder / "pyconfig.h").read_text() == "this machine's"
