# make demo    set up, run the whole toolkit on the embedded site, print generated text
# make setup   only set up: .venv with what demo, corpus, training and cluster need
# make test    set up, run the tests          make test-all   with the slow ones
# make lint    formatting, lint, types, docs  make clean      remove results and the environment
# make docs    the documentation as a site under results/docs
# make lock    resolve the dependencies again, for every supported Python at once; keeps versions that still fit
# make slurm-lab   a shell in a throw-away Slurm (Debian: slurm-wlm, munge; as root)
#
# A laptop without a GPU can choose PyTorch's CPU builds:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL := /bin/bash
PYTHON ?= python3
TORCH_INDEX ?=
VENV ?= .venv
EXTRAS ?= test
TESTS ?=  # folders or files, for a part of the tests
WORKERS ?= 4  # half of the time tests wait for a daemon or a signal
INSTALL ?= $(BIN)/pip install --quiet
LOCK ?= constraints.txt
BIN := $(VENV)/bin
UV := $(VENV)-uv/bin/uv
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-to-test

# set in many containers: every process would compile the toolkit again, and pytest every test
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-all lint docs lock slurm-lab clean

setup: $(READY)
	@echo "ready; next: source $(BIN)/activate, then snakemake all (the demo), or snakemake all --configfile FILE"

demo: $(READY)
	@$(BIN)/python -m workflow.demo

# loadgroup: see pytest_collection_modifyitems in tests/conftest.py
PYTEST := TIMEFORMAT='%R s, %U + %S CPU s'; time $(BIN)/python -m pytest -n $(strip $(WORKERS)) --dist loadgroup \
	--no-loadscope-reorder

test: $(DEV)
	$(PYTEST) -m "not slow" $(TESTS)

test-all: $(DEV)
	$(PYTEST) --durations 10 $(TESTS)

lint: $(DEV) docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow

# strict: a link that leads nowhere, in a page or inside one, is an error. The variable silences an advertisement
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# 3.11.2, Debian 12's, is the oldest Python. Where versions differ, uv writes both with a marker
lock: $(UV)
	$(UV) pip compile --quiet --universal --python-version 3.11.2 --extra test --extra gpu \
		--no-header --no-annotate --output-file $(LOCK) pyproject.toml

$(UV):
	$(PYTHON) -m venv $(VENV)-uv
	$(VENV)-uv/bin/pip install --quiet uv

# a shell in a throw-away Slurm of two nodes with four fake GPUs each; as root. More: make slurm-lab LAB="--nodes 4"
slurm-lab: $(DEV)
	@PATH="$(CURDIR)/$(BIN):$$PATH" python -m tests.slurm.lab --gpus 4 $(LAB) -- bash -c 'bash; true'

clean:
	rm -rf results .snakemake $(VENV) $(VENV)-uv

# $(call install,WORDS): a line every 10 seconds, because a download may take minutes
define install
@echo "$(INSTALL) $(1)"
@(while sleep 10 >/dev/null 2>&1; do echo "  installing: $$(du -sh $(VENV) | cut -f 1) in $(VENV)"; done) & \
	trap "kill $$! 2>/dev/null" EXIT; $(INSTALL) $(1)
endef

# An environment without the file .ready is incomplete and is created again. torch is installed first and pinned, so that
# no other package pulls another build of it.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is too old; give Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 2; }
	@[ -f $(READY) ] || rm -rf $(VENV)
	@rm -f $(READY)
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) \
		|| { echo "error: no venv module; on Debian and Ubuntu: apt install python3-venv"; rm -rf $(VENV); exit 2; }
	$(call install,--upgrade pip)
	$(call install,$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(shell grep -o '^torch==[0-9.]*' constraints.txt))
	$(call install,--constraint constraints.txt --editable .)
	@$(BIN)/python -m common.init .  # writes the schema of configurations, for editors
	@touch $(READY)

# what tests, lint and docs need besides
$(DEV): $(READY)
	$(call install,--constraint constraints.txt --editable '.[$(EXTRAS)]')
	@touch $(DEV)
