# The words of this project. Everything else (CI included) calls these.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
VLLM   := .venv-vllm
WHEEL  := .venv-wheel
# PyTorch's own index of CPU builds: asked only where the pinned CPU build is not found otherwise.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Test processes, each with a Ray of its own: 8 logical CPUs and 1 GiB of object store. More than two need as many cores.
RAYS   ?= 2
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := -n $(RAYS) --dist loadfile --no-loadscope-reorder
# `make durations` runs the tests before their table is right.
WITHOUT_TABLE := $(if $(NEW_TABLE),--deselect tests/suite/test_durations.py::test_repository_keeps_its_budgets)
# With ARGS, one of several runs may have no test (exit status 5).
NARROWED = $(if $(ARGS),|| test $$? -eq 5)
# Without the compiled files of tests and package, each test process, actor and child process compiles them again.
unexport PYTHONDONTWRITEBYTECODE

RECORDS := build/tests

.PHONY: setup check test test-fast test-ci test-all test-matrix test-vllm test-versions only durations faults gpu bench figures sft grpo docs wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py src/raylane/core/_native.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raylane needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[sft,dev]' || \
	  $(BIN)/python -m pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) -c constraints.txt -e '.[sft,dev]'
	# Without dependencies, which would bring CUDA packages, and the build for torch's CUDA. Where there is no wheel, the
	# tests of NIXL are skipped.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt nixl \
	  nixl-cu$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "12").partition(".")[0])') || \
	  echo "NIXL could not be installed: its tests will be skipped"
	# Templates of chats and their marked versions, which tests compare with ours; its code is not run.
	$(BIN)/python -m pip install --quiet --no-deps trl==1.16.0
	touch $(STAMP)

check: setup
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

# For a first look: the fast tests, and each product of the README from end to end.
test: test-fast
	$(PYTEST) $(SIDE_BY_SIDE) -m 'tour and not fast' $(ARGS) $(NARROWED)
	@echo "Left out: all other tests on Ray, of kills, networks and training. \`make test-all\` runs them (40 minutes), and"
	@echo "\`make only ARGS=tests/graph\` those of a folder or a file."

# What needs neither Ray nor child processes and trains nothing, in parallel: after every save.
test-fast: setup
	$(PYTEST) -n auto --dist loadfile -m fast $(WITHOUT_TABLE) $(ARGS) $(NARROWED)

# What the changes since the last success of `test-all` can break, and a quarter of the rest: tests/suite/affected.py.
test-ci: test-fast
	mkdir -p $(RECORDS)
	$(BIN)/python -m tests.suite.affected $(RECORDS)
	RAYLANE_ON_RAY=$(RECORDS)/on_ray.txt $(PYTEST) $(SIDE_BY_SIDE) -m 'not fast and not matrix and not gpu' \
	  @$(RECORDS)/chosen.txt @$(RECORDS)/on_ray.txt || test $$? -eq 5
	$(BIN)/python -m tests.suite.affected passed ci

# Everything except what needs a CUDA device and the full matrix.
test-all: test-fast
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not fast and not matrix and not gpu' $(ARGS) $(NARROWED)
	$(if $(ARGS),,$(BIN)/python -m tests.suite.affected passed all)

# Tests by path, folder or id: `make only ARGS='tests/graph/test_run.py -x'`.
only: setup
	$(PYTEST) $(ARGS)

# The seconds of all test files, or of those in ARGS, into tests/durations.txt.
durations: setup
	rm -rf $(RECORDS)
	$(if $(ARGS),$(PYTEST) $(SIDE_BY_SIDE) -m 'not matrix and not gpu' $(ARGS),$(MAKE) test-all NEW_TABLE=1)
	$(BIN)/python -m tests.suite.durations

# All combinations of layouts, packings, families, checkpoints and memory settings: hours of computing.
test-matrix: setup
	$(PYTEST) -m matrix $(ARGS)

# With a real vLLM on the CPU, in an environment of its own: 3 GB, two minutes on first use. RAYLANE_KILLS is the number
# of kills beside it.
test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)

# Without dependencies, as those of vLLM would bring builds for CUDA.
$(VLLM)/.ready: tests/vllm/requirements.txt pyproject.toml src/raylane/core/_native.c
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r tests/vllm/requirements.txt || \
	  $(VLLM)/bin/python -m pip install --quiet --no-deps --extra-index-url $(TORCH_CPU_INDEX) -r tests/vllm/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

# Fast tests, and a choice of those on Ray, with each Ray and CPython of tests/suite/versions.py, each pair in an
# environment of its own: two hours, 20 GB. Narrowed by RAY="2.57.0", PYTHONS="3.12 3.13", STAGES=fast; with ARGS, only
# these tests run and nothing is recorded.
test-versions: setup
	TORCH_CPU_INDEX=$(TORCH_CPU_INDEX) $(BIN)/python -m tests.suite.version_runs --ray $(RAY) --pythons $(PYTHONS) \
	  --stages $(STAGES) $(if $(ARGS),--only $(ARGS))

# With SOAK=1 the mixed traffic of the soak test lasts an hour instead of a minute. Then kills of everything that has to
# do with weights, counted by kind: a quarter of an hour.
faults: setup
	$(if $(SOAK),RAYLANE_SOAK_S=3600) $(PYTEST) $(SIDE_BY_SIDE) -m 'faults and not matrix' $(ARGS)
	$(if $(ARGS),,RAYLANE_KILLS=500 $(PYTEST) -s tests/weights/test_kills.py tests/workers/test_kills.py \
	  tests/graph/test_kills.py && RAYLANE_KILLS=100 $(PYTEST) -s tests/sft/test_kills.py tests/rl/test_kills.py)

gpu: setup
	$(PYTEST) tests/gpu $(ARGS)

# All benchmarks RUNS times, about an hour each. LARGE=--large adds 1 GB, and needs 16 GB of memory.
RUNS ?= 1
bench: setup
	date=$$(date +%F); for run in $$(seq $(RUNS)); do for name in transfer graph sft weights rl; do \
	  case $$name in transfer|weights) large="$(LARGE)";; *) large=;; esac; \
	  $(BIN)/python -m benchmarks $$name $$large --json benchmarks/results/$$name-$$date-$$run.json $(ARGS) || exit 1; \
	done; done

# The figures of the runs of the newest day, into the README and the docs.
figures: setup
	$(BIN)/python -m benchmarks.figures

sft: setup
	$(BIN)/raylane data docstrings --out runs/docstrings/data
	$(BIN)/raylane sft examples/sft_docstrings.yaml $(ARGS)

# The site goes to ./site. Its tools are installed on the first `make docs` only, so that `make setup` stays quick.
grpo: setup
	$(BIN)/raylane data sorting --out runs/grpo/data
	$(BIN)/raylane sft examples/grpo_sort_warm_start.yaml
	$(BIN)/raylane grpo examples/grpo_sort.yaml $(ARGS)

docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "open site/index.html"

$(VENV)/.docs-ready: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# One wheel for CPython 3.11 and later with glibc 2.28 and later, made from the source archive. abi3audit and auditwheel
# check both promises; then the wheel is installed into an empty environment.
wheel: setup $(WHEEL)/.ready
	rm -rf dist build/wheel
	CC="$(CURDIR)/$(WHEEL)/bin/python -m ziglang cc -target $$(uname -m)-linux-gnu.2.28 -Werror" \
	  $(WHEEL)/bin/python -m build --no-isolation --outdir build/wheel .
	$(WHEEL)/bin/abi3audit --strict --assume-minimum-abi3 3.11 build/wheel/*.whl
	PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" $(WHEEL)/bin/auditwheel repair --plat manylinux_2_28_$$(uname -m) --only-plat \
	  --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
	CC="$(WHEEL)/bin/python -m ziglang cc -target aarch64-linux-gnu.2.28" $(WHEEL)/bin/python -c \
	  'import pathlib, hatch_build; hatch_build.compile_native(pathlib.Path(), "-Werror", into=pathlib.Path("build"))'
	$(WHEEL)/bin/twine check --strict dist/*
	RAYLANE_WHEEL=$$(echo dist/*.whl) $(PYTEST) tests/release

$(WHEEL)/.ready: tests/release/requirements.txt
	test -x $(WHEEL)/bin/python || $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet -r tests/release/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(WHEEL) .venvs dist build runs site .pytest_cache .mypy_cache .ruff_cache
