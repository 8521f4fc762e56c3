# SPDX-License-Identifier: Apache-2.0
"""Load the C extension before any other module of spar: if it fails, no part of spar stays imported."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parent

# The finder of an editable install would find another checkout's extension. A file that is here and cannot be
# loaded raises its own error below.
if (_ROOT / "csrc" / "spar.h").is_file() and not PathFinder.find_spec("spar._C", [str(_FOLDER)]):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise ImportError(
        f"Python found spar in the checkout {_ROOT}, whose C extension is not built for Python {version}. "
        f"Build it: pip install -e {_ROOT} (or make build, for its .venv). If spar is installed, run from "
        "another folder, and a script outside of the checkout",
        name="spar._C",
        path=str(_FOLDER),
    )
importlib.import_module("spar._C")
if "torch" not in sys.modules:
    # Without NumPy, which spar does not need, the import of torch that follows warns on each rank.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
