# `make demo` and `make test` set up .venv on a fresh clone, and skip that once it is there.
VENV := .venv
PYTHON ?= python3
RUN := $(VENV)/bin
# With it, every worker of the tests would prepare all their modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-oldest fuzz lint docs wheel-test browser clean

demo: $(VENV)/ready
	$(RUN)/tomadiff demo

# Changes nothing outside this folder but caches of downloads; .ci/run calls `make browser` first. Three workers on two cores, since tests
# of Ray, the page and commands wait much of the time.
test: $(VENV)/ready lint
	$(RUN)/python -m pytest -n 3

# Files of others, settings, interrupts and generations at random, for long, and other ones in every run; `make test` tries a few
# that are always the same.
FUZZERS := tests/tools/test_fuzz_files.py $(addprefix tests/runtime/test_,interrupts.py state_leaks.py robustness.py)
fuzz: $(VENV)/ready
	$(RUN)/python -m pytest -n 2 --hypothesis-profile fuzz -k 'fuzz or interrupt or leaks or any_' $(FUZZERS)

# The oldest versions that pyproject.toml allows of torch, diffusers, transformers, accelerate, numpy and pillow, all at once, in an
# environment of its own. Models that they lack are skipped. What else the extras bring (gradio, ray, peft, matplotlib, datasets, tomesd)
# is not there: nothing that needs it is tried.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/core tests/models tests/test_report.py tests/tools/test_untrusted_folders.py \
	$(addprefix tests/runtime/test_,promises.py compile.py errors.py clock.py)
# In diffusers 0.40, the pipeline of LTX-2 imports a class that is not in transformers 5.5; its model is tried without.
NOT_OLDEST := tests/models/test_families.py::test_the_real_pipeline_draws_and_removal_is_bit_exact[ltx2]
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -n 2 $(OLDEST_TESTS) --deselect '$(NOT_OLDEST)'

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt torch
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e . \
		accelerate transformers $$(grep -E '^(pytest|pytest-xdist|hypothesis)==' constraints.txt)
	touch $@

lint: $(VENV)/ready
	$(RUN)/ruff check src tests examples benchmarks scripts
	$(RUN)/ruff format --check src tests examples benchmarks scripts
	$(RUN)/mypy

# Installs the browser that the tests of the page need, where there is none and root may; without one, they are skipped.
CHROMIUM := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core
browser:
	@for name in chromium chromium-browser google-chrome; do \
		if command -v $$name; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get; then \
		$(CHROMIUM) > /dev/null || { apt-get update -qq && $(CHROMIUM) > /dev/null; } || echo "no chromium could be installed"; \
	fi

# Builds the wheel, looks at what is in it, and tries it in an environment that has nothing else of this repository.
wheel-test: $(VENV)/ready
	$(RUN)/python scripts/wheel_test.py

# The documentation site, in site/; a broken link is an error. Its tools need an environment of their own, but no torch.
DOCS := .venv-docs
docs: $(DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(DOCS)
