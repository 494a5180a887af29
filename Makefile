# Everything starts here; see README.md.  `make demo` and `make test` need only Python.
VENV ?= .venv
SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
RUN = $(VENV)/bin/
INSTALLED = $(VENV)/installed
PIP_INSTALL = $(RUN)pip install --quiet --disable-pip-version-check
COMPILE = $(RUN)uv pip compile --quiet $(UPGRADE) --generate-hashes --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

.PHONY: help demo test test-thorough lint docs engines engines-embedded check-python lock clean

help:
	@echo "make demo   set up, and run the whole path on synthetic data (minutes)"
	@echo "make test   set up, and run the tests (4 minutes on two cores)"
	@echo "make test-thorough  the other tests: kills, attacks, more processes (4 minutes)"
	@echo "make lint   set up, and run formatter, linter, types and import contracts"
	@echo "make docs   set up, and build the documentation into build/site"
	@echo "make engines  the job on real Flink and Spark clusters, with faults (20 minutes)"
	@echo "make engines-embedded  the job on a Flink and a Spark of one process each"
	@echo "make lock   bring deploy/lock/ up to setup.py; UPGRADE=--upgrade renews all of it"
	@echo "make clean  remove the environment and what the demo made"

demo: $(INSTALLED)
	$(RUN)dpsgd demo

test: $(INSTALLED)
	$(RUN)python -m pytest -q -n auto --dist worksteal -m "not thorough"

test-thorough: $(INSTALLED)
	$(RUN)python -m pytest -q -n auto --dist worksteal -m thorough

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
	@test -n "$(PYTHON)" || { echo "error: Expected Python 3.11 to 3.13 on the PATH; \
	found $$( (command -v python3 >/dev/null && python3 --version) || echo none). Install one, or name it: \
	make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "error: Expected Python 3.11 to 3.13; \
	PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: Expected \
	$(PYTHON) to have venv. On Debian: apt-get install python3-venv" >&2; exit 1; }

# The stamp names the lock it came from: a changed lock or setup.py installs anew.
$(INSTALLED): $(wildcard deploy/lock/*.txt) setup.py | check-python
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes -r deploy/lock/py$$($(PYTHON) -c \
		'import sys; print("%d.%d" % sys.version_info[:2])').txt
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	$(RUN)pip check
	@# After the check, which on Python 3.12 and 3.13 would refuse it: TF Privacy declares
	@# older Pythons and libraries.  The tests use on all of them what they use of it.
	$(PIP_INSTALL) --no-deps --ignore-requires-python --require-hashes \
		-r deploy/lock/tensorflow-privacy.txt
	touch $@

lock: $(INSTALLED)
	for version in 3.11 3.12 3.13; do \
		$(COMPILE) --python-platform linux --python-version $$version --extra all \
			setup.py --output-file deploy/lock/py$$version.txt || exit 1; \
	done
	grep -o 'tensorflow-privacy==[^;]*' setup.py | $(COMPILE) --no-deps \
		--python-version 3.11 --output-file deploy/lock/tensorflow-privacy.txt -

clean:
	rm -rf $(VENV) demo build *.egg-info
