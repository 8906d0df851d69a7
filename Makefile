# Two commands: `make demo` and `make test`. Both set up .venv on a fresh clone, and skip that once it is there.
VENV := .venv
PYTHON ?= python3
RUN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/ready
	$(RUN)/tomadiff demo

test: $(VENV)/ready lint
	$(RUN)/python -m pytest

lint: $(VENV)/ready
	$(RUN)/ruff check src tests
	$(RUN)/ruff format --check src tests

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
