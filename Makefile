# Two commands are enough on a fresh machine: `make train` and `make test`. Each installs once, into .venv.
#   make test PYTHON=/path/to/python3.12     another interpreter
#   make test VARIANT=cuda                   fbgemm's CUDA build in place of its CPU build
#   make train TORCH_INDEX=ADDRESS           torch's CPU build from the index that pytorch.org's install page shows

VARIANT ?= cpu
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

VENV := .venv
# A lock file to install over those of VARIANT, for other versions.
OVERLAY :=
BIN := $(VENV)/bin
LOCKS := requirements/$(VARIANT).lock requirements/dev.lock
LOCKED := $(VENV)/.locked-$(VARIANT)
INSTALLED := $(VENV)/.installed-$(VARIANT)
DOCS := $(VENV)/.docs
S3 := $(VENV)/.s3
SAID := $(VENV)/.said-by-lint-and-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# Locked packages only: no dependency is resolved, and what must be built is built with the locked setuptools. Python
# compiles what it imports, once.
AS_LOCKED := --no-deps --no-build-isolation --no-compile

# Each of some sixty interpreters would compile the package and its tests anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest
# Of OpenMP: programs with several would look for work all the time, on the CPUs that other runs need.
THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.DELETE_ON_ERROR:
.PHONY: help install redis-server s3-server train test check quick gpu gpu-tables fuzz combinations chaos mutants lint docs smoke smoke-older smoke-newer smoke-torch-2.14 smoke-ray check-lock wheel clean

help:
	@echo "make train   install once, then train the example experiment"
	@echo "make test    install once, then lint, type-check and test"
	@echo "make check   the same within 90 seconds: without tests in rank processes and without slow ones"
	@echo "make gpu     some twenty of the tests that need a GPU, with the packages that are there"
	@echo "make gpu-tables   second on a GPU: measure the tables of RESULTS for one GPU, in nine minutes (benchmarks/gpu.sh)"
	@echo "make lint    ruff and mypy alone"
	@echo "make docs    build the site into site/, strictly"
	@echo "make fuzz    random fits against a loop by hand: NUM=200 of them, or SEED=17 again"
	@echo "make combinations   random pairs and triples of features, with every kind of module, and resumed: NUM=200, or SEED=17 again"
	@echo "make chaos   trainings that meet faults and are restarted by torchrun's agent: NUM=300 of them, FIRST=17 the first"
	@echo "make mutants break the package in each way of tests/laws/breaks.py, and see that a test fails: 10 minutes"
	@echo "make smoke   a short test with the oldest and the newest Lightning and TorchRec, each in a .venv of its own"
	@echo "make smoke-torch-2.14   the same with torch 2.14, where the index has a CPU build of it"
	@echo "make smoke-ray   the tests of Ray Train, with Ray in a .venv of its own"
	@echo "make wheel   build a wheel into dist/ and check what is inside"
	@echo "make clean   remove .venv, builds and caches"

install: $(INSTALLED)

train: $(INSTALLED)
	$(BIN)/overlap-train experiment=first_look

# For the tests of sinks in Redis, which skip themselves without it.
redis-server:
	@requirements/redis_server.sh

# For the tests of checkpoints in S3, which skip themselves without it: beside the environment's packages, because its
# client needs another python-dateutil.
s3-server: $(S3)

# Lint and the site go on beside the tests; what they say is told when they are done, and once more at the end if they
# have failed. (With MAKE itself in it, `make -n` would run the line.)
test: CHECKS = $(MAKE) --no-print-directory -j2 lint docs
test:
	@$(MAKE) --no-print-directory -j4 $(INSTALLED) $(DOCS) redis-server s3-server
	@{ $(CHECKS) >$(SAID) 2>&1; code=$$?; cat $(SAID); exit $$code; } & checks=$$!; \
	$(THREADS) $(PYTEST) --numprocesses=3 --dist=loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$checks || { cat $(SAID); echo "lint or docs failed: see above"; exit 1; }; \
	exit $$tests

check: $(INSTALLED)
	@$(MAKE) --no-print-directory -j2 lint quick

quick: $(INSTALLED)
	$(THREADS) $(PYTEST) --numprocesses=2 --dist=loadfile --no-loadscope-reorder -m "not ranks and not slow and not gpu"

# With the packages of the machine, which may be other versions: nothing is installed.
gpu:
	$(PYTHON) -m pytest -m gpu_first -W default --maxfail=5

# The second thing to run on a GPU, into gpu_out; `benchmarks/gpu.sh --print` shows the commands.
gpu-tables:
	PYTHON="$(PYTHON)" benchmarks/gpu.sh

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.laws.fuzz $(if $(SEED),--seed $(SEED),--num $(or $(NUM),200)) \
		--first $(or $(FIRST),0) --without "$(WITHOUT)"

combinations: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.laws.combinations $(if $(SEED),--seed $(SEED),--num $(or $(NUM),200)) \
		--first $(or $(FIRST),0)

chaos: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.cluster.chaos --num $(or $(NUM),30) --first $(or $(FIRST),0)

mutants: $(INSTALLED)
	$(BIN)/python -m tests.laws.mutants --only "$(ONLY)"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/api.md is tracked, and `python docs/make_api.py` makes it; a test compares it with the docstrings.
docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in site/index.html"

smoke: smoke-older smoke-newer

smoke-older smoke-newer smoke-torch-2.14: smoke-%:
	@$(MAKE) --no-print-directory install VENV=.venv-$* OVERLAY=requirements/$*.lock
	.venv-$*/bin/python -m pytest -m smoke

smoke-ray:
	@$(MAKE) --no-print-directory install VENV=.venv-ray OVERLAY=requirements/ray.lock
	$(THREADS) .venv-ray/bin/python -m pytest tests/cluster/test_ray.py

check-lock: $(INSTALLED)
	$(BIN)/python requirements/check_lock.py $(LOCKS) $(OVERLAY)

wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	$(BIN)/python requirements/check_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) .venv-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The locked packages, from nothing, so that neither an older lock nor the other variant is left behind. torch keeps its
# dependencies (a CUDA build brings its own), held to the lock where the lock names them.
$(LOCKED): $(LOCKS) $(OVERLAY) requirements/check_lock.py
	@[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "lightning_overlap needs Python 3.11 or newer with its venv module; '$(or $(PYTHON),python3)' is not one."; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@rm -f $@
	@echo "installing into $(VENV) (once, about a minute): a new environment with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) install --no-deps $$(grep -hE '^(setuptools|wheel)==' $(LOCKS))
	@echo "installing into $(VENV): torch and the packages of $(LOCKS)"
	@$(if $(TORCH_INDEX),$(PIP) install $(AS_LOCKED) -i "$(TORCH_INDEX)",$(PIP) install --no-compile --no-warn-conflicts \
		--constraint requirements/$(VARIANT).lock) $$(grep '^torch==' requirements/$(VARIANT).lock)
	@$(PIP) install $(AS_LOCKED) $(LOCKS:%=-r %)
	@$(if $(OVERLAY),$(PIP) install $(AS_LOCKED) -r $(OVERLAY))
	@$(BIN)/python requirements/check_lock.py $(LOCKS) $(OVERLAY)
	@touch $@

$(DOCS): $(LOCKED) requirements/docs.lock
	@rm -f $@
	@echo "installing into $(VENV): what builds the site"
	@$(PIP) install $(AS_LOCKED) -r requirements/docs.lock
	@$(BIN)/python requirements/check_lock.py $(LOCKS) requirements/docs.lock $(OVERLAY)
	@touch $@

$(S3): $(LOCKED) requirements/s3.lock
	@rm -rf $@ $(VENV)/s3
	@echo "installing into $(VENV)/s3: a client of S3, and a server for its tests"
	@$(PIP) install --no-deps --no-compile --target $(VENV)/s3 -r requirements/s3.lock
	@touch $@

$(INSTALLED): $(LOCKED) pyproject.toml
	@rm -f $@
	@echo "installing into $(VENV): lightning_overlap itself"
	@$(PIP) install $(AS_LOCKED) --editable .
	@touch $@
