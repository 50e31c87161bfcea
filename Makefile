# HTS-RL: `make train` and `make test` set up what is missing first (scripts/setup.py says how).

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
ARGS ?=

.PHONY: help setup train test lint

help:
	@echo 'make train [ARGS="--env atari:Pong ..."]   set up, then train on Google Research Football'
	@echo 'make test [ARGS="-k atari"]                 set up, then run the test suite'
	@echo 'make lint                                   set up, then ruff and mypy'
	@echo 'make setup [FOOTBALL=0] [EXTRAS=atari,plot] [PYTHON=python3.12]'

setup:
	@command -v python3 >/dev/null || { echo 'setup failed: Python 3.11 or newer is needed: apt-get install python3 python3-venv'; exit 1; }
	@python3 scripts/setup.py

train: setup
	.venv/bin/htsrl train --algo ppo --env gfootball $(ARGS)

# Many tests wait for processes: two side by side. A file's tests stay together, they share what is costly to set up.
test: setup
	.venv/bin/python -m pytest -n auto --maxprocesses 2 --dist loadfile $(ARGS)

# mypy does not know that the folders actors/, learner/ and storage/ are packages of htsrl: it reads a tree of links.
lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@rm -rf build/typecheck && mkdir -p build/typecheck/htsrl
	@cd build/typecheck/htsrl && ln -s ../../../htsrl/* ../../../actors ../../../learner ../../../storage .
	MYPYPATH=build/typecheck .venv/bin/mypy -p htsrl \
		| sed -E 's#^build/typecheck/##; s#^htsrl/(actors|learner|storage)/#\1/#'
	.venv/bin/mypy scripts
	MYPYPATH=build/typecheck:benchmarks .venv/bin/mypy benchmarks/*.py
