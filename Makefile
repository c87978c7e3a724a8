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
$(error $(shell '$(PYTHON)' -c 'import difflib, sys; known = sys.argv[1].split(); print("; ".join(name + " is not a variable of this Makefile" + "".join(", did you mean " + near for near in difflib.get_close_matches(name.upper(), known, 1, 0.4)) for name in sys.argv[2:]), "(valid:", ", ".join(known) + ")")' '$(KNOWN)' $(UNKNOWN)))
endif

# Paths with a space: a folder of the checkout's may have one, since make only meets names relative to it; VENV may not.
ifneq ($(words $(VENV)),$(if $(VENV),1,0))
$(error VENV='$(VENV)' contains a space, which make cannot take: name another, such as VENV=.venv)
endif
ifneq ($(and $(VENV),$(WHEELS),$(filter-out wheelhouse clean,$(or $(MAKECMDGOALS),help))),)
$(error WHEELS=$(WHEELS) fits out a PYTHON that is used as it is: make $(MAKECMDGOALS) PYTHON=$(PYTHON) VENV= WHEELS=$(WHEELS))
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
  READY := $(VENV)/kvnb-$(call key,cat requirements.txt pyproject.toml; pwd; '$(PYTHON)' -VV; echo '$(TORCH_INDEX)')
else
  RUNNER := '$(PYTHON)'
  SITE := $(if $(WHEELS),build/site-$(call key,ls -l '$(WHEELS)'; '$(PYTHON)' -VV))
  READY := $(if $(SITE),$(SITE)/kvnb-ready)
  export JUPYTER_PATH := $(if $(SITE),$(CURDIR)/$(SITE)/share/jupyter)
endif
export PYTHONPATH := $(CURDIR)$(if $(SITE),:$(CURDIR)/$(SITE))
# `make test` must not reach pytest's children through MAKEFLAGS
unexport MAKEFLAGS MAKEOVERRIDES

.PHONY: help report test lab measure render record compare readme trust lint needs wheelhouse clean set-up python

help: ## list the verbs
	@echo 'make VERB [NAME=value ...]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Measuring:  GRID=quick|full|releases|padding  DEVICE=auto|cpu|cuda:N  COPIES=kvnb,torch.index_put  TIMERS=graph,call'
	@echo '            RUN=name (an existing one is resumed)  WORKERS=3  ROUNDS=10  COPIES_FROM=my_copy.py'
	@echo 'Where:      PYTHON=python3.12  TORCH_INDEX=url of an index with the torch you want'
	@echo '            VENV= (use PYTHON as it is)  WHEELS=folder (with VENV=: wheels that PYTHON lacks)'

report: set-up ## measure here, write reports/<run>/index.html with the verdicts
	@exec $(RUNNER) -m kvnb report $(measuring) $(call option,RUN,run)

test: set-up ## lint, layers, stripped notebooks, README, all tests (TESTS="-k name" picks some)
	@$(RUNNER) -m kvnb.wheels check test
	@$(RUNNER) -m pytest $(if $(VENV),-n 2 --dist loadfile) $(TESTS)

lab: set-up ## open the notebooks in JupyterLab
	@$(RUNNER) -m jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks

measure: set-up ## measure only: data/local/<run>.parquet
	@exec $(RUNNER) -m kvnb measure $(measuring) $(call option,RUN,run)

render: set-up ## render data/recorded/<gpu>/ into reports/<gpu>/ (GPU=h200: one of them)
	@exec $(RUNNER) -m kvnb render $(call option,GPU,gpu)

record: set-up ## measure a record of this GPU: data/recorded/<gpu>/<date>_<grid>_<commit>.parquet
	@exec $(RUNNER) -m kvnb record $(measuring) $(call option,RUN,run)

compare: set-up ## how fast B's copies are against A's: A=run file B=run file
	@$(if $(and $(filter A,$(GIVEN)),$(filter B,$(GIVEN))),,$(error make compare takes two run files: A=data/recorded/h200/older.parquet B=data/local/mine.parquet))exec $(RUNNER) -m kvnb compare "$$A" "$$B"

readme: set-up ## splice the newest record's answer into README.md
	@$(RUNNER) -m cogapp -r README.md

trust: set-up ## count again what README's section on trust tells
	@$(RUNNER) -m pytest --trust tests/trust.txt $(shell grep -rl --include='test_*.py' '"trust"' tests)

lint: set-up ## lint, layers, stripped notebooks, README
	@$(RUNNER) -m pytest tests/test_lint.py tests/test_layers.py

needs: python ## on an offline host: list in NEEDS=needs.txt what PYTHON lacks
	@'$(PYTHON)' -m kvnb.wheels needs '$(NEEDS)'

wheelhouse: python ## elsewhere: fetch what NEEDS=needs.txt lists into WHEELS=wheelhouse
	@'$(PYTHON)' -m kvnb.wheels fetch '$(NEEDS)' '$(or $(WHEELS),wheelhouse)'

clean: ## remove what make made here, .venv, build/ and caches; never data/ or reports/
	$(if $(VENV),@if [ -e '$(VENV)/kvnb-made' ]; then echo 'rm -rf $(VENV)'; rm -rf '$(VENV)'; elif [ -e '$(VENV)' ]; then echo '$(VENV) stays: make did not make it'; fi)
	rm -rf build/site-[0-9]* kvnb.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@rmdir build 2>/dev/null || true
	find kvnb tests -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@command -v '$(PYTHON)' >/dev/null || { echo '$(PYTHON) is not there; name a Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "$(PYTHON) is Python %d.%d; kvnb needs 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'

OFFLINE = { echo 'pip could not get the packages (its words are above). Without a network, use a Python that has torch: make needs PYTHON=python3, and so on as "Offline GPU host" in README.md says; for a mirror, set PIP_INDEX_URL' >&2; exit 1; }

set-up: python $(READY)
ifeq ($(VENV),)
	@$(RUNNER) -m kvnb.wheels check report
endif

ifneq ($(VENV),)
# kvnb-made, and nothing else: this environment is ours, to fill and to remove, also when it was left half made.
$(READY): | python
	@if [ -e '$(VENV)' ] && [ ! -e '$(VENV)/kvnb-made' ]; then \
	  echo '$(VENV) is there, and make did not make it: use it as it is, make $(MAKECMDGOALS) PYTHON=$(VENV)/bin/python VENV=, or name another' >&2; exit 1; fi
	@mkdir -p '$(VENV)' && touch '$(VENV)/kvnb-made'
	'$(PYTHON)' -m venv '$(VENV)'
	$(if $(TORCH_INDEX),$(RUNNER) -m pip install -q --no-deps --index-url '$(TORCH_INDEX)' "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)" || $(OFFLINE))
	$(RUNNER) -m pip install -q -r requirements.txt || $(OFFLINE)
	$(RUNNER) -m pip install -q --no-deps --no-build-isolation -e .
	@rm -f '$(VENV)'/kvnb-[0-9]*
	@touch '$@'
else ifneq ($(READY),)
$(READY): | python
	@ls '$(WHEELS)'/*.whl >/dev/null 2>&1 || { echo 'WHEELS=$(WHEELS): no wheels there; make wheelhouse fetches them' >&2; exit 1; }
	@rm -rf '$(SITE)'
	$(RUNNER) -m pip install -q --no-index --no-deps --no-compile --target '$(SITE)' '$(WHEELS)'/*.whl || \
	  { echo 'WHEELS=$(WHEELS) does not fit $(PYTHON): make needs PYTHON=$(PYTHON) here, then make wheelhouse elsewhere' >&2; exit 1; }
	@touch '$@'
endif
