# The one task runner: continuous integration, pre-commit and people call the same targets.
# Python 3.11 or newer and make are all a machine needs: every target makes the environment it runs in.

PYTHON ?= python3
PYTHON_NEWEST ?= python3.13
ARGS ?=
# Two processes and more, each with whole files: the models and compiled steps that a file shares are made once. In
# order: the files that take longest come first (tests/conftest.py).
PYTEST := -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
CI_TIER := not soak and not architecture
# The next forms of jax.checkpoint and of custom derivatives (spmd/jaxpr/upgrades.py); a JAX without one ignores it.
UPGRADES := JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 JAX_REMAT_BARRIER_NO_COTANGENTS=1

VENV := .venv
NEWEST := .venv-newest
SYSTEM_PACKAGES := shellcheck slurm-wlm munge openmpi-bin iproute2 chromium
BENCH_MESHES := data=1,fsdp=8,tensor=1 data=2,fsdp=2,tensor=2 data=1,fsdp=1,tensor=1

# One stamp for each thing that was installed; pip runs again only when what it reads has changed.
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.installed-test
DOCS_INSTALLED := $(VENV)/.installed-docs
SOAK_INSTALLED := $(VENV)/.installed-soak
# Python compiles what is imported; compiling all that is installed takes half of the installation's time.
PIP := $(VENV)/bin/python -m pip install -q --no-compile -c constraints.txt

# make_venv(python, folder, name of the variable that chooses python): an environment, or a sentence on what is missing.
define make_venv
	@VERSION='import sys; sys.stdout.write("Python %d.%d" % sys.version_info[:2])'; \
	$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "spmd needs Python 3.11 or newer; '$(1)' is $$($(1) -c "$$VERSION" 2>/dev/null || echo missing)." >&2; \
	  echo "Name another, for example: make $(MAKECMDGOALS) $(3)=python3.12" >&2; exit 1; }
	@$(1) -m venv $(2) || { \
	  echo "'$(1) -m venv' failed; on Debian and Ubuntu, install the package python3-venv." >&2; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: help install system demo test newest newest-environment parity upgrades soak durations check bench docs docs-environment

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(TEST_INSTALLED) ## make .venv with the package (editable) and everything tests and checks need

$(INSTALLED): pyproject.toml constraints.txt
	$(call make_venv,$(PYTHON),$(VENV),PYTHON)
	@echo "installing into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(TEST_INSTALLED): $(INSTALLED)
	@echo "installing what tests and checks need into $(VENV)"
	@$(PIP) -e '.[test,parity,dev,tpu]'
	@touch $@

$(SOAK_INSTALLED): $(TEST_INSTALLED)
	@echo "installing what soak tests need into $(VENV)"
	@$(PIP) -e '.[soak]'
	@touch $@

system: ## install Debian's packages of Slurm, Open MPI, ip, shellcheck and Chromium, which soak tests start (as root)
	@dpkg -s $(SYSTEM_PACKAGES) >/dev/null 2>&1 || { \
	  [ "$$(id -u)" = 0 ] || { echo "as root: apt-get install $(SYSTEM_PACKAGES)" >&2; exit 1; }; \
	  echo "installing $(SYSTEM_PACKAGES)"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(SYSTEM_PACKAGES) >/dev/null; }

demo: $(INSTALLED) ## train a small Llama over 8 simulated devices, into runs/demo (about 3 minutes on 2 cores)
	@if [ -e runs/demo ]; then echo "removing the previous runs/demo"; rm -rf runs/demo; fi
	$(VENV)/bin/spmd train demo --out runs/demo

test: install ## run the tests that every change must pass (ARGS="-k mesh" chooses; 10 to 16 minutes on 2 quiet cores)
	$(VENV)/bin/python $(PYTEST) -m "$(CI_TIER)" $(ARGS)

newest-environment:
	$(call make_venv,$(PYTHON_NEWEST),$(NEWEST),PYTHON_NEWEST)
	@echo "installing the newest releases into $(NEWEST)"
	@$(NEWEST)/bin/python -m pip install -q --no-compile --upgrade --upgrade-strategy eager -e '.[test,tpu]'

newest: newest-environment ## run the tests of what dependencies can break, on PYTHON_NEWEST with the newest release of everything
	$(NEWEST)/bin/python $(PYTEST) -m "(unit or compat) and not soak" $(ARGS)
	$(UPGRADES) $(NEWEST)/bin/python $(PYTEST) -m "upgrades and not soak"

# Tests against transformers; its oldest supported release lacks families.
PARITY := $(addprefix tests/numerics/test_,transformers.py config_fields.py absent_fields.py router.py rotary.py) \
  $(addprefix tests/unit/test_,rules_from_transformers.py missing_options.py) tests/soak/test_recurrent_mixers.py

parity: newest-environment ## compare families with the newest transformers (soak tests; transformers of the oldest end lacks some)
	@$(NEWEST)/bin/python -m pip install -q --no-compile -e '.[parity]'
	$(NEWEST)/bin/python $(PYTEST) $(PARITY) $(ARGS)

upgrades: install ## run the tests that JAX's upgrade flags can break, with the flags on
	$(UPGRADES) $(VENV)/bin/python $(PYTEST) -m "upgrades and not soak" $(ARGS)

soak: $(SOAK_INSTALLED) system ## run the long proofs but those of `make parity`, which no change waits for (as root, 45 to 80 minutes on 2 cores, and the sweep)
	$(UPGRADES) $(VENV)/bin/python $(PYTEST) -m "upgrades and not soak"
	$(VENV)/bin/python $(PYTEST) -m soak $(addprefix --ignore=,$(PARITY)) $(ARGS)

durations: install ## write tests/durations.txt: the seconds of each test of `make test`, with nothing compiled before
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && XDG_CACHE_HOME="$$folder" \
	  $(VENV)/bin/python $(PYTEST) -m "$(CI_TIER)" --record=tests/durations.txt

check: install ## lint, formatting, types, floors, documentation
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest tests/architecture

bench: install ## time step and layers against hand-written JAX, generation with and without a cache, pipelines and the demo against predictions (ARGS="--layers 2" is for the step)
	@set -e; for mesh in $(BENCH_MESHES); do \
	  echo "$(VENV)/bin/python benchmarks/step.py --mesh $$mesh $(ARGS)"; \
	  $(VENV)/bin/python benchmarks/step.py --mesh $$mesh $(ARGS); \
	done
	$(VENV)/bin/python -m benchmarks.layers
	$(VENV)/bin/python -m benchmarks.generate
	$(VENV)/bin/python -m benchmarks.pipeline
	$(VENV)/bin/python -m benchmarks.pipeline --work matmuls --stages 8 --microbatches 16
	$(VENV)/bin/python -m benchmarks.cpu_prediction

docs: $(DOCS_INSTALLED) ## build the documentation with its API reference into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict --site-dir site

docs-environment: $(DOCS_INSTALLED)

$(DOCS_INSTALLED): $(INSTALLED)
	@$(PIP) -e '.[docs]'
	@touch $@
