# Everything starts here; see README.md.  `make demo` and `make test` need only Python.
VENV ?= .venv
SUPPORTED = import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 12))
PYTHON ?= $(shell for python in python3.11 python3.10 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
RUN = $(VENV)/bin/
INSTALLED = $(VENV)/installed

.PHONY: help demo test lint docs engines engines-embedded check-python lock clean

help:
	@echo "make demo   set up, and run the whole path on synthetic data (minutes)"
	@echo "make test   set up, and run all tests"
	@echo "make lint   set up, and run formatter, linter, types and import contracts"
	@echo "make docs   set up, and build the documentation into build/site"
	@echo "make engines  the job on real Flink and Spark clusters, with faults (20 minutes)"
	@echo "make engines-embedded  the job on a Flink and a Spark of one process each"
	@echo "make lock   resolve deploy/lock/ anew from setup.py"
	@echo "make clean  remove the environment and what the demo made"

demo: $(INSTALLED)
	$(RUN)dpsgd demo

test: $(INSTALLED)
	$(RUN)python -m pytest -q -n auto --dist worksteal

lint: $(INSTALLED)
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports

# Not --quiet: mkdocs then sees no warning, and strict finds nothing.
docs: $(INSTALLED)
	$(RUN)mkdocs build --strict

# What is fetched and built stays in build/engines.
engines-embedded: $(INSTALLED)
	$(RUN)python -m tests.engines.harness build
	$(RUN)python -m pytest -q tests/engines

engines: $(INSTALLED)
	$(RUN)python -m tests.engines.harness all

check-python:
	@test -n "$(PYTHON)" || { echo "error: Expected Python 3.10 or 3.11 on the PATH; \
	found $$( (command -v python3 >/dev/null && python3 --version) || echo none). Install one, or name it: \
	make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "error: Expected Python 3.10 or 3.11; \
	PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: Expected \
	$(PYTHON) to have venv. On Debian: apt-get install python3-venv" >&2; exit 1; }

# The stamp names the lock it came from: a changed lock or setup.py installs anew.
$(INSTALLED): deploy/lock/py3.10.txt deploy/lock/py3.11.txt setup.py | check-python
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN)pip install --quiet --disable-pip-version-check --require-hashes \
		-r deploy/lock/py$$($(PYTHON) -c \
		'import sys; print("%d.%d" % sys.version_info[:2])').txt
	$(RUN)pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --editable .
	$(RUN)pip check
	touch $@

lock: $(INSTALLED)
	for version in 3.10 3.11; do \
		$(RUN)uv pip compile --quiet --upgrade --generate-hashes --no-annotate \
			--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
			--python-platform linux --python-version $$version --extra all \
			setup.py --output-file deploy/lock/py$$version.txt; \
	done

clean:
	rm -rf $(VENV) demo build *.egg-info
