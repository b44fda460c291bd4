# Every target sets itself up: a fresh machine needs Python 3.11 and make, nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(dir $(wildcard plugins/*/pyproject.toml))
PIP_COMPILE := $(BIN)/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

.PHONY: fit test test-slow lint docs bench requirements clean

fit: $(VENV)/.base  ## train the shipped example
	$(BIN)/python -m grpo_lightning fit

test: $(VENV)/.dev  ## the fast tests, on two processes
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.dev  ## the long tests only
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.dev  ## style, types and the arrows between the parts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev  ## the documentation site, in site/
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev  ## every benchmark, one after the other
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/learning.py

# Once the newest torch may be a build with a local version (2.13.0+cpu): the pin names the release itself.
requirements: $(VENV)/.dev  ## compile requirements/*.in into pinned *.txt
	$(PIP_COMPILE) --output-file requirements/base.txt requirements/base.in
	$(PIP_COMPILE) --output-file requirements/dev.txt requirements/dev.in
	sed -i 's/^\(torch==[0-9.]*\)+[a-z0-9]*/\1/' requirements/base.txt requirements/dev.txt

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: requirements/base.txt pyproject.toml plugins/snapshot/pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/base.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . -e plugins/snapshot/
	touch $@

$(VENV)/.dev: requirements/dev.txt pyproject.toml $(wildcard plugins/*/pyproject.toml) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . $(addprefix -e ,$(PLUGINS))
	touch $@ $(VENV)/.base

clean:  ## remove the environment and what the tools leave behind
	rm -rf $(VENV) site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
