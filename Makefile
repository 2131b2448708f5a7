# Every target sets up what it needs in .venv, once; the stamps .venv/with-* remember it.
PYTHON ?= python3
NOTEBOOKS ?= $(sort $(wildcard notebooks/*.py))

venv := .venv
python := $(venv)/bin/python
pip := $(python) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
nbval := --nbval --nbval-current-env --nbval-cell-timeout=300 --nbval-sanitize-with=tests/nbval_sanitize.cfg

.PHONY: help demo test sanitize lab check check-format check-lint check-types check-pairs execute golden parity clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:  ## list the targets
	@echo "Needed: Python 3.11 or newer, make, and a package registry. PYTHON=... chooses the interpreter."
	@sed -n 's/^\([a-z]*\):.*##\(.*\)/  make \1 \2/p' Makefile | awk '{ printf "  %s %-8s", $$1, $$2; $$1 = $$2 = ""; print }'

demo: $(venv)/with-package  ## verify the golden files, generate with every decoder, draw one figure
	$(python) -m kdtree_nb demo

test: $(venv)/with-test  ## run the tests, and every notebook against its stored outputs
	$(python) -m pytest -n 2 --dist loadfile $(nbval) tests notebooks

sanitize: $(venv)/with-test  ## run the kernels' tests in the emulator, with address and undefined-behaviour sanitizers
	$(python) -m kdtree_nb.kernels.emulator.sanitize -m pytest -q -n 2 --dist loadfile tests/kernels tests/test_emulator.py \
	    --ignore=tests/kernels/test_resources.py

lab: $(venv)/with-notebooks  ## open JupyterLab on the notebooks
	$(python) -m jupyterlab notebooks

check: check-format check-lint check-types check-pairs  ## format, lint, types, notebooks against their scripts

check-format: $(venv)/with-test
	$(python) -m ruff format --check .

check-lint: $(venv)/with-test
	$(python) -m ruff check .

check-types: $(venv)/with-test
	$(python) -m mypy

check-pairs: $(venv)/with-test
	$(python) tests/check_pairs.py notebooks

execute: $(venv)/with-notebooks  ## bring scripts into notebooks and run those (one: NOTEBOOKS=notebooks/NAME.py)
	@for script in $(NOTEBOOKS); do \
	    echo "Executing $$script" && \
	    $(python) -m jupytext --quiet --update --to ipynb "$$script" && \
	    $(python) -m nbconvert --log-level WARN --to notebook --execute --inplace \
	        --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False \
	        "$${script%.py}.ipynb" || exit 1; \
	done

golden: $(venv)/with-parity  ## make what golden/ expects anew (needs torch; does not train)
	@for script in golden/make_*.py; do \
	    echo "Running $$script" && $(python) -m "golden.$$(basename "$$script" .py)" || exit 1; \
	done

parity: $(venv)/with-parity  ## compare the reference with Hugging Face transformers, live (needs torch)
	$(python) -m pytest tests/parity

clean:  ## remove .venv and the caches
	rm -rf $(venv) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find kdtree_nb golden tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

$(python):
	@for candidate in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Creating $(venv) with $$("$$candidate" --version)"; \
	        "$$candidate" -m venv --clear $(venv) && $(pip) --upgrade pip && exit 0; \
	        rm -rf $(venv); \
	        exit 1; \
	    fi; \
	done; \
	echo "kdtree_nb needs Python 3.11 or newer; '$(PYTHON)' is older or missing. Try: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

install = @echo "Installing $(1) into $(venv), with the versions of constraints.txt"; \
	$(pip) --editable '$(1)' && touch $@

$(venv)/with-package: pyproject.toml constraints.txt $(python)
	$(call install,.)

$(venv)/with-%: pyproject.toml constraints.txt $(python)
	$(call install,.[$*])

# torch joins what the tests have.
$(venv)/with-parity: $(venv)/with-test
