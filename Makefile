# Each target sets up .venv when it is missing or older than pyproject.toml, then is one `python -m` line.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
VENV_JAX := .venv-jax
JAX_PACKAGES := jax==0.10.2 jaxlib==0.10.2 diffrax==0.7.2 numpy

.PHONY: demo test test-all check-records fuzz lint bench bench-full report clean

demo: $(VENV)/dev.stamp
	$(RUN) -m examples.demo

test: $(VENV)/dev.stamp
	$(RUN) -m pytest

test-all: $(VENV)/bench.stamp
	$(RUN) -m pytest -m ""

# What the committed records must show; `make test` runs these too.
check-records: $(VENV)/dev.stamp
	$(RUN) -m pytest tests/records

fuzz: $(VENV)/dev.stamp
	$(RUN) -m tests.fuzz --cases 10000

lint: $(VENV)/dev.stamp
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m basedpyright

# Without the environment of jax (make .venv-jax) the rows of diffrax are left out.
bench: $(VENV)/bench.stamp
	$(RUN) -m benchmarks

bench-full: $(VENV)/bench.stamp $(VENV_JAX)
	$(RUN) -m benchmarks --full

report: $(VENV)/dev.stamp
	$(RUN) -m experiments report

clean:
	rm -rf $(VENV) $(VENV_JAX) build dist *.egg-info demo .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and by its exact version: a range would let pip take a build with gigabytes of CUDA.
$(VENV)/torch.stamp: constraints.txt | $(VENV)/bin/python
	$(INSTALL) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt $(VENV)/torch.stamp
	$(INSTALL) -e ".[dev]"
	touch $@

$(VENV)/bench.stamp: $(VENV)/dev.stamp
	$(INSTALL) -e ".[bench]"
	touch $@

# jax and torch do not share an environment: the suite starts a worker process in each.
$(VENV_JAX):
	$(PYTHON) -m venv $@.new
	$@.new/bin/python -m pip install --quiet --disable-pip-version-check $(JAX_PACKAGES)
	mv $@.new $@
