# Every target works in a fresh clone that has only make and python3 with venv.
# Exception: `make model` also needs Spin and a C compiler.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist worksteal

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# The compiler for TPUs lives apart: JAX would look for chips wherever it is.
TPU := build/tpu
TPU_RUN := $(TPU)/bin/python -m experiments.fits
# Runs of experiments/configs/compiled.py, each with the kind of its two slices.
COMPILED ?= diloco_opt_1_3b@v5e:4x4 dilocox_opt_1_3b@v5e:4x4 \
  streaming_opt_1_3b@v5e:4x4 diloco_llama_7b@v5p:2x2x2 \
  allreduce_107b@v5p:4x4x8 dilocox_107b@v5p:4x4x8 \
  dilocox_107b_16x8@v5p:4x4x8 overlap_loco_107b@v5p:4x4x8
# The compiler for GPUs comes with JAX's CUDA plugin, and needs no GPU.
GPU := build/gpu
GPU_RUN := $(GPU)/bin/python -m experiments.fits
COMPILED_GPU ?= diloco_llama_7b@h100:8 diloco_llama_7b_tensor@h100:8 \
  diloco_llama_13b@h100:8x8
# PyTorch lives apart, too, because it is large. Comparisons with it and with
# the library transformers need it.
TRANSFORMERS := build/transformers
# A server of S3's protocol lives apart, because its packages do not go with
# ours.
MOTO := build/moto
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS := $(wildcard constraints/py$(subst .,,$(VERSION)).txt)
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet \
  $(addprefix --constraint ,$(CONSTRAINTS))

# The environment belongs to one Python version and one checkout: it is made
# anew when either has changed, or when its interpreter no longer runs.
WANTED := $(VERSION) $(CURDIR)
FOUND := $(shell $(RUN) -c 'import sys; print(open(sys.prefix + "/.installed").read())' 2>/dev/null)

.PHONY: help install quickstart ablation convergence tables reproduce compile-report compile-report-gpu lint format stubs test check check-transformers mutations model docs bench pins clean FORCE
.DEFAULT_GOAL := help

help: ## Show this list
	@echo 'usage: make TARGET [PYTHON=python3.12] [VENV=.venv] [PYTEST_ARGS="-n 2"]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## Make the environment, with pinned packages on 3.11 and 3.12

quickstart: install ## Train three methods on real text, then report (minutes)
	$(RUN) -m experiments.quickstart --workdir=runs/quickstart

ablation: install ## Ways to send less, by loss and bytes (half an hour)
	$(RUN) -m experiments.sweep --workdir=runs/ablation

convergence: install ## Every method under one budget (hours; goes on from docs/results)
	$(RUN) -m experiments.sweep --workdir=runs/convergence_small --processes=2 \
	  --config=experiments/configs/convergence.py:small

tables: install ## Published speed-up tables beside predictions (seconds)
	$(RUN) -m experiments.speedup_tables --workdir=runs/tables

reproduce: install ## The papers' tables and the sweeps' pages, from committed rows
	$(RUN) -m experiments.speedup_tables --workdir=runs/tables
	set -e; for sweep in small muon long; do \
	  $(RUN) -m experiments.sweep --report_only \
	    --config=experiments/configs/convergence.py:$$sweep \
	    --workdir=runs/reproduced/$$sweep; done
	set -e; for sweep in main one long sizes cpu equal_rounds equal_time; do \
	  $(RUN) -m experiments.sweep --report_only \
	    --config=experiments/configs/replicas.py:$$sweep \
	    --workdir=runs/reproduced/replicas_$$sweep; done
	$(RUN) -m docs.figures.loss_by_time

compile-report: $(TPU)/.installed ## Compile runs for TPUs that are not there (a quarter of an hour)
	set -e; for preset in $(COMPILED); do name=$${preset%@*}; \
	  $(TPU_RUN) --workdir=runs/compiled/$$name --compile=$${preset#*@} \
	    --config=experiments/configs/compiled.py:$$name; done

compile-report-gpu: $(GPU)/.installed ## Compile runs for GPUs that are not there (a quarter of an hour)
	set -e; for preset in $(COMPILED_GPU); do name=$${preset%@*}; \
	  $(GPU_RUN) --workdir=runs/compiled_gpu/$$name --compile=$${preset#*@} \
	    --config=experiments/configs/compiled.py:$$name; done

lint: install ## Style, types and import contracts; a part of `make test`
	$(RUN) -m pytest tests/contracts/test_lint.py tests/contracts/test_layers.py

format: install ## Rewrite the code in the house style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

stubs: install ## Write dilocox_jax/__init__.pyi, from which editors know the names
	$(RUN) -m tests.contracts.api_stub

test: install ## The fast tier of tests, lint included: what CI runs
	$(RUN) -m pytest $(PYTEST_ARGS)

check: $(STAMP) $(MOTO)/.installed ## Every test, the slow tier too, compiled as users compile
	DILOCOX_JAX_COMPILE=full $(RUN) -m pytest $(PYTEST_ARGS) -m ''

check-transformers: $(TRANSFORMERS)/.installed ## Logits, sizes and a replica in PyTorch beside ours
	$(TRANSFORMERS)/bin/python -m pytest tests/models/test_weights.py tests/api/test_adapters.py tests/experiments/test_tools.py \
	  tests/examples/test_pytorch_replica.py

mutations: install ## Change the code in 200 places, and list what no test notices (hours)
	$(RUN) -m tests.mutants

model: ## Check the mailbox's protocol by Spin, and that Spin finds seeded faults (minutes)
	$(PYTHON) -m tests.protocol_model.check

docs: $(DOCS_STAMP) ## Build the documentation, and run the code that it shows
	rm -f docs/config_fields.md
	$(RUN) -m pytest --doctest-glob='*.md' README.md docs
	$(RUN) -m sphinx -W --keep-going -q -b html docs build/docs
	@echo 'documentation: build/docs/index.html'

bench: install ## Measure rounds, codecs and inner steps on this machine
	$(RUN) -m experiments.tools.bench round --workdir=runs/bench
	$(RUN) -m experiments.tools.bench codecs --workdir=runs/bench --repeats=21
	$(RUN) -m experiments.tools.bench inner --workdir=runs/bench

pins: ## Renew the constraint file of this Python version
	@$(check-python)
	rm -rf build/pins
	$(PYTHON) -m venv build/pins
	build/pins/bin/python -m pip install --quiet '.[dev,docs]'
	{ echo '# The tested set for Python $(VERSION), development and documentation tools included.'; \
	  echo '# Renew: make pins PYTHON=python$(VERSION)'; \
	  build/pins/bin/python -m pip freeze --all \
	    --exclude dilocox_jax --exclude pip --exclude wheel; \
	} > constraints/py$(subst .,,$(VERSION)).txt

clean: ## Remove the environment, caches and builds; runs/ is kept
	rm -rf .cache .hypothesis .ruff_cache .import_linter_cache build dist *.egg-info docs/config_fields.md
	test ! -f $(VENV)/pyvenv.cfg || rm -rf $(VENV)

# An environment of its own for the extra that it is named after.
build/%/.installed: setup.py $(CONSTRAINTS)
	@$(check-python)
	@$(PYTHON) -m venv --clear build/$*
	@$(subst $(RUN),build/$*/bin/python,$(PIP)) setuptools
	@$(subst $(RUN),build/$*/bin/python,$(PIP)) --no-build-isolation \
	  --editable '.[dev,$*]'
	@touch $@

$(MOTO)/.installed:
	@$(check-python)
	@$(PYTHON) -m venv --clear $(MOTO)
	@$(MOTO)/bin/python -m pip --disable-pip-version-check install --quiet \
	  'moto[s3,server]==5.2.5'
	@touch $@

define check-python
if [ -z '$(VERSION)' ]; then \
  echo 'error: cannot run "$(PYTHON)"; say which one: make PYTHON=python3.12' >&2; \
  exit 1; fi; \
if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
  echo 'error: $(PYTHON) is Python $(VERSION); 3.11 or newer is needed: make PYTHON=python3.12' >&2; \
  exit 1; fi; \
if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
  echo 'error: $(PYTHON) has no venv or ensurepip; on Debian: apt install python$(VERSION)-venv' >&2; \
  exit 1; fi
endef

ifneq ($(FOUND),$(WANTED))
$(STAMP): FORCE
endif

# setuptools comes first and the build runs without isolation, so that it too
# is a pinned version.
$(STAMP): setup.py $(CONSTRAINTS)
	@$(check-python)
	@if [ -d $(VENV) ] && [ ! -f $(VENV)/pyvenv.cfg ]; then \
	  echo 'error: $(VENV) exists and is no virtual environment: choose VENV=...' >&2; \
	  exit 1; fi
	@$(if $(CONSTRAINTS),,echo 'note: no pinned set for Python $(VERSION); taking current versions')
	@echo 'Installing into $(VENV) (Python $(VERSION)); this takes a few minutes.'
ifneq ($(FOUND),$(WANTED))
	@$(PYTHON) -m venv --clear $(VENV)
endif
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@printf '%s' '$(WANTED)' > $@

$(DOCS_STAMP): $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

