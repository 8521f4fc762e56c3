# SPDX-License-Identifier: Apache-2.0
"""NCCL's own library, which opens without a GPU: spar's declarations of it, symbols, version, a unique id."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.core_abi import CSRC, FLAGS

CHILD = """
import ctypes, sys
part = ctypes.CDLL(sys.argv[1])
part.spar_last_error.restype = ctypes.c_char_p
part.spar_dynlib_set_path(b"libnccl", sys.argv[2].encode())
status = part.spar_nccl_open()
print(part.spar_last_error().decode() if status else part.version())
if not status:
    own = ctypes.create_string_buffer(128)
    print(part.unique_id(own), any(own.raw))
"""
EXTRA = """
#include "transports/nccl/api.h"
int version(void);
int version(void) { return spar_nccl.version; }
int unique_id(spar_nccl_id *id);
int unique_id(spar_nccl_id *id) { return (int)spar_nccl.GetUniqueId(id); }
"""


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of the package nvidia-nccl-cu12, a test dependency in pyproject.toml."""
    for root in sys.path:
        if (found := Path(root, "nvidia", "nccl")).is_dir():
            return found
    pytest.skip("the package nvidia-nccl-cu12 is not installed")


def test_real_library_opens(package: Path, tmp_path: Path) -> None:
    """It has all functions of spar's table, is new enough, and creates a unique id."""
    (tmp_path / "extra.c").write_text(EXTRA)
    sources = [
        tmp_path / "extra.c",
        *(CSRC / name for name in ("transports/nccl/api.c", "base/dynlib.c", "base/error.c", "base/util.c")),
    ]
    command = ["cc", *FLAGS, "-O1", "-fPIC", "-shared", *map(str, sources), "-o", str(tmp_path / "part.so")]
    subprocess.run(command, check=True)
    library = package / "lib" / "libnccl.so.2"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "part.so"), str(library)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    version = ctypes.c_int()
    ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(version))
    assert done.stdout.split() == [str(version.value), "0", "True"]
    assert version.value >= 22105


def test_declarations(package: Path, tmp_path: Path) -> None:
    """transports/nccl/api.h declares what nccl.h declares. Two small headers replace CUDA's."""
    (tmp_path / "cuda_runtime.h").write_text(
        "typedef struct CUstream_st *cudaStream_t;\n#include <stddef.h>\n"
    )
    (tmp_path / "cuda_fp16.h").write_text("")
    text = """
#include <limits.h>
#include "THEIRS"
#include "OURS"
/* an id is passed by value; its struct has no tag, so size and alignment must be equal */
typedef spar_nccl_result (*init)(struct ncclComm **, int, spar_nccl_id, int);
_Static_assert(sizeof(spar_nccl_id) == sizeof(ncclUniqueId), "id");
_Static_assert(_Alignof(spar_nccl_id) == _Alignof(ncclUniqueId), "id");
_Static_assert(__builtin_types_compatible_p(__typeof__(&ncclCommInitRank),
               ncclResult_t (*)(struct ncclComm **, int, ncclUniqueId, int)), "ncclCommInitRank");
_Static_assert(__builtin_types_compatible_p(init, __typeof__(((spar_nccl_table *)0)->CommInitRank)), "init");
#define HOLD(name) _Static_assert(__builtin_types_compatible_p( \\
    __typeof__(&nccl##name), __typeof__(((spar_nccl_table *)0)->name)), #name);
"""
    declared = (CSRC / "transports/nccl/api.h").read_text()
    functions = [
        line.split("(")[1].split(",")[0] for line in declared.splitlines() if line.startswith("    F(")
    ]
    assert len(functions) == 15 and functions.pop() == "CommRevoke"
    text += """
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 7)
HOLD(CommRevoke)
_Static_assert(SPAR_NCCL_REVOKE == NCCL_VERSION(2, 28, 7) && NCCL_REVOKE_DEFAULT == 0, "revoke");
#endif
"""
    # ncclGetUniqueId and ncclCommInitRank have the struct itself as a parameter: a different type in C
    text += "\n".join(f"HOLD({name})" for name in functions if name not in ("CommInitRank", "GetUniqueId"))
    text += """
_Static_assert(__builtin_types_compatible_p(__typeof__(&ncclGetUniqueId),
               ncclResult_t (*)(ncclUniqueId *)), "ncclGetUniqueId");
_Static_assert(SPAR_NCCL_SUCCESS == (int)ncclSuccess, "success");
_Static_assert(SPAR_NCCL_IN_PROGRESS == (int)ncclInProgress, "in progress");
_Static_assert(SPAR_NCCL_UINT8 == (int)ncclUint8 && SPAR_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "constants");
_Static_assert(SPAR_NCCL_LEAST == NCCL_VERSION(2, 21, 5) && SPAR_NCCL_LEAST <= NCCL_VERSION_CODE, "version");
"""
    text = text.replace("THEIRS", str(package / "include" / "nccl.h")).replace(
        "OURS", str(CSRC / "transports/nccl/api.h")
    )
    (tmp_path / "hold.c").write_text(text)
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", f"-I{CSRC}", f"-I{tmp_path}"]
    command.append(str(tmp_path / "hold.c"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
