# Everything starts from a bare checkout: `make probe` and `make test` make their own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 4
INSTALLED := $(VENV)/.installed

# Some images set them. The tests start hundreds of interpreters, each of which would compile the package anew, and a
# line that is printed without a buffer is two writes, between which another rank's line may come.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

# The versions of torch for which `make wheels` builds the emulated device.
TORCH ?= 2.10.0 2.11.0 2.12.0 2.13.0

.PHONY: probe check test test-all lint unit bench dist wheels docs clean

probe: $(INSTALLED)
	$(BIN)/fsdp-doctor probe --format table

# What needs no other process; `test` is the first tier of everything, `test-all` the second.
check: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

unit: $(INSTALLED)
	$(BIN)/python -m pytest --quiet -m "not processes"

# Much of it waits, for deadlines and for ranks to start, so there are more workers than cores. The tests of a file share ranks.
# A test that waits for what never comes fails in the end, and says where it waits.
RUN_TESTS = $(BIN)/python -m pytest --timeout=2400 --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=25

# The first tier: what a change needs to be trusted.
test: $(INSTALLED) lint
	$(RUN_TESTS) -m "not second_tier and not alone"

# The second tier: whole matrices and suites, every script, frozen commands, and what is timed alone.
test-all: $(INSTALLED)
	$(RUN_TESTS) -m "second_tier and not alone"
	$(BIN)/python -m pytest -m alone --timeout=600

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/emulated.py
	$(BIN)/python benchmarks/emulated_training.py

# The emulated device, compiled for this Python and each torch: where such a wheel is installed, nothing is compiled.
wheels:
	for version in $(TORCH); do \
		$(PYTHON) -m venv build/torch-$$version && \
		build/torch-$$version/bin/python -m pip install --quiet --disable-pip-version-check torch==$$version packaging && \
		build/torch-$$version/bin/python -m fsdp_doctor.emulated.build --wheel dist || exit 1; \
	done

# A wheel, built from the source distribution that is built first.
dist: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dist]'
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# The documentation as a site, in build/site. A page that is not in the navigation, and a link that leads nowhere, is an error.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info

# torch first and by its exact version: an index may hold a build without CUDA under that name,
# and nothing that is installed later replaces it. Where there is a C++ compiler, the emulated device is built here and
# not in the first test that uses it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lora,frameworks-test,quantization-test]'
	-$(BIN)/python -c 'import fsdp_doctor.emulated'
	touch $@
