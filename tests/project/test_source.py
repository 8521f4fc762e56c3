# SPDX-License-Identifier: Apache-2.0
"""Rules about the sources: fences, public signatures, documents."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import typing
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
from helpers import core
from helpers.tables import KINDS, MAKERS

import spar
import spar.integrations.diffusers
import spar.integrations.llamafactory
import spar.integrations.torchtitan
import spar.integrations.trainer
import spar.integrations.transformers
import spar.sequence_layout
import spar.testing
import spar.utils
from spar import _C
from spar._exchange import layouts
from spar.topology.resolve import OF_MINDSPEED_MM

pytestmark = [pytest.mark.spread, pytest.mark.quick]

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"


def functions_with(pattern: str) -> set[str]:
    """Return file:function of each match in the C core; by its style, function names begin a line."""
    found = set()
    for path in CSRC.rglob("*.c"):
        name = ""
        for line in path.read_text().splitlines():
            line = re.sub(r"^__attribute__\(\(.*\)\) ", "", line)
            if start := re.match(r"(?:\w.*?)?\b(\w+)\(", line):
                name = start[1]
            if re.search(pattern, line) and not line.startswith(("#", "enum")):
                found.add(f"{path.name}:{name}")
    return found


def test_nontemporal_stores_are_fenced() -> None:
    """Non-temporal stores may be reordered after ordinary ones: a fence must precede the publishing store."""
    stores = functions_with(r"atomic_store_n\(.*(word|published|done|described|broken)\b")
    assert stores == {"mailbox.c:spar_mailbox_publish"}
    assert functions_with(r"_mm\w*_stream_(?!load)") == {
        "nontemporal.c:copy_lines_avx512",
        "nontemporal.c:copy_lines_sse2",
    }
    copies = {"copy.c:stream_runs", "copy.c:copy_to_all", "sum.c:sum_streaming"}
    assert functions_with("spar_nontemporal_copy") == {"nontemporal.c:spar_nontemporal_copy", *copies}
    assert functions_with("spar_nontemporal_fence") == {
        "copy.c:spar_copy_all",
        "copy.c:copy_range",
        "mailbox.c:spar_mailbox_publish",
        "sum.c:sum_streaming",
    }
    scales = {"copy.c:copy_runs", "copy.c:scale_to_all"}
    assert functions_with("spar_scale_nontemporal") == {"scale.c:spar_scale_nontemporal", *scales}
    assert functions_with("spar_nontemporal_line") == {
        "items.c:spar_repeat_item",
        "items.c:transpose_lines",
        "scale.c:lines_plain",
        "scale.c:VECTORS",
    }
    assert functions_with("put_lines") == {"scale.c:put_lines", "scale.c:scale_lines", "scale.c:f16_lines"}


def test_calls_keep_the_affinity_of_threads() -> None:
    assert functions_with(r"setaffinity") == set()


SIGNATURES = {
    "all_to_all": "input_, process_group=None, scatter_dim=2, gather_dim=1, gather_size=None, "
    "scatter_sizes=None, gather_sizes=None, layout=None, scatter_layout=None, group=None, async_op=False, "
    "out=None",
    "attention": "q, k, v, layout, causal=False, mask=None, window=None, sinks=None, softcap=None, "
    "bias=None, scale=None, dropout_p=0.0, method=None, grid=None, float8=None, "
    "kernel=None, seq_dim=None, head_dim=None, return_lse=False",
    "parallelize": "model, group=None, method=None, layout='even', inputs=(), "
    "outputs='whole', blocks=None, tile=None, strict=False",
    "unparallelize": "model",
    "by_heads": "fn, tensors, layout, parameters=(), like=0, cu_seqlens=False, seq_dim=1, head_dim=2, "
    "tree=None, state=()",
    "by_state": "fn, tensors, layout, state, transition=None, values=None, decay=False, correct=None, "
    "like=0, seq_dim=1, tree=None",
    "all_gather": "input_, group=None, dim=0, sizes=None, layout=None, async_op=False, out=None",
    "reduce_scatter": "input_, group=None, dim=0, sizes=None, layout=None, async_op=False, out=None",
    "split_forward_gather_backward": "input_, process_group, dim, split_sizes=None, grad_scale='down'",
    "gather_forward_split_backward": "input_, process_group, dim, gather_sizes=None, grad_scale='up'",
    "load_balanced_split_forward_gather_backward": "input_, process_group, dim=0",
    "load_balanced_gather_forward_split_backward": "input_, process_group, dim=0",
    "packed_data_split_forward_gather_backward": "hidden_states, process_group, sequence_lengths, dim=0",
    "packed_data_gather_forward_split_backward": "local_hidden_states, all_split_sizes, process_group, dim=0",
    "split_forward_gather_backward_with_cp": "input_, dim",
    "gather_forward_split_backward_with_cp": "input_, dim, gather_size",
    "packed_data_split_forward_gather_backward_with_cp": "x, dim, seq_lens",
    "packed_data_gather_forward_split_backward_with_cp": "x, dim, seq_lens",
    "reorder_output": "output, cp_rank, cp_size, cp_group, dim=0",
    "cal_split_sizes": "dim_size, world_size",
    "cal_split_sizes_multi": "sizes, world_size",
    "transport": "group=None, device=None",
    "init": "group=None, device=None",
    "close": "group=None",
    "debug": "group=None",
    "empty_cache": "",
    "memory_stats": "",
    "gather_forward_split_backward_and_unpad": "input_, group, dim, padding_size=0, unpad_dim=None",
    "Rows.gather": "self, x, dim=0, async_op=False",
    "Rows.add": "self, y, dim=0, async_op=False",
    "Rows.table": "self, x, dim=0, async_op=False",
    "Work.wait": "self, timeout=None",
    "Work.is_completed": "self",
    "mean_loss": "loss_sum, count, group=None, averaged_by=None",
    "masked_mean": "values, mask, layout, by='token', groups=None, total=None, group=None, averaged_by=None",
    "all_to_all_single": "input_, split_sizes, group=None, dim=0",
    "roll": "input_, shifts, layout, dim=1",
    "token_logprobs": "logits, labels, layout, temperature=1.0, ignore_index=-100, gather=None, "
    "grad_scale=NOT_GIVEN",
    "rank_seed": "seed, group=None",
}
LAYOUT = {
    **{f"SequenceLayout.{name}": maker.parameters for name, maker in MAKERS.items()},
    "SequenceLayout.hybrid": "total, state=None",
    "SequenceLayout.index": "self",
    "SequenceLayout.positions": "self",
    "SequenceLayout.cu_seqlens": "self",
    "SequenceLayout.shard": "self, x, dim, grad_scale=NOT_GIVEN",
    "SequenceLayout.gather": "self, x, dim, grad_scale=NOT_GIVEN, backward='slice'",
    "SequenceLayout.all_gather": "self, x, dim",
    "SequenceLayout.reduce_scatter": "self, x, dim",
    "SequenceLayout.halo": "self, x, before, dim=1, after=0",
    "SequenceLayout.drop_halo": "self, y, before, dim=1, after=0",
    "SequenceLayout.shift": "self, x, n, dim=1, fill=0",
    "SequenceLayout.rows": "self, index, padding=False",
}
SHARDING = {
    "sp_shard": "tensor, dim, validate=True",
    "sp_gather": "tensor, dim, validate=True",
    "sp_shard_with_padding": "tensor, dim, pad_value=0.0",
    "get_sharding_validator": "",
    "ShardingValidator.shard": "self, tensor, name, dim, validate_divisible=True",
    "ShardingValidator.gather": "self, tensor, name, dim",
    "ShardingValidator.validate": "self",
    "ShardingValidator.track": "self",
}
DATA = {
    "PackedSamples": "samples, group=None, max_tokens=None, rows=1",
    "PackedSamples.pack": "self, x, row=0, shift=0, fill=0",
    "PackedSamples.shard": "self, x, row=0, shift=0, fill=0",
    "PackedSamples.unpack": "self, outputs, shift=0, fill=0, grad_scale=NOT_GIVEN",
    "SPDataProcessor": "",
    "SPDataProcessor.preprocess": "self, data",
    "SPDataProcessor.postprocess": "self, data",
    "sp_slice_and_pad_input": "input_ids, position_ids",
    "gather_forward_split_backward_and_unpad": "input_, group, dim, padding_size=0, unpad_dim=None",
}
UTILS = {
    "StatelessProcessGroup": "rank, world_size, store, socket, data_expiration_seconds=3600, "
    "send_dst_counter=<factory>, recv_src_counter=<factory>, broadcast_send_counter=0, "
    "broadcast_recv_src_counter=<factory>, entries=<factory>",
    "StatelessProcessGroup.create": "host, port, rank, world_size, data_expiration_seconds=3600, "
    "store_timeout=300",
    "StatelessProcessGroup.send_obj": "self, obj, dst",
    "StatelessProcessGroup.recv_obj": "self, src",
    "StatelessProcessGroup.broadcast_obj": "self, obj, src",
    "StatelessProcessGroup.all_gather_obj": "self, obj",
    "StatelessProcessGroup.barrier": "self, timeout=30.0",
    "StatelessProcessGroup.expire_data": "self",
    "divide": "numerator, denominator",
    "ensure_divisibility": "numerator, denominator",
    "get_pp_indices": "num_layers=None, pp_rank=None, pp_size=None, num_hidden_layers=None",
    "init_gloo_process_group": "backend, prefix_store, group_rank, group_size, timeout",
    "sched_yield": "",
    "split_tensor_along_last_dim": "tensor, num_partitions, contiguous_split_chunks=False",
    "stateless_destroy_torch_distributed_process_group": "pg",
    "stateless_init_torch_distributed_process_group": "host, port, rank, world_size, backend",
}
TESTING = {
    "compare": "model_fn, batch, shard_fn, group=None, layout=None, seq_dim=1, reduce='sum', seed=0, "
    "show=True",
    "diagnose": "model, step, show=True",
    "Difference": "kind, module, function, file, line, error, ranks, text",
    "Report": "ranks, loss, reference_loss, entries, first=None",
    "Entry": "name, max_abs_error, max_rel_error, reference_norm, factor=None",
}
TRANSFORMERS = {
    "register": "name='spar'",
    "shard": "model, batch, layout=None, group=None, method=None, scan=None, token_group=None, check=True, "
    "whole=None",
    "total_loss": "loss, group=None, token_group=None",
}
DIFFUSERS = {
    "enable": "model, group=None, **options",
    "disable": "model",
}
TRAINER = {
    "install": "sequence_parallel_size, check=False, prefix_tree=False, mixin=None, **options",
    "uninstall": "",
}
LLAMA_FACTORY = {"install": "", "uninstall": ""}
TORCHTITAN = {
    "install": "method=None",
    "uninstall": "",
}
TABLES = {
    "spar": (spar, SIGNATURES),
    "diffusers": (spar.integrations.diffusers, DIFFUSERS),
    "llamafactory": (spar.integrations.llamafactory, LLAMA_FACTORY),
    "sequence_layout": (spar.sequence_layout, LAYOUT),
    "testing": (spar.testing, TESTING),
    "utils": (spar.utils, UTILS),
    "torchtitan": (spar.integrations.torchtitan, TORCHTITAN),
    "trainer": (spar.integrations.trainer, TRAINER),
    "transformers": (spar.integrations.transformers, TRANSFORMERS),
    "sharding": (spar.sharding, SHARDING),
    "data": (spar.data, DATA),
}


@pytest.mark.parametrize(("module", "table"), TABLES.values(), ids=TABLES)
def test_signatures(module: ModuleType, table: dict[str, str]) -> None:
    for name, expected in table.items():
        parameters = inspect.signature(attrgetter(name)(module)).parameters.values()
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        assert ", ".join(map(str, plain)) == expected, name
    functions = {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    assert functions == {name for name in table if inspect.isfunction(getattr(module, name, None))}


def test_errors_name_the_group_as_the_function_does() -> None:
    """Functions of MindSpeed-MM call it process_group, all others group."""
    table = {name: re.findall(r"\w+", text) for _, each in TABLES.values() for name, text in each.items()}
    assert {name for name, arguments in table.items() if "process_group" in arguments} == OF_MINDSPEED_MM


@pytest.mark.parametrize(("module", "table"), TABLES.values(), ids=TABLES)
def test_every_public_name_is_documented(module: ModuleType, table: dict[str, str]) -> None:
    for name in {*module.__all__, *table} - {"__version__", "USE_SCHED_YIELD"}:
        assert inspect.getdoc(attrgetter(name)(module)), name


MODULES = [*(module for module, _ in TABLES.values()), spar.parallel_state, spar.topology, spar.groups]


def defined(module: ModuleType) -> dict[str, object]:
    """Return the functions and classes of a module, and the methods of these classes."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    found: dict[str, object] = {}
    for name in names:
        value = getattr(module, name)
        if getattr(value, "__module__", "").partition(".")[0] == "spar":
            found[name] = value
            methods = vars(value).items() if isinstance(value, type) else ()
            found |= {f"{name}.{method}": body for method, body in methods if inspect.isfunction(body)}
    return {
        name: value for name, value in found.items() if inspect.isfunction(value) or isinstance(value, type)
    }


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_type_hints_can_be_evaluated(module: ModuleType) -> None:
    public = defined(module)
    assert public
    for value in public.values():
        typing.get_type_hints(value)


def test_submodules_are_attributes_imported_at_first_use() -> None:
    code = (
        "import sys, spar; "
        "late = {'spar.testing', 'spar.utils', 'spar.integrations', 'spar._commands', 'torch._dynamo'};"
        "assert not (late | {'spar._attention'}) & set(sys.modules);"
        "print(*(getattr(spar, name).__name__ for name in "
        "('testing', 'utils', 'sharding', 'data', 'parallel_state', 'topology')));"
        "assert spar.integrations.transformers.shard and 'transformers' not in sys.modules;"
        "assert spar.integrations.diffusers.enable and 'diffusers' not in sys.modules;"
        "assert spar.integrations.trainer.install and 'transformers' not in sys.modules;"
        "assert spar.integrations.llamafactory.install and 'transformers' not in sys.modules;"
        "assert not hasattr(spar, 'nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        f"spar.{name}" for name in ("testing", "utils", "sharding", "data", "parallel_state", "topology")
    ]


def test_integrations_are_attributes_after_parallelize() -> None:
    """It imports a part of that package, which must not hide the rest."""
    code = "import spar; assert spar.parallelize; print(spar.integrations.transformers.shard.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "shard"), done.stderr


def test_import_without_numpy_warns_of_nothing() -> None:
    """NumPy is no dependency: torch's warning, once for each rank, would be of spar's import of torch."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import spar, torch; print(spar.Spans.causal(2).ends.tolist()); torch.tensor([1.0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[[[[0, 1], [0, 2]]]]", "")


def test_help_shows_the_operations_first() -> None:
    text = pydoc.render_doc(spar, renderer=pydoc.plaintext)
    description = text.split("PACKAGE CONTENTS")[0]
    for name in {name for name in spar.__all__ if inspect.isfunction(getattr(spar, name))}:
        assert name in description and f"\n    {name}(" in text, name


def test_benchmarks_use_symbols_that_exist() -> None:
    """Checked here, because parts of them run on a GPU only."""
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for name in set(re.findall(r"\bspar_[a-z_]+\b", path.read_text())):
            assert hasattr(core.library(), name), f"{path.name} uses {name}"


CONSTRUCTORS = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
    ),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}


def test_tensors_do_not_follow_the_default_device() -> None:
    """torch.set_default_device, or `with torch.device(...)`, is for the caller's tensors."""
    found = []
    for path in [p for p in (ROOT / "spar").rglob("*.py") if "_commands" not in p.parts]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in {f"torch.{name}" for name in CONSTRUCTORS}
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "without device="


def test_version() -> None:
    assert spar.__version__ == _C.version
    assert spar.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_only_publish_stores_futex_words() -> None:
    """Non-temporal stores may be reordered: only one function stores words that peers await. It fences."""
    expected = {"mailbox.c": ["&own->core", "word"], "group.c": ["&g->boxes[rank]->detached[g->rank]"]}
    paths = [CSRC / "control" / name for name in expected]
    for path in [*paths, *(CSRC / "transports").glob("*.c")]:
        stores = re.findall(r"__atomic_store_n\((.+?),", path.read_text())
        assert stores == expected.get(path.name, []), path
    publish = paths[0].read_text().split("void spar_mailbox_publish(")[1].split("\n}")[0]
    assert publish.index("nontemporal_fence()") < publish.index(
        "__atomic_store_n(word, value, __ATOMIC_SEQ_CST)"
    )


def test_only_one_file_calls_getenv() -> None:
    """Python's lock must be held: csrc/base/env.h."""
    calls = [path.name for path in CSRC.rglob("*.c") if re.search(r"\bgetenv\(", path.read_text())]
    assert calls == ["env.c"]


def test_layout_kinds_are_equal_in_c_and_python_and_drawn_by_tests() -> None:
    numbered = re.findall(r"^    SPAR_([A-Z]+), +/\*", (CSRC / "ops/layout.h").read_text(), re.M)
    assert [getattr(layouts, name) for name in numbered] == list(range(len(numbered)))
    assert [name.lower() for name in numbered] == list(KINDS), "each kind is a row of tests/helpers/tables.py"
    drawn = re.findall(r"^    \[SPAR_([A-Z]+)\] = ", (ROOT / "tests/c/random_call.h").read_text(), re.M)
    assert drawn == numbered, "and of tests/c/random_call.h"


def test_makers_of_layouts_are_drawn_by_tests() -> None:
    """A row of tests/helpers/tables.py for each but `hybrid`, which a parallel state decides."""
    makers = {name for name, value in vars(spar.SequenceLayout).items() if isinstance(value, classmethod)}
    assert makers == {*MAKERS, "hybrid"}


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "README.md", "spar/py.typed"])
def test_distribution_files_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_lines_are_at_most_110_wide() -> None:
    """clang-format does not wrap comments; ruff checks Python."""
    paths = [path for top in ("csrc", "fuzz", "tests", "benchmarks") for path in (ROOT / top).rglob("*.[ch]")]
    for path in [*paths, *CSRC.rglob("*.cu")]:
        long = [n for n, line in enumerate(path.read_text().split("\n"), 1) if len(line) > 110]
        assert not long, f"{path.relative_to(ROOT)}: lines {long}"


LICENSE = "SPDX-License-Identifier: Apache-2.0"
FIRST_LINES = dict.fromkeys((".c", ".h", ".cc", ".cu", ".def"), f"/* {LICENSE} */\n")
FIRST_LINES |= dict.fromkeys((".py", ".pyi"), f"# {LICENSE}\n")


def test_source_files_name_their_license() -> None:
    """Tools that list licenses read the first lines, after a shebang."""
    tops = ("benchmarks", "csrc", "docs", "examples", "fuzz", "release", "spar", "tests")
    paths = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in FIRST_LINES]
    for path in (*paths, ROOT / "setup.py"):
        text = re.sub(r"\A#!.*\n", "", path.read_text(encoding="utf-8"))
        assert text.startswith(FIRST_LINES[path.suffix]), path.relative_to(ROOT)
