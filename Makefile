# kvnb's verbs: `make` alone lists them. report and test do all the set-up they need; variables go after the verb.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON := python3
VENV := .venv
WHEELS :=
NEEDS := needs.txt

# Only variables of the command line count, so that a RUN or GPU left in the environment changes nothing.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name)))
MEASURING := DEVICE GRID COPIES TIMERS RUN WORKERS ROUNDS COPIES_FROM
KNOWN := $(MEASURING) GPU A B TESTS PYTHON VENV TORCH_INDEX WHEELS NEEDS
UNKNOWN := $(filter-out $(KNOWN),$(GIVEN))
ifneq ($(UNKNOWN),)
$(error $(shell $(PYTHON) -c 'import difflib, sys; known = sys.argv[1].split(); print("; ".join(name + " is not a variable of this Makefile" + "".join(", did you mean " + near for near in difflib.get_close_matches(name.upper(), known, 1, 0.4)) for name in sys.argv[2:]), "(valid:", ", ".join(known) + ")")' '$(KNOWN)' $(UNKNOWN)))
endif

# $(call option,NAME,flag): the flag when NAME was given; make exports NAME, the shell quotes it.
option = $(if $(filter $(1),$(GIVEN)),--$(2) "$$$(1)")
measuring = $(call option,DEVICE,device) $(call option,GRID,grid) $(call option,COPIES,copies) \
  $(call option,TIMERS,timers) $(call option,WORKERS,workers) $(call option,ROUNDS,rounds) $(call option,COPIES_FROM,copies-from)

# A set-up is ready when its stamp is there; the stamp's name holds a checksum of all that decides the set-up.
key = $(firstword $(shell { $(1); } 2>&1 | cksum))
ifneq ($(VENV),)
  RUNNER := $(VENV)/bin/python
  SITE :=
  READY := $(VENV)/kvnb-$(call key,cat requirements.txt pyproject.toml; pwd; $(PYTHON) -VV; echo '$(TORCH_INDEX)')
else
  RUNNER := $(PYTHON)
  SITE := $(if $(WHEELS),$(CURDIR)/build/site-$(call key,ls -l '$(WHEELS)'; $(PYTHON) -VV))
  READY := $(if $(SITE),$(SITE)/kvnb-ready)
  export JUPYTER_PATH := $(if $(SITE),$(SITE)/share/jupyter)
endif
export PYTHONPATH := $(CURDIR)$(if $(SITE),:$(SITE))
# `make test` must not reach pytest's children through MAKEFLAGS
unexport MAKEFLAGS MAKEOVERRIDES

.PHONY: help report test lab measure render record readme lint needs wheelhouse clean set-up python

help: ## list the verbs
	@echo 'make VERB [NAME=value ...]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Measuring:  GRID=quick|full|releases|padding  DEVICE=auto|cpu|cuda:N  COPIES=kvnb,torch.index_put  TIMERS=graph,call'
	@echo '            RUN=name (an existing one is resumed)  WORKERS=3  ROUNDS=10  COPIES_FROM=my_copy.py'
	@echo 'Where:      PYTHON=python3.12  TORCH_INDEX=url of an index with the torch you want'
	@echo '            VENV= (use PYTHON as it is)  WHEELS=folder (with VENV=: wheels that PYTHON lacks)'

report: set-up ## measure here, write reports/<run>/index.html with the verdicts
	@$(RUNNER) -m kvnb report $(measuring) $(call option,RUN,run)

test: set-up ## lint, layers, stripped notebooks, README, all tests (TESTS="-k name" picks some)
	@$(RUNNER) -m kvnb.wheels check test
	@$(RUNNER) -m pytest $(if $(VENV),-n 2 --dist loadfile) $(TESTS)

lab: set-up ## open the notebooks in JupyterLab
	@$(RUNNER) -m jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks

measure: set-up ## measure only: data/local/<run>.parquet
	@$(RUNNER) -m kvnb measure $(measuring) $(call option,RUN,run)

render: set-up ## render data/recorded/<gpu>/ into reports/<gpu>/ (GPU=h200: one of them)
	@$(RUNNER) -m kvnb render $(call option,GPU,gpu)

record: set-up ## measure a record of this GPU: data/recorded/<gpu>/<date>_<grid>_<commit>.parquet
	@$(RUNNER) -m kvnb record $(measuring) $(call option,RUN,run)

compare: set-up ## how fast B's copies are against A's: A=run file B=run file
	@$(if $(and $(filter A,$(GIVEN)),$(filter B,$(GIVEN))),,$(error make compare takes two run files: A=data/recorded/h200/older.parquet B=data/local/mine.parquet))$(RUNNER) -m kvnb compare "$$A" "$$B"

readme: set-up ## splice the newest record's answer into README.md
	@$(RUNNER) -m cogapp -r README.md

lint: set-up ## lint, layers, stripped notebooks, README
	@$(RUNNER) -m pytest tests/test_lint.py tests/test_layers.py

needs: python ## on an offline host: list in NEEDS=needs.txt what PYTHON lacks
	@$(PYTHON) -m kvnb.wheels needs '$(NEEDS)'

wheelhouse: python ## elsewhere: fetch what NEEDS=needs.txt lists into WHEELS=wheelhouse
	@$(PYTHON) -m kvnb.wheels fetch '$(NEEDS)' '$(or $(WHEELS),wheelhouse)'

clean: ## remove .venv, build/ and caches; never data/ or reports/
	rm -rf .venv build kvnb.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find kvnb tests -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@command -v '$(PYTHON)' >/dev/null || { echo '$(PYTHON) is not there; name a Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "$(PYTHON) is Python %d.%d; kvnb needs 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'

set-up: python $(READY)
ifeq ($(VENV),)
	@$(PYTHON) -m kvnb.wheels check report
endif

ifneq ($(VENV),)
$(READY): | python
	$(PYTHON) -m venv '$(VENV)'
	$(if $(TORCH_INDEX),$(RUNNER) -m pip install -q --no-deps --index-url '$(TORCH_INDEX)' "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)")
	$(RUNNER) -m pip install -q -r requirements.txt
	$(RUNNER) -m pip install -q --no-deps --no-build-isolation -e .
	@rm -f '$(VENV)'/kvnb-[0-9]*
	@touch '$@'
else ifneq ($(READY),)
$(READY): | python
	@ls '$(WHEELS)'/*.whl >/dev/null 2>&1 || { echo 'WHEELS=$(WHEELS): no wheels there; make wheelhouse fetches them' >&2; exit 1; }
	@rm -rf '$(SITE)'
	$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --target '$(SITE)' '$(WHEELS)'/*.whl
	@touch '$@'
endif
