# `make` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Pinned and first: a looser range, also another package's, takes the newest build with its gigabytes of CUDA packages.
# For another build: make venv TORCH=torch==2.11.0 TORCH_OPTIONS="--index-url URL_OF_THE_BUILDS_FOR_YOUR_CUDA"
TORCH  ?= torch==2.13.0
TORCH_OPTIONS ?=
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# uv is several times as fast as pip, but reads none of its settings: where only pip knows a mirror, say, pip installs.
INSTALL = install() { $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt "$$@" 2>/dev/null \
  || PYTHONWARNINGS=ignore $(PIP_INSTALL) --constraint constraints.txt "$$@"; }; install
# Compiles on all cores, while pip would compile one file after the other. Leaves out what few tests import, if any, and
# torchvision, which may be kept aside.
COMPILE = $(BIN)/python -m compileall -q -q -j 0 \
  -x '/(tests?|diffusers|fontTools|mypyc?|torchvision|transformers/models|ray/(data|llm|rllib|train|tune))/' \
  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null 2>&1 || true
# Processes that share the tests, a file at a time; one more than the cores of a small CI machine, as tests wait, too.
# Each imports and collects for itself: with a fourth process, the tests took a tenth longer.
TEST_WORKERS ?= 3

# `make offline PYTHON=3.12` names the Python of another machine; the environment here is made by the default one
MACHINE_PYTHON := $(PYTHON)
offline: override PYTHON := python3
MIB ?= 60

.DEFAULT_GOAL := help
.PHONY: help venv offline demo test test-quick test-wide test-faults test-gpu test-torch golden bench bench-gpu bench-serve image collect-gpu offline-page docs readme readme-check lint clean

help:
	@echo "make venv          install into .venv; TORCH=torch==2.11.0 TORCH_OPTIONS='--index-url ADDRESS'"
	@echo "make demo          run the main job small, in a few minutes"
	@echo "make test          run the tests"
	@echo "make test-quick    run some cases of those without a process, Ray, a socket or a fit"
	@echo "make test-wide     run the cases that make test leaves out"
	@echo "make test-faults   kill trials, workers and dispatchers in the middle of jobs (slow)"
	@echo "make test-gpu      run the tests that need an NVIDIA GPU"
	@echo "make test-torch    test each supported release of torch (GBs each); VERSIONS='2.8.0'"
	@echo "make lint          run ruff and mypy, and check that the generated documents are fresh"
	@echo "make docs          generate docs/commands.md"
	@echo "make readme        run the README's commands and write their output; readme-check compares"
	@echo "make golden        record behaviour in OUT, compare it with tests/golden; SECTIONS=[estimates]"
	@echo "make bench         print the project's figures as ratios; PUBLISHED=FOLDER FULL=true"
	@echo "make bench-serve   put load on the service, then kill a process; ARGS='rate=800 seconds=20'"
	@echo "make bench-gpu     compare our window with the published minute on a GPU; ARGS='minutes=9'"
	@echo "make collect-gpu   measure runs of every family on a GPU for datasets/; ARGS='minutes=9'"
	@echo "make offline       bundle source and wheels for a machine without a network; PYTHON=3.12 MIB=60"
	@echo "make offline-page  turn the results of a lent GPU into one page; RESULTS=DIR ARGS='out=DIR'"
	@echo "make image         build the container's image with docker, podman or buildah"
	@echo "make clean         remove .venv, demo-data and build"

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with PYTHON=python3.12"; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { rm -rf $(VENV); echo "no virtual environment can be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	$(PIP_INSTALL) $(TORCH_OPTIONS) "$(TORCH)"
	-$(PIP_INSTALL) uv
	# Each keeps one core busy at most: the other compiles what is there.
	@echo "installing packages"; $(COMPILE) & $(INSTALL) --editable ".[dev]" && wait
	# Models and layers to check estimates on. What these ask for themselves may bring another build of torch.
	@echo "installing models and layers"; $(COMPILE) & \
	  $(INSTALL) --no-deps timm peft accelerate bitsandbytes diffusers torchao && \
	  $(BIN)/python infra/install_torchvision.py $(TORCH_OPTIONS) && wait
	@$(COMPILE)
	touch $@

demo: venv
	PATH="$(abspath $(BIN)):$$PATH" bash infra/demo.sh

test: venv
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m "not slow and not wide and not gpu"

QUICK := tests/conf tests/featurize tests/learn tests/warehouse
test-quick: venv
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m "not slow and not wide and not gpu" --quick $(QUICK)

test-wide: venv
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m "wide and not slow and not gpu"

test-faults: venv
	$(BIN)/python -m pytest -m slow

test-gpu: venv
	$(BIN)/python -m pytest -m gpu -rs

# Needs no environment of ours: each release gets its own, which is deleted afterwards.
test-torch:
	@TORCH_OPTIONS='$(TORCH_OPTIONS)' $(PYTHON) infra/torch_releases.py $(VERSIONS)

# Ten minutes on one core. BEFORE=FOLDER compares with another checkout's record, PUBLISHED=FOLDER adds its benchmark.
OUT ?= build/golden
golden: venv
	$(BIN)/python -m tests.golden.record out=$(OUT) $(if $(SECTIONS),"sections=$(SECTIONS)") $(if $(PUBLISHED),published=$(PUBLISHED))
	$(BIN)/python -m tests.golden.compare b=$(OUT) $(if $(BEFORE),a=$(BEFORE)) $(if $(SECTIONS),"sections=$(SECTIONS)")

bench: venv
	$(BIN)/python -m tests.bench $(if $(PUBLISHED),published=$(PUBLISHED)) $(if $(FULL),full=$(FULL))

bench-serve: venv
	$(BIN)/python -m tests.bench.bench_serve $(ARGS)
	$(BIN)/python -m tests.bench.bench_serve $(ARGS) kill=true

bench-gpu: venv
	$(BIN)/python -m tests.bench.bench_gpu $(ARGS)

# With whatever builds images here: make image BUILD_OPTIONS="--build-arg BASE=..."
image:
	@builder=$$(command -v docker || command -v podman || command -v buildah) || { \
	  echo "error: an image needs docker, podman or buildah; none is installed" >&2; exit 2; }; \
	$$builder build -f infra/container/Dockerfile -t gpufarm $(BUILD_OPTIONS) .

collect-gpu: venv
	$(BIN)/python -m infra.collect $(ARGS)

offline: venv
	@$(BIN)/python -m infra.offline.bundle python=$(MACHINE_PYTHON) mib=$(MIB) $(ARGS)

offline-page: venv
	$(BIN)/python -m infra.offline.page $(if $(RESULTS),"results=$(RESULTS)") $(ARGS)

docs: venv
	$(BIN)/python infra/generate_docs.py

readme: venv
	$(BIN)/python infra/generate_docs.py readme

readme-check: venv
	$(BIN)/python infra/generate_docs.py readme --check

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python infra/generate_docs.py --check
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) demo-data build *.egg-info
