# `make demo` and `make test` need Python >= 3.10 with venv, git and a C compiler; they install the rest into .venv.

PYTHON ?= python3
# The build of torch to install if there is none. A fixed version keeps test results reproducible.
TORCH ?= torch==2.13.0
# The torch of make test-newest: the newest that pip offers, as users get it, or a version (NEWEST=torch==2.15.0)
NEWEST ?= torch
# How the demo splits the sequence: plain, hybrid or packed
LAYOUT ?= plain
# Arguments for pytest: make test ARGS='-k gather -x'
ARGS ?=
# Number of concurrent tests: one more than 2 cores, because ranks wait for each other. 0: no pytest-xdist.
WORKERS ?= 3

# Compiler warnings are errors; `make SPAR_WERROR= ...` permits them.
export SPAR_WERROR ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Test workers and ranks use the bytecode that one of them wrote; without it each compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq
# Folders are included, because their mtime changes when a file is removed.
BUILT_FROM := $(shell find csrc) setup.py pyproject.toml spar/_version.py
C_FILES = $(shell find benchmarks csrc fuzz tests -name '*.[ch]')

.PHONY: help demo bench bench-attention bench-mpi bench-hosts figures bring-up-kit soak test test-benchmarks test-compile test-core \
	test-models test-trainers test-newest models-table test-platforms check test-asan fuzz lint format docs docs-check build wheels smoke ci clean gone
.DELETE_ON_ERROR:

help:
	@echo 'make demo    train a small model sharded and in one process; draw demo.png (LAYOUT=plain, hybrid, packed; RANKS=)'
	@echo 'make check   lint and the quick tests (under a minute)'
	@echo 'make smoke   run spar check: every operation on two ranks'
	@echo 'make test    run the tests of the library, 3 at a time (WORKERS=3; ALL=1: also the next three; ARGS= goes to pytest)'
	@echo 'make test-benchmarks  run the tests of bench and of benchmarks/ (ARGS= goes to pytest)'
	@echo 'make test-compile  run the tests that torch.compile takes seconds in (ARGS= goes to pytest)'
	@echo 'make test-core  run the tests in C by clang and under sanitizers (ARGS= goes to pytest)'
	@echo 'make test-models  run the tests with transformers and diffusers, which it installs (ARGS= goes to pytest)'
	@echo 'make test-trainers  run the tests with other trainers, each in build/trainers (ARGS= goes to pytest)'
	@echo 'make test-newest  run the tests with the newest torch that pip offers, with CUDA, in build/newest (NEWEST=, ARGS=)'
	@echo 'make models-table  run every type of transformers by spar.parallelize, and write docs/models.md (ARGS=--help)'
	@echo 'make test-platforms  run the tests in C for aarch64, under qemu; compile for macOS'
	@echo 'make test-asan  run the tests with the C extension under AddressSanitizer (ARGS= selects tests)'
	@echo 'make fuzz    fuzz the planner, the mailbox, the messages between hosts and the set-up (SECONDS=60; needs clang)'
	@echo 'make bench   run spar bench: time every operation against others (RANKS=2, ARGS=--help)'
	@echo 'make bench-attention  time attention against one process and the usual code (RANKS=2, ARGS=...)'
	@echo 'make bench-mpi  time all_to_all against MPI (RANKS=2, ARGS=...; installs mpich and mpi4py)'
	@echo 'make bench-hosts  time exchanges between hosts, which are network namespaces; as root (ARGS=--help)'
	@echo 'make figures  run all benchmarks and write docs/figures.md, for half an hour; as root (ARGS=--help)'
	@echo 'make bring-up-kit  build what benchmarks/bring_up.py needs on a machine with a GPU, into build/bring-up'
	@echo 'make soak    make random calls under random kills, stops and mismatches (SECONDS=60, ARGS=seed), then many groups and exits'
	@echo 'make lint    run clang-format, clang-tidy, ruff, mypy, codespell, actionlint and zizmor'
	@echo 'make format  let clang-format and ruff rewrite the files'
	@echo 'make docs    build the site of documents into build/site; a broken link fails'
	@echo 'make docs-check  build the site, and measure its pages in headless Chromium, at three widths'
	@echo 'make build   install spar and what the demo needs into .venv'
	@echo 'make wheels  build what PyPI takes into dist: a source distribution, and wheels for Linux'
	@echo 'make ci      run .ci/run: all checks, as root on Debian'
	@echo 'make clean   remove .venv and everything built'

# The world size of the demo and of benchmarks. For the demo, which has 6 heads, the default is a rank for each core,
# 2 to 8, and an even number for LAYOUT=hybrid. nproc takes OMP_NUM_THREADS for the number of cores.
RANKS ?=
cores := $(shell env -u OMP_NUM_THREADS nproc)
demo_ranks := $(or $(RANKS),$(shell n=$$(($(cores) / 2 * 2)); echo $$((n < 2 ? 2 : n > 8 ? 8 : n))))
bench_ranks := $(or $(RANKS),2)

# One thread per rank: with more, ranks that share a few cores are slower.
demo: build
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(demo_ranks) \
	examples/train.py --layout $(LAYOUT)

bench: build
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(bench_ranks) -m spar bench $(ARGS)

bench-attention: build
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(bench_ranks) -m spar bench --attention $(ARGS)

# MPI as a reference; mpiexec starts the ranks.
bench-mpi: .venv/.mpi
	@OMP_NUM_THREADS=1 $(BIN)/mpiexec -n $(bench_ranks) $(BIN)/python benchmarks/mpi_bench.py $(ARGS)

# As root: network namespaces are the hosts.
bench-hosts: build
	@$(BIN)/python benchmarks/hosts.py $(ARGS)

# All benchmarks of CPUs: the tables and plots of docs/figures.md.
figures: build .venv/.mpi .venv/.models
	@$(BIN)/python benchmarks/figures.py $(ARGS)

# Needs no GPU. On the machine with one: python benchmarks/bring_up.py --out FOLDER (docs/gpu-verified.md).
bring-up-kit: build
	@$(BIN)/python benchmarks/kit.py

# The duration of the soak test, and of each fuzzer's search for new inputs after it replayed the corpus.
SECONDS ?= 60
# Of `make soak`: groups that are made and closed, and jobs that end
GROUPS_CLOSED ?= 10000
JOBS_ENDED ?= 40
soak: build .venv/.test
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m helpers.soak $(SECONDS) $(ARGS)
	@SOAK_GROUPS=$(GROUPS_CLOSED) SOAK_EXITS=$(JOBS_ENDED) $(BIN)/pytest -n $(WORKERS) -q \
	tests/faults/test_many_groups.py tests/faults/test_process.py -k 'groups_do_not_leak or exit_waits_for_threads'

# With clang and under sanitizers, and the kernels for every architecture; make test has one build of each.
BUILDS := clang address thread
ARCHITECTURES := 75 80 90 100 120

# All in one run: workers import and collect once, and what computes runs beside what waits. By folders, as `tests`
# leaves out tests/benchmarks, also where both are named.
ifdef ALL
test: export CORE_BUILDS := plain $(BUILDS)
test: export CUDA_ARCHITECTURES := $(ARCHITECTURES)
TESTS := $(filter-out $(addprefix tests/,models/ platforms/ site/ trainers/),$(wildcard tests/[a-z]*/))
else
TESTS := -m 'not compiler'
endif
test: build .venv/.test
	@$(BIN)/pytest -n $(WORKERS) $(TESTS) $(ARGS)

# All modules are collected: tests with this mark are in many.
test-compile: build .venv/.test
	@$(BIN)/pytest -n $(WORKERS) -m compiler $(ARGS)

test-benchmarks: build .venv/.test
	@$(BIN)/pytest -n $(WORKERS) tests/benchmarks $(ARGS)

test-core: build .venv/.test
	@CORE_BUILDS='$(BUILDS)' CUDA_ARCHITECTURES='$(ARCHITECTURES)' \
	$(BIN)/pytest -n $(WORKERS) tests/core/test_core.py tests/gpu/test_cuda_libraries.py $(ARGS)

test-models: build .venv/.test .venv/.models
	@$(BIN)/pytest -n $(WORKERS) tests/models $(ARGS)

# The versions that each trainer asks for precede those of .venv on the path of its tests: tests/trainers/NAME.txt.
TRAINERS := $(patsubst tests/trainers/%.txt,build/trainers/%,$(wildcard tests/trainers/*.txt))
.PHONY: trainers
trainers: $(TRAINERS)

test-trainers: build .venv/.test .venv/.models trainers
	@$(BIN)/pytest -n $(WORKERS) tests/trainers $(ARGS)

$(TRAINERS): build/trainers/%: tests/trainers/%.txt | .venv/.models
	@echo 'installing what the tests of $* need'
	@rm -rf $@ && $(PIP) install --no-deps --no-compile --target $@ -r $<
	@touch $@

# Not in make ci: the download takes 3 GB, and build/newest 6. It has no extra `test`, whose older NCCL would replace
# that of torch. Without a GPU, tests of the nccl transport are skipped where torch has CUDA.
NEWEST_PYTHON := build/newest/bin/python
test-newest:
	@[ -x $(NEWEST_PYTHON) ] || $(PYTHON) -m venv build/newest
	@echo 'installing $(NEWEST) (this may take minutes)'
	@$(NEWEST_PYTHON) -m pip -qq install --upgrade '$(NEWEST)'
	@$(NEWEST_PYTHON) -m pip -qq install -e '.[demo,pytest]'
	@$(NEWEST_PYTHON) -c 'import torch; print("torch", torch.__version__)'
	@$(NEWEST_PYTHON) -m pytest -n $(WORKERS) $(ARGS)

# Of ARGS: --failed, --task and the names of types run a part again; the other rows stay.
models-table: build .venv/.test .venv/.models
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m helpers.transformers_types $(ARGS)

# zig compiles for aarch64 and macOS; Debian's qemu-user-static and libc6-arm64-cross run what is for aarch64.
test-platforms: build .venv/.test .venv/.release
	@$(BIN)/pytest -n $(WORKERS) -q tests/platforms $(ARGS)

# Every operation against plain torch, on two ranks: what a new system must pass first.
smoke: build
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m spar check $(ARGS)

# Lint, and the tests with the mark `quick` (pyproject.toml).
check: lint build .venv/.test
	@$(BIN)/pytest -n $(WORKERS) -q -m quick $(ARGS)

# The sanitized extension goes into a separate folder, before the installed one on Python's path. The interpreter is
# not sanitized, so the sanitizer's library is preloaded, with libstdc++, because it intercepts exceptions. Leaks are
# not reported, because Python does not free all memory at exit.
ASAN := build/asan
test-asan: build .venv/.test
	@rm -rf $(ASAN) && mkdir -p $(ASAN) && cp -r spar $(ASAN)/ && rm -f $(ASAN)/spar/*.so
	@echo 'building spar under AddressSanitizer'
	@log=$$(SPAR_SANITIZE=address,undefined $(BIN)/python setup.py -q build_ext --build-lib $(ASAN) \
	--build-temp $(ASAN)/objects 2>&1) || { echo "$$log"; exit 1; }
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	PYTHONPATH=$(CURDIR)/$(ASAN) $(BIN)/pytest -m 'not not_under_asan' $(ARGS)

fuzz:
	@fuzz/run $(SECONDS)

# Each tool is a target, which .pre-commit-config.yaml also names; two run at a time.
LINTERS := lint-c lint-tidy lint-python lint-types lint-spelling lint-workflows
.PHONY: $(LINTERS)
lint: .venv/.lint
	@$(MAKE) --no-print-directory -j2 --output-sync=target $(LINTERS)

$(LINTERS): .venv/.lint

lint-c:
	@echo 'clang-format'; $(BIN)/clang-format --dry-run -Werror $(C_FILES)

# clang-tidy's count of warnings in system headers goes to stderr.
lint-tidy:
	@echo 'clang-tidy'; \
	include=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	log=$$(find csrc -name '*.c' | xargs -P $$(nproc) -I {} $(BIN)/clang-tidy --quiet {} -- -std=c11 -Icsrc \
	-D_GNU_SOURCE '-DSPAR_VERSION="0"' -DPy_LIMITED_API=0x030A0000 -isystem "$$include" 2>&1) || \
	{ echo "$$log"; exit 1; }

lint-python:
	@echo 'ruff'; $(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .

lint-types:
	@echo 'mypy --strict'; $(BIN)/mypy --strict

lint-spelling:
	@echo 'codespell'; $(BIN)/codespell

# zizmor looks for expressions that could be injected, too wide permissions and actions that are not pinned.
SCHEMA = $(BIN)/check-jsonschema -q --builtin-schema vendor.github
lint-workflows:
	@echo 'check-jsonschema, actionlint, zizmor'; \
	$(SCHEMA)-workflows .github/workflows/*.yml && $(SCHEMA)-issue-config .github/ISSUE_TEMPLATE/config.yml && \
	$(SCHEMA)-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml && \
	$(BIN)/actionlint -shellcheck= -pyflakes= && $(BIN)/zizmor --offline --quiet .github

format: .venv/.lint
	@$(BIN)/clang-format -i $(C_FILES)
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

# MkDocs and its theme print notices about their successors to a terminal otherwise. With -q, --strict counts no warning.
docs: .venv/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo 'build/site/index.html'

# Chromium is of the system: without it the tests are skipped.
docs-check: docs .venv/.test
	@$(BIN)/pytest -q tests/site

wheels: .venv/.release
	@echo 'building dist/'
	@$(BIN)/python release/wheels.py

ci:
	@.ci/run

clean:
	rm -rf .venv build dist *.egg-info spar/*.so demo.png .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

build: .venv/.spar

# Editable: spar/ is the installed package, whether the working folder is on Python's path (python -c, python -m,
# subprocesses of tests) or not (pytest, torchrun). Changes of Python files need no install; C is rebuilt when it
# changes or its library is missing. .ci/run tests the wheel in a separate environment.
.venv/.spar: $(BUILT_FROM) $(if $(wildcard spar/_C.*so),,gone) | .venv/.torch
	@echo 'building spar'
	@$(PIP) install -e '.[demo]'
	@touch $@

.venv/.torch: | $(BIN)/pip
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' || \
	{ echo 'installing $(TORCH) (this may take minutes)'; $(PIP) install '$(TORCH)'; }
	@touch $@

# spar's extras; spar itself is already installed.
.venv/.test .venv/.models .venv/.lint .venv/.mpi .venv/.docs .venv/.release: .venv/.%: pyproject.toml | .venv/.spar
	@echo 'installing what make $* needs'
	@$(PIP) install 'spar-torch[$*]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo 'spar needs Python 3.10 or newer: make PYTHON=python3.12 ...'; exit 1; }
	@echo 'creating .venv'
	@$(PYTHON) -m venv .venv
