# Two commands for newcomers: make demo, make test. Everything else is for those who work on it.
# All paths are relative, so that a checkout may live in a folder with spaces in its name.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint format lock clean help

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/'

demo: $(VENV)/installed  ## Train a small MoE and a dense model, evaluate and draw both
	$(RUN) -m moe_jax.train --config configs/demo.py --workdir runs/demo
	$(RUN) -m moe_jax.evaluate --workdir runs/demo

test: $(VENV)/installed  ## Run all tests that need no accelerator's compiler or interpreter
	$(RUN) -m pytest -q -n 2 --dist worksteal -m "not interpreted and not compiler and not benchmarks" tests

lint: $(VENV)/installed  ## Check style
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/installed  ## Bring the code into shape
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

lock: $(VENV)/installed  ## Make requirements.lock anew, for every supported Python
	$(RUN) -m pip install --quiet uv
	$(RUN) -m uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra test \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	    setup.cfg --output-file requirements.lock

clean:  ## Remove the virtual environment and all runs
	rm -rf $(VENV) runs build *.egg-info

# The file is written last: an installation that was interrupted is done again.
$(VENV)/installed: requirements.lock setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: $(PYTHON) is `$(PYTHON) --version 2>&1`; allowed: Python >= 3.11" \
	        "(make PYTHON=python3.12 ...)" >&2; exit 1; }
	@echo "setting up $(VENV) (a few minutes, about 2 GB)"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(VENV)/installed
